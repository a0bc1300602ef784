//! The landing channel as a whole: made longer, and built anew, under its sessions or without any.

use lm_ebpf::{Role, SessionAdmission};
use lm_protocol::control::RejectReason;
use lm_protocol::session::Refusal;

use crate::channel::Transmit;
use crate::config::{TRANSMIT_BURST, TRANSMIT_RING_LEN};
use crate::engine::{Engine, LandingSide, same_drops};
use crate::landing::{Sessions, Violation};
use crate::nic::{Channel, ChannelConfig, Nic, NicError};

/// Attempts to empty a TX ring before its channel is built anew: twice as many as a full ring needs.
const FLUSHES_MAX: u32 = 2 * TRANSMIT_RING_LEN / TRANSMIT_BURST;

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
    /// Makes the landing arena at least `len` bytes long, with a new socket that registers all of it.
    pub(crate) fn grow_landing(&mut self, len: u64) -> Result<(), Refusal> {
        let Some(landing) = &self.landing else {
            return Err(RejectReason::Unsupported.into());
        };
        if landing.arena.len() >= len {
            return Ok(());
        }
        if landing.arena.start() + len > self.umem.len() {
            return Err(RejectReason::NoMemory.into());
        }
        if let Err(error) = self.umem.mapping().populate(
            landing.arena.start() + landing.arena.len(),
            landing.arena.start() + len,
        ) {
            tracing::warn!(
                "no landing memory for a session: {} MiB more are wanted in huge pages ({error}); reserve some \
                 (/proc/sys/vm/nr_hugepages)",
                (len - landing.arena.len()).div_ceil(1 << 20)
            );
            return Err(RejectReason::NoMemory.into());
        }
        if !self.rebuild_under_sessions(landing.arena.start() + len) {
            return Err(RejectReason::NoMemory.into());
        }
        let landing = self.landing.as_mut().expect("it was there a moment ago");
        landing.arena.grow(len);
        Ok(())
    }

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

    /// Replaces the landing channel's socket: nothing that was posted on the old one can be written any more.
    pub(crate) fn rebuild_landing(&mut self, registered_len: u64) -> Result<(), NicError> {
        let Some(landing) = self.landing.take() else {
            return Ok(());
        };
        // Our own packets on its TX ring would go with the socket, and nobody would send them again.
        for _ in 0..FLUSHES_MAX {
            if !self.transmit[landing.transmit].has_unsent() {
                break;
            }
            self.flush();
        }
        self.reap(true);
        let LandingSide {
            queue,
            fill,
            rx,
            mut log,
            mut arena,
            chosen,
            mut sessions,
            transmit,
            flow,
            ..
        } = landing;
        for released in self.outgoing.abandoned(transmit) {
            self.recover(released);
        }
        // Its place in the list is the channel's name, so the new one must take it.
        let (tx, completion) = self.transmit.remove(transmit).into_rings();
        let config = channel_config(
            queue,
            registered_len,
            self.fixed.landing_ring_len,
            self.fixed.zero_copy,
        );
        let old = Channel {
            queue,
            fill,
            rx,
            tx,
            completion,
        };
        let channel = match self.nic.rebuild_channel(old, &config) {
            Ok(channel) => channel,
            Err(error) => {
                self.transmit.insert(transmit, Transmit::closed());
                self.end_sessions_on(transmit);
                self.withdraw_offer(queue);
                return Err(error);
            }
        };
        let in_flight = self.config.tx_in_flight;
        self.transmit.insert(
            transmit,
            Transmit::new(queue, channel.tx, channel.completion, in_flight),
        );
        // Packets that the gate accepted and nobody took stay behind in the log.
        let producer = log.producer();
        log.set_posted(producer);
        self.counters.drops.landing_discarded += sessions.forget_entries(producer, &mut arena, &self.umem);
        self.landing = Some(LandingSide {
            queue,
            fill: channel.fill,
            rx: channel.rx,
            log,
            arena,
            chosen,
            sessions,
            statistics: self.nic.statistics(queue).unwrap_or_default(),
            registered_len,
            transmit,
            woken: false,
            flow,
        });
        Ok(())
    }

    /// Builds the landing channel anew while its sessions go on, with so many bytes registered: what was posted is void, so
    /// that a message which waits for nothing else can be shown (I1). `false`: it could not be, or its sessions were given up.
    pub(crate) fn rebuild_under_sessions(&mut self, registered_len: u64) -> bool {
        let Some(landing) = &mut self.landing else {
            return false;
        };
        let queue = landing.queue;
        // A daemon that holds the gate may be away. What waits for the new channel waits for the daemon, too.
        if self.nic.steward().is_some_and(|daemon| !daemon.is_here()) {
            return false;
        }
        // I3: the new socket counts from 0, so what the old one dropped is looked at now.
        let statistics = self.nic.statistics(queue).unwrap_or_default();
        if !self.fixed.zero_copy && !same_drops(&statistics, &landing.statistics) {
            self.abort_landing(Violation::Statistics);
            return false;
        }
        // I4: no CPU is inside the gate with a session. What it accepted until then is on the ring, and is not looked
        // at: its sender is asked for it again.
        let taken = landing.sessions.admitted();
        let closed = (landing.sessions.admitted())
            .try_for_each(|place| self.nic.close_session(queue, u32::from(place)))
            .and_then(|()| self.nic.quiesce(queue));
        if closed.is_err() {
            // Nothing has changed but that packets take the one-copy path; it is tried again.
            return false;
        }
        let position = landing.log.producer();
        let mut sessions = std::mem::replace(&mut landing.sessions, Sessions::new(position, 0, None, 1));
        if self.rebuild_landing(registered_len).is_err() {
            // The zones stay quarantined, and every later request is refused.
            self.counters.landing_lost += 1;
            self.landing = None;
            for inbound in sessions.iter_mut() {
                self.report_given_up(inbound);
            }
            return false;
        }
        let Some(landing) = &mut self.landing else {
            return false;
        };
        self.counters.drops.landing_discarded +=
            sessions.forget_entries(position, &mut landing.arena, &self.umem);
        landing.sessions = sessions;
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
        (landing.sessions.iter_mut()).for_each(|inbound| inbound.terms.registered_len = registered_len);
        landing.statistics = self.nic.statistics(queue).unwrap_or_default();
        self.counters.landing_rebuilt += u64::from(taken.count() > 0);
        self.show_landed(self.now_ns);
        true
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
