//! Introductions: whoever is heard for the first time at an address is challenged, and only who proves that it receives there, and may
//! send here, is known as a peer. The cookies are `lm_protocol::introduction`; who asks here is `hearing.rs`.

use std::net::{Ipv4Addr, SocketAddrV4};

use lm_protocol::control::Proof;
use lm_protocol::introduction::{Answers, Cookies};
use lm_protocol::time::Time;

use crate::entropy::Entropy;

/// Challenges sent in a millisecond on the average: a flood of forged addresses costs no more, and makes no more of us.
const CHALLENGES_PER_MS: u64 = 32;
/// And at once, after a pause: what came meanwhile from honest senders is among what came from others.
const CHALLENGES_AT_ONCE: u64 = 16 * CHALLENGES_PER_MS;

/// What an endpoint needs to challenge.
#[derive(Debug)]
pub(crate) struct Introductions {
    cookies: Cookies,
    /// Challenges that may be sent, and the millisecond in which that was counted.
    spare: u64,
    counted_ms: u64,
    /// To those that are not challenged.
    pub(crate) answers: Answers,
    allow: Vec<(Ipv4Addr, u8)>,
}

impl Introductions {
    /// `allow`: addresses that may send here, in CIDR notation; none: everybody's.
    pub(crate) fn new(entropy: &mut Entropy, allow: Vec<(Ipv4Addr, u8)>) -> Introductions {
        let mut secret = [0u8; 16];
        secret[..8].copy_from_slice(&entropy.draw().to_ne_bytes());
        secret[8..].copy_from_slice(&entropy.draw().to_ne_bytes());
        Introductions {
            cookies: Cookies::new(&secret),
            spare: CHALLENGES_AT_ONCE,
            counted_ms: 0,
            answers: Answers::default(),
            allow,
        }
    }

    pub(crate) fn cookies(&self) -> &Cookies {
        &self.cookies
    }

    /// Addresses that may send here, in CIDR notation; none: everybody's.
    pub(crate) fn allow(&self) -> &[(Ipv4Addr, u8)] {
        &self.allow
    }

    /// Whether a sender at this address is one of those that may send here.
    pub(crate) fn allows(&self, ip: Ipv4Addr) -> bool {
        let covers = |&(network, len): &(Ipv4Addr, u8)| {
            let differ = network.to_bits() ^ ip.to_bits();
            differ.checked_shr(32 - u32::from(len.min(32))).unwrap_or(0) == 0
        };
        self.allow.is_empty() || self.allow.iter().any(covers)
    }

    /// Whether one more challenge may be sent now.
    pub(crate) fn may_challenge(&mut self, now_ns: u64) -> bool {
        let ms = now_ns / 1_000_000;
        let since_ms = ms.saturating_sub(self.counted_ms);
        self.counted_ms = ms;
        let more = since_ms.saturating_mul(CHALLENGES_PER_MS);
        self.spare = self.spare.saturating_add(more).min(CHALLENGES_AT_ONCE);
        let may = self.spare > 0;
        self.spare -= u64::from(may);
        may
    }

    /// What the incarnation `sender_id` at an address has to give back; `known` as another one.
    pub(crate) fn cookie(&self, from: SocketAddrV4, sender_id: u64, known: Option<u64>, now_ns: u64) -> u64 {
        (self.cookies).make(from, sender_id, known, Time::from_nanos(now_ns))
    }

    /// Whether it gave that back.
    pub(crate) fn is_proved(
        &self,
        proof: &Proof,
        data: SocketAddrV4,
        known: Option<u64>,
        now_ns: u64,
    ) -> bool {
        (self.cookies).are_proved_by(proof, data, known, Time::from_nanos(now_ns))
    }
}
