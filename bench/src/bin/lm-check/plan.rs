//! What both sides of `lm-check messages` know: lengths and contents of all messages, from a seed.

use clap::Args;
use lm_box::split_mix;
use lm_dataplane::{Endpoint, LoanError, Message, PeerId, SendError};

use lm_bench::cli::{Failure, chain};
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
    /// Number of messages
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
    pub(crate) fn start(&self, number: u32) -> u64 {
        split_mix(!self.seed, u64::from(number))
    }

    /// Puts the bytes of a message from `offset` on.
    pub(crate) fn fill(&self, number: u32, offset: u64, bytes: &mut [u8]) {
        fill(self.start(number), offset, bytes);
    }
}

/// What became of an attempt to hand a message over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handed {
    Over,
    /// There is no room for it now.
    NoRoom,
    /// The session has ended.
    NoSession,
    /// The entry of a peer that was silent for long may have been given to another.
    UnknownPeer,
}

/// Hands over `len` bytes of the sequence `start` as one message.
pub(crate) fn hand_over(
    endpoint: &mut Endpoint,
    peer: PeerId,
    tag: u64,
    start: u64,
    len: u64,
) -> Result<Handed, Failure> {
    let mut region = match endpoint.loan(peer, len) {
        Ok(region) => region,
        Err(LoanError::WouldBlock) => return Ok(Handed::NoRoom),
        Err(LoanError::NoSession) => return Ok(Handed::NoSession),
        Err(LoanError::UnknownPeer) => return Ok(Handed::UnknownPeer),
        Err(error) => return Err(Failure::new(chain(&error))),
    };
    let mut offset = 0;
    for payload in region.payloads_mut() {
        fill(start, offset, payload);
        offset += payload.len() as u64;
    }
    match endpoint.try_send(region, tag).map_err(|back| back.reason) {
        Ok(_) => Ok(Handed::Over),
        Err(SendError::WouldBlock) => Ok(Handed::NoRoom),
        // It ended between loan and send.
        Err(SendError::NoSession) => Ok(Handed::NoSession),
        Err(SendError::UnknownPeer) => Ok(Handed::UnknownPeer),
        Err(error) => Err(Failure::new(chain(&error))),
    }
}

/// The message is `len` bytes of the sequence `start`, with zeros where its map has gaps.
pub(crate) fn compare(start: u64, len: u64, message: &Message) -> Result<(), String> {
    if message.len() as u64 != len {
        return Err(format!("it has {} bytes instead of {len}", message.len()));
    }
    let mut expected = vec![0; message.len()];
    fill(start, 0, &mut expected);
    for range in message.missing() {
        let Some(gap) = expected.get_mut(range.start as usize..range.end as usize) else {
            return Err(format!("of {len} bytes it lacks bytes {range:?}"));
        };
        gap.fill(0);
    }
    match message.iter().zip(&expected).position(|(got, sent)| got != sent) {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} of {len} is wrong")),
    }
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

    #[test]
    fn contents_do_not_depend_on_how_they_are_cut() {
        let mut whole = vec![0; 5000];
        plan(7).fill(3, 0, &mut whole);
        for cut in [1, 7, 8, 1448, 4999] {
            let mut parts = vec![0; 5000];
            let (front, back) = parts.split_at_mut(cut);
            plan(7).fill(3, 0, front);
            plan(7).fill(3, cut as u64, back);
            assert_eq!(parts, whole, "cut at {cut}");
        }
        let mut other = vec![0; 5000];
        plan(7).fill(4, 0, &mut other);
        let alike = whole.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(alike < 100, "{alike} bytes of two messages are the same");
    }
}
