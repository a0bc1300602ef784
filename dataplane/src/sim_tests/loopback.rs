//! A third port, in memory and without rings: what [`crate::port`] asks for, and nothing else, carries messages. Two hosts, each of which
//! puts packets into the other's frames when it flushes; the gate's model judges them on the same thread, as a port over a poll-mode
//! driver would have it.
// Not in the build whose instructions are counted: a second kind of engine changes what the compiler inlines.
#![cfg(all(test, debug_assertions))]

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lm_ebpf::model::ModelGate;
use lm_ebpf::{Log, Verdict};
use lm_protocol::geometry::Wire;
use lm_protocol::landing::{LogEntry, SessionAdmission};

use super::bed::{BedConfig, PORT, data_address, engine_on, fill, ip, noise, plan};
use crate::config::ConnectOptions;
use crate::engine::Engine;
use crate::memory::{HugePages, Mapping, Umem};
use crate::port::{
    Caps, Datagrams, EffectiveMode, Flushed, Port, PortError, QueueDrops, QueueSpec, Role, RxQueue, Socket,
    SocketEvent, TxQueue, WakeError,
};
use crate::ring::Descriptor;
use crate::simnic::datagram::{parse_datagram, write_datagram};
use crate::simnic::mac_of;

const QUEUES: u32 = 2;

#[derive(Default)]
struct Queue {
    entries: VecDeque<u64>,
    packets: VecDeque<Descriptor>,
    completed: VecDeque<u64>,
    drops: QueueDrops,
}

struct Host {
    mapping: Arc<Mapping>,
    gate: ModelGate,
    queues: Vec<Queue>,
    sockets: [VecDeque<(SocketAddrV4, Vec<u8>)>; 2],
    passed: u64,
}

type Hosts = Arc<Mutex<[Host; 2]>>;

/// One host's end.
struct Loopback {
    hosts: Hosts,
    host: usize,
}

/// One queue's end, with what was written and not submitted.
struct End<T> {
    hosts: Hosts,
    host: usize,
    queue: u32,
    log: Log,
    written: VecDeque<T>,
    max: u32,
}

impl<T> std::fmt::Debug for End<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "queue {} of host {}", self.queue, self.host)
    }
}

impl<T> End<T> {
    fn hosts(&self) -> MutexGuard<'_, [Host; 2]> {
        self.hosts.lock().expect("one thread")
    }

    fn with<R>(&self, look: impl FnOnce(&mut Queue) -> R) -> R {
        look(&mut self.hosts()[self.host].queues[self.queue as usize])
    }
}

impl Host {
    fn arrive(&mut self, queue: u32, ip: Ipv4Addr, packet: &[u8]) {
        let verdict = self.gate.run(queue, packet);
        if matches!(verdict, Verdict::RedirectLanding | Verdict::RedirectGeneral) {
            let queue = &mut self.queues[queue as usize];
            let Some(entry) = queue.entries.pop_front() else {
                queue.drops.no_entry += 1;
                return;
            };
            let frame = self.mapping.pointer(entry + 256, packet.len() as u64);
            // SAFETY: the frame lies in the mapping, and its owner posted it.
            unsafe { std::ptr::copy_nonoverlapping(packet.as_ptr(), frame.as_ptr(), packet.len()) };
            let descriptor = Descriptor::received(entry, 256, packet.len() as u32);
            queue.packets.push_back(descriptor);
        } else if let Some((from, port, payload)) = parse_datagram(packet, ip) {
            self.passed += 1;
            self.sockets[usize::from(port != PORT)].push_back((from, packet[payload].to_vec()));
        }
    }
}

impl RxQueue for End<u64> {
    fn entries_max(&self) -> u32 {
        self.max
    }
    fn room(&mut self, _: u32) -> u32 {
        self.max - self.with(|queue| queue.entries.len() as u32)
    }
    fn write(&mut self, offset: u32, address: u64) {
        assert_eq!(offset as usize, self.written.len(), "in order");
        self.written.push_back(address);
    }
    fn submit(&mut self, count: u32) {
        let written = self.written.drain(..count as usize).collect::<Vec<_>>();
        self.with(|queue| queue.entries.extend(written));
    }
    fn allow(&mut self, until: u64) {
        self.log.set_posted(until);
    }
    fn set_message_limit(&mut self, place: u32, message: u32) {
        self.log.set_message_limit(place, message);
    }
    fn available(&mut self, max: u32) -> u32 {
        self.with(|queue| max.min(queue.packets.len() as u32))
    }
    fn packet(&self, offset: u32) -> Descriptor {
        self.with(|queue| queue.packets[offset as usize])
    }
    fn release(&mut self, count: u32) {
        self.with(|queue| drop(queue.packets.drain(..count as usize)));
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
        self.with(|queue| queue.drops)
    }
}

impl TxQueue for End<Descriptor> {
    fn descriptors_max(&self) -> u32 {
        self.max
    }
    fn room(&mut self, _: u32) -> u32 {
        self.max
    }
    fn write(&mut self, offset: u32, descriptor: Descriptor) {
        assert_eq!(offset as usize, self.written.len(), "in order");
        self.written.push_back(descriptor);
    }
    fn submit(&mut self, _: u32) {}
    fn flush(&mut self) -> Result<Flushed, WakeError> {
        for descriptor in std::mem::take(&mut self.written) {
            let mut hosts = self.hosts();
            let from = &mut hosts[self.host];
            // SAFETY: the packet lies in the mapping, and its owner leaves it alone until it is completed.
            let packet = unsafe { from.mapping.slice(descriptor.start(), descriptor.len.into()) }.to_vec();
            from.queues[self.queue as usize]
                .completed
                .push_back(descriptor.addr);
            let to = 1 - self.host;
            hosts[to].arrive(self.queue, ip(to), &packet);
        }
        Ok(Flushed {
            woken: true,
            unsent: false,
        })
    }
    fn completed(&mut self, max: u32) -> u32 {
        self.with(|queue| max.min(queue.completed.len() as u32))
    }
    fn completion(&self, offset: u32) -> u64 {
        self.with(|queue| queue.completed[offset as usize])
    }
    fn release(&mut self, count: u32) {
        self.with(|queue| drop(queue.completed.drain(..count as usize)));
    }
}

impl Datagrams for Loopback {
    fn local(&self) -> SocketAddrV4 {
        data_address(self.host)
    }
    fn send(&mut self, socket: Socket, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let port = PORT + u16::from(socket == Socket::Control);
        let mut packet = Vec::new();
        write_datagram(&mut packet, SocketAddrV4::new(ip(self.host), port), to, payload);
        let other = 1 - self.host;
        self.hosts.lock().expect("one thread")[other].arrive(0, ip(other), &packet);
        Ok(())
    }
    fn recv(&mut self, socket: Socket, space: &mut [u8]) -> io::Result<Option<SocketEvent>> {
        let mut hosts = self.hosts.lock().expect("one thread");
        let next = hosts[self.host].sockets[usize::from(socket == Socket::Control)].pop_front();
        Ok(next.map(|(from, payload)| {
            space[..payload.len()].copy_from_slice(&payload);
            let len = payload.len();
            SocketEvent::Datagram { from, len }
        }))
    }
    fn recv_into(
        &mut self,
        socket: Socket,
        umem: &Umem,
        addr: u64,
        len: u64,
    ) -> io::Result<Option<SocketEvent>> {
        let mut space = vec![0; len as usize];
        let event = self.recv(socket, &mut space)?;
        if let Some(SocketEvent::Datagram { len, .. }) = event {
            umem.copy_to(addr, &space[..len]);
        }
        Ok(event)
    }
    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]> {
        Some(mac_of(ip))
    }
}

impl Port for Loopback {
    type Rx = End<u64>;
    type Tx = End<Descriptor>;

    fn open(&mut self, spec: &QueueSpec) -> Result<(Option<End<u64>>, End<Descriptor>), PortError> {
        let gate = &mut self.hosts.lock().expect("one thread")[self.host].gate;
        let role = match spec.role {
            Role::Landing => lm_ebpf::Role::Landing,
            _ => lm_ebpf::Role::General,
        };
        gate.set_role(spec.queue, role);
        gate.set_xsk(spec.queue, true);
        let log = || gate.log(spec.queue).expect("a queue of the gate's");
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
        rx.with(|queue| *queue = Queue::default());
        rx.allow(rx.accepted());
        Ok(())
    }
    fn admit(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), PortError> {
        self.hosts.lock().expect("one thread")[self.host]
            .gate
            .open_session(queue, session);
        Ok(())
    }
    fn revoke(&mut self, queue: u32, place: u32) -> Result<(), PortError> {
        self.hosts.lock().expect("one thread")[self.host]
            .gate
            .close_session(queue, place);
        Ok(())
    }
    fn quiesce(&mut self, _: u32) -> Result<(), PortError> {
        Ok(())
    }
    fn side(&mut self) -> &mut dyn Datagrams {
        self
    }
    fn passed_count(&self) -> u64 {
        self.hosts.lock().expect("one thread")[self.host].passed
    }
    fn verdicts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
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
            hosts: self.hosts.clone(),
            host: self.host,
            queue: spec.queue,
            log,
            written: VecDeque::new(),
            max,
        }
    }
}

#[test]
fn a_port_without_rings_carries_messages() {
    let config = BedConfig::default();
    let plan = plan(&config, Caps::copying(0));
    let umems = [0, 1].map(|_| Umem::new(plan.total_len(), HugePages::Off).expect("memory"));
    let host = |host: usize| Host {
        mapping: umems[host].mapping().clone(),
        gate: ModelGate::new(Some(ip(host)), PORT, PORT + 1),
        queues: (0..QUEUES).map(|_| Queue::default()).collect(),
        sockets: Default::default(),
        passed: 0,
    };
    let hosts: Hosts = Arc::new(Mutex::new([host(0), host(1)]));
    let mut engines: Vec<Engine<Loopback>> = (0..2)
        .zip(umems)
        .map(|(host, umem)| {
            let hosts = hosts.clone();
            engine_on(&config, host, Loopback { hosts, host }, umem, &plan)
        })
        .collect();
    let mut now_ns = 1_000_000_000;
    let mut round = |engines: &mut Vec<Engine<Loopback>>| {
        now_ns += 20_000;
        for engine in engines.iter_mut() {
            engine.poll(now_ns);
        }
        now_ns
    };
    let now = round(&mut engines);
    let to = data_address(1);
    let addressing = engines[0].addressing_to(to, mac_of(*to.ip()));
    let index = engines[0].peers.find_or_add(to, &addressing, now).expect("room");
    let peer = engines[0].peers.id_of(index);
    let options = ConnectOptions {
        wire: Wire::Lm,
        max_message_len: 1 << 20,
        ..ConnectOptions::default()
    };
    engines[0].apply(index, &options, now);
    loop {
        let now = round(&mut engines);
        if let Some(outcome) = engines[0].application_outcome(index, now) {
            break outcome.expect("a session");
        }
    }
    for (seed, len) in [(1, 1), (2, 1400), (3, 7168), (4, 100_000), (5, 1 << 20)] {
        let payload = noise(seed, len);
        let mut region = engines[0].loan(peer, len as u64).expect("memory");
        fill(&mut region, &payload);
        let now = round(&mut engines);
        engines[0].submit(region, seed, now).expect("room");
        let message = loop {
            round(&mut engines);
            if let Some(message) = engines[1].take_message().expect("no failure") {
                break message;
            }
        };
        assert!(message.tag() == seed && message[..] == payload[..], "{len} bytes");
    }
    let counters = engines[1].counters;
    assert_eq!((counters.messages_received, counters.violations.total()), (5, 0));
    // All but the smallest landed: nothing came by the sockets.
    assert_eq!((counters.fragments_one_copy, counters.user_copied_bytes), (0, 0));
}
