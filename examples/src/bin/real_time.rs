//! A real-time flow: packets of a type of its own that leave five times a millisecond, beside messages that take all the rest of the link, and
//! reports that come back. Its frames and descriptors are reserved; its credits lie in a page that both endpoints share, as programs of
//! one host would.
//!
//! ```text
//! cargo run -p lm-examples --bin real_time
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lm_dataplane::{
    Arrived, Class, ConnectOptions, Flow, FlowSpec, Handler, Message, Outcome, PeerId, Replies, Scope,
    SendError, Shaper, Signal, TxBatch,
};
use lm_examples::{HOSTS, World, noise, run, small};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{LmHeader, TYPE_REALTIME, TYPE_RT_REPORT, Trailer};
use lm_sim::Semantics;

const SAMPLES: u32 = 100;
const PERIOD: Duration = Duration::from_micros(200);
const FRAMES: u32 = 8;
const BULK_LEN: usize = 60_000;

/// What the flow's packets need: endpoints that share the page share its budget.
#[derive(Debug)]
struct Page {
    credits: AtomicU32,
    taken: AtomicU64,
}

#[derive(Clone, Debug)]
struct Credits(Arc<Page>);

impl Shaper for Credits {
    fn take(&mut self, _: Class, packets: u32, _: Time) -> u32 {
        // Relaxed: the number alone is shared.
        packets.min(self.0.credits.load(Ordering::Relaxed))
    }

    fn signal(&mut self, signal: Signal) {
        if let Signal::Left { packets, .. } = signal {
            self.0.credits.fetch_sub(packets, Ordering::Relaxed);
            self.0.taken.fetch_add(packets.into(), Ordering::Relaxed);
        }
    }

    fn next(&self, _: Class) -> Option<Time> {
        None
    }
}

fn sample(seed: u64, number: u32) -> Vec<u8> {
    noise(seed << 32 | u64::from(number), 40 + number as usize * 13 % 1300)
}

/// Makes the samples, each when it is due.
struct Source {
    seed: u64,
    from: SocketAddrV4,
    next: u32,
    due: Time,
    free: VecDeque<u32>,
    completed: Arc<AtomicU32>,
}

impl Flow for Source {
    fn next(&mut self, _: u32, now: Time, out: &mut TxBatch<'_>) {
        while self.due <= now
            && self.next < SAMPLES
            && out.room() > 0
            && let Some(frame) = self.free.pop_front()
        {
            let payload = sample(self.seed, self.next);
            let header = LmHeader::Extension {
                packet_type: TYPE_REALTIME,
                key: self.seed,
                words: [self.next, 0, 0],
            };
            let trailer = Trailer::new(&header, &payload, self.from);
            let packet = [
                &header.encode(payload.len() as u16)[..],
                &payload,
                trailer.as_bytes(),
            ]
            .concat();
            out.frame(frame).expect("a frame that is free")[..packet.len()].copy_from_slice(&packet);
            assert!(out.put(frame, packet.len(), frame.into()));
            self.next += 1;
            self.due += PERIOD;
        }
    }

    fn departs(&self) -> Option<Time> {
        (self.next < SAMPLES && !self.free.is_empty()).then_some(self.due)
    }

    fn sent(&mut self, token: u64, _: Option<Time>) {
        self.free.push_back(token as u32);
        self.completed.fetch_add(1, Ordering::Relaxed);
    }
}

/// What came, with the frames in which it came.
type Samples = Arc<Mutex<BTreeMap<u32, Message>>>;

/// Keeps samples, and reports a millisecond later how many it has.
struct Sink {
    samples: Samples,
    from: Option<PeerId>,
    due: Option<Time>,
}

impl Handler for Sink {
    fn packet(&mut self, packet: Arrived<'_>, now: Time, _: &mut Replies) {
        self.from = Some(packet.from());
        self.due.get_or_insert(now + 5 * PERIOD);
        let [number, ..] = packet.words();
        let message = packet.keep().expect("half of the frames");
        self.samples.lock().expect("one thread").insert(number, message);
    }

    fn due(&self) -> Option<Time> {
        self.due
    }

    fn tick(&mut self, _: Time, replies: &mut Replies) {
        self.due = None;
        let whole = self.samples.lock().expect("one thread").len() as u32;
        let peer = self.from.expect("packets came before");
        assert!(replies.send(peer, TYPE_RT_REPORT, 0, [whole, 0, 0], &[]));
    }
}

/// What the receiver has, as its newest report says.
struct Reports(Arc<AtomicU32>);

impl Handler for Reports {
    fn packet(&mut self, packet: Arrived<'_>, _: Time, _: &mut Replies) {
        let [whole, ..] = packet.words();
        self.0.fetch_max(whole, Ordering::Relaxed);
    }
}

fn one(semantics: Semantics, seed: u64) -> String {
    let mut world = World::new(semantics, seed, &small());
    let peer = world.connect(0, &ConnectOptions::default());

    let page = Arc::new(Page {
        credits: AtomicU32::new(SAMPLES),
        taken: AtomicU64::new(0),
    });
    for end in &mut world.ends {
        let credits = Credits(Arc::clone(&page));
        end.extensions()
            .shape(Scope::Class(Class::RealTime), Some(Box::new(credits)));
    }
    let (samples, reported, completed) = (
        Samples::default(),
        Arc::<AtomicU32>::default(),
        Arc::<AtomicU32>::default(),
    );
    let sink = Sink {
        samples: Arc::clone(&samples),
        from: None,
        due: None,
    };
    let now = world.now();
    let [sender, receiver] = &mut world.ends;
    receiver
        .extensions()
        .add_handler(TYPE_REALTIME..=TYPE_REALTIME, Box::new(sink))
        .expect("a free type");
    let reports = Reports(Arc::clone(&reported));
    sender
        .extensions()
        .add_handler(TYPE_RT_REPORT..=TYPE_RT_REPORT, Box::new(reports))
        .expect("a free type");
    let spec = FlowSpec {
        to: Some(peer),
        frames: FRAMES,
        descriptors: FRAMES,
        messages: None,
    };
    let source = Source {
        seed,
        from: HOSTS[0],
        next: 0,
        due: now,
        free: (0..FRAMES).collect(),
        completed: Arc::clone(&completed),
    };
    sender
        .extensions()
        .add_flow(&spec, Box::new(source))
        .expect("frames and descriptors");

    let (mut sent, mut got, mut confirmed) = (0, 0, 0);
    let bulk = |number: u64| noise(seed << 16 | number, BULK_LEN);
    world.until(|world| {
        let [sender, receiver] = &mut world.ends;
        let done = completed.load(Ordering::Relaxed) == SAMPLES;
        if !done && sent < confirmed.min(40) + 4 {
            match sender.try_send_copy(peer, &bulk(sent), sent) {
                Ok(_) => sent += 1,
                Err(SendError::WouldBlock) => {}
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        while let Some(message) = receiver.try_recv().expect("reliable") {
            assert!(
                message[..] == bulk(message.tag()),
                "seed {seed}: message {}",
                message.tag()
            );
            got += 1;
        }
        while let Some(completion) = sender.try_completion() {
            assert_eq!(completion.outcome, Outcome::Delivered, "seed {seed}");
            confirmed += 1;
        }
        (done && confirmed == sent && got == sent).then_some(())
    });
    // The last report.
    for _ in 0..100 {
        world.round();
    }

    let samples = samples.lock().expect("one thread");
    for (&number, message) in samples.iter() {
        assert!(
            message[..] == sample(seed, number),
            "seed {seed}: sample {number}"
        );
    }
    let whole = samples.len() as u32;
    assert!(whole >= SAMPLES * 8 / 10, "seed {seed}: {whole} samples");
    assert!(reported.load(Ordering::Relaxed) <= whole, "seed {seed}");
    assert!(reported.load(Ordering::Relaxed) > 0, "seed {seed}: no report");
    assert_eq!(
        page.taken.load(Ordering::Relaxed),
        u64::from(SAMPLES),
        "seed {seed}"
    );
    assert_eq!(page.credits.load(Ordering::Relaxed), 0, "seed {seed}");
    format!("{whole} of {SAMPLES} samples, {got} messages beside them")
}

fn main() {
    run(one);
}

#[test]
fn a_real_time_flow_beside_messages() {
    for semantics in lm_examples::semantics() {
        for seed in 0..lm_examples::SEEDS {
            one(semantics, seed);
        }
    }
}
