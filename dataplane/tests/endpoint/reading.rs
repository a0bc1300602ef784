//! Messages that are read while they arrive.

use std::num::NonZeroU64;
use std::sync::mpsc;
use std::time::Duration;

use lm_dataplane::{ConnectOptions, Ending, EndpointConfig, Incoming, MemoryConfig};

use crate::harness::{
    B, Bed, PATIENCE, assert_clean, check, config_a, config_b, content, recv, up_to, wait_until,
};

const LEN: u64 = 64 << 20;
const TAG: u64 = 7;

/// Reads what is shown, in order, and compares it. Gives the message back with the address of its first byte, and how much was read before
/// it was settled.
fn read(incoming: Incoming, expected: &[u8]) -> (Incoming, usize, u64) {
    let (mut done, mut early, mut start) = (0, 0, 0);
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
    }
    (incoming, start, early)
}

#[test]
fn another_thread_reads_a_message_while_it_arrives() {
    let Some(bed) = Bed::new(2) else { return };
    let large = |config: EndpointConfig| EndpointConfig {
        memory: MemoryConfig {
            send_len: LEN + (8 << 20),
            ..config.memory
        },
        ..config
    };
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
        |b| {
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
                scope.spawn(move || done.send(read(incoming, expected)).unwrap());
                let message = recv(b);
                check(b, &message, TAG, LEN);
                let (incoming, start, early) = reader.recv_timeout(PATIENCE).unwrap();
                // In the memory in which it comes whole, and not only at its end.
                assert_eq!(start, message.as_ptr() as usize);
                assert!(early > 0, "nothing was read before the message was whole");
                assert_eq!(incoming.settled(), Some(Ending::Whole));
                // What was shown outlives the message.
                drop(message);
                assert!(*incoming.get(0..LEN).unwrap() == *expected);
            });
            assert_clean(b);
        },
    );
}
