//! Memory that messages land in.

use super::arriving::{Arriving, Zone};
use super::terms::InboundTerms;
use crate::arena::{Arena, pages_len};
use crate::bounds::LANDING_LEN_SHARED;
use crate::memory::{PACKET_HEADROOM, fill_address_is_valid};
use crate::placing::Placing;

/// Where zones come from.
pub(crate) struct Memory<'a> {
    pub(crate) arena: &'a mut Arena,
    /// Who decides where messages land, where somebody does.
    pub(crate) placing: Option<&'a mut Placing>,
    /// Messages can land up to here: a UMEM address.
    pub(crate) registered_len: u64,
    /// Whether messages may come unannounced.
    pub(crate) opens: bool,
}

impl Memory<'_> {
    /// Bytes in which messages can land.
    pub(super) fn registered(&self) -> u64 {
        self.registered_len.saturating_sub(self.arena.start())
    }

    /// Finds memory for a message, which `lands` there or is copied there, of the `may_take` bytes that are left to its session.
    pub(super) fn find(
        &mut self,
        message: &mut Arriving,
        terms: &InboundTerms,
        lands: bool,
        may_take: &mut u64,
    ) -> bool {
        let (zone_len, _) = terms.zone_of(&message.geometry);
        if zone_len > *may_take || message.waits() {
            return false;
        }
        let (arena, registered) = (&mut *self.arena, self.registered_len);
        let start = match lands {
            true => arena.allocate_in(zone_len, 0, registered),
            // What others can land in is left to them, where there is more.
            false => (arena.allocate_in(zone_len, registered, u64::MAX)).or_else(|| arena.allocate(zone_len)),
        };
        let Some(start) = start else { return false };
        *may_take = may_take.saturating_sub(zone_len);
        self.give(message, terms, Zone::of_arena(start, zone_len), lands);
        true
    }

    /// A message has this zone from now on.
    pub(super) fn give(&self, message: &mut Arriving, terms: &InboundTerms, zone: Zone, lands: bool) {
        let (_, front_margin) = terms.zone_of(&message.geometry);
        message.slots.zone = Some(zone);
        message.slots.payload = zone.start + front_margin;
        message.slots.may_post = true;
        self.check(message, terms, zone, lands);
    }

    /// I2: every entry of the message is valid and writes inside the zone. The lowest and the highest bound all others; the last fragment's
    /// packet may take fewer than the one before it.
    fn check(&self, message: &Arriving, terms: &InboundTerms, zone: Zone, lands: bool) {
        let geometry = &message.geometry;
        let last = geometry.fragment_count() - 1;
        for index in [0, last.saturating_sub(1), last] {
            let start = (message.slots.payload).wrapping_add_signed(geometry.rx_frame_start(index));
            let entry = start - PACKET_HEADROOM;
            let further = u64::from((terms.frames_of(geometry, index) - 1) * terms.caps.capacity);
            let chunk_len = terms.chunk_len;
            assert!(
                entry >= zone.start
                    && entry + further + u64::from(chunk_len) <= zone.start + zone.len
                    && (!lands || fill_address_is_valid(entry + further, chunk_len, self.registered_len)),
                "fill entry outside its landing zone"
            );
        }
    }
}

/// Landing memory of which one address may have so much that a message in a zone of `zone_len` bytes fits.
pub(crate) const fn sure_len(zone_len: u64) -> u64 {
    let zone = pages_len(zone_len);
    let others = if zone < LANDING_LEN_SHARED {
        zone
    } else {
        LANDING_LEN_SHARED
    };
    zone.saturating_add(others)
}

/// How much of `len` bytes one address may have while others have sessions.
pub(crate) const fn share_of(len: u64) -> u64 {
    let half = len / 2;
    len - if half < LANDING_LEN_SHARED {
        half
    } else {
        LANDING_LEN_SHARED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_fits_the_share_of_what_is_sure() {
        for zone in [
            1,
            4096,
            1 << 20,
            LANDING_LEN_SHARED,
            LANDING_LEN_SHARED + 4096,
            1 << 30,
        ] {
            let sure = sure_len(zone);
            assert!(share_of(sure) >= zone, "{zone}");
            assert!(sure - share_of(sure) >= zone.min(LANDING_LEN_SHARED), "{zone}");
        }
    }
}
