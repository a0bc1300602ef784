//! UDP's checksum: each packet that leaves by a ring bears the right one, whoever sums it up, or none.
#![cfg(test)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::{Layout, LinkShape, Wire as WireMode};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{
    HEADER_LEN, TYPE_ANNOUNCE, TYPE_CREDIT, TYPE_DATA, TYPE_EAGER, TYPE_REALTIME, VERSION,
};

use super::audience::{Audience, W, WAYS, config, options};
use super::bed::{Bed, BedConfig, PORT, endpoint_config, noise, wire_of};
use super::streams::begin;
use crate::checksum::Checksum;
use crate::opening::MemoryPlan;
use crate::port::Caps;
use crate::scheduler::{Flow, FlowSpec, TxBatch};
use crate::simnic::{Impairments, Semantics, ZeroCopy};

/// Packets of the data port that crossed, by type, and datagrams of which IP fragments have crossed so far, by identification.
#[derive(Debug, Default)]
struct Seen {
    types: BTreeMap<u8, u64>,
    parts: BTreeMap<u16, BTreeMap<usize, Vec<u8>>>,
    datagrams: BTreeSet<u16>,
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Whether a UDP datagram with its header bears its checksum, as RFC 768 has it, word by word; `None`: it bears none.
fn bears(addresses: &[u8], datagram: &[u8]) -> Option<bool> {
    if word(datagram, 6) == 0 {
        return None;
    }
    let len = (datagram.len() as u16).to_be_bytes();
    let all = [addresses, &[0, 17], &len, datagram].concat();
    let words = all
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let sum = words.fold(0, |sum, word| match sum + word {
        carried @ 0x1_0000.. => carried - 0xffff,
        sum => sum,
    });
    Some(sum == 0xffff)
}

impl Seen {
    fn look(&mut self, packet: &[u8], checksum: Checksum) {
        let expected = (checksum != Checksum::None).then_some(true);
        if packet[12..14] != [8, 0] || packet[23] != 17 {
            return;
        }
        let (ip, addresses) = (&packet[14..], &packet[26..34]);
        let (udp, fragment) = (&packet[34..14 + usize::from(word(ip, 2))], word(ip, 6) & 0x3fff);
        if fragment == 0 {
            if word(udp, 0) == PORT {
                assert_eq!(bears(addresses, udp), expected, "type {}", udp[8] & 0xf);
                *self.types.entry(udp[8] & 0xf).or_default() += 1;
            }
            return;
        }
        let parts = self.parts.entry(word(ip, 4)).or_default();
        parts.insert(usize::from(fragment & 0x1fff) * 8, udp.to_vec());
        let whole = parts.values().flatten().copied().collect::<Vec<u8>>();
        let last = parts.last_key_value().map_or(0, |(at, part)| at + part.len());
        if parts.contains_key(&0) && whole.len() == last && usize::from(word(&whole, 4)) == last {
            assert_eq!(bears(addresses, &whole), expected);
            self.datagrams.insert(word(ip, 4));
            self.parts.remove(&word(ip, 4));
        }
    }
}

fn watch(bed: &Bed, checksum: Checksum) -> Arc<Mutex<Seen>> {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let watching = Arc::clone(&seen);
    bed.wire.set_filter(move |_, packet| {
        watching.lock().expect("one thread").look(packet, checksum);
        true
    });
    seen
}

/// One packet of a real-time socket's in each millisecond, of another length each time.
struct Ticks {
    next: Time,
    len: usize,
}

impl Flow for Ticks {
    fn next(&mut self, _: u32, now: Time, out: &mut TxBatch<'_>) {
        if let Some(payload) = out.frame((self.len % 4) as u32) {
            payload[..self.len].fill(self.len as u8);
            payload[..HEADER_LEN].fill(0);
            payload[0] = VERSION << 4 | TYPE_REALTIME;
            payload[2..4].copy_from_slice(&((self.len - HEADER_LEN) as u16).to_be_bytes());
            assert!(out.put((self.len % 4) as u32, self.len, 0));
            self.len += 1;
        }
        self.next = now + Duration::from_millis(1);
    }

    fn departs(&self) -> Option<Time> {
        Some(self.next)
    }

    fn sent(&mut self, _: u64, _: Option<Time>) {}
}

/// Small messages, long ones, one that is read while it is written, repetitions and real time: of the packets of each type.
fn exchange(config: &BedConfig) {
    let mut audience = Audience::new(Bed::new(config), [0, 1], &options(Delivery::Reliable));
    let seen = watch(&audience.bed, config.checksum);
    for host in 0..2u64 {
        let loss = Impairments {
            seed: host,
            loss_ppm: 20_000,
            ..Impairments::default()
        };
        audience.bed.wire.impair(host as usize, loss);
    }
    let spec = FlowSpec {
        to: Some(audience.to),
        frames: 4,
        descriptors: 4,
        messages: None,
    };
    let ticks = Ticks {
        next: Time::from_nanos(audience.bed.now_ns),
        len: HEADER_LEN,
    };
    let flow = audience.bed.hosts[0]
        .add_flow(&spec, Box::new(ticks))
        .expect("room for a flow");
    let lens = [1, 2 * W + 1, 64, 12 * W, W + 31, 700];
    audience.read_all(lens.map(|len| noise(len, len as usize)).into());
    let mut writing = begin(&mut audience, noise(5, (3 * W + 5) as usize));
    for window in 1..=3 {
        writing.write_to(window * W, 0);
        audience.round();
    }
    writing.write_to(3 * W + 5, 0);
    drop(writing);
    audience.until("settled", |audience| {
        audience.messages.len() + audience.failures as usize == audience.payloads.len()
    });
    assert_eq!(audience.failures, 0);
    assert!(
        audience.bed.hosts[0].counters.fragments_resent > 0,
        "nothing was lost"
    );
    drop(audience.bed.hosts[0].remove_flow(flow));
    let bed = audience.end();
    for host in &bed.hosts {
        let invalid = host.landing.as_ref().map_or(0, |landing| landing.drops.invalid);
        assert_eq!(invalid, 0);
    }
    let types = &seen.lock().expect("one thread").types;
    for kind in [TYPE_DATA, TYPE_EAGER, TYPE_ANNOUNCE, TYPE_CREDIT, TYPE_REALTIME] {
        assert!(
            types.get(&kind).is_some_and(|count| *count > 0),
            "{kind}: {types:?}"
        );
    }
}

#[test]
fn each_packet_bears_its_checksum() {
    for checksum in [Checksum::None, Checksum::Integrated, Checksum::Offload] {
        for way in WAYS {
            exchange(&BedConfig {
                checksum,
                ..config(way)
            });
        }
    }
}

/// Packets of several descriptors: the first one's metadata is of all.
#[test]
fn a_long_packet_bears_its_checksum() {
    for checksum in [Checksum::Integrated, Checksum::Offload] {
        let mut bed = Bed::new(&BedConfig {
            checksum,
            mtu: 9000,
            landing_len: 8 << 20,
            ..BedConfig::default()
        });
        let seen = watch(&bed, checksum);
        let peer = bed.session(0, WireMode::Lm, 1 << 20);
        for len in [3_000, 9_001, 300_000, 1 << 20] {
            bed.exchange(0, peer, &noise(len as u64, len));
        }
        bed.check_clean();
        bed.check_memory();
        assert!(seen.lock().expect("one thread").types[&TYPE_DATA] > 140);
    }
}

/// A message that is one datagram has one checksum, in its first fragment, which leaves last.
#[test]
fn a_datagram_bears_its_checksum() {
    let device = Semantics::ZeroCopy(ZeroCopy::default());
    for (checksum, semantics) in [Checksum::None, Checksum::Integrated]
        .into_iter()
        .flat_map(|checksum| [Semantics::Copy, device].map(|semantics| (checksum, semantics)))
    {
        let mut bed = Bed::new(&BedConfig {
            checksum,
            exclusive: true,
            wire: wire_of(semantics),
            ..BedConfig::default()
        });
        let seen = watch(&bed, checksum);
        let peer = bed.session(0, WireMode::IpFrag, 65_507);
        for len in [1_473, 7_168, 40_001, 65_507] {
            bed.exchange(0, peer, &noise(len as u64, len));
        }
        bed.check_clean();
        assert_eq!(seen.lock().expect("one thread").datagrams.len(), 4);
    }
}

/// It is asked what it offers before anything is opened.
#[test]
fn a_device_that_sums_nothing_up_is_not_opened() {
    let layout = Layout::new(WireMode::Lm, 1500, LinkShape::IPV4).expect("an MTU");
    let open = |checksum, sums| {
        let config = endpoint_config(&BedConfig {
            checksum,
            ..BedConfig::default()
        });
        let caps = Caps {
            sums,
            ..Caps::device()
        };
        let plan = MemoryPlan::new(&config, &layout, 2048, caps);
        plan.map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(open(Checksum::Offload, true), Ok(()));
    assert_eq!(open(Checksum::Integrated, false), Ok(()));
    let error = open(Checksum::Offload, false).expect_err("nobody would sum packets up");
    assert!(
        error.contains("--checksum integrated") && error.contains("--mode copy"),
        "{error}"
    );
    assert!(!error.contains('\n'), "{error}");
}
