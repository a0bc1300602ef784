//! A reader of messages that are still on the way: windows are read as soon as each is final, where they landed, later ones before earlier
//! ones if a loss has it so. The same bytes come whole behind that, at the same place.
//!
//! ```text
//! cargo run -p lm-examples --bin ranges
//! ```

use std::ops::Range;

use lm_dataplane::{ConnectOptions, Ending, Incoming, Message, SendError, Session};
use lm_examples::{HOSTS, World, noise, run, small};
use lm_sim::Semantics;

const MESSAGES: u64 = 6;
const LEN: usize = 300_000;
const FRAGMENT_LEN: u64 = 1400;

/// A message, as far as it has been read.
struct Reading {
    incoming: Incoming,
    read: Vec<Range<u64>>,
    /// A range was read before one in front of it.
    early: bool,
    /// Bytes read before the message was whole.
    ahead: u64,
}

impl Reading {
    fn new(incoming: Incoming) -> Reading {
        Reading {
            incoming,
            read: Vec::new(),
            early: false,
            ahead: 0,
        }
    }

    /// Reads what is new, and compares it.
    fn read(&mut self, expected: &[u8]) {
        let shown: Vec<Range<u64>> = self.incoming.shown().collect();
        if shown == self.read {
            return;
        }
        for range in &shown {
            let bytes = self.incoming.bytes(range.clone()).expect("it is shown");
            let expected = &expected[range.start as usize..range.end as usize];
            assert!(bytes == expected, "{range:?} of message {}", self.incoming.tag());
        }
        // The last bytes of a window are shown with the next one: such holes are shorter than a fragment.
        let starts = std::iter::once(0).chain(shown.iter().map(|range| range.end));
        self.early |= starts
            .zip(&shown)
            .any(|(start, range)| range.start - start > FRAGMENT_LEN);
        if self.incoming.settled().is_none() {
            self.ahead = shown.iter().map(|range| range.end - range.start).sum();
        }
        // What is not shown is not given.
        let holes = shown.windows(2).map(|pair| pair[0].end..pair[1].start);
        for hole in holes {
            assert!(self.incoming.bytes(hole.start..hole.start + 1).is_err());
            assert!(self.incoming.bytes(hole.start - 1..hole.end + 1).is_err());
        }
        self.read = shown;
    }
}

/// How many windows were read before those in front of them, and bytes that were read before their message was whole.
fn read_all(semantics: Semantics, seed: u64) -> (usize, u64) {
    let mut world = World::new(semantics, seed, &small());
    let peer = world.connect(0, &ConnectOptions::default());
    let resolved = ConnectOptions {
        session: Session::Later,
        ..ConnectOptions::default()
    };
    let sender = world.ends[1]
        .connect(HOSTS[0], &resolved)
        .expect("a host of the wire");
    assert!(world.ends[1].peer(sender).watch());
    let payloads: Vec<Vec<u8>> = (0..MESSAGES).map(|tag| noise(seed << 8 | tag, LEN)).collect();
    let payload = |tag: u64| &payloads[tag as usize][..];
    let (mut sent, mut whole) = (0, Vec::<Message>::new());
    let mut readings = Vec::<Reading>::new();
    world.until(|world| {
        let [sender, receiver] = &mut world.ends;
        if sent < MESSAGES && sent < whole.len() as u64 + 2 {
            match sender.try_send_copy(peer, payload(sent), sent) {
                Ok(_) => sent += 1,
                Err(SendError::WouldBlock) => {}
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        while let Some(incoming) = receiver.try_incoming() {
            readings.push(Reading::new(incoming));
        }
        for reading in &mut readings {
            reading.read(payload(reading.incoming.tag()));
        }
        while let Some(message) = receiver.try_recv().expect("reliable") {
            whole.push(message);
        }
        (whole.len() as u64 == MESSAGES).then_some(())
    });
    for message in &whole {
        assert!(
            message[..] == *payload(message.tag()),
            "seed {seed}: message {}",
            message.tag()
        );
    }
    for reading in &readings {
        let incoming = &reading.incoming;
        assert_eq!(incoming.settled(), Some(Ending::Whole), "seed {seed}");
        let message = whole
            .iter()
            .find(|message| message.tag() == incoming.tag())
            .expect("it came");
        let bytes = incoming.bytes(0..LEN as u64).expect("all of it");
        assert_eq!(bytes.as_ptr(), message.as_ptr(), "seed {seed}: the same memory");
    }
    let early = readings.iter().filter(|reading| reading.early).count();
    (early, readings.iter().map(|reading| reading.ahead).sum())
}

fn main() {
    run(|semantics, seed| {
        let (early, ahead) = read_all(semantics, seed);
        format!("{ahead} bytes were read ahead; of {early} messages, out of order")
    });
}

#[test]
fn windows_are_read_before_their_message_is_whole() {
    for semantics in lm_examples::semantics() {
        let (mut early, mut ahead) = (0, 0);
        for seed in 0..lm_examples::SEEDS {
            let (messages, bytes) = read_all(semantics, seed);
            early += messages;
            ahead += bytes;
        }
        assert!(early > 20, "{early} messages had a later window first");
        assert!(
            ahead > lm_examples::SEEDS * LEN as u64 / 2,
            "{ahead} bytes were read ahead"
        );
    }
}
