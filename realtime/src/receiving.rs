//! The receiving side of an endpoint's sockets, in its rounds: messages go to the socket that they are for, and reports go back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lm_dataplane::{Arrived, Handler, PeerId, Replies};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Clock, RealTimePacket, TYPE_RT_REPORT};

use crate::incoming::{Arrival, Incoming};
use crate::socket::{Hub, Info, RtMessage, locked};

/// Flows of a peer that are known at once. One more takes the place of the one that was silent for longest.
const FLOWS_MAX: usize = 16;

/// A flow, and when it was heard of last.
#[derive(Debug)]
struct Known {
    incoming: Incoming,
    heard: Time,
}

/// Takes the messages of all sockets of an endpoint.
pub(crate) struct Receiving {
    hub: Arc<Hub>,
    flows: BTreeMap<(PeerId, u64), Known>,
}

impl Receiving {
    pub(crate) fn new(hub: Arc<Hub>) -> Receiving {
        Receiving {
            hub,
            flows: BTreeMap::new(),
        }
    }

    /// The flow, which is new perhaps.
    fn flow(&mut self, id: (PeerId, u64), packet: &RealTimePacket<'_>, now: Time) -> &mut Known {
        if !self.flows.contains_key(&id) {
            let of_peer = || self.flows.iter().filter(|((peer, _), _)| *peer == id.0);
            if of_peer().count() >= FLOWS_MAX
                && let Some((&oldest, _)) = of_peer().min_by_key(|(_, known)| known.heard)
            {
                self.flows.remove(&oldest);
            }
        }
        self.flows.entry(id).or_insert_with(|| Known {
            incoming: Incoming::new(packet, now),
            heard: now,
        })
    }
}

impl Handler for Receiving {
    fn packet(&mut self, arrived: Arrived<'_>, now: Time, _: &mut Replies) {
        let hub = Arc::clone(&self.hub);
        let packet = match RealTimePacket::read(arrived.words(), arrived.payload()) {
            Ok(packet) if packet.count == 1 => packet,
            _ => {
                hub.refused_packets.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        let sockets = locked(&hub.sockets);
        let Some(queues) = sockets.get(&packet.port) else {
            hub.refused_packets.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let host_now = (hub.clock)();
        let known = self.flow((arrived.from(), arrived.key()), &packet, now);
        known.heard = now;
        // Of the host's clock: it is ours where the sender is declared to be of this host.
        let is_one_clock = packet.clock != Clock::Host || queues.same_host;
        let arrival = known.incoming.came(&packet, is_one_clock, host_now, now);
        let Arrival::Whole { late, lost, delay } = arrival else {
            queues.counts.overtaken.fetch_add(1, Ordering::Relaxed);
            return;
        };
        queues.counts.whole.fetch_add(1, Ordering::Relaxed);
        queues.counts.lost.fetch_add(lost.into(), Ordering::Relaxed);
        queues.counts.late.fetch_add(late.into(), Ordering::Relaxed);
        if late && queues.drops_late {
            return;
        }
        let info = Info {
            from: arrived.from(),
            number: packet.message,
            priority: packet.priority,
            sent_at: packet.sent_at,
            received_at: host_now,
            delay,
            lost,
            late,
        };
        let len = packet.payload.len();
        match arrived.keep() {
            Some(message) => queues.deliver(RtMessage { message, len, info }),
            None => drop(queues.counts.superseded_here.fetch_add(1, Ordering::Relaxed)),
        }
    }

    fn due(&self) -> Option<Time> {
        let due = self.flows.values().filter_map(|known| known.incoming.due());
        due.min()
    }

    fn tick(&mut self, now: Time, replies: &mut Replies) {
        for ((peer, key), known) in &mut self.flows {
            if let Some(report) = known.incoming.report(now) {
                let (words, bytes) = report.write();
                replies.send(*peer, TYPE_RT_REPORT, *key, words, &bytes);
            }
        }
    }
}
