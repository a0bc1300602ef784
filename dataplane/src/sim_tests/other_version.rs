//! The frozen version 1 against this one: what its programs said is taken from a recording, and what they understand of the answers
//! is looked at with its own numbers. `version1.txt` was recorded from lm-send and lm-recv of 1dd5072 in two network namespaces
//! (`10.9.0.1` to `10.9.0.2`), a line for each kind of datagram.

#![cfg(test)]

use std::net::SocketAddrV4;
use std::sync::{Arc, Mutex};

use super::bed::{Bed, BedConfig, IPS, PORT, noise};
use crate::connect::{ConnectError, ConnectOptions};
use crate::simnic::datagram::write_datagram;
use lm_protocol::control::RejectReason;

/// Of version 1's program that sends.
const ITS_PORT: u16 = 40_000;

/// What all versions have in common, as version 1 wrote it down.
mod version1 {
    pub(super) const VERSION: u8 = 1;
    pub(super) const HEADER_LEN: usize = 24;
    pub(super) const TYPE_EAGER: u8 = 2;
    pub(super) const TYPE_CONTROL: u8 = 15;
    pub(super) const KIND_REQUEST: u8 = 1;
    pub(super) const KIND_END: u8 = 2;
    pub(super) const KIND_REJECT: u8 = 4;
    pub(super) const REASON_VERSION: u8 = 1;
}

struct Recorded {
    what: &'static str,
    bytes: Vec<u8>,
}

fn recorded() -> Vec<Recorded> {
    let bytes = |hex: &str| {
        let digits = hex
            .as_bytes()
            .chunks(2)
            .map(|pair| std::str::from_utf8(pair).expect("ASCII"));
        digits
            .map(|pair| u8::from_str_radix(pair, 16).expect("two digits"))
            .collect()
    };
    let recorded = include_str!("other_version/version1.txt").lines().map(|line| {
        let [_, what, hex] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("three words: {line}");
        };
        Recorded {
            what,
            bytes: bytes(hex),
        }
    });
    recorded.collect()
}

/// The control packets that host 1 sends.
fn sent_by_host_1(bed: &Bed) -> Arc<Mutex<Vec<Vec<u8>>>> {
    let sent = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&sent);
    bed.wire.set_filter(move |from, packet| {
        if from == 1 && opened(packet).2[0] & 0xf == version1::TYPE_CONTROL {
            seen.lock().expect("one thread").push(packet.clone());
        }
        true
    });
    sent
}

/// Ports and payload of a UDP packet.
fn opened(packet: &[u8]) -> (u16, u16, &[u8]) {
    let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
    (port(34), port(36), &packet[42..])
}

/// Whoever begins something is told, at either port; nothing else is answered. One line here, however often it comes.
#[test]
fn version_1_is_told_of_version_2() {
    let mut told = Vec::new();
    for Recorded { what, bytes } in recorded() {
        let is_control = bytes[0] & 0xf == version1::TYPE_CONTROL;
        let is_beginning = match is_control {
            true => matches!(bytes[8], version1::KIND_REQUEST | version1::KIND_END),
            false => bytes[0] & 0xf == version1::TYPE_EAGER,
        };
        let ports: &[u16] = if is_control { &[PORT, PORT + 1] } else { &[PORT] };
        for port in ports {
            let answers = answers_to(&bytes, *port, what);
            assert_eq!(answers.len(), if is_beginning { TIMES } else { 0 }, "{what}");
            for answer in answers {
                let (from_port, to_port, answer) = opened(&answer);
                assert_eq!((from_port, to_port), (*port, ITS_PORT));
                assert_eq!(answer[0], (version1::VERSION + 1) << 4 | version1::TYPE_CONTROL);
                assert_eq!(answer.len(), version1::HEADER_LEN + usize::from(answer[3]));
                assert!(
                    !is_control || answer[4..8] == bytes[4..8],
                    "the number of the request"
                );
                assert_eq!(answer[8], version1::KIND_REJECT);
                let told = (answer[24], answer[25]);
                assert_eq!(told, (version1::REASON_VERSION, version1::VERSION + 1));
            }
            told.extend(is_beginning.then_some(what));
        }
    }
    assert_eq!(told, ["request", "request", "end", "end", "eager", "eager"]);
}

/// How often a datagram comes.
const TIMES: usize = 5;

/// What host 1 answers to a datagram that comes to this port of its.
fn answers_to(datagram: &[u8], port: u16, what: &str) -> Vec<Vec<u8>> {
    let mut bed = Bed::new(&BedConfig::default());
    let sent = sent_by_host_1(&bed);
    assert_eq!(datagram[0] >> 4, version1::VERSION);
    for _ in 0..TIMES {
        inject(&bed, ITS_PORT, port, datagram);
        bed.rounds(20);
    }
    assert_eq!(bed.hosts[1].counters.drops.other_version, TIMES as u64, "{what}");
    assert_eq!(bed.hosts[1].notices.lines, 1, "{what}");
    std::mem::take(&mut *sent.lock().expect("one thread"))
}

fn inject(bed: &Bed, from_port: u16, to_port: u16, datagram: &[u8]) {
    let (from, to) = (
        SocketAddrV4::new(IPS[0], from_port),
        SocketAddrV4::new(IPS[1], to_port),
    );
    let mut packet = Vec::new();
    write_datagram(&mut packet, from, to, datagram);
    bed.wire.inject(1, 0, &packet);
}

/// A peer that was heard a moment ago speaks our version; after a while it may have been replaced.
#[test]
fn what_was_changed_on_the_way_is_not_answered() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.resolve(0);
    bed.exchange(0, peer, &noise(1, 100));
    bed.rounds(100);
    let sent = sent_by_host_1(&bed);
    let eager = recorded().into_iter().find(|recorded| recorded.what == "eager");
    let eager = eager.expect("a small message").bytes;
    for answers in [0, 1] {
        inject(&bed, PORT, PORT, &eager);
        bed.rounds(20);
        assert_eq!(sent.lock().expect("one thread").len(), answers);
        bed.now_ns += 1_000_000_000;
    }
}

/// Version 1's answer to a request of ours ends it, and that is all that is said.
#[test]
fn version_1s_answer_ends_a_request() {
    let mut bed = Bed::new(&BedConfig::default());
    let answer = recorded().into_iter().find(|recorded| recorded.what == "reject");
    let answer = answer.expect("a rejection").bytes;
    bed.wire.set_filter(move |from, packet| {
        let (from_port, to_port, ours) = opened(packet);
        if from == 1 && from_port == PORT + 1 {
            let mut answer = answer.clone();
            answer[4..8].copy_from_slice(&ours[4..8]);
            let to = SocketAddrV4::new(IPS[0], to_port);
            write_datagram(packet, SocketAddrV4::new(IPS[1], from_port), to, &answer);
        }
        true
    });
    let outcome = bed.connect(0, &ConnectOptions::default());
    let Err(error @ ConnectError::Rejected { reason, version, .. }) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!((reason, version), (RejectReason::Version, version1::VERSION));
    let words = error.to_string();
    assert!(
        words.contains("version 1, this program version 2") && !words.contains('\n'),
        "{words}"
    );
    assert_eq!(bed.hosts[0].notices.lines, 0);
}
