//! `lm-bench impair`: real packets through the box, whose fate is known beforehand from the seed.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use lm_box::{Fate, Impairments, direction_seed};
use rustix::process::Signal;
use serde_json::Value;

use crate::bed::{Bed, Host, RECEIVER, SENDER, Tool, content, wait_until};
use crate::measuring::{bare_ends, bare_stream, lm_bench, measured_stream, number, round_trips};

const PAYLOAD_LEN: usize = 400;
const SEED: u64 = 2026;

pub(crate) fn start_box(bed: &Bed, options: &str) -> Tool {
    let line = format!("impair --left left --right right --seed {SEED} {options}");
    let tool = Tool::start(lm_bench(bed, Host::Box, &line));
    tool.wait_for_line("ready");
    tool
}

/// Ends the box; its report, whose counters must balance.
pub(crate) fn stop(running: Tool) -> Value {
    running.signal(Signal::TERM);
    let ended = running.end();
    let report = ended.expect_code(0).json();
    for direction in ["rightward", "leftward"] {
        let of = |name: &str| number(&report[direction], name);
        assert_eq!(
            of("received") + of("duplicated"),
            of("sent") + of("lost") + of("queue_full") + of("refused") + of("held"),
            "{direction}: {report}"
        );
        assert_eq!(of("overrun"), 0, "{direction}: {report}");
        assert_eq!(of("refused"), 0, "{direction}: {report}");
    }
    report
}

/// Numbered datagrams from one host to the other. They have no UDP checksum, so that a changed byte does not matter to the kernel.
struct Line {
    from: UdpSocket,
    to: UdpSocket,
}

impl Line {
    fn between(bed: &Bed) -> Line {
        let from = bed.udp_socket(Host::Sender, &format!("{SENDER}:0"));
        let to = bed.udp_socket(Host::Receiver, &format!("{RECEIVER}:0"));
        from.connect(to.local_addr().unwrap()).unwrap();
        let one = 1_i32;
        // SAFETY: the descriptor is a live socket; the kernel reads four bytes of a live integer.
        let result = unsafe {
            libc::setsockopt(
                from.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_NO_CHECK,
                (&raw const one).cast(),
                size_of::<i32>() as u32,
            )
        };
        assert_eq!(result, 0);
        Line { from, to }
    }

    fn payload(number: u32) -> Vec<u8> {
        let mut payload = content(PAYLOAD_LEN);
        payload[..4].copy_from_slice(&number.to_be_bytes());
        payload
    }

    fn send(&self, numbers: std::ops::Range<u32>) {
        for number in numbers {
            self.from.send(&Line::payload(number)).unwrap();
        }
    }

    /// Receives so many datagrams, and makes sure that no further one waits.
    fn receive(&self, count: usize) -> Vec<Vec<u8>> {
        let mut bytes = [0; 2048];
        let received = (0..count).map(|place| {
            let len = self
                .to
                .recv(&mut bytes)
                .unwrap_or_else(|error| panic!("datagram {place} of {count}: {error}"));
            bytes[..len].to_vec()
        });
        let received = received.collect();
        self.to.set_nonblocking(true).unwrap();
        assert!(self.to.recv(&mut bytes).is_err(), "more than {count} datagrams");
        self.to.set_nonblocking(false).unwrap();
        received
    }

    /// The numbers of so many datagrams, each of which must be as it was sent.
    fn receive_numbers(&self, count: usize) -> Vec<u32> {
        let received = self.receive(count).into_iter().map(|payload| {
            let number = u32::from_be_bytes(payload[..4].try_into().unwrap());
            assert_eq!(payload, Line::payload(number), "datagram {number}");
            number
        });
        received.collect()
    }
}

fn fates(impairments: Impairments, count: u32) -> Vec<Fate> {
    let seed = direction_seed(SEED, 0);
    let impairments = Impairments { seed, ..impairments };
    (0..count).map(|number| impairments.fate(number.into())).collect()
}

fn numbers_of(fates: &[Fate], is: impl Fn(&Fate) -> bool) -> Vec<u32> {
    (0..)
        .zip(fates)
        .filter(|(_, fate)| is(fate))
        .map(|(number, _)| number)
        .collect()
}

#[test]
fn a_box_without_impairments_forwards_everything() {
    let Some(bed) = Bed::with_box() else { return };
    let running = start_box(&bed, "");
    let line = Line::between(&bed);
    line.send(0..500);
    assert_eq!(line.receive_numbers(500), (0..500).collect::<Vec<_>>());
    let report = stop(running);
    assert_eq!(number(&report["rightward"], "sent"), 500, "{report}");
    assert_eq!(number(&report["leftward"], "received"), 0, "{report}");
    line.send(500..501);
    line.receive(0);
}

#[test]
fn the_seed_says_which_packets_are_lost() {
    let Some(bed) = Bed::with_box() else { return };
    for (options, impairments) in [
        (
            "--loss 10%,0",
            Impairments {
                loss: 100_000,
                ..Impairments::default()
            },
        ),
        (
            "--loss 20% --loss-burst 7",
            Impairments {
                loss: 200_000,
                loss_burst: 7,
                ..Impairments::default()
            },
        ),
    ] {
        let fates = fates(impairments, 2000);
        let survivors = numbers_of(&fates, |fate| !fate.lost);
        let running = start_box(&bed, options);
        let line = Line::between(&bed);
        line.send(0..2000);
        assert_eq!(line.receive_numbers(survivors.len()), survivors, "{options}");
        let report = stop(running);
        let lost = number(&report["rightward"], "lost");
        assert_eq!(lost, 2000 - survivors.len() as u64, "{options}: {report}");
        let asked = u64::from(impairments.loss) * 2000 / 1_000_000;
        assert!(lost.abs_diff(asked) < asked / 2, "{options}: {report}");
    }
}

#[test]
fn duplicates_come_twice() {
    let Some(bed) = Bed::with_box() else { return };
    let fates = fates(
        Impairments {
            duplicate: 50_000,
            ..Impairments::default()
        },
        1000,
    );
    let running = start_box(&bed, "--duplicate 5%");
    let line = Line::between(&bed);
    line.send(0..1000);
    let expected: Vec<u32> = (0..)
        .zip(&fates)
        .flat_map(|(number, fate)| vec![number; 1 + usize::from(fate.duplicated)])
        .collect();
    assert!((1020..1080).contains(&expected.len()));
    assert_eq!(line.receive_numbers(expected.len()), expected);
    let report = stop(running);
    assert_eq!(
        number(&report["rightward"], "duplicated"),
        expected.len() as u64 - 1000
    );
}

#[test]
fn corruption_changes_one_byte_of_the_chosen_packets() {
    let Some(bed) = Bed::with_box() else { return };
    let fates = fates(
        Impairments {
            corrupt: 200_000,
            ..Impairments::default()
        },
        1000,
    );
    let chosen = numbers_of(&fates, |fate| fate.corrupted);
    let running = start_box(&bed, "--corrupt 20%");
    let line = Line::between(&bed);
    let (mut changed, mut missing) = (0, 0);
    line.to
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    for (number, fate) in (0..).zip(&fates) {
        line.send(number..number + 1);
        let sent = Line::payload(number);
        let mut received = [0; PAYLOAD_LEN + 1];
        // A changed header keeps the packet from its socket; the rest is payload.
        let len = match line.to.recv(&mut received) {
            Ok(len) => len,
            Err(_) if fate.corrupted => {
                missing += 1;
                continue;
            }
            Err(error) => panic!("datagram {number}: {error}"),
        };
        let differing = sent
            .iter()
            .zip(&received[..len])
            .filter(|(sent, got)| sent != got)
            .count();
        // A changed length in the UDP header cuts the payload short; then the payload itself is as it was.
        let cut = usize::from(len != sent.len());
        assert!(differing + cut <= usize::from(fate.corrupted), "{number}");
        changed += differing;
    }
    // 42 of 442 bytes are headers.
    assert!(
        changed > chosen.len() / 2,
        "{changed} changed, {missing} missing of {}",
        chosen.len()
    );
    let report = stop(running);
    assert_eq!(
        number(&report["rightward"], "corrupted"),
        chosen.len() as u64,
        "{report}"
    );
}

#[test]
fn reordered_packets_come_after_those_that_overtake_them() {
    let Some(bed) = Bed::with_box() else { return };
    for by in [1_u32, 5] {
        let fates = fates(
            Impairments {
                reorder: 100_000,
                reorder_by: by,
                ..Impairments::default()
            },
            1000,
        );
        let mut expected = Vec::new();
        for number in 0..1000_u32 {
            if !fates[number as usize].reordered {
                expected.push(number);
            }
            if number >= by && fates[(number - by) as usize].reordered {
                expected.push(number - by);
            }
        }
        let running = start_box(&bed, &format!("--reorder 10% --reorder-by {by}"));
        let line = Line::between(&bed);
        line.send(0..1000);
        assert!(!expected.is_sorted());
        assert_eq!(line.receive_numbers(expected.len()), expected, "by {by}");
        let report = stop(running);
        assert_eq!(
            number(&report["rightward"], "held"),
            1000 - expected.len() as u64,
            "{report}"
        );
    }
}

#[test]
fn all_at_once_balances() {
    let Some(bed) = Bed::with_box() else { return };
    let options = "--loss 5% --duplicate 5% --corrupt 5% --reorder 10% --delay 100us,0 --rate 1Gbit";
    let running = start_box(&bed, options);
    let line = Line::between(&bed);
    let mut seen = BTreeMap::new();
    line.to.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    for burst in 0..20 {
        line.send(burst * 50..(burst + 1) * 50);
        let mut payload = [0; 2048];
        while let Ok(len) = line.to.recv(&mut payload) {
            *seen.entry(payload[..len].to_vec()).or_insert(0) += 1;
        }
    }
    let report = stop(running);
    let right = &report["rightward"];
    assert_eq!(number(right, "received"), 1000, "{report}");
    for kind in ["lost", "duplicated", "corrupted", "reordered"] {
        assert!((15..200).contains(&number(right, kind)), "{kind}: {report}");
    }
    let arrived: u64 = seen.values().sum();
    let dead_headers = number(right, "corrupted");
    assert!(
        arrived <= number(right, "sent") && arrived + dead_headers >= number(right, "sent"),
        "{arrived} arrived: {report}"
    );
}

#[test]
fn delays_and_rates_take_their_time() {
    let Some(bed) = Bed::with_box() else { return };
    let line = Line::between(&bed);
    let running = start_box(&bed, "--delay 30ms,0");
    let started = Instant::now();
    line.send(0..50);
    assert_eq!(line.receive_numbers(50), (0..50).collect::<Vec<_>>());
    assert!(
        started.elapsed() >= Duration::from_millis(30),
        "{:?}",
        started.elapsed()
    );
    stop(running);

    // 100 packets of 442 bytes at 2 Mbit/s take 176.8 ms; 3000 bytes pass at once, which is 12 ms less.
    let running = start_box(&bed, "--rate 2Mbit");
    let started = Instant::now();
    line.send(0..100);
    assert_eq!(line.receive_numbers(100), (0..100).collect::<Vec<_>>());
    assert!(
        started.elapsed() >= Duration::from_millis(160),
        "{:?}",
        started.elapsed()
    );
    stop(running);

    let running = start_box(&bed, "--rate 2Mbit --limit 10");
    line.send(0..100);
    wait_until("not even ten packets came through", || {
        line.to.peek(&mut [0; 8]).is_ok()
    });
    let report = stop(running);
    assert!(number(&report["rightward"], "queue_full") > 50, "{report}");
}

#[test]
fn queues_are_kept() {
    let Some(bed) = Bed::with_box() else { return };
    for (options, queue) in [("", 0), ("", 1), ("--delay 20us", 1)] {
        let running = start_box(&bed, options);
        // A receiving socket sees packets of its own queue alone.
        let system = format!("bare --queue {queue}");
        let (received, _) = bare_stream(&bed, bare_ends(&system, 1000, "copy", 1500, false));
        assert!(number(&received, "messages") > 0, "{options} {queue}: {received}");
        assert_eq!(
            number(&received, "lost_messages"),
            0,
            "{options} {queue}: {received}"
        );
        stop(running);
    }
}

#[test]
fn lm_and_tcp_pass() {
    let Some(bed) = Bed::with_box() else { return };
    let running = start_box(&bed, "");
    let (received, _) = measured_stream(&bed, "lm", 64 << 10);
    assert!(number(&received, "messages") > 0, "{received}");
    assert_eq!(number(&received, "lost_messages"), 0, "{received}");
    stop(running);
    let running = start_box(&bed, "--loss 1%");
    round_trips(&bed, "tcp", 64 << 10, 20, None);
    running.signal(Signal::INT);
    let report = running.end().expect_code(0).json();
    assert!(number(&report["rightward"], "lost") > 0, "{report}");
}

/// Bytes changed in the middle of a transfer, in fragments and in everything else: the file arrives as it was. The session is
/// there before, because nothing protects its request where the interfaces leave out UDP's checksum.
#[test]
fn what_is_corrupt_is_sent_again() {
    let Some(bed) = Bed::with_box() else { return };
    let running = start_box(&bed, "");
    let file = bed.path("out");
    let receiver = bed.recv(&["--output", file.to_str().unwrap(), "--count", "1", "--json"]);
    let mut sender = bed.send(&["--json", "--message-size", "64K", "-"]);
    let content = content(12 << 20);
    let (before, after) = content.split_at(4 << 20);
    let mut stdin = sender.stdin();
    // More than a pipe holds, so that the sender has begun.
    stdin.write_all(before).unwrap();
    running.signal(Signal::TERM);
    running.end().expect_code(0);
    let running = start_box(&bed, "--corrupt 2%");
    stdin.write_all(after).unwrap();
    drop(stdin);
    sender.end().expect_code(0);
    let received = receiver.end().expect_code(0).json();
    assert!(std::fs::read(&file).unwrap() == content, "the file differs");
    running.signal(Signal::TERM);
    let report = running.end().expect_code(0).json();
    assert!(number(&report["rightward"], "corrupted") > 50, "{report}");
    assert!(number(&received["drops"], "fragment_corrupt") > 0, "{received}");
    assert!(number(&received, "manifests_requested") > 0, "{received}");
}

#[test]
fn a_killed_box_leaves_nothing_attached() {
    let Some(bed) = Bed::with_box() else { return };
    let running = start_box(&bed, "");
    running.signal(Signal::KILL);
    running.end();
    let line = Line::between(&bed);
    line.send(0..10);
    line.receive(0);
    // The interfaces are free for another one.
    let running = start_box(&bed, "");
    line.send(0..10);
    line.receive_numbers(10);
    stop(running);
}

#[test]
fn wrong_options_are_refused_in_one_line() {
    let Some(bed) = Bed::with_box() else { return };
    for (options, code, words) in [
        ("--left left --right nowhere", 1, "nowhere"),
        (
            "--left left --right right --reorder 1% --reorder-by 64",
            1,
            "1 to 63",
        ),
        ("--left left --right right --loss-burst 0", 1, "at least one"),
        ("--left left --right right --loss 200%", 2, "between 0% and 100%"),
        ("--left left --right right --delay 1", 2, "like 50us"),
    ] {
        let ended = Tool::start(lm_bench(&bed, Host::Box, &format!("impair {options}"))).end();
        ended.expect_code(code);
        let lines: Vec<&str> = ended.stderr.lines().collect();
        assert!(
            lines.len() == 1 && lines[0].contains(words),
            "{options}: {lines:?}"
        );
    }
}
