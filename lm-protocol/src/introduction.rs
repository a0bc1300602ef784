//! Introductions: how an endpoint knows that whoever sends from an address receives there, and is alive.
//!
//! Nothing that holds anything (a peer's entry, a place, memory, the order of a stream) is done for an address from which no proof
//! came. The proof is a *cookie*, which the endpoint can compute again, so that asking for it holds nothing either:
//!
//! ```text
//!  sender (incarnation X)                         receiver
//!  EAGER or LM_REQ ─────────────────────────────▶ the address is known as another incarnation, or not at all
//!              ◀────────── CHALLENGE X, cookie ──  cookie = MAC(secret, address, X, the incarnation known now, time)
//!  PROOF X, cookie ─────────────────────────────▶ the same cookie: X is the incarnation at this address from now on
//!  EAGER or LM_REQ again ───────────────────────▶ taken
//! ```
//!
//! The secret is random for each receiver, so nothing that was said to an earlier one proves anything. A cookie is about
//! the incarnation that is known when it is made: when X is introduced it is used up, since X is never replaced by itself, and when
//! X was replaced by Y, no cookie for X was made beside Y unless X was alive then. So a recorded proof never brings an old incarnation
//! back while the address is known; for an address that is not known it does so for [`PERIOD`] twice over at most.
//!
//! A challenge proves its sender too: it names X, which only the challenged address was told. The challenged endpoint takes the
//! challenger's incarnation from it where it knows none.
//!
//! `docs/security.md` says which attacks this ends; `tests/introduction.rs` explores all orders of a small world.

use crate::control::Proof;
use crate::time::Time;
use core::net::SocketAddrV4;
use core::time::Duration;
use hmac::{Hmac, Mac as _};
use sha2::Sha256;

/// A cookie is good in the period in which it was made, and in the next one.
pub const PERIOD: Duration = Duration::from_secs(4);

/// So far apart are an endpoint's own numberings at most: each begins two behind the one before it.
const NUMBERINGS: u64 = 1 << 33;

/// Whether two sender ids are of one incarnation: an endpoint that begins its numbering anew towards a peer adds 2 to its id.
/// Those of two endpoints are random.
#[inline]
pub const fn is_same_incarnation(a: u64, b: u64) -> bool {
    let apart = a.wrapping_sub(b);
    apart & 1 == 0 && (apart < NUMBERINGS || apart.wrapping_neg() < NUMBERINGS)
}

/// Makes cookies and knows them again.
#[derive(Clone)]
pub struct Cookies(Hmac<Sha256>);

impl core::fmt::Debug for Cookies {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Cookies(…)")
    }
}

impl Cookies {
    /// Cookies of one endpoint, under a random secret of its own.
    pub fn new(secret: &[u8; 16]) -> Cookies {
        Cookies(Hmac::new_from_slice(secret).expect("HMAC takes keys of any length"))
    }

    /// The cookie for the incarnation `sender_id` at the data address `from`, which is known as `known`.
    pub fn make(&self, from: SocketAddrV4, sender_id: u64, known: Option<u64>, now: Time) -> u64 {
        self.in_period(from, sender_id, known, period(now))
    }

    /// Whether `proof` came from who was challenged as the incarnation that it names, while the address was known as `known`.
    pub fn are_proved_by(&self, proof: &Proof, from: SocketAddrV4, known: Option<u64>, now: Time) -> bool {
        let period = period(now);
        [period, period.wrapping_sub(1)]
            .into_iter()
            .any(|period| self.in_period(from, proof.sender_id, known, period) == proof.cookie)
    }

    /// What an endpoint adds to its id towards a data address, an even number: by the id that one host is told no other one knows it.
    pub fn alias(&self, to: SocketAddrV4) -> u64 {
        self.mac(b"lm-self1", to, &[]) & !1
    }

    fn in_period(&self, from: SocketAddrV4, sender_id: u64, known: Option<u64>, period: u64) -> u64 {
        let is_known = [u8::from(known.is_some())];
        let numbers = [sender_id, known.unwrap_or_default(), period].map(u64::to_be_bytes);
        self.mac(
            b"lm-cook1",
            from,
            &[&numbers[0], &is_known, &numbers[1], &numbers[2]],
        )
    }

    fn mac(&self, purpose: &[u8; 8], address: SocketAddrV4, rest: &[&[u8]]) -> u64 {
        let mut mac = self.0.clone();
        mac.update(purpose);
        mac.update(&address.ip().octets());
        mac.update(&address.port().to_be_bytes());
        rest.iter().for_each(|bytes| mac.update(bytes));
        let bytes = mac.finalize().into_bytes();
        bytes
            .iter()
            .take(8)
            .fold(0, |cookie, &byte| cookie << 8 | u64::from(byte))
    }
}

/// Most answers in a period to addresses that have proved nothing, and may be forged.
const ANSWERS: u32 = 64;
const ANSWERS_PERIOD: Duration = Duration::from_millis(64);

/// Counts them. An honest sender repeats what was not answered.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    since: Time,
    sent: u32,
}

impl Answers {
    /// Whether one more may be sent now.
    pub fn may_answer(&mut self, now: Time) -> bool {
        if now.since(self.since) >= ANSWERS_PERIOD {
            (self.since, self.sent) = (now, 0);
        }
        self.sent = self.sent.saturating_add(1);
        self.sent <= ANSWERS
    }
}

fn period(now: Time) -> u64 {
    now.as_nanos() / PERIOD.as_nanos() as u64
}
