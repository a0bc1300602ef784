//! Lent messages are copied into frames of the device. What sending them in place, in two passes (SS-RTUDP, figure 3), would cost at least.
//!
//! Prints a table, in ten seconds, as root: `cargo run -p lm-realtime --release --example overlay`.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;
#[path = "../tests/veth/mod.rs"]
mod veth;

use std::net::SocketAddrV4;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bed::Pair;
use lm_dataplane::{Flow, FlowSpec, IdleStrategy, TxBatch};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Clock, LmHeader, RealTimePacket, TYPE_REALTIME, Trailer};
use lm_realtime::{Blocks, RealTime, SendOptions, SocketConfig, monotonic};

const FRAMES: u32 = 48;
/// Payload of a packet.
const STRIDE: usize = 1416;
/// Headers and trailers that lie on a neighbour's bytes, which are saved before and put back behind.
const OVERLAID: usize = 98;
const MESSAGES: usize = 4000;

/// What of a message has been sent.
#[derive(Default)]
struct Passes {
    len: usize,
    /// Fragments whose packets are to leave in this pass, and how many of those that left are not completed.
    next: Vec<u32>,
    under_way: u32,
    pass: u32,
    saved: Vec<[u8; OVERLAID]>,
}

impl Passes {
    fn begin(&mut self, len: usize, pass: u32) {
        let count = len.div_ceil(STRIDE) as u32;
        self.len = len;
        self.pass = pass;
        self.next.clear();
        // Odd fragments first.
        self.next
            .extend((0..count).rev().filter(|index| index % 2 == pass % 2));
    }
}

/// Sends a message whose bytes lie in the device's memory already: every other fragment, then the rest when these are completed. Copies
/// nothing but the bytes that headers and trailers lie on.
struct InPlace {
    passes: Arc<Mutex<Passes>>,
    from: SocketAddrV4,
}

impl Flow for InPlace {
    fn next(&mut self, _: u32, _: Time, out: &mut TxBatch<'_>) {
        let passes = &mut *self.passes.lock().expect("one thread");
        while out.room() > 0 {
            let Some(index) = passes.next.pop() else { break };
            let at = index as usize * STRIDE;
            let len = STRIDE.min(passes.len - at);
            let space = out.frame(index).expect("it is completed");
            passes.saved.push(space[..OVERLAID].try_into().expect("as many"));
            let (to_head, rest) = space.split_at_mut(24);
            let packet = RealTimePacket {
                message: 1,
                index: index as u16,
                count: passes.len.div_ceil(STRIDE) as u16,
                deadline: None,
                sent_at: Time::ZERO,
                message_len: passes.len as u32,
                offset: at as u32,
                port: 9,
                priority: 0,
                clock: Clock::Host,
                payload: &[],
            };
            let header = LmHeader::Extension {
                packet_type: TYPE_REALTIME,
                key: 7,
                words: packet.words(),
            };
            let with_tail = len + RealTimePacket::TAIL_LEN;
            let head = header.encode(with_tail as u16);
            to_head[..head.len()].copy_from_slice(&head);
            rest[len..with_tail].copy_from_slice(&packet.tail());
            let trailer = Trailer::new(&header, &rest[..with_tail], self.from);
            let trailer = trailer.as_bytes();
            rest[with_tail..with_tail + trailer.len()].copy_from_slice(trailer);
            assert!(out.put(index, head.len() + with_tail + trailer.len(), index.into()));
            passes.under_way += 1;
        }
    }

    fn departs(&self) -> Option<Time> {
        let waits = !self.passes.lock().expect("one thread").next.is_empty();
        waits.then_some(Time::ZERO)
    }

    fn sent(&mut self, _: u64, _: Option<Time>) {
        let passes = &mut *self.passes.lock().expect("one thread");
        passes.under_way -= 1;
        // What was saved goes back.
        std::hint::black_box(passes.saved.pop());
    }
}

/// Median and 99th part of a hundred, in microseconds.
fn shown(times: &mut [Duration]) -> [f64; 2] {
    times.sort_unstable();
    [times.len() / 2, times.len() * 99 / 100].map(|at| times[at].as_secs_f64() * 1e6)
}

fn main() {
    if !bed::root() {
        return;
    }
    // A device for each, so that each has all of the descriptors that may be reserved.
    let pairs = [(); 2].map(|()| Pair::new(1));
    let [(mut near, mut far), (mut near_placed, mut far_placed)] = pairs.each_ref().map(|pair| {
        (
            pair.a.run(|| veth::open("va", IdleStrategy::default())),
            pair.b.run(|| veth::open("vb", IdleStrategy::default())),
        )
    });
    let real_time = RealTime::new(&mut near, None, monotonic).expect("no other handler");
    let config = SocketConfig {
        keep: 1,
        frames: FRAMES,
        blocks: Blocks {
            of_16: 3,
            ..Blocks::default()
        },
        ..SocketConfig::default()
    };
    let mut socket = real_time.socket(&mut near, 1, &config).expect("memory");
    let to = far.local();
    let peer = pairs[0].a.run(|| veth::peer(&mut near, to));
    socket.connect(&mut near, peer, 1).expect("a peer");
    while far.try_recv().expect("a message").is_none() {
        near.poll();
    }
    let passes = Arc::new(Mutex::new(Passes::default()));
    let in_place = InPlace {
        passes: Arc::clone(&passes),
        from: near_placed.local(),
    };
    let to = far_placed.local();
    let spec = FlowSpec {
        to: Some(pairs[1].a.run(|| veth::peer(&mut near_placed, to))),
        frames: FRAMES,
        descriptors: FRAMES,
        messages: None,
    };
    let added = near_placed.extensions().add_flow(&spec, Box::new(in_place));
    added.expect("frames");
    passes.lock().expect("one thread").saved.reserve(FRAMES as usize);
    println!("pages  copied p50, p99 us  two passes p50, p99 us");
    let mut buffer = socket.buffer(65_436);
    for pages in [2, 4, 8, 16] {
        let len = pages * 4096 - 100;
        let (mut copied, mut placed) = (Vec::new(), Vec::new());
        for _ in 0..MESSAGES {
            let begun = Instant::now();
            let lent = buffer.take().expect("it came back");
            assert!(socket.send_buffer(lent, len, SendOptions::default()).is_ok());
            while buffer.is_none() {
                near.poll();
                buffer = socket.unlocked().map(|(buffer, _)| buffer);
            }
            copied.push(begun.elapsed());
            while far.poll() > 0 {}
            let begun = Instant::now();
            for pass in [1, 2] {
                passes.lock().expect("one thread").begin(len, pass);
                loop {
                    near_placed.poll();
                    let passes = passes.lock().expect("one thread");
                    if passes.next.is_empty() && passes.under_way == 0 {
                        break;
                    }
                }
            }
            placed.push(begun.elapsed());
            while far_placed.poll() > 0 {}
        }
        let ([a, b], [c, d]) = (shown(&mut copied), shown(&mut placed));
        println!("{pages:>5}  {a:>9.1} {b:>9.1}  {c:>12.1} {d:>9.1}");
    }
}
