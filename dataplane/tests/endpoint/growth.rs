//! Landing memory that becomes longer: seldom, under nobody's messages, and not for one sender alone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, ReceiveConfig};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::harness::{
    B, Bed, Flag, PATIENCE, Switched, config_a, config_b, connect, content, open, recv, send, settle, up_to,
    wait_until,
};

const SHORT: u64 = 1 << 20;
const LONG: u64 = 56 << 20;

fn receiver_config() -> EndpointConfig {
    EndpointConfig {
        receive: ReceiveConfig {
            max_message_len: 64 << 20,
            ..config_b().receive
        },
        ..config_b()
    }
}

fn sender_config() -> EndpointConfig {
    EndpointConfig {
        memory: MemoryConfig {
            send_len: 96 << 20,
            ..config_a().memory
        },
        ..config_a()
    }
}

/// A sender asks for messages for which there is no memory, while another one's land. Its own take the one-copy path until nothing of the
/// other one is under way, and then land, too.
#[test]
fn a_senders_longer_messages_disturb_nobody() {
    let Some(bed) = Switched::new() else { return };
    let [listens, begun, streamed, over] = <[Flag; 4]>::default();
    let long_ones = AtomicU64::new(0);
    let is_over = || over.is_set();
    let receive = || {
        let mut b = open(&receiver_config());
        listens.set();
        let bytes = [content(0, SHORT), content(1, LONG)];
        let mut during = None;
        wait_until(&mut b, "all sessions have ended", |b| {
            while let Some(message) = b.try_recv().unwrap() {
                assert!(*message == bytes[message.tag() as usize]);
                long_ones.fetch_add(message.tag(), Ordering::AcqRel);
            }
            let counters = b.counters();
            if streamed.is_set() {
                during.get_or_insert(counters);
            }
            is_over() && counters.sessions_ended == counters.sessions_granted
        });
        let counters = b.counters();
        assert_eq!(
            during.map(|during| during.landing_rebuilt),
            Some(0),
            "{counters:?}"
        );
        // Nothing that had landed was thrown away with a socket.
        assert_eq!(counters.drops.landing_discarded, 0, "{counters:?}");
        assert_eq!((counters.messages_incomplete, counters.landing_lost), (0, 0));
    };
    let stream = || {
        listens.wait();
        let mut a = open(&sender_config());
        // So many that some are always under way.
        let options = ConnectOptions {
            messages_in_flight: 64,
            ..up_to(SHORT)
        };
        let peer = a.connect(B, &options).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let bytes = content(0, SHORT);
        while long_ones.load(Ordering::Acquire) < 2 {
            assert!(Instant::now() < deadline, "{:?}", a.counters());
            send(&mut a, peer, 0, &bytes);
            while a.try_completion().is_some() {}
            begun.set();
        }
        streamed.set();
        settle(&mut a);
        assert_eq!(a.counters().messages_one_copy, 0);
        // It keeps its session, and nothing is under way.
        wait_until(&mut a, "the other one is done", |_| is_over());
        drop(a);
    };
    let ask_for_more = || {
        begun.wait();
        let mut a = open(&sender_config());
        let peer = a.connect(B, &up_to(LONG)).unwrap();
        let bytes = content(1, LONG);
        for _ in 0..4 {
            send(&mut a, peer, 1, &bytes);
            settle(&mut a);
        }
        over.set();
        drop(a);
    };
    bed.run(receive, [&stream, &ask_for_more]);
}

/// Senders ask for a MiB more each time.
#[test]
fn landing_memory_grows_in_few_steps() {
    const LONGEST: u64 = 24;
    let Some(bed) = Bed::new(2) else { return };
    let config = EndpointConfig {
        memory: MemoryConfig {
            landing_len: 1 << 20,
            ..config_b().memory
        },
        receive: ReceiveConfig {
            max_message_len: LONGEST << 20,
            ..config_b().receive
        },
        ..config_b()
    };
    let steps = bed.talk(
        &sender_config(),
        &config,
        |a| {
            for len in 1..=LONGEST {
                let options = ConnectOptions {
                    messages_in_flight: 1,
                    ..up_to(len << 20)
                };
                let peer = a.connect(B, &options).unwrap();
                let payload = content(len, len << 20);
                send(a, peer, len, &payload);
                settle(a);
                a.peer(peer).end_session();
                wait_until(a, "the session has ended", |a| {
                    a.peer(peer).max_message_len() < 1 << 20
                });
            }
        },
        |b| {
            let mut steps = vec![b.status().landing_range().end];
            for len in 1..=LONGEST {
                assert_eq!(recv(b).len() as u64, len << 20);
                let end = b.status().landing_range().end;
                if steps.last() != Some(&end) {
                    steps.push(end);
                }
            }
            steps
        },
    );
    // 1 MiB, doubled until it is twice 24 MiB and some more: log2(48) steps.
    assert!((2..=7).contains(&steps.1.len()), "{:?}", steps.1);
}

/// A receiver may not pin what a sender wants, since it has no CAP_IPC_LOCK any more: the sender's messages come by the one-copy path, no other
/// sender notices, and when it asks for less it lands.
#[test]
fn memory_that_cannot_be_had_costs_its_asker_alone() {
    const CAP_IPC_LOCK: u32 = 14;
    /// What an ordinary user may lock, usually.
    const LIMIT: u64 = 8 << 20;
    let Some(bed) = Switched::new() else { return };
    let [listens, landed, refused, over] = <[Flag; 4]>::default();
    let receive = || {
        let config = EndpointConfig {
            receive: ReceiveConfig {
                max_message_len: 256 << 20,
                ..config_b().receive
            },
            ..config_b()
        };
        let mut b = open(&config);
        // The limit holds for the whole test program, but only threads without CAP_IPC_LOCK feel it.
        crate::bed::drop_capability(CAP_IPC_LOCK);
        let mut limit = getrlimit(Resource::Memlock);
        limit.current = Some(limit.maximum.map_or(LIMIT, |most| most.min(LIMIT)));
        setrlimit(Resource::Memlock, limit).unwrap();
        listens.set();
        wait_until(&mut b, "all sessions have ended", |b| {
            while let Some(message) = b.try_recv().unwrap() {
                assert!(*message == content(0, SHORT));
            }
            over.is_set() && b.counters().sessions_ended == 3
        });
        let counters = b.counters();
        assert_eq!(
            (counters.sessions_granted, counters.landing_lost),
            (3, 0),
            "{counters:?}"
        );
        assert_eq!(counters.messages_received, 40);
    };
    let send_ten = |a: &mut Endpoint, peer, one_copy| {
        for _ in 0..10 {
            send(a, peer, 0, &content(0, SHORT));
        }
        settle(a);
        assert_eq!(
            (a.counters().messages_one_copy, a.counters().messages_failed),
            (one_copy, 0)
        );
    };
    let first = || {
        listens.wait();
        let mut a = open(&config_a());
        let peer = connect(&mut a, SHORT);
        send_ten(&mut a, peer, 0);
        landed.set();
        wait_until(&mut a, "the other one has no place", |_| refused.is_set());
        send_ten(&mut a, peer, 0);
        drop(a);
    };
    let others = || {
        landed.wait();
        let mut a = open(&config_a());
        let peer = connect(&mut a, 200 << 20);
        assert_eq!(a.peer(peer).lands(), Some(false));
        refused.set();
        send_ten(&mut a, peer, 10);
        drop(a);
        let mut a = open(&config_a());
        let peer = connect(&mut a, SHORT);
        send_ten(&mut a, peer, 0);
        over.set();
        drop(a);
    };
    bed.run(receive, [&first, &others]);
}

/// A sender announces all the landing memory that there is, and sends nothing. Another one's messages find room all the same.
#[test]
fn a_sender_that_holds_memory_leaves_some_to_others() {
    const MESSAGES: u64 = 40;
    let Some(bed) = Switched::with_attackers() else {
        return;
    };
    let config = EndpointConfig {
        patience: Duration::from_secs(15),
        ..receiver_config()
    };
    let [listens, held, over, counted] = <[Flag; 4]>::default();
    let receive = || {
        let mut b = open(&config);
        listens.set();
        wait_until(&mut b, "the other one is done", |b| {
            while b.try_recv().unwrap().is_some() {}
            over.is_set()
        });
        assert!(b.counters().messages_received >= MESSAGES);
        counted.set();
    };
    let hold = || {
        listens.wait();
        let mut a = open(&sender_config());
        let options = ConnectOptions {
            one_copy: true,
            messages_in_flight: 256,
            ..up_to(SHORT)
        };
        let peer = a.connect(B, &options).unwrap();
        let bytes = content(0, SHORT);
        // They are announced, and no credit is looked at.
        for _ in 0..60 {
            let mut region = a.loan(peer, SHORT).unwrap();
            std::io::Write::write_all(&mut region, &bytes).unwrap();
            a.try_send(region, 0).unwrap();
        }
        a.poll();
        held.set();
        // Its leaving ends its messages: an error at the receiver, which is another test's subject.
        counted.wait();
    };
    let send_some = || {
        held.wait();
        let mut a = open(&config_a());
        let start = Instant::now();
        let peer = connect(&mut a, SHORT);
        let bytes = content(1, SHORT);
        for _ in 0..MESSAGES {
            send(&mut a, peer, 1, &bytes);
        }
        settle(&mut a);
        let took = start.elapsed();
        over.set();
        assert_eq!(a.counters().messages_failed, 0);
        assert!(took < Duration::from_secs(5), "{took:?}");
    };
    bed.run(receive, [&hold, &send_some]);
}
