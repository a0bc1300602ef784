//! Opening an endpoint without privileges, by the admission daemon of this host: queues, sockets and logs come from it.

use std::path::{Path, PathBuf};

use crate::checksum::Checksum;
use crate::config::{Admission, EndpointConfig};
use crate::daemon::ipc::{Call, Joined, Mode, Offer, SOCKET_PATH};
use crate::daemon::{Client, Daemon, DaemonError};
use crate::error::OpenError;
use crate::kernel::KernelNic;
use crate::memory::Umem;
use crate::open::Site;
use crate::opening::Queues;
use crate::over::Opened;
use crate::port::ModeRequest;
use crate::terms::WINDOW_FRAGMENTS_MAX;
use crate::udp::UdpPair;

/// Names the daemon's socket, where it is not at [`SOCKET_PATH`].
const SOCKET_VARIABLE: &str = "LM_ADMISSION_SOCKET";

/// A connection to the daemon that `config` asks for; `None`: the endpoint holds its gate itself.
///
/// # Errors
/// A daemon that was asked for by path and cannot be used, or one that is there and cannot be used.
pub(crate) fn daemon_for(config: &EndpointConfig) -> Result<Option<Client>, OpenError> {
    match &config.admission.by {
        Admission::Embedded => Ok(None),
        Admission::Daemon(_) if config.admission.key.is_some() => Err(OpenError::Config(
            "the admission daemon has the cluster's key itself: leave the key out, or admit embedded"
                .to_owned(),
        )),
        Admission::Auto if config.admission.key.is_some() => Ok(None),
        Admission::Daemon(path) => Ok(Some(Client::connect(path)?)),
        Admission::Auto => {
            let named = std::env::var_os(SOCKET_VARIABLE).map(PathBuf::from);
            match Client::connect(named.as_deref().unwrap_or(Path::new(SOCKET_PATH))) {
                Ok(client) => Ok(Some(client)),
                // Who names a socket wants that daemon.
                Err(DaemonError::Absent { .. }) if named.is_none() => Ok(None),
                Err(error) => Err(error.into()),
            }
        }
    }
}

impl Opened<KernelNic> {
    /// In copy mode, by the daemon, on the queues that it gives, which `site` names from then on.
    pub(crate) fn by_daemon(
        config: &EndpointConfig,
        mut client: Client,
        site: &mut Site,
    ) -> Result<Opened<KernelNic>, OpenError> {
        let local_ip = site.local_ip();
        let udp = UdpPair::bind_data(local_ip, config.port).map_err(crate::port::PortError::from)?;
        let mode = match config.link.mode {
            ModeRequest::Auto => Mode::Auto,
            ModeRequest::ZeroCopy => Mode::ZeroCopy,
            ModeRequest::Copy => Mode::Copy,
            ModeRequest::Generic => Mode::Generic,
        };
        let lands = config.memory.landing_len > 0;
        let joined = client.join(
            &site.interface.name,
            lands,
            mode,
            udp.fd(crate::port::Socket::Data),
        )?;
        if joined.interface_index != site.interface.index {
            return Err(OpenError::Config(format!(
                "the admission daemon has another {} than this program: run both in one network namespace",
                site.interface.name
            )));
        }
        if config.link.checksum == Checksum::Offload {
            return Err(OpenError::Config(
                "the admission daemon opens sockets that have nothing summed up; use --checksum integrated, or \
                 --admission embedded"
                    .to_owned(),
            ));
        }
        site.shape.queues = queues_of(&joined, lands)?;
        let plan = site.plan(config)?;
        let umem = Umem::shared(plan.total_len()).map_err(|source| OpenError::Memory {
            len: plan.total_len(),
            source,
        })?;
        let daemon = Daemon::new(client);
        let nic = KernelNic::joined(
            &site.nic_config(config, plan.port_memory(&umem), ModeRequest::Copy),
            daemon.clone(),
            &joined,
            udp,
        );
        let offer = joined.landing_queue.map(|queue| Offer {
            queue,
            mtu: site.shape.mtu,
            chunk_len: plan.chunk_len,
            max_message_len: config.receive.max_message_len,
            window_max: WINDOW_FRAGMENTS_MAX,
            allow: config.admission.allow.clone(),
        });
        let mut opened = Opened::assemble(config.clone(), plan, umem, nic, &site.shape)?;
        if let Some(offer) = offer {
            daemon.client().done(Call::Receive(offer), &[])?;
        }
        opened.daemon = Some(daemon);
        Ok(opened)
    }
}

fn queues_of(joined: &Joined, lands: bool) -> Result<Queues, OpenError> {
    let queues = Queues {
        general: joined.general_queue.map(u32::from),
        landing: joined.landing_queue.map(u32::from),
    };
    let is_absurd = queues.landing.is_some() != lands
        || queues.general == queues.landing
        || (queues.general.is_none() && queues.landing.is_none());
    match is_absurd {
        true => Err(DaemonError::Nonsense("queues that were not asked for").into()),
        false => Ok(queues),
    }
}
