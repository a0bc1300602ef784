//! Messages that are read while they arrive, and while they are written.

use std::io::Write;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectOptions, Ending, Endpoint, EndpointConfig, Incoming, MemoryConfig, Outcome};

use crate::harness::{
    B, Bed, PATIENCE, assert_clean, check, config_a, config_b, content, recv, up_to, wait_until,
};

const LEN: u64 = 64 << 20;
const TAG: u64 = 7;

/// How often is looked whether more was read.
const LOOK: Duration = Duration::from_micros(50);
/// While more than this is written and not read, no more is written: some windows, of which the last ones may wait for more to come.
const AHEAD: u64 = 1 << 20;

/// Reads what is shown, in order, compares it, and keeps `progress`. Gives the message back with the address of its first byte, and how much
/// was read before it was settled.
fn read(incoming: Incoming, expected: &[u8], progress: &AtomicU64) -> (Incoming, usize, u64) {
    let (mut done, mut early, mut start) = (0, 0, 0);
    while done < LEN {
        let shown_to = incoming.wait(done, PATIENCE);
        assert!(
            shown_to > done,
            "{:?}, and {done} of {LEN} bytes are shown",
            incoming.settled()
        );
        let is_settled = incoming.settled().is_some();
        let bytes = incoming.bytes(done..shown_to).unwrap();
        assert!(
            *bytes == expected[done as usize..][..bytes.len()],
            "from byte {done} on"
        );
        if done == 0 {
            start = bytes.as_ptr() as usize;
        }
        done += bytes.len() as u64;
        if !is_settled {
            early = done;
        }
        progress.store(done, Ordering::Release);
    }
    (incoming, start, early)
}

fn large(config: EndpointConfig) -> EndpointConfig {
    EndpointConfig {
        memory: MemoryConfig {
            send_len: LEN + (8 << 20),
            ..config.memory
        },
        ..config
    }
}

#[test]
fn another_thread_reads_a_message_while_it_arrives() {
    let Some(bed) = Bed::new(2) else { return };
    bed.talk(
        &large(config_a()),
        &config_b(),
        |a| {
            // For half a second: a reader that gets a core late reads early all the same.
            let options = ConnectOptions {
                rate: NonZeroU64::new(1_000_000_000),
                ..up_to(LEN)
            };
            let peer = a.connect(B, &options).unwrap();
            let payload = content(TAG, LEN);
            a.send_copy(peer, b"who is there", 0).unwrap();
            assert_eq!(recv(a)[..], *b"go on");
            a.send_copy(peer, &payload, TAG).unwrap();
            a.flush(PATIENCE).unwrap();
            assert_clean(a);
        },
        |b| read_beside(b, &AtomicU64::new(0)),
    );
}

/// A thread at either end: nothing is written before what was written a mebibyte earlier is read.
#[test]
fn a_thread_reads_what_another_is_still_writing() {
    let Some(bed) = Bed::new(2) else { return };
    let progress = AtomicU64::new(0);
    bed.talk(
        &large(config_a()),
        &config_b(),
        |a| {
            let peer = a.connect(B, &up_to(LEN)).unwrap();
            let payload = content(TAG, LEN);
            a.send_copy(peer, b"who is there", 0).unwrap();
            assert_eq!(recv(a)[..], *b"go on");
            let mut writer = a.peer(peer).begin(LEN, TAG).unwrap();
            let (token, progress) = (writer.token(), &progress);
            std::thread::scope(|scope| {
                let writing = scope.spawn(move || {
                    let begun = Instant::now();
                    for part in payload.chunks(LEN as usize / 100 + 7) {
                        while progress.load(Ordering::Acquire) + AHEAD < writer.written() {
                            assert!(begun.elapsed() < PATIENCE, "what is written is not read");
                            std::thread::sleep(LOOK);
                        }
                        writer.write_all(part).unwrap();
                    }
                    writer.finish().unwrap();
                });
                wait_until(a, "it is written", |_| writing.is_finished());
                writing.join().unwrap();
            });
            a.flush(PATIENCE).unwrap();
            let told = std::iter::from_fn(|| a.try_completion()).last().unwrap();
            assert_eq!((told.token, told.outcome), (token, Outcome::Delivered));
            assert_clean(a);
        },
        |b| read_beside(b, &progress),
    );
}

/// Receives a message that another thread reads meanwhile.
fn read_beside(b: &mut Endpoint, progress: &AtomicU64) {
    let peer = recv(b).peer();
    assert!(b.peer(peer).watch());
    let expected = content(TAG, LEN);
    b.send_copy(peer, b"go on", 0).unwrap();
    let mut incoming = None;
    wait_until(b, "a message begins", |b| {
        incoming = incoming.take().or(b.try_incoming());
        incoming.is_some()
    });
    let incoming = incoming.unwrap();
    assert_eq!(
        (incoming.peer(), incoming.tag(), incoming.len()),
        (peer, TAG, LEN)
    );
    let (done, reader) = mpsc::channel();
    let expected = &expected;
    std::thread::scope(|scope| {
        scope.spawn(move || done.send(read(incoming, expected, progress)).unwrap());
        let message = recv(b);
        check(b, &message, TAG, LEN);
        let (incoming, start, early) = reader.recv_timeout(PATIENCE).unwrap();
        // In the memory in which it comes whole, and not only at its end.
        assert_eq!(start, message.as_ptr() as usize);
        assert!(early > 0, "nothing was read before the message was whole");
        assert_eq!(incoming.settled(), Some(Ending::Whole));
        // What was shown outlives the message.
        drop(message);
        assert!(*incoming.bytes(0..LEN).unwrap() == *expected);
    });
    assert_clean(b);
}
