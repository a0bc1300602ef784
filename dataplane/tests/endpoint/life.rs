//! Waiting, and the end: descriptors for poll(2), sleep, detaching, messages that outlive their endpoint.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc::{TryRecvError, channel};
use std::time::{Duration, Instant};

use lm_cards::Interface;
use lm_dataplane::memory::{HugePages, Umem};
use lm_dataplane::xsk::{BIND_PATIENCE, BindMode, Xsk, XskConfig};
use lm_dataplane::{Endpoint, IdleStrategy, RecvError};

use crate::harness::{
    Bed, PATIENCE, check, config_a, config_b, connect, content, open, recv, send, settle, wait_until,
};

/// Whether poll(2) says that the endpoint's descriptor is readable within the time.
fn readable(endpoint: &Endpoint, timeout: Duration) -> bool {
    let mut entry = libc::pollfd {
        fd: endpoint.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one live entry, and the number of entries says so.
    let ready = unsafe { libc::poll(&raw mut entry, 1, timeout.as_millis() as i32) };
    assert!(ready >= 0, "{}", std::io::Error::last_os_error());
    entry.revents & libc::POLLIN != 0
}

/// One may come while the receiver is awake anyhow: so many of a kind are sent until the descriptor has told of one.
#[test]
fn the_descriptor_tells_of_every_kind_of_message() {
    // One queue: everything small comes by the kernel's socket.
    for queues in [2, 1] {
        let Some(bed) = Bed::new(queues) else { return };
        let (ask, asked) = channel();
        bed.talk(
            &config_a(),
            &config_b(),
            move |a| {
                let peer = connect(a, 1 << 20);
                send(a, peer, 0, b"here");
                settle(a);
                loop {
                    let mut next = Err(TryRecvError::Empty);
                    wait_until(a, "another message is asked for", |_| {
                        next = asked.try_recv();
                        next != Err(TryRecvError::Empty)
                    });
                    let Ok((tag, len)) = next else { return };
                    send(a, peer, tag, &content(tag, len));
                    settle(a);
                }
            },
            move |b| {
                // A request for a session is something to do as well.
                assert!(readable(b, PATIENCE), "{queues} queues: the request");
                recv(b);
                let mut tag = 0;
                for len in [10, 500_000, 0] {
                    let deadline = Instant::now() + PATIENCE;
                    let mut was_told = false;
                    while !was_told {
                        tag += 1;
                        ask.send((tag, len)).expect("the sender");
                        let message = loop {
                            // As the descriptor's documentation asks: not without a poll for longer.
                            was_told = readable(b, Duration::from_millis(10));
                            assert!(
                                Instant::now() < deadline,
                                "{queues} queues, message {tag} of {len} bytes: {:?}",
                                b.counters()
                            );
                            if let Some(message) = b.try_recv().unwrap() {
                                break message;
                            }
                        };
                        check(b, &message, tag, len);
                    }
                }
            },
        );
    }
}

#[test]
fn an_idle_endpoint_sleeps() {
    let Some(bed) = Bed::new(2) else { return };
    let config = lm_dataplane::EndpointConfig {
        idle: IdleStrategy::default(),
        ..config_b()
    };
    bed.pair.b.run(|| {
        let mut b = open(&config);
        // Past the spinning.
        assert_eq!(
            b.recv(Some(Duration::from_millis(100))).unwrap_err(),
            RecvError::TimedOut
        );
        let (idle, before, begin) = (Duration::from_millis(300), cpu_time(), Instant::now());
        assert_eq!(b.recv(Some(idle)).unwrap_err(), RecvError::TimedOut);
        let (used, passed) = (cpu_time() - before, begin.elapsed());
        assert!(passed >= idle && passed < idle + PATIENCE / 2, "{passed:?}");
        assert!(used < passed * 3 / 10, "{used:?} of {passed:?}");
    });
}

/// Processor time of this thread.
fn cpu_time() -> Duration {
    // SAFETY: all-zero bytes are a valid rusage, which holds integers only.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is live.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(result, 0);
    let time =
        |t: libc::timeval| Duration::from_secs(t.tv_sec as u64) + Duration::from_micros(t.tv_usec as u64);
    time(usage.ru_utime) + time(usage.ru_stime)
}

#[test]
fn a_message_outlives_its_endpoint_and_the_gate_does_not() {
    let Some(bed) = Bed::new(2) else { return };
    let program = |name: &str| Interface::by_name(name).unwrap().xdp_program;
    let (small, large) = (1000, 3 << 20);
    let (_, held) = crate::harness::both(
        &bed.pair.a,
        &bed.pair.b,
        |start, _over| {
            let mut a = open(&config_a());
            assert!(program("va").is_some());
            start.meet();
            let peer = connect(&mut a, large);
            send(&mut a, peer, 0, &content(0, small));
            send(&mut a, peer, 1, &content(1, large));
            settle(&mut a);
            // A region that was never sent is no obstacle.
            let unsent = a.loan(peer, large).unwrap();
            drop(a);
            assert_eq!(program("va"), None);
            drop(unsent);
        },
        |start, over| {
            let mut b = open(&config_b());
            assert!(program("vb").is_some());
            start.meet();
            let mut held = [recv(&mut b), recv(&mut b)];
            held.sort_by_key(|message| message.tag());
            check(&b, &held[0], 0, small);
            check(&b, &held[1], 1, large);
            wait_until(&mut b, "the sender is gone", |_| over.other());
            drop(b);
            assert_eq!(program("vb"), None);
            // The queues are free for the next one although the messages are held.
            let next = open(&config_b());
            assert!(program("vb").is_some());
            drop(next);
            held
        },
    );
    let reader = std::thread::spawn(move || {
        assert!(*held[0] == *content(0, small) && *held[1] == *content(1, large));
    });
    reader.join().unwrap();
}

/// On a busy machine the kernel takes its time to release the queues of a program that has ended.
#[test]
fn an_endpoint_waits_for_queues_that_are_released_late() {
    let Some(bed) = Bed::new(2) else { return };
    bed.pair.b.run(|| {
        let memory = Umem::new(1 << 20, HugePages::Off).expect("memory");
        let of_another = |queue| XskConfig {
            interface_index: Interface::by_name("vb").expect("vb").index,
            queue,
            mapping: memory.mapping(),
            registered_len: memory.len(),
            chunk_len: 2048,
            fill_len: 64,
            completion_len: 64,
            rx_len: 64,
            tx_len: 64,
            bind: BindMode::Copy,
        };
        let held = [0, 1].map(|queue| Xsk::open(&of_another(queue)).expect("a free queue"));
        std::thread::scope(|scope| {
            let begun = Instant::now();
            scope.spawn(move || {
                std::thread::sleep(BIND_PATIENCE * 3 / 2);
                drop(held);
            });
            open(&config_b());
            assert!(begun.elapsed() >= BIND_PATIENCE * 3 / 2, "{:?}", begun.elapsed());
        });
    });
}

#[test]
fn an_interface_has_one_endpoint() {
    let Some(bed) = Bed::new(2) else { return };
    bed.pair.b.run(|| {
        let first = open(&config_b());
        let another = lm_dataplane::EndpointConfig {
            port: 0,
            ..config_b()
        };
        let error = Endpoint::open(&another).unwrap_err().to_string();
        assert!(error.contains("vb already has an XDP program"), "{error}");
        // The first one is not harmed.
        assert!(Interface::by_name("vb").unwrap().xdp_program.is_some());
        drop(first);
        open(&another);
    });
}
