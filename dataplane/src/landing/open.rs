//! Open entries: a descending run of slots for no message in particular, in which short messages land that were not announced.
//!
//! The packet of such a message that travels first ends with its facts ([`Facts`]). When it lands in an open slot, the open entries behind it
//! become the message's own (*claim*), and it lies in one piece wherever it began: slots descend as its packets do.
//!
//! ```text
//!  open run   … [slot 4][slot 3][slot 2][slot 1][slot 0]     posted 4, 3, 2, 1, 0
//!  A (3)         A2 facts  A1      A0                        A's bytes: from slot 2 up to its end in slot 4
//!  B (2)                                 B1 facts  B0        B1 covers the header that A0 left in slot 1's upper end, or leaves it
//! ```
//! No later packet reaches the message above (I1), and the header of a lowest fragment lies between two messages, so that nothing is saved
//! and put back (I5). That header may be gone before it is looked at: facts pair the first packet, and the digest proves all (I3).
//!
//! In zero-copy mode the next packets may reach the message above, as far as their chunks do ([`InboundTerms::reach`]). So its sender has
//! sent *fillers* behind it, one for each slot that is reached, which are headers alone, and the message is shown when their entries are used. What
//! landed, facts alone tell. Entries that fill a lap up, or stand for packets too many, are open ones as well.
//!
//! What does not find its slots in one piece, since a region ends there or its first packet met another message's entry behind a loss, has
//! memory of its own, and each of its fragments is copied there. So are the first ones of an announced message that comes to open entries.

use lm_protocol::geometry::Layout;
use lm_protocol::streaming::Release;
use lm_protocol::wire::lm::{Credit, Facts};

use super::aims::{Aim, Owner};
use super::arriving::{About, Arriving, Zone};
use super::care::Datagram;
use super::entries::Entries;
use super::inbound::Inbound;
use super::sessions::Sessions;
use super::terms::InboundTerms;
use super::zones::Memory;
use crate::arena::Arena;
use crate::memory::{HUGE_PAGE_LEN, PACKET_HEADROOM, Umem, crosses_huge_page};
use crate::mutants::mutant;
use crate::placing::Left;
use crate::port::RxQueue;
use crate::words::Words;

/// Slots of a region, where laps are no longer.
const SLOTS: u32 = 512;
/// Laps of a region.
const LAPS: u32 = 5;
/// Open entries that are to stand: packets that a sender may send unannounced.
const STANDING: u32 = Facts::FRAGMENTS_MAX;
/// Used entries after which others are opened.
const REFILL: u32 = 16;
/// Owner of open entries: no session has this serial.
const NO_SESSION: Owner = Owner { serial: 0, row: 0 };

/// Open entries, and where the next ones will be.
#[derive(Debug, Default)]
pub(super) struct Open {
    region: Option<Region>,
    /// Open entries that no packet has used, and no message claimed.
    pub(super) standing: u32,
    /// Longest packet, in bytes, that the last ones are for.
    pub(super) frame_len: u16,
    /// Regions so far: entries of two are never in one piece.
    regions: u32,
}

/// Memory in which entries are opened, from its end down. Messages share it: the arena counts them.
#[derive(Clone, Copy, Debug)]
struct Region {
    zone: Zone,
    /// How messages are cut that land there.
    layout: Layout,
    /// UMEM address at which the next one's packet will begin.
    next: u64,
    slots: u32,
    left: u32,
}

impl Aim {
    /// An entry of the open run.
    pub(super) fn is_open(&self) -> bool {
        self.owner == NO_SESSION && self.start != Aim::SKIPPED && !self.spare
    }
}

impl Entries {
    /// Writes `count` entries for no message, `offset` behind the last ones that were submitted: open ones, or spare frames where there is no memory for
    /// these. Gives how many there were.
    pub(super) fn fill(
        &mut self,
        queue: &mut impl RxQueue,
        terms: &InboundTerms,
        memory: &mut Memory<'_>,
        count: u32,
        offset: u32,
    ) -> u32 {
        let mut written = 0;
        while written < count {
            let offset = offset + written;
            if let Some(region) = self.take_region(terms, memory, offset) {
                written += self.write_open(queue, terms, region, count - written, offset);
                continue;
            }
            let Some(start) = self.take_kept() else { break };
            queue.write(offset, start - PACKET_HEADROOM);
            self.aims.push_back(Aim {
                start,
                spare: true,
                ..Aim::skipped(NO_SESSION, 0, 0..0)
            });
            written += 1;
        }
        written
    }

    /// Writes up to `count` open entries of a region, `offset` behind the last ones that were submitted. Gives how many there were; what is left of the
    /// region is for the next ones.
    fn write_open(
        &mut self,
        queue: &mut impl RxQueue,
        terms: &InboundTerms,
        mut region: Region,
        count: u32,
        offset: u32,
    ) -> u32 {
        let step = u64::from(region.layout.payload_len());
        let is_skipped =
            |start: u64| terms.caps.page_ends && crosses_huge_page(start - PACKET_HEADROOM, terms.chunk_len);
        while region.left > 0 && is_skipped(region.next) {
            (region.next, region.left) = (region.next - step, region.left - 1);
        }
        let slot = region.slots - region.left;
        let starts = (0..u64::from(region.left.min(count))).map(|at| region.next - at * step);
        let mut entries = 0;
        for start in starts.take_while(|&start| !is_skipped(start)) {
            queue.write(offset + entries, start - PACKET_HEADROOM);
            entries += 1;
        }
        if let Some(more) = entries.checked_sub(1) {
            self.add(&Aim {
                start: region.next,
                until: slot,
                more,
                step: step as u32,
                ..Aim::skipped(NO_SESSION, self.open.regions, slot..slot)
            });
        }
        region.next -= u64::from(entries) * step;
        region.left -= entries;
        match region.left {
            0 => self.quarantine_until(
                region.zone,
                Left::GivenUp,
                self.posted + u64::from(offset + entries),
            ),
            _ => self.open.region = Some(region),
        }
        self.open.standing += entries;
        self.open.frame_len = terms.layout.max_frame_len();
        entries
    }

    /// Takes the region that the next open entries are of, if there is memory for one.
    fn take_region(&mut self, terms: &InboundTerms, memory: &mut Memory<'_>, offset: u32) -> Option<Region> {
        if !memory.opens || memory.placing.is_some() {
            return None;
        }
        match self.open.region.take() {
            Some(region) if region.layout == terms.layout => Some(region),
            other => {
                if let Some(other) = other {
                    let posted = self.posted + u64::from(offset);
                    self.quarantine_until(other.zone, Left::GivenUp, posted);
                }
                self.open.begin(terms, memory)
            }
        }
    }

    /// Open entries that are unused.
    pub(crate) fn standing(&self) -> u32 {
        self.open.standing
    }

    /// Whether memory is kept that no message has.
    pub(super) fn has_region(&self) -> bool {
        self.open.region.is_some()
    }

    /// Nothing is posted any more.
    pub(super) fn forget_open(&mut self, arena: &mut Arena) {
        self.open.standing = 0;
        if let Some(region) = self.open.region.take() {
            arena.free(region.zone.start, region.zone.len);
        }
    }

    /// The open entries below what begins at `above` are those of a message's `count` fragments behind its first from now on. `false`: there are not as
    /// many in one piece.
    fn claim(&mut self, (owner, number): (Owner, u32), count: u32, above: u64) -> bool {
        let Some(open) = self
            .aims
            .front_mut()
            .filter(|aim| aim.is_open() && aim.count() >= count)
        else {
            return false;
        };
        if above != open.start + u64::from(open.step) && !mutant!(ClaimedAcross) {
            return false;
        }
        let claimed = Aim {
            owner,
            number,
            position: 1,
            until: 2,
            more: count - 1,
            ..*open
        };
        match open.count() == count {
            true => *open = claimed,
            false => {
                open.pass(count);
                self.aims.push_front(claimed);
            }
        }
        self.open.standing -= count;
        self.zoned = self.zoned.max(self.received + u64::from(count));
        true
    }

    /// A message's fragments come to entries that were not posted for it, and are copied from there. Without a witness they are those that come next.
    fn leave_all_out(&mut self, message: &mut Arriving, owner: Owner) {
        let count = message.fragment_count();
        match self.caps.witness {
            true => self
                .aims
                .push_front(Aim::skipped(owner, message.number, 0..count)),
            false => self.assign(0, (owner, message.number), 1..count + message.fillers),
        }
        message.slots.posted = count;
    }
}

impl Open {
    /// Takes memory for open entries, if there is more than a message of the session can need.
    fn begin(&mut self, terms: &InboundTerms, memory: &mut Memory<'_>) -> Option<Region> {
        let slots = SLOTS.max(LAPS * terms.caps.lap);
        let len = u64::from(slots) * u64::from(terms.layout.payload_len());
        let geometry = terms.layout.session_message(len).ok()?;
        let (zone_len, front_margin) = terms.zone_of(&geometry);
        let (arena, end) = (&mut *memory.arena, memory.registered_len);
        // No slot of one that lies in a huge page is skipped.
        let pages = (arena.start() / HUGE_PAGE_LEN..end / HUGE_PAGE_LEN).map(|page| page * HUGE_PAGE_LEN);
        let in_page = { pages.filter(|_| terms.caps.page_ends) }
            .find_map(|page| arena.allocate_in(zone_len, page, page + HUGE_PAGE_LEN));
        let start = in_page.or_else(|| arena.allocate_in(zone_len, 0, end))?;
        if !memory.arena.fits(terms.zone_len_max()) {
            memory.arena.free(start, zone_len);
            return None;
        }
        memory.arena.share(start, zone_len);
        self.regions = self.regions.wrapping_add(1);
        Some(Region {
            zone: Zone::of_arena(start, zone_len),
            layout: terms.layout,
            next: (start + front_margin).wrapping_add_signed(geometry.rx_frame_start(slots - 1)),
            slots,
            left: slots,
        })
    }
}

impl Arriving {
    /// Its entries are open ones, the first of which its last fragment's packet meets; that begins at UMEM address `start`.
    fn claimed(&mut self, start: u64, arena: &mut Arena) {
        let count = self.fragment_count();
        let payload = start.wrapping_sub_signed(self.geometry.rx_frame_start(count - 1));
        arena.join(payload);
        let len = u64::from(count) * u64::from(self.geometry.layout().payload_len());
        self.slots.zone = Some(Zone::of_arena(payload, len));
        self.slots.payload = payload;
        self.slots.may_post = true;
        self.slots.posted = count;
        self.is_claimed = true;
    }
}

impl Inbound {
    /// Whether its sender's messages may come unannounced.
    pub(super) fn goes_ahead(&self) -> bool {
        let caps = &self.terms.caps;
        self.terms.goes_ahead && self.lands() && caps.capacity == 0
    }

    /// The message that was announced while its packets were on the way, unannounced.
    pub(super) fn overtaken(&self) -> Option<&Arriving> {
        (self.order.next())
            .filter(|next| next.has_facts && next.slots.posted == 0 && next.slots.zone.is_none())
    }

    /// Whether message `number` is the next one, and known from now on. `len` bytes of its fragment `index`, where that is said, lie at UMEM address
    /// `payload`; that fragment is its last, which travels first, and ends with its facts.
    fn learn(
        &mut self,
        (number, index): (u32, Option<u32>),
        payload: u64,
        len: u64,
        umem: &Umem,
        now_ns: u64,
    ) -> bool {
        let known = self.overtaken().filter(|message| message.number == number);
        let known = known.map(|message| (message.base, message.len));
        let is_next = known.is_some() || number == self.order.announced();
        if !self.terms.goes_ahead || !is_next || len < Facts::LEN as u64 {
            return false;
        }
        let mut bytes = [0; Facts::LEN];
        umem.copy_from(payload + len - Facts::LEN as u64, &mut bytes);
        let facts = self.places.evidence().facts(bytes);
        let geometry = facts.and_then(|facts| Facts::geometry(&self.terms.layout, facts.len.get()));
        let (Some(facts), Some(geometry)) = (facts, geometry) else {
            return false;
        };
        let last = geometry.fragment_count() - 1;
        let is_its = (facts.session_key, facts.message) == (self.terms.key.into(), number.into())
            && index.is_none_or(|index| index == last)
            && len == u64::from(geometry.fragment_len(last))
            && last < self.terms.window.fragments()
            && facts.sent.get() == known.map_or(self.order.packets(), |(base, _)| base) as u32
            && known.is_none_or(|(_, len)| len == facts.len.get());
        let about = About {
            len: facts.len.get(),
            tag: facts.tag.get(),
            words: Words::NONE,
            has_facts: true,
        };
        if !is_its || (known.is_none() && self.announce(number, &about, Release::Whole, now_ns).is_err()) {
            return false;
        }
        if let Some(at) = self.order.position_of(number) {
            self.order.at_mut(at).proof.announced = Some(facts.digest.get());
        }
        self.announced_all_the_same = 0;
        self.places.repair.ahead += 1;
        self.credit = facts.credit;
        true
    }

    /// A datagram of a message came that is not known. If it has facts, the message is known from now on; else its sender is to say what it is.
    #[cold]
    pub(super) fn learn_from(&mut self, datagram: &Datagram, umem: &Umem, now_ns: u64) {
        let (number, index, _) = datagram.fragment;
        match self.learn((number, Some(index)), datagram.from, datagram.len, umem, now_ns) {
            true => self.places.repair.ahead_copied += 1,
            false => self.told.is_unknown(),
        }
    }
}

impl Sessions {
    /// A packet of a message landed that is not known: its fragment `index`, where that is said, of `len` bytes behind `header_len` others. If it has
    /// facts, the message is known from now on: gives what the entry `aim`, in which the packet lies, is for.
    #[cold]
    pub(super) fn claim(
        &mut self,
        aim: &Aim,
        (row, number, index): (u8, u32, Option<u32>),
        (start, len): (u64, u32),
        (umem, memory): (&Umem, &mut Memory<'_>),
        now_ns: u64,
    ) -> Option<Aim> {
        let inbound = self.at_mut(row)?;
        let header_len = u32::from(inbound.terms.layout.fragment_header_len(1));
        let (payload, len) = (start + u64::from(header_len), len.checked_sub(header_len)?);
        if !inbound.learn((number, index), payload, len.into(), umem, now_ns) {
            return None;
        }
        self.limits_messages = true;
        if memory.placing.is_some() {
            let inbound = self.at_mut(row)?;
            inbound.place(memory);
        } else {
            self.bound_memory(row, memory);
        }
        let Sessions { rows, entries, .. } = self;
        let inbound = rows[usize::from(row)].as_deref_mut()?;
        let (owner, terms, may_take) = (inbound.owner(), &inbound.terms, &mut inbound.may_take);
        let at = inbound.order.position_of(number)?;
        let message = inbound.order.at_mut(at);
        let (its, rest) = ((owner, number), message.fragment_count() - 1 + message.fillers);
        let is_fit =
            memory.placing.is_none() && aim.is_open() && aim.step == u32::from(terms.layout.payload_len());
        let mut known = Aim {
            owner,
            number,
            position: 0,
            until: 1,
            ..*aim
        };
        if is_fit && entries.claim(its, rest, aim.start) {
            message.claimed(aim.start, memory.arena);
        } else {
            inbound.places.repair.ahead_copied += 1;
            known = match terms.caps.witness {
                true => *aim,
                false => Aim { spare: true, ..known },
            };
            if memory.find(message, terms, true, may_take) {
                entries.leave_all_out(message, owner);
            }
        }
        inbound.order.look_for_unposted();
        Some(known)
    }

    /// What came with the last message of a peer's session of the one that goes the other way.
    pub(crate) fn next_credit(&mut self) -> Option<(u16, Credit)> {
        let says = |row: &u8| self.at(*row).is_some_and(|inbound| inbound.credit.session != 0);
        let row = self.taken().find(says)?;
        let inbound = self.at_mut(row)?;
        Some((inbound.terms.peer.index, std::mem::take(&mut inbound.credit)))
    }

    /// Whether messages of a session may come unannounced: no announced packets of another one are under way, whose entries these would
    /// use, and all sessions that land cut messages alike.
    pub(super) fn may_go_ahead(&self, inbound: &Inbound) -> bool {
        let layout = inbound.terms.layout;
        let hinders = |other: &Inbound| other.lands() && (other.left() > 0 || other.terms.layout != layout);
        inbound.goes_ahead() && inbound.opens && !self.others(inbound.row()).any(hinders)
    }

    /// Opens entries behind a short message that came alone, and last.
    pub(super) fn open(&mut self, queue: &mut impl RxQueue, memory: &mut Memory<'_>) -> u32 {
        if !self.iter().any(|inbound| inbound.opens) {
            return 0;
        }
        let landing = self.iter().filter(|inbound| inbound.lands());
        let Some(inbound) = landing.max_by_key(|inbound| inbound.progress.last_ns()) else {
            return 0;
        };
        let opens = memory.opens && memory.placing.is_none() && self.may_go_ahead(inbound);
        if inbound.order.front().is_some() || !opens {
            return 0;
        }
        let (terms, lap) = (inbound.terms, self.entries.caps.lap);
        // What the device has taken is known when the next packets have come: until then another message may come.
        let messages = if terms.caps.witness { 1 } else { 2 };
        let wanted = messages * (STANDING + terms.fillers);
        let wanted = wanted.saturating_sub(self.entries.open.standing);
        let room = terms.limits.posted_max.saturating_sub(self.entries.outstanding());
        let room = queue.room(wanted.next_multiple_of(lap)).min(room) / lap * lap;
        if wanted < REFILL || room == 0 {
            return 0;
        }
        let kept = self.entries.spare.as_ref().map_or(0, |spare| spare.available());
        let is_sure = lap == 1 || kept >= room as usize;
        self.entries.open.region = self.entries.take_region(&terms, memory, 0);
        let written = match is_sure && self.entries.has_region() {
            true => (self.entries).fill(queue, &terms, memory, room.min(wanted.next_multiple_of(lap)), 0),
            false => 0,
        };
        self.has_written(queue, written, written);
        self.arrivals.open_refused += u64::from(written == 0);
        self.limits_messages |= written > 0;
        if let Some(inbound) = self.at_mut(terms.row()) {
            // Without memory it is tried again behind the next message.
            inbound.opens = written > 0;
        }
        written
    }
}
