//! How much landing memory there is, and for whom.
//!
//! Registered memory is pinned, and its length is fixed when it is registered: more of it takes another socket, which voids what is
//! posted on the one before. So it grows seldom (each step doubles it, as far as there is as much) and only while nothing of
//! those that land is under way. Who needs more meanwhile is told that the receiver is busy, and begins by the one-copy path: memory for
//! that need not be registered, and lies behind what is.
//!
//! ```text
//!  | landing arena: registered, messages land there | messages of the one-copy path only | addresses, no memory |
//!  |<------------------- grows, up to the longest message and what is left to others ------------------------>|
//! ```
//! Messages of one address that are under way leave half of all that there may ever be to others, or [`LANDING_LEN_SHARED`](crate::bounds::LANDING_LEN_SHARED), whichever is
//! less; and so much of what is registered, too, while others have sessions. One message is possible always. A new session of another
//! address counts as memory only what those leave.

use std::net::Ipv4Addr;
use std::time::Duration;

use lm_protocol::control::RejectReason;
use lm_protocol::session::Refusal;

use crate::arena::pages_len;

use crate::engine::Engine;
use crate::landing::{share_of, sure_len};
use crate::port::Port;

/// After memory could not be had, nobody has it tried again for so long.
const FAILED_NS: u64 = 1_000_000_000;
/// When somebody who waits for others to pause asks again.
const PAUSE_RETRY: Duration = Duration::from_millis(50);
/// When somebody asks again for whom there is no landing channel at the moment.
const LOST_RETRY: Duration = Duration::from_secs(1);

/// What an endpoint has of landing memory, and what it may take, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LandingMemory {
    /// Now.
    pub len: u64,
    /// At most.
    pub len_max: u64,
    /// Most of that for messages under way from one address.
    pub address_max: u64,
}

impl<P: Port> Engine<P> {
    pub(crate) fn landing_memory(&self) -> LandingMemory {
        let Some(landing) = &self.landing else {
            return LandingMemory::default();
        };
        let len_max = self.memory.umem().len() - landing.arena.start();
        LandingMemory {
            len: landing.arena.len(),
            len_max,
            address_max: share_of(len_max),
        }
    }

    /// Sees to it that there is memory for one more session from `ip`, by the one-copy path or not, with messages in zones of up to
    /// `zone_len` bytes.
    pub(crate) fn provide_memory(
        &mut self,
        ip: Ipv4Addr,
        zone_len: u64,
        messages_in_flight: u32,
        one_copy: bool,
    ) -> Result<(), Refusal> {
        let (least, sure) = (pages_len(zone_len), sure_len(zone_len));
        let wish = self.landing_len_for(zone_len, messages_in_flight).max(least);
        let (now_ns, len_max) = (self.looks.now_ns(), self.landing_memory().len_max);
        let landing = self.landing.as_ref().ok_or(RejectReason::Unsupported)?;
        if !one_copy && !landing.is_open {
            return Err(Refusal::busy(LOST_RETRY));
        }
        let (had, left) = (landing.usable(one_copy), landing.left_to(ip, one_copy));
        if left >= wish || (left >= sure && !landing.sessions.is_empty()) {
            return Ok(());
        }
        if !one_copy && !(landing.sessions.iter()).all(|inbound| inbound.is_quiet(now_ns)) {
            return Err(Refusal::busy(PAUSE_RETRY));
        }
        let may_try = landing.failed_ns[usize::from(one_copy)]
            .is_none_or(|failed_ns| now_ns.saturating_sub(failed_ns) >= FAILED_NS);
        let theirs = landing.arena.len() - landing.left_to(ip, true);
        let steps = [wish.max((2 * had).saturating_sub(theirs)), wish, sure, least];
        let (mut tried, mut error) = (u64::MAX, None);
        for len in steps.map(|len| (theirs + len).min(len_max)) {
            if !may_try || len <= had || len >= tried {
                continue;
            }
            tried = len;
            match self.grow_landing(len, one_copy) {
                Ok(()) => break,
                Err(what) => error = Some(what),
            }
        }
        if let (Some(error), Some(landing)) = (error, &mut self.landing) {
            landing.failed_ns[usize::from(one_copy)] = Some(now_ns);
            let more = (theirs + wish).saturating_sub(had).div_ceil(1 << 20);
            tracing::warn!(%ip, "of {more} MiB more landing memory not all can be had: {error}");
        }
        let landing = self.landing.as_ref().ok_or(RejectReason::Unsupported)?;
        match landing.left_to(ip, one_copy) >= least {
            _ if !one_copy && !landing.is_open => Err(Refusal::busy(LOST_RETRY)),
            true => Ok(()),
            false => Err(Refusal {
                retry_after: Duration::from_nanos(FAILED_NS),
                ..RejectReason::NoMemory.into()
            }),
        }
    }

    /// Makes the landing arena `len` bytes long; if messages are to land there, with a new socket that registers all of it. Otherwise
    /// nothing has changed, and the reason is told with its remedy.
    pub(crate) fn grow_landing(&mut self, len: u64, one_copy: bool) -> Result<(), String> {
        let landing = self.landing.as_ref().ok_or("nothing lands here")?;
        let (start, had) = (landing.arena.start(), landing.arena.len());
        let len = len.max(had);
        let mapping = self.memory.umem().mapping().clone();
        mapping.populate(start + had, start + len).map_err(|error| {
            format!("too few huge pages are free ({error}); reserve some (/proc/sys/vm/nr_hugepages)")
        })?;
        if !one_copy && let Err(error) = self.rebuild_under_sessions(start + len) {
            mapping.depopulate(start + had, start + len);
            return Err(error);
        }
        let landing = self.landing.as_mut().ok_or("nothing lands here")?;
        landing.arena.grow(len);
        for inbound in landing.sessions.iter_mut() {
            inbound.grow(len);
        }
        self.counters.landing_grown += 1;
        Ok(())
    }
}
