//! The port: two hosts, each of which puts packets into the other's frames when it flushes. The gate's model judges them on the same
//! thread, as a port over a poll-mode driver would have it, and like one it keeps [`HELD`] landing entries back.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lm_ebpf::model::ModelGate;
use lm_ebpf::{Log, Role as GateRole, Verdict};
use lm_protocol::landing::{LogEntry, SessionAdmission};

use crate::memory::Mapping;
use crate::port::{
    Datagrams, EffectiveMode, Flushed, Port, PortError, QueueDrops, QueueSpec, Role, RxQueue, Socket,
    SocketEvent, TxQueue, WakeError,
};
use crate::ring::Descriptor;
use crate::simnic::datagram::{parse_datagram, write_datagram};
use crate::simnic::impair::{Handed, Link, Place, Via};
use crate::simnic::mac_of;
use crate::simnic::sockets::Sockets;

pub(super) const HELD: usize = 64;

#[derive(Default)]
pub(super) struct Queue {
    entries: VecDeque<u64>,
    recalled: VecDeque<u64>,
    waiting: VecDeque<Vec<u8>>,
    packets: VecDeque<Descriptor>,
    completed: VecDeque<u64>,
    held: usize,
    drops: QueueDrops,
}

pub(super) struct Host {
    pub(super) mapping: Arc<Mapping>,
    pub(super) gate: ModelGate,
    pub(super) queues: [Queue; 2],
    pub(super) sockets: Sockets,
    pub(super) link: Link,
    pub(super) witness: bool,
}

/// Both hosts, and the time.
pub(super) type Hosts = Arc<Mutex<([Host; 2], u64)>>;

pub(super) struct Loopback(pub(super) Hosts, pub(super) usize);

/// One queue's end, with what was written and not submitted.
pub(super) struct End<T> {
    hosts: Hosts,
    host: usize,
    queue: u32,
    log: Log,
    written: Vec<T>,
    max: u32,
}

impl<T> std::fmt::Debug for End<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "queue {} of host {}", self.queue, self.host)
    }
}

impl<T> End<T> {
    fn with<R>(&self, look: impl FnOnce(&mut Queue, &Mapping) -> R) -> R {
        let host = &mut locked(&self.hosts).0[self.host];
        look(&mut host.queues[self.queue as usize], &host.mapping)
    }
}

pub(super) fn locked(hosts: &Hosts) -> MutexGuard<'_, ([Host; 2], u64)> {
    hosts.lock().expect("one thread")
}

/// What host `from` sends, and what was on the way and is due, arrives.
pub(super) fn carry(hosts: &Hosts, from: usize, sent: Option<(u32, &[u8])>) {
    let (hosts, now_ns) = &mut *locked(hosts);
    let mut handed = VecDeque::new();
    match sent {
        Some((queue, packet)) => {
            let (link, via) = (&mut hosts[from].link, Via::Queue(queue));
            link.offer(packet, via, Place::default(), *now_ns, &mut handed);
        }
        None => hosts[from].link.release(*now_ns, &mut handed),
    }
    for Handed { packet, via } in handed {
        let Via::Queue(queue) = via else { continue };
        hosts[1 - from].arrive(queue, packet);
    }
}

impl Queue {
    /// Gives packets out for as long as enough entries are behind theirs.
    fn land(&mut self, mapping: &Mapping) {
        while self.entries.len() > self.held
            && let Some(packet) = self.waiting.pop_front()
            && let Some(entry) = self.entries.pop_front()
        {
            let frame = mapping.pointer(entry + 256, packet.len() as u64);
            // SAFETY: the frame lies in the mapping, and its owner posted it.
            unsafe { std::ptr::copy_nonoverlapping(packet.as_ptr(), frame.as_ptr(), packet.len()) };
            let descriptor = Descriptor::received(entry, 256, packet.len() as u32);
            self.packets.push_back(descriptor);
        }
    }
}

impl Host {
    fn arrive(&mut self, queue: u32, packet: Vec<u8>) {
        let verdict = self.gate.run(queue, &packet);
        if matches!(verdict, Verdict::RedirectLanding | Verdict::RedirectGeneral) {
            let queue = &mut self.queues[queue as usize];
            if queue.waiting.len() == queue.entries.len() {
                queue.drops.no_entry += 1;
                return;
            }
            queue.waiting.push_back(packet);
            queue.land(&self.mapping);
        } else if let Some((from, port, payload)) =
            parse_datagram(&packet, *self.sockets.address(Socket::Data).ip())
        {
            self.sockets.take(from, port, &packet[payload]);
        }
    }

    /// A queue stops: entries that no packet was accepted for come back.
    pub(super) fn stop(&mut self, queue: usize) -> usize {
        let queue_of = &mut self.queues[queue];
        let unused = queue_of.entries.split_off(queue_of.waiting.len());
        let count = unused.len();
        queue_of.recalled.extend(unused);
        if let Some(mut log) = self.gate.log(queue as u32) {
            log.set_posted(log.producer());
        }
        count
    }
}

impl RxQueue for End<u64> {
    fn entries_max(&self) -> u32 {
        self.max
    }
    fn room(&mut self, _: u32) -> u32 {
        self.max - self.with(|queue, _| queue.entries.len() as u32)
    }
    fn write(&mut self, offset: u32, address: u64) {
        self.written
            .resize(self.written.len().max(offset as usize + 1), 0);
        self.written[offset as usize] = address;
    }
    fn submit(&mut self, count: u32) {
        let written: Vec<u64> = self.written.drain(..count as usize).collect();
        self.with(|queue, mapping| {
            queue.entries.extend(written);
            queue.land(mapping);
        });
    }
    fn allow(&mut self, until: u64) {
        self.log.set_posted(until);
    }
    fn set_message_limit(&mut self, row: u32, message: u32) {
        self.log.set_message_limit(row, message);
    }
    fn recalled(&mut self) -> Option<u64> {
        self.with(|queue, _| queue.recalled.pop_front())
    }
    fn available(&mut self, max: u32) -> u32 {
        self.with(|queue, _| max.min(queue.packets.len() as u32))
    }
    fn packet(&self, offset: u32) -> Descriptor {
        self.with(|queue, _| queue.packets[offset as usize])
    }
    fn release(&mut self, count: u32) {
        self.with(|queue, _| drop(queue.packets.drain(..count as usize)));
    }
    fn accepted(&self) -> u64 {
        self.log.producer()
    }
    fn entry(&self, position: u64) -> LogEntry {
        self.log.entry(position)
    }
    fn descending(&self, position: u64, first: &LogEntry, any_cpu: bool, most: u32) -> u32 {
        self.log.descending(position, first, any_cpu, most)
    }
    fn drops(&self) -> QueueDrops {
        self.with(|queue, _| queue.drops)
    }
}

impl TxQueue for End<Descriptor> {
    fn descriptors_max(&self) -> u32 {
        self.max
    }
    fn room(&mut self, _: u32) -> u32 {
        self.max
    }
    fn write(&mut self, _: u32, descriptor: Descriptor) {
        self.written.push(descriptor);
    }
    fn submit(&mut self, _: u32) {}
    fn flush(&mut self) -> Result<Flushed, WakeError> {
        for descriptor in std::mem::take(&mut self.written) {
            let packet = self.with(|queue, mapping| {
                queue.completed.push_back(descriptor.addr);
                // SAFETY: the packet lies in the mapping, and its owner leaves it alone until it is completed.
                unsafe { mapping.slice(descriptor.start(), descriptor.len.into()) }.to_vec()
            });
            carry(&self.hosts, self.host, Some((self.queue, &packet)));
        }
        Ok(Flushed {
            woken: true,
            unsent: false,
        })
    }
    fn completed(&mut self, max: u32) -> u32 {
        self.with(|queue, _| max.min(queue.completed.len() as u32))
    }
    fn completion(&self, offset: u32) -> u64 {
        self.with(|queue, _| queue.completed[offset as usize])
    }
    fn release(&mut self, count: u32) {
        self.with(|queue, _| drop(queue.completed.drain(..count as usize)));
    }
}

impl Datagrams for Loopback {
    fn local(&self) -> SocketAddrV4 {
        locked(&self.0).0[self.1].sockets.address(Socket::Data)
    }
    fn send(&mut self, socket: Socket, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let mut packet = Vec::new();
        let from = locked(&self.0).0[self.1].sockets.address(socket);
        write_datagram(&mut packet, from, to, payload);
        carry(&self.0, self.1, Some((0, &packet)));
        Ok(())
    }
    fn recv(&mut self, socket: Socket, space: &mut [u8]) -> io::Result<Option<SocketEvent>> {
        let sockets = &mut locked(&self.0).0[self.1].sockets;
        let copy = |payload: &[u8]| space[..payload.len()].copy_from_slice(payload);
        Ok(sockets.next_event(socket, usize::MAX, copy))
    }
    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]> {
        Some(mac_of(ip))
    }
    fn next_hop(&mut self, ip: Ipv4Addr) -> Result<[u8; 6], Box<dyn std::error::Error + Send + Sync>> {
        Ok(mac_of(ip))
    }
}

impl Port for Loopback {
    type Rx = End<u64>;
    type Tx = End<Descriptor>;

    fn now_ns(&self) -> u64 {
        0
    }
    fn open(&mut self, spec: &QueueSpec) -> Result<(Option<End<u64>>, End<Descriptor>), PortError> {
        let host = &mut locked(&self.0).0[self.1];
        let (role, held) = match (spec.role, host.witness) {
            (Role::Landing, true) => (GateRole::Landing, HELD),
            (Role::Landing, false) => (GateRole::LandingZeroCopy, HELD),
            _ => (GateRole::General, 0),
        };
        host.gate.set_role(spec.queue, role);
        host.gate.set_xsk(spec.queue, true);
        host.queues[spec.queue as usize].held = held;
        let log = || host.gate.log(spec.queue).expect("a queue of the gate's");
        Ok((
            Some(self.end(spec, log(), spec.rx_len)),
            self.end(spec, log(), spec.tx_len),
        ))
    }
    fn rebuild(
        &mut self,
        rx: &mut End<u64>,
        _: &mut End<Descriptor>,
        _: &QueueSpec,
    ) -> Result<(), PortError> {
        rx.with(|queue, _| {
            let held = queue.held;
            *queue = Queue {
                held,
                ..Queue::default()
            };
        });
        rx.allow(rx.accepted());
        Ok(())
    }
    fn admit(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), PortError> {
        locked(&self.0).0[self.1].gate.open_session(queue, session);
        Ok(())
    }
    fn revoke(&mut self, queue: u32, row: u32) -> Result<(), PortError> {
        locked(&self.0).0[self.1].gate.close_session(queue, row);
        Ok(())
    }
    fn side(&mut self) -> &mut dyn Datagrams {
        self
    }
    fn passed_count(&self) -> u64 {
        locked(&self.0).0[self.1].sockets.passed()
    }
    fn wait(&mut self, _: Duration) -> io::Result<bool> {
        Ok(true)
    }
    fn effective_mode(&self) -> EffectiveMode {
        EffectiveMode::Simulated
    }
}

impl Loopback {
    fn end<T>(&self, spec: &QueueSpec, log: Log, max: u32) -> End<T> {
        End {
            hosts: self.0.clone(),
            host: self.1,
            queue: spec.queue,
            log,
            written: Vec::new(),
            max,
        }
    }
}
