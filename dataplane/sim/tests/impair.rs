//! What impairments do to one direction of the wire.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddrV4};

use lm_protocol::wire::lm::VERSION;
use lm_sim::datagram::{parse_datagram, write_datagram};
use lm_sim::impair::foreign::Ends;
use lm_sim::impair::*;

const QUEUE: Via = Via::Queue(1);

fn ends() -> Ends {
    Ends {
        from: SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 1), 7168),
        to: SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 2), 7168),
        mtu: 1500,
    }
}

/// Eight bytes of number, and more so that there is something to corrupt.
fn packet(number: u64) -> Vec<u8> {
    let mut packet = vec![0x55; 100];
    packet[..8].copy_from_slice(&number.to_be_bytes());
    packet
}

fn number(handed: &Handed) -> u64 {
    u64::from_be_bytes(handed.packet[..8].try_into().expect("eight bytes"))
}

/// Offers packets 0 to `count`, one each microsecond, and returns what comes out by then.
fn run(link: &mut Link, count: u64) -> Vec<Handed> {
    let mut out = VecDeque::new();
    for n in 0..count {
        link.release(n * 1000, &mut out);
        link.offer(&packet(n), QUEUE, Place::default(), n * 1000, &mut out);
    }
    assert!(link.counters().are_balanced(), "{:?}", link.counters());
    assert_eq!(out.len() as u64, link.counters().delivered);
    out.into()
}

fn link(what: Impairments) -> Link {
    Link::new(what, ends())
}

/// So many packets that 10 % of them are within 1 % of the truth by six standard deviations.
const MANY: u64 = 100_000;
const TENTH: std::ops::Range<u64> = 9_430..10_570;

#[test]
fn a_perfect_link_changes_nothing() {
    let out = run(&mut link(Impairments::default()), 1000);
    assert!(
        out.iter()
            .enumerate()
            .all(|(n, handed)| handed.packet == packet(n as u64) && handed.via == QUEUE)
    );
    assert_eq!(out.len(), 1000);
}

#[test]
fn random_loss_has_the_rate_that_was_asked_for() {
    for seed in 0..4 {
        let what = Impairments {
            seed,
            loss_ppm: 100_000,
            ..Impairments::default()
        };
        let mut link = link(what);
        let out = run(&mut link, MANY);
        let counters = link.counters();
        assert!(TENTH.contains(&counters.lost_random), "{counters:?}");
        assert_eq!(out.len() as u64 + counters.lost_random, MANY);
        assert!(out.is_sorted_by_key(number));
    }
}

#[test]
fn bursts_have_the_mean_length_that_was_asked_for() {
    let what = Impairments {
        bursts: Bursts {
            begin_ppm: 10_000,
            end_ppm: 100_000,
            loss_ppm: ALWAYS_PPM,
        },
        ..Impairments::default()
    };
    let out = run(&mut link(what), MANY);
    let gaps: Vec<u64> = out
        .windows(2)
        .map(|pair| number(&pair[1]) - number(&pair[0]) - 1)
        .filter(|&gap| gap > 0)
        .collect();
    let mean = gaps.iter().sum::<u64>() as f64 / gaps.len() as f64;
    // About 900 bursts of 10 packets.
    assert!((8.5..11.5).contains(&mean), "{mean} of {}", gaps.len());
    assert!((750..1100).contains(&gaps.len()));
}

#[test]
fn patterns_lose_what_they_say() {
    let every = Impairments {
        pattern: Pattern::Every { count: 7, at: 3 },
        ..Impairments::default()
    };
    let out = run(&mut link(every), 700);
    assert!(out.len() == 600 && out.iter().all(|handed| number(handed) % 7 != 3));

    for (pattern, lost) in [
        (Pattern::FirstOfRun { ppm: ALWAYS_PPM }, 0),
        (Pattern::LastOfRun { ppm: ALWAYS_PPM }, 4),
    ] {
        let mut link = link(Impairments {
            pattern,
            ..Impairments::default()
        });
        let mut out = VecDeque::new();
        for n in 0..5 {
            let place = Place {
                first: n == 0,
                last: n == 4,
            };
            link.offer(&packet(n), QUEUE, place, 0, &mut out);
        }
        // One alone is no run.
        let alone = Place {
            first: true,
            last: true,
        };
        link.offer(&packet(5), QUEUE, alone, 0, &mut out);
        let left: Vec<u64> = out.iter().map(number).collect();
        assert!(left.len() == 5 && !left.contains(&lost), "{left:?}");
        assert_eq!(link.counters().lost_pattern, 1);
    }
}

#[test]
fn duplicates_follow_at_once_or_late() {
    let mut what = Impairments {
        duplicate_ppm: 100_000,
        ..Impairments::default()
    };
    let mut at_once = link(what);
    let out = run(&mut at_once, MANY);
    assert!(TENTH.contains(&at_once.counters().duplicated));
    assert!(out.is_sorted_by_key(number));

    what.duplicate_delay_max_ns = 20_000;
    let mut late = link(what);
    let mut out: VecDeque<Handed> = run(&mut late, MANY).into();
    let held = late.counters().held;
    assert!(held > 0 && !out.iter().is_sorted_by_key(number));
    // The latest are due 20 µs after the last packet.
    assert!(
        late.next_due_ns()
            .is_some_and(|due_ns| due_ns > (MANY - 1) * 1000)
    );
    late.release(MANY * 1000 + 20_000, &mut out);
    assert_eq!((late.counters().held, late.next_due_ns()), (0, None));
    assert_eq!(out.len() as u64, MANY + late.counters().duplicated);
    assert!(late.counters().are_balanced());
}

#[test]
fn reordered_packets_are_overtaken_by_so_many_and_not_for_ever() {
    let what = Impairments {
        reorder_ppm: 50_000,
        reorder_packets_max: 4,
        reorder_hold_max_ns: u64::from(u32::MAX),
        ..Impairments::default()
    };
    let mut link = link(what);
    let mut out: VecDeque<Handed> = run(&mut link, MANY).into();
    let reordered = link.counters().reordered;
    assert!((4_500..5_500).contains(&reordered));
    let mut worst = 0;
    for (position, handed) in out.iter().enumerate() {
        worst = worst.max(position as i64 - number(handed) as i64);
    }
    assert!((1..=4).contains(&worst), "overtaken by {worst}");
    // What is still held comes when its time comes, although nothing follows.
    link.release(u64::MAX, &mut out);
    assert_eq!(out.len() as u64, MANY);
    let mut numbers: Vec<u64> = out.iter().map(number).collect();
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(0..MANY));
}

#[test]
fn delay_keeps_the_order_and_jitter_does_not() {
    let mut what = Impairments {
        delay_ns: 50_000,
        ..Impairments::default()
    };
    let mut constant = link(what);
    let out = run(&mut constant, 1000);
    assert_eq!((out.len(), constant.counters().held), (950, 50));
    assert!(out.is_sorted_by_key(number));
    assert_eq!(constant.next_due_ns(), Some(950 * 1000 + 50_000));
    what.jitter_ns = 10_000;
    let out = run(&mut link(what), 1000);
    assert!(out.len() > 900 && !out.is_sorted_by_key(number));
}

#[test]
fn corruption_changes_one_to_four_bytes_anywhere() {
    let what = Impairments {
        corrupt_ppm: 100_000,
        ..Impairments::default()
    };
    let mut link = link(what);
    let out = run(&mut link, MANY);
    let mut changed = [0u64; 100];
    let mut counts = [0u64; 5];
    for (n, handed) in out.iter().enumerate() {
        let original = packet(n as u64);
        let places = (0..100).filter(|&at| handed.packet[at] != original[at]);
        let count = places.inspect(|&at| changed[at] += 1).count();
        counts[count] += 1;
    }
    assert_eq!(counts[1..].iter().sum::<u64>(), link.counters().corrupted);
    assert!(TENTH.contains(&link.counters().corrupted));
    assert!(counts.iter().all(|&count| count > 2000), "{counts:?}");
    assert!(changed.iter().all(|&count| count > 100), "{changed:?}");
}

#[test]
fn corruption_can_be_kept_to_the_headers_of_fragments() {
    let what = Impairments {
        corrupt_ppm: ALWAYS_PPM,
        corrupt: Corrupt::FragmentHeaders,
        ..Impairments::default()
    };
    let mut link = link(what);
    let mut out = VecDeque::new();
    let (mut fragment, mut eager) = (Vec::new(), Vec::new());
    write_datagram(&mut fragment, ends().from, ends().to, &[0x21; 200]);
    write_datagram(&mut eager, ends().from, ends().to, &[0x22; 200]);
    // An IP fragment whose payload looks like an LM header.
    let mut ip_fragment = fragment.clone();
    ip_fragment[20] = 0x20;
    for _ in 0..1000 {
        for packet in [&fragment, &eager, &ip_fragment] {
            link.offer(packet, QUEUE, Place::default(), 0, &mut out);
        }
    }
    assert_eq!(link.counters().corrupted, 2000);
    for three in out.make_contiguous().chunks(3) {
        assert!(three[0].packet != fragment && three[0].packet[66..] == fragment[66..]);
        assert_eq!(three[1].packet, eager);
        assert!(three[2].packet != ip_fragment && three[2].packet[34..] == ip_fragment[34..]);
    }
}

#[test]
fn foreign_packets_of_every_kind_arrive_before_honest_ones() {
    let what = Impairments {
        inject_ppm: 100_000,
        ..Impairments::default()
    };
    let mut link = link(what);
    let out = run(&mut link, MANY);
    assert!(TENTH.contains(&link.counters().injected));
    let mut types = [0u64; 16];
    let (mut arp, mut ours, mut control, mut others, mut fragments) = (0, 0, 0, 0, 0);
    let honest = packet(0);
    for Handed { packet, .. } in out
        .iter()
        .filter(|handed| handed.packet.get(8..) != Some(&honest[8..]))
    {
        assert!((1..=1514).contains(&packet.len()), "{} bytes", packet.len());
        arp += u64::from(packet.get(12..14) == Some(&[8, 6]));
        fragments += u64::from(packet.get(20) == Some(&0x20) && packet[12..14] == [8, 0]);
        match parse_datagram(packet, *ends().to.ip()) {
            Some((from, 7168, payload)) => {
                ours += 1;
                if !payload.is_empty() && packet[payload.start] >> 4 == VERSION && from.port() == 7168 {
                    types[usize::from(packet[payload.start] & 15)] += 1;
                }
            }
            Some((_, 7169, _)) => control += 1,
            Some(_) => others += 1,
            None => {}
        }
    }
    for count in [arp, ours, control, others, fragments] {
        assert!(count > 800, "{arp} {ours} {control} {others} {fragments}");
    }
    // Forged fragments, acknowledgements, announcements, credits and requests, but no eager messages: whoever can forge
    // a host's address can invent those.
    for forged in [1, 3, 4, 5, 6] {
        assert!(types[forged] > 300, "{types:?}");
    }
    assert!(types[2] < 20, "{types:?}");
}

#[test]
fn kernel_side_impairments_have_their_rates() {
    let mut link = link(Impairments {
        fill_empty_ppm: 100_000,
        rx_full_ppm: 200_000,
        ..Impairments::default()
    });
    let mut seen = [0; 2];
    for _ in 0..MANY {
        let arrival = link.arrival();
        seen[0] += u64::from(arrival.fill_empty);
        seen[1] += u64::from(arrival.rx_full);
    }
    let counters = link.counters();
    assert_eq!(seen, [counters.fill_empty, counters.rx_full]);
    assert!(TENTH.contains(&seen[0]) && (19_200..20_800).contains(&seen[1]));
}

/// Everything at once.
fn all(seed: u64) -> Impairments {
    Impairments {
        seed,
        loss_ppm: 20_000,
        bursts: Bursts {
            begin_ppm: 2_000,
            end_ppm: 200_000,
            loss_ppm: 900_000,
        },
        pattern: Pattern::Every { count: 101, at: 5 },
        duplicate_ppm: 20_000,
        duplicate_delay_max_ns: 5_000,
        reorder_ppm: 20_000,
        reorder_packets_max: 5,
        reorder_hold_max_ns: 9_000,
        delay_ns: 3_000,
        jitter_ns: 700,
        corrupt_ppm: 20_000,
        inject_ppm: 20_000,
        ..Impairments::default()
    }
}

#[test]
fn one_seed_has_one_outcome() {
    let mut links = [link(all(1)), link(all(1)), link(all(2))];
    let [first, again, other] = &mut links;
    let outcome = run(first, 20_000);
    assert_eq!(outcome, run(again, 20_000));
    assert_eq!(first.counters(), again.counters());
    assert_ne!(outcome, run(other, 20_000));
    let ImpairmentCounters {
        lost_random,
        lost_burst,
        lost_pattern,
        duplicated,
        reordered,
        delayed,
        corrupted,
        injected,
        ..
    } = first.counters();
    for count in [
        lost_random,
        lost_burst,
        lost_pattern,
        duplicated,
        reordered,
        delayed,
        corrupted,
        injected,
    ] {
        assert!(count > 50, "{:?}", first.counters());
    }
}

/// Which packets are lost does not depend on what else happens to the others.
#[test]
fn each_kind_has_a_random_stream_of_its_own() {
    let survivors = |what: Impairments| {
        let mut link = link(what);
        let mut out: VecDeque<Handed> = run(&mut link, 5000).into();
        link.release(u64::MAX, &mut out);
        let mut numbers: Vec<u64> = out.iter().map(number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    };
    let with_all = Impairments {
        corrupt_ppm: 0,
        inject_ppm: 0,
        ..all(7)
    };
    let with_loss = Impairments {
        duplicate_ppm: 0,
        reorder_ppm: 0,
        delay_ns: 0,
        jitter_ns: 0,
        ..with_all
    };
    assert_eq!(survivors(with_all), survivors(with_loss));
}
