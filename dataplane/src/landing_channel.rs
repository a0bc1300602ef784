//! The landing channel as a whole: built anew, under its sessions or without any, and lost.

use lm_ebpf::Role;
use lm_protocol::landing::SessionAdmission;

use crate::channel::Transmit;
use crate::config::{TRANSMIT_BURST, TRANSMIT_RING_LEN};
use crate::engine::{Engine, same_drops};
use crate::landing::{Sessions, Violation, Zone};
use crate::nic::{Channel, ChannelConfig, Nic, NicError};
use crate::release::Released;
use crate::ring::{self, Fill, FillRing, Rx, RxRing};

/// Attempts to empty a TX ring before its channel is built anew: twice as many as a full ring needs.
const FLUSHES_MAX: u32 = 2 * TRANSMIT_RING_LEN / TRANSMIT_BURST;

/// How long a landing channel that was lost stays so: opening it may take as long as the queue is busy
/// ([`BIND_PATIENCE`](crate::xsk::BIND_PATIENCE)).
const LOST_NS: u64 = 5_000_000_000;

/// Rings of a channel that has no socket: nothing comes there.
fn closed_rings() -> (FillRing, RxRing) {
    let (fill, _) = ring::in_memory::<Fill>(1, 0);
    let (_, rx) = ring::in_memory::<Rx>(1, 0);
    (fill, rx)
}

/// The rings and the role of a landing channel.
pub(crate) fn channel_config(
    queue: u32,
    registered_len: u64,
    ring_len: u32,
    zero_copy: bool,
) -> ChannelConfig {
    ChannelConfig {
        queue,
        role: match zero_copy {
            true => Role::LandingZeroCopy,
            false => Role::Landing,
        },
        registered_len,
        fill_len: ring_len,
        rx_len: ring_len,
        tx_len: TRANSMIT_RING_LEN,
        completion_len: TRANSMIT_RING_LEN,
    }
}

impl<N: Nic> Engine<N> {
    /// Leaves zero-copy mode on the landing queue, where no session has been yet. Small packets stay in it: their frames do not
    /// overlap, so what a device writes beside them harms nobody.
    pub(crate) fn land_in_copy_mode(&mut self) -> Result<(), NicError> {
        let Some(landing) = &mut self.landing else {
            return Ok(());
        };
        let registered_len = landing.registered_len;
        landing.sessions = Sessions::new(landing.log.producer(), self.fixed.landing_ring_len, None, 1);
        self.nic.land_in_copy_mode();
        self.fixed.zero_copy = false;
        self.fixed.prefix = 0;
        self.fixed.lap = 1;
        self.rebuild_landing(registered_len)
    }

    /// Replaces the landing channel's socket: nothing that was posted on the old one can be written any more. On an error that is found
    /// before, nothing has changed. On one that is found then, there is a socket for what was registered before; or, where not even that is
    /// possible, none, until there is one again ([`Engine::look_for_landing`]).
    pub(crate) fn rebuild_landing(&mut self, registered_len: u64) -> Result<(), NicError> {
        let Some(landing) = &self.landing else {
            return Ok(());
        };
        let (transmit, had) = (landing.transmit, landing.registered_len);
        let config = |registered_len| {
            let (ring_len, zero_copy) = (self.fixed.landing_ring_len, self.fixed.zero_copy);
            channel_config(landing.queue, registered_len, ring_len, zero_copy)
        };
        let (config, before) = (config(registered_len), config(had));
        self.nic.prepare_channel(&config)?;
        // Our own packets on its TX ring would go with the socket, and nobody would send them again.
        for _ in 0..FLUSHES_MAX {
            if !self.transmit[transmit].has_unsent() {
                break;
            }
            self.flush();
        }
        self.reap(true);
        for released in self.outgoing.abandoned(transmit) {
            self.recover(released);
        }
        let Some(mut landing) = self.landing.take() else {
            return Ok(());
        };
        let (fill, rx) = closed_rings();
        // Its place in the list is the channel's name, so the new one must take it.
        let closed = std::mem::replace(&mut self.transmit[transmit], Transmit::closed());
        let (tx, completion) = closed.into_rings();
        let old = Channel {
            queue: landing.queue,
            fill: std::mem::replace(&mut landing.fill, fill),
            rx: std::mem::replace(&mut landing.rx, rx),
            tx,
            completion,
        };
        let was_open = landing.is_open;
        let built = match was_open {
            true => self.nic.rebuild_channel(old, &config),
            false => self.nic.open_channel(&config),
        };
        let (channel, result) = match built {
            Ok(channel) => (Some((channel, registered_len)), Ok(())),
            // A daemon may have a bound.
            Err(error) if registered_len > had => {
                let channel = self.nic.open_channel(&before).ok();
                (channel.map(|channel| (channel, had)), Err(error))
            }
            Err(error) => (None, Err(error)),
        };
        landing.is_open = channel.is_some();
        if let Some((channel, registered_len)) = channel {
            landing.registered_len = registered_len;
            (landing.fill, landing.rx) = (channel.fill, channel.rx);
            let in_flight = self.config.tx_in_flight;
            self.transmit[transmit] = Transmit::new(landing.queue, channel.tx, channel.completion, in_flight);
        }
        // Packets that the gate accepted and nobody took stay behind in the log.
        let producer = landing.log.producer();
        landing.log.set_posted(producer);
        self.counters.drops.landing_discarded +=
            (landing.sessions).forget_entries(producer, &mut landing.arena, &self.umem);
        landing.statistics = self.nic.statistics(landing.queue).unwrap_or_default();
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
        let now_ns = self.now_ns;
        self.counters.landing_lost += 1;
        self.end_sessions_on(transmit);
        self.withdraw_offer(queue);
        let Some(landing) = &mut self.landing else { return };
        landing.failed_ns[0] = Some(now_ns);
        if self.fixed.zero_copy {
            let places: Vec<u8> = landing.sessions.admitted().collect();
            for place in places {
                let zones = self.retire(place).map_or_else(Vec::new, |retired| retired.zones);
                for Zone { start, len } in zones {
                    self.recover(Released::Zone { start, len });
                }
            }
            return;
        }
        for place in landing.sessions.admitted() {
            landing.stop_landing(place, &self.umem, now_ns);
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
        let is_away = self.nic.steward().is_some_and(|daemon| !daemon.is_here());
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
        if self.nic.steward().is_some_and(|daemon| !daemon.is_here()) {
            return Err("the admission daemon is away; start it again".into());
        }
        // I3: the new socket counts from 0, so what the old one dropped is looked at now.
        let statistics = self.nic.statistics(queue).unwrap_or_default();
        if !self.fixed.zero_copy && landing.is_open && !same_drops(&statistics, &landing.statistics) {
            self.abort_landing(Violation::Statistics);
            return Err("packets were dropped behind the gate".into());
        }
        // Whatever fails without the queue fails before the gate is closed.
        let config = channel_config(
            queue,
            registered_len,
            self.fixed.landing_ring_len,
            self.fixed.zero_copy,
        );
        (self.nic.prepare_channel(&config)).map_err(|error| error.to_string())?;
        // I4: no CPU is inside the gate with a session. What it accepted until then is on the ring, and is not looked
        // at: its sender is asked for it again.
        let taken = landing.sessions.admitted();
        // Nothing has changed on an error but that packets take the one-copy path; it is tried again.
        (landing.sessions.admitted())
            .try_for_each(|place| self.nic.close_session(queue, u32::from(place)))
            .and_then(|()| self.nic.quiesce(queue))
            .map_err(|error| error.to_string())?;
        let built = self.rebuild_landing(registered_len);
        let landing = self.landing.as_mut().ok_or("nothing lands here")?;
        if !landing.is_open {
            return built.map_err(|error| error.to_string());
        }
        for place in taken {
            let Some(inbound) = landing.sessions.at_mut(place) else {
                continue;
            };
            let resumed = SessionAdmission {
                first_message: inbound.unsettled_from(),
                ..inbound.terms.admission
            };
            if self.nic.open_session(queue, &resumed).is_err() {
                self.counters.landing_lost += 1;
            }
            inbound.limit_messages(&mut landing.log);
        }
        let registered_len = landing.registered_len;
        (landing.sessions.iter_mut()).for_each(|inbound| inbound.terms.registered_len = registered_len);
        landing.statistics = self.nic.statistics(queue).unwrap_or_default();
        self.counters.landing_rebuilt += u64::from(taken.count() > 0);
        self.show_landed(self.now_ns);
        built.map_err(|error| error.to_string())
    }

    /// Ends our own sessions that sent on a channel which is gone.
    fn end_sessions_on(&mut self, channel: usize) {
        for position in (0..self.senders.len()).rev() {
            let index = self.senders[position];
            let peer = self.peers.at(index);
            if (peer.successor.as_ref()).is_some_and(|next| next.outbound.terms.channel == channel) {
                self.end_successor(index, self.now_ns);
            }
            let outbound = self.peers.at(index).outbound.as_ref();
            if outbound.is_some_and(|outbound| outbound.terms.channel == channel) {
                self.end_session(index, self.now_ns);
            }
        }
    }
}
