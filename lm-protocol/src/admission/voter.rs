//! A voter's word under the policy `exclusive`: to one host at a time, and for a while only.

use super::message::Verdict;
use crate::time::Time;
use core::net::SocketAddrV4;
use core::time::Duration;

/// How long a voter says yes to nobody else.
pub const PROMISE: Duration = Duration::from_secs(2);

/// How long a host relies on promises, counted from when it first asked for them. Shorter than [`PROMISE`] by more than two
/// clocks can differ in rate; their readings need not agree.
pub const TENURE: Duration = Duration::from_millis(1750);

const _: () = assert!(TENURE.as_millis() * 8 <= PROMISE.as_millis() * 7);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Promise {
    holder: SocketAddrV4,
    boot_id: u64,
    number: u64,
    until: Time,
}

/// What this host has promised as a voter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Voter {
    promise: Option<Promise>,
    /// What was promised in the life before is not known; by then it is over.
    abstains_until: Time,
}

impl Voter {
    pub(super) fn new(now: Time) -> Voter {
        Voter {
            promise: None,
            abstains_until: now + PROMISE,
        }
    }

    /// A host asks; gives the answer and the holder, or nothing for a claim that its own next one has overtaken.
    pub(super) fn ask(
        &mut self,
        now: Time,
        claimant: SocketAddrV4,
        boot_id: u64,
        number: u64,
    ) -> Option<(Verdict, Option<SocketAddrV4>)> {
        if now < self.abstains_until {
            return Some((Verdict::Abstains, None));
        }
        match self.promise.filter(|promise| promise.until > now) {
            Some(promise) if promise.holder != claimant => {
                return Some((Verdict::Held, Some(promise.holder)));
            }
            Some(promise) if promise.boot_id == boot_id && promise.number > number => return None,
            _ => {}
        }
        self.promise = Some(Promise {
            holder: claimant,
            boot_id,
            number,
            until: now + PROMISE,
        });
        Some((Verdict::Promised, None))
    }

    /// A host's claims up to `number` are over.
    pub(super) fn release(&mut self, claimant: SocketAddrV4, boot_id: u64, number: u64) {
        self.promise.take_if(|promise| {
            promise.holder == claimant && (promise.boot_id != boot_id || promise.number <= number)
        });
    }

    /// Who has the promise.
    pub(super) fn holder(&self, now: Time) -> Option<SocketAddrV4> {
        self.promise
            .filter(|promise| promise.until > now)
            .map(|promise| promise.holder)
    }
}
