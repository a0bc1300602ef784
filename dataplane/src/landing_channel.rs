//! The landing channel as a whole: built anew, under its sessions or without any, and lost.

use lm_cards::{Obstacle, Probe};
use lm_protocol::landing::SessionAdmission;

use crate::bounds::TRANSMIT_RING_LEN;
use crate::completion::PeerId;
use crate::engine::Engine;
use crate::footprint::Footprint;
use crate::granting::Closing;
use crate::landing::{Sessions, Violation};
use crate::placing::Left;
use crate::port::{Caps, Port, PortError, QueueSpec, Role, RxQueue};

/// How long a landing channel that was lost stays so: opening it may take as long as the queue is busy
/// ([`BIND_PATIENCE`](crate::xsk::BIND_PATIENCE)).
const LOST_NS: u64 = 5_000_000_000;

/// A landing queue.
pub(crate) fn queue_spec(
    queue: u32,
    registered_len: u64,
    ring_len: u32,
    capacity: u32,
    copies: bool,
) -> QueueSpec {
    QueueSpec {
        queue,
        role: Role::Landing,
        copies,
        registered_len,
        capacity,
        rx_len: ring_len,
        tx_len: TRANSMIT_RING_LEN,
    }
}

impl<P: Port> Engine<P> {
    /// Leaves zero-copy mode on the landing queue, where no session has been yet. Small packets stay in it: their frames do not
    /// overlap, so what a device writes beside them harms nobody.
    pub(crate) fn land_in_copy_mode(&mut self) -> Result<(), PortError> {
        let Some(landing) = &mut self.landing else {
            return Ok(());
        };
        let registered_len = landing.registered_len;
        let (ring_len, caps) = (
            self.fixed.receives.ring_len,
            Caps::copying(self.fixed.caps.capacity),
        );
        landing.sessions = Sessions::new(landing.rx.accepted(), ring_len, caps, None);
        self.fixed.caps = caps;
        self.rebuild_landing(registered_len)
    }

    fn landing_spec(&self, queue: u32, registered_len: u64) -> QueueSpec {
        let (ring_len, capacity) = (self.fixed.receives.ring_len, self.fixed.caps.capacity);
        queue_spec(queue, registered_len, ring_len, capacity, self.fixed.caps.witness)
    }

    /// Replaces the landing channel's socket: nothing that was posted on the old one can be written any more. On an error that is found
    /// before, nothing has changed. On one that is found then, there is a socket for what was registered before; or, where not even that is
    /// possible, none, until there is one again ([`Engine::look_for_landing`]).
    pub(crate) fn rebuild_landing(&mut self, registered_len: u64) -> Result<(), PortError> {
        let Some(landing) = &self.landing else {
            return Ok(());
        };
        let (transmit, had) = (landing.transmit, landing.registered_len);
        let spec = |registered_len| self.landing_spec(landing.queue, registered_len);
        let (spec, before) = (spec(registered_len), spec(had));
        self.port.prepare(&spec)?;
        self.sending.empty_queue(transmit, self.looks.now_ns());
        for released in self.sending.outgoing.abandoned(transmit) {
            self.recover(released);
        }
        let Some(mut landing) = self.landing.take() else {
            return Ok(());
        };
        let was_open = landing.is_open;
        let tx = self.sending.begin_anew(transmit);
        let mut rebuild = |spec: &QueueSpec| self.port.rebuild(&mut landing.rx, tx, spec);
        let (result, has) = match rebuild(&spec) {
            Ok(()) => (Ok(()), Some(registered_len)),
            // A daemon may have a bound.
            Err(error) if registered_len > had => (Err(error), rebuild(&before).ok().map(|()| had)),
            Err(error) => (Err(error), None),
        };
        landing.is_open = has.is_some();
        landing.registered_len = has.unwrap_or(had);
        // Packets that the gate accepted and nobody took stay behind in the log.
        let accepted = landing.rx.accepted();
        self.counters.drops.landing_discarded +=
            (landing.sessions).forget_entries(accepted, &mut landing.arena, self.memory.umem());
        landing.drops = landing.rx.drops();
        landing.woken = false;
        let (is_lost, queue) = (was_open && !landing.is_open, landing.queue);
        self.landing = Some(landing);
        if is_lost {
            self.lose_landing(transmit, queue);
        }
        result
    }

    /// There is no socket: who lands goes on by the one-copy path.
    fn lose_landing(&mut self, transmit: usize, queue: u32) {
        let now_ns = self.looks.now_ns();
        self.counters.landing_lost += 1;
        self.end_sessions_on(transmit);
        self.admission.stewarded.withdraw_offer(queue);
        let Some(landing) = &mut self.landing else { return };
        landing.failed_ns[0] = Some(now_ns);
        if !self.fixed.caps.witness {
            let places: Vec<u8> = landing.sessions.admitted().collect();
            for row in places {
                let retired = self.retire(row, Closing::Ours);
                if let (Some(retired), Some(landing)) = (retired, &mut self.landing) {
                    let entries = &mut landing.sessions.entries;
                    for zone in retired.zones {
                        entries.free(zone, Left::GivenUp, &mut landing.arena);
                    }
                }
            }
            return;
        }
        for row in landing.sessions.admitted() {
            landing.stop_landing(row, self.memory.umem(), now_ns);
        }
    }

    /// Has a landing channel that was lost opened again, now and then.
    pub(crate) fn look_for_landing(&mut self, now_ns: u64) {
        let lost = self.landing.as_ref().filter(|landing| !landing.is_open);
        let Some((since_ns, registered_len)) =
            lost.and_then(|landing| Some((landing.failed_ns[0]?, landing.registered_len)))
        else {
            return;
        };
        let is_away = self.admission.stewarded.is_away();
        if is_away || now_ns.saturating_sub(since_ns) < LOST_NS {
            return;
        }
        match self.rebuild_landing(registered_len) {
            Ok(()) => {
                tracing::info!("messages land again");
                self.offer_again();
            }
            Err(error) => {
                tracing::warn!("nothing lands, messages take the one-copy path: {error}");
                if let Some(landing) = &mut self.landing {
                    landing.failed_ns[0] = Some(now_ns);
                }
            }
        }
    }

    /// Builds the landing channel anew while its sessions go on, with so many bytes registered: what was posted is void, so
    /// that a message which waits for nothing else can be shown (I1). What is wrong otherwise: it could not be, or its sessions were given
    /// up.
    pub(crate) fn rebuild_under_sessions(&mut self, registered_len: u64) -> Result<(), String> {
        let landing = self.landing.as_mut().ok_or("nothing lands here")?;
        let queue = landing.queue;
        // A daemon that holds the gate may be away. What waits for the new channel waits for the daemon, too.
        if self.admission.stewarded.is_away() {
            return Err("the admission daemon is away; start it again".into());
        }
        // I3: the new socket counts from 0, so what the old one dropped is looked at now.
        if self.fixed.caps.witness && landing.is_open && landing.rx.drops() != landing.drops {
            self.abort_landing(Violation::Statistics);
            return Err("packets were dropped behind the gate".into());
        }
        // Whatever fails without the queue fails before the gate is closed.
        let spec = self.landing_spec(queue, registered_len);
        (self.port.prepare(&spec)).map_err(|error| error.to_string())?;
        let landing = self.landing.as_mut().ok_or("nothing lands here")?;
        // I4: no CPU is inside the gate with a session. What it accepted until then is on the ring, and is not looked
        // at: its sender is asked for it again.
        let taken = landing.sessions.admitted();
        // Nothing has changed on an error but that packets take the one-copy path; it is tried again.
        (landing.sessions.admitted())
            .try_for_each(|row| self.port.revoke(queue, u32::from(row)))
            .and_then(|()| self.port.quiesce(queue))
            .map_err(|error| error.to_string())?;
        let built = self.rebuild_landing(registered_len);
        let landing = self.landing.as_mut().ok_or("nothing lands here")?;
        if !landing.is_open {
            return built.map_err(|error| error.to_string());
        }
        for row in taken {
            let Some(inbound) = landing.sessions.at_mut(row) else {
                continue;
            };
            let resumed = SessionAdmission {
                first_message: inbound.order.unsettled_from(),
                ..inbound.terms.admission
            };
            if self.port.admit(queue, &resumed).is_err() {
                self.counters.landing_lost += 1;
            }
            inbound.limit_messages(&mut landing.rx);
        }
        landing.drops = landing.rx.drops();
        self.counters.landing_rebuilt += u64::from(taken.count() > 0);
        self.show_landed(self.looks.now_ns());
        built.map_err(|error| error.to_string())
    }

    /// Ends our own sessions that sent on a channel which is gone.
    fn end_sessions_on(&mut self, channel: usize) {
        for position in (0..self.sending.senders().len()).rev() {
            let index = self.sending.senders()[position];
            let outbound = self.peers.at(index).outbound.as_ref();
            if outbound.is_some_and(|outbound| outbound.terms.channel == channel) {
                self.end_session(index, self.looks.now_ns());
            }
        }
    }
}

/// What the device writes beside packets.
impl<P: Port> Engine<P> {
    /// What finds out what the device writes, while it is not known.
    fn footprint_probe(&mut self) -> Option<&mut Probe<PeerId>> {
        self.landing.as_mut()?.footprint.sought()
    }

    fn footprint_is(&mut self, footprint: Footprint) {
        if let Some(landing) = &mut self.landing {
            landing.footprint = footprint;
        }
    }

    /// Nothing may land on this device in zero-copy mode.
    pub(crate) fn refuse_device(&mut self, obstacle: &Obstacle) {
        self.footprint_is(Footprint::Known);
        let may_copy = self.fixed.receives.may_copy;
        match may_copy && self.land_in_copy_mode().is_ok() {
            true => tracing::warn!("long messages are received in copy mode: {obstacle}"),
            false => {
                tracing::warn!("no session in zero-copy mode: {obstacle}");
                self.footprint_is(Footprint::Unfit);
            }
        }
    }

    /// While it is not known what the device writes: makes a peer send a packet that shows it.
    #[cold]
    pub(crate) fn ask_for_footprint(&mut self, peer: PeerId) {
        let Some(probe) = self.footprint_probe() else {
            return;
        };
        if let Err(obstacle) = probe.ask(peer) {
            self.refuse_device(&obstacle);
        } else if self.peers.named(peer).is_some() {
            let now_ns = self.looks.now_ns();
            self.ask_where(peer.index, now_ns);
        }
    }

    /// While it is not known what the device writes: looks at a packet that has just come.
    #[cold]
    pub(crate) fn look_at_footprint(&mut self, frame: u64, packet: (u64, u32)) {
        let umem = self.memory.umem();
        let probe = (self.landing.as_mut()).and_then(|landing| landing.footprint.sought());
        let found = probe.and_then(|probe| probe.look(frame, packet, |chunk| umem.copy_from(frame, chunk)));
        match found {
            // Some hundred have to come before a device is known to pad, and its sender waits for seconds only.
            None => {
                if let Some(peer) = self.footprint_probe().and_then(|probe| probe.peer()) {
                    self.ask_for_footprint(peer);
                }
            }
            Some(Ok(prefix)) => {
                self.fixed.caps.prefix_len = prefix;
                self.footprint_is(Footprint::Known);
            }
            Some(Err(obstacle)) => self.refuse_device(&obstacle),
        }
    }
}
