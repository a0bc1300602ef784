//! The real interface: AF_XDP sockets, the gate and two UDP sockets of the kernel.

mod authority;
mod errors;
mod side;
mod steer;

use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lm_cards::Steering;
use lm_ebpf::{AttachMode, Gate, GateConfig, Log, Verdict};
use lm_protocol::landing::SessionAdmission;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::daemon::Daemon;
use crate::daemon::ipc::Joined;
use crate::memory::Mapping;
use crate::napi::Napi;
use crate::port::{
    Attend, Attended, Datagrams, EffectiveMode, ModeRequest, Port, PortError, QueueDrops, QueueSpec, Role,
    RxQueue as _, Socket, Steer, WakeError,
};
use crate::queue_poll::{QueuePoller, send_in_calls};
use crate::ring_queue::{Bell, RingRx, RingTx};
use crate::route::Neighbours;
use crate::udp::UdpPair;
use crate::waker::Waker;
use crate::xsk::{BindMode, Prepared, Xsk, XskConfig, XskOptions};
use authority::{Authority, Steward};
use side::Side;

/// What to open.
#[derive(Clone, Debug)]
pub struct KernelNicConfig<'a> {
    /// Index of the interface.
    pub interface_index: u32,
    /// The address to send from and receive on; one of the interface's.
    pub local_ip: Ipv4Addr,
    /// Data port; control has the next one. 0: any two neighbours.
    pub port: u16,
    /// Copy or zero-copy, native or generic.
    pub mode: ModeRequest,
    /// The memory of all channels.
    pub mapping: &'a Arc<Mapping>,
    /// Length of a chunk in bytes, 2048 to 4096.
    pub chunk_len: u32,
    /// Whether packets may be longer than a chunk holds, in copy mode: they take several then.
    pub multi_buffer: bool,
    /// As [`XskOptions::tx_metadata_len`].
    pub tx_metadata_len: u32,
    /// Whether to drive the queues' NAPI instances from the polling core, through helper sockets (veth).
    pub poll_queues: bool,
}

/// A queue's two sides; one that only sends has no receive side.
type Opened = (Option<RingRx<Arc<Xsk>>>, RingTx<Arc<Xsk>>);

struct Open {
    xsk: Arc<Xsk>,
    role: Role,
    /// Drives the queue's NAPI on our core, where the AF_XDP socket itself cannot (veth).
    poller: Option<QueuePoller>,
    /// The gate's counts for the queue, where it has a role.
    log: Option<Log>,
}

/// An interface of the kernel's with the gate attached. Dropping it detaches.
///
/// Interface indices are those of the network namespace of the thread that calls [`KernelNic::open`] and
/// [`Port::open`]: a program that enters namespaces must stay in one.
pub struct KernelNic {
    // Drop order: first the gate goes, so that nothing is redirected to sockets that are closing.
    authority: Authority,
    channels: Vec<Option<Open>>,
    /// Goes after the gate: detaching a program makes some drivers set their queues up anew.
    steering: Option<Steering>,
    side: Side,
    mapping: Arc<Mapping>,
    chunk_len: u32,
    multi_buffer: bool,
    tx_metadata_len: u32,
    interface_index: u32,
    opened: Instant,
    mode: ModeRequest,
    /// As [`Port::prepare`].
    prepared: Option<(QueueSpec, Prepared)>,
    poll_queues: bool,
    /// Made when somebody asks for it: a socket that an epoll instance watches costs every packet a look at it.
    epoll: OnceLock<OwnedFd>,
    /// Ends waits, if one was asked for.
    waker: Option<Arc<Waker>>,
    /// For poll(2): the UDP sockets and each channel's socket.
    poll: Vec<PollFd<'static>>,
}

/// An entry of that list, which is written anew whenever a socket in it was opened or closed.
fn polled(fd: &impl AsRawFd) -> PollFd<'static> {
    // SAFETY: it is open when the list is read.
    PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }, PollFlags::IN)
}

impl fmt::Debug for KernelNic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelNic")
            .field("udp", &self.side.udp)
            .finish_non_exhaustive()
    }
}

impl KernelNic {
    /// Binds the UDP sockets and attaches the gate. No queue has a role yet.
    ///
    /// # Errors
    ///
    /// See [`PortError`]; nothing stays attached then.
    pub fn open(config: &KernelNicConfig<'_>) -> Result<KernelNic, PortError> {
        let udp = UdpPair::bind(config.local_ip, config.port)?;
        let gate = GateConfig {
            local_ip: Some(config.local_ip),
            data_port: udp.data_port(),
            several_programs: false,
            control_port: udp.control_port(),
        };
        let gate = Gate::attach(config.interface_index, &gate, attach_mode(config.mode))?;
        Ok(KernelNic::with(config, Authority::Own(Box::new(gate)), udp))
    }

    /// The same without privileges: the daemon holds the gate, and gave the queues that `joined` names to
    /// the program that has `udp`.
    pub(crate) fn joined(
        config: &KernelNicConfig<'_>,
        daemon: Daemon,
        joined: &Joined,
        udp: UdpPair,
    ) -> KernelNic {
        let steward = Steward::new(daemon, joined.generic);
        KernelNic::with(config, Authority::Daemon(Box::new(steward)), udp)
    }

    fn with(config: &KernelNicConfig<'_>, authority: Authority, udp: UdpPair) -> KernelNic {
        let mut nic = KernelNic {
            authority,
            channels: (0..lm_ebpf::layout::QUEUES).map(|_| None).collect(),
            steering: None,
            side: Side {
                udp,
                interface_index: config.interface_index,
                neighbours: Neighbours::open(config.interface_index).ok(),
            },
            mapping: config.mapping.clone(),
            chunk_len: config.chunk_len,
            multi_buffer: config.multi_buffer,
            tx_metadata_len: config.tx_metadata_len,
            interface_index: config.interface_index,
            opened: Instant::now(),
            mode: config.mode,
            prepared: None,
            poll_queues: config.poll_queues,
            epoll: OnceLock::new(),
            waker: None,
            poll: Vec::with_capacity(lm_ebpf::layout::QUEUES as usize + 4),
        };
        nic.list_descriptors();
        nic
    }

    /// Things that the user should know, one line each.
    pub fn warnings(&self) -> &[String] {
        match &self.authority {
            Authority::Own(gate) => gate.warnings(),
            Authority::Daemon(_) => &[],
        }
    }

    fn list_descriptors(&mut self) {
        self.poll.clear();
        if self.side.udp.has_control() {
            self.poll.push(polled(&self.side.udp.fd(Socket::Control)));
        }
        self.poll.push(polled(&self.side.udp.fd(Socket::Data)));
        for open in self
            .channels
            .iter()
            .flatten()
            .filter(|open| open.role != Role::SendOnly)
        {
            self.poll.push(polled(&open.xsk.as_fd()));
        }
        if let Some(waker) = &self.waker {
            self.poll.push(polled(&waker.as_fd()));
        }
        if let Some(epoll) = self.epoll.get() {
            self.watch(epoll);
        }
    }

    fn watch(&self, epoll: &OwnedFd) {
        for entry in &self.poll {
            // Closed sockets leave by themselves; one that is in already says EEXIST, which is as good.
            let _ = epoll::add(epoll, entry, EventData::new_u64(0), EventFlags::IN);
        }
    }

    fn logs(&self) -> impl Iterator<Item = &Log> {
        (self.channels.iter().flatten()).filter_map(|open| open.log.as_ref())
    }

    fn is_generic(&self) -> bool {
        match &self.authority {
            Authority::Own(gate) => gate.mode() == lm_ebpf::EffectiveMode::Generic,
            Authority::Daemon(steward) => steward.generic,
        }
    }

    fn slot(&mut self, queue: u32) -> Result<&mut Option<Open>, PortError> {
        let queues = lm_ebpf::layout::QUEUES;
        self.channels
            .get_mut(queue as usize)
            .ok_or(PortError::NoQueue { queue, queues })
    }

    fn xsk_config<'a>(&self, spec: &QueueSpec, mapping: &'a Arc<Mapping>) -> (XskConfig<'a>, XskOptions) {
        let xsk_config = XskConfig {
            interface_index: self.interface_index,
            queue: spec.queue,
            mapping,
            registered_len: spec.registered_len,
            chunk_len: self.chunk_len,
            fill_len: spec.rx_len,
            completion_len: spec.tx_len,
            rx_len: spec.rx_len,
            tx_len: spec.tx_len,
            bind: match spec.copies {
                true => BindMode::Copy,
                false if self.mode == ModeRequest::ZeroCopy => BindMode::ZeroCopy,
                false => BindMode::Copy,
            },
        };
        let options = XskOptions {
            multi_buffer: self.multi_buffer,
            tx_metadata_len: self.tx_metadata_len,
            ..XskOptions::default()
        };
        (xsk_config, options)
    }

    /// What the gate does with a queue's packets.
    fn gate_role(&self, spec: &QueueSpec) -> lm_ebpf::Role {
        let keeps_frames = self.mode == ModeRequest::ZeroCopy;
        match (spec.role, spec.copies) {
            (Role::SendOnly, _) => lm_ebpf::Role::None,
            (Role::General, _) if keeps_frames => lm_ebpf::Role::GeneralZeroCopy,
            (Role::General, _) => lm_ebpf::Role::General,
            (Role::Landing, true) => lm_ebpf::Role::Landing,
            (Role::Landing, false) => lm_ebpf::Role::LandingZeroCopy,
        }
    }

    /// Opens a socket on a queue that has none.
    fn open_socket(&mut self, spec: &QueueSpec) -> Result<Opened, PortError> {
        let queue = spec.queue;
        if self.slot(queue)?.is_some() {
            return Err(PortError::QueueOpen { queue });
        }
        let prepared = self.prepared.take_if(|(ready, _)| ready == spec);
        let mapping = self.mapping.clone();
        let (xsk_config, options) = self.xsk_config(spec, &mapping);
        let role = self.gate_role(spec);
        let (xsk, rings, log) = match &mut self.authority {
            Authority::Own(gate) => {
                let prepared = match prepared {
                    Some((_, prepared)) => prepared,
                    None => Xsk::prepare(&xsk_config, &options)?,
                };
                let (xsk, rings) = prepared.bind(&xsk_config, &options)?;
                let mut log = None;
                if role != lm_ebpf::Role::None {
                    gate.register_xsk(queue, xsk.as_fd())?;
                    gate.set_role(queue, role)?;
                    log = Some(gate.log(queue)?);
                }
                (xsk, rings, log)
            }
            Authority::Daemon(steward) => steward.open_channel(&xsk_config, self.multi_buffer, role)?,
        };
        let poller = match spec.role != Role::SendOnly && self.poll_queues && !self.is_generic() {
            true => QueuePoller::new(*self.side.udp.local().ip()),
            false => None,
        };
        if xsk.zero_copy() {
            self.send_in_calls(&xsk);
        }
        let xsk = Arc::new(xsk);
        *self.slot(queue)? = Some(Open {
            xsk: xsk.clone(),
            role: spec.role,
            poller,
            log: log.as_ref().map(Log::share),
        });
        self.list_descriptors();
        let tx = RingTx::new(rings.tx, rings.completion, xsk.clone());
        let rx = log.map(|mut log| {
            log.set_capacity(spec.capacity);
            RingRx::new(rings.fill, rings.rx, log, xsk)
        });
        Ok((rx, tx))
    }

    /// Has packets leave, and those that came be taken, in the calls that wake the driver, where one NAPI instance does both: by themselves these
    /// calls ask a card for an interrupt, which it may hold back. Where that cannot be they go on to.
    fn send_in_calls(&self, xsk: &Xsk) {
        let shared = Napi::shared_by(self.interface_index, xsk.queue());
        if let Err(error) = send_in_calls(xsk, shared) {
            tracing::debug!("queue {}: packets leave by interrupts: {error}", xsk.queue());
        }
    }

    /// Takes a queue out of the gate, and its socket out of our list.
    fn detach(&mut self, queue: u32) -> Result<(), PortError> {
        if self.slot(queue)?.is_none() {
            return Err(PortError::NoQueueOpen { queue });
        }
        match &mut self.authority {
            Authority::Own(gate) => {
                gate.set_role(queue, lm_ebpf::Role::None)?;
                gate.unregister_xsk(queue)?;
            }
            Authority::Daemon(steward) => steward.close_channel(queue)?,
        }
        *self.slot(queue)? = None;
        self.list_descriptors();
        Ok(())
    }

    /// Gives up a queue: nothing is redirected there any more.
    ///
    /// # Errors
    ///
    /// See [`PortError`].
    pub fn close(&mut self, queue: u32) -> Result<(), PortError> {
        self.detach(queue)
    }
}

impl AsFd for KernelNic {
    /// An epoll descriptor, readable (level-triggered) when one of the sockets is.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll
            .get_or_init(|| {
                let epoll = epoll::create(CreateFlags::CLOEXEC).expect("a descriptor for an epoll instance");
                self.watch(&epoll);
                epoll
            })
            .as_fd()
    }
}

/// Where to attach the gate.
fn attach_mode(mode: ModeRequest) -> AttachMode {
    match mode {
        ModeRequest::Auto => AttachMode::Auto,
        ModeRequest::ZeroCopy | ModeRequest::Copy => AttachMode::Native,
        ModeRequest::Generic => AttachMode::Generic,
    }
}

impl Bell for Arc<Xsk> {
    #[inline]
    fn wake_tx(&self) -> Result<(), WakeError> {
        Xsk::wake_tx(self)
    }

    #[inline]
    fn wake_rx(&self) -> Result<(), WakeError> {
        Xsk::wake_rx(self)
    }

    fn drops(&self) -> QueueDrops {
        self.statistics().unwrap_or_default().into()
    }
}

impl Port for KernelNic {
    type Rx = RingRx<Arc<Xsk>>;
    type Tx = RingTx<Arc<Xsk>>;

    #[inline]
    fn now_ns(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    fn open(&mut self, spec: &QueueSpec) -> Result<Opened, PortError> {
        self.open_socket(spec)
    }

    fn prepare(&mut self, spec: &QueueSpec) -> Result<(), PortError> {
        // A daemon has the privilege to register, and no socket of ours may have the queue when it does.
        if matches!(self.authority, Authority::Daemon(_)) {
            return Ok(());
        }
        self.prepared = None;
        let mapping = self.mapping.clone();
        let (xsk_config, options) = self.xsk_config(spec, &mapping);
        self.prepared = Some((*spec, Xsk::prepare(&xsk_config, &options)?));
        Ok(())
    }

    fn rebuild(&mut self, rx: &mut Self::Rx, tx: &mut Self::Tx, spec: &QueueSpec) -> Result<(), PortError> {
        let queue = spec.queue;
        let mut poller = None;
        if let Some(open) = self.slot(queue)? {
            // The queue stays, and with it the NAPI instance that its poller has learnt.
            poller = open.poller.take();
            match self.authority {
                Authority::Own(_) => self.detach(queue)?,
                // The daemon replaces what is there, and the sessions stay; but the queue is free for it only when nobody has the socket.
                Authority::Daemon(_) => *self.slot(queue)? = None,
            }
        }
        rx.close();
        tx.close();
        let (new_rx, new_tx) = self.open_socket(spec)?;
        (*rx, *tx) = (new_rx.ok_or(PortError::NoQueueOpen { queue })?, new_tx);
        rx.allow(rx.accepted());
        if let (Some(poller), Some(open)) = (poller, self.slot(queue)?) {
            open.poller = Some(poller);
        }
        Ok(())
    }

    fn is_gone(&self) -> bool {
        (self.channels.iter().flatten()).any(|open| open.xsk.lost_its_device())
    }

    fn admit(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), PortError> {
        match &mut self.authority {
            Authority::Own(gate) => Ok(gate.open_session(queue, session)?),
            Authority::Daemon(steward) => steward.open_session(session),
        }
    }

    fn revoke(&mut self, queue: u32, row: u32) -> Result<(), PortError> {
        match &mut self.authority {
            Authority::Own(gate) => Ok(gate.close_session(queue, row)?),
            Authority::Daemon(steward) => steward.close_session(row),
        }
    }

    fn quiesce(&mut self, queue: u32) -> Result<(), PortError> {
        match &mut self.authority {
            Authority::Own(gate) => Ok(gate.quiesce(queue)?),
            Authority::Daemon(steward) => steward.quiesce(queue),
        }
    }

    fn steer(&mut self, wish: Steer<'_>) -> Result<Option<NonZeroU16>, PortError> {
        self.steer_as(&wish)
    }

    fn side(&mut self) -> &mut dyn Datagrams {
        &mut self.side
    }

    fn passed_count(&self) -> u64 {
        let here = |log: &Log| log.passed() + log.counter(Verdict::PassControl);
        match &self.authority {
            Authority::Own(gate) => self.logs().map(here).sum::<u64>() + gate.passed_elsewhere(),
            Authority::Daemon(steward) => steward.passed_count(self.logs()),
        }
    }

    fn verdicts(&self) -> Vec<(&'static str, u64)> {
        let counters = match &self.authority {
            Authority::Own(gate) => gate.counters(),
            Authority::Daemon(_) => Steward::counters(self.logs()),
        };
        counters
            .iter()
            .map(|(verdict, count)| (verdict.name(), count))
            .collect()
    }

    #[inline]
    fn attend(&mut self, queue: u32, how: Attend) -> Attended {
        // Who waits on the descriptor does not poll meanwhile.
        let is_watched = self.epoll.get().is_some();
        let Some(Some(Open {
            poller: Some(poller), ..
        })) = self.channels.get_mut(queue as usize)
        else {
            return Attended::Shared;
        };
        let kept = match how {
            Attend::Soon => return poller.wanted_port().map_or(Attended::Shared, Attended::Needs),
            Attend::Now => {
                poller.poll();
                false
            }
            Attend::Alone => poller.keep(!is_watched),
            Attend::NoMore => poller.keep(false),
        };
        match kept {
            true => Attended::Kept,
            false => Attended::Shared,
        }
    }

    fn wake_by(&mut self, waker: Arc<Waker>) {
        self.waker = Some(waker);
        self.list_descriptors();
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<bool> {
        // Longer than the clock goes: without a limit.
        let timeout = Timespec::try_from(timeout).ok();
        // The daemon's descriptor comes and goes with it; it is not for the epoll instance, so whoever waits on that hears of news later.
        let sockets = self.poll.len();
        if let Authority::Daemon(steward) = &self.authority
            && let Some(fd) = steward.daemon.client().raw_fd()
        {
            self.poll.push(polled(&fd));
        }
        let ready = poll(&mut self.poll, timeout.as_ref());
        if self.poll.len() > sockets
            && let Some(entry) = self.poll.pop()
            && !entry.revents().is_empty()
            && let Authority::Daemon(steward) = &mut self.authority
        {
            steward.daemon.client().hint();
        }
        match ready {
            Err(Errno::INTR) => Ok(false),
            ready => Ok(ready? > 0),
        }
    }

    fn effective_mode(&self) -> EffectiveMode {
        let receiving = || {
            self.channels
                .iter()
                .flatten()
                .filter(|open| open.role != Role::SendOnly)
        };
        if receiving().next().is_some() && receiving().all(|open| open.xsk.zero_copy()) {
            return EffectiveMode::ZeroCopy;
        }
        match self.is_generic() {
            false => EffectiveMode::CopyNative,
            true => EffectiveMode::CopyGeneric,
        }
    }
}
