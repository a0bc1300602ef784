//! What the examples share: two endpoints on a simulated wire that loses, repeats and reorders packets, repeatable from a seed.

use std::net::{Ipv4Addr, SocketAddrV4};

use lm_dataplane::port::Port;
use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, PeerId, ReceiveConfig, Session};
use lm_protocol::time::Time;
use lm_protocol::window::WindowShape;
use lm_sim::{Impairments, Semantics, SimNic, Wire, WireConfig, ZeroCopy};

/// Data port of both hosts.
pub const PORT: u16 = 7168;
/// Addresses of the hosts.
pub const HOSTS: [SocketAddrV4; 2] = [
    SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 1), PORT),
    SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 2), PORT),
];
/// Virtual time between two rounds.
pub const ROUND_NS: u64 = 20_000;
/// Fragments in a window.
const WINDOW: u32 = 32;

/// How many seeds each example is tried with, in each semantics.
pub const SEEDS: u64 = 200;

/// Both ways in which a device receives.
pub fn semantics() -> [Semantics; 2] {
    [Semantics::Copy, Semantics::ZeroCopy(ZeroCopy::default())]
}

/// One in a hundred is lost, one comes twice, one is overtaken by up to eight.
pub fn impairments(seed: u64) -> Impairments {
    Impairments {
        seed,
        loss_ppm: 10_000,
        duplicate_ppm: 10_000,
        duplicate_delay_max_ns: 100_000,
        reorder_ppm: 10_000,
        reorder_packets_max: 8,
        reorder_hold_max_ns: 100_000,
        ..Impairments::default()
    }
}

/// Two endpoints, the wire, and what time it is.
#[derive(Debug)]
pub struct World {
    /// The wire.
    pub wire: Wire,
    /// The endpoints.
    pub ends: [Endpoint<SimNic>; 2],
    now_ns: u64,
}

impl World {
    /// Endpoints on such devices; the wire does its worst in both directions.
    pub fn new(semantics: Semantics, seed: u64, config: &EndpointConfig) -> World {
        let wire = Wire::new(WireConfig {
            semantics: [semantics; 2],
            seed,
            ..WireConfig::default()
        });
        let ends = HOSTS.map(|host| wire.open(*host.ip(), config).expect("an endpoint"));
        for from in 0..2 {
            wire.impair(from, impairments(seed << 1 | from as u64));
        }
        World {
            wire,
            ends,
            now_ns: 0,
        }
    }

    /// What time it is on the wire.
    pub fn now(&self) -> Time {
        Time::from_nanos(self.now_ns)
    }

    /// One round of both endpoints.
    pub fn round(&mut self) {
        self.now_ns += ROUND_NS;
        self.wire.advance(self.now_ns);
        for end in &mut self.ends {
            end.poll();
        }
    }

    /// Rounds until `done` says what came of it.
    ///
    /// # Panics
    ///
    /// After ten seconds of virtual time.
    pub fn until<T>(&mut self, mut done: impl FnMut(&mut World) -> Option<T>) -> T {
        let end_ns = self.now_ns + 10_000_000_000;
        while self.now_ns < end_ns {
            if let Some(result) = done(self) {
                return result;
            }
            self.round();
        }
        panic!("not done after ten seconds");
    }

    /// A session of endpoint `from` with the other one.
    pub fn connect(&mut self, from: usize, options: &ConnectOptions) -> PeerId {
        let peer = request(&mut self.ends[from], 1 - from, options);
        self.until(|world| world.ends[from].peer(peer).session_outcome())
            .expect("a session");
        peer
    }
}

/// Asks host number `to` for a session.
pub fn request<P: Port>(end: &mut Endpoint<P>, to: usize, options: &ConnectOptions) -> PeerId {
    let resolved = ConnectOptions {
        session: Session::Later,
        window: WindowShape::new(WINDOW).expect("a power of two"),
        ..*options
    };
    let peer = end.connect(HOSTS[to], &resolved).expect("a host of the wire");
    end.peer(peer).request_session(&resolved).expect("a peer");
    peer
}

/// An endpoint's memory as small as the examples need it.
pub fn small() -> EndpointConfig {
    EndpointConfig {
        port: PORT,
        memory: MemoryConfig {
            landing_len: 4 << 20,
            send_len: 2 << 20,
            ..MemoryConfig::default()
        },
        receive: ReceiveConfig {
            max_message_len: 1 << 20,
            ..ReceiveConfig::default()
        },
        ..EndpointConfig::default()
    }
}

/// Bytes that no two places share by accident.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    let mut dice = Dice(seed);
    for eight in bytes.chunks_exact_mut(8) {
        eight.copy_from_slice(&dice.roll().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// The next 64 bits.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Whether one in `count` times.
    pub fn one_in(&mut self, count: u64) -> bool {
        self.roll().is_multiple_of(count)
    }
}

/// Runs an example by hand: of the seed that is given, of a range such as `0..200`, or of the first ten, in both semantics.
pub fn run(mut one: impl FnMut(Semantics, u64) -> String) {
    let number = |word: &str| word.parse::<u64>().ok();
    let seeds = match std::env::args().nth(1) {
        None => Some(0..10),
        Some(word) => match word.split_once("..") {
            Some((first, end)) => number(first).zip(number(end)).map(|(first, end)| first..end),
            None => number(&word).map(|seed| seed..seed + 1),
        },
    };
    let Some(seeds) = seeds else {
        eprintln!("a seed is a number, several are 0..200; none: the first ten");
        std::process::exit(2);
    };
    for seed in seeds {
        for semantics in semantics() {
            let name = match semantics {
                Semantics::Copy => "copy",
                Semantics::ZeroCopy(_) => "zero-copy",
            };
            println!("seed {seed}, {name}: {}", one(semantics, seed));
        }
    }
}
