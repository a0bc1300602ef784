//! Who asks for places of a landing queue and does not use them: others get theirs, and honest senders lose nothing.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lm_dataplane::{Counters, EndpointConfig, MemoryConfig, RecvError};
use lm_protocol::control::{ControlMessage, End, Proof};
use lm_protocol::session::UNUSED_MAX;
use lm_protocol::wire::lm::{AnnounceEntry, LmHeader, Trailer, parse_datagram};
use rustix::net::RecvFlags;

use crate::bed::beside;
use crate::forger::{Forger, encoded, request};
use crate::form::{At, Bed, CONTROL, Form, RECEIVER, under_attack};
use crate::traffic::{
    Flag, PATIENCE, assert_delivered, check, content, open, send, settle, up_to, wait_until,
};

/// Requests that came to the control port and got nothing of what they asked for.
fn turned_away(bed: &Bed, counters: &Counters) -> u64 {
    let Some(daemon) = bed.daemon() else {
        return counters.challenged;
    };
    let all = daemon.interface().datagrams;
    all.values().sum::<u64>() - all["accepted"]
}

/// The middle one.
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// A thousand forged addresses ask for sessions: nothing is held for them, and an honest sender gets its place and keeps it, and its goodput.
///
/// Every other time the same packets go to a port of the receiver's host on which nothing listens: what the attacker, the switch and the
/// kernel do for them is the same, on cores that all have to share. What they cost beyond that is the receiver's part. While messages pass,
/// ten are forged for each: a machine that is busy with other things slows both. It may also need more looks.
pub(crate) fn forged_requests_hold_no_place(form: Form) {
    const FORGED: u64 = 1000;
    const FORGED_PER_MESSAGE: u64 = 10;
    // Connections; messages in a leg; legs in a connection, half of them under attack.
    const ROUNDS: usize = 10;
    const MESSAGES: usize = 4;
    const LEGS: usize = 32;
    let Some(bed) = Bed::new(form) else { return };
    let elsewhere = SocketAddrV4::new(*CONTROL.ip(), 9);
    let [is_aimed, asks] = <[AtomicBool; 2]>::default();
    let [sent, forged, aimed] = <[AtomicU64; 3]>::default();
    // Relaxed: lone numbers, each of which may be seen a little later.
    let attack = |forger: &Forger, n: u64| {
        let due = FORGED_PER_MESSAGE * sent.load(Ordering::Relaxed);
        if !asks.load(Ordering::Relaxed) && forged.fetch_add(1, Ordering::Relaxed) >= due {
            forged.store(due, Ordering::Relaxed);
            return;
        }
        let host = 10 + n % FORGED;
        let from = SocketAddrV4::new(Ipv4Addr::new(198, 18 + (host >> 8) as u8, 1, host as u8), 7301);
        let request = ControlMessage::Request(request(from.port() - 1, (n % FORGED) << 40));
        let is_aimed = is_aimed.load(Ordering::Relaxed);
        aimed.fetch_add(u64::from(is_aimed), Ordering::Relaxed);
        let to = if is_aimed { CONTROL } else { elsewhere };
        forger.send(from, to, &encoded(&request, n as u32));
    };
    let (mut places, mut kept) = (<[Vec<f64>; 2]>::default(), Vec::new());
    let mut send_some = |round: usize| {
        is_aimed.store(round % 2 == 1, Ordering::Relaxed);
        asks.store(true, Ordering::Relaxed);
        let mut a = open(&bed.config(At::Honest));
        let begun = Instant::now();
        let peer = a.connect(RECEIVER, &up_to(1 << 20)).unwrap();
        wait_until(&mut a, "it has a place", |a| a.peer(peer).lands() == Some(true));
        places[round % 2].push(begun.elapsed().as_secs_f64());
        asks.store(false, Ordering::Relaxed);
        let mut took = [0.0; 2];
        for leg in 0..LEGS {
            // With and without, without and with.
            let attacked = usize::from(leg % 4 == 1 || leg % 4 == 2);
            is_aimed.store(attacked == 1, Ordering::Relaxed);
            let begun = Instant::now();
            let mut tokens = Vec::new();
            for _ in 0..MESSAGES {
                let tag = sent.fetch_add(1, Ordering::Relaxed);
                tokens.push((send(&mut a, peer, tag, &content(tag, 1 << 20)), tag, 1 << 20));
            }
            assert_delivered(&settle(&mut a), &tokens);
            took[attacked] = begun.elapsed().as_secs_f64();
            if leg % 2 == 1 {
                kept.push(took[0] / took[1]);
            }
        }
        // A place that is another's for a while costs a repetition at least, ten times as long as a turn of a busy core.
        let [quiet, attacked] = [0, 1].map(|leg| median(&places[leg]));
        (
            attacked <= 2.0 * quiet.max(0.01),
            median(&kept),
            [quiet, attacked],
        )
    };
    let mut rounds = || {
        let mut found = (false, 0.0, [0.0; 2]);
        for round in 0..4 * ROUNDS {
            found = bed.program(At::Honest, || send_some(round));
            if round + 1 >= ROUNDS && round % 2 == 1 && found.0 && found.1 >= 0.9 {
                break;
            }
        }
        found
    };
    let receiver = bed.config(At::Receiver);
    let work = || bed.beside_receiver(&receiver, &mut rounds);
    let (((is_placed, kept, places), (received, counters)), _) = under_attack(&bed, attack, 10_000, work);
    println!("a place after {places:?} s, {kept:.2} of the goodput");
    assert!(
        is_placed && kept >= 0.9,
        "a place after {places:?} s, {kept:.2} of the goodput"
    );
    assert_eq!(received, sent.load(Ordering::Relaxed));
    assert_eq!(
        received,
        counters.sessions_granted * (MESSAGES * LEGS) as u64,
        "{counters:?}"
    );
    let aimed = aimed.load(Ordering::Relaxed);
    assert!(
        aimed > 1000 && turned_away(&bed, &counters) > aimed / 2,
        "{aimed} forged: {counters:?}"
    );
    // The two that have daemons.
    assert!(bed.daemon().is_none_or(|daemon| daemon.interface().hosts <= 2));
}

/// Senders that keep places without sending anything: real addresses that answer challenges and repeat their requests.
struct Claimants {
    sockets: Vec<(UdpSocket, u64)>,
    /// Their data ports.
    data: Vec<UdpSocket>,
    /// Each announces a message, of which it sends nothing.
    announces: bool,
}

impl Claimants {
    /// So many sockets at one address of the third host, each of which asks for a session of its own.
    fn new(ip: Ipv4Addr, count: u16) -> Claimants {
        let bind = |port: u16| {
            let socket = UdpSocket::bind((ip, port)).expect("a socket");
            let answers = Some(Duration::from_millis(20));
            socket.set_read_timeout(answers).expect("a socket");
            socket
        };
        let claim = |n: u16| {
            let socket = bind(8001 + 2 * n);
            socket.connect(CONTROL).expect("a route");
            (socket, (u64::from(u32::from(ip)) << 32 | u64::from(n) << 16) | 1)
        };
        Claimants {
            sockets: (0..count).map(claim).collect(),
            data: (0..count).map(|n| bind(8000 + 2 * n)).collect(),
            announces: false,
        }
    }

    /// The same, who announce messages as well.
    fn announcing(ip: Ipv4Addr, count: u16) -> Claimants {
        Claimants {
            announces: true,
            ..Claimants::new(ip, count)
        }
    }

    fn announce(&self, n: usize, session_key: u64) {
        if !self.announces {
            return;
        }
        let data = &self.data[n];
        let header = LmHeader::Announce {
            session_key,
            first: 0,
            entries: 1,
            sent: 0,
        };
        let payload = AnnounceEntry {
            len: 1 << 20,
            tag: 666,
            delivery: None,
            windows_released: AnnounceEntry::ALL_WINDOWS,
            has_facts: false,
        }
        .encode();
        let SocketAddr::V4(from) = data.local_addr().expect("a bound socket") else {
            unreachable!("it was bound to an IPv4 address")
        };
        let mut bytes = header.encode(payload.len() as u16).to_vec();
        bytes.extend_from_slice(&payload);
        bytes.extend_from_slice(Trailer::new(&header, &payload, from).as_bytes());
        data.send_to(&bytes, RECEIVER).expect("a datagram leaves");
    }

    /// They go: what they announced is given up.
    fn leave(&self) {
        for (n, (socket, _)) in self.sockets.iter().enumerate() {
            let end = encoded(&ControlMessage::End(End::WITHDRAWN), n as u32);
            socket.send(&end).expect("a datagram leaves");
        }
    }

    /// Repeats the requests and answers challenges; how many have places.
    fn claim(&self) -> usize {
        let mut held = vec![None; self.sockets.len()];
        for (n, (socket, sender_id)) in self.sockets.iter().enumerate() {
            let data_port = 8000 + 2 * n as u16;
            let asks = encoded(&ControlMessage::Request(request(data_port, *sender_id)), n as u32);
            let ask = || socket.send(&asks).map(drop);
            ask().expect("a datagram leaves");
            let mut bytes = [0; 512];
            while let Ok(len) = socket.recv(&mut bytes) {
                match ControlMessage::parse(&bytes[..len]) {
                    Ok((_, ControlMessage::Challenge(challenge))) => {
                        let proof = ControlMessage::Proof(Proof {
                            sender_id: *sender_id,
                            cookie: challenge.cookie,
                            data_port,
                            uncompleted_max: 0,
                            word: [0; 16],
                        });
                        socket.send(&encoded(&proof, 0)).expect("a datagram leaves");
                        ask().expect("a datagram leaves");
                    }
                    Ok((_, ControlMessage::Grant(grant))) => {
                        self.announce(n, grant.session_key);
                        held[n] = Some((grant.session_key, grant.lands));
                        break;
                    }
                    // Of a place that it had before.
                    Ok((_, ControlMessage::Ended(_))) => {}
                    _ => break,
                }
            }
        }
        // A place that passed from one to another meanwhile is the other's. The one that lost it is told, but not in which order: no
        // condition says that nothing more comes, hence a pause.
        let counted = [true, false].map(|gains| {
            for (n, held) in held.iter_mut().enumerate() {
                self.hear(n, held, gains);
            }
            std::thread::sleep(Duration::from_millis(5));
            held.iter().flatten().filter(|(_, lands)| *lands).count()
        });
        counted[1]
    }

    /// What the receiver tells of the session of number `n`.
    fn hear(&self, n: usize, held: &mut Option<(u64, bool)>, gains: bool) {
        let mut bytes = [0; 512];
        while let Ok((len, _)) = rustix::net::recv(&self.data[n], &mut bytes, RecvFlags::DONTWAIT) {
            let Ok((
                LmHeader::Credit {
                    session_key, lands, ..
                },
                _,
            )) = parse_datagram(&bytes[..len])
            else {
                continue;
            };
            if let Some((key, held)) = held
                && *key == session_key
            {
                *held = lands && (gains || *held);
            }
        }
        while let Ok((len, _)) = rustix::net::recv(&self.sockets[n].0, &mut bytes, RecvFlags::DONTWAIT) {
            if let Ok((_, ControlMessage::Ended(ended))) = ControlMessage::parse(&bytes[..len]) {
                held.take_if(|(key, _)| *key == ended.session_key);
            }
        }
    }
}

/// Places in which nothing lands go to whoever waits, whatever is repeated for them, and one address has half of them at most. The honest
/// sender whose unused place was taken goes on all the same, and lands again. A daemon lets nobody wait who has no key: its place stays.
pub(crate) fn unused_places_go_to_whoever_waits(form: Form) {
    let Some(bed) = Bed::new(form) else { return };
    let others = bed.more_addresses();
    let landed = Flag::default();
    let rounds = AtomicU64::new(0);
    let sent = AtomicU64::new(2);
    let claim = |over: &AtomicBool| {
        landed.wait();
        let claimants = others.map(|ip| Claimants::new(ip, 16));
        let mut most = [0; 2];
        while !over.load(Ordering::Acquire) {
            for (most, claimants) in most.iter_mut().zip(&claimants) {
                *most = claimants.claim().max(*most);
            }
            // Relaxed: a lone count.
            rounds.fetch_add(1, Ordering::Relaxed);
        }
        most
    };
    let go_on = || {
        let mut a = open(&bed.config(At::Honest));
        let peer = a.connect(RECEIVER, &up_to(100_000)).unwrap();
        let first = send(&mut a, peer, 0, &content(0, 100_000));
        assert_delivered(&settle(&mut a), &[(first, 0, 100_000)]);
        assert_eq!(a.peer(peer).lands(), Some(true));
        landed.set();
        let begun = Instant::now();
        match form {
            // Half of the places each and all but our own: ours goes when it was unused for longest.
            Form::Embedded => wait_until(&mut a, "our place is taken", |a| {
                a.peer(peer).lands() == Some(false)
            }),
            Form::Daemon => wait_until(&mut a, "our place could be another's", |a| {
                assert_eq!(a.peer(peer).lands(), Some(true));
                begun.elapsed() > UNUSED_MAX + Duration::from_secs(1) && rounds.load(Ordering::Relaxed) > 2
            }),
        }
        let second = send(&mut a, peer, 1, &content(1, 100_000));
        assert_delivered(&settle(&mut a), &[(second, 1, 100_000)]);
        // Who has nothing to send needs no place: it goes on sending until it has one.
        let begun = Instant::now();
        while a.peer(peer).lands() != Some(true) {
            assert!(begun.elapsed() < Duration::from_secs(20), "messages land again");
            let number = sent.fetch_add(1, Ordering::Relaxed);
            let token = send(&mut a, peer, number, &content(number, 100_000));
            assert_delivered(&settle(&mut a), &[(token, number, 100_000)]);
            let pause = Instant::now();
            wait_until(&mut a, "a moment", |_| {
                pause.elapsed() > Duration::from_millis(200)
            });
        }
        let last = sent.fetch_add(1, Ordering::Relaxed);
        let token = send(&mut a, peer, last, &content(last, 100_000));
        assert_delivered(&settle(&mut a), &[(token, last, 100_000)]);
    };
    let claims = |over: &AtomicBool| bed.on(At::Attacker, || claim(over));
    let work = || beside(claims, || bed.program(At::Honest, go_on));
    let (((), most), (received, counters)) = bed.beside_receiver(&bed.config(At::Receiver), work);
    // Without a bound it would be fifteen.
    let bounds = if form == Form::Embedded { 1..=8 } else { 0..=0 };
    assert!(most.iter().all(|most| bounds.contains(most)), "{most:?}");
    assert_eq!(received, sent.load(Ordering::Relaxed), "{counters:?}");
}

/// A sender that has got credit and sends nothing holds up nobody, however long senders may be silent; it goes on when it is back.
pub(crate) fn a_silent_sender_holds_up_nobody(form: Form) {
    const LEN: u64 = 1 << 20;
    const MESSAGES: usize = 16;
    let Some(bed) = Bed::honest(form) else { return };
    let [listens, silent, over] = <[Flag; 3]>::default();
    let bytes = content(0, LEN);
    let sender = |at| EndpointConfig {
        patience: 3 * PATIENCE,
        port: 0,
        memory: MemoryConfig {
            send_len: 64 << 20,
            ..bed.config(at).memory
        },
        ..bed.config(at)
    };
    let receive = || {
        let mut b = open(&EndpointConfig {
            patience: 3 * PATIENCE,
            ..bed.config(At::Receiver)
        });
        listens.set();
        let mut received = 0;
        wait_until(&mut b, "all messages are here", |b| {
            while let Some(message) = b.try_recv().unwrap() {
                assert!(*message == bytes);
                received += 1;
            }
            received == 2 * MESSAGES
        });
        wait_until(&mut b, "the senders are gone", |b| {
            let counters = b.counters();
            counters.sessions_ended == counters.sessions_granted
        });
    };
    let fall_silent = || {
        listens.wait();
        let mut a = open(&sender(At::Honest));
        let peer = a.connect(RECEIVER, &up_to(LEN)).unwrap();
        for _ in 0..MESSAGES {
            send(&mut a, peer, 0, &bytes);
        }
        wait_until(&mut a, "it has begun", |a| a.counters().data_packets_sent > 100);
        assert!(a.counters().messages_sent < MESSAGES as u64);
        silent.set();
        over.wait();
        settle(&mut a);
        drop(a);
    };
    let send_meanwhile = || {
        silent.wait();
        let mut a = open(&sender(At::Attacker));
        let peer = a.connect(RECEIVER, &up_to(LEN)).unwrap();
        for _ in 0..MESSAGES {
            send(&mut a, peer, 0, &bytes);
        }
        settle(&mut a);
        over.set();
        drop(a);
    };
    bed.run(receive, fall_silent, send_meanwhile);
}

/// Places for whose sessions a message is announced and nothing comes go to whoever waits, although their requests and announcements are
/// repeated. A sender that slept goes on without its place, loses nothing, and lands again.
pub(crate) fn a_place_whose_message_does_not_come_goes_to_whoever_waits(form: Form) {
    const LEN: u64 = 100_000;
    let Some(bed) = Bed::new(form) else { return };
    let others = bed.more_addresses();
    let patient = |at| EndpointConfig {
        patience: 3 * PATIENCE,
        ..bed.config(at)
    };
    let [listens, held, landed, over] = <[Flag; 4]>::default();
    let receive = || {
        let mut b = open(&patient(At::Receiver));
        listens.set();
        let mut tags = Vec::new();
        // Each step of the senders has its own limit.
        let deadline = Instant::now() + 3 * PATIENCE;
        while !over.is_set() {
            assert!(Instant::now() < deadline, "{:?}", b.counters());
            match b.try_recv() {
                Ok(Some(message)) => {
                    check(&b, &message, message.tag(), LEN);
                    tags.push(message.tag());
                    continue;
                }
                Err(RecvError::Incomplete { tag: 666, .. }) if landed.is_set() => continue,
                nothing => assert!(matches!(nothing, Ok(None)), "{nothing:?}"),
            }
            b.wait(Duration::from_millis(1));
        }
        tags.sort_unstable();
        assert_eq!(tags, [1, 2, 3, 4], "{:?}", b.counters());
    };
    let hold = || {
        listens.wait();
        let mut a = open(&patient(At::Attacker));
        let peer = a.connect(RECEIVER, &up_to(LEN)).unwrap();
        let mut region = a.loan(peer, LEN).unwrap();
        std::io::Write::write_all(&mut region, &content(2, LEN)).unwrap();
        let first = a.try_send(region, 2).unwrap();
        a.poll();
        let claimants = [(others[0], 8), (others[1], 7)].map(|(ip, count)| Claimants::announcing(ip, count));
        let mut is_held = false;
        let deadline = Instant::now() + 3 * PATIENCE;
        while !landed.is_set() {
            assert!(Instant::now() < deadline, "nobody else lands");
            let granted: usize = claimants.iter().map(Claimants::claim).sum();
            if granted == 15 && !std::mem::replace(&mut is_held, true) {
                held.set();
            }
        }
        assert_delivered(&settle(&mut a), &[(first, 2, LEN)]);
        claimants.iter().for_each(Claimants::leave);
        let second = send(&mut a, peer, 3, &content(3, LEN));
        assert_delivered(&settle(&mut a), &[(second, 3, LEN)]);
        wait_until(&mut a, "it lands again", |a| a.peer(peer).lands() == Some(true));
        let before = a.counters().messages_one_copy;
        let third = send(&mut a, peer, 4, &content(4, LEN));
        assert_delivered(&settle(&mut a), &[(third, 4, LEN)]);
        assert_eq!(a.counters().messages_one_copy, before);
        over.set();
    };
    let wait_for_a_place = || {
        held.wait();
        let begun = Instant::now();
        let mut a = open(&patient(At::Honest));
        let peer = a.connect(RECEIVER, &up_to(LEN)).unwrap();
        wait_until(&mut a, "it has a place", |a| a.peer(peer).lands() == Some(true));
        let token = send(&mut a, peer, 1, &content(1, LEN));
        assert_delivered(&settle(&mut a), &[(token, 1, LEN)]);
        assert_eq!(a.counters().messages_one_copy, 0);
        println!("a place after {:?}", begun.elapsed());
        drop(a);
        landed.set();
    };
    bed.run(receive, wait_for_a_place, hold);
}

/// The same where all who hold a place repeat themselves, so that no lease runs out.
pub(crate) fn repeated_announcements_keep_no_place(form: Form) {
    const LEN: u64 = 100_000;
    let Some(bed) = Bed::new(form) else { return };
    let others = bed.more_addresses();
    let [listens, held, placed, left, over] = <[Flag; 5]>::default();
    let receive = || {
        let mut b = open(&EndpointConfig {
            patience: 3 * PATIENCE,
            ..bed.config(At::Receiver)
        });
        listens.set();
        let mut received = 0;
        wait_until(&mut b, "the honest sender is done", |b| {
            // Asked before: what was confirmed by then is taken.
            let is_over = over.is_set();
            loop {
                match b.try_recv() {
                    Ok(Some(message)) => {
                        check(b, &message, 1, LEN);
                        received += 1;
                    }
                    Err(RecvError::Incomplete { tag: 666, .. }) => {}
                    nothing => {
                        assert!(matches!(nothing, Ok(None)), "{nothing:?}");
                        return is_over;
                    }
                }
            }
        });
        assert_eq!(received, 1);
        assert!(b.counters().sessions_set_aside > 0, "{:?}", b.counters());
    };
    let claim = || {
        listens.wait();
        let claimants = others.map(|ip| Claimants::announcing(ip, 8));
        let deadline = Instant::now() + PATIENCE;
        while !placed.is_set() {
            assert!(Instant::now() < deadline, "nobody else gets a place");
            if claimants.iter().map(Claimants::claim).sum::<usize>() == 16 {
                held.set();
            }
        }
        claimants.iter().for_each(Claimants::leave);
        left.set();
    };
    let wait_for_a_place = || {
        held.wait();
        let mut a = open(&bed.config(At::Honest));
        let peer = a.connect(RECEIVER, &up_to(LEN)).unwrap();
        wait_until(&mut a, "it has a place", |a| a.peer(peer).lands() == Some(true));
        placed.set();
        left.wait();
        let token = send(&mut a, peer, 1, &content(1, LEN));
        assert_delivered(&settle(&mut a), &[(token, 1, LEN)]);
        assert_eq!(a.counters().messages_one_copy, 0);
        over.set();
    };
    bed.run(receive, wait_for_a_place, claim);
}
