//! REALTIME and RT_REPORT packets.

use std::time::Duration;

use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Clock, LmError, RealTimePacket, RtReport};
use proptest::prelude::*;

fn clock() -> impl Strategy<Value = Clock> {
    prop_oneof![Just(Clock::Host), Just(Clock::RealTime), Just(Clock::Tai)]
}

/// Bytes behind the header, as they lie on the wire.
#[test]
fn the_bytes_are_those_of_the_picture() {
    let packet = RealTimePacket {
        message: 0x0102_0304,
        count: 1,
        deadline: Some(Duration::from_micros(0x0506)),
        sent_at: Time::from_nanos(0x1112_1314_1516_1718),
        message_len: 2,
        port: 0x2122,
        priority: 7,
        clock: Clock::Tai,
        payload: &[0xaa, 0xbb],
        ..RealTimePacket::default()
    };
    assert_eq!(packet.words(), [0x0102_0304, 1, 0x0506]);
    let tail = [
        0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0, 0, 0, 2, 0, 0, 0, 0, 0x21, 0x22, 7, 2, 0, 0, 0, 0,
    ];
    assert_eq!(packet.tail(), tail);
    let report = RtReport {
        newest: 9,
        whole: 8,
        late: 7,
        lost: 6,
        delay: Duration::from_nanos(5),
        interval: Duration::from_micros(4),
        port: 3,
        refused: true,
        sent_at: Time::from_nanos(2),
        held: Duration::from_nanos(1),
    };
    let (words, bytes) = report.write();
    assert_eq!(words, [9, 8, 7]);
    let expected = [
        0, 0, 0, 6, 0, 0, 0, 5, 0, 0, 0, 4, 0, 3, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1,
    ];
    assert_eq!(bytes, expected);
}

#[test]
fn what_lies_outside_its_message_is_refused() {
    let read = |words, tail: &[u8]| RealTimePacket::read(words, tail).map(|packet| packet.count);
    let mut tail = [0; RealTimePacket::TAIL_LEN];
    assert_eq!(read([1, 1, 0], &tail), Ok(1));
    assert_eq!(read([1, 0, 0], &tail), Err(LmError::Index), "no fragment of none");
    assert_eq!(
        read([1, 3 << 16 | 3, 0], &tail),
        Err(LmError::Index),
        "the fourth of three"
    );
    assert_eq!(read([1, 1, 0], &tail[1..]), Err(LmError::Length));
    tail[11] = 1;
    assert_eq!(
        read([1, 1, 0], &tail),
        Err(LmError::Index),
        "all of it, and a byte is missing"
    );
    assert_eq!(read([1, 2, 0], &tail), Ok(2));
    tail[18] = 8;
    assert_eq!(read([1, 2, 0], &tail), Err(LmError::Length), "no such priority");
    (tail[18], tail[19]) = (7, 3);
    assert_eq!(read([1, 2, 0], &tail), Err(LmError::Length), "no such clock");
}

/// A fragment of a message of `0, 1, 2, …`, as it would be cut into pieces of `stride` bytes.
fn fragment(message: &[u8], stride: usize, index: usize) -> RealTimePacket<'_> {
    let offset = index * stride;
    RealTimePacket {
        message: 1,
        index: index as u16,
        count: message.len().div_ceil(stride) as u16,
        message_len: message.len() as u32,
        offset: offset as u32,
        port: 1,
        payload: &message[offset..message.len().min(offset + stride)],
        ..RealTimePacket::default()
    }
}

#[test]
fn fragments_lie_one_behind_the_other() {
    let message = [0; 100];
    for stride in 1..100 {
        for index in 0..100_usize.div_ceil(stride) {
            let packet = fragment(&message, stride, index);
            assert_eq!(packet.stride(), Some(stride as u32), "{packet:?}");
            let moved = [
                RealTimePacket {
                    offset: packet.offset.wrapping_add(1),
                    ..packet
                },
                RealTimePacket {
                    offset: packet.offset.wrapping_sub(1),
                    ..packet
                },
            ];
            for other in moved {
                assert_eq!(other.stride(), None, "{other:?}");
            }
            let longer = RealTimePacket {
                message_len: 100 + stride as u32,
                ..packet
            };
            assert_eq!(longer.stride(), None, "{longer:?}");
        }
    }
    assert_eq!(fragment(&message, 100, 0).stride(), None, "all of it");
    // Nothing would be left for the last one.
    let none_left = RealTimePacket {
        message_len: 90,
        ..fragment(&message, 10, 3)
    };
    assert_eq!(none_left.stride(), None);
    let limits = RealTimePacket {
        index: 65_534,
        count: u16::MAX,
        offset: u32::MAX,
        message_len: u32::MAX,
        payload: &[],
        ..none_left
    };
    assert_eq!(limits.stride(), None);
}

proptest! {
    /// Whatever fragments say, those of one shape have places of their own, inside their message.
    #[test]
    fn fragments_of_one_shape_do_not_overlap(
        message_len in 1..300u32,
        count in 1..20u16,
        many in proptest::collection::vec((0..20u16, 0..300u32, 0..40usize), 2..60),
    ) {
        let bytes = [0; 40];
        let mut places = std::collections::BTreeMap::new();
        for (index, offset, len) in many {
            let packet = RealTimePacket {
                index,
                count,
                message_len,
                offset,
                payload: &bytes[..len],
                ..fragment(&bytes, 40, 0)
            };
            let bytes = [packet.payload, &packet.tail()].concat();
            let Ok(packet) = RealTimePacket::read(packet.words(), &bytes) else { continue };
            let Some(stride) = packet.stride() else { continue };
            let place = (packet.offset, packet.payload.len());
            prop_assert_eq!(*places.entry((stride, packet.index)).or_insert(place), place);
            let end = u32::from(packet.index + 1) * stride;
            prop_assert_eq!(packet.offset + packet.payload.len() as u32, end.min(message_len));
        }
    }
    #[test]
    fn packets_are_read_as_they_were_written(
        message: u32,
        count in 1..=47u16,
        deadline_us in proptest::option::of(1..=u32::MAX),
        sent_at: u64,
        before in 0..60_000u32,
        behind in 0..60_000u32,
        port: u16,
        priority in 0..=7u8,
        clock in clock(),
        payload in proptest::collection::vec(any::<u8>(), 0..1400),
    ) {
        let (before, behind) = if count == 1 { (0, 0) } else { (before, behind) };
        let packet = RealTimePacket {
            message,
            index: count / 2,
            count,
            deadline: deadline_us.map(|micros| Duration::from_micros(micros.into())),
            sent_at: Time::from_nanos(sent_at),
            message_len: before + payload.len() as u32 + behind,
            offset: before,
            port,
            priority,
            clock,
            payload: &payload,
        };
        let bytes = [&payload[..], &packet.tail()].concat();
        prop_assert_eq!(RealTimePacket::read(packet.words(), &bytes), Ok(packet));
    }

    #[test]
    fn reports_are_read_as_they_were_written(words: [u32; 3], bytes: [u8; RtReport::LEN]) {
        let mut bytes = bytes;
        (bytes[14], bytes[15]) = (0, bytes[15] & 1);
        let report = RtReport::read(words, &bytes).expect("its length is right");
        prop_assert_eq!(report.write(), (words, bytes));
    }

    /// Whatever comes, what is read lies inside its message.
    #[test]
    fn any_bytes_are_read_or_refused(words: [u32; 3], bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(packet) = RealTimePacket::read(words, &bytes) {
            prop_assert!(packet.index < packet.count && packet.priority <= 7);
            let end = u64::from(packet.offset) + packet.payload.len() as u64;
            prop_assert!(end <= packet.message_len.into());
        }
        prop_assert_eq!(RtReport::read(words, &bytes).is_ok(), bytes.len() == RtReport::LEN);
    }
}
