//! Sessions that share a landing channel: its fill entries in their order, whose turn it is, and what each sender may have
//! on the way.
//!
//! The channel's n-th packet uses its n-th entry, whoever sent it, so the senders have credit in turns
//! ([`lm_protocol::turns`]): entries are posted for one session at a time, and another's follow when those are nearly
//! used. A packet that comes out of turn (a sender that slept over its credit) is placed by the log like any displaced one: a
//! copy, and nothing else. With one session there is nothing to take turns with.

use lm_protocol::landing::{ROWS, SessionAdmission};
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
use super::zones::{Memory, share_of};
use crate::arena::Arena;
use crate::bounds::RECEIVE_BURST;
use crate::frames::FramePool;
use crate::memory::Umem;
use crate::mutants::mutant;
use crate::port::{Caps, RxQueue};

/// Packets of a turn while others wait: a millisecond at 10 Gbit/s and full packets, which is many round trips.
const TURN_PACKETS: u32 = 1024;
/// The next session's turn begins when no more entries of the last one's are unused: its sender's first packets take a round
/// trip to come, and those are on the way.
const OVERLAP: i32 = 32;
/// A turn whose packets do not come is over after so long without any. Its sender may be asleep.
const TURN_QUIET_NS: u64 = 1_000_000;
/// A sender that leaves credit unused for so long, which is some naps of a busy host, keeps neither turns nor entries from others.
const SILENT_NS: u64 = 20_000_000;

/// Rows that have a session, ascending.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken(u64);

impl Iterator for Taken {
    type Item = u8;

    #[inline]
    fn next(&mut self) -> Option<u8> {
        let row = self.0.trailing_zeros() as u8;
        self.0 &= self.0.wrapping_sub(1);
        (u32::from(row) < ROWS).then_some(row)
    }
}

/// The sessions of a landing channel.
#[derive(Debug)]
pub(crate) struct Sessions {
    /// A bit for each row that has a session: every round looks at them several times.
    present: u64,
    /// A bit for each row whose session the gate admits.
    admitted: u64,
    /// A bit for each row whose session has no entries.
    pub(super) without_entries: u64,
    /// By row, which six bits of a session's key say.
    pub(super) rows: [Option<Box<Inbound>>; ROWS as usize],
    pub(crate) entries: Entries,
    /// What came since it was last looked at.
    pub(crate) arrivals: ArrivalCounters,
    /// What the burst at hand brought into other fragments' slots.
    pub(super) displaced: Vec<Displaced>,
    turns: Turns<{ ROWS as usize }>,
    /// Whose turn it is, and packets posted in it.
    turn: Option<u8>,
    turn_posted: u32,
    /// When it began.
    turn_ns: u64,
    /// The row that was given last: one that was used long ago is quiet.
    last_row: u8,
    serial: u32,
    /// The gate is to admit what may come unannounced now.
    pub(super) limits_messages: bool,
}

impl Sessions {
    /// No session. `position`: packets that the channel's gate has accepted; `entries_max`: that will ever be posted at once;
    /// `spare`: frames of the channel's own, in zero-copy mode.
    pub(crate) fn new(position: u64, entries_max: u32, caps: Caps, spare: Option<FramePool>) -> Sessions {
        Sessions {
            present: 0,
            admitted: 0,
            without_entries: 0,
            rows: [const { None }; ROWS as usize],
            entries: Entries::new(position, entries_max, caps, spare),
            arrivals: ArrivalCounters::default(),
            displaced: Vec::with_capacity(RECEIVE_BURST as usize),
            turns: Turns::default(),
            turn: None,
            turn_posted: 0,
            turn_ns: 0,
            last_row: 0,
            serial: 0,
            limits_messages: false,
        }
    }

    /// All sessions.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Inbound> {
        self.taken().filter_map(|row| self.at(row))
    }

    /// All sessions.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Inbound> {
        self.rows.iter_mut().filter_map(Option::as_deref_mut)
    }

    /// A peer that sends here.
    pub(crate) fn any_peer(&self) -> Option<u16> {
        Some(self.iter().next()?.terms.peer.index)
    }

    /// Rows that have a session.
    #[inline]
    pub(crate) fn taken(&self) -> Taken {
        Taken(self.present)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.present == 0
    }

    /// Rows of the sessions that the gate admits, ascending.
    #[inline]
    pub(crate) fn admitted(&self) -> Taken {
        Taken(self.admitted)
    }

    /// Whether the gate admits any session.
    #[inline]
    pub(crate) fn admits_any(&self) -> bool {
        self.admitted != 0
    }

    #[inline]
    pub(crate) fn at(&self, row: u8) -> Option<&Inbound> {
        self.rows.get(usize::from(row))?.as_deref()
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, row: u8) -> Option<&mut Inbound> {
        self.rows.get_mut(usize::from(row))?.as_deref_mut()
    }

    /// The session with this key.
    #[inline]
    pub(crate) fn with_key(&self, key: u64) -> Option<&Inbound> {
        let row = SessionAdmission::row_of(key) as u8;
        self.at(row).filter(|inbound| inbound.terms.key == key)
    }

    /// The session with this key.
    #[inline]
    pub(crate) fn keyed(&mut self, key: u64) -> Option<&mut Inbound> {
        let row = self.with_key(key)?.row();
        self.at_mut(row)
    }

    /// A row for one more session. IP fragments carry no key, so theirs can only be the first.
    pub(crate) fn free_row(&self, ipfrag: bool) -> Option<u8> {
        let free = |row: &u8| self.rows[usize::from(*row)].is_none();
        if ipfrag {
            return Some(0).filter(free);
        }
        let mut in_turn = (1..=ROWS as u8).map(|step| (self.last_row + step) % ROWS as u8);
        // The first is for those that can use no other.
        in_turn
            .find(|row| *row != 0 && free(row))
            .or(Some(0).filter(free))
    }

    /// A session begins, in the row that its key says.
    pub(crate) fn insert(&mut self, mut inbound: Inbound) {
        self.serial = self.serial.wrapping_add(1);
        inbound.serial = self.serial;
        if inbound.lands() && self.lands_apart(&inbound) {
            inbound.lands_no_more();
        }
        let row = inbound.row();
        self.last_row = row;
        self.turns.arrived(usize::from(row));
        self.present |= 1 << row;
        self.admitted |= u64::from(inbound.is_admitted()) << row;
        self.without_entries |= u64::from(!inbound.lands()) << row;
        self.rows[usize::from(row)] = Some(Box::new(inbound));
    }

    /// A session ends.
    pub(crate) fn remove(&mut self, row: u8) -> Option<Box<Inbound>> {
        if self.turn == Some(row) {
            self.turn = None;
        }
        self.present &= !(1 << row);
        self.admitted &= self.present;
        self.without_entries &= self.present;
        self.rows[usize::from(row)].take()
    }

    /// Whether the gate admits the session in a row.
    pub(crate) fn is_admitted(&self, row: u8) -> bool {
        self.admitted & 1 << row != 0
    }

    /// Rows of sessions for which no entries are posted.
    pub(crate) fn without_entries(&self) -> Taken {
        Taken(self.without_entries)
    }

    /// Whether any session has a place.
    pub(crate) fn has_places(&self) -> bool {
        self.iter().any(Inbound::has_place)
    }

    /// Whether nothing of the session in a row is under way.
    pub(crate) fn is_idle(&self, row: u8) -> bool {
        self.at(row).is_some_and(Inbound::is_idle)
    }

    /// Whether entries are posted for the session in `row`, or would be.
    pub(crate) fn has_entries(&self, row: u8) -> bool {
        self.at(row).is_some_and(|inbound| inbound.lands())
    }

    /// The session in a row, for which nothing is posted, goes on without a place.
    pub(crate) fn give_up_place(&mut self, row: u8) {
        if let Some(inbound) = self.at_mut(row) {
            inbound.give_up_place();
            self.admitted &= !(1 << row);
        }
    }

    /// The session in a row has its place, and goes on by the one-copy path all the same.
    pub(crate) fn stay_out(&mut self, row: u8) {
        if let Some(inbound) = self.at_mut(row) {
            inbound.lands_no_more();
            self.admitted |= 1 << row;
        }
    }

    /// The gate is open to the session in a row, of which nothing is under way.
    pub(crate) fn begin_landing(&mut self, row: u8, caps: Caps, now_ns: u64) {
        if let Some(inbound) = self.at_mut(row) {
            inbound.begin_landing(caps, now_ns);
            self.admitted |= 1 << row;
            self.without_entries &= !(1 << row);
        }
    }

    /// Whether packets of announced messages are expected for which entries are posted.
    pub(crate) fn awaits_packets(&self) -> bool {
        let awaits = |inbound: &Inbound| inbound.lands() && inbound.order.front().is_some();
        self.entries.outstanding() > 0 && self.iter().any(awaits)
    }

    /// Whether fragments of announced messages are expected by the kernel's socket: all of a session's that does not land, repetitions, and
    /// what does not come although its sender says that it was sent.
    #[inline]
    pub(crate) fn awaits_datagrams(&self, now_ns: u64) -> bool {
        let awaits_repairs =
            |inbound: &Inbound| inbound.places.is_troubled() || inbound.progress.is_late(now_ns);
        self.iter().any(awaits_repairs)
            || Taken(self.without_entries)
                .filter_map(|row| self.at(row))
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
        for row in Taken(self.without_entries) {
            self.bound_memory(row, &memory);
            if let Some(inbound) = self.at_mut(row) {
                inbound.take_memory(&mut memory, umem, now_ns);
            }
        }
        let mut total = 0;
        // Whose turn it is may have no use for it: memory may be short, or its next entry may have to wait (I5).
        for _ in 0..ROWS {
            let Some(row) = self.whose_turn(now_ns) else {
                break;
            };
            let ahead = self.entries_for(row);
            self.bound_memory(row, &memory);
            let Some(inbound) = self.rows[usize::from(row)].as_deref_mut() else {
                break;
            };
            inbound.pace.confirm(inbound.progress.accepted(), now_ns);
            let awaited = inbound.order.awaits_packets();
            let mut poster = inbound.poster(ahead, &mut self.entries, &mut memory);
            let room = poster.room(queue);
            let Posted { packets, frames } = poster.write(queue, room);
            if !awaited && inbound.order.awaits_packets() {
                inbound.may_send(now_ns);
            }
            self.pass_skipped(umem);
            if packets > 0 {
                self.has_written(queue, packets, frames);
                self.turn_posted = self.turn_posted.saturating_add(packets);
                total += packets;
            }
            if packets > 0 || !self.others_want(row) || !self.is_under_way(row) {
                break;
            }
            self.end_turn();
        }
        total += self.open(queue, &mut memory);
        if std::mem::take(&mut self.limits_messages) {
            (self.iter().filter(|inbound| inbound.goes_ahead()))
                .for_each(|inbound| inbound.limit_messages(queue));
        }
        total
    }

    /// Entries for `packets` packets are written.
    pub(super) fn has_written(&mut self, queue: &mut impl RxQueue, packets: u32, frames: u32) {
        queue.submit(frames);
        self.entries.frames_out += frames;
        self.entries.posted += u64::from(packets);
        // After the entries themselves, so that the gate never accepts a packet without an entry (I3c).
        queue.allow(self.entries.posted);
    }

    /// What messages of the session in `row` may take of landing memory: its address leaves something to others, if there are any.
    pub(super) fn bound_memory(&mut self, row: u8, memory: &Memory<'_>) {
        let Some(inbound) = self.at(row) else { return };
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
        if let Some(inbound) = self.at_mut(row) {
            inbound.may_take = may_take;
        }
    }

    /// Whether another session than the one in `row`, whose turn it is, has a use for a turn.
    fn others_want(&self, row: u8) -> bool {
        self.others(row).any(Inbound::wants_turn)
    }

    /// A session that others wait for, although nothing comes of what it may send.
    pub(crate) fn holds_up(&self, now_ns: u64) -> Option<u8> {
        let is_stuck = |inbound: &&Inbound| {
            inbound.lands()
                && inbound.stalled_ns(now_ns) > UNUSED_MAX.as_nanos() as u64
                && self.others_want(inbound.row())
        };
        self.iter().find(is_stuck).map(Inbound::row)
    }

    /// Whether what the session's turn lets it send is on the way: all but a few packets have come, and the sender has begun
    /// with those since it was told of the last.
    fn is_under_way(&self, row: u8) -> bool {
        let Some(inbound) = self.at(row) else {
            return true;
        };
        let limit = self.credit(row);
        let left = serial::distance(inbound.progress.accepted_packets(), limit);
        let told = inbound.told.packet_limit == limit;
        left <= 0 || (left <= OVERLAP && told && inbound.progress.last_ns() > inbound.told.limit_ns)
    }

    /// The sessions but the one in `row`.
    #[inline]
    pub(super) fn others(&self, row: u8) -> impl Iterator<Item = &Inbound> {
        Taken(self.present & !(1 << row)).filter_map(|row| self.at(row))
    }

    /// It is nobody's turn. Who had it may still send what entries are posted for.
    fn end_turn(&mut self) {
        if let Some(row) = self.turn {
            let limit = self.credit(row);
            if let Some(inbound) = self.at_mut(row) {
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
        for row in Taken(self.present) {
            if let Some(inbound) = self.at_mut(row) {
                inbound.told.is_silent = has_others && inbound.unused_credit_ns(now_ns) > SILENT_NS;
            }
        }
        if let Some(row) = self.turn {
            if !self.others_want(row) {
                return Some(row);
            }
            let is_quiet = now_ns.saturating_sub(self.entries.landed_ns.max(self.turn_ns)) >= TURN_QUIET_NS;
            let goes_on = self.turn_posted < TURN_PACKETS && self.at(row).is_some_and(Inbound::wants_entries);
            if !is_quiet && goes_on {
                return Some(row);
            }
            if !is_quiet && !self.is_under_way(row) {
                // Nothing more for this one, and nothing yet for the next.
                return None;
            }
            self.end_turn();
        }
        let waiting = (self.rows.iter().enumerate())
            .filter_map(|(row, inbound)| Some((row, inbound.as_deref()?)))
            .filter(|(_, inbound)| inbound.wants_turn())
            .map(|(row, inbound)| (row, inbound.left()));
        let next = self.turns.next(waiting)? as u8;
        self.turn = Some(next);
        (self.turn_posted, self.turn_ns) = (0, now_ns);
        Some(next)
    }

    /// Unused entries that packets of the session in `row` will meet: all but as many as the others may still send, if they do.
    fn entries_for(&self, row: u8) -> u32 {
        let expected = |inbound: &Inbound| {
            let allowed = serial::distance(inbound.progress.accepted_packets(), inbound.told.allowed);
            (allowed.max(0) as u64).min(inbound.left())
        };
        let theirs: u64 = (self
            .others(row)
            .filter(|inbound| inbound.lands() && !inbound.told.is_silent))
        .map(expected)
        .sum();
        self.entries.outstanding().saturating_sub(theirs as u32)
    }

    /// Of how many packets more the sender in `row` is told at once, where there are to be few on the way, and nobody waits for its turn.
    pub(crate) fn credit_step(&self, row: u8) -> Option<u32> {
        let is_alone = self.present.count_ones() == 1;
        self.at(row).filter(|_| is_alone)?.pace.step()
    }

    /// How many packets the sender in `row` may have sent (cumulative, mod 2^32): as many as entries are posted for, and
    /// not more on the way than the path can hold; nothing new when it is not its turn.
    pub(crate) fn credit(&self, row: u8) -> u32 {
        let Some(inbound) = self.at(row) else { return 0 };
        let accepted = inbound.progress.accepted_packets();
        let provided = inbound
            .order
            .provided()
            .saturating_sub(inbound.progress.accepted());
        let on_the_way = u64::from(inbound.pace.on_the_way());
        if !inbound.lands() {
            let unannounced = if self.may_go_ahead(inbound) {
                UNPOSTED_AHEAD
            } else {
                0
            };
            return accepted.wrapping_add(provided.max(unannounced).min(on_the_way) as u32);
        }
        if self.turn != Some(row) && !self.may_go_ahead(inbound) {
            return inbound.told.allowed;
        }
        // Another's packet may have used an entry that was meant for this one's: what it was meant for then takes the one-copy
        // path.
        let entries = u64::from(self.entries_for(row));
        let ahead = match self.entries.caps.witness {
            true => entries.max(provided.min(entries + UNPOSTED_AHEAD)),
            // In zero-copy mode there is no other path for them, and what frames that fill a lap up are for is known when the
            // message's entries are posted.
            false if self.may_go_ahead(inbound) && mutant!(CreditUnposted) => 2 * entries,
            false if self.may_go_ahead(inbound) => entries.min(self.entries.ahead().into()),
            false => entries.min(provided).min(self.entries.ahead().into()),
        };
        let ahead = match self.entries.open.standing > 0 && !self.may_go_ahead(inbound) {
            true => ahead.min(inbound.left()),
            false => ahead,
        };
        let ahead = match inbound.order.unreleased_behind(inbound.progress.accepted()) {
            Some(released) => ahead.min(released),
            None => ahead,
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
        let is_alone = self.present.count_ones() == 1;
        let (posted, drained_ns) = (self.entries.posted, self.entries.drained_ns);
        let were_posted = self.entries.were_posted(accepted);
        if let Some(inbound) = self.keyed(key) {
            if datagram.len == 0 {
                inbound.places.repair.fillers += 1;
                return;
            }
            if inbound.terms.goes_ahead && !inbound.order.knows(datagram.fragment.0) {
                inbound.learn_from(datagram, umem, now_ns);
            }
            let were_posted =
                were_posted || (is_alone && posted > accepted && inbound.astray.has_nothing_landed());
            let drained_ns = were_posted.then_some(drained_ns);
            (inbound.care()).take_datagram(datagram, drained_ns, umem, now_ns);
        }
    }

    /// Whether [`watch`](Sessions::watch) and requests have anything to do.
    pub(crate) fn needs_care(&self, row: u8) -> bool {
        self.entries.keeps_zones()
            || self.at(row).is_some_and(|inbound| {
                inbound.needs_care() || (self.entries.has_region() && inbound.waits_for_memory())
            })
    }

    /// What time brings to the session in `row`: losses at the end of what was sent, messages to be given up, or shown without
    /// waiting for more.
    pub(crate) fn watch(&mut self, row: u8, arena: &mut Arena, umem: &Umem, now_ns: u64) -> Option<Remedy> {
        let inbound = self.rows[usize::from(row)].as_deref_mut()?;
        let owner = inbound.owner();
        if (inbound.care()).skip_unposted(owner, &mut self.entries, now_ns) {
            self.pass_skipped(umem);
        }
        let inbound = self.rows[usize::from(row)].as_deref_mut()?;
        let more_may_come = (inbound.waits_for_memory() || self.entries.owes_zones()) && self.more_may_come();
        let inbound = self.rows[usize::from(row)].as_deref_mut()?;
        inbound.watch(&mut self.entries, arena, umem, more_may_come, now_ns)
    }

    /// Whether some sender has credit that it has not used, for messages that are announced.
    fn more_may_come(&self) -> bool {
        self.iter().filter(|inbound| inbound.lands()).any(|inbound| {
            let limit = serial::later(inbound.told.packet_limit, self.credit(inbound.row()));
            inbound.left() > 0 && serial::precedes(inbound.progress.accepted_packets(), limit)
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

    /// The session in `row` is astray. The channel was built anew a moment ago: nothing is posted in its zones.
    pub(crate) fn stop_landing(&mut self, row: u8, memory: &mut Memory<'_>, umem: &Umem, now_ns: u64) {
        self.without_entries |= 1 << row;
        let Some(inbound) = self.at_mut(row) else { return };
        inbound.lands_no_more();
        inbound.take_memory(memory, umem, now_ns);
    }

    /// Packets of a new session must not meet the entries of sessions with shorter ones, nor theirs its own: after a loss, what is longer than
    /// its slot would lie on the fragment above, which may have been verified already (I1). Where packets may take several frames the gate sees
    /// to that, and in zero-copy mode everything is verified at the end.
    pub(crate) fn lands_apart(&self, inbound: &Inbound) -> bool {
        let (caps, len) = (self.entries.caps, inbound.terms.layout.max_frame_len());
        let is_other = |other: &Inbound| other.lands() && other.terms.layout.max_frame_len() != len;
        let open = &self.entries.open;
        let meets_open = open.standing > 0 && open.frame_len != len;
        let is_guarded = caps.capacity > 0 || !caps.witness;
        !is_guarded && (meets_open || self.iter().any(is_other))
    }
}
