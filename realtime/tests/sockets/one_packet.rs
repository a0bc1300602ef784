//! Messages of one packet.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lm_dataplane::{Outcome, SendError as MessageError};
use lm_examples::{ROUND_NS, World, noise, semantics, small};
use lm_protocol::admission::ClusterKey;
use lm_protocol::smoother::Parameters;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{HEADER_LEN, TYPE_REALTIME};
use lm_realtime::{Deadline, OpenError, RealTime, RtMessage, RtSocket, SendError, SendOptions, SocketConfig};
use lm_sim::{Delivery, Semantics};

use crate::{Bed, PORT, exact, link, options};

/// Every message that comes is compared; each that does not is counted, by its receiver and, from its reports, by its sender.
#[test]
fn messages_come_whole_or_are_counted_as_lost_beside_a_stream() {
    for semantics in semantics() {
        let mut lost = 0;
        for seed in 0..50 {
            let mut bed = Bed::new(semantics, seed, &exact(), None);
            let sample = |number: u32| noise(seed << 32 | u64::from(number), 1 + number as usize * 37 % 1390);
            let bulk = noise(seed, 50_000);
            let (mut sent, mut got, mut numbers) = (0, 0, Vec::new());
            for round in 0..4000 {
                if round % 20 == 0 && sent < 100 {
                    bed.send(&sample(sent), options(7, 0));
                    sent += 1;
                }
                match bed.world.ends[0].try_send_copy(bed.peer, &bulk, 0) {
                    Ok(_) | Err(MessageError::WouldBlock) => {}
                    Err(error) => panic!("seed {seed}: {error}"),
                }
                bed.round();
                while let Some(message) = bed.sockets[1].recv() {
                    let number = message.info().number;
                    assert!(message[..] == sample(number), "seed {seed}: sample {number}");
                    numbers.push(number);
                }
                while let Some(message) = bed.world.ends[1].try_recv().expect("reliable") {
                    assert!(message[..] == bulk, "seed {seed}");
                    got += 1;
                }
                while let Some(completion) = bed.world.ends[0].try_completion() {
                    assert_eq!(completion.outcome, Outcome::Delivered, "seed {seed}");
                }
            }
            assert!(got > 10, "seed {seed}: {got} messages of the stream");
            assert!(numbers.is_sorted_by(|a, b| a < b), "seed {seed}");
            let [sender, receiver] = bed.sockets.each_ref().map(RtSocket::statistics);
            assert_eq!(sender.sent, 100, "seed {seed}: {sender:?}");
            assert_eq!(receiver.whole, numbers.len() as u64, "seed {seed}");
            let last = u64::from(*numbers.last().expect("most of them"));
            // Those before the first and behind the last that came are not known of.
            let first = u64::from(numbers[0]);
            assert_eq!(
                receiver.whole + receiver.lost,
                last - first + 1,
                "seed {seed}: {receiver:?}"
            );
            assert!(u64::from(sender.reported_whole) <= receiver.whole, "seed {seed}");
            // The last report may be lost: thirteen messages leave between two.
            assert!(sender.reported_whole > 70, "seed {seed}: {sender:?}");
            assert_eq!(receiver.refused_packets, 0, "seed {seed}");
            // The wire repeats one in a hundred packets, and a report is taken once.
            assert!(sender.refused_reports <= 3, "seed {seed}: {sender:?}");
            lost += receiver.lost;
        }
        assert!(
            lost > 20,
            "one of a hundred messages is lost, of five thousand: {lost}"
        );
    }
}

#[test]
fn the_first_priority_leaves_first_and_what_is_late_does_not_leave() {
    let mut bed = Bed::new(Semantics::Copy, 1, &exact(), None);
    bed.calm();
    for (priority, deadline_us) in [(0, 0), (3, 500), (3, 100_000), (7, 0), (3, 50_000)] {
        bed.send(&[priority], options(priority, deadline_us));
    }
    bed.pause(Duration::from_millis(1));
    bed.world.round();
    bed.world.round();
    let came: Vec<(u8, u32)> = bed
        .received()
        .map(|message| (message[0], message.info().number))
        .collect();
    assert_eq!(
        came,
        [(7, 0), (3, 1), (3, 2), (0, 3)],
        "no number is missing for what did not leave"
    );
    let statistics = bed.sockets[0].statistics();
    assert_eq!((statistics.sent, statistics.late_unsent), (4, 1));
}

/// Of all sockets of an endpoint; messages that are equally urgent leave in turns.
#[test]
fn the_first_priority_leaves_first_whatever_socket_it_is_of() {
    let mut bed = Bed::new(Semantics::Copy, 18, &exact(), None);
    bed.calm();
    let mut other = bed.socket(1, &exact()).expect("free");
    let (end, peer) = (&mut bed.world.ends[0], bed.peer);
    other.connect(end, peer, PORT).expect("frames");
    bed.rounds(100);
    let left = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&left);
    bed.world.wire.set_filter(move |from, packet| {
        if from == 0 && packet[42] & 0xf == TYPE_REALTIME {
            seen.lock().expect("one thread").push(packet[42 + HEADER_LEN]);
        }
        true
    });
    for (byte, priority, deadline_us) in [(6, 0, 0), (1, 7, 5000), (4, 0, 0)] {
        bed.send(&[byte], options(priority, deadline_us));
    }
    for (byte, priority, deadline_us) in [(7, 0, 0), (2, 7, 0), (3, 3, 0), (0, 7, 1000), (5, 0, 0)] {
        other
            .send(&[byte], options(priority, deadline_us))
            .expect("polled");
    }
    bed.rounds(3);
    let left = left.lock().expect("one thread");
    assert_eq!(left[..4], [0, 1, 2, 3], "{left:?}");
    // Two of each socket, each in order.
    let sockets: Vec<bool> = left[4..].iter().map(|byte| [6, 4].contains(byte)).collect();
    assert!(
        sockets == [true, false, true, false] || sockets == [false, true, false, true],
        "{left:?}"
    );
}

/// A moment that is over is an error; one that comes is as good as a time from now on.
#[test]
fn a_deadline_may_be_a_moment() {
    let mut bed = Bed::new(Semantics::Copy, 10, &exact(), None);
    bed.calm();
    let now = bed.world.now();
    let until = |deadline| SendOptions {
        priority: 0,
        deadline: Some(deadline),
    };
    for over in [
        Deadline::At(Time::ZERO),
        Deadline::At(now),
        Deadline::In(Duration::ZERO),
    ] {
        assert_eq!(bed.sockets[0].send(b"x", until(over)), Err(SendError::Past));
        let buffer = bed.sockets[0].buffer(1).expect("a block");
        let back = bed.sockets[0]
            .send_buffer(buffer, 1, until(over))
            .expect_err("it is over");
        assert_eq!(back.reason, SendError::Past);
    }
    for millis in [1, 3] {
        let deadline = Deadline::At(now + Duration::from_millis(millis));
        bed.sockets[0]
            .send(&[millis as u8], until(deadline))
            .expect("not yet");
    }
    bed.pause(Duration::from_millis(2));
    bed.world.round();
    bed.world.round();
    assert_eq!(bed.sockets[1].recv().expect("in time")[..], [3]);
    assert!(bed.sockets[1].recv().is_none());
    let statistics = bed.sockets[0].statistics();
    assert_eq!((statistics.sent, statistics.late_unsent), (1, 1));
}

#[test]
fn what_comes_late_is_dropped_or_marked_as_the_socket_chose() {
    for drops_late in [true, false] {
        let config = SocketConfig {
            drops_late,
            ..exact()
        };
        let mut bed = Bed::new(Semantics::Copy, 2, &config, None);
        bed.delay(Duration::from_millis(1));
        bed.send(b"late", options(0, 900));
        bed.send(b"in time", options(0, 2000));
        bed.rounds(100);
        let came: Vec<(Vec<u8>, bool)> = bed
            .received()
            .map(|message| (message.to_vec(), message.info().late))
            .collect();
        let in_time = (b"in time".to_vec(), false);
        match drops_late {
            true => assert_eq!(came, [in_time]),
            false => assert_eq!(came, [(b"late".to_vec(), true), in_time]),
        }
        let statistics = bed.sockets[1].statistics();
        assert_eq!((statistics.whole, statistics.late, statistics.lost), (2, 1, 0));
    }
}

/// Without a clock in common a message is late by what it waited above the least.
#[test]
fn of_another_host_the_delay_above_the_least_counts() {
    let mut bed = Bed::new(Semantics::Copy, 3, &SocketConfig::default(), None);
    bed.delay(Duration::from_millis(1));
    bed.send(b"first", options(0, 500));
    bed.rounds(100);
    bed.delay(Duration::from_millis(2));
    bed.send(b"second", options(0, 500));
    bed.rounds(200);
    assert_eq!(
        bed.sockets[1].recv().expect("it has the least delay")[..],
        *b"first"
    );
    assert!(bed.sockets[1].recv().is_none());
    assert_eq!(bed.sockets[1].statistics().late, 1);
}

#[test]
fn the_oldest_gives_way_where_nobody_polls_or_nobody_receives() {
    let config = SocketConfig { keep: 4, ..exact() };
    let mut bed = Bed::new(Semantics::Copy, 4, &config, None);
    bed.calm();
    for number in 0..8 {
        bed.send(&[number], options(0, 0));
    }
    assert_eq!(
        bed.sockets[0].send(&[8], options(0, 0)),
        Err(SendError::NotPolled)
    );
    bed.rounds(3);
    let statistics = bed.sockets[0].statistics();
    assert_eq!((statistics.sent, statistics.superseded), (4, 4));
    bed.send(&[8], options(0, 0));
    bed.rounds(3);
    let came: Vec<u8> = bed.received().map(|message| message[0]).collect();
    assert_eq!(came, [5, 6, 7, 8]);
    assert_eq!(bed.sockets[1].statistics().superseded_here, 1);
}

#[test]
fn bad_input_is_one_clear_error() {
    let mut bed = Bed::new(Semantics::Copy, 5, &exact(), None);
    assert!(matches!(bed.socket(PORT, &exact()), Err(OpenError::Taken(PORT))));
    for nothing in [
        SocketConfig { frames: 0, ..exact() },
        SocketConfig { keep: 0, ..exact() },
    ] {
        assert!(matches!(bed.socket(1, &nothing), Err(OpenError::Empty)));
    }
    for keep in [usize::MAX, usize::MAX / 2 + 1] {
        let error = bed
            .socket(1, &SocketConfig { keep, ..exact() })
            .expect_err("no machine has as much");
        assert!(matches!(error, OpenError::Blocks(_)), "{error}");
    }
    let many = SocketConfig {
        frames: u32::MAX,
        ..exact()
    };
    assert!(matches!(bed.socket(1, &many), Err(OpenError::ManyFrames(4096))));
    let mut other = bed.socket(1, &exact()).expect("free");
    assert_eq!(other.send(b"x", options(0, 0)), Err(SendError::NotConnected));
    let most = bed.sockets[0].payload_max();
    assert_eq!(
        bed.sockets[0].send(&vec![0; most + 1], options(0, 0)),
        Err(SendError::TooLong(most))
    );
    bed.calm();
    bed.send(&vec![7; most], options(0, 0));
    bed.rounds(3);
    assert_eq!(bed.sockets[1].recv().map(|message| message.len()), Some(most));
    let again = RealTime::new(&mut bed.world.ends[0], None, || Time::ZERO);
    assert!(matches!(again, Err(OpenError::Handler(_))));
    // The number is free when its socket is gone.
    drop(other);
    bed.socket(1, &exact()).expect("free again");
}

/// Priorities beyond 7 are 7, and a deadline that no clock reaches is one.
#[test]
fn what_is_known_of_a_message_comes_with_it() {
    let mut bed = Bed::new(Semantics::Copy, 15, &exact(), None);
    bed.delay(Duration::from_micros(300));
    let never = SendOptions {
        priority: u8::MAX,
        deadline: Some(Deadline::In(Duration::MAX)),
    };
    let from = bed.world.ends[0].local();
    for (number, (options, priority)) in [(options(3, 0), 3), (never, 7)].into_iter().enumerate() {
        let sent_at = bed.world.now();
        bed.sockets[0].send(b"known", options).expect("polled");
        bed.rounds(50);
        let info = *bed.sockets[1].recv().expect("nothing is lost").info();
        assert_eq!(
            (info.number, info.priority, info.lost, info.late),
            (number as u32, priority, 0, false)
        );
        assert_eq!(info.sent_at, sent_at);
        let took = info.received_at.since(info.sent_at);
        let (least, round) = (Duration::from_micros(300), Duration::from_nanos(ROUND_NS));
        assert!(
            (least..=least + 3 * round).contains(&took) && info.delay <= round,
            "{info:?}"
        );
        assert_eq!(bed.world.ends[1].peer(info.from).address(), Some(from));
    }
}

/// Frames and descriptors of a socket are another's when it is closed, or connected anew.
#[test]
fn what_was_kept_for_a_socket_comes_back() {
    let config = SocketConfig {
        frames: 32,
        ..exact()
    };
    let mut bed = Bed::new(Semantics::Copy, 9, &config, None);
    bed.calm();
    for number in 1..=200u16 {
        bed.sockets[0]
            .connect(&mut bed.world.ends[0], bed.peer, PORT)
            .expect("the frames before came back");
        let mut other = bed.socket(number, &config).expect("free");
        other
            .connect(&mut bed.world.ends[0], bed.peer, PORT)
            .expect("frames");
        bed.send(&number.to_be_bytes(), options(0, 0));
        bed.rounds(3);
        other.close(&mut bed.world.ends[0]);
        bed.rounds(3);
        assert_eq!(bed.sockets[1].recv().expect("it came")[..], number.to_be_bytes());
    }
}

/// Everything that is not real-time waits for credits; real-time packets do not.
#[test]
fn a_stream_takes_the_smoothers_rate_and_real_time_does_not_wait() {
    let mut bed = Bed::new(Semantics::Copy, 7, &exact(), link());
    bed.calm();
    let bulk = noise(7, 50_000);
    let mut longest = Duration::ZERO;
    let mut got = 0;
    let rounds = 1_000_000_000 / ROUND_NS;
    for round in 0..rounds {
        let _ = bed.world.ends[0].try_send_copy(bed.peer, &bulk, 0);
        if round % 125 == 0 {
            bed.send(&[1; 1000], options(7, 0));
        }
        bed.round();
        while let Some(message) = bed.sockets[1].recv() {
            let info = message.info();
            longest = longest.max(info.received_at.since(info.sent_at));
        }
        while let Some(message) = bed.world.ends[1].try_recv().expect("reliable") {
            got += message.len() as u64;
        }
    }
    assert!(longest <= 3 * Duration::from_nanos(ROUND_NS), "{longest:?}");
    let credits = u64::from(bed.real_time[0].credits_per_second().expect("a smoother"));
    // λ0 is 4000 a second, and rises by half a percent in each of a hundred refreshes at most.
    assert!((4000..=6100).contains(&credits), "{credits}");
    let packets = got / 1440;
    assert!(
        (2800..=6100).contains(&packets),
        "{packets} packets of the stream in a second"
    );
}

/// What is real-time takes the credits of all else: at half of the rate it leaves the other half.
#[test]
fn real_time_uses_up_credits() {
    let packets = |of_real_time: u64| {
        let mut bed = Bed::new(Semantics::Copy, 16, &exact(), link());
        bed.calm();
        let mut got = 0;
        // A tenth of a second, in which the rate rises by a twentieth.
        for round in 0..100_000_000 / ROUND_NS {
            let _ = bed.world.ends[0].try_send_copy(bed.peer, &noise(7, 50_000), 0);
            if of_real_time > 0 && round % (1_000_000_000 / ROUND_NS / of_real_time) == 0 {
                bed.send(&[1; 1000], options(7, 0));
            }
            bed.round();
            while bed.sockets[1].recv().is_some() {}
            while let Some(message) = bed.world.ends[1].try_recv().expect("reliable") {
                got += message.len() as u64;
            }
            while bed.world.ends[0].try_completion().is_some() {}
        }
        got / 1440
    };
    let (alone, beside) = (packets(0), packets(2000));
    assert!(
        (300..=450).contains(&alone) && (0.35..=0.65).contains(&(beside as f64 / alone as f64)),
        "{beside} of {alone}"
    );
}

/// While a socket is open the device has no more of messages than leave in 100 µs, two packets at least; then as many as there are credits for.
#[test]
fn a_socket_bounds_what_the_device_has_of_messages() {
    for (mbit, bound) in [(100, 2), (1000, 8)] {
        let link = Parameters::of_link(NonZeroU64::new(mbit * 1_000_000).expect("not 0"), 1514);
        let mut bed = Bed::new(Semantics::Copy, 17, &exact(), Some(link));
        bed.calm();
        // The greeting, and its answer.
        bed.rounds(100);
        // Nothing leaves the device for ten milliseconds.
        let on_rings = |bed: &mut Bed| {
            bed.world.wire.set_delivery(Delivery::Manual);
            for _ in 0..10_000_000 / ROUND_NS {
                let _ = bed.world.ends[0].try_send_copy(bed.peer, &[7; 64], 0);
                bed.round();
            }
            let count = bed.world.wire.deliver(u32::MAX);
            bed.world.wire.set_delivery(Delivery::Inline);
            bed.rounds(100);
            while bed.world.ends[1].try_recv().expect("reliable").is_some() {}
            count
        };
        let bounded = on_rings(&mut bed);
        assert!((1..=bound).contains(&bounded), "{bounded} at {mbit} Mbit/s");
        let other = bed.real_time[1]
            .socket(&mut bed.world.ends[1], 1, &exact())
            .expect("free");
        let socket = std::mem::replace(&mut bed.sockets[0], other);
        socket.close(&mut bed.world.ends[0]);
        let free = on_rings(&mut bed);
        assert!(free > 2 * bound, "{free} at {mbit} Mbit/s");
    }
}

/// The socket's thread is not the endpoint's.
#[test]
fn a_thread_of_its_own_sends_and_receives() {
    let mut bed = Bed::new(Semantics::Copy, 8, &exact(), None);
    bed.calm();
    let other = bed.socket(1, &exact()).expect("free");
    let mut socket = std::mem::replace(&mut bed.sockets[0], other);
    let sender = std::thread::spawn(move || {
        let mut sent = 0u32;
        while sent < 1000 {
            match socket.send(&sent.to_be_bytes(), options(1, 0)) {
                Ok(()) => sent += 1,
                Err(SendError::NotPolled) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
        socket
    });
    let number = |message: RtMessage| u32::from_be_bytes(message[..].try_into().expect("four bytes"));
    let mut came = Vec::new();
    while !sender.is_finished() {
        bed.round();
        came.extend(bed.received().map(number));
    }
    let socket = sender.join().expect("no panic");
    bed.rounds(50);
    came.extend(bed.received().map(number));
    let (sent, receiver) = (socket.statistics(), bed.sockets[1].statistics());
    assert!(came.is_sorted_by(|a, b| a < b));
    assert_eq!(sent.sent + sent.superseded, 1000, "{sent:?}");
    assert_eq!(
        came.len() as u64 + receiver.superseded_here,
        sent.sent,
        "{receiver:?}"
    );
}

/// Small messages that the application keeps take none of the frames that a socket's messages come in, and nor do other sockets' messages.
#[test]
fn frames_to_receive_in_are_a_sockets_own() {
    let config = SocketConfig { keep: 30, ..exact() };
    let mut bed = Bed::new(Semantics::Copy, 13, &config, None);
    bed.calm();
    let mut second = bed.real_time[1]
        .socket(&mut bed.world.ends[1], 2, &config)
        .expect("free");
    let mut to_second = bed.socket(2, &config).expect("free");
    to_second
        .connect(&mut bed.world.ends[0], bed.peer, 2)
        .expect("a peer");
    // The application keeps every small message, until none is taken any more.
    let mut kept = Vec::new();
    let mut idle = 0;
    while idle < 500 {
        while bed.world.ends[0].try_send_copy(bed.peer, b"small", 0).is_ok() {}
        bed.round();
        idle += 1;
        while let Some(message) = bed.world.ends[1].try_recv().expect("reliable") {
            kept.push(message);
            idle = 0;
        }
    }
    assert!(kept.len() > 2000, "{}", kept.len());
    // And all of one socket's messages; those of the other come all the same.
    let mut held = Vec::new();
    for number in 0..40u8 {
        bed.send(&[number], options(0, 0));
        to_second.send(&[number], options(0, 0)).expect("polled");
        bed.rounds(5);
        held.extend(bed.sockets[1].recv());
        assert_eq!(second.recv().expect("each has a frame")[..], [number]);
    }
    let statistics = bed.sockets[1].statistics();
    assert_eq!((held.len(), statistics.no_block), (32, 8), "{statistics:?}");
    assert!(
        held.iter()
            .zip(0..)
            .all(|(message, number)| message[..] == [number])
    );
    // More than there are is an error at once.
    let many = SocketConfig {
        keep: 4000,
        ..exact()
    };
    let error = bed.socket(3, &many).expect_err("of 4096 half are left to others");
    assert!(error.to_string().contains("keep fewer messages"), "{error}");
    drop((held, kept));
    bed.rounds(5);
    bed.send(b"again", options(0, 0));
    bed.rounds(5);
    assert_eq!(bed.sockets[1].recv().expect("a frame is free")[..], *b"again");
}

/// Hosts with a cluster's key know each other by their word, and never asked for a proof: a message goes without, and the others with it.
#[test]
fn a_receiver_that_never_asked_for_a_proof_does_so_for_real_time() {
    let mut config = small();
    config.admission.key = ClusterKey::new(&[7; 32]).ok();
    let mut bed = Bed::on(World::new(Semantics::Copy, 21, &config), &exact(), None);
    bed.calm();
    for _ in 0..4 {
        bed.send(b"word", options(0, 0));
        bed.rounds(2 * (50_000_000 / ROUND_NS) as u32);
    }
    let [sender, receiver] = bed.sockets.each_ref().map(RtSocket::statistics);
    assert!(sender.sent == 4 && receiver.whole >= 3, "{sender:?} {receiver:?}");
}
