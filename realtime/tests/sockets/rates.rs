//! Rates: what sockets declare, and what reports do to the smoother's.

use std::num::NonZeroU32;
use std::time::Duration;

use lm_examples::ROUND_NS;
use lm_protocol::wire::lm::{TYPE_DATA, TYPE_REALTIME};
use lm_realtime::{OpenError, SocketConfig};
use lm_sim::{Delivery, Semantics};

use crate::{Bed, exact, link, options};

fn declaring(packets_per_second: u32) -> SocketConfig {
    SocketConfig {
        packets_per_second: NonZeroU32::new(packets_per_second),
        ..exact()
    }
}

/// Of 8127 packets a second that the link has, 6095 may be declared.
#[test]
fn sockets_declare_three_quarters_of_the_link_together() {
    let mut bed = Bed::new(Semantics::Copy, 1, &exact(), link());
    let first = bed.socket(1, &declaring(6000)).expect("fewer");
    let error = bed.socket(2, &declaring(96)).expect_err("more");
    assert!(matches!(error, OpenError::Rate(95)), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("95 packets a second are left; declare fewer"),
        "{text}"
    );
    // What is not opened for another reason has declared nothing.
    let many = SocketConfig {
        keep: 4000,
        ..declaring(95)
    };
    assert!(matches!(bed.socket(2, &many), Err(OpenError::ReceiveFrames(_))));
    let second = bed.socket(2, &declaring(95)).expect("all that is left");
    assert!(matches!(bed.socket(3, &declaring(1)), Err(OpenError::Rate(0))));
    bed.socket(3, &exact()).expect("it declares nothing");
    drop(first);
    bed.socket(4, &declaring(6000)).expect("it is left again");
    drop(second);
    // Of a link that nobody knows, any rate may be declared.
    let mut bed = Bed::new(Semantics::Copy, 1, &exact(), None);
    bed.socket(1, &declaring(u32::MAX)).expect("no bound");
}

/// Packets, not messages: what is more than so many of a second leaves, and is counted.
#[test]
fn what_a_socket_sends_beyond_its_rate_is_counted() {
    let mut bed = Bed::new(Semantics::Copy, 2, &exact(), link());
    bed.calm();
    let config = SocketConfig {
        blocks: crate::with_blocks().blocks,
        ..declaring(100)
    };
    let mut socket = bed.socket(1, &config).expect("fewer");
    let (end, peer) = (&mut bed.world.ends[0], bed.peer);
    socket.connect(end, peer, crate::PORT).expect("a peer");
    let mut send = |bed: &mut Bed, messages: u32, len: usize| {
        for _ in 0..messages {
            socket.send(&vec![1; len], options(7, 0)).expect("polled");
            bed.rounds(3);
            while bed.sockets[1].recv().is_some() {}
        }
        let statistics = socket.statistics();
        (statistics.sent, statistics.beyond_rate)
    };
    assert_eq!(send(&mut bed, 70, 100), (70, 0));
    // Ten of three packets each.
    assert_eq!(send(&mut bed, 10, 3996), (80, 0));
    assert_eq!(send(&mut bed, 7, 100), (87, 7));
    // Half a second later it may send fifty.
    bed.rounds((500_000_000 / ROUND_NS) as u32);
    assert_eq!(send(&mut bed, 60, 100).0, 147);
    let beyond = send(&mut bed, 0, 0).1;
    assert!((16..=17).contains(&beyond), "{beyond}");
}

/// 20 ms, which the sender has from a loss to its new rate.
const SOON: u32 = (20_000_000 / ROUND_NS) as u32;

/// Sends a message each millisecond while so many rounds pass; λ then.
fn rate_after(bed: &mut Bed, rounds: u32) -> u32 {
    for round in 0..rounds {
        if u64::from(round).is_multiple_of(1_000_000 / ROUND_NS) {
            bed.send(&[1; 1000], options(7, 0));
        }
        bed.round();
        while bed.sockets[1].recv().is_some() {}
    }
    bed.real_time[0].credits_per_second().expect("a smoother")
}

/// Loses the next packets of a type that the first host sends.
fn lose(bed: &Bed, packet_type: u8, mut count: u32) {
    bed.world.wire.set_filter(move |from, packet| {
        let is_lost = count > 0 && from == 0 && packet[42] & 0xf == packet_type;
        count -= u32::from(is_lost);
        !is_lost
    });
}

#[test]
fn a_lost_message_lowers_the_rate_by_a_tenth_within_20_ms() {
    let mut bed = Bed::new(Semantics::Copy, 3, &exact(), link());
    bed.calm();
    assert_eq!(rate_after(&mut bed, 5 * SOON), 4000);
    // Two of one report are one signal, and nobody waits that the rate would rise for.
    for (count, rate) in [(1, 3600), (0, 3600), (2, 3240)] {
        lose(&bed, TYPE_REALTIME, count);
        assert_eq!(rate_after(&mut bed, SOON), rate);
    }
}

/// Four frame times of the link are 492 µs.
#[test]
fn messages_that_wait_lower_the_rate_by_a_tenth_within_20_ms() {
    let mut bed = Bed::new(Semantics::Copy, 4, &exact(), link());
    bed.calm();
    assert_eq!(rate_after(&mut bed, SOON), 4000);
    bed.delay(Duration::from_micros(400));
    assert_eq!(rate_after(&mut bed, 5 * SOON), 4000);
    bed.delay(Duration::from_micros(600));
    // A signal at most each 10 ms.
    let rate = rate_after(&mut bed, SOON);
    assert!(rate == 3600 || rate == 3240, "{rate}");
}

/// What a receiver of messages asks for again is a loss like any.
#[test]
fn a_lost_fragment_lowers_the_rate_by_a_tenth_within_20_ms() {
    let mut bed = Bed::new(Semantics::Copy, 5, &exact(), link());
    bed.calm();
    let rate = |bed: &Bed| bed.real_time[0].credits_per_second().expect("a smoother");
    let send = |bed: &mut Bed| {
        let before = rate(bed);
        let _ = bed.world.ends[0].try_send_copy(bed.peer, &[1; 50_000], 0);
        bed.round();
        while bed.world.ends[1].try_recv().expect("reliable").is_some() {}
        while bed.world.ends[0].try_completion().is_some() {}
        (before, rate(bed))
    };
    for _ in 0..5 * SOON {
        let (before, after) = send(&mut bed);
        assert!(after >= before, "nothing was lost");
    }
    lose(&bed, TYPE_DATA, 1);
    let fell = (0..SOON).any(|_| {
        let (before, after) = send(&mut bed);
        after == before - before.div_ceil(10)
    });
    assert!(fell, "{} credits a second", rate(&bed));
}

/// The device has two packets, and takes no more for 10 ms: the credits of the next two are kept.
#[test]
fn what_the_device_has_no_room_for_keeps_its_credits() {
    let mut bed = Bed::new(Semantics::Copy, 6, &exact(), link());
    bed.calm();
    let mut left_at_once = |stopped: u64, going: u64| {
        let rounds = |bed: &mut Bed, ns: u64| {
            for _ in 0..ns / ROUND_NS {
                let _ = bed.world.ends[0].try_send_copy(bed.peer, &[1; 50_000], 0);
                bed.round();
                while bed.world.ends[1].try_recv().expect("reliable").is_some() {}
                while bed.world.ends[0].try_completion().is_some() {}
            }
            bed.world.ends[0].counters().data_packets_sent
        };
        bed.world.wire.set_delivery(Delivery::Manual);
        let before = rounds(&mut bed, stopped);
        bed.world.wire.deliver(u32::MAX);
        bed.world.wire.set_delivery(Delivery::Inline);
        let left = rounds(&mut bed, 2 * ROUND_NS) - before;
        rounds(&mut bed, going);
        left
    };
    left_at_once(0, 100_000_000);
    let left: Vec<u64> = (0..20).map(|_| left_at_once(10_000_000, 5_000_000)).collect();
    assert_eq!(left, [2; 20]);
}
