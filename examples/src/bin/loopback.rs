//! A port of another kind: two hosts in memory, each of which puts packets into the other's frames when it flushes. It says what was
//! accepted (a witness), or nothing.
//!
//! ```text
//! cargo run -p lm-examples --bin loopback
//! ```

use std::collections::VecDeque;
use std::error::Error;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lm_dataplane::memory::Mapping;
use lm_dataplane::port::{
    Caps, Datagrams, EffectiveMode, Flushed, Port, PortError, QueueDrops, QueueSpec, Role, RxQueue, Socket,
    SocketEvent, TxQueue, WakeError,
};
use lm_dataplane::ring::Descriptor;
use lm_dataplane::{ConnectOptions, Counters, Device, Endpoint, Message, Outcome};
use lm_ebpf::model::ModelGate;
use lm_ebpf::{Log, Role as GateRole, Verdict};
use lm_examples::{Dice, HOSTS, PORT, ROUND_NS, noise, request, run, small};
use lm_protocol::landing::{LogEntry, SessionAdmission};
use lm_sim::Semantics;

/// Ethernet, IPv4 and UDP headers.
const HEADERS_LEN: usize = 14 + 20 + 8;

#[derive(Default)]
struct Queue {
    entries: VecDeque<u64>,
    packets: VecDeque<Descriptor>,
    completed: VecDeque<u64>,
    drops: QueueDrops,
}

impl Queue {
    /// The packet goes to the oldest entry.
    fn land(&mut self, mapping: &Mapping, packet: &[u8]) {
        let Some(entry) = self.entries.pop_front() else {
            self.drops.no_entry += 1;
            return;
        };
        let frame = mapping.pointer(entry + 256, packet.len() as u64);
        // SAFETY: the frame lies in the mapping, and its owner posted it.
        unsafe { std::ptr::copy_nonoverlapping(packet.as_ptr(), frame.as_ptr(), packet.len()) };
        (self.packets).push_back(Descriptor::received(entry, 256, packet.len() as u32));
    }
}

struct Host {
    mapping: Arc<Mapping>,
    gate: ModelGate,
    queues: [Queue; 2],
    /// Datagrams for the data and the control socket.
    sockets: [VecDeque<(SocketAddrV4, Vec<u8>)>; 2],
    passed: u64,
    witness: bool,
    dice: Dice,
    /// A packet that the next one overtakes.
    late: Option<(u32, Vec<u8>)>,
}

impl Host {
    fn arrive(&mut self, queue: u32, packet: Vec<u8>) {
        let verdict = self.gate.run(queue, &packet);
        if matches!(verdict, Verdict::RedirectLanding | Verdict::RedirectGeneral) {
            self.queues[queue as usize].land(&self.mapping, &packet);
        } else {
            let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
            let ip = <[u8; 4]>::try_from(&packet[26..30]).expect("four bytes");
            let from = SocketAddrV4::new(ip.into(), port(34));
            let socket = usize::from(port(36) - PORT);
            self.sockets[socket].push_back((from, packet[HEADERS_LEN..].to_vec()));
            self.passed += 1;
        }
    }
}

/// Both hosts, and the time.
#[derive(Default)]
struct Wire {
    hosts: Vec<Host>,
    now_ns: u64,
    loses: bool,
}

impl Wire {
    /// Of a wire that loses one packet in a hundred is lost, one comes twice, one is overtaken.
    fn carry(&mut self, from: usize, queue: u32, packet: Vec<u8>) {
        let Some(to) = self.hosts.get_mut(1 - from) else {
            return;
        };
        let overtaken = to.late.take();
        let loses = self.loses;
        let mut happens = || loses && to.dice.one_in(100);
        match () {
            () if happens() => {}
            () if happens() => to.late = Some((queue, packet)),
            () => {
                if happens() {
                    to.arrive(queue, packet.clone());
                }
                to.arrive(queue, packet);
            }
        }
        if let Some((queue, packet)) = overtaken {
            to.arrive(queue, packet);
        }
    }
}

#[derive(Clone)]
struct Loopback {
    wire: Arc<Mutex<Wire>>,
    host: usize,
}

impl Loopback {
    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().expect("one thread")
    }

    fn with<R>(&self, look: impl FnOnce(&mut Host) -> R) -> R {
        look(&mut self.wire().hosts[self.host])
    }
}

/// One queue's end, with what was written and not submitted.
struct End<T> {
    port: Loopback,
    queue: u32,
    log: Log,
    written: Vec<T>,
    max: u32,
}

impl<T> fmt::Debug for End<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue {} of host {}", self.queue, self.port.host)
    }
}

impl<T> End<T> {
    fn with<R>(&self, look: impl FnOnce(&mut Queue, &Mapping) -> R) -> R {
        let number = self.queue as usize;
        (self.port).with(|host| look(&mut host.queues[number], &host.mapping))
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
        let len = self.written.len().max(offset as usize + 1);
        self.written.resize(len, 0);
        self.written[offset as usize] = address;
    }
    fn submit(&mut self, count: u32) {
        let written: Vec<u64> = self.written.drain(..count as usize).collect();
        self.with(|queue, _| queue.entries.extend(written));
    }
    fn allow(&mut self, until: u64) {
        self.log.set_posted(until);
    }
    fn set_message_limit(&mut self, row: u32, message: u32) {
        self.log.set_message_limit(row, message);
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
    fn descending(&self, position: u64, first: &LogEntry, most: u32) -> u32 {
        self.log.descending(position, first, most)
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
            self.port.wire().carry(self.port.host, self.queue, packet);
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
        HOSTS[self.host]
    }
    fn send(&mut self, socket: Socket, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let port = PORT + u16::from(socket == Socket::Control);
        let from = SocketAddrV4::new(*HOSTS[self.host].ip(), port);
        let socket = usize::from(to.port() - PORT);
        let wire = &mut *self.wire();
        if let Some(host) = wire.hosts.get_mut(1 - self.host)
            && !(wire.loses && host.dice.one_in(100))
        {
            host.sockets[socket].push_back((from, payload.to_vec()));
            host.passed += 1;
        }
        Ok(())
    }
    fn recv(&mut self, socket: Socket, space: &mut [u8]) -> io::Result<Option<SocketEvent>> {
        let socket = usize::from(socket == Socket::Control);
        let next = self.with(|host| host.sockets[socket].pop_front());
        Ok(next.map(|(from, payload)| {
            space[..payload.len()].copy_from_slice(&payload);
            let len = payload.len();
            SocketEvent::Datagram { from, len }
        }))
    }
    fn neighbour(&mut self, ip: Ipv4Addr) -> Option<[u8; 6]> {
        Some(mac(ip))
    }
    fn next_hop(&mut self, ip: Ipv4Addr) -> Result<[u8; 6], Box<dyn Error + Send + Sync>> {
        Ok(mac(ip))
    }
}

fn mac(ip: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = ip.octets();
    [2, 0, a, b, c, d]
}

impl Port for Loopback {
    type Rx = End<u64>;
    type Tx = End<Descriptor>;

    fn now_ns(&self) -> u64 {
        self.wire().now_ns
    }
    fn open(&mut self, spec: &QueueSpec) -> Result<(Option<End<u64>>, End<Descriptor>), PortError> {
        let log = || {
            self.with(|host| {
                let role = match (spec.role, host.witness) {
                    (Role::Landing, true) => GateRole::Landing,
                    (Role::Landing, false) => GateRole::LandingZeroCopy,
                    _ => GateRole::General,
                };
                host.gate.set_role(spec.queue, role);
                host.gate.set_xsk(spec.queue, true);
                host.gate.log(spec.queue).expect("a queue of the gate's")
            })
        };
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
        rx.with(|queue, _| *queue = Queue::default());
        rx.allow(rx.accepted());
        Ok(())
    }
    fn admit(&mut self, queue: u32, session: &SessionAdmission) -> Result<(), PortError> {
        self.with(|host| host.gate.open_session(queue, session));
        Ok(())
    }
    fn revoke(&mut self, queue: u32, row: u32) -> Result<(), PortError> {
        self.with(|host| host.gate.close_session(queue, row));
        Ok(())
    }
    fn side(&mut self) -> &mut dyn Datagrams {
        self
    }
    fn passed_count(&self) -> u64 {
        self.with(|host| host.passed)
    }
    fn wait(&mut self, timeout: Duration) -> io::Result<bool> {
        self.wire().now_ns += timeout.as_nanos() as u64;
        Ok(true)
    }
    fn effective_mode(&self) -> EffectiveMode {
        EffectiveMode::Simulated
    }
    fn seed(&self) -> Option<u64> {
        self.with(|host| Some(host.dice.0))
    }
}

impl Loopback {
    fn end<T>(&self, spec: &QueueSpec, log: Log, max: u32) -> End<T> {
        End {
            port: self.clone(),
            queue: spec.queue,
            log,
            written: Vec::new(),
            max,
        }
    }

    /// An endpoint on the next host.
    fn endpoint(wire: &Arc<Mutex<Wire>>, witness: bool, seed: u64) -> Endpoint<Loopback> {
        let host = wire.lock().expect("one thread").hosts.len();
        let device = Device {
            name: format!("loopback{host}"),
            mac: mac(*HOSTS[host].ip()),
            mtu: 1500,
            queues: 2,
            rx_ring_len: 256,
            chunk_len: 2048,
            caps: Caps {
                witness,
                tx_steers: true,
                ..Caps::copying(0)
            },
        };
        let opened = Endpoint::over(&device, &small(), |memory| {
            wire.lock().expect("one thread").hosts.push(Host {
                mapping: Arc::clone(memory.mapping),
                gate: ModelGate::new(Some(*HOSTS[host].ip()), PORT, PORT + 1),
                queues: Default::default(),
                sockets: Default::default(),
                passed: 0,
                witness,
                dice: Dice(seed << 1 | host as u64),
                late: None,
            });
            let wire = Arc::clone(wire);
            Ok(Loopback { wire, host })
        });
        opened.expect("an endpoint")
    }
}

/// Messages of many lengths, up to four under way. Each is compared when it has come, and once more behind the next two. On a wire that
/// loses packets some come again. What the receiver counted.
fn carry_all(semantics: Semantics, seed: u64, loses: bool) -> Counters {
    let wire = Arc::new(Mutex::new(Wire {
        loses,
        ..Wire::default()
    }));
    let mut ends = [0, 1].map(|_| Loopback::endpoint(&wire, semantics == Semantics::Copy, seed));
    let peer = request(&mut ends[0], 1, &ConnectOptions::default());
    let round = |ends: &mut [Endpoint<Loopback>; 2]| {
        wire.lock().expect("one thread").now_ns += ROUND_NS;
        for end in ends {
            end.poll();
        }
    };
    while match ends[0].peer(peer).session_outcome() {
        Some(outcome) => outcome.map(|()| false).expect("a session"),
        None => true,
    } {
        round(&mut ends);
    }
    let mut dice = Dice(!seed);
    let lens: Vec<usize> = (0..8).map(|_| 1 + dice.roll() as usize % 200_000).collect();
    let payload = |number: u64| noise(seed << 8 | number, lens[number as usize]);
    let (mut sent, mut confirmed, mut got) = (0, 0, 0);
    let mut kept = VecDeque::<Message>::new();
    for _ in 0..1_000_000 {
        let number = sent as u64;
        if sent < lens.len()
            && sent < confirmed + 4
            && ends[0].try_send_copy(peer, &payload(number), number).is_ok()
        {
            sent += 1;
        }
        round(&mut ends);
        while let Some(message) = ends[1].try_recv().expect("reliable") {
            got += 1;
            kept.push_back(message);
            for message in &kept {
                let number = message.tag();
                assert!(message[..] == payload(number), "seed {seed}: message {number}");
            }
            kept.drain(..kept.len().saturating_sub(3));
        }
        while let Some(completion) = ends[0].try_completion() {
            assert_eq!(completion.outcome, Outcome::Delivered, "seed {seed}");
            confirmed += 1;
        }
        if confirmed == lens.len() && got == lens.len() {
            let counters = ends[1].counters();
            assert_eq!(counters.violations.total(), 0, "seed {seed}");
            return counters;
        }
    }
    panic!("seed {seed}: {got} of {} messages", lens.len());
}

fn main() {
    run(|semantics, seed| {
        let counters = carry_all(semantics, seed, true);
        let (messages, requested) = (counters.messages_received, counters.fragments_requested);
        format!("{messages} messages, {requested} fragments came again")
    });
}

#[test]
fn a_port_without_rings_carries_messages() {
    for semantics in lm_examples::semantics() {
        let counters = carry_all(semantics, 0, false);
        // All but the smallest landed, and nothing came by the sockets.
        assert_eq!((counters.fragments_one_copy, counters.user_copied_bytes), (0, 0));
    }
}

#[test]
fn seeded_losses_on_a_port_without_rings() {
    for semantics in lm_examples::semantics() {
        let requested: u64 = (0..lm_examples::SEEDS)
            .map(|seed| carry_all(semantics, seed, true).fragments_requested)
            .sum();
        assert!(requested > 0);
    }
}
