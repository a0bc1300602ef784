//! What both sides of `lm-check messages` know: lengths and contents of all messages, from a seed.

use std::net::Ipv4Addr;
use std::ops::Range;

use clap::Args;
use lm_box::split_mix;

use lm_bench::size::ByteSize;

/// What both sides must be given alike.
#[derive(Debug, Clone, Args)]
pub(crate) struct PlanArgs {
    /// Decides lengths and contents of all messages
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Longest message; the others are shorter, each order of magnitude as often as any other
    #[arg(long, default_value = "256K")]
    pub(crate) message_size: ByteSize,
    /// Instead of random lengths these, over and over
    #[arg(long, value_name = "SIZE[,…]", value_delimiter = ',')]
    pub(crate) lens: Vec<ByteSize>,
    /// Number of messages to each host
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) messages: u32,
}

impl PlanArgs {
    /// The longest message, in bytes.
    pub(crate) fn longest(&self) -> u64 {
        let longest = self.lens.iter().copied().max();
        longest.unwrap_or(self.message_size).bytes().max(1)
    }

    /// Length of a message in bytes: 1 to the longest, its logarithm spread evenly, or the one that was given.
    pub(crate) fn len(&self, number: u32) -> u64 {
        if !self.lens.is_empty() {
            return self.lens[number as usize % self.lens.len()].bytes().max(1);
        }
        let most = self.message_size.bytes().max(1);
        let random = split_mix(self.seed ^ 0x6c65_6e67, u64::from(number));
        // 53 bits of a random number, as a fraction of one.
        let fraction = (random >> 11) as f64 / (1_u64 << 53) as f64;
        ((most as f64).powf(fraction) as u64).clamp(1, most)
    }

    /// Where the sequence of a message's contents starts.
    pub(crate) fn start(&self, from: Ipv4Addr, to: Ipv4Addr, tag: u64) -> u64 {
        let pair = u64::from(u32::from(from)) << 32 | u64::from(u32::from(to));
        split_mix(split_mix(self.seed, pair), tag)
    }
}

/// Where bytes are not those of the sequence `start` from `offset` on, or in `gaps` not zeros.
pub(crate) fn first_wrong(start: u64, offset: u64, bytes: &[u8], gaps: &[Range<u64>]) -> Option<u64> {
    let mut expected = vec![0; bytes.len()];
    fill(start, offset, &mut expected);
    for gap in gaps {
        match expected.get_mut(gap.start as usize..gap.end as usize) {
            Some(zeros) => zeros.fill(0),
            None => return Some(gap.end),
        }
    }
    let at = bytes.iter().zip(&expected).position(|(got, sent)| got != sent);
    at.map(|at| offset + at as u64)
}

/// Puts the bytes of the sequence `start` from `offset` on.
pub(crate) fn fill(start: u64, offset: u64, bytes: &mut [u8]) {
    let mut at = offset;
    let mut rest = bytes;
    while !rest.is_empty() {
        let word = split_mix(start, at / 8).to_le_bytes();
        let word = &word[(at % 8) as usize..];
        let len = word.len().min(rest.len());
        rest[..len].copy_from_slice(&word[..len]);
        rest = &mut rest[len..];
        at += len as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(seed: u64) -> PlanArgs {
        PlanArgs {
            seed,
            message_size: "256K".parse().unwrap(),
            lens: Vec::new(),
            messages: 1000,
        }
    }

    #[test]
    fn lengths_are_of_every_order_of_magnitude() {
        let lens: Vec<u64> = (0..1000).map(|number| plan(7).len(number)).collect();
        assert!(lens.iter().all(|&len| (1..=256 << 10).contains(&len)));
        for bound in [10, 1000, 10_000, 100_000] {
            let shorter = lens.iter().filter(|&&len| len < bound).count();
            assert!((50..950).contains(&shorter), "{shorter} are shorter than {bound}");
        }
        assert_ne!(
            lens,
            (0..1000).map(|number| plan(8).len(number)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn lengths_may_be_given() {
        let plan = PlanArgs {
            lens: ["1", "1448", "16M"].map(|len| len.parse().unwrap()).to_vec(),
            ..plan(7)
        };
        assert_eq!(
            [0, 1, 2, 3].map(|number| plan.len(number)),
            [1, 1448, 16 << 20, 1]
        );
        assert_eq!(plan.longest(), 16 << 20);
    }

    const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];

    #[test]
    fn contents_differ_by_everything() {
        let [a, b] = HOSTS;
        let mut all = vec![
            plan(1).start(a, b, 0),
            plan(2).start(a, b, 0),
            plan(1).start(b, a, 0),
            plan(1).start(a, b, 1),
            plan(1).start(a, b, 1 << 32),
            plan(1).start(a, a, 0),
        ];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 6);
    }

    #[test]
    fn contents_do_not_depend_on_how_they_are_cut() {
        let [one, other] = [3, 4].map(|tag| plan(7).start(HOSTS[0], HOSTS[1], tag));
        let mut whole = vec![0; 5000];
        fill(one, 0, &mut whole);
        for cut in [1, 7, 8, 1448, 4999] {
            let (front, back) = whole.split_at(cut);
            assert_eq!(first_wrong(one, 0, front, &[]), None, "cut at {cut}");
            assert_eq!(first_wrong(one, cut as u64, back, &[]), None, "cut at {cut}");
        }
        let mut others = vec![0; 5000];
        fill(other, 0, &mut others);
        let alike = whole.iter().zip(&others).filter(|(a, b)| a == b).count();
        assert!(alike < 100, "{alike} bytes of two messages are the same");
        whole[4000] ^= 1;
        assert_eq!(first_wrong(one, 0, &whole, &[]), Some(4000));
        whole[3990..4010].fill(0);
        let gaps = [3990..4000, 4000..4010];
        assert_eq!(first_wrong(one, 0, &whole, &gaps), None);
    }
}
