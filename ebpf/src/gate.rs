//! The loaded gate: its roles, sockets and sessions.
//!
//! Who holds a [`Gate`] decides what may land (I6): the sessions are in a map of its own. A channel's client gets that
//! channel's [`Log`] and nothing else.

use std::fmt;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use aya::Ebpf;
use aya::maps::{Array, ArrayOfMaps, IterableMap, Map, MapData, MapError, XskMap};
use aya::programs::{ProgramError, TestRun, TestRunOptions};

use crate::attach::{self, AttachError, AttachMode, Attached, CpuCheck, EffectiveMode, GateConfig};
use crate::layout::{ChannelRow, LogMap, QUEUES, SESSIONS, STRAY_ROW, SessionRow};
use crate::log::Log;
use crate::session::{Role, SessionAdmission};
use crate::shared::SharedMemory;
use crate::verdict::{Counters, Verdict};

const BPF_F_MMAPABLE: u32 = 1 << 10;
const CHANNELS_LEN: usize = (STRAY_ROW as usize + 1) * size_of::<ChannelRow>();
const SESSIONS_LEN: usize = (QUEUES * SESSIONS) as usize * size_of::<SessionRow>();

type LogArray = Array<MapData, LogMap>;

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
    /// The place has an open session.
    #[error("queue {queue} has an open session at place {place}")]
    Open {
        /// Landing queue.
        queue: u32,
        /// Place of the session.
        place: u32,
    },
    /// Generic mode would break the pairing of log and RX ring (I3a).
    #[error("generic mode needs a single CPU for landing queue {queue}, but {reason}")]
    ManyCpus {
        /// Landing queue.
        queue: u32,
        /// What was found.
        reason: String,
    },
    /// The admission contradicts itself.
    #[error("illegal session: {0}")]
    IllegalSession(&'static str),
    /// A map operation failed.
    #[error("cannot change the gate's maps: {0}")]
    Map(#[from] MapError),
    /// A mapping failed.
    #[error("cannot map the gate's memory: {0}")]
    System(#[from] io::Error),
}

/// An attached gate. Dropping it, or the death of the process, detaches it.
pub struct Gate {
    // First: detached before anything else goes.
    link: OwnedFd,
    ebpf: Ebpf,
    channels: SharedMemory,
    sessions: SharedMemory,
    /// By queue: places whose session was closed, with a CPU perhaps still inside the gate.
    closing: [u16; QUEUES as usize],
    xsks: XskMap<MapData>,
    logs: ArrayOfMaps<MapData, LogArray>,
    channel_logs: Vec<Option<LogArray>>,
    mode: EffectiveMode,
    interface: String,
    cpu_check: CpuCheck,
    warnings: Vec<String>,
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
            mut ebpf,
            link,
            mode,
            interface,
            warnings,
        } = attach::attach(ifindex, config, mode)?;
        let mut map_array = |name: &str, len| match ebpf.take_map(name) {
            Some(Map::Array(map)) => Ok(SharedMemory::of_map(map.fd().as_fd(), len)?),
            _ => Err(missing(name)),
        };
        let channels = map_array("lm_channels", CHANNELS_LEN)?;
        let sessions = map_array("lm_sessions", SESSIONS_LEN)?;
        let xsks = ebpf
            .take_map("lm_xsks")
            .and_then(|map| XskMap::try_from(map).ok());
        let logs = ebpf
            .take_map("lm_logs")
            .and_then(|map| ArrayOfMaps::try_from(map).ok());
        Ok(Gate {
            link,
            ebpf,
            channels,
            sessions,
            closing: [0; QUEUES as usize],
            xsks: xsks.ok_or_else(|| missing("lm_xsks"))?,
            logs: logs.ok_or_else(|| missing("lm_logs"))?,
            channel_logs: (0..QUEUES).map(|_| None).collect(),
            mode,
            interface,
            cpu_check: config.cpu_check,
            warnings,
        })
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
        if role == Role::Landing && self.mode == EffectiveMode::Generic {
            let checked = self.cpu_check.check(&self.interface, queue);
            checked.map_err(|reason| GateError::ManyCpus { queue, reason })?;
        }
        if role != Role::None && self.channel_logs[queue as usize].is_none() {
            let log = LogArray::create(1, BPF_F_MMAPABLE)?;
            self.logs.set(queue, &log, 0)?;
            self.channel_logs[queue as usize] = Some(log);
        }
        if (0..SESSIONS).any(|place| self.is_open(queue, place)) {
            (0..SESSIONS).try_for_each(|place| self.close_session(queue, place))?;
            self.quiesce(queue)?;
        }
        // Relaxed: the log was published by a system call.
        self.channels.store_u32(
            channel_offset(queue) + offset_of!(ChannelRow, role),
            role as u32,
            Ordering::Relaxed,
        );
        Ok(())
    }

    /// Lets a session land on `queue`, at its place. Log positions go on from where they are; the message limit starts before
    /// `first_message`, so that nothing lands until [`Log::set_message_limit`] and [`Log::set_posted`] allow it.
    ///
    /// Takes tens of milliseconds where the place was used since the queue was last quiet.
    pub fn open_session(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), GateError> {
        check(queue)?;
        let role = self.role(queue);
        if role != Role::Landing as u32 && role != Role::LandingZeroCopy as u32 {
            return Err(GateError::NotLanding(queue));
        }
        let place = session.place();
        if self.is_open(queue, place) {
            return Err(GateError::Open { queue, place });
        }
        if let Some(fault) = session.fault() {
            return Err(GateError::IllegalSession(fault));
        }
        if self.is_closing(queue, place) {
            self.quiesce(queue)?;
        }
        self.log(queue)?
            .set_message_limit(place, session.first_message.wrapping_sub(1));
        let (message, index) = session.place_before_first();
        let row = session_offset(queue, place);
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
            .store_u64(row + offset_of!(SessionRow, key), session.key.to_be(), relaxed);
        for (field, value) in [
            (offset_of!(SessionRow, peer_ip), network_ip(session.peer_ip)),
            (offset_of!(SessionRow, local_ip), network_ip(session.local_ip)),
            (offset_of!(SessionRow, peer_port), ports),
            (offset_of!(SessionRow, payload_len), shapes),
            (offset_of!(SessionRow, last_message), message),
            (offset_of!(SessionRow, last_index), index),
        ] {
            self.sessions.store_u32(row + field, value, relaxed);
        }
        // The gate loads `open` and then the fields. x86 keeps both sides' order, given the release store; elsewhere a BPF
        // program of this age has no acquire load, so every CPU must leave the gate once in between.
        if !cfg!(target_arch = "x86_64") {
            self.quiesce(queue)?;
        }
        self.sessions
            .store_u32(row + offset_of!(SessionRow, open), 1, Ordering::Release);
        Ok(())
    }

    /// Closes the session at `place` of the queue. A CPU that is inside the gate may still accept a packet of it: whoever takes
    /// posted entries back, or counts on the log, calls [`Gate::quiesce`] next. Closing twice is fine.
    pub fn close_session(&mut self, queue: u32, place: u32) -> Result<(), GateError> {
        check(queue)?;
        if self.is_open(queue, place) {
            let open = session_offset(queue, place) + offset_of!(SessionRow, open);
            self.sessions.store_u32(open, 0, Ordering::Relaxed);
            self.closing[queue as usize] |= 1 << (place % SESSIONS);
        }
        Ok(())
    }

    /// Whether the place was used since the queue was last quiet.
    pub fn is_closing(&self, queue: u32, place: u32) -> bool {
        queue < QUEUES && self.closing[queue as usize] & 1 << (place % SESSIONS) != 0
    }

    /// Waits until no CPU is inside the gate with a session that was closed before (I4): afterwards the log does not grow by
    /// it, and what is in it has its RX descriptor or was dropped and counted by the kernel. Takes tens of milliseconds.
    ///
    /// It waits for an RCU grace period: XDP programs run inside a read-side section of it, redirect included. The kernel waits
    /// for one whenever a map in a map is replaced (kernel/bpf/syscall.c, `maybe_wait_bpf_programs`); membarrier would do
    /// the same but is missing where a CPU runs without a tick.
    pub fn quiesce(&mut self, queue: u32) -> Result<(), GateError> {
        check(queue)?;
        // Without a log it never had a role, so no session could be open.
        if let Some(log) = &self.channel_logs[queue as usize] {
            self.logs.set(queue, log, 0)?;
            self.closing[queue as usize] = 0;
        }
        Ok(())
    }

    /// Maps the log of a queue that has a role. Several mappings show the same log.
    pub fn log(&self, queue: u32) -> Result<Log, GateError> {
        Ok(Log::over(SharedMemory::of_map(
            self.log_fd(queue)?,
            size_of::<LogMap>(),
        )?))
    }

    /// The map behind [`Gate::log`], to hand to a client of the channel: with it, `mmap` reaches that log alone.
    pub fn log_fd(&self, queue: u32) -> Result<BorrowedFd<'_>, GateError> {
        check(queue)?;
        match &self.channel_logs[queue as usize] {
            Some(log) => Ok(IterableMap::map(log).fd().as_fd()),
            None => Err(GateError::NoRole(queue)),
        }
    }

    /// What the gate counted since it was attached: packets per verdict over all queues. Maps each log: not for a hot path.
    pub fn counters(&self) -> Result<Counters, GateError> {
        let mut sum = Counters::default();
        for queue in 0..=STRAY_ROW {
            self.channels
                .add_counters(channel_offset(queue) + offset_of!(ChannelRow, counters), &mut sum);
        }
        for queue in (0..QUEUES).filter(|&queue| self.channel_logs[queue as usize].is_some()) {
            self.log(queue)?
                .counters()
                .iter()
                .for_each(|(verdict, count)| sum.add(verdict, count));
        }
        Ok(sum)
    }

    /// Packets that the data socket may have received by way of queues *without a role*: 65 loads. For a queue with a role ask
    /// [`Log::passed`].
    pub fn passed_elsewhere(&self) -> u64 {
        (0..=STRAY_ROW)
            .map(|queue| {
                self.channels
                    .load_passed(channel_offset(queue) + offset_of!(ChannelRow, counters))
            })
            .sum()
    }

    /// Runs the gate once on a frame, as if it had arrived on `queue` of the interface `ifindex` (`BPF_PROG_TEST_RUN`), with all its
    /// effects but the redirect itself. Returns the XDP action. For tests and fuzzing.
    pub fn test_run(&self, ifindex: u32, queue: u32, frame: &[u8]) -> Result<u32, ProgramError> {
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let words = [0, frame.len() as u32, 0, ifindex, queue, 0];
        let mut md = [0u8; 24];
        md.chunks_exact_mut(4)
            .zip(words)
            .for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_ne_bytes()));
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.ctx_in = Some(&md);
        let program = attach::xdp(&self.ebpf).map_err(|_| ProgramError::NotLoaded)?;
        Ok(program.test_run(options)?.return_value)
    }

    fn role(&self, queue: u32) -> u32 {
        self.channels.load_u32(
            channel_offset(queue) + offset_of!(ChannelRow, role),
            Ordering::Relaxed,
        )
    }

    fn is_open(&self, queue: u32, place: u32) -> bool {
        let open = session_offset(queue, place) + offset_of!(SessionRow, open);
        self.sessions.load_u32(open, Ordering::Relaxed) != 0
    }
}

fn channel_offset(queue: u32) -> usize {
    queue as usize * size_of::<ChannelRow>()
}

fn session_offset(queue: u32, place: u32) -> usize {
    (queue * SESSIONS + place % SESSIONS) as usize * size_of::<SessionRow>()
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
    assert!(Verdict::ALL.len() == 20);
};
