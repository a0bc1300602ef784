//! Fragments that landed in another's slot, one burst's at a time.

use lm_protocol::serial;

use super::aims::{Aim, Displaced};
use super::sessions::Sessions;
use crate::memory::Umem;

impl Sessions {
    /// The fragment at `position` of the message at `at` landed in the slot of `aim`, its payload at UMEM address `from`.
    ///
    /// Behind a loss each fragment lies in the slot of an earlier one. The last of them goes to its place first: whatever lay
    /// where another belongs is gone then, and only the last, whose place may still be written, has to be held aside.
    pub(super) fn displaced(
        &mut self,
        row: u8,
        at: usize,
        position: u32,
        (aim, from): (&Aim, u64),
        umem: &Umem,
    ) {
        let waiting = !self.displaced.is_empty();
        let Some(inbound) = self.at_mut(row) else { return };
        let (owner, last_ns) = (inbound.owner(), inbound.progress.last_ns());
        let message = inbound.order.at_mut(at);
        let lies_before = aim.owner == owner
            && (serial::precedes(aim.number, message.number)
                || (aim.number == message.number && aim.position < position));
        if !lies_before {
            // One that waits may lie where this one belongs, or the other way round.
            match waiting {
                true => inbound.places.hold(message, position, from, last_ns, umem),
                false => inbound.places.store(message, position, from, last_ns, umem),
            }
            return;
        }
        // Until it is at its place the message is not shown.
        message.gaps.held += 1;
        let one = Displaced {
            owner,
            number: message.number,
            position,
            from,
        };
        self.displaced.push(one);
    }

    /// How many may wait without more memory.
    #[cfg(test)]
    pub(crate) fn room_for_displaced(&self) -> usize {
        self.displaced.capacity()
    }

    /// Copies the burst's displaced fragments to their places, the last one first, or aside.
    pub(super) fn settle_displaced(&mut self, umem: &Umem) {
        while let Some(one) = self.displaced.pop() {
            let session = self.at_mut(one.owner.row);
            let Some(inbound) = session.filter(|inbound| inbound.owner() == one.owner) else {
                continue;
            };
            if let Some(at) = inbound.order.position_of(one.number) {
                let (message, last_ns) = (inbound.order.at_mut(at), inbound.progress.last_ns());
                message.gaps.held -= 1;
                (inbound.places).store(message, one.position, one.from, last_ns, umem);
            }
        }
    }
}
