//! Random steps for the gate and its model: a string of bytes becomes packets, sessions and posted frames. The
//! differential test feeds it from seeds, the fuzz target from a fuzzer.

use lm_ebpf::Verdict;
use lm_protocol::geometry::Wire;
use lm_protocol::landing::SessionAdmission;

use super::packet::{CONTROL_PORT, LOCAL, Packet};
use super::pair::{GENERAL, LANDING, Pair, ipfrag_session, lm_session};

/// Bytes as a source of choices; zeros when they are used up.
pub(crate) struct Choices<'a>(pub(crate) &'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let (&first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        first
    }

    /// A number below `bound`, at most 256.
    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }
}

/// Opens a session that the bytes choose, runs packets until they are used up, and closes it. Returns how many landed.
pub(crate) fn run(pair: &mut Pair, bytes: &[u8]) -> usize {
    let mut choices = Choices(bytes);
    let first = session(&mut choices);
    // Another sender, at another place of the same queue.
    let second = SessionAdmission {
        key: first.key ^ 6,
        wire: Wire::Lm,
        ..session(&mut choices)
    };
    let second = SessionAdmission {
        header_len: lm_session().header_len,
        ..second
    };
    let sessions = [first, second];
    let mut frames = pair.log.producer() + choices.below(64) as u64;
    let mut limits = sessions.map(|session| {
        (session.first_message)
            .wrapping_add(choices.below(4) as u32)
            .wrapping_sub(1)
    });
    for (session, limit) in sessions.iter().zip(limits) {
        pair.open(session, 0, 0);
        pair.limit(session, limit);
    }
    // A full fragment takes one, two or three frames then, and a short one fewer.
    let capacity = [0, 0, 0, 600, 1000][choices.below(5)];
    pair.set_capacity(capacity);
    let producer = pair.log.producer();
    describe(pair, producer..frames, capacity, &mut choices);
    pair.post(frames);
    let mut places = sessions.map(|session| (session.first_message, 3));
    let mut landed = 0;
    while !choices.0.is_empty() {
        match choices.below(32) {
            0 => {
                let before = frames;
                frames += choices.below(128) as u64;
                describe(pair, before..frames, capacity, &mut choices);
                pair.post(frames);
            }
            1 => {
                let which = choices.below(2);
                limits[which] = limits[which].wrapping_add(choices.below(6) as u32);
                pair.limit(&sessions[which], limits[which]);
            }
            2 => {
                let registered = choices.below(4) != 0;
                pair.set_xsk(LANDING, registered);
            }
            _ => {
                let which = usize::from(choices.below(4) == 0);
                let frame = frame(&mut choices, &sessions[which], &mut places[which]);
                let queue = if choices.below(8) == 0 { GENERAL } else { LANDING };
                landed += usize::from(pair.run(queue, &frame) == Verdict::RedirectLanding);
            }
        }
    }
    pair.set_xsk(LANDING, true);
    pair.set_capacity(0);
    pair.close();
    landed
}

/// Says of each frame that is about to be posted which packets it is for.
fn describe(pair: &mut Pair, positions: std::ops::Range<u64>, capacity: u32, choices: &mut Choices<'_>) {
    for position in positions.filter(|_| capacity > 0) {
        let frames = 1514_u32.div_ceil(capacity) as u8;
        match choices.below(8) {
            0 => pair.set_slot(position, choices.below(4) as u8, choices.word() as u16),
            1 => pair.set_slot(position, 1, 1514),
            _ => pair.set_slot(position, frames, 1530),
        }
    }
}

fn session(choices: &mut Choices<'_>) -> SessionAdmission {
    let lm = choices.below(3) != 0;
    let tag = if choices.below(4) == 0 { 4 } else { 0 };
    let base = if lm { lm_session() } else { ipfrag_session() };
    SessionAdmission {
        header_len: base.header_len + tag,
        payload_len: if choices.below(2) == 0 {
            base.payload_len
        } else {
            64
        },
        window_fragments: 1 << choices.below(32),
        first_message: match choices.below(3) {
            0 => 10,
            1 => u32::MAX - choices.below(3) as u32,
            _ => choices.word(),
        },
        ..base
    }
}

/// A packet near the place that the session has reached, mostly legal, then perhaps bent.
fn frame(choices: &mut Choices<'_>, session: &SessionAdmission, place: &mut (u32, u32)) -> Vec<u8> {
    const COUNT: u32 = 11;
    match choices.below(8) {
        0 => place.0 = place.0.wrapping_add(choices.below(3) as u32).wrapping_sub(1),
        1 => place.1 = choices.below(COUNT as usize + 1) as u32,
        2 => place.1 = place.1.wrapping_add(choices.below(8) as u32),
        3 => {}
        _ if place.1 == 0 => *place = (place.0.wrapping_add(1), COUNT - 1),
        _ => place.1 -= 1,
    }
    let (message, index) = *place;
    let full_len = usize::from(session.payload_len);
    let is_last = index == COUNT - 1;
    let short_len = if is_last {
        1 + choices.below(full_len.min(256))
    } else {
        full_len
    };
    let mut packet = match (session.wire, choices.below(16)) {
        (_, 0) => Packet::lm(choices.byte() & 15, choices.below(100)),
        (Wire::Lm, _) => Packet::data(message, index, COUNT, short_len),
        (Wire::IpFrag, _) => {
            let offset = (index as usize * full_len) as u16 & 0xfff8;
            Packet::ip_fragment(
                message as u16,
                offset,
                !is_last,
                if offset == 0 { full_len } else { short_len },
            )
        }
    };
    packet.key = session.key;
    if matches!(session.header_len, 70 | 46) {
        packet.vlan = Some(5);
    }
    for _ in 0..[0, 0, 0, 0, 0, 1, 1, 2][choices.below(8)] {
        bend(&mut packet, choices);
    }
    let mut frame = packet.bytes();
    match choices.below(16) {
        0 => {
            let at = choices.below(frame.len().min(90));
            frame[at] ^= 1 << choices.below(8);
        }
        1 => frame.truncate(14 + choices.below(90).min(frame.len() - 14)),
        _ => {}
    }
    frame
}

fn bend(packet: &mut Packet, choices: &mut Choices<'_>) {
    match choices.below(18) {
        0 => packet.vlan = if packet.vlan.is_some() { None } else { Some(0x2001) },
        1 => packet.version_words = choices.byte(),
        2 => packet.total_len = Some(choices.word() as u16),
        3 => packet.fragment = choices.word() as u16,
        4 => packet.protocol = choices.byte(),
        5 => packet.source = LOCAL,
        6 => packet.destination = [choices.byte(), 0, 0, 1].into(),
        7 => packet.source_port ^= u16::from(choices.byte()),
        8 => packet.destination_port = CONTROL_PORT ^ choices.below(4) as u16,
        9 => packet.udp_len = Some(choices.word() as u16),
        10 => packet.version_type = choices.byte(),
        11 => packet.lm_payload_len = Some(choices.word() as u16),
        12 => packet.key ^= 1 << choices.below(64),
        13 => packet.message = choices.word(),
        14 => packet.index = choices.word(),
        15 => packet.count = choices.word(),
        16 => packet.payload_len = choices.below(256) * 8,
        _ => packet.trailer_len = choices.below(64),
    }
}
