//! What a receiver says of a session is believed as far as it can be true, to the last packet. Beyond that it is counted, and changes nothing.
#![cfg(test)]

use lm_protocol::control::Ended;
use lm_protocol::geometry::Wire as WireMode;
use lm_protocol::wire::lm::{LmHeader, MissingRange};
use lm_protocol::wire::parse_frame;

use super::bed::{Bed, BedConfig, IPS, data_address, lm_packet, noise};
use crate::PeerId;
use crate::bounds::LANDING_RING_LEN;
use crate::outbound::Outbound;
use crate::simnic::mac_of;

/// Fragments of the message, in windows of 64.
const COUNT: u32 = 500;
const LEN: usize = COUNT as usize * 1448;

/// Host 0 has sent as much of its message as it has credit for, and host 1 has not looked at it.
fn bed() -> (Bed, PeerId) {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, LEN as u64);
    bed.exchange(0, peer, &noise(1, LEN));
    bed.send(0, peer, &noise(2, LEN), 2);
    let before = bed.hosts[0].counters.data_packets_sent;
    for _ in 0..200 {
        bed.alone(0, 1);
        if bed.hosts[0].counters.data_packets_sent > before {
            bed.alone(0, 20);
            return (bed, peer);
        }
        bed.alone(1, 1);
    }
    panic!("no credit");
}

fn outbound(bed: &mut Bed, peer: PeerId) -> &mut Outbound {
    let outbound = bed.hosts[0].peers.at(peer.index).outbound.as_mut();
    outbound.expect("a session")
}

/// Whether host 0 believes what host 1 seems to say.
fn believes(bed: &mut Bed, header: &LmHeader, payload: &[u8]) -> bool {
    let before = bed.hosts[0].counters.drops.implausible;
    let to_0 = bed.hosts[1].addressing_to(data_address(0), mac_of(IPS[0]));
    bed.wire.inject(0, 0, &lm_packet(&to_0, header, payload));
    bed.alone(0, 1);
    match bed.hosts[0].counters.drops.implausible - before {
        0 => true,
        1 => false,
        more => panic!("counted {more} times"),
    }
}

/// Whether host 0 believes that `len` fragments from `first` on are missing, or their digests.
fn believes_missing(bed: &mut Bed, peer: PeerId, manifest: bool, first: u32, len: u32) -> bool {
    let header = LmHeader::Missing {
        session_key: outbound(bed, peer).terms.key,
        message: outbound(bed, peer).next_number - 1,
        ranges: 1,
        manifest,
    };
    believes(bed, &header, &MissingRange { first, len }.encode())
}

#[test]
fn a_credit_goes_as_far_as_a_receivers_rings() {
    let (mut bed, peer) = bed();
    let session = outbound(&mut bed, peer);
    let (sent, announced) = (session.sent_packets(), session.announced);
    let delivered = session.delivered;
    let credit = |packet_limit: u32, delivered: u32, announced: u32| LmHeader::Credit {
        session_key: 0,
        packet_limit,
        delivered,
        announced,
        lands: true,
    };
    let most = LANDING_RING_LEN * 2;
    let cases = [
        (credit(sent.wrapping_sub(most + 1), delivered, announced), false),
        (credit(sent.wrapping_sub(most), delivered, announced), true),
        (credit(sent.wrapping_add(most + 1), delivered, announced), false),
        (credit(sent, delivered.wrapping_add(1), announced), false),
        (credit(sent, delivered, announced.wrapping_add(1)), false),
        (credit(sent, delivered, announced), true),
        (credit(sent.wrapping_add(most), delivered, announced), true),
    ];
    let key = session.terms.key;
    for (mut header, is_believed) in cases {
        if let LmHeader::Credit { session_key, .. } = &mut header {
            *session_key = key;
        }
        assert_eq!(believes(&mut bed, &header, &[]), is_believed, "{header:?}");
    }
}

#[test]
fn what_was_not_sent_is_not_missing() {
    let (mut bed, peer) = bed();
    let session = outbound(&mut bed, peer);
    let window = session.terms.window;
    // All of the message before was sent, too.
    let sent = session.sent_packets() - COUNT;
    assert!((64..COUNT).contains(&sent) && !sent.is_multiple_of(64), "{sent}");
    let (last, next) = (window.index_at(sent - 1, COUNT), window.index_at(sent, COUNT));
    for (first, len, is_believed) in [
        (last, 1, true),
        (next, 1, false),
        (next, 2, false),
        (63, 1, true),
        (63, 2, false),
        (0, 64, true),
        (0, 65, false),
        (5, 0, false),
        (COUNT, 0, false),
        (COUNT - 1, 2, false),
        (COUNT, 1, false),
        (1, u32::MAX, false),
    ] {
        let believes = believes_missing(&mut bed, peer, false, first, len);
        assert_eq!(believes, is_believed, "{len} from {first} on");
    }
}

#[test]
fn what_a_message_does_not_have_has_no_digests() {
    let (mut bed, peer) = bed();
    for (first, len, is_believed) in [
        (COUNT - 1, 1, true),
        (0, COUNT, true),
        (0, COUNT + 1, false),
        (COUNT, 1, false),
        (5, 0, false),
        (COUNT, 0, false),
        (1, u32::MAX, false),
    ] {
        let believes = believes_missing(&mut bed, peer, true, first, len);
        assert_eq!(believes, is_believed, "{len} from {first} on");
    }
}

/// Its first message is confirmed, and its second is announced.
#[test]
fn an_end_is_of_messages_that_were_announced() {
    let (mut bed, peer) = bed();
    let outbound = outbound(&mut bed, peer);
    let session_key = outbound.terms.key;
    for (heard, believed) in [(0, false), (1, true), (2, true), (3, false)] {
        let ended = Ended {
            session_key,
            delivered: 1,
            heard: Some(heard),
        };
        assert_eq!(outbound.ended(&ended).is_ok(), believed, "heard of {heard}");
    }
}

/// Behind a lost announcement come others, and words of more packets than were announced: neither end is to blame for that.
#[test]
fn a_lost_announcement_is_no_fault() {
    let mut early = 0;
    for lost in 1..8 {
        let mut bed = Bed::new(&BedConfig::default());
        let peer = bed.session(0, WireMode::Lm, 3000);
        let mut announcements = 0;
        bed.wire.set_filter(move |from, packet| {
            let header = parse_frame(packet).ok().and_then(|parsed| parsed.lm().copied());
            let is_one = matches!(header, Some(LmHeader::Announce { entries: 1.., .. })) && from == 0;
            announcements += u32::from(is_one);
            !is_one || announcements != lost
        });
        for tag in 0..20 {
            bed.send(0, peer, &noise(tag, 3000), tag);
            bed.round();
        }
        for tag in 0..20 {
            assert!(bed.recv(1)[..] == noise(tag, 3000)[..]);
            bed.completion(0);
        }
        early += bed.hosts[1].counters.drops.announcement_early;
        bed.hosts[1].counters.drops.announcement_early = 0;
        assert_eq!(bed.wire.counters().lost, 1);
        assert_eq!([0, 1].map(|host| bed.hosts[host].notices.lines), [0, 0]);
        bed.check_clean();
        bed.check_memory();
    }
    assert!(early >= 7, "{early}");
}
