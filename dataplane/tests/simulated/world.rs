//! Endpoints on a simulated wire or switch, and what time it is there.

use std::net::{Ipv4Addr, SocketAddrV4};

use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig, Integrity, MemoryConfig, PeerId, Session};
use lm_sim::{SimNic, Wire, WireConfig};

/// Data port of every host.
const PORT: u16 = 7168;
/// Virtual time between two rounds.
const ROUND_NS: u64 = 20_000;

/// Data address of a host.
pub(crate) fn address(host: usize) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 1 + host as u8), PORT)
}

/// An endpoint with 16 MiB of memory each way.
pub(crate) fn config(integrity: Integrity) -> EndpointConfig {
    EndpointConfig {
        port: PORT,
        integrity,
        memory: MemoryConfig {
            landing_len: 16 << 20,
            send_len: 16 << 20,
            ..MemoryConfig::default()
        },
        ..EndpointConfig::default()
    }
}

pub(crate) struct World {
    pub(crate) wire: Wire,
    pub(crate) ends: Vec<Endpoint<SimNic>>,
    now_ns: u64,
}

impl World {
    pub(crate) fn new(wire: WireConfig, hosts: usize, config: &EndpointConfig) -> World {
        let wire = Wire::new(wire);
        let open = |host| wire.open(*address(host).ip(), config).expect("an endpoint");
        World {
            ends: (0..hosts).map(open).collect(),
            wire,
            now_ns: 0,
        }
    }

    /// The time of the next round.
    pub(crate) fn pass(&mut self) {
        self.now_ns += ROUND_NS;
        self.wire.advance(self.now_ns);
    }

    /// One round of every endpoint.
    pub(crate) fn round(&mut self) {
        self.pass();
        self.ends.iter_mut().for_each(|end| {
            end.poll();
        });
    }

    /// Rounds until `done` says what came of it.
    pub(crate) fn until<T>(&mut self, mut done: impl FnMut(&mut World) -> Option<T>) -> T {
        for _ in 0..100_000 {
            if let Some(result) = done(self) {
                return result;
            }
            self.round();
        }
        panic!("not done after two seconds");
    }

    /// A session between two hosts.
    pub(crate) fn connect(&mut self, from: usize, to: usize, options: &ConnectOptions) -> PeerId {
        let later = ConnectOptions {
            session: Session::Later,
            ..*options
        };
        let peer = self.ends[from].connect(address(to), &later).expect("a host");
        self.ends[from]
            .peer(peer)
            .request_session(options)
            .expect("a peer");
        self.until(|world| world.ends[from].peer(peer).session_outcome())
            .expect("a session");
        peer
    }
}

/// Bytes of which no two places agree by accident: the generator of Marsaglia, "Xorshift RNGs" (2003).
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let byte = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(byte).collect()
}
