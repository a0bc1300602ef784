//! Sessions for which nothing is posted: those without a place (`aside.rs`), and those that were to land and are
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
//! (`Sessions::lands_apart`).
//!
//! An astray session keeps its place, its key and its peer's address. The channel is built anew once, which takes its entries back (I1);
//! from then on nothing is posted for it, and the gate admits nothing of it.

use lm_protocol::serial;

use super::arriving::Arriving;

/// Fragments without an entry that may be on the way: as many as the kernel's socket surely has room for.
pub(super) const UNPOSTED_AHEAD: u64 = 32;
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

    /// Nothing of the session landed since the channel was built: where it is alone, the first entry posted waits for its packet.
    /// Fewer than [`ASTRAY_AFTER`] of its fragments passed the gate before that entry was posted, so the socket need not be found
    /// empty to tell them from others. A sender that is fast may keep it from ever being empty.
    pub(super) fn has_nothing_landed(&self) -> bool {
        !self.landed
    }

    /// The fragment at `position` of a message had not arrived and came to the socket. It passed the gate after `drained_ns`, with
    /// entries posted.
    pub(super) fn came_to_the_socket(&mut self, message: &Arriving, position: u32, drained_ns: u64) {
        // What is asked for comes this way.
        let is_answer = message.gaps.timer.has_asked_for(position);
        // The gate admits nothing that is not announced, and a lost announcement comes after what it announces.
        let is_early = self.landed && message.announced_ns >= drained_ns;
        let number = message.base + u64::from(position) + 1;
        if !is_answer && !is_early && serial::precedes(self.before, number as u32) {
            self.passed = self.passed.saturating_add(1);
        }
    }

    /// The channel was built anew: who sent what meanwhile, `limit` packets of the session at most, says nothing.
    pub(super) fn forget(&mut self, limit: u32) {
        *self = Astray {
            before: limit,
            ..Astray::default()
        };
    }

    /// Whether so much has passed the landing queue by that something must be done; `Some(true)`: nothing of the session reaches it.
    pub(super) fn passes_by(&self) -> Option<bool> {
        (self.passed >= ASTRAY_AFTER).then_some(!self.landed)
    }
}
