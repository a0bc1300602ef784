//! The receiving side of an endpoint's sockets, in its rounds: messages go to the socket that they are for, and reports go back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lm_dataplane::{Arrived, Handler, Replies};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Clock, RealTimePacket, RtReport, TYPE_RT_REPORT};

use crate::assembling::Put;
use crate::flows::{FlowKey, Flows};
use crate::incoming::{Arrival, REPORT_PERIOD};
use crate::message::{Bytes, Info, RtMessage};
use crate::queues::SocketState;
use crate::socket::{Hub, Receiver, locked};
use crate::statistics::Counts;

/// What a packet waits for its program: for longer, and the clock is another one than that of its stamp.
const WAITED_MOST: Duration = Duration::from_secs(10);
/// Flows without a socket whose senders are told in a report's period, and of these those of one address: packets of more are not answered.
const TOLD_MAX: usize = 64;
const TOLD_OF_ADDRESS_MAX: usize = 16;
/// Flows that a round looks at: the others' reports leave in the next one.
const LOOKS_MAX: u64 = 32;

/// Takes the messages of all sockets of an endpoint.
pub(crate) struct Receiving {
    hub: Arc<Hub>,
    flows: Flows,
    /// No message is given up before.
    gives_up: Option<Time>,
    /// No socket's period ends before.
    missing: Option<Time>,
    /// When a fragment came last.
    fragment_at: Option<Time>,
    /// Flows without a socket whose senders were told, and when, the oldest first.
    told: VecDeque<(FlowKey, Time)>,
}

impl Receiving {
    pub(crate) fn new(hub: Arc<Hub>) -> Receiving {
        Receiving {
            hub,
            flows: Flows::default(),
            gives_up: None,
            missing: None,
            fragment_at: None,
            told: VecDeque::with_capacity(TOLD_MAX),
        }
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
            let (state, flows) = (&receiver.arriving.state, &mut self.flows);
            let give_up = |flow, message| give_up(flows, state, flow, message, now);
            receiver.assembling.give_up(now, give_up);
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

/// Tells a sender that its flow has no socket here.
fn tell_refused(
    all: &mut VecDeque<(FlowKey, Time)>,
    id: FlowKey,
    packet: &RealTimePacket<'_>,
    now: Time,
    replies: &mut Replies,
) {
    while (all.front()).is_some_and(|(_, at)| now.since(*at) >= REPORT_PERIOD) {
        all.pop_front();
    }
    let of_address = all.iter().filter(|(told, _)| told.address == id.address);
    let (of_address, is_told) = (of_address.count(), all.iter().any(|(told, _)| *told == id));
    if is_told || of_address >= TOLD_OF_ADDRESS_MAX || all.len() == TOLD_MAX {
        return;
    }
    all.push_back((id, now));
    let (words, bytes) = RtReport::refusal(packet).write();
    replies.send(id.peer, TYPE_RT_REPORT, id.key, words, &bytes);
}

/// Neither this message of a flow's nor one before it is waited for any more.
fn give_up(flows: &mut Flows, state: &SocketState, flow: FlowKey, message: u32, now: Time) {
    let lost = flows.with(flow, |incoming| {
        incoming.give_up(message, now);
        incoming.newly_lost()
    });
    // Of a flow that is known no more it is all that is lost.
    state.lost(lost.unwrap_or(1));
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
        let (counts, times) = (&self.counts, &self.counts.times);
        counts.whole.fetch_add(1, Ordering::Relaxed);
        if arrival.late.is_some() {
            counts.late.fetch_add(1, Ordering::Relaxed);
        }
        times.delay.record(nanos(arrival.delay));
        let seldom = [
            (&times.latency, arrival.latency),
            (&times.jitter, arrival.jitter),
            (&times.late, arrival.late),
        ];
        for (histogram, time) in seldom {
            time.into_iter().for_each(|time| histogram.record(nanos(time)));
        }
        if arrival.lost > 0 {
            times.lost.record(arrival.lost.into());
        }
    }

    fn lost(&self, lost: u32) {
        if lost > 0 {
            self.counts.lost.fetch_add(lost.into(), Ordering::Relaxed);
        }
    }
}

impl Handler for Receiving {
    fn packet(&mut self, arrived: Arrived<'_>, now: Time, replies: &mut Replies) {
        let hub = &self.hub;
        let count = |count: &AtomicU64| {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let refuse = || count(&hub.refused_packets);
        let Ok(packet) = RealTimePacket::read(arrived.words(), arrived.payload()) else {
            return refuse();
        };
        if !arrived.is_proved() {
            replies.remind(arrived.from());
            return refuse();
        }
        let id = FlowKey {
            address: *arrived.source().ip(),
            peer: arrived.from(),
            key: arrived.key(),
        };
        let mut sockets = locked(&hub.sockets);
        let is_open = |receiver: &&mut Receiver| !receiver.arriving.state.is_closed();
        let Some(receiver) = sockets.get_mut(&packet.port).filter(is_open) else {
            tell_refused(&mut self.told, id, &packet, now, replies);
            return refuse();
        };
        let (arriving, assembling) = (&mut receiver.arriving, &mut receiver.assembling);
        let state = &arriving.state;
        let host_now = (hub.clock)();
        if self.flows.hear(id, &packet, now) {
            return count(&state.counts.overtaken);
        }
        let block = match packet.count {
            1 => None,
            _ => {
                let mut put = assembling.put(id, &packet, now);
                while matches!(put, Put::NoBlock)
                    && let Some((flow, message)) = assembling.make_way(packet.message_len as usize)
                {
                    give_up(&mut self.flows, state, flow, message, now);
                    put = assembling.put(id, &packet, now);
                }
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
        // Of the host's clock: it is ours where the sender is declared to be of this host. Others nothing keeps equal to ours yet.
        let is_one_clock = packet.clock == Clock::Host && state.same_host;
        let waited = arrived.stamp().map(|stamp| host_now.since(stamp));
        let waited = waited.filter(|waited| *waited < WAITED_MOST).unwrap_or_default();
        let came = self.flows.with(id, |incoming| {
            let arrival = incoming.came(&packet, is_one_clock, (host_now, waited), now)?;
            Some((arrival, incoming.newly_lost()))
        });
        let Some((arrival, newly_lost)) = came.flatten() else {
            return count(&state.counts.overtaken);
        };
        state.lost(newly_lost);
        assembling.forget(id, packet.message);
        state.came(&arrival);
        if let Some(expected) = &mut receiver.expected {
            expected.came(now, &state.counts);
            self.missing = self.missing.into_iter().chain(expected.due()).min();
        }
        if arrival.late.is_some() && state.drops_late {
            return;
        }
        let info = Info {
            from: arrived.from(),
            number: packet.message,
            priority: packet.priority,
            sent_at: packet.sent_at,
            received_at: host_now,
            delay: arrival.delay,
            lost: arrival.lost,
            late: arrival.late.is_some(),
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
            Some(bytes) => arriving.deliver(RtMessage { bytes, info }),
            None => count(&state.counts.no_block),
        }
    }

    fn due(&self) -> Option<Time> {
        let times = [self.flows.due(), self.gives_up, self.missing];
        times.into_iter().flatten().min()
    }

    fn tick(&mut self, now: Time, replies: &mut Replies) {
        self.give_up(now);
        self.miss(now);
        let mut looks = 0;
        while looks < LOOKS_MAX
            && let Some(report) = self.flows.look(now)
        {
            looks += 1;
            if let Some((flow, report)) = report {
                let (words, bytes) = report.write();
                replies.send(flow.peer, TYPE_RT_REPORT, flow.key, words, &bytes);
            }
        }
        // Relaxed: each number is right for itself.
        self.hub.flow_looks.fetch_add(looks, Ordering::Relaxed);
        self.hub
            .flows_known
            .store(self.flows.len() as u64, Ordering::Relaxed);
    }
}
