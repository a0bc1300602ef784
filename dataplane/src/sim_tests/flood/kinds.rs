//! The kinds of floods: what each packet is, and the one counter that it moves.

use std::net::SocketAddrV4;

use lm_protocol::control::{
    Ask, Challenge, ControlMessage, End, Ended, Grant, Proof, Reject, RejectReason, Request, WORD_LEN,
};
use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};
use lm_protocol::integrity::Integrity;
use lm_protocol::window::WindowShape;
use lm_protocol::wire::lm::{AnnounceEntry, EagerAcknowledgement, LmHeader, MissingRange, TYPE_WINDOWS};

use super::{LEN, STRANGER, Scene, control, packet};
use crate::landing::Inbound;
use crate::sim_tests::bed::{PORT, sender_id};

/// What one flood is made of: the `n`-th packet, from an address, to a host whose session has that key.
type Make = fn(&Scene, usize, SocketAddrV4, u64) -> Vec<u8>;

pub(super) struct Flood {
    pub(super) name: &'static str,
    /// 0: the sender of the transfer, 1: its receiver.
    pub(super) to: usize,
    pub(super) make: Make,
    /// Counters that move, when it comes from the honest peer and from a stranger.
    pub(super) counters: [&'static str; 2],
}

fn inbound(scene: &Scene) -> Option<&Inbound> {
    let landing = scene.bed.hosts[1].landing.as_ref()?;
    landing.sessions.iter().next()
}

fn sent_packets(scene: &Scene) -> u32 {
    inbound(scene).map_or(0, |inbound| inbound.progress.accepted_packets())
}

pub(super) fn announced(scene: &Scene) -> u32 {
    inbound(scene).map_or(0, |inbound| inbound.order.announced())
}

fn entry(len: u64) -> [u8; AnnounceEntry::LEN] {
    AnnounceEntry {
        len,
        tag: 7,
        delivery: None,
        windows_released: AnnounceEntry::ALL_WINDOWS,
        has_facts: false,
    }
    .encode()
}

/// An announcement `ahead` messages too far, of one message of that length if any, whose sender claims `sent` packets too many.
fn announce(
    scene: &Scene,
    to: usize,
    from: SocketAddrV4,
    ahead: u32,
    len: Option<u64>,
    sent: u32,
) -> Vec<u8> {
    let header = LmHeader::Announce {
        session_key: scene.key,
        first: announced(scene).wrapping_add(ahead),
        entries: len.iter().len() as u32,
        sent: sent_packets(scene).wrapping_add(sent),
    };
    packet(
        to,
        from,
        PORT,
        &header,
        &len.map_or(Vec::new(), |len| entry(len).to_vec()),
    )
}

/// A small message of host 0's incarnation, or another.
pub(super) fn eager(
    to: usize,
    from: SocketAddrV4,
    sender_id: u64,
    number: u32,
    digested: bool,
    acknowledges: Option<EagerAcknowledgement>,
) -> Vec<u8> {
    let header = LmHeader::Eager {
        sender_id,
        number,
        tag: number.into(),
        digested,
        acknowledges,
    };
    packet(to, from, PORT, &header, &[0x5a; 64])
}

/// A WINDOWS packet.
fn windows(key: u64, to: usize, from: SocketAddrV4, words: [u32; 3], payload: &[u8]) -> Vec<u8> {
    let header = LmHeader::Extension {
        packet_type: TYPE_WINDOWS,
        key,
        words,
    };
    packet(to, from, PORT, &header, payload)
}

pub(in crate::sim_tests) fn request(n: u64, from: SocketAddrV4) -> ControlMessage {
    ControlMessage::Request(Request {
        sender_id: n,
        data_port: from.port(),
        max_message_len: LEN as u64,
        ..Request::default()
    })
}

pub(crate) fn grant(session_key: u64) -> ControlMessage {
    ControlMessage::Grant(Grant {
        session_key,
        data_port: PORT,
        layout: Layout::new(WireMode::Lm, 1500, LinkShape::IPV4).expect("a legal MTU"),
        landing_queue: 1,
        tx_queue: None,
        prefix: 0,
        frames_per_packet: 1,
        fillers: 0,
        repeats_apart: false,
        landing_port: None,
        max_message_len: u64::MAX,
        window: WindowShape::DEFAULT,
        packet_limit: u32::MAX,
        lease_ms: u32::MAX,
        first_message: 0,
        lands: true,
        capabilities: 0,
    })
}

pub(super) const FLOODS: &[Flood] = &[
    Flood {
        name: "noise instead of a header",
        to: 1,
        make: |_, to, from, n| {
            let header = LmHeader::Control {
                request_id: n as u32,
                kind: 0,
            };
            let mut bytes = packet(to, from, PORT, &header, &[]);
            // The type: none that there is.
            bytes[42] = bytes[42] & 0xf0 | 0x0d;
            bytes
        },
        counters: ["malformed", "malformed"],
    },
    Flood {
        name: "another version",
        to: 1,
        make: |scene, to, from, n| {
            let mut bytes = announce(scene, to, from, n as u32, None, 0);
            bytes[42] = bytes[42] & 0x0f | 0x70;
            bytes
        },
        counters: ["other_version", "other_version"],
    },
    Flood {
        name: "packets changed on the way",
        to: 1,
        make: |scene, to, from, n| {
            let mut bytes = announce(scene, to, from, 0, Some(LEN as u64), 0);
            // A byte of the digest or of the entry, but not of its opaque length.
            let behind = match n as usize % 30 {
                behind @ 0..12 => behind,
                behind => behind + 2,
            };
            let at = bytes.len() - 1 - behind;
            bytes[at] ^= 1 << (n % 8);
            bytes
        },
        counters: ["corrupt", "corrupt"],
    },
    Flood {
        name: "eager messages without the digest that their sender promises",
        to: 1,
        make: |_, to, from, n| {
            let id = sender_id(0, Integrity::Manifest);
            eager(to, from, id, n as u32, false, None)
        },
        counters: ["corrupt", "corrupt"],
    },
    Flood {
        name: "manifests that nobody asked for",
        to: 1,
        make: |scene, to, from, n| {
            let header = LmHeader::Manifest {
                session_key: scene.key,
                message: announced(scene).wrapping_sub(n as u32 % 3),
                first: 0,
                count: 28,
            };
            packet(to, from, PORT, &header, &[0x5a; 29 * 8])
        },
        counters: ["late", "wrong_key"],
    },
    Flood {
        name: "manifests of more fragments than there are",
        to: 1,
        make: |scene, to, from, n| {
            let header = LmHeader::Manifest {
                session_key: scene.key,
                message: announced(scene).wrapping_sub(1),
                first: 1 << 20,
                count: u32::MAX - n as u32,
            };
            packet(to, from, PORT, &header, &[0x5a; 100 * 8])
        },
        counters: ["late", "wrong_key"],
    },
    Flood {
        name: "digests of windows far ahead, every other one's of another session",
        to: 1,
        make: |scene, to, from, n| {
            let message = announced(scene) + 1000 + n as u32;
            windows(scene.key ^ (n & 1), to, from, [message, 0, 2], &[0x5a; 2 * 8])
        },
        counters: ["unexpected", "unexpected"],
    },
    Flood {
        name: "requests for digests of windows that no message has",
        to: 0,
        make: |scene, to, from, n| {
            windows(
                scene.key,
                to,
                from,
                [announced(scene) + 100, n as u32, u32::MAX],
                &[],
            )
        },
        counters: ["implausible", "unexpected"],
    },
    Flood {
        name: "requests for digests of what was never sent",
        to: 0,
        make: |scene, to, from, n| {
            let range = MissingRange {
                first: n as u32,
                len: u32::MAX,
            };
            let header = LmHeader::Missing {
                session_key: scene.key,
                message: announced(scene) + 100,
                ranges: 1,
                manifest: true,
            };
            packet(to, from, PORT, &header, &range.encode())
        },
        counters: ["implausible", "wrong_key"],
    },
    Flood {
        name: "fragments with another key",
        to: 1,
        make: |scene, to, from, n| {
            let header = LmHeader::Data {
                session_key: scene.key ^ (1 + n),
                message: announced(scene),
                index: 0,
                count: 28,
            };
            packet(to, from, PORT, &header, &[0x5a; 1448])
        },
        counters: ["fragment_passed", "fragment_passed"],
    },
    Flood {
        name: "fragments behind the end of their message",
        to: 1,
        make: |scene, to, from, n| {
            let header = LmHeader::Data {
                session_key: scene.key,
                message: announced(scene),
                index: 28 + n as u32,
                count: 28,
            };
            packet(to, from, PORT, &header, &[0x5a; 1448])
        },
        counters: ["malformed", "malformed"],
    },
    Flood {
        name: "announcements out of turn",
        to: 1,
        make: |scene, to, from, n| announce(scene, to, from, 500 + n as u32, Some(LEN as u64), 0),
        counters: ["announcement_refused", "wrong_key"],
    },
    Flood {
        name: "announcements before which others are missing",
        to: 1,
        make: |scene, to, from, _| announce(scene, to, from, 1, Some(LEN as u64), 0),
        counters: ["announcement_early", "wrong_key"],
    },
    Flood {
        name: "announcements of too long messages",
        to: 1,
        make: |scene, to, from, n| announce(scene, to, from, 0, Some(u64::MAX - n), 0),
        counters: ["announcement_refused", "wrong_key"],
    },
    Flood {
        name: "claims to have sent what was never announced",
        to: 1,
        make: |scene, to, from, n| announce(scene, to, from, 0, None, (1 << 20) + n as u32),
        counters: ["implausible", "wrong_key"],
    },
    Flood {
        name: "requests for sessions",
        to: 1,
        make: |_, to, from, n| {
            let known = sender_id(0, Integrity::Manifest);
            control(to, from, n as u32, &request(known, from))
        },
        counters: ["request_refused", "challenged"],
    },
    Flood {
        name: "requests of incarnations that there are not",
        to: 1,
        make: |_, to, from, n| control(to, from, n as u32, &request(n, from)),
        counters: ["challenged", "challenged"],
    },
    Flood {
        name: "proofs that answer no challenge",
        to: 1,
        make: |_, to, from, n| {
            let proof = Proof {
                sender_id: n << 40,
                cookie: n,
                data_port: from.port(),
                uncompleted_max: 0,
                word: [0; WORD_LEN],
            };
            control(to, from, n as u32, &ControlMessage::Proof(proof))
        },
        counters: ["unexpected", "unexpected"],
    },
    Flood {
        name: "challenges of who was sent nothing",
        to: 0,
        make: |_, to, from, n| {
            let challenge = Challenge {
                sender_id: n << 40,
                cookie: n,
                challenger_id: n,
                ask: Ask::Cookie,
                uncompleted_max: 0,
            };
            control(to, from, n as u32, &ControlMessage::Challenge(challenge))
        },
        counters: ["unexpected", "unexpected"],
    },
    Flood {
        name: "ends of sessions that there are not",
        to: 1,
        make: |scene, to, from, n| {
            let end = End {
                session_key: scene.key ^ (1 + n),
                messages: 1,
            };
            control(to, from, n as u32, &ControlMessage::End(end))
        },
        counters: ["wrong_key", "wrong_key"],
    },
    Flood {
        name: "eager messages out of turn",
        to: 1,
        make: |_, to, from, n| {
            let id = sender_id(0, Integrity::Manifest);
            eager(to, from, id, 1_000_000 + n as u32, true, None)
        },
        counters: ["eager_out_of_order", "challenged"],
    },
    Flood {
        name: "credit without measure",
        to: 0,
        make: |scene, to, from, n| {
            let header = LmHeader::Credit {
                session_key: scene.key,
                packet_limit: sent_packets(scene).wrapping_add(1 << 24).wrapping_add(n as u32),
                delivered: 0,
                announced: 0,
                lands: true,
            };
            packet(to, from, PORT, &header, &[])
        },
        counters: ["implausible", "wrong_key"],
    },
    Flood {
        name: "confirmations of messages never sent",
        to: 0,
        make: |scene, to, from, n| {
            let header = LmHeader::Credit {
                session_key: scene.key,
                packet_limit: sent_packets(scene),
                delivered: announced(scene) + 1000 + n as u32,
                announced: announced(scene),
                lands: true,
            };
            packet(to, from, PORT, &header, &[])
        },
        counters: ["implausible", "wrong_key"],
    },
    Flood {
        name: "acknowledgements of eager messages never sent",
        to: 0,
        make: |_, to, from, n| {
            let header = LmHeader::EagerAck {
                sender_id: sender_id(0, Integrity::Manifest),
                next: 5000 + n as u32,
                limit: 6000 + n as u32,
            };
            packet(to, from, PORT, &header, &[])
        },
        counters: ["implausible", "unexpected"],
    },
    Flood {
        name: "messages that acknowledge what was never sent",
        to: 0,
        make: |_, to, from, n| {
            let acknowledgement = EagerAcknowledgement {
                // A stranger does not know the incarnation.
                sender_id: sender_id(0, Integrity::Manifest) + 2 * u64::from(*from.ip() == STRANGER),
                next: 5000 + n as u32,
                limit: 6000 + n as u32,
            };
            let id = sender_id(1, Integrity::Manifest);
            eager(to, from, id, 1_000_000 + n as u32, true, Some(acknowledgement))
        },
        // What another incarnation is told is not looked at, and who is not known is not heard.
        counters: ["implausible", "challenged"],
    },
    Flood {
        name: "requests for fragments that no message has",
        to: 0,
        make: |scene, to, from, n| {
            let ranges: Vec<u8> = (0..60)
                .flat_map(|at| {
                    MissingRange {
                        first: 1000 * at + n as u32,
                        len: u32::MAX,
                    }
                    .encode()
                })
                .collect();
            let header = LmHeader::Missing {
                session_key: scene.key,
                message: announced(scene) + 100,
                ranges: 60,
                manifest: false,
            };
            packet(to, from, PORT, &header, &ranges)
        },
        counters: ["implausible", "wrong_key"],
    },
    Flood {
        name: "grants that nobody asked for",
        to: 0,
        make: |_, to, from, n| control(to, from, n as u32, &grant(n)),
        counters: ["control_unexpected", "control_unexpected"],
    },
    Flood {
        name: "refusals that nobody asked for",
        to: 0,
        make: |_, to, from, n| {
            let reject = Reject {
                reason: RejectReason::Busy,
                version: 1,
                retry_after_ms: u32::MAX,
                limit: 0,
            };
            control(to, from, n as u32, &ControlMessage::Reject(reject))
        },
        counters: ["control_unexpected", "control_unexpected"],
    },
    Flood {
        name: "ends of other sessions",
        to: 0,
        make: |scene, to, from, n| {
            let ended = Ended {
                session_key: scene.key ^ (1 + n),
                delivered: u32::MAX,
                heard: Some(0),
            };
            control(to, from, n as u32, &ControlMessage::Ended(ended))
        },
        counters: ["control_unexpected", "control_unexpected"],
    },
];
