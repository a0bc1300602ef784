//! Sessions for which nothing is posted: those that were granted so (`one_copy.rs`), and those that were to land and are
//! *astray*, because none of their packets reaches the landing queue (a switch that spreads by a hash, a device that cannot be
//! steered). Their fragments come to the kernel's data socket, and each is copied to its place.
//!
//! Where fragments come says which it is, and no clock has a part in it, since on a busy machine any time may pass between two
//! packets. A fragment of an open session that nobody has asked for and that comes to the socket although entries were posted when it
//! passed the gate ([`Entries::found_socket_empty`](super::Entries)) was not admitted.
//! Either the gate never saw it, or it expects others (after a packet whose header was corrupt): that can only be where a packet
//! of the session landed, and is over when the channel was built anew. So after [`ASTRAY_AFTER`] of them, one after the other:
//!
//! ```text
//!   something of the session landed since the channel was built  →  it is built anew
//!   nothing did                                                 →  the session is astray
//! ```
//! A session whose packets have another length than those of the sessions that land is one without entries from the start
//! ([`Inbound::lands_apart_from`]).
//!
//! An astray session keeps its place, its key and its peer's address. The channel is built anew once, which takes its entries back (I1);
//! from then on nothing is posted for it, and the gate admits nothing of it.

use std::collections::VecDeque;

use lm_protocol::serial;

use super::sessions::UNPOSTED_AHEAD;
use super::{Inbound, Sessions, Zone, backoff_below};
use crate::arena::Arena;
use crate::memory::Umem;
use crate::one_copy::ON_THE_WAY;

/// Twice as many fragments as credit lets a sender have on the way without entries.
pub(super) const ASTRAY_AFTER: u32 = 2 * UNPOSTED_AHEAD as u32;

/// What speaks against a session's packets reaching the landing queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Astray {
    /// Fragments that came to the socket unasked while entries were posted, since one landed or the channel was built anew.
    passed: u32,
    /// Packets of the session (cumulative, mod 2^32) that were sent before the channel was built anew, when the gate was closed.
    before: u32,
    /// Something landed since the channel was built.
    landed: bool,
}

impl Astray {
    /// A fragment of the session landed.
    #[inline]
    pub(super) fn has_landed(&mut self) {
        self.passed = 0;
        self.landed = true;
    }
}

impl Inbound {
    /// The fragment at `position` of message `at` had not arrived and came to the socket. It passed the gate after `drained_ns`, with
    /// entries posted.
    pub(super) fn came_to_the_socket(&mut self, at: usize, position: u32, drained_ns: u64) {
        let message = &self.messages[at];
        // What is asked for comes this way.
        let is_answer = message.timer.has_asked_for(position);
        // The gate admits nothing that is not announced, and a lost announcement comes after what it announces.
        let is_early = self.astray.landed && message.announced_ns >= drained_ns;
        let number = message.base + u64::from(position) + 1;
        if !is_answer && !is_early && serial::precedes(self.astray.before, number as u32) {
            self.astray.passed = self.astray.passed.saturating_add(1);
        }
    }

    /// The channel was built anew: who sent what meanwhile says nothing.
    pub(super) fn forget_astray(&mut self) {
        self.astray = Astray {
            before: self.told.packet_limit,
            ..Astray::default()
        };
    }

    /// Whether so much has passed the landing queue by that something must be done; `Some(true)`: nothing of the session reaches it.
    pub(super) fn passes_by(&self) -> Option<bool> {
        (self.lands && self.astray.passed >= ASTRAY_AFTER).then_some(!self.astray.landed)
    }

    /// From now on no entries are posted for it.
    fn lands_no_more(&mut self) {
        self.lands = false;
        // What lies where the digests are is known for each fragment that is copied.
        self.terms.caps.witness = true;
        self.backoff = backoff_below(ON_THE_WAY.min(self.terms.on_the_way.max(1)));
    }

    /// Its packets must not meet the entries of sessions with shorter ones, nor theirs its own: after a loss, what is longer than its slot
    /// would lie on the fragment above, which may have been verified already (I1). Where packets may take several frames the gate sees
    /// to that, and in zero-copy mode everything is verified at the end.
    pub(super) fn lands_apart_from(&mut self, others: &Sessions) {
        let len = self.terms.layout.max_frame_len();
        let is_other = |other: &Inbound| other.lands && other.terms.layout.max_frame_len() != len;
        let is_guarded = self.terms.caps.capacity > 0 || !self.terms.caps.witness;
        if self.lands && !is_guarded && others.iter().any(is_other) {
            self.lands_no_more();
        }
    }

    /// Finds memory for messages, which may be written there at once, since nothing is posted.
    pub(super) fn take_memory(
        &mut self,
        arena: &mut Arena,
        chosen: &mut VecDeque<Zone>,
        umem: &Umem,
        now_ns: u64,
    ) {
        if self.lands {
            return;
        }
        self.confirm();
        let had = self.posting;
        while let Some(message) = self.messages.get(self.posting) {
            let (consumed, count) = (message.consumed, message.fragment_count());
            if message.zone.is_none() && !self.find_memory(arena, chosen) {
                break;
            }
            if self.posting == 0 && !std::mem::take(&mut self.posts_again) {
                // The sender's time begins when it may send: until now the application had the memory.
                self.progress_ns = now_ns;
            }
            // Of a session that was to land some may have: what it saved at windows' edges goes back (I5).
            for position in consumed..count {
                self.passed(self.posting, position, None, umem);
            }
            self.messages[self.posting].posted = count;
            self.posting += 1;
        }
        if self.posting > had && !self.held.is_empty() {
            self.settle_trouble(umem);
        }
    }
}

impl Sessions {
    /// The session at `place` is astray. The channel was built anew a moment ago: nothing is posted in its zones.
    pub(crate) fn stop_landing(
        &mut self,
        place: u8,
        arena: &mut Arena,
        chosen: &mut VecDeque<Zone>,
        umem: &Umem,
        now_ns: u64,
    ) {
        self.without_entries |= 1 << place;
        let Some(inbound) = self.at_mut(place) else { return };
        inbound.lands_no_more();
        inbound.take_memory(arena, chosen, umem, now_ns);
    }
}
