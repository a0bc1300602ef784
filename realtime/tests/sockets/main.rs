//! Real-time sockets on two endpoints and a simulated wire.

mod fragments;
mod hostile;
mod lent;
mod one_packet;
mod rates;
mod statistics;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lm_dataplane::{ConnectOptions, PeerId};
use lm_examples::{World, small};
use lm_protocol::smoother::Parameters;
use lm_protocol::time::Time;
use lm_realtime::{Blocks, Deadline, OpenError, RealTime, RtMessage, RtSocket, SendOptions, SocketConfig};
use lm_sim::{Impairments, Semantics};

const PORT: u16 = 5000;

/// A world with real time at both ends, whose clock is the wire's.
struct Bed {
    world: World,
    clock: Arc<AtomicU64>,
    real_time: [RealTime; 2],
    sockets: [RtSocket; 2],
    peer: PeerId,
    /// What the first host's flows show.
    shown: Arc<AtomicU64>,
}

impl Bed {
    fn new(semantics: Semantics, seed: u64, config: &SocketConfig, link: Option<Parameters>) -> Bed {
        Bed::on(World::new(semantics, seed, &small()), config, link)
    }

    fn on(mut world: World, config: &SocketConfig, link: Option<Parameters>) -> Bed {
        let peer = world.connect(0, &ConnectOptions::default());
        let clock = Arc::new(AtomicU64::new(world.now().as_nanos()));
        let real_time = world.ends.each_mut().map(|end| {
            let clock = Arc::clone(&clock);
            let now = move || Time::from_nanos(clock.load(Ordering::Relaxed));
            RealTime::new(end, link, now).expect("no other handler")
        });
        let [near, far] = &mut world.ends;
        let mut sockets = [(&real_time[0], near), (&real_time[1], far)]
            .map(|(real_time, end)| real_time.socket(end, PORT, config).expect("free"));
        sockets[0]
            .connect(&mut world.ends[0], peer, PORT)
            .expect("frames");
        let shown = world.ends[0].peer(peer).flow_key().expect("a peer");
        Bed {
            world,
            clock,
            real_time,
            sockets,
            peer,
            shown,
        }
    }

    /// Another socket of the first host.
    fn socket(&mut self, number: u16, config: &SocketConfig) -> Result<RtSocket, OpenError> {
        self.real_time[0].socket(&mut self.world.ends[0], number, config)
    }

    fn calm(&self) {
        self.delay(Duration::ZERO);
    }

    /// Packets take this time, and none is lost.
    fn delay(&self, delay: Duration) {
        for from in 0..2 {
            let delayed = Impairments {
                delay_ns: delay.as_nanos() as u64,
                ..Impairments::default()
            };
            self.world.wire.impair(from, delayed);
        }
    }

    fn round(&mut self) {
        self.world.round();
        self.clock.store(self.world.now().as_nanos(), Ordering::Relaxed);
    }

    fn rounds(&mut self, count: u32) {
        for _ in 0..count {
            self.round();
        }
    }

    /// Hands the first host's socket a message, for which there is room.
    fn send(&mut self, message: &[u8], options: SendOptions) {
        self.sockets[0].send(message, options).expect("polled");
    }

    /// The messages that have come to the second host's socket.
    fn received(&mut self) -> impl Iterator<Item = RtMessage> {
        std::iter::from_fn(|| self.sockets[1].recv())
    }

    /// Lets time pass in which nobody polls.
    fn pause(&mut self, time: Duration) {
        self.clock.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// Of 100 Mbit/s.
fn link() -> Option<Parameters> {
    let rate = NonZeroU64::new(100_000_000).expect("not 0");
    Some(Parameters::of_link(rate, 1514))
}

fn exact() -> SocketConfig {
    SocketConfig {
        same_host: true,
        ..SocketConfig::default()
    }
}

fn options(priority: u8, deadline_us: u64) -> SendOptions {
    SendOptions {
        priority,
        deadline: (deadline_us > 0).then(|| Deadline::In(Duration::from_micros(deadline_us))),
    }
}

/// As `exact`, with blocks of every kind.
fn with_blocks() -> SocketConfig {
    let count = exact().keep as u32 + 2;
    SocketConfig {
        blocks: Blocks {
            of_1: count,
            of_4: count,
            of_8: count,
            of_16: count,
        },
        ..exact()
    }
}

/// As `exact`, with three blocks of a page each way, and one message kept.
fn three_blocks() -> SocketConfig {
    SocketConfig {
        keep: 1,
        blocks: Blocks {
            of_1: 3,
            ..Blocks::default()
        },
        ..exact()
    }
}
