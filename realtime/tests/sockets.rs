//! Real-time sockets on two endpoints and a simulated wire.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lm_dataplane::{ConnectOptions, Outcome, PeerId, SendError as MessageError};
use lm_examples::{Dice, ROUND_NS, World, noise, semantics, small};
use lm_protocol::smoother::Parameters;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{
    Clock, LmHeader, RealTimePacket, RtReport, TYPE_REALTIME, TYPE_RT_REPORT, Trailer,
};
use lm_realtime::{
    Blocks, NotSent, OpenError, RealTime, RtBuffer, RtSocket, SendError, SendOptions, SendOutcome,
    SocketConfig,
};
use lm_sim::{Impairments, Semantics};

const PORT: u16 = 5000;

/// A world with real time at both ends, whose clock is the wire's.
struct Bed {
    world: World,
    clock: Arc<AtomicU64>,
    real_time: [RealTime; 2],
    sockets: [RtSocket; 2],
    peer: PeerId,
}

impl Bed {
    fn new(semantics: Semantics, seed: u64, config: &SocketConfig, link: Option<Parameters>) -> Bed {
        let mut world = World::new(semantics, seed, &small());
        let peer = world.connect(0, &ConnectOptions::default());
        let clock = Arc::new(AtomicU64::new(world.now().as_nanos()));
        let real_time = world.ends.each_mut().map(|end| {
            let clock = Arc::clone(&clock);
            let now = move || Time::from_nanos(clock.load(Ordering::Relaxed));
            RealTime::new(end, link, now).expect("no other handler")
        });
        let mut sockets = real_time
            .each_ref()
            .map(|real_time| real_time.socket(PORT, config).expect("free"));
        sockets[0]
            .connect(&mut world.ends[0], peer, PORT)
            .expect("frames");
        Bed {
            world,
            clock,
            real_time,
            sockets,
            peer,
        }
    }

    fn calm(&self) {
        for from in 0..2 {
            self.world.wire.impair(from, Impairments::default());
        }
    }

    fn round(&mut self) {
        self.world.round();
        self.clock.store(self.world.now().as_nanos(), Ordering::Relaxed);
    }

    fn rounds(&mut self, count: u32) {
        for _ in 0..count {
            self.round();
        }
    }

    /// Lets time pass in which nobody polls.
    fn pause(&mut self, time: Duration) {
        self.clock.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}

fn exact() -> SocketConfig {
    SocketConfig {
        same_host: true,
        ..SocketConfig::default()
    }
}

fn options(priority: u8, deadline_us: u64) -> SendOptions {
    SendOptions {
        priority,
        deadline: (deadline_us > 0).then(|| Duration::from_micros(deadline_us)),
    }
}

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
                    bed.sockets[0].send(&sample(sent), options(7, 0)).expect("polled");
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
            assert_eq!(
                (sender.refused_reports, receiver.refused_packets),
                (0, 0),
                "seed {seed}"
            );
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
        bed.sockets[0]
            .send(&[priority], options(priority, deadline_us))
            .expect("polled");
    }
    bed.pause(Duration::from_millis(1));
    bed.world.round();
    bed.world.round();
    let came: Vec<(u8, u32)> = std::iter::from_fn(|| bed.sockets[1].recv())
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

#[test]
fn what_comes_late_is_dropped_or_marked_as_the_socket_chose() {
    for drops_late in [true, false] {
        let config = SocketConfig {
            drops_late,
            ..exact()
        };
        let mut bed = Bed::new(Semantics::Copy, 2, &config, None);
        for from in 0..2 {
            let slow = Impairments {
                delay_ns: 1_000_000,
                ..Impairments::default()
            };
            bed.world.wire.impair(from, slow);
        }
        bed.sockets[0].send(b"late", options(0, 900)).expect("polled");
        bed.sockets[0].send(b"in time", options(0, 2000)).expect("polled");
        bed.rounds(100);
        let came: Vec<(Vec<u8>, bool)> = std::iter::from_fn(|| bed.sockets[1].recv())
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
    let slow = |delay_ns| Impairments {
        delay_ns,
        ..Impairments::default()
    };
    bed.world.wire.impair(0, slow(1_000_000));
    bed.sockets[0].send(b"first", options(0, 500)).expect("polled");
    bed.rounds(100);
    bed.world.wire.impair(0, slow(2_000_000));
    bed.sockets[0].send(b"second", options(0, 500)).expect("polled");
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
        bed.sockets[0].send(&[number], options(0, 0)).expect("a buffer");
    }
    assert_eq!(
        bed.sockets[0].send(&[8], options(0, 0)),
        Err(SendError::NotPolled)
    );
    bed.rounds(3);
    let statistics = bed.sockets[0].statistics();
    assert_eq!((statistics.sent, statistics.superseded), (4, 4));
    bed.sockets[0]
        .send(&[8], options(0, 0))
        .expect("buffers came back");
    bed.rounds(3);
    let came: Vec<u8> = std::iter::from_fn(|| bed.sockets[1].recv())
        .map(|message| message[0])
        .collect();
    assert_eq!(came, [5, 6, 7, 8]);
    assert_eq!(bed.sockets[1].statistics().superseded_here, 1);
}

#[test]
fn bad_input_is_one_clear_error() {
    let mut bed = Bed::new(Semantics::Copy, 5, &exact(), None);
    let [real_time, _] = &bed.real_time;
    assert!(matches!(
        real_time.socket(PORT, &exact()),
        Err(OpenError::Taken(PORT))
    ));
    let nothing = SocketConfig { frames: 0, ..exact() };
    assert!(matches!(real_time.socket(1, &nothing), Err(OpenError::Empty)));
    let many = SocketConfig {
        frames: u32::MAX,
        ..exact()
    };
    assert!(matches!(
        real_time.socket(1, &many),
        Err(OpenError::ManyFrames(4096))
    ));
    let mut other = real_time.socket(1, &exact()).expect("free");
    assert_eq!(other.send(b"x", options(0, 0)), Err(SendError::NotConnected));
    let most = bed.sockets[0].payload_max();
    assert_eq!(
        bed.sockets[0].send(&vec![0; most + 1], options(0, 0)),
        Err(SendError::TooLong(most))
    );
    bed.calm();
    bed.sockets[0]
        .send(&vec![7; most], options(0, 0))
        .expect("it fits");
    bed.rounds(3);
    assert_eq!(bed.sockets[1].recv().map(|message| message.len()), Some(most));
    let again = RealTime::new(&mut bed.world.ends[0], None, || Time::ZERO);
    assert!(matches!(again, Err(OpenError::Handler(_))));
    // The number is free when its socket is gone.
    drop(other);
    bed.real_time[0].socket(1, &exact()).expect("free again");
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
        let [end, _] = &mut bed.world.ends;
        bed.sockets[0]
            .connect(end, bed.peer, PORT)
            .expect("the frames before came back");
        let mut other = bed.real_time[0].socket(number, &config).expect("free");
        other.connect(end, bed.peer, PORT).expect("frames");
        bed.sockets[0]
            .send(&number.to_be_bytes(), options(0, 0))
            .expect("polled");
        bed.rounds(3);
        other.close(&mut bed.world.ends[0]);
        bed.rounds(3);
        assert_eq!(bed.sockets[1].recv().expect("it came")[..], number.to_be_bytes());
    }
}

/// Packets that cannot be true are counted, and change nothing.
#[test]
fn hostile_packets_and_reports_change_nothing() {
    let link = Parameters::of_link(NonZeroU64::new(100_000_000).expect("not 0"), 1514);
    let mut bed = Bed::new(Semantics::Copy, 6, &exact(), Some(link));
    bed.calm();
    bed.sockets[0].send(b"one", options(0, 0)).expect("polled");
    bed.rounds(2000);
    assert_eq!(bed.sockets[0].statistics().reported_whole, 1);
    let rate = bed.real_time[0].credits_per_second();
    assert!(rate.is_some());
    let mut dice = Dice(6);
    let mut words = || [dice.roll() as u32, dice.roll() as u32, dice.roll() as u32];
    // Of no flow, and of as many losses as there can be.
    let report = RtReport {
        newest: 0,
        whole: 0,
        late: 0,
        lost: 1,
        delay_max: Duration::from_secs(1),
        interval: Duration::ZERO,
        port: PORT,
        sent_at: Time::ZERO,
        held: Duration::ZERO,
    };
    for number in 0..200u64 {
        let (packet_type, key, words, payload) = match number % 4 {
            0 => (
                TYPE_RT_REPORT,
                number,
                report.write().0,
                report.write().1.to_vec(),
            ),
            1 => (TYPE_RT_REPORT, number, words(), noise(number, number as usize)),
            2 => (TYPE_REALTIME, number, words(), noise(number, number as usize)),
            _ => (TYPE_REALTIME, number, [0, 1, 0], vec![0xff; 24]),
        };
        let to = usize::from(packet_type == TYPE_REALTIME);
        inject_typed(&bed, to, (packet_type, key, words), &payload);
        bed.round();
    }
    let [sender, receiver] = bed.sockets.each_ref().map(RtSocket::statistics);
    assert_eq!(
        (
            sender.reported_whole,
            sender.reported_lost,
            sender.refused_reports
        ),
        (1, 0, 100)
    );
    assert_eq!(
        (receiver.whole, receiver.lost, receiver.refused_packets),
        (1, 0, 100)
    );
    assert!(bed.real_time[0].credits_per_second() >= rate, "no signal");
}

/// A packet of an extension's type for host `to`, from the other one.
fn inject_typed(bed: &Bed, to: usize, (packet_type, key, words): (u8, u64, [u32; 3]), payload: &[u8]) {
    let header = LmHeader::Extension {
        packet_type,
        key,
        words,
    };
    let trailer = Trailer::new(&header, payload, lm_examples::HOSTS[1 - to]);
    let head = header.encode(payload.len() as u16);
    inject(bed, to, &[&head[..], payload, trailer.as_bytes()].concat());
}

/// A packet for host `to`, from the other one.
fn inject(bed: &Bed, to: usize, bytes: &[u8]) {
    let [a, b] = [1 - to, to].map(|host| lm_examples::HOSTS[host]);
    let mut packet = Vec::new();
    for host in [b, a] {
        packet.extend([2, 0]);
        packet.extend(host.ip().octets());
    }
    let udp_len = 8 + bytes.len() as u16;
    packet.extend([8, 0, 0x45, 0]);
    packet.extend((20 + udp_len).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    packet.extend(a.ip().octets());
    packet.extend(b.ip().octets());
    let sum: u32 = packet[14..34]
        .as_chunks::<2>()
        .0
        .iter()
        .map(|pair| u32::from(u16::from_be_bytes(*pair)))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    packet[24..26].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    for port in [a.port(), b.port(), udp_len, 0] {
        packet.extend(port.to_be_bytes());
    }
    packet.extend(bytes);
    bed.world.wire.inject(to, 0, &packet);
}

/// Everything that is not real-time waits for credits; real-time packets do not.
#[test]
fn a_stream_takes_the_smoothers_rate_and_real_time_does_not_wait() {
    let link = Parameters::of_link(NonZeroU64::new(100_000_000).expect("not 0"), 1514);
    let mut bed = Bed::new(Semantics::Copy, 7, &exact(), Some(link));
    bed.calm();
    let bulk = noise(7, 50_000);
    let mut longest = Duration::ZERO;
    let mut got = 0;
    let rounds = 1_000_000_000 / ROUND_NS;
    for round in 0..rounds {
        let _ = bed.world.ends[0].try_send_copy(bed.peer, &bulk, 0);
        if round % 125 == 0 {
            bed.sockets[0].send(&[1; 1000], options(7, 0)).expect("polled");
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

/// The socket's thread is not the endpoint's.
#[test]
fn a_thread_of_its_own_sends_and_receives() {
    let mut bed = Bed::new(Semantics::Copy, 8, &exact(), None);
    bed.calm();
    let other = RealTime::socket(&bed.real_time[0], 1, &exact()).expect("free");
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
    let mut came = Vec::new();
    while !sender.is_finished() {
        bed.round();
        came.extend(
            std::iter::from_fn(|| bed.sockets[1].recv())
                .map(|message| u32::from_be_bytes(message[..].try_into().expect("four bytes"))),
        );
    }
    let socket = sender.join().expect("no panic");
    bed.rounds(50);
    came.extend(
        std::iter::from_fn(|| bed.sockets[1].recv())
            .map(|message| u32::from_be_bytes(message[..].try_into().expect("four bytes"))),
    );
    let (sent, receiver) = (socket.statistics(), bed.sockets[1].statistics());
    assert!(came.is_sorted_by(|a, b| a < b));
    assert_eq!(sent.sent + sent.superseded, 1000, "{sent:?}");
    assert_eq!(
        came.len() as u64 + receiver.superseded_here,
        sent.sent,
        "{receiver:?}"
    );
}

/// As `exact`, with blocks of every kind.
fn with_blocks() -> SocketConfig {
    let count = exact().keep as u32 + 2;
    SocketConfig {
        blocks: Blocks {
            of_1: count,
            of_4: count,
            of_8: count,
            of_16: count,
        },
        ..exact()
    }
}

/// Messages of up to 47 fragments, which are lost, repeated and overtaken: every byte of those that come is compared, and each of the others
/// is counted once.
#[test]
fn messages_of_many_fragments_come_whole_or_are_counted_as_lost() {
    let (mut lost, mut whole) = (0, 0);
    for seed in 0..200 {
        let semantics = semantics()[seed as usize % 2];
        let mut bed = Bed::new(semantics, seed, &with_blocks(), None);
        let most = bed.sockets[0].payload_max();
        assert_eq!(most, 65_436);
        let mut dice = Dice(seed);
        let mut lens: Vec<usize> = (0..40)
            .map(|_| dice.roll() as usize % (most >> (dice.roll() % 6)))
            .collect();
        lens.extend([
            0, 1, 1416, 1417, 2832, 2833, 3996, 3997, 16_284, 16_285, 32_668, 32_669, most,
        ]);
        // Of the last ones nothing is lost, so that all before them are known of.
        let message = |number: usize| noise(seed << 32 | number as u64, lens[number]);
        let mut numbers = Vec::new();
        for number in 0..lens.len() {
            if number + 3 >= lens.len() {
                bed.calm();
            }
            bed.sockets[0]
                .send(&message(number), options(0, 0))
                .expect("polled");
            for _ in 0..20 + dice.roll() % 20 {
                bed.round();
                while let Some(came) = bed.sockets[1].recv() {
                    let number = came.info().number as usize;
                    assert!(came[..] == message(number), "seed {seed}: message {number}");
                    numbers.push((number, came.info().lost));
                }
            }
        }
        assert!(numbers.is_sorted_by(|a, b| a.0 < b.0), "seed {seed}: {numbers:?}");
        assert_eq!(
            numbers.last().expect("some came").0,
            lens.len() - 1,
            "seed {seed}"
        );
        for pair in numbers.windows(2) {
            assert_eq!(
                pair[1].0 - pair[0].0 - 1,
                pair[1].1 as usize,
                "seed {seed}: {pair:?}"
            );
        }
        let statistics = bed.sockets[1].statistics();
        assert_eq!(statistics.whole as usize, numbers.len(), "seed {seed}");
        let behind_first = lens.len() - numbers[0].0;
        let among = statistics.whole + statistics.lost;
        // A first message that did not come whole is known of if a fragment of it came.
        assert!(
            (behind_first..=lens.len()).contains(&(among as usize)),
            "seed {seed}: {statistics:?}"
        );
        let of_several = numbers
            .iter()
            .map(|(number, _)| lens[*number])
            .filter(|len| *len > 1416);
        assert_eq!(
            statistics.copied_bytes,
            of_several.map(|len| len as u64).sum::<u64>(),
            "seed {seed}"
        );
        assert_eq!(
            (statistics.no_block, statistics.refused_packets),
            (0, 0),
            "seed {seed}"
        );
        assert_eq!(
            bed.sockets[0].statistics().sent as usize,
            lens.len(),
            "seed {seed}"
        );
        (lost, whole) = (lost + statistics.lost, whole + statistics.whole);
    }
    assert!(lost > 500 && whole > 5000, "{lost} lost, {whole} whole");
}

/// A message of which a fragment is missing is given up after 2 ms, and what comes of it then begins nothing.
#[test]
fn a_message_with_a_gap_is_lost_and_its_block_comes_back() {
    let config = SocketConfig {
        keep: 1,
        blocks: Blocks {
            of_1: 3,
            ..Blocks::default()
        },
        ..exact()
    };
    let mut bed = Bed::new(Semantics::Copy, 10, &config, None);
    bed.calm();
    let message = noise(10, 3000);
    let fragment = |bed: &Bed, number, index: usize| inject_fragment(bed, number, &message, 1000, index);
    // More messages than there are blocks for, each without its last fragment.
    for number in 0..12 {
        fragment(&bed, number, 0);
        fragment(&bed, number, 1);
        bed.rounds(if number % 3 == 2 { 110 } else { 1 });
    }
    let statistics = bed.sockets[1].statistics();
    assert_eq!(
        (statistics.lost, statistics.whole, statistics.no_block),
        (12, 0, 0),
        "{statistics:?}"
    );
    fragment(&bed, 11, 2);
    bed.rounds(2);
    assert_eq!(bed.sockets[1].statistics().overtaken, 1);
    for index in [2, 0, 0, 1] {
        fragment(&bed, 12, index);
    }
    bed.rounds(2);
    let came = bed.sockets[1].recv().expect("it is whole");
    assert!(came[..] == message && came.info().lost == 12, "{:?}", came.info());
    drop(came);
    assert_eq!(bed.sockets[1].statistics().overtaken, 2);
    // A newer one that is whole ends those before it at once.
    fragment(&bed, 13, 0);
    fragment(&bed, 14, 0);
    for index in 0..3 {
        fragment(&bed, 15, index);
    }
    fragment(&bed, 14, 1);
    bed.rounds(2);
    assert_eq!(bed.sockets[1].recv().expect("it is whole").info().lost, 2);
    let statistics = bed.sockets[1].statistics();
    assert_eq!((statistics.lost, statistics.overtaken), (14, 3));
}

/// Fragment `index` of a message that is cut into pieces of `stride` bytes.
fn inject_fragment(bed: &Bed, number: u32, message: &[u8], stride: usize, index: usize) {
    let at = index * stride;
    let packet = RealTimePacket {
        message: number,
        index: index as u16,
        count: message.len().div_ceil(stride) as u16,
        deadline: None,
        sent_at: bed.world.now(),
        message_len: message.len() as u32,
        offset: at as u32,
        port: PORT,
        priority: 0,
        clock: Clock::Host,
        payload: &message[at..message.len().min(at + stride)],
    };
    inject_packet(bed, &packet);
}

fn inject_packet(bed: &Bed, packet: &RealTimePacket<'_>) {
    let payload = [packet.payload, &packet.tail()].concat();
    inject_typed(bed, 1, (TYPE_REALTIME, 7, packet.words()), &payload);
}

/// Counts, lengths and numbers at their limits, and fragments that contradict others of their message: each is counted once, and the flow's
/// own messages come all the same.
#[test]
fn hostile_fragments_change_nothing() {
    let mut bed = Bed::new(Semantics::Copy, 11, &with_blocks(), None);
    bed.calm();
    let piece = [0x66; 100];
    let base = RealTimePacket {
        message: 0,
        index: 0,
        count: 3,
        deadline: None,
        sent_at: Time::ZERO,
        message_len: 300,
        offset: 0,
        port: PORT,
        priority: 0,
        clock: Clock::Host,
        payload: &piece,
    };
    let (most, empty): (u32, &[u8]) = (65_436, &[]);
    let refused = [
        RealTimePacket {
            count: u16::MAX,
            ..base
        },
        RealTimePacket {
            count: u16::MAX,
            index: u16::MAX - 1,
            message_len: u32::MAX,
            offset: u32::MAX - 100,
            ..base
        },
        RealTimePacket {
            count: 300,
            message_len: 30_000,
            ..base
        },
        RealTimePacket { index: 3, ..base },
        RealTimePacket { index: 1, ..base },
        RealTimePacket {
            index: 1,
            offset: 99,
            ..base
        },
        RealTimePacket {
            index: 2,
            offset: 100,
            ..base
        },
        RealTimePacket {
            index: 2,
            offset: u32::MAX,
            ..base
        },
        RealTimePacket {
            message_len: 200,
            ..base
        },
        RealTimePacket {
            message_len: 301,
            ..base
        },
        RealTimePacket {
            message_len: 0,
            ..base
        },
        RealTimePacket {
            message_len: u32::MAX,
            ..base
        },
        RealTimePacket {
            payload: empty,
            ..base
        },
        RealTimePacket { count: 1, ..base },
        RealTimePacket { count: 0, ..base },
        RealTimePacket { priority: 8, ..base },
        RealTimePacket {
            port: PORT + 1,
            ..base
        },
    ];
    for packet in &refused {
        inject_packet(&bed, packet);
        bed.round();
    }
    let statistics = bed.sockets[1].statistics();
    assert_eq!(statistics.refused_packets, refused.len() as u64, "{statistics:?}");
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
    let others = [
        RealTimePacket {
            count: 4,
            message_len: 400,
            index: 1,
            offset: 100,
            ..base
        },
        RealTimePacket {
            message_len: 299,
            index: 1,
            offset: 100,
            ..base
        },
        RealTimePacket {
            index: 1,
            offset: 101,
            payload: &[1; 101],
            message_len: 300,
            ..base
        },
        RealTimePacket {
            index: 1,
            offset: 100,
            sent_at: Time::from_nanos(1),
            ..base
        },
        RealTimePacket {
            index: 1,
            offset: 100,
            deadline: Some(Duration::from_micros(1)),
            ..base
        },
        RealTimePacket {
            index: 1,
            offset: 100,
            priority: 1,
            ..base
        },
        RealTimePacket {
            index: 1,
            offset: 100,
            clock: Clock::Tai,
            ..base
        },
    ];
    for packet in &others {
        inject_packet(&bed, packet);
    }
    for index in [1, 2] {
        inject_packet(
            &bed,
            &RealTimePacket {
                index,
                offset: 100 * u32::from(index),
                ..base
            },
        );
    }
    bed.rounds(2);
    let statistics = bed.sockets[1].statistics();
    assert_eq!(statistics.refused_packets, (refused.len() + others.len()) as u64);
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
    bed.sockets[0].send(&own, options(0, 0)).expect("polled");
    bed.rounds(30);
    assert!(bed.sockets[1].recv().expect("there is a block again")[..] == own);
    let all = with_blocks().blocks.of_1 as usize;
    let held: Vec<_> = (0..all)
        .map(|number| {
            bed.sockets[0]
                .send(&noise(number as u64, 3000), options(0, 0))
                .expect("polled");
            bed.rounds(10);
            bed.sockets[1].recv().expect("each has a block")
        })
        .collect();
    // The application keeps all of them.
    bed.sockets[0].send(&[1; 3000], options(0, 0)).expect("polled");
    bed.rounds(10);
    assert!(bed.sockets[1].recv().is_none() && bed.sockets[1].statistics().no_block > 1);
    assert!(
        held.iter()
            .zip(0..)
            .all(|(message, number)| message[..] == noise(number, 3000))
    );
}

/// Memory for blocks is there when the socket is open, or there is no socket.
#[test]
fn blocks_that_are_too_few_or_too_many_are_an_error_at_once() {
    let mut bed = Bed::new(Semantics::Copy, 12, &exact(), None);
    let [real_time, _] = &bed.real_time;
    let open = |blocks| real_time.socket(1, &SocketConfig { blocks, ..exact() });
    let none = Blocks::default();
    let error = open(Blocks { of_4: 17, ..none }).expect_err("18 at least");
    assert!(
        error.to_string().contains("17 blocks of 4 pages are too few")
            && error.to_string().contains("ask for 18"),
        "{error}"
    );
    let error = open(Blocks {
        of_16: u32::MAX,
        ..none
    })
    .expect_err("256 TiB");
    assert!(
        error.to_string().contains("ask for fewer") && error.to_string().contains("ulimit -l"),
        "{error}"
    );
    let mut long = open(Blocks { of_8: 18, ..none }).expect("memory");
    assert_eq!(long.payload_max(), 32_668);
    long.connect(&mut bed.world.ends[0], bed.peer, PORT)
        .expect("frames");
    assert_eq!(
        long.send(&[0; 32_669], options(0, 0)),
        Err(SendError::TooLong(32_668))
    );
    // As many as there are blocks wait for the endpoint.
    for _ in 0..18 {
        long.send(&[0; 32_668], options(0, 0)).expect("a block");
    }
    assert_eq!(long.send(&[0; 2000], options(0, 0)), Err(SendError::NotPolled));
    long.send(&[0; 1416], options(0, 0)).expect("another kind");
}

fn written(mut buffer: RtBuffer, message: &[u8]) -> RtBuffer {
    buffer[..message.len()].copy_from_slice(message);
    buffer
}

/// Two buffers in turns, as a program writes one while the other leaves. Each comes back once, and not before the device has read all of it.
#[test]
fn lent_memory_is_locked_until_its_last_packet_is_completed() {
    let mut came = 0;
    for seed in 0..40 {
        let semantics = semantics()[seed as usize % 2];
        let config = SocketConfig {
            frames: 1 + seed as u32 % 5,
            ..with_blocks()
        };
        let mut bed = Bed::new(semantics, seed, &config, None);
        let most = bed.sockets[0].payload_max();
        let mut dice = Dice(seed);
        let lens: Vec<usize> = (0..20)
            .map(|_| dice.roll() as usize % (most >> (dice.roll() % 6)))
            .collect();
        let message = |number: usize| noise(seed << 32 | number as u64, lens[number]);
        let mut buffers = [(); 2].map(|()| bed.sockets[0].buffer(most));
        let places = buffers
            .each_mut()
            .map(|buffer| buffer.as_mut().expect("18 of 16 pages").as_mut_ptr());
        for (number, len) in lens.iter().enumerate() {
            let place = number % 2;
            let buffer = written(buffers[place].take().expect("it came back"), &message(number));
            let sender = &mut bed.sockets[0];
            sender
                .send_buffer(buffer, *len, options(0, 0))
                .expect("connected");
            while buffers[place].is_none() {
                let all_are_put = bed.sockets[0].statistics().sent as usize > number;
                bed.round();
                while let Some((mut buffer, outcome)) = bed.sockets[0].unlocked() {
                    assert!(all_are_put, "seed {seed}: put in this round, and unlocked in it");
                    assert_eq!((outcome, buffer.len()), (SendOutcome::Left, most), "seed {seed}");
                    assert_eq!(buffer.as_mut_ptr(), places[place], "seed {seed}");
                    assert!(buffer[..*len] == message(number), "seed {seed}");
                    assert!(buffers[place].replace(buffer).is_none(), "seed {seed}");
                }
                while let Some(message) = bed.sockets[1].recv() {
                    let number = message.info().number as usize;
                    let expected = noise(seed << 32 | number as u64, lens[number]);
                    assert!(message[..] == expected, "seed {seed}: {number}");
                    came += 1;
                }
            }
        }
        assert_eq!(bed.sockets[0].statistics().sent, 20, "seed {seed}");
    }
    assert!(came > 400, "{came} of 800");
}

#[test]
fn lent_memory_comes_back_with_what_became_of_its_message() {
    let config = SocketConfig {
        keep: 1,
        blocks: Blocks {
            of_1: 3,
            ..Blocks::default()
        },
        ..exact()
    };
    let mut bed = Bed::new(Semantics::Copy, 9, &config, None);
    bed.calm();
    let mut buffers: Vec<RtBuffer> = (0..3)
        .map(|_| bed.sockets[0].buffer(2000).expect("of three"))
        .collect();
    assert!(bed.sockets[0].buffer(2000).is_none());
    assert!(bed.sockets[0].buffer(3997).is_none());
    let mut other = bed.real_time[0].socket(1, &config).expect("free");
    let refused = |sent: Result<(), NotSent>| {
        let NotSent { buffer, reason } = sent.expect_err("refused");
        (buffer, reason)
    };
    let buffer = buffers.pop().expect("three");
    let (buffer, reason) = refused(other.send_buffer(buffer, 1, options(0, 0)));
    assert_eq!(reason, SendError::NotConnected);
    other
        .connect(&mut bed.world.ends[0], bed.peer, PORT)
        .expect("frames");
    let (buffer, reason) = refused(other.send_buffer(buffer, 1, options(0, 0)));
    assert_eq!(reason, SendError::Foreign);
    let (buffer, reason) = refused(bed.sockets[0].send_buffer(buffer, 3997, options(0, 0)));
    assert_eq!(reason, SendError::TooLong(3996));
    buffers.push(buffer);
    // One keeps its place, the one before gives way, and what is late says so.
    for (byte, deadline_us) in [(1, 0), (2, 0)] {
        let buffer = written(buffers.pop().expect("three"), &[byte; 3000]);
        let sent = bed.sockets[0].send_buffer(buffer, 3000, options(0, deadline_us));
        sent.expect("connected");
    }
    bed.rounds(5);
    let unlocked = |bed: &mut Bed| {
        let all = std::iter::from_fn(|| bed.sockets[0].unlocked());
        all.map(|(buffer, outcome)| (buffer[0], outcome))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        unlocked(&mut bed),
        [(1, SendOutcome::Superseded), (2, SendOutcome::Left)]
    );
    let came = bed.sockets[1].recv().expect("nothing is lost");
    assert!(came[..] == [2; 3000]);
    let buffer = written(buffers.pop().expect("the third"), &[3]);
    let sent = bed.sockets[0].send_buffer(buffer, 1, options(0, 500));
    sent.expect("connected");
    bed.pause(Duration::from_millis(1));
    bed.world.round();
    assert_eq!(unlocked(&mut bed), [(3, SendOutcome::Late)]);
    // Those that were dropped are there again.
    assert!(bed.sockets[0].buffer(2000).is_some());
}
