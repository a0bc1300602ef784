//! Liveness where something is lost, late or somebody else's: nobody waits for ever, and nobody waits for a stranger.
#![cfg(test)]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::{LmHeader, has_digests};

use super::bed::{Bed, BedConfig, IPS, PORT, data_address, lm_packet, noise, sender_id, wire_of};
use super::source::Source;
use crate::completion::{Outcome, SendError};
use crate::landing_side::Past;
use crate::notices::Fault;
use crate::placing::Settled;
use crate::port::Port;
use crate::port::Socket;
use crate::region::TrySendError;
use crate::simnic::{Semantics, ZeroCopy};

fn addressing(src_ip: Ipv4Addr, dst_port: u16) -> Addressing {
    Addressing {
        src_mac: MacAddr([2; 6]),
        dst_mac: MacAddr([2; 6]),
        vlan: None,
        src_ip,
        dst_ip: IPS[1],
        src_port: PORT,
        dst_port,
    }
}

fn eager(addressing: &Addressing, sender_id: u64, number: u32) -> Vec<u8> {
    let header = LmHeader::Eager {
        sender_id,
        number,
        tag: 5,
        digested: has_digests(sender_id),
        acknowledges: None,
    };
    lm_packet(addressing, &header, &[0; 20])
}

/// Memory of one endpoint means nothing to another: its addresses would let the kernel write over messages.
#[test]
fn another_endpoints_regions_are_refused() {
    let mut bed = Bed::new(&BedConfig::default());
    let there = bed.session(0, WireMode::Lm, 100_000);
    let back = bed.session(1, WireMode::Lm, 100_000);
    assert_eq!(there.index, back.index);
    for len in [100, 50_000] {
        let region = bed.hosts[0].loan(there, len).expect("memory");
        let now_ns = bed.now_ns;
        let TrySendError { reason, region } = bed.hosts[1].submit(region, 1, now_ns).expect_err("not ours");
        assert_eq!(reason, SendError::UnknownPeer);
        drop(region);
    }
    let source = Source::at(&mut bed, 1);
    let region = bed.hosts[0].landing_region(50_000).expect("memory");
    source.give(region);
    bed.exchange(0, there, &noise(1, 50_000));
    assert_eq!(bed.hosts[1].counters.regions_unfit, 1);
    let (_, how) = source.settled(&mut bed);
    assert!(matches!(how, Settled::Elsewhere(_)), "{how:?}");
    drop(how);
    bed.check_memory();
}

/// A flood at the control port takes its turn and no more.
#[test]
fn control_datagrams_are_taken_a_few_at_a_time() {
    let mut bed = Bed::new(&BedConfig::default());
    let to = SocketAddrV4::new(IPS[1], PORT + 1);
    for n in 0..500 {
        let sent = bed.hosts[0].port.side().send(Socket::Control, to, &[n as u8; 9]);
        sent.expect("room in the socket");
    }
    let mut worst = 0;
    let taken = |bed: &Bed| bed.hosts[1].counters.drops.malformed + bed.hosts[1].counters.drops.other_version;
    for _ in 0..200_000 {
        let before = taken(&bed);
        bed.round();
        worst = worst.max(taken(&bed) - before);
        if taken(&bed) == 500 {
            break;
        }
    }
    assert_eq!(taken(&bed), 500);
    // A byte says the version; 16 of its 256 values are ours, and one the seal's.
    assert_eq!(bed.hosts[1].counters.drops.malformed, 34);
    assert!(worst <= 64, "{worst} in one round");
}

/// Acknowledgements and credits leave although other traffic keeps every round busy.
#[test]
fn a_busy_receiver_answers() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 100_000);
    for len in [10, 3 * 1448] {
        let begin_ns = bed.now_ns;
        bed.send(0, peer, &noise(2, len), 1);
        while bed.hosts[0].told.completions().is_empty() {
            let header = LmHeader::Missing {
                session_key: 1,
                message: 0,
                ranges: 0,
                manifest: false,
            };
            let at = addressing(IPS[0], PORT);
            bed.wire.inject(1, 0, &lm_packet(&at, &header, &[]));
            bed.round();
            drop(bed.hosts[1].take_message().expect("no failure"));
            assert!(bed.now_ns - begin_ns < 5_000_000, "no answer to {len} bytes");
        }
        assert_eq!(
            bed.hosts[0].told.completions().pop_front().map(|c| c.outcome),
            Some(Outcome::Delivered)
        );
    }
}

/// A lost eager message is sent again, as soon as the receiver shows that one after it came, or after a while.
#[test]
fn a_lost_eager_message_is_sent_again() {
    for follows in [true, false] {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = bed.resolve(0);
        bed.exchange(0, peer, b"first");
        let resent = bed.hosts[0].counters.eager_resent;
        bed.wire.drop_next(0, 1);
        bed.send(0, peer, b"lost", 1);
        bed.pass(Duration::from_millis(1));
        if follows {
            bed.send(0, peer, b"follows", 2);
        }
        let begin_ns = bed.now_ns;
        assert_eq!(&bed.recv(1)[..], b"lost");
        let limit_ns = if follows { 2_000_000 } else { 20_000_000 };
        assert!(bed.now_ns - begin_ns < limit_ns, "{} ns", bed.now_ns - begin_ns);
        if follows {
            assert_eq!(&bed.recv(1)[..], b"follows");
        }
        for _ in 0..=u32::from(follows) {
            assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
        }
        assert!((1..=2).contains(&(bed.hosts[0].counters.eager_resent - resent)));
        bed.check_memory();
    }
}

/// Answers that confirm nothing are no progress: an eager message that never gets through is reported in time.
#[test]
fn an_eager_message_that_is_always_lost_is_reported_although_others_follow() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    bed.exchange(0, peer, b"first");
    bed.wire
        .set_filter(|_, packet| !packet.windows(4).any(|bytes| bytes == b"lost"));
    let lost = bed.send(0, peer, b"lost", 1);
    let begin_ns = bed.now_ns;
    let ended = loop {
        bed.send(0, peer, b"follows", 2);
        bed.pass(Duration::from_millis(400));
        if let Some(completion) = bed.hosts[0].told.completions().pop_front() {
            break completion;
        }
        assert!(bed.now_ns - begin_ns < 4_000_000_000, "never reported");
    };
    assert_eq!((ended.token, ended.outcome), (lost, Outcome::TimedOut));
    assert!(bed.hosts[0].counters.eager_resent < 1000, "ever less often");
    // The numbering begins anew, and everything works again.
    while bed.hosts[0].told.completions().pop_front().is_some() {}
    bed.exchange(0, peer, b"works again");
}

/// The acknowledgement is lost, not the message.
#[test]
fn a_lost_acknowledgement_is_asked_for() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    bed.exchange(0, peer, b"first");
    bed.wire.drop_next(1, 1);
    bed.send(0, peer, b"second", 2);
    drop(bed.recv(1));
    let begin_ns = bed.now_ns;
    assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    assert!(bed.now_ns - begin_ns < 600_000_000);
    assert_eq!(
        bed.hosts[1].counters.drops.eager_duplicate, 1,
        "it was sent again, and dropped"
    );
    assert!(bed.hosts[1].take_message().expect("no failure").is_none());
}

/// A credit is lost while the receiver says other things all the time.
#[test]
fn a_lost_credit_is_asked_for_although_the_peer_talks() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    bed.exchange(0, peer, &noise(1, 50_000));
    let back = bed.hosts[1].peers.find(data_address(0)).expect("known");
    let back = bed.hosts[1].peers.id_of(back);
    bed.send(0, peer, &noise(2, 200_000), 2);
    bed.wire.set_filter({
        let mut lost = 0;
        move |from, packet| {
            let credit = from == 1 && packet.get(42) == Some(&0x25);
            lost += u32::from(credit);
            // The announcement is confirmed before.
            !(credit && (3..13).contains(&lost))
        }
    });
    let begin_ns = bed.now_ns;
    while !bed.hosts[0].told.completions().iter().any(|c| c.len == 200_000) {
        let _ = bed.try_send(1, back, b"and now something else", 7);
        bed.pass(Duration::from_millis(5));
        bed.hosts[1].told.completions().clear();
        drop(bed.hosts[0].take_message().expect("no failure"));
        drop(bed.hosts[1].take_message().expect("no failure"));
        // One is asked for every 20 ms. With the keepalive alone it takes 500 ms each.
        assert!(bed.now_ns - begin_ns < 1_000_000_000, "stuck");
    }
}

/// The receiver ends a session, its word of that is lost, and it says other things all the time. It says it again when it hears of the
/// session, and if it has forgotten that it had one, its silence is an answer as well.
#[test]
fn an_end_that_is_lost_is_noticed_although_the_peer_talks() {
    for forgets in [false, true] {
        lose_the_end(forgets);
    }
}

fn lose_the_end(forgets: bool) {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    bed.exchange(0, peer, &noise(1, 50_000));
    let back = bed.hosts[1].peers.find(data_address(0)).expect("known");
    let back = bed.hosts[1].peers.id_of(back);
    let outbound = bed.hosts[0].peers.at(peer.index).outbound.as_ref();
    let (key, lease_ns) = outbound
        .map(|outbound| (outbound.terms.key, outbound.terms.lease_ns))
        .expect("a session");
    bed.wire.drop_next(1, 1);
    bed.hosts[1].abort_session(key, Fault::Stalled);
    assert_eq!(bed.wire.counters().lost, 1);
    if forgets {
        bed.hosts[1].landing.as_mut().expect("landing").past = Past::new();
    }
    bed.send(0, peer, &noise(2, 200_000), 2);
    let begin_ns = bed.now_ns;
    while bed.hosts[0].told.completions().iter().all(|c| c.len != 200_000) {
        let _ = bed.try_send(1, back, b"and now something else", 7);
        bed.pass(Duration::from_millis(5));
        bed.hosts[1].told.completions().clear();
        drop(bed.hosts[0].take_message().expect("no failure"));
        assert!(bed.now_ns - begin_ns < lease_ns + 1_000_000_000, "stuck");
    }
    let ended = match forgets {
        false => Outcome::Delivered,
        true => Outcome::TimedOut,
    };
    assert_eq!(bed.completion(0).outcome, ended);
    assert_eq!(bed.hosts[0].peers.at(peer.index).outbound.is_none(), forgets);
    let took_ns = bed.now_ns - begin_ns;
    assert!(forgets || took_ns < 100_000_000, "{took_ns} ns");
}

/// A receiver whose application did not poll for longer than its own time limit does not blame the sender, who
/// waits for its credit.
#[test]
fn a_pause_of_our_own_is_no_stall() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 1 << 20);
    bed.exchange(0, peer, &noise(1, 50_000));
    let payload = noise(2, 200_000);
    bed.send(0, peer, &payload, 2);
    // Posted, and the credit that says so is lost.
    bed.wire.drop_next(1, 1);
    while bed.wire.counters().lost == 0 {
        bed.round();
    }
    bed.now_ns += 3_000_000_000;
    let message = bed.recv(1);
    assert!(message[..] == payload[..]);
    drop(message);
    assert_eq!(bed.completion(0).outcome, Outcome::Delivered);
    // It is forgiven once, not for ever: the sender dies, and the receiver is slow.
    bed.send(0, peer, &payload, 3);
    bed.rounds(3);
    bed.wire.drop_next(0, 1_000_000);
    let reported = (0..20).any(|_| {
        bed.now_ns += 400_000_000;
        bed.poll(1);
        bed.hosts[1].counters.messages_incomplete > 0
    });
    assert!(reported);
}

/// Packets with a forged source do not make a receiver forget the incarnation that it knows, whatever their number.
#[test]
fn a_packet_of_another_incarnation_resets_nothing() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    bed.exchange(0, peer, b"first");
    let challenged = bed.hosts[1].counters.challenged;
    for n in 0..5 {
        bed.wire
            .inject(1, 0, &eager(&addressing(IPS[0], PORT), 0xbad, n as u32));
        bed.exchange(0, peer, &noise(n, 50));
    }
    bed.rounds(10);
    assert_eq!(bed.hosts[1].counters.challenged, challenged + 5);
    assert_eq!(
        bed.hosts[1].counters.drops().map(|(_, count)| count).sum::<u64>(),
        0
    );
    // The honest peer was asked whether it is 0xbad.
    assert_eq!(bed.hosts[0].counters.drops.unexpected, 5);
    bed.check_memory();
}

/// Bursts of strangers' packets longer than what a wake-up sends: each is challenged, an honest one among them as well.
#[test]
fn bursts_of_strangers_are_challenged_to_the_last() {
    let mut bed = Bed::new(&BedConfig::default());
    bed.resolve(0);
    for burst in 0..40 {
        for n in 0..128 {
            let stranger = eager(&addressing(IPS[0], PORT), (burst << 8 | n) << 1 | 1, 0);
            bed.wire.inject(1, 0, &stranger);
        }
        bed.now_ns += 10_000_000;
        bed.poll(1);
    }
    let counters = &bed.hosts[1].counters;
    assert_eq!((counters.challenged, counters.control_send_errors), (40 * 128, 0));
}

/// A sender that does not keep to its credit takes none of the frames that are kept posted for others.
#[test]
fn a_sender_is_held_to_its_credit() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    bed.exchange(0, peer, b"first");
    let id = sender_id(0, lm_protocol::integrity::Integrity::Manifest);
    let index = bed.hosts[1].peers.find(data_address(0)).expect("known");
    let limit = |bed: &mut Bed| bed.hosts[1].peers.at(index).eager_in.told_limit;
    // An application that takes nothing: credit until the free frames are used up.
    let mut next = 1;
    let mut idle = 0;
    while idle < 100 {
        match next < limit(&mut bed) {
            true => {
                bed.wire.inject(1, 0, &eager(&addressing(IPS[0], PORT), id, next));
                (next, idle) = (next + 1, 0);
            }
            false => idle += 1,
        }
        bed.alone(1, 1);
    }
    let held = bed.hosts[1].told.messages().count();
    assert!(held > 1000, "{held}");
    for number in next..next + 100 {
        bed.wire
            .inject(1, 0, &eager(&addressing(IPS[0], PORT), id, number));
        bed.alone(1, 1);
    }
    assert_eq!(bed.hosts[1].told.messages().count(), held);
    assert!(bed.hosts[1].counters.drops.implausible >= 1);
}

/// Nobody has a broadcast or multicast address; an answer to one could reach many.
#[test]
fn impossible_senders_get_no_answer() {
    let mut bed = Bed::new(&BedConfig::default());
    let sent = |bed: &Bed| {
        let queues = bed.hosts[1].sending.scheduler().queues().iter();
        queues.map(|queue| queue.packets).sum::<u64>()
    };
    let (before, known) = (sent(&bed), bed.hosts[1].peers.len());
    // An address of a host on the link, whose MAC address the packet does not have.
    let real = Addressing {
        src_port: PORT + 8,
        ..addressing(IPS[0], PORT)
    };
    let nowhere = addressing(Ipv4Addr::new(10, 9, 0, 77), PORT);
    let forged = [
        Addressing {
            src_ip: Ipv4Addr::BROADCAST,
            ..real
        },
        Addressing {
            src_ip: Ipv4Addr::UNSPECIFIED,
            ..real
        },
        Addressing {
            src_ip: Ipv4Addr::new(224, 0, 0, 1),
            ..real
        },
        Addressing { src_port: 0, ..real },
        Addressing {
            src_mac: MacAddr([0xff; 6]),
            ..real
        },
    ];
    for addressing in &forged {
        bed.wire.inject(1, 0, &eager(addressing, 9, 0));
    }
    bed.pass(Duration::from_millis(5));
    assert_eq!(bed.hosts[1].counters.drops.malformed, forged.len() as u64);
    assert_eq!((sent(&bed), bed.hosts[1].peers.len()), (before, known));
    bed.wire.inject(1, 0, &eager(&real, 9, 0));
    bed.pass(Duration::from_millis(5));
    assert_eq!((sent(&bed), bed.hosts[1].peers.len()), (before + 1, known));
    assert_eq!(bed.hosts[1].counters.challenged, 1);
    // No neighbour has this one: there is no way to it but back to where its packet came from.
    bed.wire.inject(1, 0, &eager(&nowhere, 9, 0));
    bed.pass(Duration::from_millis(5));
    assert_eq!((sent(&bed), bed.hosts[1].peers.len()), (before + 1, known));
    assert_eq!(bed.hosts[1].counters.challenged, 2);
}

/// Sessions and messages outlive it at either end, also where the driver gave its entries back and takes them in another order.
#[test]
fn an_interface_that_goes_down_and_up_only_costs_time() {
    let zero_copy = |lap| {
        Semantics::ZeroCopy(ZeroCopy {
            lap,
            ..ZeroCopy::default()
        })
    };
    for semantics in [Semantics::Copy, zero_copy(1), zero_copy(64)] {
        for down in [0, 1] {
            let mut bed = Bed::new(&BedConfig {
                patience: Duration::from_secs(60),
                wire: wire_of(semantics),
                ..BedConfig::default()
            });
            let peer = bed.session(0, WireMode::Lm, 900_000);
            bed.exchange(0, peer, &noise(1, 900_000));
            // Longer than messages and leases of this bed would last without patience, too.
            for (rounds, time) in [(1, 1), (2, 300), (3, 40), (5, 7000)] {
                let payload = noise(rounds.into(), 900_000);
                let token = bed.send(0, peer, &payload, 0);
                bed.rounds(rounds);
                assert!(
                    bed.hosts[1].told.messages().count() == 0,
                    "it was shorter than that"
                );
                bed.wire.set_up(down, false);
                bed.pass(Duration::from_millis(time));
                bed.wire.set_up(down, true);
                assert!(bed.recv(1)[..] == payload[..], "another message");
                let completion = bed.completion(0);
                assert_eq!(
                    (completion.token, completion.outcome),
                    (token, Outcome::Delivered)
                );
            }
            for host in &bed.hosts {
                // Which entry comes next is not known any more after it, in zero-copy mode.
                let is_zero_copy = semantics != Semantics::Copy;
                assert!(is_zero_copy || host.counters.violations.total() == 0);
                assert_eq!((host.counters.sessions_ended, host.counters.landing_lost), (0, 0));
            }
            assert_eq!(bed.hosts[1].counters.sessions_granted, 1);
            if semantics == Semantics::Copy {
                // In zero-copy mode entries that a loss has left over are used by what comes next, and keep a zone until then (I1).
                bed.check_memory();
            }
        }
    }
}
