//! Random transfers over loss-free links: every byte, every order, all memory.

use std::collections::VecDeque;

use proptest::prelude::*;

use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};
use lm_protocol::window::WindowShape;

use super::bed::{Bed, BedConfig, fill, is_back_pressure, noise};
use super::times;
use crate::completion::{Outcome, PeerId, SendError};
use crate::connect::ConnectOptions;
use crate::message::Message;
use crate::port::Port;
use crate::region::SendRegion;
use crate::region::TrySendError;

/// Longest message of a case, in bytes.
const LEN_MAX: u64 = 300_000;

#[derive(Clone, Debug)]
struct Case {
    mtu: u16,
    window_shift: u32,
    wire: WireMode,
    in_flight: u32,
    before_wrap: u32,
    landing_len: u64,
    send_len: u64,
    tx_in_flight: u32,
    on_the_way: u32,
    seed: u64,
    /// Sender and length.
    messages: Vec<(usize, u64)>,
}

/// Lengths around the edges that matter, and between them.
fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => 0u64..5_000,
        2 => (0u64..40, -70i64..70).prop_map(|(n, by)| (n * 1448).saturating_add_signed(by)),
        2 => (0u64..40, -70i64..70).prop_map(|(n, by)| (n * 1480).saturating_add_signed(by)),
        2 => 5_000u64..66_000,
        1 => 66_000u64..=LEN_MAX,
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let link = (
        prop_oneof![
            4 => prop_oneof![Just(576u16), Just(1500), Just(3498), 576u16..=3498],
            // In several frames.
            3 => prop_oneof![Just(4000u16), Just(9000), Just(60_000), 3499u16..=65_521],
        ],
        0u32..=10,
        prop_oneof![3 => Just(WireMode::Lm), 1 => Just(WireMode::IpFrag)],
        1u32..=32,
        prop_oneof![Just(0u32), 1u32..2000],
    );
    let memory = (
        prop_oneof![Just(4096u64), Just(1 << 20), Just(8 << 20)],
        prop_oneof![Just(640u64 << 10), Just(4 << 20)],
        prop_oneof![Just(192u32), 1u32..64, Just(1024)],
        prop_oneof![Just(192u32), 1u32..64, Just(u32::MAX)],
    );
    let load = (any::<u64>(), prop::collection::vec((0usize..2, length()), 1..24));
    (link, memory, load).prop_map(
        |(
            (mtu, window_shift, wire, in_flight, before_wrap),
            (landing_len, send_len, tx_in_flight, on_the_way),
            (seed, messages),
        )| Case {
            mtu,
            window_shift,
            wire,
            in_flight,
            before_wrap,
            landing_len,
            send_len,
            tx_in_flight,
            on_the_way,
            seed,
            messages,
        },
    )
}

/// Decisions, repeatable from a seed other than 0 (xorshift64).
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// A message on its way: its tag, and where its bytes are in the pool.
#[derive(Clone, Copy, Debug)]
struct Sent {
    tag: u64,
    at: usize,
    len: usize,
}

/// What one direction of the case still has to do.
struct Direction {
    peer: PeerId,
    to_send: VecDeque<Sent>,
    unsent: Option<(SendRegion, Sent)>,
    /// Expected at the other end, by channel.
    eager: VecDeque<Sent>,
    landing: VecDeque<Sent>,
    /// Completions expected, by channel.
    eager_tags: VecDeque<u64>,
    landing_tags: VecDeque<u64>,
    held: Vec<(Message, Sent)>,
    restored: u64,
}

struct Run<'a> {
    bed: Bed,
    case: &'a Case,
    pool: Vec<u8>,
    layout: Layout,
    eager_max: usize,
    directions: [Direction; 2],
    dice: Dice,
}

impl Run<'_> {
    /// Hands messages over until there is back-pressure.
    fn send(&mut self, from: usize) -> bool {
        let mut progress = false;
        loop {
            let direction = &mut self.directions[from];
            let engine = &mut self.bed.hosts[from];
            let (region, sent) = match direction.unsent.take() {
                // Sometimes the application changes its mind, and loans anew.
                Some((region, sent)) if self.dice.roll(8) == 0 => {
                    drop(region);
                    direction.to_send.push_front(sent);
                    return progress;
                }
                Some(unsent) => unsent,
                None => {
                    let Some(&sent) = direction.to_send.front() else {
                        return progress;
                    };
                    let mut region = match engine.loan(direction.peer, sent.len as u64) {
                        Ok(region) => region,
                        Err(error) if is_back_pressure(&error) => return progress,
                        Err(error) => panic!("no loan of {} bytes: {error}", sent.len),
                    };
                    direction.to_send.pop_front();
                    fill(&mut region, &self.pool[sent.at..][..sent.len]);
                    (region, sent)
                }
            };
            match engine.submit(region, sent.tag, self.bed.now_ns) {
                Ok(_) => {
                    progress = true;
                    if sent.len <= self.eager_max {
                        direction.eager.push_back(sent);
                        direction.eager_tags.push_back(sent.tag);
                    } else {
                        direction.landing.push_back(sent);
                        direction.landing_tags.push_back(sent.tag);
                        direction.restored += restored_bytes(&self.layout, self.case, sent.len);
                    }
                }
                Err(TrySendError {
                    region,
                    reason: SendError::WouldBlock,
                }) => {
                    direction.unsent = Some((region, sent));
                    return progress;
                }
                Err(error) => panic!("not sent: {}", error.reason),
            }
            if self.dice.roll(4) == 0 {
                return progress;
            }
        }
    }

    /// Takes what came from host `from`, keeps some of it, drops some of what it has.
    fn receive(&mut self, from: usize) -> bool {
        let to = 1 - from;
        let mut progress = false;
        while let Some(message) = self.bed.hosts[to].take_message().expect("no message fails") {
            progress = true;
            let direction = &mut self.directions[from];
            let expected = match message.is_eager() {
                true => direction.eager.pop_front(),
                false => direction.landing.pop_front(),
            };
            let expected = expected.expect("nothing arrives that was not sent");
            assert_eq!(message.tag(), expected.tag, "order within a channel");
            assert_eq!(message.len(), expected.len);
            let landing = self.bed.hosts[to].landing.as_ref().expect("a landing channel");
            let arena = landing.arena.start()..landing.arena.start() + landing.arena.len();
            if !message.is_eager() {
                assert!(arena.contains(&message.umem_offset()));
                assert!(message.umem_offset() + message.len() as u64 <= arena.end);
            }
            check(&message, &self.pool[expected.at..][..expected.len], "on arrival");
            direction.held.push((message, expected));
        }
        let held = self.directions[from].held.len() as u64;
        for _ in 0..self.dice.roll(held + 1) {
            self.drop_one(from);
        }
        progress
    }

    /// Drops some held message, which nobody has written to meanwhile (I1).
    fn drop_one(&mut self, from: usize) {
        let count = self.directions[from].held.len() as u64;
        if count > 0 {
            let (message, expected) = self.directions[from]
                .held
                .swap_remove(self.dice.roll(count) as usize);
            check(
                &message,
                &self.pool[expected.at..][..expected.len],
                "when dropped",
            );
        }
    }

    fn complete(&mut self, from: usize) {
        let direction = &mut self.directions[from];
        while let Some(completion) = self.bed.hosts[from].told.completions().pop_front() {
            assert_eq!(completion.outcome, Outcome::Delivered);
            let tags = match completion.len as usize <= self.eager_max {
                true => &mut direction.eager_tags,
                false => &mut direction.landing_tags,
            };
            assert_eq!(
                Some(completion.tag),
                tags.pop_front(),
                "order of completions within a channel"
            );
        }
    }

    fn is_done(&self) -> bool {
        self.directions.iter().all(|direction| {
            direction.to_send.is_empty()
                && direction.unsent.is_none()
                && direction.eager_tags.is_empty()
                && direction.landing_tags.is_empty()
                && direction.eager.is_empty()
                && direction.landing.is_empty()
        })
    }
}

fn check(message: &[u8], expected: &[u8], when: &str) {
    if let Some(at) = message.iter().zip(expected).position(|(a, b)| a != b) {
        panic!("byte {at} of {} is wrong {when}", expected.len());
    }
}

/// I5: the header of every window's lowest fragment but the first's goes over the window below.
fn restored_bytes(layout: &Layout, case: &Case, len: usize) -> u64 {
    let geometry = layout.session_message(len as u64).expect("a legal length");
    let count = geometry.fragment_count();
    let windows = WindowShape::new(1 << case.window_shift)
        .expect("a power of two")
        .count_of_windows(count);
    u64::from(windows - 1) * u64::from(layout.fragment_header_len(1))
}

fn run(case: &Case) {
    let layout = Layout::new(case.wire, case.mtu, LinkShape::IPV4).expect("a legal MTU");
    let max_message_len = LEN_MAX.min(layout.max_message_len());
    let mut bed = Bed::new(&BedConfig {
        mtu: case.mtu,
        window: 1 << case.window_shift,
        landing_len: case.landing_len,
        send_len: case.send_len,
        max_message_len,
        ring_start: 0u32.wrapping_sub(case.before_wrap),
        tx_in_flight: case.tx_in_flight,
        on_the_way: case.on_the_way,
        tx_bound: u32::from(case.seed & 1 == 1),
        adapts: [case.seed & 6 == 2, case.seed & 12 == 8],
        ..BedConfig::default()
    });
    let options = ConnectOptions {
        wire: case.wire,
        max_message_len,
        messages_in_flight: case.in_flight,
        ..ConnectOptions::default()
    };
    let pool = noise(case.seed, 2 * LEN_MAX as usize);
    let directions = [0usize, 1].map(|from| Direction {
        peer: bed.connect(from, &options).expect("a session"),
        to_send: case
            .messages
            .iter()
            .enumerate()
            .filter(|(_, (sender, _))| *sender == from)
            .map(|(number, &(_, len))| Sent {
                tag: case.seed.wrapping_mul(number as u64 + 1),
                at: (number * 7919) % LEN_MAX as usize,
                len: len.min(max_message_len) as usize,
            })
            .collect(),
        unsent: None,
        eager: VecDeque::new(),
        landing: VecDeque::new(),
        eager_tags: VecDeque::new(),
        landing_tags: VecDeque::new(),
        held: Vec::new(),
        restored: 0,
    });
    let eager_max = bed.hosts[0].eager_max_len() as usize;
    let mut run = Run {
        bed,
        case,
        pool,
        layout,
        eager_max,
        directions,
        dice: Dice(case.seed | 1),
    };
    let mut idle = 0;
    while !run.is_done() {
        let mut progress = false;
        for from in [0, 1] {
            progress |= run.send(from);
        }
        progress |= run.bed.round() > 0;
        for from in [0, 1] {
            progress |= run.receive(from);
            run.complete(from);
        }
        idle = if progress { 0 } else { idle + 1 };
        // Memory that the application keeps may be what the next message waits for.
        if idle > 40 {
            run.drop_one(0);
            run.drop_one(1);
        }
        assert!(idle < 4000, "no progress");
    }
    for from in [0, 1] {
        while !run.directions[from].held.is_empty() {
            run.drop_one(from);
        }
    }
    run.bed.check_memory();
    run.bed.check_clean();
    for from in [0, 1] {
        let received = &run.bed.hosts[1 - from].counters;
        match received.fragments_displaced {
            0 => assert_eq!(received.restored_bytes, run.directions[from].restored),
            _ => assert!(received.restored_bytes <= run.directions[from].restored),
        }
        // Behind short messages what comes to open entries is copied.
        let open = received.messages_ahead + received.fragments_displaced;
        assert!(open > 0 || received.user_copied_bytes == 0);
        assert!(received.fragments_displaced <= 64 * received.messages_received);
        let sent = run.case.messages.iter().filter(|(sender, _)| *sender == from);
        assert_eq!(received.messages_received, sent.count() as u64);
        assert_eq!(received.bytes_received, run.bed.hosts[from].counters.bytes_sent);
    }
    // The sessions end, and their queues are free for others.
    for from in [0, 1] {
        let now_ns = run.bed.now_ns;
        let peer = run.directions[from].peer;
        run.bed.hosts[from].end_session(peer.index, now_ns);
    }
    run.bed.check_memory();
    for host in &run.bed.hosts {
        assert_eq!(
            (host.counters.sessions_granted, host.counters.sessions_ended),
            (1, 1)
        );
        assert!(
            host.landing
                .as_ref()
                .is_some_and(|landing| landing.sessions.is_empty())
        );
        assert_eq!(host.port.effective_mode().as_str(), "simulated");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: times(300, 2000) as u32, ..ProptestConfig::default() })]

    /// Everything that was sent arrives whole, in order, in one piece, and all memory comes back.
    #[test]
    fn random_transfers_arrive(case in case()) {
        run(&case);
    }

    /// As many again, beside them: on one core they would be half of the time that this package's tests take.
    #[test]
    fn other_random_transfers_arrive(case in case()) {
        run(&case);
    }
}
