//! A session on its way in: its parts, and what concerns it as a whole.

use lm_protocol::control::Ended;
use lm_protocol::serial;
use lm_protocol::session::Unused;
use lm_protocol::streaming::{Heard, Release};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Credit, Facts, UnwholeMessage};

use super::aims::Owner;
use super::arriving::{About, GivenUp, Landed, Zone};
use super::astray::Astray;
use super::care::Care;
use super::entries::Entries;
use super::order::{Order, Settled};
use super::places::Places;
use super::posting::Poster;
use super::progress::{Pace, Progress, Untaken};
use super::repair::{Remedy, Watch};
use super::strays::Strays;
use super::terms::InboundTerms;
use super::zones::Memory;
use crate::arena::Arena;
use crate::bounds::ONE_COPY_ON_THE_WAY;
use crate::memory::Umem;
use crate::port::{Caps, RxQueue};

/// A gap in which nothing comes is a pause from here on: a sender that lost its core for a time slice makes none.
const PAUSE_NS: u64 = 20_000_000;
/// After this number of messages in a row that were announced although they might have come unannounced, and were copied for that,
/// [`PAUSE`] others find nothing open.
const TRIES: u8 = 4;
const PAUSE: u8 = 64;
/// Time after which a sender has heard of credit.
const HEARD_NS: u64 = 1_000_000;

/// Whether a session lands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stand {
    /// It has no place: all its fragments come by the kernel's socket.
    Aside,
    /// It has a place, and lands when nothing that it has credit for is under way.
    Draining,
    /// The gate is open to it, and entries are posted for it.
    Lands,
    /// The gate is open to it, but none of its packets reaches the landing queue: no entries are posted for it.
    Astray,
}

/// A session that others have with us.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) terms: InboundTerms,
    /// Tells it from others that had the same row.
    pub(super) serial: u32,
    stand: Stand,
    pub(super) astray: Astray,
    /// What the sender was last told.
    pub(crate) told: Told,
    pub(crate) order: Order,
    pub(crate) settled: Settled,
    pub(crate) progress: Progress,
    pub(super) pace: Pace,
    pub(crate) places: Places,
    strays: Strays,
    /// What is posted next was posted before.
    posts_again: bool,
    /// That its messages are shown when they are whole was said.
    pub(super) has_said_whole: bool,
    /// Bytes that zones of its next messages may take.
    pub(super) may_take: u64,
    /// Its last message was short and came alone: the next one may come unannounced.
    pub(super) opens: bool,
    /// Messages in a row that were announced all the same.
    pub(super) announced_all_the_same: u8,
    /// What came with its last message, of the session that goes the other way.
    pub(crate) credit: Credit,
}

/// What the sender of a session was last told, and what it makes of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    pub(crate) packet_limit: u32,
    /// When the limit was last raised.
    pub(crate) limit_ns: u64,
    pub(crate) delivered: u32,
    pub(crate) announced: u32,
    /// The sender asked, or repeated itself.
    pub(crate) asked: bool,
    /// Something changed since, first at `changed_ns`.
    pub(crate) changed: bool,
    pub(crate) changed_ns: u64,
    /// Packets that it may have sent (cumulative, mod 2^32) while it is another session's turn.
    pub(super) allowed: u32,
    /// It has left credit unused for long, while others were there.
    pub(super) is_silent: bool,
    /// Packets came of messages that are not known: it is to hear so in a word that has no other news.
    pub(super) is_unknown: bool,
}

impl Told {
    /// Something came of messages that are not known: their sender is to hear so.
    #[cold]
    pub(crate) fn is_unknown(&mut self) {
        (self.asked, self.is_unknown) = (true, true);
    }

    /// The sender was told that.
    pub(crate) fn is_told(&mut self, packet_limit: u32, delivered: u32, announced: u32, now_ns: u64) {
        let is_news =
            (packet_limit, delivered, announced) != (self.packet_limit, self.delivered, self.announced);
        if packet_limit != self.packet_limit {
            (self.packet_limit, self.limit_ns) = (packet_limit, now_ns);
        }
        (self.delivered, self.announced) = (delivered, announced);
        (self.asked, self.changed) = (self.is_unknown && is_news, false);
        self.is_unknown &= is_news;
    }
}

impl Inbound {
    /// One that lands. `arena`: where its landing zones will be.
    pub(crate) fn new(terms: InboundTerms, arena: &Arena, now_ns: u64) -> Inbound {
        let first = terms.first_message;
        Inbound {
            serial: 0,
            stand: Stand::Lands,
            astray: Astray::default(),
            told: Told {
                delivered: first,
                announced: first,
                ..Told::default()
            },
            order: Order::new(&terms),
            settled: Settled::new(first),
            progress: Progress::new(now_ns),
            pace: Pace::new(terms.limits.packets_landing(), terms.limits.adapts, now_ns),
            places: Places::new(&terms, arena),
            strays: Strays::new(&terms.layout),
            posts_again: false,
            has_said_whole: false,
            may_take: u64::MAX,
            opens: false,
            announced_all_the_same: 0,
            credit: Credit::default(),
            terms,
        }
    }

    /// One without a place.
    pub(crate) fn aside(terms: InboundTerms, arena: &Arena, now_ns: u64) -> Inbound {
        let mut inbound = Inbound::new(terms, arena, now_ns);
        inbound.lands_no_more();
        inbound.stand = Stand::Aside;
        inbound
    }

    /// Whether entries are posted for it. If not, all its fragments come by the kernel's socket.
    #[inline]
    pub(crate) fn lands(&self) -> bool {
        self.stand == Stand::Lands
    }

    /// Whether it takes a place of the landing queue.
    #[inline]
    pub(crate) fn has_place(&self) -> bool {
        self.stand != Stand::Aside
    }

    /// Whether the gate is open to it.
    pub(super) fn is_admitted(&self) -> bool {
        matches!(self.stand, Stand::Lands | Stand::Astray)
    }

    /// It has a place from now on.
    pub(crate) fn drain(&mut self) {
        self.stand = Stand::Draining;
    }

    /// It has a place, and nothing that it has credit for is under way.
    pub(crate) fn is_drained(&self) -> bool {
        let front = self.order.front();
        self.stand == Stand::Draining && front.is_none_or(|message| message.slots.zone.is_none())
    }

    /// Whether its messages go to and fro with others, so that each is waited for.
    pub(crate) fn is_exchange(&self) -> bool {
        self.opens && self.goes_ahead()
    }

    /// Its sender is told that it may send more packets, up to `limit`.
    pub(crate) fn tell_limit(&mut self, limit: u32, now_ns: u64) {
        let accepted = self.progress.accepted();
        let cumulative = |packets: u32| {
            let ahead = serial::distance(accepted as u32, packets);
            accepted.saturating_add_signed(i64::from(ahead))
        };
        // What it would be told of further, it could send at once.
        let is_more = limit != self.told.packet_limit;
        if is_more && self.order.packets_released() > cumulative(limit) {
            self.pace.told(cumulative(self.told.packet_limit), now_ns);
        }
    }

    /// It has no place from now on. Nothing is posted for it.
    pub(super) fn give_up_place(&mut self) {
        self.stand = Stand::Aside;
        // Its sender is to hear of it.
        self.told.asked = true;
    }

    /// The gate is open to it from the first message on that is not settled.
    pub(super) fn begin_landing(&mut self, caps: Caps, now_ns: u64) {
        self.stand = Stand::Lands;
        self.terms.caps = caps;
        self.pace.bound(self.terms.limits.packets_landing());
        let end = self
            .order
            .front()
            .map_or(self.order.packets(), |message| message.base);
        self.progress.overtaken(end);
        self.progress.forget_last();
        self.progress.begin(now_ns);
        self.astray.forget(self.told.packet_limit);
        self.told.allowed = self.progress.accepted_packets();
        // Its sender is to hear of it.
        self.told.asked = true;
    }

    /// Its parts, for what concerns several of them.
    #[inline]
    pub(crate) fn care(&mut self) -> Care<'_> {
        Care {
            terms: &self.terms,
            order: &mut self.order,
            settled: &mut self.settled,
            progress: &mut self.progress,
            pace: &mut self.pace,
            places: &mut self.places,
            strays: &mut self.strays,
            astray: &mut self.astray,
        }
    }

    /// What posts its entries. Its packets will use what is posted for `ahead` packets before.
    #[inline]
    pub(super) fn poster<'a, 'm>(
        &'a mut self,
        ahead: u32,
        entries: &'a mut Entries,
        memory: &'a mut Memory<'m>,
    ) -> Poster<'a, 'm> {
        Poster {
            owner: self.owner(),
            posted_max: self.pace.posted_max(&self.terms.limits),
            terms: &self.terms,
            order: &mut self.order,
            accepted: self.progress.accepted(),
            ahead,
            may_take: &mut self.may_take,
            entries,
            memory,
        }
    }

    /// The session's row on its channel: six bits of its key say it.
    #[inline]
    pub(crate) fn row(&self) -> u8 {
        self.terms.row()
    }

    #[inline]
    pub(super) fn owner(&self) -> Owner {
        Owner {
            serial: self.serial,
            row: self.row(),
        }
    }

    /// Takes the announcement of a message that is not known. If it cannot, nothing changed.
    pub(crate) fn announce(
        &mut self,
        number: u32,
        about: &About,
        release: Release,
        now_ns: u64,
    ) -> Result<(), Untaken> {
        let was_empty = self.order.front().is_none();
        let delivered = self.settled.delivered();
        (self.order).announce(&self.terms, (number, about), release, delivered, now_ns)?;
        if release == Release::Aborted {
            self.places.trouble();
        }
        let geometry = Facts::geometry(&self.terms.layout, about.len);
        let packets = geometry.map_or(u32::MAX, |with| with.fragment_count());
        let is_short = packets <= self.terms.window.fragments();
        let might_come_unannounced = was_empty && is_short && release == Release::Whole;
        let credit = serial::distance(self.progress.accepted_packets(), self.told.packet_limit);
        let has_heard = now_ns.saturating_sub(self.told.limit_ns) >= HEARD_NS;
        let has_credit = self.opens
            && has_heard
            && i64::from(credit) >= i64::from(packets) + i64::from(self.terms.fillers);
        if might_come_unannounced && (has_credit || self.announced_all_the_same >= TRIES) {
            self.announced_all_the_same = (self.announced_all_the_same + 1) % (TRIES + PAUSE);
        }
        self.opens = might_come_unannounced && self.announced_all_the_same < TRIES;
        if was_empty {
            self.progress.begin(now_ns);
            // Its sender sends it when it is confirmed.
            self.told.asked |= self.terms.goes_ahead && !about.has_facts;
        }
        Ok(())
    }

    /// The sender says how much of a message is released that was announced.
    pub(crate) fn hear(&mut self, number: u32, release: Release) -> Heard {
        let heard = match self.order.hear(number, release) {
            Some(heard) => heard,
            // Of one that is settled nothing is new. One that was whole is not given up afterwards.
            None if release == Release::Aborted && self.settled.was_whole(number) => Heard::Contradiction,
            None => Heard::Nothing,
        };
        if heard == Heard::Aborted {
            self.places.trouble();
        }
        heard
    }

    /// The sender says that it is there.
    pub(crate) fn heard_sender(&mut self, now_ns: u64) {
        let has_witness = self.terms.caps.witness;
        let front = self.order.front();
        if front.is_some_and(|front| front.awaits_writer(has_witness)) {
            self.progress.begin(now_ns);
        }
    }

    /// The sender says how many packets of the session it has sent (cumulative, mod 2^32). If it is not believed, nothing changed.
    pub(crate) fn claimed(&mut self, sent: u32, now_ns: u64) -> Result<(), Untaken> {
        (self.progress).claimed(sent, self.order.packets(), self.told.packet_limit, now_ns)
    }

    /// The next whole message. Call only after the kernel's statistics were found unchanged.
    pub(crate) fn next_landed(&mut self) -> Option<Landed> {
        self.settled.next(self.order.unsettled_from())
    }

    /// Messages that were settled without being whole, as far as their sender may not know it yet: no more than may be under way.
    pub(crate) fn unwhole(&self) -> impl Iterator<Item = UnwholeMessage> + Clone + '_ {
        self.settled.unwhole_from(self.surely_known())
    }

    /// Its sender knows of all messages before this one that they are settled: it announces none before it does.
    fn surely_known(&self) -> u32 {
        (self.order.announced()).wrapping_sub(self.terms.limits.messages_in_flight)
    }

    /// All messages before this number are settled, as its sender can know: of one that was declined it may not have heard, and takes no word
    /// of the end for it.
    pub(crate) fn confirmed(&self) -> u32 {
        let declined = self.unwhole().filter(|unwhole| unwhole.declined.is_some());
        let known = self.surely_known();
        let first = (declined.map(|unwhole| unwhole.message)).min_by_key(|number| number.wrapping_sub(known));
        first.unwrap_or(self.settled.delivered())
    }

    /// What its sender is told when it ends.
    pub(crate) fn ended(&self) -> Ended {
        let since_first = |number: u32| number.wrapping_sub(self.terms.first_message);
        Ended {
            session_key: self.terms.key,
            delivered: since_first(self.confirmed()),
            heard: Some(since_first(self.order.announced())),
        }
    }

    /// The arena has grown to `arena_len` bytes.
    pub(crate) fn grow(&mut self, arena_len: u64) {
        self.places.evidence_mut().grow(arena_len);
    }

    /// Whether every posted entry was used and every announced message settled.
    pub(crate) fn is_idle(&self) -> bool {
        self.order.front().is_none() && !self.settled.has_landed()
    }

    /// Nothing of it can be disturbed when the channel is built anew: it has had no message yet, or pauses.
    pub(crate) fn is_quiet(&self, now_ns: u64) -> bool {
        let pauses = || now_ns.saturating_sub(self.progress.last_ns()) >= PAUSE_NS;
        !self.lands()
            || (self.is_idle() && (self.settled.delivered() == self.terms.first_message || pauses()))
    }

    /// What its place is unused for; `None` while something lands there, or may.
    pub(crate) fn unused(&self, now_ns: u64) -> Option<Unused> {
        let is_idle = self.is_idle();
        let since_ns = match (is_idle, self.stalled_ns(now_ns)) {
            (true, _) => self.progress.last_ns(),
            (false, 0) => return None,
            (false, stalled_ns) => now_ns - stalled_ns,
        };
        let since = Time::from_nanos(since_ns);
        Some(Unused { since, is_idle })
    }

    /// Nanoseconds without progress while packets are owed to us; 0 when the next move is not the sender's.
    pub(crate) fn stalled_ns(&self, now_ns: u64) -> u64 {
        match self.order.front() {
            // Packets of it may have been sent, and be lost: others' use up credit in zero-copy mode.
            Some(message) if message.waits() => 0,
            Some(message) if message.awaits_writer(self.terms.caps.witness) => {
                now_ns.saturating_sub(self.progress.last_ns())
            }
            Some(message)
                if message.slots.posted > message.slots.consumed
                    || (!self.lands() && message.slots.posted > 0)
                    || message.gaps.missing_ns.is_some()
                    || self.places.evidence().is_awaited(Some(message)) =>
            {
                now_ns.saturating_sub(self.progress.last_ns())
            }
            // Others' packets used the entries that were posted for it, and it does not send what it may all the same.
            Some(_) if self.lands() => self.unused_credit_ns(now_ns),
            _ => 0,
        }
    }

    /// Nanoseconds that the sender has left credit unused which it was told of; 0: it has none, or nothing to send. What has come may lie aside until
    /// a turn of the session's brings memory for it, and credit may be left of packets that came twice.
    pub(super) fn unused_credit_ns(&self, now_ns: u64) -> u64 {
        let may_send = serial::precedes(self.progress.accepted_packets(), self.told.packet_limit);
        match may_send && self.left() > 0 {
            true => now_ns.saturating_sub(self.progress.last_ns().max(self.told.limit_ns)),
            false => 0,
        }
    }

    /// Its sender was told of credit for this number of packets more.
    #[cfg(test)]
    pub(crate) fn tell_more(&mut self, packets: u32) -> u32 {
        self.told.packet_limit += packets;
        self.told.allowed = self.told.packet_limit;
        self.told.packet_limit
    }

    /// Packets of announced messages that have not come.
    pub(super) fn left(&self) -> u64 {
        self.order.left(self.progress.accepted())
    }

    /// Whether entries may be posted for more packets, memory permitting.
    pub(super) fn wants_entries(&self) -> bool {
        self.lands() && self.order.next_open().is_some()
    }

    /// Whether its sender has something to send for which it needs a turn: entries, or, where others' packets used those that were
    /// posted for it, credit alone. Asked while it is not its turn.
    pub(super) fn wants_turn(&self) -> bool {
        let needs_credit = self.lands()
            && self.left() > 0
            && serial::precedes(self.told.allowed, self.order.packets_open() as u32);
        !self.told.is_silent && (self.wants_entries() || needs_credit)
    }

    /// The sender's time begins when it may send: until now the application had the memory.
    pub(super) fn may_send(&mut self, now_ns: u64) {
        if !std::mem::take(&mut self.posts_again) {
            self.progress.begin(now_ns);
        }
    }

    /// Its first message that is not settled has no memory.
    pub(super) fn waits_for_memory(&self) -> bool {
        self.order.front().is_some_and(|front| front.slots.zone.is_none())
    }

    /// Whether [`watch`](Inbound::watch) has anything to do.
    pub(super) fn needs_care(&self) -> bool {
        self.places.is_troubled()
            || self.progress.has_claim()
            || self.settled.has_landed()
            || self.places.evidence().is_awaited(self.order.front())
    }

    /// What time brings: losses at the end of what was sent, messages to be given up, or shown without waiting for more.
    /// `more_may_come`: some sender may send what would use entries that are left.
    pub(super) fn watch(
        &mut self,
        entries: &mut Entries,
        arena: &mut Arena,
        umem: &Umem,
        more_may_come: bool,
        now_ns: u64,
    ) -> Option<Remedy> {
        let drained_ns = (!self.lands()).then_some(entries.drained_ns);
        self.care().believe_claim(drained_ns, now_ns);
        match self.astray.passes_by().filter(|_| self.lands()) {
            Some(true) => return Some(Remedy::StopLanding),
            Some(false) if entries.outstanding() > 0 && !self.places.held().is_empty() => {
                return Some(Remedy::Rebuild);
            }
            _ => {}
        }
        let mut watch = Watch {
            care: self.care(),
            entries,
            arena,
            umem,
            more_may_come,
            now_ns,
        };
        watch.run()
    }

    /// None of the posted entries will be used: what was posted for packets that are still to come is posted again.
    pub(super) fn post_again(&mut self, umem: &Umem) {
        self.posts_again |= self.order.post_again(self.terms.caps.witness);
        self.end_front(umem);
        self.progress.forget_last();
        self.astray.forget(self.told.packet_limit);
        self.care().settle_trouble(umem);
    }

    /// If the front message is to be settled as it is: nothing is posted for it, nor will be.
    fn end_front(&mut self, umem: &Umem) {
        let reach = self.terms.reach();
        let Some(front) = self.order.front_mut() else {
            return;
        };
        if front.ends_here {
            for position in front.slots.consumed..front.fragment_count() {
                (self.places).passed(front, position, None, reach, umem);
            }
            front.slots.posted = front.fragment_count();
            self.order.look_for_unposted();
        }
    }

    /// From now on no entries are posted for it.
    pub(super) fn lands_no_more(&mut self) {
        self.stand = Stand::Astray;
        // What lies where the digests are is known for each fragment that is copied.
        self.terms.caps.witness = true;
        (self.pace).bound(ONE_COPY_ON_THE_WAY.min(self.terms.limits.on_the_way.max(1)));
    }

    /// Finds memory for messages, which may be written there at once, since nothing is posted; of no more than may be under way, so that the
    /// session lands soon when it has a place.
    pub(super) fn take_memory(&mut self, memory: &mut Memory<'_>, umem: &Umem, now_ns: u64) {
        if self.lands() {
            return;
        }
        self.pace.confirm(self.progress.accepted(), now_ns);
        let mut has_more = false;
        while let Some(next) = self.order.next_mut() {
            if !next.is_open() {
                break;
            }
            let ahead = next.base.saturating_sub(self.progress.accepted());
            let is_enough = self.stand == Stand::Draining || ahead >= u64::from(self.pace.on_the_way());
            if !next.slots.may_post
                && (is_enough || !memory.find(next, &self.terms, false, &mut self.may_take))
            {
                break;
            }
            // Of a session that was to land some may have: what it saved at windows' edges goes back (I5).
            for position in next.slots.consumed..next.slots.open {
                (self.places).passed(next, position, None, self.terms.reach(), umem);
            }
            next.slots.posted = next.slots.open;
            let (number, is_released) = (next.number, next.is_released());
            if number == self.order.unsettled_from() {
                self.may_send(now_ns);
            }
            self.order.look_for_unposted();
            has_more = true;
            if !is_released {
                break;
            }
        }
        if has_more && !self.places.held().is_empty() {
            self.care().settle_trouble(umem);
        }
    }
    /// The gate may admit what is announced, now and when it has opened the session anew; nothing of a session that is astray.
    pub(crate) fn limit_messages(&self, queue: &mut impl RxQueue) {
        if self.is_admitted() {
            let end = match self.lands() {
                // What comes unannounced is of no more messages than may be under way.
                true if self.goes_ahead() => {
                    (self.order.announced()).wrapping_add(self.terms.limits.messages_in_flight)
                }
                true => self.order.announced(),
                false => self.order.unsettled_from(),
            };
            queue.set_message_limit(u32::from(self.row()), end.wrapping_sub(1));
        }
    }

    /// Gives the session up: its zones (to be freed only when the channel was built anew, I1), and what is
    /// missing of each message.
    pub(crate) fn give_up(&mut self) -> (Vec<GivenUp>, Vec<Zone>) {
        let mut zones: Vec<Zone> = Vec::new();
        let mut given_up = Vec::new();
        self.places.repair.stale += self.strays.clear();
        for landed in self.settled.clear() {
            self.places.repair.given_up += landed.arrived;
            zones.push(landed.zone);
            let geometry = self.terms.layout.session_message(landed.len);
            let count = geometry.map_or(1, |geometry| geometry.fragment_count());
            given_up.push(GivenUp {
                number: landed.number,
                tag: landed.tag,
                len: landed.len,
                missing: std::iter::once(0..count).collect(),
                is_aborted: false,
            });
        }
        for mut message in self.order.clear() {
            self.places.repair.given_up += message.arrived();
            zones.extend(message.slots.zone);
            if message.is_refused() {
                continue;
            }
            message.gaps.arrivals.claim(u32::MAX);
            let missing = match message.gaps.arrivals.is_complete() {
                // It waits for an earlier one, or for digests: nothing of it was shown to be right.
                true => message.all(),
                false => message.missing(),
            };
            given_up.push(message.given_up(missing));
        }
        self.settled.deliver_to(self.order.announced());
        (given_up, zones)
    }

    /// Fragments of messages that are not settled.
    #[cfg(test)]
    pub(crate) fn open_fragments(&self) -> u64 {
        let arriving: u64 = self.order.iter().map(|message| message.arrived()).sum();
        self.settled.fragments() + arriving + self.strays.len()
    }
}
