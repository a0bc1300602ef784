//! Sessions among real endpoints: both ways at once, several senders, peers that vanish.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lm_cards::Interface;
use lm_dataplane::{
    ConnectError, ConnectOptions, Endpoint, EndpointConfig, LoanError, Outcome, PeerId, RecvError,
};
use lm_protocol::session::Permit;

use crate::bed::Namespace;
use crate::harness::{
    B, Bed, PATIENCE, Switched, assert_accounted, assert_clean_but_late, assert_delivered, both, check,
    completions, config_a, config_b, connect, content, open, receive_threads_waited, recv, send, settle,
    up_to, wait_until,
};

/// How long a silent sender keeps the landing queue, in the tests that wait for its end.
const LEASE: Duration = Duration::from_millis(500);
/// Scheduling on a busy machine.
const SLACK: Duration = Duration::from_secs(2);

fn open_with_lease(config: &EndpointConfig) -> Endpoint {
    let permit = Permit {
        max_message_len: 1 << 20,
        lease: LEASE,
    };
    Endpoint::open_with(config, Box::new(permit)).unwrap()
}

fn length(tag: u64) -> u64 {
    [0, 1, 64, 1448, 1449, 3000, 7168, 20_000, 65_536, 371_000][tag as usize % 10]
}

/// Sends messages `0..count` and receives as many, as they come. Returns the most that were unconfirmed at once.
fn exchange(endpoint: &mut Endpoint, peer: PeerId, count: u64, salt: u64) -> u64 {
    let mut received = vec![false; count as usize];
    let (mut next, mut settled, mut arrived, mut most) = (0, 0, 0, 0);
    let deadline = Instant::now() + PATIENCE;
    while settled < count || arrived < count {
        assert!(
            Instant::now() < deadline,
            "{next} {settled} {arrived}: {:?}",
            endpoint.counters()
        );
        let mut work = endpoint.poll();
        while next < count {
            let mut region = match endpoint.loan(peer, length(next)) {
                Ok(region) => region,
                Err(LoanError::WouldBlock) => break,
                Err(error) => panic!("{error}"),
            };
            std::io::Write::write_all(&mut region, &content(next ^ salt, length(next))).unwrap();
            if endpoint.try_send(region, next).is_err() {
                break;
            }
            next += 1;
            work += 1;
        }
        most = most.max(next - settled);
        while let Some(completion) = endpoint.try_completion() {
            assert_eq!(completion.outcome, Outcome::Delivered);
            assert_eq!((completion.peer, completion.len), (peer, length(completion.tag)));
            settled += 1;
        }
        while let Some(message) = endpoint.try_recv().unwrap() {
            let tag = message.tag();
            assert!(
                !std::mem::replace(&mut received[tag as usize], true),
                "message {tag} came twice"
            );
            assert_eq!(message.len() as u64, length(tag));
            assert!(*message == content(tag ^ !salt, length(tag)), "message {tag}");
            arrived += 1;
        }
        if work == 0 {
            endpoint.wait(Duration::from_millis(1));
        }
    }
    most
}

/// A sender's word of what it sent is believed when nothing has come for so long.
const CLAIM_GRACE: Duration = Duration::from_micros(200);
/// Packets that a sender on veth may have on the way.
const ON_THE_WAY: u64 = 192;

#[test]
fn both_ways_at_once() {
    let Some(bed) = Bed::new(2) else { return };
    let options = ConnectOptions {
        messages_in_flight: 256,
        ..up_to(1 << 20)
    };
    let waited = receive_threads_waited();
    let ((most_a, a), (most_b, b)) = bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let peer = a.connect(B, &options).unwrap();
            send(a, peer, 0, b"hello");
            settle(a);
            (exchange(a, peer, 600, 0), a.counters())
        },
        |b| {
            let peer = recv(b).peer();
            b.peer(peer).open_session(&options).unwrap();
            (exchange(b, peer, 600, !0), b.counters())
        },
    );
    // The position of a sender comes by another queue than what it sent. It is believed when nothing has arrived for
    // 0.2 ms (`CLAIM_GRACE_NS`), and what is in flight then waits for the kernel's receive thread, which waits for a
    // core: each time, at most what may be in flight. A wait that is shorter than 0.2 ms is one as well, since the time
    // runs from the last arrival; without any wait nothing may be late.
    let waited = receive_threads_waited() - waited;
    let times = waited.as_nanos().div_ceil(CLAIM_GRACE.as_nanos());
    for counters in [a, b] {
        assert_clean_but_late(&counters, times as u64 * ON_THE_WAY);
    }
    assert!(
        most_a > 50 && most_b > 50,
        "{most_a} and {most_b} in flight at most"
    );
}

#[test]
fn two_senders_share_the_landing_queue() {
    const EACH: u64 = 60;
    let Some(bed) = Switched::new() else { return };
    let len = 200_000;
    let ready = std::sync::Barrier::new(3);
    let send_all = |namespace: &Namespace, first: u64| {
        namespace.run(|| {
            let mut a = open(&config_a());
            ready.wait();
            let peer = connect(&mut a, len);
            // Both have a session before either sends.
            ready.wait();
            let tokens: Vec<_> = (first..first + EACH)
                .map(|tag| (send(&mut a, peer, tag, &content(tag, len)), tag, len))
                .collect();
            assert_delivered(&settle(&mut a), &tokens);
            let counters = a.counters();
            drop(a);
            counters
        })
    };
    let (first, second) = (&bed.senders[0], &bed.senders[1]);
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            bed.receiver.run(|| {
                let mut b = open(&config_b());
                ready.wait();
                let both = std::thread::scope(|scope| {
                    let both = scope.spawn(|| ready.wait());
                    wait_until(&mut b, "both have a session", |_| both.is_finished());
                    both.join()
                });
                assert!(both.is_ok());
                // Each sender's messages come in their order.
                let mut next = [0, EACH];
                for _ in 0..2 * EACH {
                    let message = recv(&mut b);
                    let of = &mut next[usize::from(message.tag() >= EACH)];
                    check(&b, &message, *of, len);
                    *of += 1;
                }
                wait_until(&mut b, "both have ended", |b| b.counters().sessions_ended == 2);
                let counters = b.counters();
                assert_eq!(counters.sessions_granted, 2);
                assert_eq!((counters.messages_incomplete, counters.messages_stalled), (0, 0));
                counters
            })
        });
        let other = scope.spawn(|| send_all(second, EACH));
        let senders = [send_all(first, 0), other.join().unwrap()];
        // Three threads on fewer cores: who is asleep in its turn loses it, and what it sends afterwards meets entries that were meant for
        // the other one's; and the receiving veth's ring of 256 packets (`VETH_RING_SIZE`) overflows while the core that empties it is
        // busy, which loses announcements, too. That is repaired, and counted.
        assert_accounted(&receiver.join().unwrap(), &senders, true);
    });
}

/// What comes from queue 1 by a bridge that steers nothing comes to queue 0 (`veth_xmit`): never to the landing queue.
#[test]
fn a_switch_that_misses_the_landing_queue() {
    const MESSAGES: u64 = 30;
    let Some(bed) = Switched::new() else { return };
    bed.steer("0");
    let len = 371_000;
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            bed.receiver.run(|| {
                let mut b = open(&config_b());
                for tag in 0..MESSAGES {
                    let message = recv(&mut b);
                    check(&b, &message, tag, len);
                }
                wait_until(&mut b, "it has ended", |b| b.counters().sessions_ended == 1);
                let counters = b.counters();
                assert_eq!(
                    (counters.sessions_astray, counters.landing_rebuilt),
                    (1, 1),
                    "{counters:?}"
                );
                assert_eq!(counters.landing_packets, 0);
                assert_eq!((counters.messages_incomplete, counters.messages_stalled), (0, 0));
                counters
            })
        });
        let sender = bed.senders[0].run(|| {
            let mut a = open(&config_a());
            let peer = connect(&mut a, len);
            let tokens: Vec<_> = (0..MESSAGES)
                .map(|tag| (send(&mut a, peer, tag, &content(tag, len)), tag, len))
                .collect();
            assert_delivered(&settle(&mut a), &tokens);
            let counters = a.counters();
            drop(a);
            counters
        });
        assert_accounted(&receiver.join().unwrap(), &[sender], true);
    });
}

/// In a process that a test started to kill: what the process does. Its test does nothing else there.
const VICTIM: &str = "LM_TEST_VICTIM";

/// A process that has an endpoint, until it is killed: this test again, which finds [`VICTIM`] set.
struct Victim(Child);

impl Victim {
    /// Starts it and waits until it says that it is ready.
    fn start(namespace: &Namespace, test: &str) -> Victim {
        let mut victim = namespace.run(|| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", &format!("sessions::{test}"), "--nocapture"]);
            Victim(command.env(VICTIM, "1").stdout(Stdio::piped()).spawn().unwrap())
        });
        let output = BufReader::new(victim.0.stdout.take().unwrap());
        let ready = output.lines().any(|line| line.unwrap().contains("ready"));
        assert!(ready, "the victim ends early");
        victim
    }

    /// Whether this process is one.
    fn is_here() -> bool {
        std::env::var_os(VICTIM).is_some()
    }

    /// SIGKILL: no farewell.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn send_until_killed() {
    let deadline = Instant::now() + PATIENCE;
    let mut a = open(&config_a());
    let peer = connect(&mut a, 1 << 20);
    println!("ready");
    for tag in 0.. {
        send(&mut a, peer, tag, &content(tag, 1 << 20));
        assert!(Instant::now() < deadline, "nobody kills us");
    }
}

fn receive_until_killed() {
    let deadline = Instant::now() + PATIENCE;
    let mut b = open_with_lease(&config_b());
    println!("ready");
    while Instant::now() < deadline {
        let _ = b.recv(Some(Duration::from_millis(100)));
    }
    panic!("nobody kills us");
}

fn program_on(namespace: &Namespace, interface: &str) -> Option<u32> {
    namespace
        .run(|| Interface::by_name(interface))
        .unwrap()
        .xdp_program
}

#[test]
fn a_killed_sender_leaves_the_queue_to_the_next() {
    if Victim::is_here() {
        return send_until_killed();
    }
    let Some(bed) = Bed::new(2) else { return };
    bed.pair.b.run(|| {
        let mut b = open_with_lease(&config_b());
        let mut victim = std::thread::scope(|scope| {
            let start =
                scope.spawn(|| Victim::start(&bed.pair.a, "a_killed_sender_leaves_the_queue_to_the_next"));
            wait_until(&mut b, "the sender starts", |_| start.is_finished());
            start.join().unwrap()
        });
        for tag in 0..3 {
            receive(&mut b, tag, 1 << 20);
        }
        assert!(program_on(&bed.pair.a, "va").is_some());
        victim.kill();
        let killed = Instant::now();
        assert_eq!(b.counters().sessions_ended, 0);
        wait_until(&mut b, "the lease ends", |b| b.counters().sessions_ended == 1);
        assert!(killed.elapsed() < LEASE + SLACK, "after {:?}", killed.elapsed());
        // What was on its way is whole or reported, and what is whole is right.
        let mut next = 3;
        loop {
            match b.try_recv() {
                Ok(Some(message)) => check(&b, &message, next, 1 << 20),
                Ok(None) => break,
                Err(RecvError::Incomplete {
                    tag, len, missing, ..
                }) => {
                    assert_eq!((tag, len), (next, 1 << 20));
                    assert!(!missing.is_empty());
                }
                Err(error) => panic!("{error}"),
            }
            next += 1;
        }
        assert_eq!(b.counters().violations.total(), 0);
        // The kernel takes the gate away with the process.
        wait_until(&mut b, "the gate is gone", |_| {
            program_on(&bed.pair.a, "va").is_none()
        });
        let sender = || {
            bed.pair.a.run(|| {
                let mut a = open(&config_a());
                let peer = connect(&mut a, 1 << 20);
                let token = send(&mut a, peer, 77, &content(77, 1 << 20));
                assert_delivered(&settle(&mut a), &[(token, 77, 1 << 20)]);
            });
        };
        std::thread::scope(|scope| {
            let sender = scope.spawn(sender);
            receive(&mut b, 77, 1 << 20);
            wait_until(&mut b, "the sender ends", |_| sender.is_finished());
            sender.join().unwrap();
        });
    });
}

/// Hands over large and small messages that nobody will confirm, and waits for how they end.
fn send_in_vain(a: &mut Endpoint, peer: PeerId, patience: Duration) -> Vec<Outcome> {
    let begin = Instant::now();
    let large: Vec<_> = (0..3)
        .map(|tag| send(a, peer, tag, &content(tag, 100_000)))
        .collect();
    let small: Vec<_> = (3..6).map(|tag| send(a, peer, tag, b"small")).collect();
    let mut ended = Vec::new();
    wait_until(a, "all have ended", |a| {
        ended.extend(completions(a));
        ended.len() == 6
    });
    let bound = LEASE.max(patience) + SLACK;
    assert!(begin.elapsed() < bound, "after {:?}", begin.elapsed());
    let tokens = |completions: &mut dyn Iterator<Item = &lm_dataplane::Completion>| {
        completions.map(|completion| completion.token).collect::<Vec<_>>()
    };
    assert_eq!(tokens(&mut ended.iter().filter(|c| c.tag < 3)), large);
    assert_eq!(tokens(&mut ended.iter().filter(|c| c.tag >= 3)), small);
    assert_eq!(a.counters().messages_failed, 6);
    // Large ones first.
    ended.sort_by_key(|completion| completion.tag);
    ended.into_iter().map(|completion| completion.outcome).collect()
}

fn impatient(config: EndpointConfig) -> EndpointConfig {
    EndpointConfig {
        patience: Duration::from_millis(400),
        ..config
    }
}

#[test]
fn a_killed_receiver_is_noticed() {
    if Victim::is_here() {
        return receive_until_killed();
    }
    let Some(bed) = Bed::new(2) else { return };
    let mut victim = Victim::start(&bed.pair.b, "a_killed_receiver_is_noticed");
    bed.pair.a.run(|| {
        let config = impatient(config_a());
        let mut a = open(&config);
        let peer = connect(&mut a, 1 << 20);
        send(&mut a, peer, 9, &content(9, 100_000));
        settle(&mut a);
        victim.kill();
        for outcome in send_in_vain(&mut a, peer, config.patience) {
            assert!(
                matches!(outcome, Outcome::TimedOut | Outcome::SessionEnded),
                "{outcome:?}"
            );
        }
        assert_eq!(
            a.flush(PATIENCE),
            Err(lm_dataplane::SendError::Failed { messages: 6 })
        );
        let error = a.connect(B, &up_to(1 << 20)).unwrap_err();
        assert!(matches!(error, ConnectError::NotListening { .. }), "{error:?}");
        // The next receiver on that port is another one, and is reached.
        let _next = Victim::start(&bed.pair.b, "a_killed_receiver_is_noticed");
        let peer = connect(&mut a, 1 << 20);
        for (tag, len) in [(10, 100_000), (11, 5)] {
            let token = send(&mut a, peer, tag, &content(tag, len));
            assert_delivered(&settle(&mut a), &[(token, tag, len)]);
        }
    });
}

#[test]
fn a_receiver_that_stands_still_is_noticed() {
    let Some(bed) = Bed::new(2) else { return };
    both(
        &bed.pair.a,
        &bed.pair.b,
        |start, _over| {
            let config = impatient(config_a());
            let mut a = open(&config);
            start.meet();
            let peer = connect(&mut a, 1 << 20);
            start.meet();
            // Its last round is over.
            start.meet();
            let outcomes = send_in_vain(&mut a, peer, config.patience);
            assert_eq!(outcomes, [const { Outcome::TimedOut }; 6]);
        },
        |start, over| {
            let mut b = open_with_lease(&config_b());
            start.meet();
            wait_until(&mut b, "a session is granted", |b| {
                b.counters().sessions_granted == 1
            });
            // The grant may have to be repeated before the sender has it.
            start.meet_polling(&mut b);
            start.meet();
            over.wait_for_other(PATIENCE);
        },
    );
}

#[test]
fn a_receiver_that_leaves_says_so() {
    let Some(bed) = Bed::new(2) else { return };
    both(
        &bed.pair.a,
        &bed.pair.b,
        |start, _over| {
            let config = impatient(config_a());
            let mut a = open(&config);
            start.meet();
            let peer = connect(&mut a, 1 << 20);
            send(&mut a, peer, 9, &content(9, 100_000));
            settle(&mut a);
            start.meet();
            let token = send(&mut a, peer, 10, &content(10, 100_000));
            // It took the message and left at once: the message counts as delivered all the same.
            assert_delivered(&settle(&mut a), &[(token, 10, 100_000)]);
            wait_until(&mut a, "the session is over", |a| {
                a.loan(peer, 100_000).err() == Some(LoanError::NoSession)
            });
        },
        |start, over| {
            // The session must be over long before its lease.
            let mut b = open(&config_b());
            start.meet();
            recv(&mut b);
            start.meet_polling(&mut b);
            receive(&mut b, 10, 100_000);
            drop(b);
            assert!(over.wait_for_other(SLACK), "the sender does not notice");
        },
    );
}

fn receive(endpoint: &mut Endpoint, tag: u64, len: u64) {
    let message = recv(endpoint);
    check(endpoint, &message, tag, len);
}
