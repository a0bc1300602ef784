//! Candidates for a fragment's 64-bit digest, on payloads of 1448 bytes: `cargo bench -p lm-protocol --bench digest`.
//!
//! `hot` digests one payload again and again; `cold` walks through 64 MiB, as it is when payloads come from the network.

use divan::counter::BytesCount;
use divan::{Bencher, black_box};

/// Payload of a fragment at MTU 1500.
const LEN: usize = 1448;
const COLD_LEN: usize = 64 << 20;

fn main() {
    divan::main();
}

fn payloads(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + (at >> 9)) as u8).collect()
}

fn hot(bencher: Bencher<'_, '_>, digest: impl Fn(&[u8]) -> u64 + Sync) {
    let payload = payloads(LEN);
    bencher
        .counter(BytesCount::new(LEN))
        .bench(|| digest(black_box(&payload)));
}

fn cold(bencher: Bencher<'_, '_>, digest: impl Fn(&[u8]) -> u64 + Sync) {
    let memory = payloads(COLD_LEN);
    let mut at = 0;
    bencher.counter(BytesCount::new(LEN)).bench_local(|| {
        at = (at + LEN) % (COLD_LEN - LEN);
        digest(black_box(&memory[at..at + LEN]))
    });
}

/// CRC-32 (PCLMULQDQ where the processor has it) beside a Fletcher-like pair of sums over 32-bit words.
fn crc_and_sums(payload: &[u8]) -> u64 {
    let (words, rest) = payload.as_chunks::<4>();
    let (mut low, mut high) = (0u64, 0u64);
    for word in words {
        low = low.wrapping_add(u64::from(u32::from_le_bytes(*word)));
        high = high.wrapping_add(low);
    }
    for &byte in rest {
        low = low.wrapping_add(u64::from(byte));
        high = high.wrapping_add(low);
    }
    u64::from(crc32fast::hash(payload)) << 32 | u64::from((high ^ high >> 32) as u32)
}

/// CRC-32 beside half of XXH3.
fn crc_and_half_xxh3(payload: &[u8]) -> u64 {
    u64::from(crc32fast::hash(payload)) << 32 | xxhash_rust::xxh3::xxh3_64_with_seed(payload, 7) & 0xffff_ffff
}

fn crc_alone(payload: &[u8]) -> u64 {
    u64::from(crc32fast::hash(payload))
}

/// The one that was taken.
fn xxh3_seed(payload: &[u8]) -> u64 {
    lm_protocol::manifest::fragment_digest(0x0123_4567_89ab_cdef, payload)
}

fn xxh3_plain(payload: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(payload)
}

macro_rules! candidates {
    ($($name:ident),*) => {
        mod hot_cache {
            $(#[divan::bench] fn $name(bencher: divan::Bencher<'_, '_>) { super::hot(bencher, super::$name); })*
        }
        mod cold_cache {
            $(#[divan::bench] fn $name(bencher: divan::Bencher<'_, '_>) { super::cold(bencher, super::$name); })*
        }
    };
}

candidates!(crc_alone, crc_and_sums, crc_and_half_xxh3, xxh3_plain, xxh3_seed);
