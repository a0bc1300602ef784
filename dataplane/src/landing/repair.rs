//! Repair: what is done about fragments that were lost, came late, twice, or into another's slot.
//!
//! Fragments that do not come are asked for. A message that is whole while entries posted in its zone are
//! unused, with nothing under way that would use them, is copied out of the zone, which stays quarantined (I1).

use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::MissingRange;

use super::aims::{Aim, Owner};
use super::arriving::{Arriving, GivenUp, Verdict, Zone, index_ranges};
use super::care::Care;
use super::entries::Entries;
use crate::arena::Arena;
use crate::bounds::RANGES_MAX;
use crate::memory::Umem;
use crate::placing::Left;

/// What a sender says it has sent is believed to be lost when it has not come for so long.
pub(super) const CLAIM_GRACE_NS: u64 = 200_000;
/// The same in zero-copy mode, where who is taken for lost and comes after all shifts what comes behind: cards hold packets back,
/// and a claim comes by another queue.
pub(super) const CLAIM_GRACE_ZERO_COPY_NS: u64 = 10_000_000;
/// A socket that is never empty, because somebody floods it, puts that off for so long.
const SOCKET_PATIENCE_NS: u64 = 100_000_000;
/// Without reliable delivery a message ends so long after the first loss in it was noticed, if everything else is known.
const GIVE_UP_AFTER_NS: u64 = 200_000;
/// Without reliable delivery a message whose digests do not come is given up after so long.
const PROOF_PATIENCE: Duration = Duration::from_millis(500);
/// Quarantined memory that a message waits for is taken back, and the channel built anew, when nobody may send what would use the
/// entries there, or when nothing has landed for so long: many time slices, since who may send can be off the processor.
const QUARANTINE_PATIENCE_NS: u64 = 200_000_000;
/// Entries that keep fragments from their places, for which there is no room elsewhere, are voided when nothing has landed for so long: the
/// packets that they were posted for are lost, all of them, and asked for again.
const ROOM_PATIENCE_NS: u64 = 20_000_000;
/// A whole message waits so long for other packets to use the entries left in its zone.
const LEFTOVER_PATIENCE_NS: u64 = 100_000;
/// Longer messages are not copied out: building the channel anew takes less time.
const COPY_OUT_MAX: u64 = 4 << 20;

/// What has to be done about the front message when nothing else comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// It was given up; this is what its sender and the application are told.
    GivenUp(GivenUp),
    /// It was delivered without some fragments; its sender is told.
    Partial(GivenUp),
    /// The channel has to be built anew: a message is whole that cannot be shown while its entries are posted, or the
    /// gate's order is off.
    Rebuild,
    /// Nothing of the session reaches the landing queue.
    StopLanding,
}

/// A look at what time brings to a session.
pub(super) struct Watch<'a> {
    pub(super) care: Care<'a>,
    pub(super) entries: &'a mut Entries,
    pub(super) arena: &'a mut Arena,
    pub(super) umem: &'a Umem,
    /// Some sender may send what would use entries that are left.
    pub(super) more_may_come: bool,
    pub(super) now_ns: u64,
}

impl Watch<'_> {
    /// Messages are given up, or shown without waiting for more.
    #[inline]
    pub(super) fn run(&mut self) -> Option<Remedy> {
        if self.care.places.held().is_full()
            && self.entries.outstanding() > 0
            && self.now_ns.saturating_sub(self.entries.landed_ns) >= ROOM_PATIENCE_NS
        {
            return Some(Remedy::Rebuild);
        }
        if !self.care.terms.caps.witness {
            self.care.locate_missing(self.umem, self.now_ns);
        }
        let is_owed = self.entries.owes_zones() && self.keeps_zones_for_nothing(0);
        if is_owed {
            return Some(Remedy::Rebuild);
        }
        let front = self.care.order.front()?;
        if front.proof.verdict == Verdict::Contradicted && front.is_read() {
            // What is shown of it stays as it is, so it cannot become what its sender says now.
            return Some(self.contradicted());
        }
        let front = self.care.order.front().filter(|front| !front.is_refused())?;
        if front.is_aborted() {
            return self.settle_aborted();
        }
        if front.slots.zone.is_none() {
            let needs_memory = front.slots.open > 0;
            return (needs_memory && self.waits_for_quarantine(front)).then_some(Remedy::Rebuild);
        }
        if front.is_kept_from_reader() && self.care.terms.caps.witness {
            let is_quiet = self.care.quiet_ns(self.entries, self.now_ns) >= ROOM_PATIENCE_NS;
            return is_quiet.then_some(Remedy::Rebuild);
        }
        let front = self.care.order.front()?;
        if front.gaps.arrivals.is_complete() {
            return self.watch_whole();
        }
        let lost_ns = self.now_ns.saturating_sub(front.gaps.missing_ns?);
        // Known to its end, or as far as its sender has credit: entries behind a lost one may have to wait for it (I5).
        let expected = front.gaps.arrivals.expected();
        let known = expected == front.fragment_count() || expected >= front.slots.posted;
        // What its writer will release is not known to be lost.
        let known = known && front.is_released();
        if self.care.terms.delivery == Delivery::Reliable || !known || lost_ns < GIVE_UP_AFTER_NS {
            return None;
        }
        self.settle_incomplete()
    }

    /// The writer of the front message gave it up: it goes when no packet will use what is posted for it.
    #[cold]
    fn settle_aborted(&mut self) -> Option<Remedy> {
        let grace_ns = match self.care.terms.caps.witness {
            true => CLAIM_GRACE_NS,
            false => CLAIM_GRACE_ZERO_COPY_NS,
        };
        let front = self.care.order.front()?;
        let awaits_packets = front.slots.consumed < front.slots.posted
            && self.care.quiet_ns(self.entries, self.now_ns) < grace_ns;
        (!awaits_packets && !self.care.settled.has_landed()).then(|| {
            let front = self.care.front();
            front.gaps.arrivals.claim(u32::MAX);
            let given_up = front.given_up(front.missing());
            self.give_up_front(given_up)
        })
    }

    /// Whether the front message, for which there is no memory, waits for such that is quarantined.
    fn waits_for_quarantine(&self, front: &Arriving) -> bool {
        self.keeps_zones_for_nothing(front.announced_ns)
    }

    /// Whether memory is quarantined, and nothing comes since `last_ns` that would use the entries there.
    fn keeps_zones_for_nothing(&self, last_ns: u64) -> bool {
        let last_ns = (self.care.progress.last_ns())
            .max(last_ns)
            .max(self.entries.landed_ns);
        let patience_ns = match self.more_may_come {
            true => QUARANTINE_PATIENCE_NS,
            false => LEFTOVER_PATIENCE_NS,
        };
        self.entries.outstanding() > 0
            && (self.entries.keeps_zones() || self.entries.has_region())
            && self.now_ns.saturating_sub(last_ns) >= patience_ns
    }

    /// Every fragment of the front message is here.
    fn watch_whole(&mut self) -> Option<Remedy> {
        let (umem, care) = (self.umem, &mut self.care);
        let front = care.order.front_mut()?;
        if front.proof.verdict == Verdict::Open {
            care.places.evidence_mut().note_unfinal(front, umem);
        }
        if !care.places.proves_front(front) {
            return self.seek_proof();
        }
        // Its own entries are all used, or others may still use them.
        if care.quiet_ns(self.entries, self.now_ns) < LEFTOVER_PATIENCE_NS {
            return None;
        }
        if care.front().is_final() {
            care.settle_trouble(umem);
            return None;
        }
        // What an application placed stays there.
        let is_placed = (self.care.front().slots.zone).is_some_and(|zone| zone.placed);
        match !is_placed && self.copy_out() {
            true if self.care.front().gaps.arrivals.is_complete() => {
                self.care.land(Vec::new());
                self.care.settle_trouble(umem);
                None
            }
            // How far its sender has come is about to be known, and says which entries are not to be posted again.
            _ if !self.care.terms.caps.witness && self.care.progress.has_claim() => None,
            _ => Some(Remedy::Rebuild),
        }
    }

    /// The front message is shown without what is missing, or given up.
    fn settle_incomplete(&mut self) -> Option<Remedy> {
        let umem = self.umem;
        // What is shown of a message is verified, too.
        let provable = self.partial_is_proved()?;
        let care = &mut self.care;
        let front = care.front();
        let count = front.fragment_count();
        front.gaps.arrivals.claim(count);
        let given_up = front.given_up(front.missing());
        let whole_zone = front.slots.consumed == count && front.gaps.held == 0;
        let shows = care.terms.delivery == Delivery::Partial && provable;
        if shows && !whole_zone && care.front().is_read() {
            // It is not copied out: on a new channel nothing is posted for it.
            care.front().ends_here = true;
            return Some(Remedy::Rebuild);
        }
        care.settled.broke(given_up.number, None);
        if shows && (whole_zone || self.copy_out()) {
            // What is copied out in zero-copy mode is compared once more.
            let missing = self.care.front().missing();
            let given_up = GivenUp { missing, ..given_up };
            self.care.land(given_up.missing.clone());
            self.care.settle_trouble(umem);
            return Some(Remedy::Partial(given_up));
        }
        self.drop_front();
        self.care.settle_trouble(umem);
        Some(Remedy::GivenUp(given_up))
    }

    /// Copies the front message, as far as it is here, to memory of its own. `false`: there is none, it would be too much, or something of
    /// the message is shown where it is.
    fn copy_out(&mut self) -> bool {
        let Care {
            terms,
            order,
            places,
            progress,
            ..
        } = &mut self.care;
        let Some(front) = order.front_mut() else {
            return false;
        };
        let (len, front_margin) = terms.zone_of(&front.geometry);
        if len > COPY_OUT_MAX || front.is_read() {
            return false;
        }
        let Some(start) = self.arena.allocate(len) else {
            return false;
        };
        let payload = start + front_margin;
        places.copy_out(front, payload, self.umem);
        if !terms.caps.witness {
            places.compare_copy(front, (start, payload), progress.last_ns(), self.umem);
        }
        front.slots.payload = payload;
        if let Some(reader) = &front.reader {
            reader.moved(start, payload, self.arena);
        }
        if let Some(zone) = front.slots.zone.replace(Zone::of_arena(start, len)) {
            self.entries.quarantine(zone, Left::Moved);
        }
        true
    }

    /// Forgets the front message; its zone comes back when nothing can be written there any more.
    fn drop_front(&mut self) {
        let Some(mut front) = self.care.order.pop_front() else {
            return;
        };
        let is_aborted = front.is_aborted();
        if let Some(reader) = &mut front.reader {
            reader.given_up(is_aborted);
        }
        self.care.places.repair.given_up += front.arrived();
        self.care.progress.overtaken(front.end());
        self.care.settled.deliver_to(front.number.wrapping_add(1));
        if let Some(zone) = front.slots.zone {
            self.entries.quarantine(zone, Left::GivenUp);
        }
        self.entries.free_quarantined(self.arena);
    }

    /// What is to be done about the front message, all of whose fragments are here and which is not proved.
    fn seek_proof(&mut self) -> Option<Remedy> {
        let front = self.care.front();
        let (number, verdict) = (front.number, front.proof.verdict);
        match verdict {
            Verdict::Contradicted => return Some(self.contradicted()),
            Verdict::Disproved if self.care.terms.gives_up_unasked() => {
                // All of them: which are not is not asked.
                let given_up = self.care.places.repair.given_up;
                let remedy = self.give_up_all();
                let repair = &mut self.care.places.repair;
                repair.corrupt += repair.given_up - given_up;
                repair.given_up = given_up;
                return Some(remedy);
            }
            Verdict::Disproved if self.care.places.evidence().proved(number).is_some() => {
                self.settle_differences();
                return None;
            }
            _ => {}
        }
        self.has_waited(number).then(|| self.give_up_all())
    }

    /// Whether digests of message `number` have been waited for long enough, where it may be given up.
    fn has_waited(&mut self, number: u32) -> bool {
        let waited = self.care.places.evidence_mut().waited(number, self.now_ns);
        self.care.terms.delivery != Delivery::Reliable && waited >= PROOF_PATIENCE
    }

    fn contradicted(&mut self) -> Remedy {
        self.care.places.repair.contradictory += 1;
        self.give_up_all()
    }

    /// Nothing of the front message is known to be right.
    fn give_up_all(&mut self) -> Remedy {
        let front = self.care.front();
        let given_up = front.given_up(front.all());
        self.give_up_front(given_up)
    }

    fn give_up_front(&mut self, given_up: GivenUp) -> Remedy {
        self.care.settled.broke(given_up.number, None);
        self.drop_front();
        self.care.settle_trouble(self.umem);
        Remedy::GivenUp(given_up)
    }

    /// Before the front message is settled without some fragments: whether the others are proved, those that differ having
    /// been rejected. `None`: not known yet.
    fn partial_is_proved(&mut self) -> Option<bool> {
        if !self.care.places.evidence().has_digests() || self.care.terms.gives_up_unasked() {
            return Some(true);
        }
        let front = self.care.front();
        let number = front.number;
        front.proof.wanted = true;
        if front.proof.verdict == Verdict::Contradicted {
            self.care.places.repair.contradictory += 1;
            return Some(false);
        }
        if self.care.places.evidence().proved(number).is_some() {
            self.settle_differences();
            // In zero-copy mode it may be whole now, and gone.
            let is_partial = |front: &Arriving| front.number == number && !front.gaps.arrivals.is_complete();
            return (self.care.order.front().is_some_and(is_partial)).then_some(true);
        }
        self.has_waited(number).then_some(false)
    }

    /// What of the front message is not as its proved manifest says is missing from now on, unless it lies elsewhere.
    fn settle_differences(&mut self) {
        match self.care.terms.caps.witness {
            true => (self.care.places).reject_what_differs(self.care.order.at_mut(0), self.now_ns),
            false => self.care.relocate(self.umem, self.now_ns),
        }
    }
}

impl Care<'_> {
    /// What its sender says it has sent, and has not come for long, is lost. The kernel's socket was last found empty at `drained_ns`, where
    /// packets come by it.
    pub(super) fn believe_claim(&mut self, drained_ns: Option<u64>, now_ns: u64) {
        let has_witness = self.terms.caps.witness;
        let grace_ns = match has_witness {
            true => CLAIM_GRACE_NS,
            false => CLAIM_GRACE_ZERO_COPY_NS,
        };
        // What waits in the socket behind others' datagrams is not lost.
        let seen_ns = drained_ns.map_or(now_ns, |drained_ns| {
            drained_ns.max(now_ns.saturating_sub(SOCKET_PATIENCE_NS))
        });
        let Some((sent, nothing_came)) = self.progress.believe(grace_ns, seen_ns) else {
            return;
        };
        if !has_witness {
            // What came since says that more was sent.
            match nothing_came {
                true => self.progress.correct(sent),
                false => self.progress.overtaken(sent),
            }
        }
        for message in self.order.iter_mut() {
            let sent_of_it = message.sent_of(sent);
            if sent_of_it > 0 && message.gaps.arrivals.claim(sent_of_it) {
                message.gaps.noticed(now_ns);
                self.places.trouble();
            }
        }
    }

    /// How long nothing of it has come, nor anything else to the channel.
    fn quiet_ns(&self, entries: &Entries, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.progress.last_ns().max(entries.landed_ns))
    }

    /// Leaves out the entries of the front message that are not posted, when every fragment has come otherwise. Says whether
    /// there were such.
    #[inline]
    pub(super) fn skip_unposted(&mut self, owner: Owner, entries: &mut Entries, now_ns: u64) -> bool {
        let Some(front) = self
            .order
            .front()
            .filter(|front| front.gaps.arrivals.is_complete())
        else {
            return false;
        };
        let (posted, count) = (front.slots.posted, front.fragment_count());
        let is_quiet = self.quiet_ns(entries, now_ns) >= LEFTOVER_PATIENCE_NS;
        if front.slots.zone.is_none() || posted == count || !is_quiet {
            return false;
        }
        let front = self.order.at_mut(0);
        front.slots.posted = count;
        let skipped = Aim::skipped(owner, front.number, posted..count);
        entries.aims.push_back(skipped);
        self.order.look_for_unposted();
        true
    }

    /// The next request for what is missing and due: a message's number, and ranges of fragment indices. It counts as
    /// sent: one that is lost is repeated like any other.
    pub(crate) fn next_request(&mut self, now_ns: u64) -> Option<(u32, Vec<MissingRange>)> {
        if self.terms.delivery != Delivery::Reliable {
            return None;
        }
        let pause = self.pace.pause();
        let now = Time::from_nanos(now_ns);
        for message in self.order.iter_mut() {
            // In zero-copy mode what seems to be missing may lie elsewhere.
            if message.waits() || (!self.terms.caps.witness && !message.shift.located) {
                continue;
            }
            let count = message.fragment_count();
            let gaps = &mut message.gaps;
            let Some(from) = gaps.timer.poll(now) else {
                continue;
            };
            let ranges: Vec<MissingRange> =
                index_ranges(&message.window, gaps.arrivals.missing(), from, count)
                    .take(RANGES_MAX)
                    .map(|range| MissingRange {
                        first: range.start,
                        len: range.end - range.start,
                    })
                    .collect();
            gaps.timer.asked(now, from, gaps.arrivals.expected(), pause);
            if !ranges.is_empty() {
                let requested: u64 = ranges.iter().map(|range| u64::from(range.len)).sum();
                self.places.repair.requested += requested;
                return Some((message.number, ranges));
            }
        }
        None
    }

    /// The next request for digests that is due: of the front message's fragments, or, without ranges, its own.
    pub(crate) fn next_digest_request(&mut self, now_ns: u64) -> Option<(u32, Vec<MissingRange>)> {
        let gives_up_unasked = self.terms.gives_up_unasked();
        (self.places).ask_for_digests(self.order.front(), gives_up_unasked, now_ns)
    }
}
