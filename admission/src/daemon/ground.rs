//! One interface's gate, and who has which of its queues: what the admission protocol's grants act on ([`Landing`]).
//!
//! A row of the gate goes from free to open to closing, and is free again when its program has done with the session *and* no CPU
//! can be inside the gate with it (I4). Nothing here waits for the latter: [`Ground::start_quiesce`] gives out what another thread
//! can wait for. A session without a place has a row, too, which its program opens when the session gets one.

mod rows;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use ipnet::Ipv4Net;
use lm_dataplane::LandingTerms;
use lm_dataplane::ipc::{Event, Progress, Role};
use lm_ebpf::{EffectiveMode, Gate, GateError, Quiesce, Quiet};
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire;
use lm_protocol::landing::{self, SessionAdmission};
use lm_protocol::session::{
    Application, Aside, CloseReason, Landing, Permit, Refusal, Session, Terms, Unused,
};
use lm_protocol::time::Time;

use super::calls::{no_session, not_yours};
use super::program::ProgramId;
pub(crate) use rows::{Granted, Holder, News, Row, Socket};

/// Sessions that land on a queue at once.
pub(crate) const PLACES: usize = landing::PLACES as usize;

/// Rows of a queue.
pub(crate) const ROWS: usize = landing::ROWS as usize;

/// When to ask again where every row is taken or closing.
const ROW_RETRY: Duration = Duration::from_millis(50);

/// When to ask again for a program whose daemon was restarted.
const AWAY_RETRY: Duration = Duration::from_millis(200);

/// One interface's gate and queues.
pub(crate) struct Ground {
    pub(crate) gate: Gate,
    pub(crate) address: Ipv4Addr,
    pub(crate) mtu: u16,
    /// Whether the device is a veth.
    pub(crate) is_veth: bool,
    pub(crate) queues: Vec<Option<Holder>>,
    /// Whose XSK was bound last on each queue, which may be there still: its memory is pinned, and the queue busy, as long as somebody has
    /// it open, whether that is a program of the daemon's or not.
    pub(crate) sockets: Vec<Option<Socket>>,
    pub(crate) news: Vec<(ProgramId, News)>,
    /// Under the policy `exclusive`: until when the gate admits anything; long ago before that is known.
    active_until_ns: u64,
    /// The session that its program ends itself.
    aborting: Option<u64>,
    /// Queues, a bit each, that must become quiet, and those for which somebody waits.
    wanted: u64,
    waiting: u64,
}

impl Ground {
    pub(crate) fn new(
        gate: Gate,
        address: Ipv4Addr,
        (mtu, is_veth, queues): (u16, bool, usize),
        is_exclusive: bool,
    ) -> Ground {
        Ground {
            gate,
            address,
            mtu,
            is_veth,
            queues: vec![None; queues],
            sockets: vec![None; queues],
            news: Vec::new(),
            active_until_ns: u64::from(is_exclusive),
            aborting: None,
            wanted: 0,
            waiting: 0,
        }
    }

    pub(crate) fn holder(&mut self, queue: u16) -> Option<&mut Holder> {
        self.queues.get_mut(usize::from(queue))?.as_mut()
    }

    /// The holder, which is that program.
    ///
    /// # Errors
    /// One line: it is not.
    pub(crate) fn held_by(&mut self, queue: u16, program: ProgramId) -> Result<&mut Holder, String> {
        let holder = self.holder(queue).filter(|holder| holder.program == program);
        holder.ok_or_else(|| not_yours(queue))
    }

    /// The queues of a program.
    pub(crate) fn held_all(&mut self, program: ProgramId) -> impl Iterator<Item = &mut Holder> {
        let holders = self.queues.iter_mut().flatten();
        holders.filter(move |holder| holder.program == program)
    }

    pub(crate) fn is_free(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(Option::is_none)
    }

    /// Queues that nobody has, those first that are free of sockets for all that is known.
    pub(crate) fn free_queues(&self) -> Vec<u16> {
        let mut free: Vec<u16> = (0..self.queues.len() as u16)
            .filter(|&queue| self.is_free(queue))
            .collect();
        free.sort_by_key(|&queue| self.sockets[usize::from(queue)].is_some());
        free
    }

    /// Queues that nobody has, and that may not be free of a socket: each is given out once, until [`Ground::found_socket`].
    pub(crate) fn look_for_sockets(&mut self) -> Vec<u16> {
        let mut looking = Vec::new();
        for queue in self.free_queues() {
            if let Some(socket) = &mut self.sockets[usize::from(queue)]
                && !std::mem::replace(&mut socket.looked_for, true)
            {
                looking.push(queue);
            }
        }
        looking
    }

    /// Whether a socket was still there.
    pub(crate) fn found_socket(&mut self, queue: u16, is_there: bool) {
        let is_free = self.is_free(queue);
        let socket = &mut self.sockets[usize::from(queue)];
        match socket {
            // Of another program by now: it says so itself.
            Some(known) if is_there || !is_free => known.looked_for = false,
            _ => *socket = None,
        }
    }

    /// Gives a free queue to a program. The gate's log for it is made meanwhile.
    pub(crate) fn take(&mut self, queue: u16, program: ProgramId, data_port: u16) {
        self.queues[usize::from(queue)] = Some(Holder::new(program, data_port));
        if !self.gate.is_ready(queue.into()) {
            self.want_quiet(queue);
        }
    }

    /// Takes a queue back: its XSK, role and port go from the gate, and its sessions are closed. They must be over for the node.
    pub(crate) fn vacate(&mut self, queue: u16) {
        self.queues[usize::from(queue)] = None;
        self.clear(queue);
    }

    /// A channel goes; its queue stays its program's.
    pub(crate) fn clear(&mut self, queue: u16) {
        if let Err(error) = self.gate.vacate(queue.into()) {
            tracing::error!(queue, "cannot close a queue: {error}");
        }
        if let Some(holder) = self.holder(queue) {
            holder.role = None;
            holder.offer = None;
        }
        self.want_quiet(queue);
    }

    pub(crate) fn want_quiet(&mut self, queue: u16) {
        self.wanted |= 1 << queue;
    }

    /// A program goes on under another number.
    pub(crate) fn renumber(&mut self, from: ProgramId, to: ProgramId) {
        for holder in self.held_all(from) {
            holder.program = to;
            holder.away = false;
        }
    }

    /// Finds a session of a program: its queue and row.
    pub(crate) fn session_of(&self, program: ProgramId, session_key: u64) -> Result<(u16, usize), String> {
        let mut holders = (0u16..).zip(&self.queues);
        let found = holders.find_map(|(queue, holder)| {
            let holder = holder.as_ref().filter(|holder| holder.program == program)?;
            Some((queue, holder.row_of(session_key)?))
        });
        found.ok_or_else(|| no_session(session_key))
    }

    pub(crate) fn row(&mut self, queue: u16, row: usize) -> Option<&mut Row> {
        Some(&mut self.holder(queue)?.rows[row])
    }

    /// A session of a program's own that is not over.
    pub(crate) fn granted(&mut self, program: ProgramId, session_key: u64) -> Result<&mut Granted, String> {
        let mut sessions = self.held_all(program).map(|holder| &mut holder.sessions);
        let found = sessions.find_map(|sessions| sessions.get_mut(&session_key));
        found.ok_or_else(|| no_session(session_key))
    }

    /// A program says how far a session of its own is.
    pub(crate) fn set_progress(
        &mut self,
        program: ProgramId,
        progress: &Progress,
        now: Time,
    ) -> Result<(), String> {
        let granted = self.granted(program, progress.session_key)?;
        granted.delivered = progress.delivered;
        granted.unused = progress.unused.map(|(for_ms, is_idle)| {
            let since_ns = now.as_nanos().saturating_sub(u64::from(for_ms) * 1_000_000);
            let since = Time::from_nanos(since_ns);
            Unused { since, is_idle }
        });
        Ok(())
    }

    /// The next session that closes is closed by its program: it is not told, and has done with it.
    pub(crate) fn expect_abort(&mut self, session_key: Option<u64>) {
        self.aborting = session_key;
    }

    /// Its program has done with a session that is closed, or lets nothing of it land any more.
    pub(crate) fn release(&mut self, program: ProgramId, session_key: u64) -> Result<(), String> {
        let Ok((queue, row)) = self.session_of(program, session_key) else {
            return self.granted(program, session_key).map(drop);
        };
        match self.row(queue, row) {
            Some(Row::Closing { released, .. }) => *released = true,
            _ => return Err(no_session(session_key)),
        }
        self.settle(queue);
        Ok(())
    }

    /// Closes the gate, as far as it can be.
    fn close_gate(&mut self, queue: u16, row: usize) {
        if let Err(error) = self.shut(queue, row) {
            tracing::error!(queue, "cannot close the gate: {error}");
        }
    }

    /// Closes the gate to a session that goes on.
    pub(crate) fn shut(&mut self, queue: u16, row: usize) -> Result<(), GateError> {
        self.gate.close_session(queue.into(), row as u32)?;
        self.want_quiet(queue);
        Ok(())
    }

    /// Whether no CPU can be inside the gate with a session of the queue that was closed.
    pub(crate) fn is_quiet(&self, queue: u16) -> bool {
        (0..ROWS as u32).all(|row| !self.gate.is_closing(queue.into(), row))
    }

    /// A session takes a row.
    fn occupy(
        &mut self,
        (queue, row): (u16, usize),
        from: SocketAddrV4,
        admission: SessionAdmission,
        has_place: bool,
    ) {
        if let Some(holder) = self.holder(queue) {
            holder.sessions.insert(admission.key, Granted::new());
            holder.rows[row] = Row::Taken {
                from,
                admission,
                has_place,
            };
        }
    }

    /// A program has come back: it may not have heard which of its sessions go on without their places.
    pub(crate) fn tell_aside(&mut self, program: ProgramId) {
        let holders = self.queues.iter().flatten();
        let own = holders.filter(|holder| holder.program == program);
        let aside = own.flat_map(Holder::aside);
        self.news
            .extend(aside.map(|session_key| (program, News::Event(Event::SetAside { session_key }))));
    }

    /// Takes over a session that an earlier daemon granted. Its gate is open until then, and under `exclusive` it is so no longer; none: it goes
    /// on without its place.
    pub(crate) fn adopt(
        &mut self,
        session: &Session,
        mut admission: SessionAdmission,
        open_until_ns: Option<u64>,
    ) -> Result<(), GateError> {
        let (queue, row) = (session.grant.landing_queue, admission.row());
        if let Some(open_until_ns) = open_until_ns {
            let is_exclusive = self.active_until_ns != 0;
            admission.active_until_ns = if is_exclusive { open_until_ns.max(1) } else { 0 };
            self.active_until_ns = self.active_until_ns.max(admission.active_until_ns);
            (self.gate).extend_session(queue.into(), row, admission.active_until_ns)?;
        }
        let has_place = open_until_ns.is_some();
        self.occupy((queue, row as usize), session.data_peer(), admission, has_place);
        Ok(())
    }

    /// Opens the gate again to a session that goes on, from a message on.
    pub(crate) fn open_again(
        &mut self,
        queue: u16,
        row: usize,
        first_message: u32,
    ) -> Result<bool, GateError> {
        let active_until_ns = self.active_until_ns;
        let Some(Row::Taken {
            admission,
            has_place: true,
            ..
        }) = self.row(queue, row)
        else {
            return Ok(false);
        };
        admission.first_message = first_message;
        admission.active_until_ns = active_until_ns;
        let admission = *admission;
        self.gate.open_session(queue.into(), &admission)?;
        Ok(true)
    }

    /// What another thread is to wait for. Each is given back to [`Ground::finish_quiesce`].
    pub(crate) fn start_quiesce(&mut self) -> Vec<Quiesce> {
        let mut starting = Vec::new();
        for queue in 0..self.queues.len() as u32 {
            let bit = 1 << queue;
            if self.wanted & bit == 0 || self.waiting & bit != 0 {
                continue;
            }
            self.wanted &= !bit;
            match self.gate.start_quiesce(queue) {
                Ok(quiesce) => {
                    self.waiting |= bit;
                    starting.push(quiesce);
                }
                Err(error) => tracing::error!(queue, "cannot wait for the gate: {error}"),
            }
        }
        starting
    }

    /// The wait is over: rows that were only waiting for it are free.
    pub(crate) fn finish_quiesce(&mut self, queue: u32, quiet: std::io::Result<Quiet>) {
        self.waiting &= !(1 << queue);
        match quiet {
            Ok(quiet) => {
                if let Err(error) = self.gate.finish_quiesce(quiet) {
                    tracing::error!(queue, "cannot go on with a queue: {error}");
                }
            }
            Err(error) => tracing::error!(queue, "cannot wait for the gate: {error}"),
        }
        self.settle(queue as u16);
    }

    fn settle(&mut self, queue: u16) {
        for row in 0..ROWS {
            let is_quiet = !self.gate.is_closing(queue.into(), row as u32);
            if let Some(slot) = self.row(queue, row)
                && is_quiet
                && matches!(slot, Row::Closing { released: true, .. })
            {
                *slot = Row::Free;
            }
        }
    }
}

impl Ground {
    /// A session begins, in a row of its own, with a place or without.
    fn begin(
        &mut self,
        queue: u16,
        application: &Application<'_>,
        permit: &Permit,
        has_place: bool,
    ) -> Result<Terms, Refusal> {
        let active_until_ns = self.active_until_ns;
        let (address, mtu) = (self.address, self.mtu);
        let may_land = self.gate.mode() == EffectiveMode::Native;
        let is_steered = self.is_veth && may_land;
        // After a restart also rows that were free before: opening one of them would wait.
        let closing: u64 = (0..ROWS as u32)
            .map(|row| u64::from(self.gate.is_closing(queue.into(), row)) << row)
            .sum();
        let holder = self
            .holder(queue)
            .filter(|holder| holder.role == Some(Role::Landing));
        let holder = holder.ok_or(RejectReason::Unsupported)?;
        let offer = holder.offer.as_ref().ok_or(RejectReason::Unsupported)?;
        if !allows(&offer.allow, *application.from.ip()) {
            return Err(RejectReason::NotAllowed.into());
        }
        if holder.away {
            return Err(Refusal::busy(AWAY_RETRY));
        }
        let from = SocketAddrV4::new(*application.from.ip(), application.request.data_port);
        // One session for each sender: one that began anew waits for the lease of its old one.
        let is_from = |row: &Row| matches!(row, Row::Taken { from: other, .. } if *other == from);
        if holder.rows.iter().any(is_from) {
            return Err(Refusal::busy(ROW_RETRY));
        }
        let request = application.request;
        if request.wire == Wire::IpFrag && !has_place {
            // They have no other path, and wait where they may land.
            return Err(match request.lands && may_land {
                true => Refusal::busy(ROW_RETRY),
                false => RejectReason::Unsupported.into(),
            });
        }
        let local = SocketAddrV4::new(address, holder.data_port);
        let mut terms = LandingTerms::of_offer(offer, local, is_steered);
        // It may have become smaller since the offer.
        terms.mtu = terms.mtu.min(mtu);
        terms.max_message_len = terms.max_message_len.min(permit.max_message_len);
        let fit = terms.fit(request)?;
        // IP fragments carry no key that could say another row.
        let mut rows = match request.wire {
            Wire::IpFrag => 0..1,
            Wire::Lm => 0..ROWS,
        };
        let Some(row) = rows.find(|&row| holder.rows[row] == Row::Free && closing & 1 << row == 0) else {
            return Err(Refusal::busy(ROW_RETRY));
        };
        let (terms, mut admission) = terms.grant(&fit, request, from, row as u16, None, super::random_u64);
        admission.active_until_ns = active_until_ns;
        let (program, session_key) = (holder.program, terms.session_key);
        if has_place && let Err(error) = self.gate.open_session(queue.into(), &admission) {
            tracing::error!(queue, %from, "cannot open the gate: {error}");
            return Err(RejectReason::Unsupported.into());
        }
        self.occupy((queue, row), from, admission, has_place);
        let row = row as u16;
        self.news.push((program, News::Opened { session_key, row }));
        Ok(terms)
    }

    /// Finds a session, and its program: its row.
    fn taken(&mut self, session: &Session) -> Option<(ProgramId, bool, usize)> {
        let holder = self.holder(session.grant.landing_queue)?;
        let row = holder.row_of(session.grant.session_key)?;
        Some((holder.program, holder.away, row))
    }
}

impl Landing for Ground {
    fn open(&mut self, queue: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
        self.begin(queue, application, permit, true)
    }

    fn open_aside(
        &mut self,
        queue: u16,
        application: &Application<'_>,
        permit: &Permit,
    ) -> Result<Terms, Refusal> {
        self.begin(queue, application, permit, false)
    }

    fn land(&mut self, session: &Session) -> bool {
        let (queue, session_key) = (session.grant.landing_queue, session.grant.session_key);
        let Some((program, false, row)) = self.taken(session) else {
            return false;
        };
        let Some(Row::Taken { has_place, .. }) = self.row(queue, row) else {
            return false;
        };
        *has_place = true;
        self.news
            .push((program, News::Event(Event::Landed { session_key })));
        true
    }

    fn active_until(&mut self, until: Time) {
        // The node's time is CLOCK_MONOTONIC, as the gate's.
        self.active_until_ns = until.as_nanos();
        for (queue, holder) in (0u32..).zip(&self.queues) {
            let rows = holder.iter().flat_map(|holder| (0u32..).zip(&holder.rows));
            for (row, _) in rows.filter(|(_, row)| matches!(row, Row::Taken { has_place: true, .. })) {
                if let Err(error) = self.gate.extend_session(queue, row, self.active_until_ns) {
                    tracing::error!(queue, "cannot extend a session: {error}");
                }
            }
        }
    }

    fn unused(&self, session: &Session) -> Option<Unused> {
        let holder = self
            .queues
            .get(usize::from(session.grant.landing_queue))?
            .as_ref()?;
        holder.sessions.get(&session.grant.session_key)?.unused
    }

    fn set_aside(&mut self, session: &Session) -> Aside {
        let (queue, session_key) = (session.grant.landing_queue, session.grant.session_key);
        let Some((program, _, row)) = self.taken(session) else {
            return Aside::Never;
        };
        // Where IP fragments belong only the gate knows.
        if session.request.wire == Wire::IpFrag {
            return Aside::Never;
        }
        if let Some(Row::Taken { has_place, .. }) = self.row(queue, row) {
            *has_place = false;
        }
        self.close_gate(queue, row);
        self.news
            .push((program, News::Event(Event::SetAside { session_key })));
        Aside::Done
    }

    fn close(&mut self, session: &Session, reason: CloseReason) -> u32 {
        let queue = session.grant.landing_queue;
        let session_key = session.grant.session_key;
        let by_program = self.aborting == Some(session_key);
        let Some(holder) = self.holder(queue) else {
            return 0;
        };
        let program = holder.program;
        // Nobody is there who could say that it has done with it; its new life is told which sessions it still has.
        let released = by_program || holder.away;
        let Some(granted) = holder.sessions.remove(&session_key) else {
            return 0;
        };
        if let Some(row) = holder.row_of(session_key) {
            // Of one without a place its program has nothing to let go of.
            let has_place = matches!(holder.rows[row], Row::Taken { has_place: true, .. });
            holder.rows[row] = Row::Closing {
                session_key,
                released: released || !has_place,
            };
            self.close_gate(queue, row);
            self.settle(queue);
        }
        if !released {
            let messages = match reason {
                CloseReason::Ended { messages } => Some(messages),
                _ => None,
            };
            let is_idle = granted.unused.is_some_and(|unused| unused.is_idle);
            let was_idle = messages.is_none() && is_idle;
            let event = Event::Closed {
                session_key,
                messages,
                was_idle,
            };
            self.news.push((program, News::Event(event)));
        }
        granted.delivered
    }
}

/// Whether a list of ranges has the address; an empty one has every address.
fn allows(ranges: &[(Ipv4Addr, u8)], address: Ipv4Addr) -> bool {
    ranges.is_empty()
        || ranges.iter().any(|&(network, len)| {
            Ipv4Net::new(network, len.min(32)).is_ok_and(|range| range.contains(&address))
        })
}
