//! Opening an endpoint on an interface of the kernel's: which mode it can have there, then memory, gate, channels and steering.

use std::net::Ipv4Addr;
use std::path::Path;

use lm_cards::{
    Demand, Facts, Interface, JournalError, Obstacle, Shaping, ShapingError, chunk_len_for, judge,
    rx_ring_len,
};
use lm_protocol::geometry::MIN_MTU;
use lm_protocol::session::Admit;

use crate::bounds::PREFIX_LEN_MAX;
use crate::config::{EndpointConfig, LinkConfig};
use crate::endpoint::Endpoint;
use crate::error::OpenError;
use crate::kernel::{KernelNic, KernelNicConfig};
use crate::memory::HugePages;
use crate::open_daemon::daemon_for;
use crate::opening::MemoryPlan;
use crate::over::{Device, Opened, PortMemory, Shape, everybody, reserve};
use crate::port::{Caps, EffectiveMode, ModeRequest, Port};

/// Packets on the way to a veth device: its ring has 256 entries.
const ON_THE_WAY_VETH: u32 = 192;

impl Endpoint {
    /// Opens an endpoint that admits every sender for messages up to `config.receive.max_message_len`.
    ///
    /// # Errors
    /// [`OpenError`]; nothing stays attached.
    pub fn open(config: &EndpointConfig) -> Result<Endpoint, OpenError> {
        Endpoint::open_with(config, Box::new(everybody(config)))
    }

    /// Opens an endpoint that asks `admit` about every sender.
    ///
    /// # Errors
    /// [`OpenError`]; nothing stays attached.
    pub fn open_with(config: &EndpointConfig, admit: Box<dyn Admit + Send>) -> Result<Endpoint, OpenError> {
        let daemon = daemon_for(config)?;
        if let Some(client) = daemon {
            let unplaced = EndpointConfig {
                link: LinkConfig {
                    queue: None,
                    ..config.clone().link
                },
                ..config.clone()
            };
            let mut site = Site::look(&unplaced)?;
            let opened = Opened::by_daemon(config, client, &mut site)?;
            return opened.into_endpoint(site.device, &site.shape, site.warnings, admit);
        }
        let mut site = Site::look(config)?;
        // What a real-time program left that was killed would hold the kernel's packets back for ever.
        match Shaping::recover(&site.interface) {
            Ok(_) | Err(ShapingError::Journal(JournalError::InUse { .. })) => {}
            Err(error) => site.warnings.push(error.to_string()),
        }
        let opened = match config.link.mode {
            ModeRequest::ZeroCopy => Opened::zero_copy(config, &site)?,
            ModeRequest::Copy | ModeRequest::Generic => Opened::copy(config, &mut site)?,
            ModeRequest::Auto if !site.may_have_zero_copy() => Opened::copy(config, &mut site)?,
            ModeRequest::Auto => match Opened::zero_copy(config, &site) {
                Ok(opened) => opened,
                Err(error) => {
                    site.warnings.push(format!("no zero-copy mode: {error}"));
                    Opened::copy(config, &mut site)?
                }
            },
        };
        site.warnings.extend_from_slice(opened.port.warnings());
        opened.into_endpoint(site.device, &site.shape, site.warnings, admit)
    }
}

/// Where an endpoint is to be opened.
pub(crate) struct Site {
    pub(crate) interface: Interface,
    /// It, in copy mode.
    pub(crate) device: Device,
    pub(crate) shape: Shape,
    veth: bool,
    warnings: Vec<String>,
}

impl Site {
    fn look(config: &EndpointConfig) -> Result<Site, OpenError> {
        let interface = Interface::by_name(&config.interface)?;
        interface.check(u32::from(MIN_MTU))?;
        let veth = interface.kind.as_deref() == Some("veth") || interface.driver.as_deref() == Some("veth");
        let mut device = Device {
            name: interface.name.clone(),
            mac: interface.mac,
            mtu: interface.mtu,
            queues: interface.rx_queues,
            rx_ring_len: rx_ring_len(&interface),
            chunk_len: 0,
            caps: Caps {
                tx_bound: if veth { ON_THE_WAY_VETH } else { 0 },
                tx_steers: veth,
                // What the device cannot, the kernel does (`validate_xmit_skb`, net/core/dev.c).
                sums: true,
                ..Caps::copying(0)
            },
        };
        let (shape, mut warnings) = Shape::new(config, &device)?;
        device.chunk_len = chunk_len_for(None, u32::from(shape.mtu));
        if crate::route::default_route_interfaces().is_ok_and(|found| found.contains(&interface.index)) {
            warnings.push(format!(
                "{} carries the default route: attaching an XDP program may interrupt its link for a moment",
                interface.name
            ));
        }
        Ok(Site {
            interface,
            device,
            shape,
            veth,
            warnings,
        })
    }

    pub(crate) fn local_ip(&self) -> Ipv4Addr {
        let address = self.interface.primary_address();
        address.expect("checked: the interface has an IPv4 address")
    }

    /// Memory of an endpoint in copy mode.
    pub(crate) fn plan(&self, config: &EndpointConfig) -> Result<MemoryPlan, OpenError> {
        MemoryPlan::new(
            config,
            &self.shape.layout,
            self.device.chunk_len,
            self.device.caps,
        )
    }

    /// What the kernel's port is opened with.
    pub(crate) fn nic_config<'a>(
        &'a self,
        config: &EndpointConfig,
        memory: PortMemory<'a>,
        mode: ModeRequest,
    ) -> KernelNicConfig<'a> {
        KernelNicConfig {
            interface_index: self.interface.index,
            local_ip: self.local_ip(),
            port: config.port,
            mode,
            mapping: memory.mapping,
            chunk_len: memory.chunk_len,
            multi_buffer: memory.multi_buffer,
            tx_metadata_len: memory.tx_metadata_len,
            poll_queues: self.veth,
        }
    }

    /// Whether it is worth asking: most virtual devices have none, which is no news.
    fn may_have_zero_copy(&self) -> bool {
        Facts::read(&self.interface).is_ok_and(|facts| facts.xdp.is_some_and(|features| features.zero_copy()))
    }
}

impl Opened<KernelNic> {
    /// In copy mode.
    fn copy(config: &EndpointConfig, site: &mut Site) -> Result<Opened<KernelNic>, OpenError> {
        let plan = site.plan(config)?;
        let mut opened = Opened::open(config.clone(), plan, site)?;
        let queues = site.shape.queues;
        if !site.veth
            && opened.port.effective_mode() == EffectiveMode::CopyNative
            && let (Some(_), Some(landing)) = (queues.general, queues.landing)
            && let Err(error) = opened.port.begin_steering(&site.interface, &[landing])
        {
            site.warnings.push(format!(
                "fragments may come to another queue than {landing}, and are copied once more there: {error}"
            ));
        }
        Ok(opened)
    }

    /// In zero-copy mode, or not at all.
    fn zero_copy(config: &EndpointConfig, site: &Site) -> Result<Opened<KernelNic>, OpenError> {
        let queues = site.shape.queues;
        let lands = queues.landing.is_some();
        let facts = Facts::read(&site.interface).map_err(OpenError::System)?;
        let chunk_len = chunk_len_for(facts.driver.as_deref(), u32::from(site.shape.mtu));
        let caps = Caps {
            // What it writes beside packets shows before the first session ([`Probe`]).
            prefix_len: PREFIX_LEN_MAX,
            kept_frames: 2 * facts.rx_ring_len,
            lap: facts.landing_lap(),
            sums: facts.xdp.is_some_and(|features| features.sums()),
            ..Caps::device()
        };
        let plan = MemoryPlan::new(config, &site.shape.layout, chunk_len, caps)?;
        let demand = Demand {
            chunk_len,
            memory_len: plan.registered_len(),
        };
        let matters = |obstacle: &Obstacle| match obstacle {
            // It is switched off.
            Obstacle::RelaxedOrdering { .. } => false,
            // A sender's memory is read alone, and what it receives there does not overlap.
            Obstacle::OneQueue { .. } | Obstacle::FcsKept { .. } => lands,
            obstacle => obstacle.forbids_zero_copy(),
        };
        if let Some(obstacle) = judge(&facts, &demand).into_iter().find(matters) {
            return Err(OpenError::NoZeroCopy(obstacle));
        }
        if lands && queues.general.is_none() {
            return Err(OpenError::NoZeroCopy(Obstacle::OneQueue {
                interface: site.interface.name.clone(),
            }));
        }
        let mut opened = Opened::open(config.clone(), plan, site)?;
        if opened.port.effective_mode() != EffectiveMode::ZeroCopy {
            return Err(OpenError::NoZeroCopy(Obstacle::NoZeroCopy {
                interface: site.interface.name.clone(),
                driver: facts.driver.unwrap_or_else(|| "unknown".into()),
            }));
        }
        // A module that is part of the kernel has no such file.
        let is_module = Path::new("/sys/module/virtio_net/initstate").exists();
        if facts.driver.as_deref() == Some("virtio_net") && is_module {
            tracing::warn!(
                "virtio_net is a loaded module, so that a fault of Linux 6.13 to 7.3 can make it lose all that is \
                 sent in zero-copy mode; if nothing arrives, use copy mode (--mode copy)"
            );
        }
        let steered = opened
            .port
            .begin_steering(&site.interface, queues.landing.as_slice());
        if lands {
            steered.map_err(|error| OpenError::Port(error.into()))?;
        }
        Ok(opened)
    }

    fn open(config: EndpointConfig, plan: MemoryPlan, site: &Site) -> Result<Opened<KernelNic>, OpenError> {
        let (mode, pages) = match plan.device_moves {
            true => (ModeRequest::ZeroCopy, HugePages::On),
            false => (config.link.mode, HugePages::Auto),
        };
        let umem = reserve(&config, &plan, pages)?;
        let nic = KernelNic::open(&site.nic_config(&config, plan.port_memory(&umem), mode))?;
        Opened::assemble(config, plan, umem, nic, &site.shape)
    }
}
