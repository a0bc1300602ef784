//! A manifest's collector among packets from nowhere: it never tells a digest that the honest sender did not give, and the
//! honest packets prove the manifest in the end.

use crate::manifest::{Manifest, ManifestCollector};
use crate::wire::lm::{LmHeader, MissingRange};

const KEY: u64 = 7;
const NUMBER: u32 = 9;

fn give(collector: &mut ManifestCollector, manifest: &Manifest<'_>, range: MissingRange) {
    for packet in manifest.packets_of(range, 64) {
        let mut payload = [0; 64];
        let len = packet.write_payload(&mut payload);
        let _ = collector.accept(&packet.header, &payload[..len]);
    }
}

/// Steps of a fuzzer, as above.
pub fn manifest(bytes: &[u8]) {
    let (&count, mut rest) = bytes.split_first().unwrap_or((&0, &[]));
    let digests: Vec<u64> = (1..=u64::from(count) + 1).map(|n| n * 0x0101_0101).collect();
    let count = digests.len() as u32;
    let manifest = Manifest::new(KEY, NUMBER, &digests, 1000, 5);
    let mut collector = ManifestCollector::new(200);
    let expected = collector.begin(KEY, NUMBER, count, 1000, 5).is_ok();
    assert_eq!(expected, count <= 200);
    while let Some((&[kind, first, len], behind)) = rest.split_first_chunk() {
        let (payload, behind) = behind.split_at(usize::from(len).min(behind.len()));
        rest = behind;
        let first = u32::from(first);
        if kind & 1 == 1 {
            let range = MissingRange {
                first,
                len: u32::from(len),
            };
            give(&mut collector, &manifest, range);
        } else {
            let header = LmHeader::Manifest {
                session_key: KEY ^ u64::from(kind >> 6),
                message: NUMBER ^ u32::from(kind >> 5 & 1),
                first: if kind & 2 == 2 { u32::MAX - first } else { first },
                count: if kind & 4 == 4 { u32::MAX - first } else { count },
            };
            let mut payload = payload.to_vec();
            // Whoever knows the key can compute a message's digest, and a fuzzer copies it from a comparison. So the one
            // for the end is always the honest one, and no forged digests agree with it.
            if first as usize + payload.len() / 8 == digests.len() + 1
                && let Some(end) = payload.last_chunk_mut()
            {
                *end = manifest.message_digest().to_be_bytes();
            }
            let _ = collector.accept(&header, &payload);
        }
        let missing: u32 = collector.missing().map(|range| range.len).sum();
        assert!(missing <= count && (!collector.is_proved() || missing == 0));
        for (index, &digest) in digests.iter().enumerate() {
            assert!(collector.digest(index as u32).is_none_or(|told| told == digest));
        }
    }
    if expected {
        for _ in 0..3 {
            let ranges: Vec<MissingRange> = collector.missing().collect();
            ranges
                .into_iter()
                .for_each(|range| give(&mut collector, &manifest, range));
            give(&mut collector, &manifest, MissingRange { first: 0, len: count });
        }
        assert!(collector.is_proved());
    }
}
