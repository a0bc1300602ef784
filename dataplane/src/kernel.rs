//! The real interface: AF_XDP sockets, the gate and two UDP sockets of the kernel.

mod authority;

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU16;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lm_cards::{Interface, Neighbouring, Steering, SteeringError};
use lm_ebpf::{Counters, CpuCheck, Gate, GateConfig, Log, Role, SessionAdmission, Verdict};

use lm_protocol::rss::{Flow, HashInput};

use crate::daemon::Client;
use crate::daemon::ipc::Joined;
use crate::entropy::Entropy;
use crate::memory::{Mapping, Umem};
use crate::nic::{Channel, ChannelConfig, Device, EffectiveMode, ModeRequest, Nic, NicError};
use crate::queue_poll::QueuePoller;
use crate::udp::{Port, UdpEvent, UdpPair};
use crate::xsk::{BindMode, Prepared, WakeError, XdpStatistics, Xsk, XskConfig, XskOptions};
use authority::{Authority, Steward};

/// The daemon's socket is looked at this often without a sign that it has something.
const NEWS_EVERY_NS: u64 = 5_000_000;

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
    /// Queues that will be landing queues: in generic mode each needs a CPU of its own (I3a).
    pub landing_queues: &'a [u32],
    /// How generic mode makes sure of that.
    pub cpu_check: CpuCheck,
    /// The memory of all channels.
    pub mapping: &'a Arc<Mapping>,
    /// Length of a chunk in bytes, 2048 to 4096.
    pub chunk_len: u32,
    /// Whether packets may be longer than a chunk holds, in copy mode: they take several then.
    pub multi_buffer: bool,
    /// What is known of the device, for zero-copy mode.
    pub device: Option<Device>,
    /// Whether to drive the queues' NAPI instances from the polling core, through helper sockets (veth).
    pub poll_queues: bool,
}

struct Open {
    xsk: Xsk,
    role: Role,
    /// Drives the queue's NAPI on our core, where the AF_XDP socket itself cannot (veth).
    poller: Option<QueuePoller>,
    /// The gate's counts for the queue, where it has a role.
    log: Option<Log>,
}

/// An interface of the kernel's with the gate attached. Dropping it detaches.
///
/// Interface indices are those of the network namespace of the thread that calls [`KernelNic::open`] and
/// [`Nic::open_channel`]: a program that enters namespaces must stay in one.
pub struct KernelNic {
    // Drop order: first the gate goes, so that nothing is redirected to sockets that are closing.
    authority: Authority,
    channels: Vec<Option<Open>>,
    /// Goes after the gate: detaching a program makes some drivers set their queues up anew.
    steering: Option<Steering>,
    udp: UdpPair,
    mapping: Arc<Mapping>,
    chunk_len: u32,
    multi_buffer: bool,
    interface_index: u32,
    mode: ModeRequest,
    device: Option<Device>,
    /// As [`Nic::land_in_copy_mode`].
    lands_in_copy_mode: bool,
    /// As [`Nic::prepare_channel`].
    prepared: Option<(ChannelConfig, Prepared)>,
    poll_queues: bool,
    /// Made when somebody asks for it: a socket that an epoll instance watches costs every packet a look at it.
    epoll: OnceLock<OwnedFd>,
    /// For poll(2): the UDP sockets and each channel's socket.
    poll: Vec<libc::pollfd>,
}

impl fmt::Debug for KernelNic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelNic")
            .field("udp", &self.udp)
            .finish_non_exhaustive()
    }
}

impl KernelNic {
    /// Binds the UDP sockets and attaches the gate. No queue has a role yet.
    ///
    /// # Errors
    ///
    /// See [`NicError`]; nothing stays attached then.
    pub fn open(config: &KernelNicConfig<'_>) -> Result<KernelNic, NicError> {
        let udp = UdpPair::bind(config.local_ip, config.port)?;
        let gate = GateConfig {
            local_ip: Some(config.local_ip),
            data_port: udp.data_port(),
            several_programs: false,
            control_port: udp.control_port(),
            landing_queues: config.landing_queues.to_vec(),
            cpu_check: config.cpu_check,
        };
        let gate = Gate::attach(config.interface_index, &gate, config.mode.attach_mode())?;
        Ok(KernelNic::with(config, Authority::Own(Box::new(gate)), udp))
    }

    /// The same without privileges: the daemon at the other end of `client` holds the gate, and gave the queues that `joined` names to
    /// the program that has `udp`.
    pub fn joined(config: &KernelNicConfig<'_>, client: Client, joined: &Joined, udp: UdpPair) -> KernelNic {
        let steward = Steward::new(client, joined.generic);
        KernelNic::with(config, Authority::Daemon(Box::new(steward)), udp)
    }

    fn with(config: &KernelNicConfig<'_>, authority: Authority, udp: UdpPair) -> KernelNic {
        let mut nic = KernelNic {
            authority,
            channels: (0..lm_ebpf::layout::QUEUES).map(|_| None).collect(),
            steering: None,
            udp,
            mapping: config.mapping.clone(),
            chunk_len: config.chunk_len,
            multi_buffer: config.multi_buffer,
            interface_index: config.interface_index,
            mode: config.mode,
            device: config.device,
            lands_in_copy_mode: false,
            prepared: None,
            poll_queues: config.poll_queues,
            epoll: OnceLock::new(),
            poll: Vec::with_capacity(lm_ebpf::layout::QUEUES as usize + 3),
        };
        nic.list_descriptors();
        nic
    }

    /// Keeps packets off landing queues until [`Nic::lead`] says which may come. After the channels were opened: attaching a program
    /// and binding sockets makes some drivers set their queues up anew.
    ///
    /// # Errors
    ///
    /// See [`SteeringError`]; the device is as before then.
    pub fn steer(&mut self, interface: &Interface, landing_queues: &[u32]) -> Result<(), SteeringError> {
        let mut steering = Steering::apply(interface, landing_queues)?;
        if self.mode == ModeRequest::ZeroCopy {
            steering.forbid_relaxed_ordering()?;
        }
        self.steering = Some(steering);
        Ok(())
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
        let entry = |fd: &dyn AsRawFd| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        if self.udp.has_control() {
            self.poll.push(entry(&self.udp.fd(Port::Control)));
        }
        self.poll.push(entry(&self.udp.fd(Port::Data)));
        for open in self
            .channels
            .iter()
            .flatten()
            .filter(|open| open.role != Role::None)
        {
            self.poll.push(entry(&open.xsk.as_fd()));
        }
        if let Some(epoll) = self.epoll.get() {
            self.watch(epoll);
        }
    }

    fn watch(&self, epoll: &OwnedFd) {
        for entry in &self.poll {
            let mut event = libc::epoll_event {
                events: libc::EPOLLIN as u32,
                u64: 0,
            };
            // Closed sockets leave by themselves; one that is in already says EEXIST, which is as good.
            // SAFETY: both descriptors are open and the event is live.
            unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, entry.fd, &raw mut event) };
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

    fn slot(&mut self, queue: u32) -> Result<&mut Option<Open>, NicError> {
        let queues = lm_ebpf::layout::QUEUES;
        self.channels
            .get_mut(queue as usize)
            .ok_or(NicError::NoQueue { queue, queues })
    }

    #[inline]
    fn xsk(&self, queue: u32) -> Option<&Xsk> {
        self.channels.get(queue as usize)?.as_ref().map(|open| &open.xsk)
    }

    fn xsk_config<'a>(
        &self,
        config: &ChannelConfig,
        mapping: &'a Arc<Mapping>,
    ) -> (XskConfig<'a>, XskOptions) {
        let xsk_config = XskConfig {
            interface_index: self.interface_index,
            queue: config.queue,
            mapping,
            registered_len: config.registered_len,
            chunk_len: self.chunk_len,
            fill_len: config.fill_len,
            completion_len: config.completion_len,
            rx_len: config.rx_len,
            tx_len: config.tx_len,
            bind: match config.role {
                Role::Landing if self.lands_in_copy_mode => BindMode::Copy,
                _ => self.mode.bind_mode(),
            },
            need_wakeup: true,
        };
        let options = XskOptions {
            multi_buffer: self.multi_buffer,
            ..XskOptions::default()
        };
        (xsk_config, options)
    }

    /// Takes the queue out of the gate and closes the descriptor; the rings still keep the socket.
    fn detach(&mut self, queue: u32) -> Result<(), NicError> {
        if self.slot(queue)?.is_none() {
            return Err(NicError::NoChannel { queue });
        }
        match &mut self.authority {
            Authority::Own(gate) => {
                gate.set_role(queue, Role::None)?;
                gate.unregister_xsk(queue)?;
            }
            Authority::Daemon(steward) => steward.close_channel(queue)?,
        }
        *self.slot(queue)? = None;
        self.list_descriptors();
        Ok(())
    }
}

impl AsFd for KernelNic {
    /// An epoll descriptor, readable (level-triggered) when one of the sockets is.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll
            .get_or_init(|| {
                let epoll = new_epoll().expect("a descriptor for an epoll instance");
                self.watch(&epoll);
                epoll
            })
            .as_fd()
    }
}

fn new_epoll() -> io::Result<OwnedFd> {
    // SAFETY: no pointers; a descriptor that is not negative is new and ours.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Nic for KernelNic {
    fn open_channel(&mut self, config: &ChannelConfig) -> Result<Channel, NicError> {
        let queue = config.queue;
        if self.slot(queue)?.is_some() {
            return Err(NicError::ChannelOpen { queue });
        }
        let prepared = self.prepared.take_if(|(ready, _)| ready == config);
        let mapping = self.mapping.clone();
        let (xsk_config, options) = self.xsk_config(config, &mapping);
        let (xsk, rings, log) = match &mut self.authority {
            Authority::Own(gate) => {
                let prepared = match prepared {
                    Some((_, prepared)) => prepared,
                    None => Xsk::prepare(&xsk_config, &options)?,
                };
                let (xsk, rings) = prepared.bind(&xsk_config, &options)?;
                let mut log = None;
                if config.role != Role::None {
                    gate.register_xsk(queue, xsk.as_fd())?;
                    gate.set_role(queue, config.role)?;
                    log = Some(gate.log(queue)?);
                }
                (xsk, rings, log)
            }
            Authority::Daemon(steward) => {
                steward.open_channel(&xsk_config, self.multi_buffer, config.role)?
            }
        };
        let poller = match config.role != Role::None && self.poll_queues && !self.is_generic() {
            true => QueuePoller::new(*self.udp.local().ip()).ok(),
            false => None,
        };
        *self.slot(queue)? = Some(Open {
            xsk,
            role: config.role,
            poller,
            log,
        });
        self.list_descriptors();
        let crate::xsk::Rings {
            fill,
            rx,
            tx,
            completion,
        } = rings;
        Ok(Channel {
            queue,
            fill,
            rx,
            tx,
            completion,
        })
    }

    fn prepare_channel(&mut self, config: &ChannelConfig) -> Result<(), NicError> {
        // A daemon has the privilege to register, and no socket of ours may have the queue when it does.
        if matches!(self.authority, Authority::Daemon(_)) {
            return Ok(());
        }
        self.prepared = None;
        let mapping = self.mapping.clone();
        let (xsk_config, options) = self.xsk_config(config, &mapping);
        self.prepared = Some((*config, Xsk::prepare(&xsk_config, &options)?));
        Ok(())
    }

    fn rebuild_channel(&mut self, old: Channel, config: &ChannelConfig) -> Result<Channel, NicError> {
        // The queue stays, and with it the NAPI instance that its poller has learnt.
        let poller = (self.channels.get_mut(config.queue as usize))
            .and_then(Option::as_mut)
            .and_then(|open| open.poller.take());
        match &self.authority {
            Authority::Own(_) => self.close_channel(old)?,
            Authority::Daemon(_) => {
                // The daemon replaces what is there, and the sessions stay; but the queue is free for it only when nobody has the socket.
                drop(old);
                *self.slot(config.queue)? = None;
            }
        }
        let channel = self.open_channel(config)?;
        if let (Some(poller), Some(open)) = (poller, self.slot(config.queue)?) {
            open.poller = Some(poller);
        }
        Ok(channel)
    }

    fn close_channel(&mut self, channel: Channel) -> Result<(), NicError> {
        self.detach(channel.queue)
        // `channel` goes here: its mappings are the last that keep the socket.
    }

    #[inline]
    fn wake_tx(&mut self, queue: u32) -> Result<(), WakeError> {
        self.xsk(queue).ok_or(WakeError::Gone)?.wake_tx()
    }

    #[inline]
    fn wake_rx(&mut self, queue: u32) -> Result<(), WakeError> {
        self.xsk(queue).ok_or(WakeError::Gone)?.wake_rx()
    }

    fn is_gone(&self) -> bool {
        (self.channels.iter().flatten()).any(|open| open.xsk.lost_its_device())
    }

    fn statistics(&self, queue: u32) -> io::Result<XdpStatistics> {
        self.xsk(queue)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENXIO))?
            .statistics()
    }

    fn open_session(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), NicError> {
        match &mut self.authority {
            Authority::Own(gate) => Ok(gate.open_session(queue, session)?),
            Authority::Daemon(steward) => steward.open_session(session),
        }
    }

    fn close_session(&mut self, queue: u32, place: u32) -> Result<(), NicError> {
        match &mut self.authority {
            Authority::Own(gate) => Ok(gate.close_session(queue, place)?),
            Authority::Daemon(steward) => steward.close_session(place),
        }
    }

    fn quiesce(&mut self, queue: u32) -> Result<(), NicError> {
        match &mut self.authority {
            Authority::Own(gate) => Ok(gate.quiesce(queue)?),
            Authority::Daemon(steward) => steward.quiesce(queue),
        }
    }

    fn log(&self, queue: u32) -> Result<Log, NicError> {
        match &self.authority {
            Authority::Own(gate) => Ok(gate.log(queue)?),
            Authority::Daemon(_) => {
                let open = self.channels.get(queue as usize).and_then(Option::as_ref);
                let log = open.and_then(|open| open.log.as_ref());
                log.map(Log::share).ok_or(NicError::NoChannel { queue })
            }
        }
    }

    fn passed_count(&self) -> u64 {
        let here = |log: &Log| log.passed() + log.counter(Verdict::PassControl);
        match &self.authority {
            Authority::Own(gate) => self.logs().map(here).sum::<u64>() + gate.passed_elsewhere(),
            Authority::Daemon(steward) => steward.passed_count(self.logs()),
        }
    }

    fn gate_counters(&self) -> Result<Counters, NicError> {
        match &self.authority {
            Authority::Own(gate) => Ok(gate.counters()?),
            Authority::Daemon(_) => Ok(Steward::counters(self.logs())),
        }
    }

    fn local(&self) -> SocketAddrV4 {
        self.udp.local()
    }

    #[inline]
    fn busy_poll(&mut self, queue: u32) {
        if let Some(Some(Open {
            poller: Some(poller), ..
        })) = self.channels.get(queue as usize)
        {
            poller.poll();
        }
    }

    #[inline]
    fn keep_queue(&mut self, queue: u32, keep: bool) -> bool {
        // Who waits on the descriptor does not poll meanwhile.
        let keep = keep && self.epoll.get().is_none();
        match self.channels.get_mut(queue as usize) {
            Some(Some(Open {
                poller: Some(poller), ..
            })) => poller.keep(keep),
            _ => false,
        }
    }

    fn busy_poll_port(&mut self, queue: u32) -> Option<u16> {
        self.channels
            .get_mut(queue as usize)?
            .as_mut()?
            .poller
            .as_mut()?
            .wanted_port()
    }

    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]> {
        crate::route::known(ip, self.interface_index)
    }

    fn udp_send(&mut self, port: Port, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        if port == Port::Control && !self.udp.has_control() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.udp.send(port, to, payload)
    }

    fn udp_recv(&mut self, port: Port, space: &mut [u8]) -> io::Result<Option<UdpEvent>> {
        if port == Port::Control && !self.udp.has_control() {
            return Ok(None);
        }
        self.udp.recv(port, space)
    }

    fn udp_recv_into(
        &mut self,
        port: Port,
        umem: &Umem,
        addr: u64,
        len: u64,
    ) -> io::Result<Option<UdpEvent>> {
        self.udp.recv_into(port, umem, addr, len)
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<bool> {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // The daemon's descriptor comes and goes with it; it is not for the epoll instance, so whoever waits on that hears of news later.
        let sockets = self.poll.len();
        if let Authority::Daemon(steward) = &self.authority
            && let Some(fd) = steward.client.raw_fd()
        {
            let events = libc::POLLIN;
            self.poll.push(libc::pollfd {
                fd,
                events,
                revents: 0,
            });
        }
        // SAFETY: the list is live and of the length given; the timeout is a live local; no signal mask is given.
        let ready = unsafe {
            libc::ppoll(
                self.poll.as_mut_ptr(),
                self.poll.len() as libc::nfds_t,
                &raw const timeout,
                std::ptr::null(),
            )
        };
        let error = io::Error::last_os_error();
        if self.poll.len() > sockets
            && let Some(entry) = self.poll.pop()
            && entry.revents != 0
            && let Authority::Daemon(steward) = &mut self.authority
        {
            steward.client.hint();
        }
        if ready >= 0 {
            return Ok(ready > 0);
        }
        if error.kind() == io::ErrorKind::Interrupted {
            Ok(false)
        } else {
            Err(error)
        }
    }

    fn lead(
        &mut self,
        queue: u32,
        general: Option<u32>,
        from: SocketAddrV4,
        hashed: HashInput,
        elsewhere: &[SocketAddrV4],
        alone: bool,
    ) -> Result<Option<NonZeroU16>, NicError> {
        let Some(steering) = &mut self.steering else {
            return Ok(None);
        };
        let local = self.udp.local();
        let flow = |source_port: u16, destination_port: u16| Flow {
            source: *from.ip(),
            destination: *local.ip(),
            source_port,
            destination_port,
        };
        let (theirs, ours) = (from.port(), local.port());
        let other = |source, destination, queue| Neighbouring {
            flow: flow(source, destination),
            queue,
        };
        let mut others = vec![
            other(theirs, ours, general),
            other(theirs.wrapping_add(1), ours.wrapping_add(1), None),
            other(theirs, ours.wrapping_add(1), None),
            other(theirs.wrapping_add(1), ours, None),
        ];
        if hashed == HashInput::Addresses {
            steering.lead_addresses(queue, &flow(theirs, ours), &others)?;
            return Ok(None);
        }
        others.extend(elsewhere.iter().map(|from| Neighbouring {
            flow: Flow {
                source: *from.ip(),
                source_port: from.port(),
                ..flow(0, ours)
            },
            queue: None,
        }));
        let seed = Entropy::Kernel.draw() as u32;
        let port = steering.lead(queue, &flow(0, ours), &others, alone, seed)?;
        Ok(NonZeroU16::new(port))
    }

    fn keep(&mut self, general: u32, peer: SocketAddrV4) -> Result<(), NicError> {
        let local = self.udp.local();
        let flow = Flow {
            source: *peer.ip(),
            destination: *local.ip(),
            source_port: peer.port(),
            destination_port: local.port(),
        };
        match &mut self.steering {
            Some(steering) => Ok(steering.keep(&flow, general)?),
            None => Ok(()),
        }
    }

    fn unlead(&mut self) -> Result<(), NicError> {
        match &mut self.steering {
            Some(steering) => Ok(steering.unlead()?),
            None => Ok(()),
        }
    }

    fn steward(&mut self) -> Option<&mut Client> {
        match &mut self.authority {
            Authority::Own(_) => None,
            Authority::Daemon(steward) => Some(&mut steward.client),
        }
    }

    #[inline]
    fn has_news(&self, since_ns: u64) -> bool {
        match &self.authority {
            Authority::Own(_) => false,
            Authority::Daemon(steward) => since_ns >= NEWS_EVERY_NS || steward.client.has_news(),
        }
    }

    fn session_opened(&mut self, place: u32, key: u64) {
        if let Authority::Daemon(steward) = &mut self.authority {
            steward.opened(place, key);
        }
    }

    fn session_ended(&mut self, key: u64) {
        if let Authority::Daemon(steward) = &mut self.authority {
            steward.ended(key);
        }
    }

    fn device(&self) -> Option<Device> {
        self.device
            .filter(|_| self.effective_mode() == EffectiveMode::ZeroCopy)
    }

    fn land_in_copy_mode(&mut self) {
        self.lands_in_copy_mode = true;
    }

    fn effective_mode(&self) -> EffectiveMode {
        let receiving = || {
            self.channels
                .iter()
                .flatten()
                .filter(|open| open.role != Role::None)
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
