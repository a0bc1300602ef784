//! The receiving side of an endpoint's sockets, in its rounds: messages go to the socket that they are for, and reports go back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lm_dataplane::{Arrived, Handler, Replies};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Clock, RealTimePacket, RtReport, TYPE_RT_REPORT};

use crate::assembling::{FlowKey, Put};
use crate::incoming::{Arrival, Incoming, REPORT_PERIOD};
use crate::message::{Bytes, Info, RtMessage};
use crate::queues::SocketState;
use crate::socket::{Hub, Receiver, locked};
use crate::statistics::Counts;

/// Flows of a peer that are known at once. One more takes the place of the one that was silent for longest.
const FLOWS_MAX: usize = 16;

/// What a packet waits for its program: for longer, and the clock is another one than that of its stamp.
const WAITED_MOST: Duration = Duration::from_secs(10);
/// Flows without a socket whose senders are told in a report's period: packets of more are not answered.
const TOLD_MAX: usize = 16;

/// A flow, and when it was heard of last.
#[derive(Debug)]
struct Known {
    incoming: Incoming,
    heard: Time,
}

/// Takes the messages of all sockets of an endpoint.
pub(crate) struct Receiving {
    hub: Arc<Hub>,
    flows: BTreeMap<FlowKey, Known>,
    /// No message is given up before.
    gives_up: Option<Time>,
    /// No socket's period ends before.
    missing: Option<Time>,
    /// When a fragment came last.
    fragment_at: Option<Time>,
    /// Flows without a socket whose senders were told, and when.
    told: Vec<(FlowKey, Time)>,
}

impl Receiving {
    pub(crate) fn new(hub: Arc<Hub>) -> Receiving {
        Receiving {
            hub,
            flows: BTreeMap::new(),
            gives_up: None,
            missing: None,
            fragment_at: None,
            told: Vec::with_capacity(TOLD_MAX),
        }
    }

    /// The flow, which is new perhaps.
    fn flow(&mut self, id: FlowKey, packet: &RealTimePacket<'_>, now: Time) -> &mut Incoming {
        if !self.flows.contains_key(&id) {
            let of_peer = || self.flows.iter().filter(|((peer, _), _)| *peer == id.0);
            if of_peer().count() >= FLOWS_MAX
                && let Some((&oldest, _)) = of_peer().min_by_key(|(_, known)| known.heard)
            {
                self.flows.remove(&oldest);
            }
        }
        let flows = self.flows.len() + usize::from(!self.flows.contains_key(&id));
        self.hub.flows_known.store(flows as u64, Ordering::Relaxed);
        let known = self.flows.entry(id).or_insert_with(|| Known {
            incoming: Incoming::new(packet, now),
            heard: now,
        });
        known.heard = now;
        &mut known.incoming
    }

    /// Tells a sender that its flow has no socket here.
    fn tell_refused(&mut self, id: FlowKey, packet: &RealTimePacket<'_>, now: Time, replies: &mut Replies) {
        self.told.retain(|(_, at)| now.since(*at) < REPORT_PERIOD);
        if self.told.len() == TOLD_MAX || self.told.iter().any(|(told, _)| *told == id) {
            return;
        }
        self.told.push((id, now));
        let (words, bytes) = RtReport::refusal(packet).write();
        replies.send(id.0, TYPE_RT_REPORT, id.1, words, &bytes);
    }

    /// Gives messages up of which nothing came for too long. After a round that brought fragments their others may wait at the device: this
    /// program was late perhaps, and not they.
    fn give_up(&mut self, now: Time) {
        if self.gives_up.is_none_or(|at| at >= now) || self.fragment_at == Some(now) {
            return;
        }
        let hub = Arc::clone(&self.hub);
        let mut sockets = locked(&hub.sockets);
        for receiver in sockets.values_mut() {
            while let Some((flow, message)) = receiver.assembling.give_up(now) {
                receiver.assembling.forget(flow, message);
                if let Some(known) = self.flows.get_mut(&flow) {
                    known.incoming.give_up(message, now);
                    receiver.arriving.state.lost(&mut known.incoming);
                }
            }
        }
        let due = sockets.values().filter_map(|receiver| receiver.assembling.due());
        self.gives_up = due.min();
    }

    /// Counts the periods that have passed without a message.
    fn miss(&mut self, now: Time) {
        if self.missing.is_none_or(|at| at > now) {
            return;
        }
        let mut sockets = locked(&self.hub.sockets);
        let mut next = None::<Time>;
        for receiver in sockets.values_mut() {
            if let Some(expected) = &mut receiver.expected {
                let state = &receiver.arriving.state;
                if expected.look(now, &state.counts) {
                    state.waker.wake();
                }
                next = next.into_iter().chain(expected.due()).min();
            }
        }
        self.missing = next;
    }
}

/// Counts in nanoseconds. A time of centuries is none.
fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// When a socket with a period expects a message: every period, from the first one that came on.
#[derive(Debug)]
pub(crate) struct Expected {
    period: Duration,
    /// When one came last, and when the period ends that runs.
    since: Option<(Time, Time)>,
}

impl Expected {
    pub(crate) fn new(period: Duration) -> Expected {
        Expected { period, since: None }
    }

    fn came(&mut self, now: Time, counts: &Counts) {
        self.look(now, counts);
        if let Some((last, _)) = self.since
            && now.since(last) >= self.period
        {
            counts.times.missed.record(nanos(now.since(last)));
        }
        self.since = Some((now, now + self.period));
    }

    /// Periods that have passed count; whether there were any.
    fn look(&mut self, now: Time, counts: &Counts) -> bool {
        let Some((_, end)) = self.since.as_mut().filter(|(_, end)| *end <= now) else {
            return false;
        };
        let passed = 1 + now.since(*end).as_nanos() / self.period.as_nanos();
        *end += self.period * passed as u32;
        counts.missed.fetch_add(passed as u64, Ordering::Relaxed);
        true
    }

    fn due(&self) -> Option<Time> {
        self.since.map(|(_, end)| end)
    }
}

impl SocketState {
    fn came(&self, arrival: &Arrival) {
        let Arrival::Whole {
            late,
            lost,
            delay,
            latency,
            jitter,
        } = *arrival
        else {
            return;
        };
        let (counts, times) = (&self.counts, &self.counts.times);
        counts.whole.fetch_add(1, Ordering::Relaxed);
        counts.late.fetch_add(late.is_some().into(), Ordering::Relaxed);
        times.delay.record(nanos(delay));
        let seldom = [
            (&times.latency, latency),
            (&times.jitter, jitter),
            (&times.late, late),
        ];
        for (histogram, time) in seldom {
            time.into_iter().for_each(|time| histogram.record(nanos(time)));
        }
        if lost > 0 {
            times.lost.record(lost.into());
        }
    }

    fn lost(&self, incoming: &mut Incoming) {
        let lost = incoming.newly_lost();
        self.counts.lost.fetch_add(lost.into(), Ordering::Relaxed);
    }
}

impl Handler for Receiving {
    fn packet(&mut self, arrived: Arrived<'_>, now: Time, replies: &mut Replies) {
        let hub = Arc::clone(&self.hub);
        let count = |count: &AtomicU64| {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let refuse = || count(&hub.refused_packets);
        let Ok(packet) = RealTimePacket::read(arrived.words(), arrived.payload()) else {
            return refuse();
        };
        let mut sockets = locked(&hub.sockets);
        let is_open = |receiver: &&mut Receiver| !receiver.arriving.state.is_closed();
        let Some(receiver) = sockets.get_mut(&packet.port).filter(is_open) else {
            self.tell_refused((arrived.from(), arrived.key()), &packet, now, replies);
            return refuse();
        };
        let (state, assembling) = (Arc::clone(&receiver.arriving.state), &mut receiver.assembling);
        let host_now = (hub.clock)();
        let id = (arrived.from(), arrived.key());
        let incoming = self.flow(id, &packet, now);
        if incoming.has_overtaken(packet.message) {
            return count(&state.counts.overtaken);
        }
        let block = match packet.count {
            1 => None,
            _ => {
                let put = assembling.put(id, &packet, now);
                self.fragment_at = Some(now);
                self.gives_up = assembling.due().into_iter().chain(self.gives_up).min();
                match put {
                    Put::Whole(block) => Some(block),
                    Put::Part => return,
                    Put::Twice => return count(&state.counts.overtaken),
                    Put::NoBlock => return count(&state.counts.no_block),
                    Put::Refused => return refuse(),
                }
            }
        };
        let incoming = self.flow(id, &packet, now);
        // Of the host's clock: it is ours where the sender is declared to be of this host. Others nothing keeps equal to ours yet.
        let is_one_clock = packet.clock == Clock::Host && state.same_host;
        let waited = arrived.stamp().map(|stamp| host_now.since(stamp));
        let waited = waited.filter(|waited| *waited < WAITED_MOST).unwrap_or_default();
        let arrival = incoming.came(&packet, is_one_clock, (host_now, waited), now);
        let Arrival::Whole {
            late, lost, delay, ..
        } = arrival
        else {
            return count(&state.counts.overtaken);
        };
        state.lost(incoming);
        assembling.forget(id, packet.message);
        state.came(&arrival);
        if let Some(expected) = &mut receiver.expected {
            expected.came(now, &state.counts);
            self.missing = self.missing.into_iter().chain(expected.due()).min();
        }
        if late.is_some() && state.drops_late {
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
            late: late.is_some(),
        };
        let len = packet.payload.len();
        let bytes = match block {
            Some(block) => {
                let len = block.bytes().len() as u64;
                state.counts.copied_bytes.fetch_add(len, Ordering::Relaxed);
                Some(Bytes::Block(block))
            }
            None => state.hold_frame().and_then(|_held| {
                let message = arrived.keep()?;
                Some(Bytes::Frame { message, len, _held })
            }),
        };
        match bytes {
            Some(bytes) => receiver.arriving.deliver(RtMessage { bytes, info }),
            None => count(&state.counts.no_block),
        }
    }

    fn due(&self) -> Option<Time> {
        let looks = self.flows.len() as u64;
        self.hub.flow_looks.fetch_add(looks, Ordering::Relaxed);
        let reports = self.flows.values().filter_map(|known| known.incoming.due());
        reports.chain(self.gives_up).chain(self.missing).min()
    }

    fn tick(&mut self, now: Time, replies: &mut Replies) {
        self.give_up(now);
        self.miss(now);
        let looks = self.flows.len() as u64;
        self.hub.flow_looks.fetch_add(looks, Ordering::Relaxed);
        for ((peer, key), known) in &mut self.flows {
            if let Some(report) = known.incoming.report(now) {
                let (words, bytes) = report.write();
                replies.send(*peer, TYPE_RT_REPORT, *key, words, &bytes);
            }
        }
    }
}
