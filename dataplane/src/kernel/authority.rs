//! Who holds the gate: the endpoint itself, or the admission daemon of its host, which is asked for what the gate and its sockets
//! need privileges for. What it gave is used without it.

use std::cell::Cell;
use std::os::fd::OwnedFd;

use lm_ebpf::{Counters, Gate, Log, Role};
use lm_protocol::landing::SessionAdmission;

use crate::daemon::ipc::{Call, Channel, Reply, Role as Asked};
use crate::daemon::{Daemon, DaemonError};
use crate::port::PortError;
use crate::xsk::{Rings, Xsk, XskConfig};

/// Who holds the gate.
pub(super) enum Authority {
    Own(Box<Gate>),
    Daemon(Box<Steward>),
}

/// The daemon, as a NIC's channels and sessions need it.
pub(super) struct Steward {
    pub(super) daemon: Daemon,
    /// The gate is in the network stack.
    pub(super) generic: bool,
    /// Without a log nothing says that the data socket has something.
    looks: Cell<u64>,
}

impl Steward {
    pub(super) fn new(daemon: Daemon, generic: bool) -> Steward {
        Steward {
            daemon,
            generic,
            looks: Cell::new(0),
        }
    }

    /// Has the daemon open a channel, and takes it over.
    pub(super) fn open_channel(
        &mut self,
        config: &XskConfig<'_>,
        multi_buffer: bool,
        role: Role,
    ) -> Result<(Xsk, Rings, Option<Log>), PortError> {
        let memory = config
            .mapping
            .file()
            .ok_or(DaemonError::Nonsense("private memory"))?;
        let call = Call::OpenChannel(Channel {
            queue: config.queue as u16,
            role: match role {
                Role::None => Asked::Transmit,
                role if role.lands() => Asked::Landing,
                _ => Asked::General,
            },
            registered_len: config.registered_len,
            chunk_len: config.chunk_len,
            multi_buffer,
            ring_lens: [
                config.fill_len,
                config.rx_len,
                config.tx_len,
                config.completion_len,
            ],
        });
        let (reply, beside) = self.daemon.client().insist(&call, &[memory])?;
        let Reply::ChannelOpened { .. } = reply else {
            return Err(DaemonError::Nonsense("no channel").into());
        };
        let mut beside = beside.into_iter();
        let lacks = || DaemonError::Nonsense("a channel without its descriptors");
        let xsk: OwnedFd = beside.next().ok_or_else(lacks)?;
        let (xsk, rings) = Xsk::adopt(xsk, config)?;
        if xsk.zero_copy() {
            return Err(DaemonError::Nonsense("zero-copy mode").into());
        }
        let log = match role {
            Role::None => None,
            _ => {
                let map = beside.next().ok_or_else(lacks)?;
                let log = Log::of_map(std::os::fd::AsFd::as_fd(&map));
                Some(log.map_err(|_| DaemonError::Nonsense("a log that is none"))?)
            }
        };
        Ok((xsk, rings, log))
    }

    pub(super) fn open_session(&mut self, session: &SessionAdmission) -> Result<(), PortError> {
        let mut client = self.daemon.client();
        if !client.is_open(session.key) {
            // The daemon has closed it.
            return Ok(());
        }
        let call = Call::OpenGate {
            session_key: session.key,
            first_message: session.first_message,
        };
        Ok(client.insist(&call, &[]).map(drop)?)
    }

    /// Closes the gate, if the daemon has not done so when the session ended.
    pub(super) fn close_session(&mut self, row: u32) -> Result<(), PortError> {
        let mut client = self.daemon.client();
        match client.open_at(row) {
            Some(session_key) => Ok(client.insist(&Call::CloseGate { session_key }, &[]).map(drop)?),
            None => Ok(()),
        }
    }

    pub(super) fn quiesce(&mut self, queue: u32) -> Result<(), PortError> {
        let queue = queue as u16;
        Ok(self
            .daemon
            .client()
            .insist(&Call::Quiesce { queue }, &[])
            .map(drop)?)
    }

    pub(super) fn close_channel(&mut self, queue: u32) -> Result<(), PortError> {
        let queue = queue as u16;
        Ok(self.daemon.client().done(Call::CloseChannel { queue }, &[])?)
    }

    /// As [`Port::passed_count`](crate::port::Port::passed_count): of our own queues, and what came for us on others.
    pub(super) fn passed_count<'a>(&self, logs: impl Iterator<Item = &'a Log>) -> u64 {
        let mut any = false;
        let count = logs.inspect(|_| any = true).fold(0u64, |sum, log| {
            sum.wrapping_add(log.passed())
                .wrapping_add(log.passed_elsewhere())
        });
        if any {
            return count;
        }
        self.looks.set(self.looks.get() + 1);
        self.looks.get()
    }

    /// What the gate counted on our own queues.
    pub(super) fn counters<'a>(logs: impl Iterator<Item = &'a Log>) -> Counters {
        logs.fold(Counters::default(), |sum, log| sum.plus(&log.counters()))
    }
}
