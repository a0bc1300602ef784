//! The port: a device, the gate's model and the stack, as the engine sees them.

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lm_dataplane::memory::Umem;
use lm_dataplane::port::SocketEvent;
use lm_dataplane::port::{Datagrams, EffectiveMode, Port, PortError, QueueSpec, Role, RxQueue as _, Socket};
use lm_dataplane::{PortMemory, Waker};
use lm_ebpf::model::ModelGate;
use lm_protocol::landing::SessionAdmission;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::eal;
use crate::queues::{Core, DpdkRx, DpdkTx, Queue, Shared, lock};
use crate::shim::{self, Link, QUEUES};
use crate::stack::Stack;

/// How long a neighbour's answer is waited for: four questions.
const NEIGHBOUR_PATIENCE: Duration = Duration::from_millis(1300);
/// How long to sleep at most before the device is looked at again: it causes no wake-up.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// A device of DPDK's. Dropping it closes it.
#[derive(Debug)]
pub struct DpdkNic {
    pub(crate) core: Shared,
    opened: Instant,
    waker: Option<Arc<Waker>>,
}

impl DpdkNic {
    /// On a device that is not started yet. `is_aimed`: it was given places in this memory.
    pub(crate) fn new(
        link: Link,
        stack: Stack,
        facts: &shim::Facts,
        is_aimed: bool,
        memory: PortMemory<'_>,
    ) -> DpdkNic {
        let (ip, port) = (*stack.local().ip(), stack.local().port());
        let mut gate = ModelGate::new(Some(ip), port, port + 1);
        gate.set_mac(facts.mac);
        let opened = Instant::now();
        let core = Core {
            link,
            gate,
            stack,
            queues: Default::default(),
            mapping: Arc::clone(memory.mapping),
            mtu: facts.mtu,
            is_aimed,
            outgoing: VecDeque::new(),
            stuck_ns: None,
            is_down: false,
            copied: 0,
            opened,
        };
        DpdkNic {
            core: Arc::new(Mutex::new(core)),
            opened,
            waker: None,
        }
    }
}

impl Port for DpdkNic {
    type Rx = DpdkRx;
    type Tx = DpdkTx;

    #[inline]
    fn now_ns(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    fn open(&mut self, spec: &QueueSpec) -> Result<(Option<DpdkRx>, DpdkTx), PortError> {
        let queue = spec.queue;
        let mut core = lock(&self.core);
        let open = core.queues.get(queue as usize).map(|queue| queue.role);
        let queues = QUEUES as u32;
        if open.ok_or(PortError::NoQueue { queue, queues })?.is_some() {
            return Err(PortError::QueueOpen { queue });
        }
        let aims = core.is_aimed && !spec.copies && spec.role != Role::SendOnly;
        let lands = aims && spec.role == Role::Landing;
        let cleared = core.link.clear(queue as usize, lands);
        // What another queue sent is done with if the device was closed.
        core.complete();
        cleared.map_err(|fault| PortError::Other(eal::told(fault).into()))?;
        core.queues[queue as usize].open(spec, aims);
        // What the queue's last owner left goes with it.
        core.outgoing.retain(|packet| packet.queue != queue as usize);
        core.outgoing.reserve(QUEUES * spec.tx_len as usize);
        let role = match spec.role {
            Role::SendOnly => lm_ebpf::Role::None,
            Role::General => lm_ebpf::Role::General,
            Role::Landing if lands => lm_ebpf::Role::LandingZeroCopy,
            Role::Landing => lm_ebpf::Role::Landing,
        };
        core.gate.set_role(queue, role);
        core.gate.set_xsk(queue, true);
        let log = core.gate.log(queue);
        drop(core);
        let rx = log.map(|log| DpdkRx::new(Arc::clone(&self.core), spec, log));
        Ok((rx, DpdkTx::new(Arc::clone(&self.core), spec)))
    }

    fn rebuild(&mut self, rx: &mut DpdkRx, tx: &mut DpdkTx, spec: &QueueSpec) -> Result<(), PortError> {
        let queue = spec.queue;
        let mut core = lock(&self.core);
        *(core.queues.get_mut(queue as usize)).ok_or(PortError::NoQueueOpen { queue })? = Queue::default();
        drop(core);
        let (new_rx, new_tx) = self.open(spec)?;
        (*rx, *tx) = (new_rx.ok_or(PortError::NoQueueOpen { queue })?, new_tx);
        rx.allow(rx.accepted());
        Ok(())
    }

    fn admit(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), PortError> {
        lock(&self.core).gate.open_session(queue, session);
        Ok(())
    }

    fn revoke(&mut self, queue: u32, row: u32) -> Result<(), PortError> {
        lock(&self.core).gate.close_session(queue, row);
        Ok(())
    }

    fn side(&mut self) -> &mut dyn Datagrams {
        self
    }

    fn passed_count(&self) -> u64 {
        lock(&self.core).stack.passed
    }

    fn verdicts(&self) -> Vec<(&'static str, u64)> {
        let core = lock(&self.core);
        let (ignored, device) = (core.stack.ignored, core.link.counters());
        let gate = core.gate.counters();
        let gate = gate.iter().map(|(verdict, count)| (verdict.name(), count));
        gate.chain([
            ("stack_foreign", ignored.foreign),
            ("stack_fragment", ignored.fragment),
            ("stack_unasked", ignored.unasked),
            ("stack_full", ignored.full),
            ("stack_refused", ignored.refused),
            ("stack_same_address", ignored.same_address),
            ("device_unfit", device.unfit),
            ("device_missed", device.missed),
            ("device_errors", device.errors),
        ])
        .collect()
    }

    fn copied(&self) -> u64 {
        let core = lock(&self.core);
        core.copied + core.link.counters().copied
    }

    fn wake_by(&mut self, waker: Arc<Waker>) {
        self.waker = Some(waker);
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<bool> {
        let mut core = lock(&self.core);
        core.receive();
        if core.has_arrived() {
            return Ok(true);
        }
        drop(core);
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: timeout.min(LOOK_EVERY).subsec_nanos().into(),
        };
        let waker = self.waker.as_ref();
        let mut waker = waker.map(|waker| PollFd::new(waker, PollFlags::IN));
        Ok(rustix::event::poll(waker.as_mut_slice(), Some(&timeout))? > 0)
    }

    fn effective_mode(&self) -> EffectiveMode {
        match lock(&self.core).is_aimed {
            true => EffectiveMode::ZeroCopy,
            false => EffectiveMode::CopyPort,
        }
    }
}

impl Datagrams for DpdkNic {
    fn local(&self) -> SocketAddrV4 {
        lock(&self.core).stack.local()
    }

    fn send(&mut self, socket: Socket, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let mac = self.neighbour(*to.ip()).ok_or(io::ErrorKind::WouldBlock)?;
        let mut core = lock(&self.core);
        let mtu = core.mtu;
        if !core.stack.write_datagram(socket, (mac, to), payload, mtu) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match core.send_answer() {
            true => Ok(()),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn recv(&mut self, socket: Socket, space: &mut [u8]) -> io::Result<Option<SocketEvent>> {
        let room = space.len();
        let read = |payload: &[u8]| space[..payload.len()].copy_from_slice(payload);
        Ok(lock(&self.core).stack.receive(socket, room, read))
    }

    fn recv_into(
        &mut self,
        socket: Socket,
        umem: &Umem,
        addr: u64,
        len: u64,
    ) -> io::Result<Option<SocketEvent>> {
        let read = |payload: &[u8]| umem.copy_to(addr, payload);
        Ok(lock(&self.core).stack.receive(socket, len as usize, read))
    }

    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]> {
        let mut core = lock(&self.core);
        let known = core.stack.neighbour(ip, self.now_ns()).ok()?;
        core.send_answer();
        known
    }

    fn next_hop(&mut self, ip: Ipv4Addr) -> Result<[u8; 6], Box<dyn Error + Send + Sync>> {
        let deadline = Instant::now() + NEIGHBOUR_PATIENCE;
        while Instant::now() < deadline {
            let mut core = lock(&self.core);
            let known = core.stack.neighbour(ip, self.now_ns())?;
            core.send_answer();
            if let Some(mac) = known {
                return Ok(mac);
            }
            // What comes for the engine meanwhile stays ready.
            core.receive();
            drop(core);
            std::thread::sleep(LOOK_EVERY);
        }
        let text = format!("{ip} answers no ARP; check the address and that the other end of the link is up");
        Err(text.into())
    }
}
