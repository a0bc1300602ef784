//! Two endpoints, each on a thread of its own inside the namespace of its host.
#![allow(dead_code, unreachable_pub)] // each test program has its own copy and uses a part

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectOptions, Counters, Endpoint, EndpointConfig, PeerId, Session};

use crate::bed::{Namespace, Pair};

#[path = "traffic.rs"]
mod traffic;
pub use traffic::*;

pub const PORT: u16 = 7168;
pub const A: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub const B: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 2), PORT);
/// Bytes in a fragment and in its headers at MTU 1500.
pub const FRAGMENT: u64 = 1448;
/// The longest message that goes in one packet, with its digest.
pub const EAGER_MAX: u64 = FRAGMENT - 8;
pub const HEADER: u64 = 66;
/// Fragments in a window, by default.
pub const WINDOW: u64 = 256;

/// A veth pair for endpoints.
pub struct Bed {
    pub pair: Pair,
    _alone: Alone,
}

impl Bed {
    /// `None`: skipped.
    pub fn new(queues: u32) -> Option<Bed> {
        if !crate::bed::root() {
            return None;
        }
        let alone = Alone::new(true);
        Some(Bed {
            pair: Pair::new(queues),
            _alone: alone,
        })
    }

    /// Opens an endpoint on each host and runs both sides; each is polled until the other is done. What they drop is accounted for.
    pub fn talk<X: Send, Y: Send>(
        &self,
        config_a: &EndpointConfig,
        config_b: &EndpointConfig,
        side_a: impl FnOnce(&mut Endpoint) -> X + Send,
        side_b: impl FnOnce(&mut Endpoint) -> Y + Send,
    ) -> (X, Y) {
        let ((x, a), (y, b)) = both(
            &self.pair.a,
            &self.pair.b,
            |start, over| run(config_a, side_a, start, over),
            |start, over| run(config_b, side_b, start, over),
        );
        assert_accounted(&a, &[b], false);
        assert_accounted(&b, &[a], false);
        (x, y)
    }
}

/// Both sides begin together.
pub struct Start(Sender<()>, Mutex<Receiver<()>>);

impl Start {
    /// Waits for the other side to get as far.
    pub fn meet(&self) {
        let _ = self.0.send(());
        let receiver = self.1.lock().expect("one waits at a time");
        receiver.recv_timeout(PATIENCE).expect("the other side");
    }

    /// The same, while the endpoint is being polled.
    pub fn meet_polling(&self, endpoint: &mut Endpoint) {
        std::thread::scope(|scope| {
            let met = scope.spawn(|| self.meet());
            wait_until(endpoint, "the other side goes on", |_| met.is_finished());
            met.join().expect("the other side");
        });
    }
}

/// Which side is done, in whatever way.
pub struct Over<'a> {
    mine: &'a AtomicBool,
    other: &'a AtomicBool,
}

impl Over<'_> {
    pub fn other(&self) -> bool {
        self.other.load(Ordering::Acquire)
    }

    /// Waits until the other side is done; `false`: it is not, after `limit`.
    pub fn wait_for_other(&self, limit: Duration) -> bool {
        let start = Instant::now();
        while !self.other() && start.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.other()
    }
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.mine.store(true, Ordering::Release);
    }
}

/// Runs two sides on threads in their namespaces.
pub fn both<X: Send, Y: Send>(
    a: &Namespace,
    b: &Namespace,
    side_a: impl FnOnce(Start, Over<'_>) -> X + Send,
    side_b: impl FnOnce(Start, Over<'_>) -> Y + Send,
) -> (X, Y) {
    let (over_a, over_b) = (AtomicBool::new(false), AtomicBool::new(false));
    let ((to_a, from_b), (to_b, from_a)) = (channel(), channel());
    std::thread::scope(|scope| {
        let over = Over {
            mine: &over_a,
            other: &over_b,
        };
        let side = scope.spawn(|| a.run(move || side_a(Start(to_b, Mutex::new(from_b)), over)));
        let over = Over {
            mine: &over_b,
            other: &over_a,
        };
        let y = b.run(move || side_b(Start(to_a, Mutex::new(from_a)), over));
        match side.join() {
            Ok(x) => (x, y),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn run<X>(
    config: &EndpointConfig,
    side: impl FnOnce(&mut Endpoint) -> X,
    start: Start,
    over: Over<'_>,
) -> (X, Counters) {
    let mut endpoint = open(config);
    start.meet();
    let result = side(&mut endpoint);
    over.mine.store(true, Ordering::Release);
    wait_until(&mut endpoint, "the other side ends", |_| over.other());
    (result, endpoint.counters())
}

/// The sender's host: an ephemeral port.
pub fn config_a() -> EndpointConfig {
    EndpointConfig {
        interface: "va".into(),
        // Test programs share their cores: leave them when there is nothing to do.
        idle: lm_dataplane::IdleStrategy {
            spin: Duration::from_micros(20),
            yields: 50,
            ..Default::default()
        },
        ..EndpointConfig::default()
    }
}

/// The receiver's.
pub fn config_b() -> EndpointConfig {
    EndpointConfig {
        interface: "vb".into(),
        port: PORT,
        ..config_a()
    }
}

/// Connects to B for messages of up to `len` bytes.
pub fn connect(endpoint: &mut Endpoint, len: u64) -> PeerId {
    endpoint
        .connect(B, &up_to(len))
        .unwrap_or_else(|error| panic!("{error}"))
}

/// To a host without LM.
pub fn plain() -> ConnectOptions {
    ConnectOptions {
        session: Session::Never,
        ..ConnectOptions::default()
    }
}

/// Requests and farewells without an answer are said again after 100 ms, and then after twice as long up to a second: so often while a
/// test has [`PATIENCE`].
const REPEATED_MAX: u64 = 4 + PATIENCE.as_secs();

/// What an endpoint dropped follows from what its peers say that they sent: between honest endpoints, on a link that doubles nothing, each
/// kind of drop has a cause that they count, and there are no other kinds. `may_lose`: the link loses packets.
pub fn assert_accounted(own: &Counters, peers: &[Counters], may_lose: bool) {
    let all = |count: fn(&Counters) -> u64| peers.iter().map(count).sum::<u64>();
    let drops = &own.drops;
    let told = || format!("{own:?}\nits peers: {peers:?}");
    // An acknowledgement that is late, or lost, makes a sender repeat small messages, from the first one that is not confirmed. What comes
    // behind a lost one is dropped, and sent again with it.
    let eager = drops.eager_duplicate + drops.eager_out_of_order;
    assert!(eager <= all(|peer| peer.eager_resent), "{}", told());
    assert!(may_lose || drops.eager_out_of_order == 0, "{}", told());
    // A fragment for which there was no memory aside must be sent again, and what came twice was sent twice: each of them is one that was
    // sent again, which no sender does unless it is asked.
    let again = drops.fragment_duplicate + drops.fragment_stale + drops.fragment_no_room;
    let resent = all(|peer| peer.fragments_resent);
    assert!(again <= resent && resent <= own.fragments_requested, "{}", told());
    // What is still on the way for a session that is over: fragments that were sent again, an answer or a repetition.
    let repeated = REPEATED_MAX * peers.len() as u64;
    assert!(again + drops.late <= resent + repeated, "{}", told());
    // The receiver knows its sender's neighbour address only after it has asked, or has a session of an earlier endpoint there.
    assert!(drops.request_refused <= repeated, "{}", told());
    // What follows a lost announcement until that is repeated: those of later messages, and of their digests.
    let announced = all(|peer| peer.messages_sent + peer.messages_failed);
    let early_max = if may_lose { 2 * announced } else { 0 };
    assert!(drops.announcement_early <= early_max, "{}", told());
    assert_honest(own);
}

/// No kinds of drops but those that [`assert_accounted`] gives bounds to.
fn assert_honest(counters: &Counters) {
    const HONEST: [&str; 8] = [
        "eager_duplicate",
        "eager_out_of_order",
        "fragment_duplicate",
        "fragment_stale",
        "fragment_no_room",
        "late",
        "request_refused",
        "announcement_early",
    ];
    let others: Vec<_> = (counters.drops())
        .filter(|(reason, count)| *count > 0 && !HONEST.contains(reason))
        .collect();
    assert_eq!(others, [], "{counters:?}");
}

/// For how long the threads in which the kernel receives packets that it could not take at once (`ksoftirqd`) have waited for a processor,
/// together (`schedstat` in proc(5)).
pub fn receive_threads_waited() -> Duration {
    let processes = std::fs::read_dir("/proc").expect("procfs").flatten();
    let waited_ns = processes.filter_map(|process| {
        let read = |file: &str| std::fs::read_to_string(process.path().join(file)).ok();
        let is_one = read("comm")?.starts_with("ksoftirqd/");
        is_one.then(|| read("schedstat")?.split(' ').nth(1)?.parse::<u64>().ok())?
    });
    Duration::from_nanos(waited_ns.sum())
}

/// Nothing was lost or taken for lost, nothing violated, nothing given up.
pub fn assert_clean(endpoint: &Endpoint) {
    assert_clean_but_late(&endpoint.counters(), 0);
}

/// The same, but so many fragments may have been taken for lost while they were late.
pub fn assert_clean_but_late(counters: &Counters, late_max: u64) {
    assert_honest(counters);
    assert!(
        counters.fragments_requested <= late_max,
        "at most {late_max}: {counters:?}"
    );
    assert_eq!(
        counters.messages_incomplete + counters.messages_stalled,
        0,
        "{counters:?}"
    );
    assert_eq!(
        counters.messages_failed + counters.frames_exhausted,
        0,
        "{counters:?}"
    );
    assert_eq!(counters.control_send_errors, 0, "{counters:?}");
}

/// What must have been put back after a message of `len` bytes: the tail of every window but the last.
pub fn restored(len: u64) -> u64 {
    let fragments = len.div_ceil(FRAGMENT).max(1);
    (fragments.div_ceil(WINDOW) - 1) * HEADER
}

/// Three hosts on a switch: two senders (`va`, 10.77.0.1 and .3) and a receiver (`vb`, 10.77.0.2). The switch hands
/// everything for the receiver to its queue 1, as steering by ports would.
pub struct Switched {
    pub senders: [Namespace; 2],
    pub receiver: Namespace,
    _switch: Namespace,
    _alone: Alone,
}

impl Switched {
    /// `None`: skipped.
    pub fn new() -> Option<Switched> {
        Switched::among(true)
    }

    /// For tests in which somebody lies. `None`: skipped.
    pub fn with_attackers() -> Option<Switched> {
        Switched::among(false)
    }

    /// Runs the receiver and both senders, each in a thread of its own.
    pub fn run(&self, receive: impl FnOnce() + Send, send: [&(dyn Fn() + Sync); 2]) {
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| self.receiver.run(receive));
            let senders = [0, 1].map(|at| scope.spawn(move || self.senders[at].run(send[at])));
            for host in senders.into_iter().chain([receiver]) {
                host.join().unwrap();
            }
        });
    }

    fn among(are_honest: bool) -> Option<Switched> {
        if !crate::bed::root() {
            return None;
        }
        let bed = Switched {
            _alone: Alone::new(are_honest),
            senders: [Namespace::new(), Namespace::new()],
            receiver: Namespace::new(),
            _switch: Namespace::new(),
        };
        let switch = &bed._switch;
        switch.ip("link add bridge type bridge mcast_snooping 0");
        switch.ip("link set bridge addrgenmode none");
        let hosts = [&bed.senders[0], &bed.receiver, &bed.senders[1]];
        for (host, number) in hosts.into_iter().zip(1..) {
            let device = if number == 2 { "vb" } else { "va" };
            let queues = "numrxqueues 2 numtxqueues 2";
            host.ip(&format!(
                "link add {device} {queues} type veth peer name port{number} {queues} netns {}",
                switch.path()
            ));
            for (namespace, device) in [(host, device), (switch, &format!("port{number}")[..])] {
                namespace.ip(&format!("link set {device} addrgenmode none"));
                namespace.ip(&format!("link set {device} up"));
            }
            switch.ip(&format!("link set port{number} master bridge"));
            host.ip(&format!("address add 10.77.0.{number}/24 dev {device}"));
        }
        switch.ip("link set bridge up");
        let cpus = std::fs::read_to_string("/sys/devices/system/cpu/possible").expect("sysfs");
        let last: u32 = cpus
            .trim()
            .rsplit(['-', ','])
            .next()
            .and_then(|n| n.parse().ok())
            .expect("a number");
        let all = format!("{:x}", (1_u128 << (last + 1)) - 1);
        bed.steer(&all);
        Some(bed)
    }

    /// Which CPUs' packets for the receiver leave the switch for its landing queue, as a mask in hexadecimal digits.
    pub fn steer(&self, cpus: &str) {
        (self._switch).run(|| crate::bed::write_sysfs("class/net/port2/queues/tx-1/xps_cpus", cpus));
    }
}
