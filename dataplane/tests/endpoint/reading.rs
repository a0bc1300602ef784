//! Messages that are read while they arrive, and while they are written.

use std::io::Write;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use lm_dataplane::{ConnectOptions, Ending, Endpoint, EndpointConfig, Incoming, MemoryConfig, Outcome};

use crate::harness::{
    B, Bed, PATIENCE, assert_clean, check, config_a, config_b, content, recv, up_to, wait_until,
};

const LEN: u64 = 64 << 20;
const TAG: u64 = 7;

/// Reads what is shown, in order, and compares it. Gives the message back with the address of its first byte, and how much was read before
/// it was settled, and before it `is_written`.
fn read(incoming: Incoming, expected: &[u8], is_written: &AtomicBool) -> (Incoming, usize, u64, u64) {
    let (mut done, mut early, mut ahead, mut start) = (0, 0, 0, 0);
    while done < LEN {
        let is_settled = incoming.settled().is_some();
        let shown = incoming.shown().find(|range| range.contains(&done));
        let Some(bytes) = shown.and_then(|range| incoming.get(done..range.end)) else {
            assert!(!is_settled, "settled, and {done} of {LEN} bytes are shown");
            std::thread::sleep(Duration::from_micros(50));
            continue;
        };
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
        if !is_written.load(Ordering::Acquire) {
            ahead = done;
        }
    }
    (incoming, start, early, ahead)
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
        |b| read_beside(b, &AtomicBool::new(true)),
    );
}

/// A thread at either end: what is read is not written to its end.
#[test]
fn a_thread_reads_what_another_is_still_writing() {
    let Some(bed) = Bed::new(2) else { return };
    let is_written = AtomicBool::new(false);
    bed.talk(
        &large(config_a()),
        &config_b(),
        |a| {
            let peer = a.connect(B, &up_to(LEN)).unwrap();
            let payload = content(TAG, LEN);
            a.send_copy(peer, b"who is there", 0).unwrap();
            assert_eq!(recv(a)[..], *b"go on");
            let mut writer = a.peer(peer).begin(LEN, TAG).unwrap();
            let (token, is_written) = (writer.token(), &is_written);
            std::thread::scope(|scope| {
                let writing = scope.spawn(move || {
                    // For half a second.
                    for part in payload.chunks(LEN as usize / 100 + 7) {
                        writer.write_all(part).unwrap();
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    is_written.store(true, Ordering::Release);
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
        |b| read_beside(b, &is_written),
    );
}

/// Receives a message that another thread reads meanwhile; some of it before it `is_written`, unless it was written before.
fn read_beside(b: &mut Endpoint, is_written: &AtomicBool) {
    let peer = recv(b).peer();
    assert!(b.peer(peer).watch());
    let expected = content(TAG, LEN);
    let was_written = is_written.load(Ordering::Acquire);
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
        scope.spawn(move || done.send(read(incoming, expected, is_written)).unwrap());
        let message = recv(b);
        check(b, &message, TAG, LEN);
        let (incoming, start, early, ahead) = reader.recv_timeout(PATIENCE).unwrap();
        // In the memory in which it comes whole, and not only at its end.
        assert_eq!(start, message.as_ptr() as usize);
        assert!(early > 0, "nothing was read before the message was whole");
        assert!(
            was_written || ahead > 0,
            "nothing was read before all was written"
        );
        assert_eq!(incoming.settled(), Some(Ending::Whole));
        // What was shown outlives the message.
        drop(message);
        assert!(*incoming.get(0..LEN).unwrap() == *expected);
    });
    assert_clean(b);
}
