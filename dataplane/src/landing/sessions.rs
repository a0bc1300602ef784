//! Sessions that share a landing channel: its fill entries in their order, whose turn it is, and what each sender may have
//! on the way.
//!
//! The channel's n-th packet uses its n-th entry, whoever sent it, so the senders have credit in turns
//! ([`lm_protocol::turns`]): entries are posted for one session at a time, and another's follow when those are nearly
//! used. A packet that comes out of turn (a sender that slept over its credit) is placed by the log like any displaced one: a
//! copy, and nothing else. With one session there is nothing to take turns with.

use lm_protocol::geometry::Wire;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::serial;
use lm_protocol::session::UNUSED_MAX;
use lm_protocol::turns::Turns;

use super::aims::Displaced;
use super::astray::UNPOSTED_AHEAD;
use super::care::Datagram;
use super::counts::ArrivalCounters;
use super::entries::Entries;
use super::inbound::Inbound;
use super::posting::Posted;
use super::repair::Remedy;
use super::terms::ADMITTED;
use super::zones::{Memory, share_of};
use crate::arena::Arena;
use crate::frames::FramePool;
use crate::memory::Umem;
use crate::port::{Caps, RxQueue};

/// Sessions that a landing channel has place for: behind those that the gate admits are as many that come by the one-copy path, and behind
/// them as many that gave their places up.
pub(crate) const PLACES: u8 = 3 * ADMITTED;
/// Packets of a turn while others wait: a millisecond at 10 Gbit/s and full packets, which is many round trips.
const TURN_PACKETS: u32 = 1024;
/// The next session's turn begins when no more entries of the last one's are unused: its sender's first packets take a round
/// trip to come, and those are on the way.
const OVERLAP: i32 = 32;
/// A turn whose packets do not come is over after so long without any. Its sender may be asleep.
const TURN_QUIET_NS: u64 = 1_000_000;
/// A sender that leaves credit unused for so long, which is some naps of a busy host, keeps neither turns nor entries from others.
const SILENT_NS: u64 = 20_000_000;

/// Places that have a session, ascending.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken(u64);

impl Iterator for Taken {
    type Item = u8;

    #[inline]
    fn next(&mut self) -> Option<u8> {
        let place = self.0.trailing_zeros() as u8;
        self.0 &= self.0.wrapping_sub(1);
        (place < PLACES).then_some(place)
    }
}

/// The sessions of a landing channel.
#[derive(Debug)]
pub(crate) struct Sessions {
    /// A bit for each place that has a session: every round looks at them several times.
    present: u64,
    /// A bit for each place whose session has no entries.
    pub(super) without_entries: u64,
    /// By place, which four bits of a session's key name, among those that the gate admits or behind them.
    pub(super) places: [Option<Box<Inbound>>; PLACES as usize],
    pub(crate) entries: Entries,
    /// What came since it was last looked at.
    pub(crate) arrivals: ArrivalCounters,
    /// What the burst at hand brought into other fragments' slots.
    pub(super) displaced: Vec<Displaced>,
    turns: Turns<{ PLACES as usize }>,
    /// Whose turn it is, and packets posted in it.
    turn: Option<u8>,
    turn_posted: u32,
    /// When it began.
    turn_ns: u64,
    /// The place that was given last: one that was used long ago is quiet.
    last_place: u8,
    serial: u32,
}

impl Sessions {
    /// No session. `position`: packets that the channel's gate has accepted; `entries_max`: that will ever be posted at once;
    /// `spare`: frames of the channel's own, in zero-copy mode.
    pub(crate) fn new(position: u64, entries_max: u32, caps: Caps, spare: Option<FramePool>) -> Sessions {
        Sessions {
            present: 0,
            without_entries: 0,
            places: [const { None }; PLACES as usize],
            entries: Entries::new(position, entries_max, caps, spare),
            arrivals: ArrivalCounters::default(),
            displaced: Vec::new(),
            turns: Turns::default(),
            turn: None,
            turn_posted: 0,
            turn_ns: 0,
            last_place: 0,
            serial: 0,
        }
    }

    /// All sessions.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Inbound> {
        self.taken().filter_map(|place| self.at(place))
    }

    /// All sessions.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Inbound> {
        self.places.iter_mut().filter_map(Option::as_deref_mut)
    }

    /// A peer that sends here.
    pub(crate) fn any_peer(&self) -> Option<u16> {
        Some(self.iter().next()?.terms.peer.index)
    }

    /// Places that have a session.
    #[inline]
    pub(crate) fn taken(&self) -> Taken {
        Taken(self.present)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.present == 0
    }

    /// Places of the sessions that the gate admits, ascending.
    #[inline]
    pub(crate) fn admitted(&self) -> Taken {
        Taken(self.present & ((1 << ADMITTED) - 1))
    }

    /// Whether the gate admits any session.
    #[inline]
    pub(crate) fn admits_any(&self) -> bool {
        self.admitted().next().is_some()
    }

    #[inline]
    pub(crate) fn at(&self, place: u8) -> Option<&Inbound> {
        self.places.get(usize::from(place))?.as_deref()
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, place: u8) -> Option<&mut Inbound> {
        self.places.get_mut(usize::from(place))?.as_deref_mut()
    }

    /// The session with this key.
    #[inline]
    pub(crate) fn with_key(&self, key: u64) -> Option<&Inbound> {
        let place = SessionAdmission::place_of(key) as u8;
        let is_it = |inbound: &&Inbound| inbound.terms.key == key;
        let behind = |tier: u8| self.at(place + tier * ADMITTED).filter(is_it);
        behind(0).or_else(|| behind(1)).or_else(|| behind(2))
    }

    /// The session with this key.
    #[inline]
    pub(crate) fn keyed(&mut self, key: u64) -> Option<&mut Inbound> {
        let place = self.with_key(key)?.place();
        self.at_mut(place)
    }

    /// A place for one more session that comes by the one-copy path: four bits of its key say it.
    pub(crate) fn free_one_copy_place(&self) -> Option<u8> {
        (0..ADMITTED).find(|place| self.at(place + ADMITTED).is_none())
    }

    /// A place for one more session. IP fragments carry no key, so theirs can only be the first.
    pub(crate) fn free_place(&self, ipfrag: bool) -> Option<u8> {
        let free = |place: &u8| self.places[usize::from(*place)].is_none();
        if ipfrag {
            return Some(0).filter(free);
        }
        let in_turn = (1..=ADMITTED).map(|step| (self.last_place + step) % ADMITTED);
        // The first is for those that can use no other, and whose place somebody gave up may not be able to do so again.
        in_turn
            .filter(|place| *place != 0)
            .filter(free)
            .min_by_key(|place| self.at(place + 2 * ADMITTED).is_some())
            .or(Some(0).filter(free))
    }

    /// A session begins, at the place that its key says.
    pub(crate) fn insert(&mut self, mut inbound: Inbound) {
        self.serial = self.serial.wrapping_add(1);
        inbound.serial = self.serial;
        if self.lands_apart(&inbound) {
            inbound.lands_no_more();
        }
        let place = inbound.place();
        if place < ADMITTED {
            self.last_place = place;
        }
        self.turns.arrived(usize::from(place));
        self.present |= 1 << place;
        self.without_entries |= u64::from(!inbound.lands) << place;
        self.places[usize::from(place)] = Some(Box::new(inbound));
    }

    /// A session ends.
    pub(crate) fn remove(&mut self, place: u8) -> Option<Box<Inbound>> {
        if self.turn == Some(place) {
            self.turn = None;
        }
        self.present &= !(1 << place);
        self.without_entries &= self.present;
        self.places[usize::from(place)].take()
    }

    /// The place of the session with this key, if the last one behind it is free: four bits of the key say both. IP fragments have no key.
    pub(crate) fn may_leave(&self, key: u64) -> Option<u8> {
        let inbound = self.with_key(key)?;
        let (place, wire) = (inbound.place(), inbound.terms.layout.wire());
        let may = place < ADMITTED && wire == Wire::Lm && self.at(place + 2 * ADMITTED).is_none();
        may.then_some(place)
    }

    /// Whether entries are posted for the session at `place`, or would be.
    pub(crate) fn has_entries(&self, place: u8) -> bool {
        self.at(place).is_some_and(|inbound| inbound.lands)
    }

    /// The session at `place`, for which nothing is posted, goes on behind those that the gate admits.
    pub(crate) fn leave(&mut self, place: u8) {
        if let Some(mut inbound) = self.remove(place) {
            (inbound.terms.one_copy, inbound.terms.is_aside) = (true, true);
            let behind = inbound.place();
            self.present |= 1 << behind;
            self.without_entries |= 1 << behind;
            self.places[usize::from(behind)] = Some(inbound);
        }
    }

    /// Whether packets of announced messages are expected for which entries are posted.
    pub(crate) fn awaits_packets(&self) -> bool {
        self.entries.outstanding() > 0
            && self
                .iter()
                .any(|inbound| inbound.lands && inbound.order.front().is_some())
    }

    /// Whether fragments of announced messages are expected by the kernel's socket: all of a session's that does not land, repetitions, and
    /// what does not come although its sender says that it was sent.
    #[inline]
    pub(crate) fn awaits_datagrams(&self, now_ns: u64) -> bool {
        let awaits_repairs =
            |inbound: &Inbound| inbound.places.is_troubled() || inbound.progress.is_late(now_ns);
        self.iter().any(awaits_repairs)
            || Taken(self.without_entries)
                .filter_map(|place| self.at(place))
                .any(|inbound| inbound.order.front().is_some())
    }

    /// Nanoseconds since a packet landed or a message was announced to a queue without any.
    pub(crate) fn quiet_ns(&self, now_ns: u64) -> u64 {
        let last = self.iter().map(|inbound| inbound.progress.last_ns()).max();
        now_ns.saturating_sub(last.unwrap_or(0).max(self.entries.landed_ns))
    }

    /// Posts as many fill entries as rings, memory and I5 allow, for the session whose turn it is.
    pub(crate) fn post(
        &mut self,
        queue: &mut impl RxQueue,
        mut memory: Memory<'_>,
        umem: &Umem,
        now_ns: u64,
    ) -> u32 {
        if self.entries.keeps_zones() {
            self.entries.free_quarantined(memory.arena);
        }
        for place in Taken(self.without_entries) {
            self.bound_memory(place, &memory);
            if let Some(inbound) = self.at_mut(place) {
                inbound.take_memory(&mut memory, umem, now_ns);
            }
        }
        let mut total = 0;
        // Whose turn it is may have no use for it: memory may be short, or its next entry may have to wait (I5).
        for _ in 0..PLACES {
            let Some(place) = self.whose_turn(now_ns) else {
                break;
            };
            let ahead = self.entries_for(place);
            self.bound_memory(place, &memory);
            let Some(inbound) = self.places[usize::from(place)].as_deref_mut() else {
                break;
            };
            inbound.pace.confirm(inbound.progress.accepted());
            let awaited = inbound.order.awaits_packets();
            let mut poster = inbound.poster(ahead, &mut self.entries, &mut memory);
            let room = poster.room(queue);
            let Posted { packets, frames } = poster.write(queue, room);
            if !awaited && inbound.order.awaits_packets() {
                inbound.may_send(now_ns);
            }
            self.pass_skipped(umem);
            if packets > 0 {
                queue.submit(frames);
                self.entries.frames_out += frames;
                self.entries.posted += u64::from(packets);
                // After the entries themselves, so that the gate never accepts a packet without an entry (I3c).
                queue.allow(self.entries.posted);
                self.turn_posted = self.turn_posted.saturating_add(packets);
                total += packets;
            }
            if packets > 0 || !self.others_want(place) || !self.is_under_way(place) {
                break;
            }
            self.end_turn();
        }
        total
    }

    /// What messages of the session at `place` may take of landing memory: its address leaves something to others, if there are any.
    fn bound_memory(&mut self, place: u8, memory: &Memory<'_>) {
        let Some(inbound) = self.at(place) else { return };
        let next = inbound.order.next().filter(|next| next.slots.zone.is_none());
        let Some((zone_len, _)) = next.map(|next| inbound.terms.zone_of(&next.geometry)) else {
            return;
        };
        let (ip, memory_max) = (inbound.terms.admission.peer_ip, inbound.terms.limits.memory_max);
        let is_its = |inbound: &&Inbound| inbound.terms.admission.peer_ip == ip;
        let share = match self.iter().all(|inbound| is_its(&inbound)) {
            true => memory_max,
            false => memory_max.min(share_of(memory.registered())),
        };
        let held = { self.iter().filter(is_its) }
            .map(|inbound| inbound.order.zones_len(u64::MAX))
            .sum();
        let may_take = match held {
            0 => share.max(zone_len),
            held => share.saturating_sub(held),
        };
        if let Some(inbound) = self.at_mut(place) {
            inbound.may_take = may_take;
        }
    }

    /// Whether another session than the one at `place`, whose turn it is, has a use for a turn.
    fn others_want(&self, place: u8) -> bool {
        self.others(place).any(Inbound::wants_turn)
    }

    /// A session that others wait for, although nothing comes of what it may send.
    pub(crate) fn holds_up(&self, now_ns: u64) -> Option<u8> {
        let is_stuck = |inbound: &&Inbound| {
            inbound.lands
                && inbound.stalled_ns(now_ns) > UNUSED_MAX.as_nanos() as u64
                && self.others_want(inbound.place())
        };
        self.iter().find(is_stuck).map(Inbound::place)
    }

    /// Whether what the session's turn lets it send is on the way: all but a few packets have come, and the sender has begun
    /// with those since it was told of the last.
    fn is_under_way(&self, place: u8) -> bool {
        let Some(inbound) = self.at(place) else {
            return true;
        };
        let limit = self.credit(place);
        let left = serial::distance(inbound.progress.accepted_packets(), limit);
        let told = inbound.told.packet_limit == limit;
        left <= 0 || (left <= OVERLAP && told && inbound.progress.last_ns() > inbound.told.limit_ns)
    }

    /// The sessions but the one at `place`.
    #[inline]
    fn others(&self, place: u8) -> impl Iterator<Item = &Inbound> {
        Taken(self.present & !(1 << place)).filter_map(|place| self.at(place))
    }

    /// It is nobody's turn. Who had it may still send what entries are posted for.
    fn end_turn(&mut self) {
        if let Some(place) = self.turn {
            let limit = self.credit(place);
            if let Some(inbound) = self.at_mut(place) {
                inbound.told.allowed = limit;
            }
        }
        self.turn = None;
    }

    /// The session that entries are posted for, which is another's when the last one's turn is over.
    fn whose_turn(&mut self, now_ns: u64) -> Option<u8> {
        if !self.entries.caps.witness {
            // In zero-copy mode there is one.
            self.turn = Taken(self.present & !self.without_entries).next();
            return self.turn;
        }
        let has_others = self.present.count_ones() > 1;
        for place in Taken(self.present) {
            if let Some(inbound) = self.at_mut(place) {
                let unused_ns = inbound.told.unused_credit_ns(&inbound.progress, now_ns);
                inbound.told.is_silent = has_others && unused_ns > SILENT_NS;
            }
        }
        if let Some(place) = self.turn {
            if !self.others_want(place) {
                return Some(place);
            }
            let is_quiet = now_ns.saturating_sub(self.entries.landed_ns.max(self.turn_ns)) >= TURN_QUIET_NS;
            let goes_on =
                self.turn_posted < TURN_PACKETS && self.at(place).is_some_and(Inbound::wants_entries);
            if !is_quiet && goes_on {
                return Some(place);
            }
            if !is_quiet && !self.is_under_way(place) {
                // Nothing more for this one, and nothing yet for the next.
                return None;
            }
            self.end_turn();
        }
        let waiting = (self.places.iter().enumerate())
            .filter_map(|(place, inbound)| Some((place, inbound.as_deref()?)))
            .filter(|(_, inbound)| inbound.wants_turn())
            .map(|(place, inbound)| (place, inbound.left()));
        let next = self.turns.next(waiting)? as u8;
        self.turn = Some(next);
        (self.turn_posted, self.turn_ns) = (0, now_ns);
        Some(next)
    }

    /// Unused entries that packets of the session at `place` will meet: all but as many as the others may still send, if they do.
    fn entries_for(&self, place: u8) -> u32 {
        let expected = |inbound: &Inbound| {
            serial::distance(inbound.progress.accepted_packets(), inbound.told.allowed).max(0)
        };
        let theirs: i32 = (self
            .others(place)
            .filter(|inbound| inbound.lands && !inbound.told.is_silent))
        .map(expected)
        .sum();
        self.entries.outstanding().saturating_sub(theirs as u32)
    }

    /// How many packets the sender at `place` may have sent (cumulative, mod 2^32): as many as entries are posted for, and
    /// not more on the way than the path can hold; nothing new when it is not its turn.
    pub(crate) fn credit(&self, place: u8) -> u32 {
        let Some(inbound) = self.at(place) else { return 0 };
        let accepted = inbound.progress.accepted_packets();
        let provided = inbound
            .order
            .provided()
            .saturating_sub(inbound.progress.accepted());
        let on_the_way = u64::from(inbound.pace.on_the_way());
        if !inbound.lands {
            return accepted.wrapping_add(provided.min(on_the_way) as u32);
        }
        if self.turn != Some(place) {
            return inbound.told.allowed;
        }
        // Another's packet may have used an entry that was meant for this one's: what it was meant for then takes the one-copy
        // path.
        let entries = u64::from(self.entries_for(place));
        let ahead = match self.entries.caps.witness {
            true => entries.max(provided.min(entries + UNPOSTED_AHEAD)),
            // In zero-copy mode there is no other path for them, and what frames that fill a lap up are for is known when the
            // message's entries are posted.
            false => entries.min(provided).min(self.entries.held().into()),
        };
        accepted.wrapping_add(ahead.min(on_the_way) as u32)
    }

    /// A fragment that came by the one-copy path in the session with this key. `accepted`: packets that the gate has let land by now.
    pub(crate) fn take_datagram(
        &mut self,
        key: u64,
        datagram: &Datagram,
        accepted: u64,
        umem: &Umem,
        now_ns: u64,
    ) {
        let posted = self.entries.were_posted(accepted);
        let drained_ns = posted.then_some(self.entries.drained_ns);
        if let Some(inbound) = self.keyed(key) {
            (inbound.care()).take_datagram(datagram, drained_ns, umem, now_ns);
        }
    }

    /// Whether [`watch`](Sessions::watch) and requests have anything to do.
    pub(crate) fn needs_care(&self, place: u8) -> bool {
        self.entries.keeps_zones() || self.at(place).is_some_and(Inbound::needs_care)
    }

    /// What time brings to the session at `place`: losses at the end of what was sent, messages to be given up, or shown without
    /// waiting for more.
    pub(crate) fn watch(&mut self, place: u8, arena: &mut Arena, umem: &Umem, now_ns: u64) -> Option<Remedy> {
        let inbound = self.places[usize::from(place)].as_deref_mut()?;
        let owner = inbound.owner();
        if (inbound.care()).skip_unposted(owner, &mut self.entries, now_ns) {
            self.pass_skipped(umem);
        }
        let inbound = self.places[usize::from(place)].as_deref_mut()?;
        let front = inbound.order.front();
        let waits_for_memory = front.is_some_and(|front| front.slots.zone.is_none());
        let more_may_come = waits_for_memory && self.more_may_come();
        let inbound = self.places[usize::from(place)].as_deref_mut()?;
        inbound.watch(&mut self.entries, arena, umem, more_may_come, now_ns)
    }

    /// Whether some sender has credit that it has not used, for messages that are announced.
    fn more_may_come(&self) -> bool {
        self.taken().any(|place| {
            self.at(place)
                .filter(|inbound| inbound.lands)
                .is_some_and(|inbound| {
                    let limit = serial::later(inbound.told.packet_limit, self.credit(place));
                    inbound.left() > 0 && serial::precedes(inbound.progress.accepted_packets(), limit)
                })
        })
    }

    /// The channel was built anew, with `position` packets accepted: none of the posted entries will be used. Gives the number
    /// of packets that nobody has looked at. (A descriptor that the log does not know is a violation, and was counted when it was
    /// read.)
    pub(crate) fn forget_entries(&mut self, position: u64, arena: &mut Arena, umem: &Umem) -> u64 {
        let discarded = position.saturating_sub(self.entries.received);
        while let Some(aim) = self.entries.next_aim() {
            if aim.spare {
                self.entries.put_spare(aim.start);
            }
            if let Some((owner, at)) = self.owner(&aim) {
                let base = owner.order.at(at).base;
                for position in aim.position..aim.until {
                    if base + u64::from(position) < owner.progress.accepted() {
                        owner.care().passed(at, position, None, umem);
                    }
                }
            }
        }
        self.entries.begin_anew(position, arena);
        self.turn = None;
        for inbound in self.iter_mut() {
            inbound.post_again(umem);
        }
        discarded
    }

    /// The session at `place` is astray. The channel was built anew a moment ago: nothing is posted in its zones.
    pub(crate) fn stop_landing(&mut self, place: u8, memory: &mut Memory<'_>, umem: &Umem, now_ns: u64) {
        self.without_entries |= 1 << place;
        let Some(inbound) = self.at_mut(place) else { return };
        inbound.lands_no_more();
        inbound.take_memory(memory, umem, now_ns);
    }

    /// Packets of a new session must not meet the entries of sessions with shorter ones, nor theirs its own: after a loss, what is longer than
    /// its slot would lie on the fragment above, which may have been verified already (I1). Where packets may take several frames the gate sees
    /// to that, and in zero-copy mode everything is verified at the end.
    pub(super) fn lands_apart(&self, inbound: &Inbound) -> bool {
        let (terms, len) = (&inbound.terms, inbound.terms.layout.max_frame_len());
        let is_other = |other: &Inbound| other.lands && other.terms.layout.max_frame_len() != len;
        let is_guarded = terms.caps.capacity > 0 || !terms.caps.witness;
        inbound.lands && !is_guarded && self.iter().any(is_other)
    }
}
