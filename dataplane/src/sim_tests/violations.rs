//! Invariant I3: every kind of violation is detected, and nothing of its session is delivered.

use std::collections::BTreeMap;

use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::landing::LogEntry;

use super::bed::{Bed, BedConfig, noise};
use crate::completion::{Outcome, RecvError};
use crate::landing::Violation;
use crate::port::RxQueue as _;
use crate::ring::Descriptor;

/// Fragments of the message that is tampered with; windows of 8: the last one has 4.
const COUNT: u64 = 20;
const LEN: usize = COUNT as usize * 1448;

/// A session with one whole message behind it, and the first window of the next on host 1's RX ring, not yet
/// looked at.
fn bed(wire: WireMode) -> Bed {
    let mut bed = Bed::new(&BedConfig {
        window: 8,
        ..BedConfig::default()
    });
    let peer = bed.session(0, wire, LEN as u64);
    bed.exchange(0, peer, &noise(1, LEN));
    bed.send(0, peer, &noise(2, LEN), 2);
    // Host 0 announces, host 1 posts and gives credit, host 0 sends.
    for _ in 0..200 {
        bed.alone(0, 1);
        let landing = bed.hosts[1].landing.as_mut().expect("landing");
        if landing.rx.available(1) > 0 {
            return bed;
        }
        bed.alone(1, 1);
    }
    panic!("no packets");
}

fn order(bed: &Bed) -> u64 {
    bed.hosts[1]
        .landing
        .as_ref()
        .expect("landing")
        .sessions
        .entries
        .received
}

/// Changes the log entry `ahead` of the next descriptor.
fn change_log(bed: &mut Bed, ahead: u64, change: impl FnOnce(&mut LogEntry)) {
    let at = order(bed) + ahead;
    let landing = bed.hosts[1].landing.as_mut().expect("landing");
    let producer = landing.rx.accepted();
    assert!(at < producer);
    let mut entry = landing.rx.entry(at);
    change(&mut entry);
    let mut writer = landing.rx.log().writer();
    writer.append(at, entry);
    // Appending sets the producer: put it back.
    let last = landing.rx.entry(producer - 1);
    writer.append(producer - 1, last);
}

/// UMEM address at which the packet of the window's lowest fragment lies, once it is there.
fn lowest_packet(bed: &mut Bed) -> u64 {
    let landing = bed.hosts[1].landing.as_mut().expect("landing");
    assert!(landing.rx.available(8) >= 8);
    landing.rx.packet(7).start()
}

/// The session ends with exactly this violation; nothing of the message is delivered, its sender knows, all memory
/// comes back, and the next session works.
fn expect(mut bed: Bed, violation: Violation) {
    let failure = loop {
        bed.now_ns += 100_000;
        bed.round();
        match bed.hosts[1].take_message() {
            Ok(None) => {}
            Ok(Some(message)) => panic!("{violation:?}: message {} was delivered", message.number()),
            Err(failure) => break failure,
        }
    };
    // Its number is drawn by chance on the ipfrag wire; the tag is the sender's.
    assert!(matches!(failure, RecvError::Incomplete { tag: 2, .. }));
    let found: BTreeMap<_, _> = bed.hosts[1].counters.violations.iter().collect();
    for kind in Violation::ALL {
        assert_eq!(found[kind.as_str()], u64::from(kind == violation), "{kind:?}");
    }
    assert!(matches!(
        bed.completion(0).outcome,
        Outcome::Incomplete { .. } | Outcome::SessionEnded
    ));
    bed.hosts[1].fixed.patience_ns = 2_000_000_000;
    for wire in [WireMode::Lm, WireMode::IpFrag] {
        let peer = bed.session(0, wire, 50_000);
        bed.exchange(0, peer, &noise(3, 50_000));
    }
    bed.check_memory();
    assert_eq!(bed.hosts[1].counters.violations.total(), 1);
}

#[test]
fn without_tampering_it_arrives() {
    for wire in [WireMode::Lm, WireMode::IpFrag] {
        let mut bed = bed(wire);
        let message = bed.recv(1);
        assert!(message[..] == noise(2, LEN)[..]);
    }
}

#[test]
fn a_log_entry_of_another_place() {
    for ahead in [0, 3, 7] {
        for wire in [WireMode::Lm, WireMode::IpFrag] {
            let mut tampered = bed(wire);
            change_log(&mut tampered, ahead, |entry| entry.index ^= 1);
            expect(tampered, Violation::Displaced);
        }
    }
}

/// The fragment of a message that is not known is dropped, and comes again; of IP fragments, which never come unannounced, it is a violation.
#[test]
fn a_log_entry_of_a_message_that_is_not_known() {
    for ahead in [0, 3] {
        let mut tampered = bed(WireMode::IpFrag);
        change_log(&mut tampered, ahead, |entry| entry.message += 1);
        expect(tampered, Violation::Displaced);
        let mut tampered = bed(WireMode::Lm);
        change_log(&mut tampered, ahead, |entry| entry.message += 1);
        let message = tampered.recv(1);
        assert!(message[..] == noise(2, LEN)[..]);
        let counters = tampered.hosts[1].counters;
        assert_eq!(
            (counters.violations.total(), counters.drops.fragment_stale),
            (0, 1)
        );
    }
}

#[test]
fn a_log_entry_out_of_sequence() {
    for by in [1, u16::MAX, 1 << 14, lm_ebpf::Log::ENTRIES as u16] {
        let mut tampered = bed(WireMode::Lm);
        change_log(&mut tampered, 2, |entry| {
            entry.sequence = entry.sequence.wrapping_add(by)
        });
        expect(tampered, Violation::Sequence);
    }
}

#[test]
fn a_log_entry_of_another_length() {
    let changes: [fn(&mut LogEntry); 4] = [
        |entry| entry.frame_len += 1,
        |entry| entry.frame_len = 0,
        |entry| entry.padding_len = 1,
        |entry| entry.padding_len = 255,
    ];
    for change in changes {
        let mut tampered = bed(WireMode::Lm);
        change_log(&mut tampered, 1, change);
        expect(tampered, Violation::Length);
    }
}

#[test]
fn lengths_that_agree_with_each_other_and_not_with_the_message() {
    for len in [0, 1, 65, 66, 1513, 1600] {
        let mut tampered = bed(WireMode::Lm);
        // Take the window off the ring, and put it back with the first length changed.
        let landing = tampered.hosts[1].landing.as_mut().expect("landing");
        let count = landing.rx.available(64);
        let descriptors: Vec<_> = (0..count).map(|at| landing.rx.packet(at)).collect();
        landing.rx.release(count);
        for (at, descriptor) in descriptors.into_iter().enumerate() {
            let len = if at == 0 { len } else { descriptor.len };
            tampered
                .wire
                .push_descriptor(1, 1, Descriptor { len, ..descriptor });
        }
        change_log(&mut tampered, 0, |entry| entry.frame_len = len as u16);
        // Padding longer than the frame.
        change_log(&mut tampered, 0, |entry| {
            entry.padding_len = if len == 1 { 200 } else { 0 }
        });
        expect(tampered, Violation::Length);
    }
}

#[test]
fn a_descriptor_of_another_place() {
    for (offset, len) in [(0u64, 1514), (64, 1514), (1 << 40, 1514), (u64::MAX >> 16, 9)] {
        let mut tampered = bed(WireMode::Lm);
        let landing = tampered.hosts[1].landing.as_mut().expect("landing");
        let count = landing.rx.available(64);
        landing.rx.release(count);
        tampered
            .wire
            .push_descriptor(1, 1, Descriptor::received(offset, 256, len));
        expect(tampered, Violation::Address);
    }
}

#[test]
fn a_descriptor_twice() {
    let mut tampered = bed(WireMode::Lm);
    let landing = tampered.hosts[1].landing.as_mut().expect("landing");
    let last = landing.rx.available(64) - 1;
    let descriptor = landing.rx.packet(last);
    tampered.wire.push_descriptor(1, 1, descriptor);
    // All that was posted is on the ring: two windows but for the second one's lowest fragment (I5).
    expect(tampered, Violation::Unposted);
}

#[test]
fn a_descriptor_for_which_nothing_is_posted() {
    let mut tampered = bed(WireMode::Lm);
    let message = tampered.recv(1);
    drop(message);
    tampered.completion(0);
    tampered
        .wire
        .push_descriptor(1, 1, Descriptor::received(1 << 20, 256, 1514));
    for _ in 0..100 {
        tampered.round();
    }
    assert_eq!(tampered.hosts[1].counters.violations.total(), 1);
    let (name, count) = tampered.hosts[1]
        .counters
        .violations
        .iter()
        .next()
        .expect("kinds");
    assert_eq!((name, count), ("landing_unposted", 1));
    assert!(tampered.hosts[1].take_message().expect("no failure").is_none());
    let peer = tampered.session(0, WireMode::Lm, 50_000);
    tampered.exchange(0, peer, &noise(3, 50_000));
    tampered.check_memory();
}

/// Announced and not posted, because no memory is free: as bad.
#[test]
fn a_descriptor_before_its_message_has_memory() {
    let mut bed = Bed::new(&BedConfig {
        max_message_len: 60 << 20,
        send_len: 100 << 20,
        ..BedConfig::default()
    });
    let peer = bed.session(0, WireMode::Lm, 40 << 20);
    bed.send(0, peer, &noise(1, 40 << 20), 1);
    let held = bed.recv(1);
    bed.send(0, peer, &noise(2, 40 << 20), 2);
    bed.rounds(50);
    bed.wire
        .push_descriptor(1, 1, Descriptor::received(1 << 20, 256, 1514));
    bed.rounds(50);
    assert_eq!(bed.hosts[1].counters.violations.total(), 1);
    assert!(bed.hosts[1].take_message().is_err());
    assert!(held[..] == noise(1, 40 << 20)[..]);
}

#[test]
fn the_kernel_counted_a_drop() {
    let drops: [fn(&mut crate::xsk::XdpStatistics); 4] = [
        |statistics| statistics.rx_dropped += 1,
        |statistics| statistics.rx_ring_full += 1,
        |statistics| statistics.rx_fill_ring_empty += 1,
        |statistics| statistics.rx_invalid_descriptors += 1,
    ];
    for drop in drops {
        let tampered = bed(WireMode::Lm);
        tampered.wire.with_statistics(1, 1, drop);
        expect(tampered, Violation::Statistics);
    }
}

/// Where the driver runs the gate, which CPU did so says nothing.
#[test]
fn another_processor_ran_the_gate() {
    let mut bed = bed(WireMode::Lm);
    change_log(&mut bed, 5, |entry| entry.cpu = 1);
    let message = bed.recv(1);
    assert!(message[..] == noise(2, LEN)[..]);
}

#[test]
fn the_surviving_header_names_something_else() {
    // Offsets in the frame: LM header of `lm` (type, key, message, index, count), identification and offset of
    // `ipfrag`.
    let places = [
        (WireMode::Lm, vec![42, 44, 46, 53, 57, 61, 65]),
        (WireMode::IpFrag, vec![18, 19, 20, 21]),
    ];
    for (wire, offsets) in places {
        for offset in offsets {
            let mut tampered = bed(wire);
            let address = lowest_packet(&mut tampered) + offset;
            let umem = &tampered.hosts[1].memory.umem();
            let [byte] = umem.read_header::<1>(address);
            umem.copy_to(address, &[byte ^ 0x11]);
            expect(tampered, Violation::Header);
        }
    }
}

/// A packet that the gate accepted and that never reached the ring shifts everything behind it.
#[test]
fn a_packet_lost_behind_the_gate() {
    for (before, lost) in [(0u32, 1u32), (0, 8), (3, 1), (7, 1), (11, 2)] {
        let mut bed = Bed::new(&BedConfig {
            window: 8,
            ..BedConfig::default()
        });
        let peer = bed.session(0, WireMode::Lm, LEN as u64);
        bed.exchange(0, peer, &noise(1, LEN));
        bed.send(0, peer, &noise(2, LEN), 2);
        bed.send(0, peer, &noise(3, LEN), 3);
        let wire = bed.wire.clone();
        let mut seen = 0;
        while bed.hosts[1].counters.violations.total() == 0 && bed.hosts[1].told.failures().count() == 0 {
            let landing = bed.hosts[1].landing.as_ref().expect("landing");
            let landed = landing.rx.accepted() as u32 - COUNT as u32;
            if seen == 0 && landed >= before {
                wire.lose_behind_gate(1, lost);
                seen = 1;
            }
            bed.now_ns += 500_000;
            bed.round();
            assert!(
                bed.hosts[1].told.messages().count() == 0,
                "delivered after a loss"
            );
        }
        let mut failed = 0;
        while failed < 2 {
            match bed.hosts[1].take_message() {
                Err(_) => failed += 1,
                Ok(message) => assert!(message.is_none()),
            }
            bed.round();
        }
        bed.completion(0);
        bed.completion(0);
        let peer = bed.session(0, WireMode::Lm, 50_000);
        bed.exchange(0, peer, &noise(4, 50_000));
        bed.check_memory();
    }
}

/// A violation that comes to light while the session is being ended stops the reading.
#[test]
fn a_violation_found_at_the_end_of_a_session() {
    let mut tampered = bed(WireMode::Lm);
    change_log(&mut tampered, 2, |entry| entry.index ^= 1);
    let peer = tampered.hosts[0].sending.senders()[0];
    let now_ns = tampered.now_ns;
    tampered.hosts[0].end_session(peer, now_ns);
    assert!(matches!(
        tampered.completion(0).outcome,
        Outcome::SessionEnded | Outcome::Incomplete { .. }
    ));
    // The session's end is found first, the packets on the ring after it.
    tampered.hosts[1].receive_control(now_ns);
    assert_eq!(tampered.hosts[1].counters.violations.total(), 1);
    assert!(tampered.hosts[1].take_message().is_err());
    assert!(tampered.hosts[1].take_message().expect("no more").is_none());
    tampered.check_memory();
}
