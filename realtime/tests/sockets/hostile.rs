//! Packets that cannot be true.

use std::net::Ipv4Addr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lm_examples::{Dice, noise};
use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::{
    Clock, LmHeader, RealTimePacket, RtReport, TYPE_REALTIME, TYPE_RT_REPORT, Trailer,
};
use lm_realtime::RtSocket;
use lm_sim::Semantics;

use crate::{Bed, PORT, exact, link, options, with_blocks};

fn report() -> RtReport {
    RtReport {
        lost: 1,
        delay: Duration::from_secs(1),
        port: PORT,
        ..RtReport::default()
    }
}

/// The sender to a socket that is not there is told, each 5 ms; that is no loss.
#[test]
fn a_sender_is_told_that_nobody_receives() {
    let mut bed = Bed::new(Semantics::Copy, 9, &exact(), link());
    bed.calm();
    let peer = bed.peer;
    bed.sockets[0]
        .connect(&mut bed.world.ends[0], peer, PORT + 1)
        .expect("a peer");
    let rate = bed.real_time[0].credits_per_second();
    // The second flow of this host.
    let key = bed.shown.load(Ordering::Relaxed) >> 16 << 16 | 1;
    // A message in each tenth of a millisecond, for 50 ms.
    for _ in 0..500 {
        bed.send(b"nobody", options(0, 0));
        bed.rounds(5);
    }
    let [sender, receiver] = bed.sockets.each_ref().map(RtSocket::statistics);
    assert!((9..=11).contains(&sender.reported_refused), "{sender:?}");
    assert_eq!((sender.reported_lost, sender.refused_reports), (0, 0));
    assert_eq!(receiver.refused_packets, 500);
    assert_eq!(bed.real_time[0].credits_per_second(), rate, "no signal");
    // However many flows there are, few are answered: each answer would be of no flow here.
    for flow in 0..1000 {
        let packet = RealTimePacket {
            count: 1,
            message_len: 1,
            port: PORT + 1,
            payload: &[1],
            ..RealTimePacket::default()
        };
        inject_of(&bed, flow, &packet);
        bed.rounds(1);
    }
    // In 20 ms.
    let answers = bed.sockets[0].statistics().refused_reports;
    assert!((48..=80).contains(&answers), "{answers} answers");
    // Forged ones: of a message that was not sent, and of one before that of the last. And none is a signal.
    for (newest, is_taken) in [(500, 0), (3, 0), (499, 1)] {
        let before = bed.sockets[0].statistics().reported_refused;
        let report = RtReport {
            newest,
            refused: true,
            lost: 1,
            ..report()
        };
        inject_report(&bed, key, &report);
        bed.rounds(2);
        let told = bed.sockets[0].statistics().reported_refused - before;
        assert_eq!(told, is_taken, "{newest}");
    }
    assert_eq!(bed.real_time[0].credits_per_second(), rate, "no signal");
}

/// A sender may say whatever it likes of its clock: it is ours if it is this host's.
#[test]
fn of_clocks_that_are_not_this_hosts_the_delay_above_the_least_counts() {
    let mut bed = Bed::new(Semantics::Copy, 10, &exact(), None);
    bed.calm();
    for (message, clock) in [(0, Clock::RealTime), (1, Clock::Tai)] {
        let packet = RealTimePacket {
            message,
            count: 1,
            deadline: Some(Duration::from_millis(1)),
            message_len: 1,
            port: PORT,
            clock,
            payload: &[1],
            ..RealTimePacket::default()
        };
        inject_packet(&bed, &packet);
        bed.rounds(2);
        assert!(!bed.sockets[1].recv().expect("it is not late").info().late);
    }
    let times = bed.sockets[1].histograms();
    assert_eq!(times.latency.percentiles().count, 0, "nobody knows it");
}

/// A receiver knows sixty-four flows of an address; of one that it has forgotten meanwhile it counts from nothing.
#[test]
fn a_receiver_that_counts_from_nothing_is_believed_at_once() {
    let mut bed = Bed::new(Semantics::Copy, 8, &exact(), None);
    bed.calm();
    for sent in 1..=3u32 {
        for _ in 0..20 {
            bed.send(b"one", options(0, 0));
            bed.rounds(1);
        }
        bed.rounds(2000);
        let statistics = bed.sockets[0].statistics();
        assert_eq!(
            (statistics.reported_whole, statistics.reported_lost),
            (20 * sent, 0)
        );
        for flow in 1..=64 {
            let packet = RealTimePacket {
                message: sent,
                count: 1,
                sent_at: bed.world.now(),
                message_len: 1,
                port: PORT,
                payload: &[1],
                ..RealTimePacket::default()
            };
            inject_of(&bed, flow, &packet);
            bed.round();
        }
        while bed.sockets[1].recv().is_some() {}
    }
}

/// Fragments of sixteen flows' messages that never become whole, and reports of losses, in each round: small messages of the same host come in as many
/// rounds as without them, twice as many at most.
#[test]
fn floods_of_real_time_hold_up_no_small_message() {
    const PER_ROUND: u64 = 24;
    let p99 = |is_flooded: bool| {
        let mut bed = Bed::new(Semantics::Copy, 12, &with_blocks(), link());
        bed.calm();
        let rate = bed.real_time[0].credits_per_second();
        let (mut rounds, mut flooded) = (Vec::new(), 0);
        let mut flood = |bed: &Bed| {
            for _ in 0..if is_flooded { PER_ROUND } else { 0 } {
                let (flow, fragment) = (flooded % 16, flooded / 16);
                let packet = RealTimePacket {
                    message: (fragment / 255) as u32,
                    index: (fragment % 255) as u16,
                    count: 256,
                    sent_at: Time::from_nanos(fragment / 255),
                    message_len: 256 * 100,
                    offset: (fragment % 255 * 100) as u32,
                    port: PORT,
                    payload: &[0x66; 100],
                    ..RealTimePacket::default()
                };
                inject_of(bed, flow, &packet);
                inject_report(bed, flooded, &report());
                flooded += 1;
            }
        };
        for number in 0..300 {
            // The link has few packets of messages at a time.
            loop {
                flood(&bed);
                if bed.world.ends[0]
                    .try_send_copy(bed.peer, &[7; 64], number)
                    .is_ok()
                {
                    break;
                }
                bed.round();
            }
            let mut took = 1;
            // The greeting has another tag.
            while !(bed.world.ends[1].try_recv().expect("a message"))
                .is_some_and(|message| message.len() == 64 && message.tag() == number)
            {
                flood(&bed);
                bed.round();
                took += 1;
            }
            rounds.push(took);
            while bed.world.ends[0].try_completion().is_some() {}
        }
        let [sender, receiver] = bed.sockets.each_ref().map(RtSocket::statistics);
        assert!(sender.refused_reports >= flooded / 2, "{sender:?} of {flooded}");
        assert!(bed.real_time[0].credits_per_second() >= rate, "no signal");
        // Each gives way to those that follow it.
        assert!(receiver.lost + 36 >= flooded / 255, "{receiver:?} of {flooded}");
        rounds.sort();
        (rounds[rounds.len() * 99 / 100], flooded)
    };
    let ((calm, none), (flooded, packets)) = (p99(false), p99(true));
    assert!((none, packets > 7000) == (0, true), "{packets}");
    assert!(flooded <= 2 * calm, "{flooded} rounds instead of {calm}");
}

/// A packet of an extension's type for host `to`, from the other one.
fn inject_typed(bed: &Bed, to: usize, (packet_type, key, words): (u8, u64, [u32; 3]), payload: &[u8]) {
    let key = match packet_type {
        TYPE_REALTIME => bed.shown.load(Ordering::Relaxed) >> 16 << 16 | key,
        _ => key,
    };
    let header = LmHeader::Extension {
        packet_type,
        key,
        words,
    };
    let trailer = Trailer::new(&header, payload, lm_examples::HOSTS[1 - to]);
    let [from, to_addr] = [1 - to, to].map(|host| lm_examples::HOSTS[host]);
    let mac = |ip: &Ipv4Addr| {
        MacAddr(
            [&[2, 0], &ip.octets()[..]]
                .concat()
                .try_into()
                .expect("six bytes"),
        )
    };
    let addressing = Addressing {
        src_mac: mac(from.ip()),
        dst_mac: mac(to_addr.ip()),
        vlan: None,
        src_ip: *from.ip(),
        dst_ip: *to_addr.ip(),
        src_port: from.port(),
        dst_port: to_addr.port(),
    };
    let mut packet = vec![0; addressing.header_len()];
    addressing
        .write_headers(&mut packet, &header, payload.len())
        .expect("room");
    packet.extend([payload, trailer.as_bytes()].concat());
    bed.world.wire.inject(to, 0, &packet);
}

/// Fragment `index` of a message that is cut into pieces of `stride` bytes.
pub(crate) fn inject_fragment(
    bed: &Bed,
    (number, sent_at, deadline): (u32, Time, Option<Duration>),
    message: &[u8],
    stride: usize,
    index: usize,
) {
    let at = index * stride;
    let packet = RealTimePacket {
        message: number,
        index: index as u16,
        count: message.len().div_ceil(stride) as u16,
        deadline,
        sent_at,
        message_len: message.len() as u32,
        offset: at as u32,
        port: PORT,
        payload: &message[at..message.len().min(at + stride)],
        ..RealTimePacket::default()
    };
    inject_packet(bed, &packet);
}

fn inject_packet(bed: &Bed, packet: &RealTimePacket<'_>) {
    inject_of(bed, 7, packet);
}

/// A packet of this flow for the second host.
fn inject_of(bed: &Bed, flow: u64, packet: &RealTimePacket<'_>) {
    let payload = [packet.payload, &packet.tail()].concat();
    inject_typed(bed, 1, (TYPE_REALTIME, flow, packet.words()), &payload);
}

fn inject_report(bed: &Bed, key: u64, report: &RtReport) {
    let (words, bytes) = report.write();
    inject_typed(bed, 0, (TYPE_RT_REPORT, key, words), &bytes);
}

/// Counts, lengths and numbers at their limits, and fragments that contradict others of their message: each is counted once, and the flow's
/// own messages come all the same.
#[test]
fn hostile_fragments_change_nothing() {
    let mut bed = Bed::new(Semantics::Copy, 11, &with_blocks(), None);
    bed.calm();
    let piece = [0x66; 100];
    let base = RealTimePacket {
        count: 3,
        message_len: 300,
        port: PORT,
        payload: &piece,
        ..RealTimePacket::default()
    };
    let (most, empty): (u32, &[u8]) = (65_436, &[]);
    let of = |count, message_len, index, offset| RealTimePacket {
        count,
        message_len,
        index,
        offset,
        ..base
    };
    let [mut none, mut urgent, mut elsewhere] = [base; 3];
    (none.payload, urgent.priority, elsewhere.port) = (empty, 8, PORT + 1);
    let refused = [
        of(u16::MAX, 300, 0, 0),
        of(u16::MAX, u32::MAX, u16::MAX - 1, u32::MAX - 100),
        of(300, 30_000, 0, 0),
        of(3, 300, 3, 0),
        of(3, 300, 1, 0),
        of(3, 300, 1, 99),
        of(3, 300, 2, 100),
        of(3, 300, 2, u32::MAX),
        of(3, 200, 0, 0),
        of(3, 301, 0, 0),
        of(3, 0, 0, 0),
        of(3, u32::MAX, 0, 0),
        none,
        of(1, 300, 0, 0),
        of(0, 300, 0, 0),
        urgent,
        elsewhere,
    ];
    for packet in &refused {
        inject_packet(&bed, packet);
        bed.round();
    }
    // Noise is no packet, and no report.
    let (mut dice, noises) = (Dice(6), 100);
    for number in 0..noises {
        let words = [(); 3].map(|()| dice.roll() as u32);
        for (to, packet_type) in [(0, TYPE_RT_REPORT), (1, TYPE_REALTIME)] {
            let bytes = noise(number, 2 * number as usize);
            inject_typed(&bed, to, (packet_type, number, words), &bytes);
        }
        bed.round();
    }
    // And what the packet for another socket was answered, of a flow that there is not.
    assert_eq!(bed.sockets[0].statistics().refused_reports, noises + 1);
    let statistics = bed.sockets[1].statistics();
    let lies = refused.len() as u64 + noises;
    assert_eq!(statistics.refused_packets, lies, "{statistics:?}");
    // It fits no block.
    let longest = RealTimePacket {
        count: 48,
        message_len: most + 1,
        payload: &[1; 1364],
        ..base
    };
    inject_packet(&bed, &longest);
    bed.round();
    assert_eq!(bed.sockets[1].statistics().no_block, 1);
    // One message begins; others say that they are of it.
    inject_packet(&bed, &base);
    let second = of(3, 300, 1, 100);
    let mut others = [second; 7];
    others[0] = of(4, 400, 1, 100);
    others[1] = of(3, 299, 1, 100);
    (others[2].offset, others[2].payload) = (101, &[1; 101]);
    others[3].sent_at = Time::from_nanos(1);
    others[4].deadline = Some(Duration::from_micros(1));
    others[5].priority = 1;
    others[6].clock = Clock::Tai;
    for packet in &others {
        inject_packet(&bed, packet);
    }
    for index in [1, 2] {
        inject_packet(&bed, &of(3, 300, index, 100 * u32::from(index)));
    }
    bed.rounds(2);
    let statistics = bed.sockets[1].statistics();
    assert_eq!(statistics.refused_packets, lies + others.len() as u64);
    assert_eq!(bed.sockets[1].recv().expect("it is whole")[..], [0x66; 300]);
    // Whatever else is said, blocks come back, and the sender's own messages come.
    let mut dice = Dice(11);
    for number in 0..4000 {
        let count = 2 + dice.roll() as u16 % 60;
        let stride = 1 + dice.roll() as u32 % 1390;
        let index = dice.roll() as u16 % count;
        inject_packet(
            &bed,
            &RealTimePacket {
                message: (dice.roll() as u32) << (dice.roll() % 32),
                index,
                count,
                message_len: u32::from(count - 1) * stride + 1 + dice.roll() as u32 % stride,
                offset: u32::from(index) * stride,
                payload: &noise(number, stride as usize),
                deadline: dice.one_in(2).then(|| Duration::from_micros(u64::from(u32::MAX))),
                ..base
            },
        );
        bed.round();
        while bed.sockets[1].recv().is_some() {}
    }
    bed.rounds(5100);
    let own = noise(12, most as usize);
    bed.send(&own, options(0, 0));
    bed.rounds(30);
    assert!(bed.sockets[1].recv().expect("there is a block again")[..] == own);
    let all = with_blocks().blocks.of_1 as usize;
    let held: Vec<_> = (0..all)
        .map(|number| {
            bed.send(&noise(number as u64, 3000), options(0, 0));
            bed.rounds(10);
            bed.sockets[1].recv().expect("each has a block")
        })
        .collect();
    // The application keeps all of them.
    bed.send(&[1; 3000], options(0, 0));
    bed.rounds(10);
    assert!(bed.sockets[1].recv().is_none() && bed.sockets[1].statistics().no_block > 1);
    assert!(
        held.iter()
            .zip(0..)
            .all(|(message, number)| message[..] == noise(number, 3000))
    );
}
