//! The loaded gate: its roles, sockets and sessions.
//!
//! Who holds a [`Gate`] decides what may land (I6): the sessions are in a map of its own. A channel's client gets that
//! channel's [`Log`] and nothing else.

mod pins;
mod quiesce;

use std::fmt;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use lm_cards::Interface;
use lm_protocol::landing::SessionAdmission;

use aya::maps::{Array, HashMap, IterableMap, Map, MapData, MapError, XskMap};

use crate::CreditPage;
use crate::attach::{self, AttachError, AttachMode, Attached, EffectiveMode, GateConfig};
use crate::layout::{ChannelRow, LogMap, QUEUES, SESSIONS, STRAY_ROW, SessionRow};
use crate::log::Log;
use crate::role::Role;
use crate::shared::SharedMemory;
use crate::sys;
use crate::verdict::{Counters, Verdict};
pub use pins::{remove_defunct_pins, remove_pins};
use quiesce::Progress;
pub use quiesce::{Quiesce, Quiet};

const BPF_F_MMAPABLE: u32 = 1 << 10;
const CHANNELS_LEN: usize = (STRAY_ROW as usize + 1) * size_of::<ChannelRow>();
const SESSIONS_LEN: usize = (QUEUES * SESSIONS) as usize * size_of::<SessionRow>();

type LogArray = Array<MapData, LogMap>;

/// A channel's log. What programs are handed is mapped for writing here as long as the gate has it: the kernel freezes
/// no such map (kernel/bpf/syscall.c, `map_freeze`).
struct ChannelLog {
    map: LogArray,
    /// None: frozen while no process had the gate. Its counters are lost.
    mapping: Option<Log>,
}

impl ChannelLog {
    fn create() -> Result<ChannelLog, GateError> {
        let mut log = ChannelLog {
            map: LogArray::create(1, BPF_F_MMAPABLE)?,
            mapping: None,
        };
        log.mapping = Some(Log::of_map(log.fd())?);
        Ok(log)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        IterableMap::map(&self.map).fd().as_fd()
    }
}

/// Why an operation on an attached gate failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// A queue number that the gate's maps do not hold.
    #[error("queue {0} is beyond the gate's 64 queues")]
    NoQueue(u32),
    /// The queue has no role, so it has no log.
    #[error("queue {0} has no role")]
    NoRole(u32),
    /// Sessions need a landing queue.
    #[error("queue {0} is not a landing queue")]
    NotLanding(u32),
    /// The row has an open session.
    #[error("queue {queue} has an open session at row {row}")]
    Open {
        /// Landing queue.
        queue: u32,
        /// Place of the session.
        row: u32,
    },
    /// In generic mode two CPUs at once could run the gate for a queue: log and RX ring would not pair (118 to 163 of
    /// 400,000 entries, measured; I3a).
    #[error("nothing can land in generic mode: attach the gate in native mode (--mode copy)")]
    Generic,
    /// The admission contradicts itself.
    #[error("illegal session: {0}")]
    IllegalSession(&'static str),
    /// A port by queue, in a gate that was loaded with one port for all.
    #[error("the gate was loaded for one program, which has one data port")]
    OnePort,
    /// The log's program froze it.
    #[error("the program of queue {0} froze its log, and nothing lands there any more: end it")]
    Frozen(u32),
    /// Somebody waits for the queue already.
    #[error("queue {0} is being waited for: finish that first")]
    Quiescing(u32),
    /// A map operation failed.
    #[error("cannot change the gate's maps: {0}")]
    Map(#[from] MapError),
    /// A mapping failed.
    #[error("cannot map the gate's memory: {0}")]
    System(#[from] io::Error),
}

/// A session that may land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenSession {
    /// Its landing queue.
    pub queue: u32,
    /// Its row there.
    pub row: u32,
    /// Its key.
    pub key: u64,
    /// When it stops landing by itself; 0: never.
    pub active_until_ns: u64,
}

/// An attached gate. Dropping it, or the death of the process, detaches it, unless it is pinned ([`Gate::pin`]).
pub struct Gate {
    // First: detached before anything else goes.
    link: OwnedFd,
    program: OwnedFd,
    channels: SharedMemory,
    sessions: SharedMemory,
    /// By queue: rows whose session was closed, with a CPU perhaps still inside the gate.
    closing: [u64; QUEUES as usize],
    progress: Progress,
    xsks: XskMap<MapData>,
    logs_fd: OwnedFd,
    ports: HashMap<MapData, u16, u32>,
    channel_logs: Vec<Option<ChannelLog>>,
    /// What [`Gate::credits`] made or found: mapped for the same reason.
    credits: Option<(OwnedFd, CreditPage)>,
    /// What logs counted that were replaced.
    retired: Counters,
    mode: EffectiveMode,
    interface: String,
    /// Rows that its packets count in, but the last.
    queues: u32,
    config: GateConfig,
    warnings: Vec<String>,
    /// Where it is pinned.
    pins: Option<PathBuf>,
    /// To pin them: [`pins::MAPS`].
    maps: [OwnedFd; 5],
}

impl fmt::Debug for ChannelLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChannelLog").finish_non_exhaustive()
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("interface", &self.interface)
            .field("mode", &self.mode)
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

impl Gate {
    /// Loads the gate and attaches it to an interface of this thread's network namespace.
    pub fn attach(ifindex: u32, config: &GateConfig, mode: AttachMode) -> Result<Gate, AttachError> {
        let Attached {
            ebpf,
            link,
            mode,
            interface,
            warnings,
        } = attach::attach(ifindex, config, mode)?;
        let program = attach::program(&ebpf)?.try_clone_to_owned()?;
        let mut fds = Vec::new();
        for name in pins::MAPS {
            let map = ebpf.map(name).and_then(|map| match map {
                Map::Array(map) | Map::XskMap(map) | Map::ArrayOfMaps(map) | Map::HashMap(map) => Some(map),
                _ => None,
            });
            fds.push(
                map.ok_or_else(|| missing(name))?
                    .fd()
                    .as_fd()
                    .try_clone_to_owned()?,
            );
        }
        let maps: [OwnedFd; 5] = fds.try_into().expect("as many as names");
        let mut gate = Gate::over((link, program), maps, mode, interface, config)?;
        gate.warnings = warnings;
        if !config.several_programs {
            (0..=STRAY_ROW).for_each(|row| gate.store_port(row, config.data_port));
        }
        Ok(gate)
    }

    /// A gate that is attached, with its maps ([`pins::MAPS`]).
    fn over(
        (link, program): (OwnedFd, OwnedFd),
        maps: [OwnedFd; 5],
        mode: EffectiveMode,
        interface: Interface,
        config: &GateConfig,
    ) -> Result<Gate, AttachError> {
        let [channels, sessions, xsks, logs, ports] = &maps;
        let gate = Gate {
            link,
            program,
            channels: SharedMemory::of_map(channels.as_fd(), CHANNELS_LEN)?,
            sessions: SharedMemory::of_map(sessions.as_fd(), SESSIONS_LEN)?,
            closing: [0; QUEUES as usize],
            progress: Progress::default(),
            xsks: typed(xsks.try_clone()?)?,
            logs_fd: logs.try_clone()?,
            ports: typed(ports.try_clone()?)?,
            channel_logs: (0..QUEUES).map(|_| None).collect(),
            credits: None,
            retired: Counters::default(),
            mode,
            interface: interface.name,
            queues: interface.rx_queues_max.min(QUEUES),
            config: config.clone(),
            warnings: Vec::new(),
            pins: None,
            maps,
        };
        gate.store_mac(interface.mac);
        Ok(gate)
    }

    /// The mode that the kernel granted.
    pub fn mode(&self) -> EffectiveMode {
        self.mode
    }

    /// Things that the user should know, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Name of the interface at the time of attaching.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Lets the gate redirect packets of `queue` to this XSK, which must be bound to the same queue.
    pub fn register_xsk(&mut self, queue: u32, xsk: BorrowedFd<'_>) -> Result<(), GateError> {
        check(queue)?;
        Ok(self.xsks.set(queue, xsk.as_raw_fd(), 0)?)
    }

    /// Forgets the XSK of `queue`; no error if there is none. Closing the XSK does the same.
    pub fn unregister_xsk(&mut self, queue: u32) -> Result<(), GateError> {
        check(queue)?;
        match self.xsks.unset(queue) {
            Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(())
            }
            Err(MapError::KeyNotFound) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Says what a queue is for. Its first role makes the channel's log (half a megabyte); an open session is closed.
    pub fn set_role(&mut self, queue: u32, role: Role) -> Result<(), GateError> {
        check(queue)?;
        if role != Role::None && self.needs_log(queue) {
            self.renew(queue)?;
        }
        if (0..SESSIONS).any(|row| self.is_open(queue, row)) {
            (0..SESSIONS).try_for_each(|row| self.close_session(queue, row))?;
            self.quiesce(queue)?;
        }
        self.store_role(queue, role);
        if self.config.several_programs {
            self.assign_port(self.data_port(queue))?;
        }
        Ok(())
    }

    fn store_role(&self, queue: u32, role: Role) {
        // Relaxed: the log was published by a system call.
        self.channels.store_u32(
            channel_offset(queue) + offset_of!(ChannelRow, role),
            role as u32,
            Ordering::Relaxed,
        );
    }

    /// Says whose packets are expected on `queue`, where several programs use the gate: those to this UDP port; 0:
    /// nobody's. A program that has several queues has the same port on all of them. What comes for it on others passes
    /// to its socket, and is told in the log of its lowest queue ([`Log::passed_elsewhere`]).
    ///
    /// # Errors
    /// [`GateError::NoQueue`], [`GateError::OnePort`] where the gate was loaded for one program, or a map that cannot
    /// be changed.
    pub fn set_data_port(&mut self, queue: u32, data_port: u16) -> Result<(), GateError> {
        check(queue)?;
        if !self.config.several_programs {
            return match data_port {
                0 => Ok(()),
                _ => Err(GateError::OnePort),
            };
        }
        let old = self.data_port(queue);
        self.store_port(queue, data_port);
        self.assign_port(old)?;
        self.assign_port(data_port)
    }

    /// The port of [`Gate::set_data_port`].
    pub fn data_port(&self, queue: u32) -> u16 {
        let at = channel_offset(queue.min(STRAY_ROW)) + offset_of!(ChannelRow, data_port);
        let bytes = self.channels.load_u32(at, Ordering::Relaxed).to_ne_bytes();
        u16::from_be_bytes([bytes[0], bytes[1]])
    }

    fn store_port(&self, row: u32, data_port: u16) {
        let [high, low] = data_port.to_be_bytes();
        let at = channel_offset(row) + offset_of!(ChannelRow, data_port);
        // Relaxed: one number, which guards nothing.
        (self.channels).store_u32(at, u32::from_ne_bytes([high, low, 0, 0]), Ordering::Relaxed);
    }

    /// Says what the interface's address is. One that it gets later is the kernel's alone, until the gate is attached
    /// or taken over anew.
    fn store_mac(&self, [a, b, c, d, e, f]: [u8; 6]) {
        for row in 0..=STRAY_ROW {
            let at = channel_offset(row) + offset_of!(ChannelRow, mac);
            for (at, part) in [(at, [a, b, c, d]), (at + 4, [e, f, 0, 0])] {
                // Relaxed: until both are there packets pass.
                (self.channels).store_u32(at, u32::from_ne_bytes(part), Ordering::Relaxed);
            }
        }
    }

    /// Tells the gate in whose log a port's packets are counted that come elsewhere.
    fn assign_port(&mut self, data_port: u16) -> Result<(), GateError> {
        if data_port == 0 {
            return Ok(());
        }
        let owner = (0..QUEUES).find(|&queue| self.data_port(queue) == data_port && !self.needs_log(queue));
        let key = data_port.to_be();
        match owner {
            Some(queue) => Ok(self.ports.insert(key, queue, 0)?),
            None => match self.ports.remove(&key) {
                Err(MapError::KeyNotFound) => Ok(()),
                Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => {
                    Ok(())
                }
                other => Ok(other?),
            },
        }
    }

    /// Lets a session land on `queue`, at its row. Log positions go on from where they are; the message limit starts
    /// before
    /// `first_message`, so that nothing lands until [`Log::set_message_limit`] and [`Log::set_posted`] allow it.
    ///
    /// Takes tens of milliseconds where the row was used since the queue was last quiet.
    ///
    /// # Errors
    /// [`GateError`]: in generic mode always.
    pub fn open_session(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), GateError> {
        check(queue)?;
        let role = self.role(queue);
        if role != Role::Landing as u32 && role != Role::LandingZeroCopy as u32 {
            return Err(GateError::NotLanding(queue));
        }
        if self.mode == EffectiveMode::Generic {
            return Err(GateError::Generic);
        }
        let row = session.row();
        if self.is_open(queue, row) {
            return Err(GateError::Open { queue, row });
        }
        if let Some(fault) = session.fault() {
            return Err(GateError::IllegalSession(fault));
        }
        if self.is_closing(queue, row) {
            self.quiesce(queue)?;
        }
        let channel = self.channel_logs[queue as usize].as_mut();
        let log = channel.ok_or(GateError::NoRole(queue))?.mapping.as_mut();
        let log = log.ok_or(GateError::Frozen(queue))?;
        log.set_message_limit(row, session.first_message.wrapping_sub(1));
        let (message, index) = session.place_before_first();
        let at = session_offset(queue, row);
        let network_ip = |ip: std::net::Ipv4Addr| u32::from_ne_bytes(ip.octets());
        let halves = |low: u16, high: u16| {
            let (low, high) = (low.to_ne_bytes(), high.to_ne_bytes());
            u32::from_ne_bytes([low[0], low[1], high[0], high[1]])
        };
        let shapes = {
            let len = session.payload_len.to_ne_bytes();
            u32::from_ne_bytes([len[0], len[1], session.window_shift(), session.wire as u8])
        };
        let ports = halves(session.peer_port.to_be(), session.header_len);
        // Relaxed: no CPU is inside this session's part of the gate: it is closed, and `quiesce` has waited (I4).
        let relaxed = Ordering::Relaxed;
        self.sessions
            .store_u64(at + offset_of!(SessionRow, key), session.key.to_be(), relaxed);
        for (field, value) in [
            (offset_of!(SessionRow, peer_ip), network_ip(session.peer_ip)),
            (offset_of!(SessionRow, local_ip), network_ip(session.local_ip)),
            (offset_of!(SessionRow, peer_port), ports),
            (offset_of!(SessionRow, payload_len), shapes),
            (offset_of!(SessionRow, last_message), message),
            (offset_of!(SessionRow, last_index), index),
        ] {
            self.sessions.store_u32(at + field, value, relaxed);
        }
        self.store_end(queue, row, session.active_until_ns);
        // The gate loads `open` and then the fields. x86 keeps both sides' order, given the release store; elsewhere a
        // BPF program of this age has no acquire load, so every CPU must leave the gate once in between.
        if !cfg!(target_arch = "x86_64") {
            self.quiesce(queue)?;
        }
        self.sessions
            .store_u32(at + offset_of!(SessionRow, open), 1, Ordering::Release);
        Ok(())
    }

    /// When the session at `row` is to stop landing by itself: [`SessionAdmission::active_until_ns`]. At any time.
    ///
    /// # Errors
    /// [`GateError::NoQueue`].
    pub fn extend_session(&mut self, queue: u32, row: u32, active_until_ns: u64) -> Result<(), GateError> {
        check(queue)?;
        self.store_end(queue, row, active_until_ns);
        Ok(())
    }

    fn store_end(&self, queue: u32, row: u32, active_until_ns: u64) {
        let at = session_offset(queue, row) + offset_of!(SessionRow, active_until_ns);
        // Relaxed: one number, which guards nothing.
        self.sessions.store_u64(at, active_until_ns, Ordering::Relaxed);
    }

    /// The sessions that are open, over all queues.
    pub fn open_sessions(&self) -> Vec<OpenSession> {
        let rows = (0..QUEUES).flat_map(|queue| (0..SESSIONS).map(move |row| (queue, row)));
        rows.filter(|&(queue, row)| self.is_open(queue, row))
            .map(|(queue, row)| {
                let key = session_offset(queue, row) + offset_of!(SessionRow, key);
                let key = u64::from_be(self.sessions.load_u64(key, Ordering::Relaxed));
                let end = session_offset(queue, row) + offset_of!(SessionRow, active_until_ns);
                OpenSession {
                    queue,
                    row,
                    key,
                    active_until_ns: self.sessions.load_u64(end, Ordering::Relaxed),
                }
            })
            .collect()
    }

    /// Closes the session at `row` of the queue. A CPU that is inside the gate may still accept a packet of it: whoever
    /// takes posted entries back, or counts on the log, calls [`Gate::quiesce`] next. Closing twice is fine.
    pub fn close_session(&mut self, queue: u32, row: u32) -> Result<(), GateError> {
        check(queue)?;
        if self.is_open(queue, row) {
            let open = session_offset(queue, row) + offset_of!(SessionRow, open);
            self.sessions.store_u32(open, 0, Ordering::Relaxed);
            self.closing[queue as usize] |= 1 << (row % SESSIONS);
        }
        Ok(())
    }

    /// Whether the row was used since the queue was last quiet.
    pub fn is_closing(&self, queue: u32, row: u32) -> bool {
        queue < QUEUES && self.closing[queue as usize] & 1 << (row % SESSIONS) != 0
    }

    /// Maps the log of a queue that has a role. Several mappings show the same log.
    pub fn log(&self, queue: u32) -> Result<Log, GateError> {
        Ok(Log::of_map(self.log_fd(queue)?)?)
    }

    /// The map behind [`Gate::log`], to hand to a client of the channel: with it, `mmap` reaches that log alone.
    pub fn log_fd(&self, queue: u32) -> Result<BorrowedFd<'_>, GateError> {
        check(queue)?;
        match &self.channel_logs[queue as usize] {
            Some(log) => Ok(log.fd()),
            None => Err(GateError::NoRole(queue)),
        }
    }

    /// What the gate counted since it was attached, or taken over: packets per verdict over all queues. Not for a hot
    /// path.
    pub fn counters(&self) -> Counters {
        let mut sum = self.retired;
        for queue in 0..=STRAY_ROW {
            self.channels
                .add_counters(channel_offset(queue) + offset_of!(ChannelRow, counters), &mut sum);
        }
        let logs = self.channel_logs.iter().flatten();
        let logs = logs.filter_map(|log| log.mapping.as_ref());
        logs.fold(sum, |sum, log| sum.plus(&log.counters()))
    }

    /// Packets that the data socket may have received by way of queues *without a role*: a load for each queue of the
    /// interface. For a queue with a role ask [`Log::passed`].
    pub fn passed_elsewhere(&self) -> u64 {
        (0..self.queues)
            .chain([STRAY_ROW])
            .map(|queue| {
                self.channels
                    .load_passed(channel_offset(queue) + offset_of!(ChannelRow, counters))
            })
            .sum()
    }

    /// Runs the gate once on a frame, as if it had arrived on `queue` of the interface `ifindex` (`BPF_PROG_TEST_RUN`),
    /// with all its effects but the redirect itself. Returns the XDP action. For tests and fuzzing.
    pub fn test_run(&self, ifindex: u32, queue: u32, frame: &[u8]) -> io::Result<u32> {
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let metadata = [0, frame.len() as u32, 0, ifindex, queue, 0];
        sys::test_run(self.program.as_fd(), frame, &metadata)
    }

    fn role(&self, queue: u32) -> u32 {
        self.channels.load_u32(
            channel_offset(queue) + offset_of!(ChannelRow, role),
            Ordering::Relaxed,
        )
    }

    fn is_open(&self, queue: u32, row: u32) -> bool {
        let open = session_offset(queue, row) + offset_of!(SessionRow, open);
        self.sessions.load_u32(open, Ordering::Relaxed) != 0
    }
}

/// The map behind a descriptor, if it is of that type.
fn typed<M: TryFrom<Map, Error = MapError>>(fd: OwnedFd) -> Result<M, AttachError> {
    let map = MapData::from_fd(fd)
        .and_then(Map::from_map_data)
        .and_then(M::try_from);
    map.map_err(|error| AttachError::System(io::Error::other(error)))
}

fn channel_offset(queue: u32) -> usize {
    queue as usize * size_of::<ChannelRow>()
}

fn session_offset(queue: u32, row: u32) -> usize {
    (queue * SESSIONS + row % SESSIONS) as usize * size_of::<SessionRow>()
}

fn check(queue: u32) -> Result<(), GateError> {
    if queue < QUEUES {
        Ok(())
    } else {
        Err(GateError::NoQueue(queue))
    }
}

fn missing(map: &str) -> AttachError {
    AttachError::System(io::Error::other(format!("the gate's object has no map {map}")))
}

const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Gate>();
    is_send::<Log>();
    // `Counters` and the maps' rows agree on the number of verdicts.
    assert!(Verdict::ALL.len() == 22);
};
