//! The sending side of a socket, in the endpoint's rounds: messages leave, and reports say what became of them.

use std::collections::VecDeque;
use std::net::SocketAddrV4;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use lm_dataplane::{Arrived, Flow, Handler, Replies, TxBatch};
use lm_protocol::serial;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Clock, LmHeader, RealTimePacket, RtReport, TYPE_REALTIME, Trailer};

use crate::message::SendOutcome;
use crate::outgoing::{Next, Outgoing, urgency};
use crate::queues::{LeavingEnds, Order};
use crate::socket::{Hub, SocketConfig, locked};

const SECOND: Duration = Duration::from_secs(1);
/// A message leaves after this time without what it has to show.
const HELD_MOST: Duration = Duration::from_millis(100);

/// Sends a socket's messages to one peer.
pub(crate) struct Leaving {
    ends: LeavingEnds,
    hub: Arc<Hub>,
    outgoing: Outgoing<Order>,
    /// A message of which some fragments have left: the others follow before any other message, so that a receiver that has a newer one need
    /// not wait for it.
    begun: Option<Begun>,
    /// Messages in lent memory whose fragments the device all has, or had: at most one for each frame.
    under_way: Vec<Begun>,
    /// Which message each frame has, or had last.
    of_frame: Vec<u64>,
    /// How many messages have begun.
    count: u64,
    /// The endpoint's data port, which digests are about.
    from: SocketAddrV4,
    free: VecDeque<u32>,
    declared: Option<Rate>,
    /// Since when a message waits for what it has to show, if one does.
    held: Option<Time>,
}

/// A rate that is counted by: of a second's packets none is beyond it.
struct Rate {
    interval: Duration,
    /// When the next packet would be due, if they came evenly.
    due: Time,
}

impl Rate {
    fn new(packets_per_second: NonZeroU32) -> Rate {
        Rate {
            interval: SECOND / packets_per_second.get(),
            due: Time::ZERO,
        }
    }

    /// Whether a packet that leaves now is one too many.
    fn is_beyond(&mut self, now: Time) -> bool {
        let next = self.due.max(now) + self.interval;
        let is_beyond = next.since(now) > SECOND;
        if !is_beyond {
            self.due = next;
        }
        is_beyond
    }
}

/// A message on its way out.
pub(crate) struct Begun {
    order: Order,
    /// Which one it is here, and in its flow.
    which: u64,
    number: u32,
    count: u16,
    /// The next fragment.
    index: u16,
    /// Fragments that the device has.
    in_flight: u16,
}

/// What was sent of a flow, and what its receiver says of it.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// What the receiver takes for ours, and which flow it is.
    shown: Arc<AtomicU64>,
    flow: u16,
    /// The receiving socket.
    port: u16,
    /// The socket is connected to another.
    is_over: AtomicBool,
    /// Messages of which something left: the number of the next one.
    next: AtomicU32,
    /// The newest that a report told of, its sums of those that came and that did not, and how many up to the newest are in neither: they are
    /// coming, or its receiver never heard of them.
    reported: AtomicU32,
    sums: [AtomicU32; 2],
    open: AtomicU32,
    whole: AtomicU32,
    lost: AtomicU32,
    /// Refusals, and the newest message of one.
    refused: [AtomicU32; 2],
}

impl Sent {
    pub(crate) fn new(shown: Arc<AtomicU64>, flow: u16, port: u16) -> Sent {
        Sent {
            shown,
            flow,
            port,
            reported: AtomicU32::new(u32::MAX),
            refused: [AtomicU32::new(0), AtomicU32::new(u32::MAX)],
            ..Sent::default()
        }
    }

    /// The key that its packets have now.
    pub(crate) fn key(&self) -> u64 {
        // Relaxed: the endpoint's thread alone writes it.
        self.shown.load(Ordering::Relaxed) >> 16 << 16 | u64::from(self.flow)
    }

    /// Whether its receiver has said what it takes for ours: before, it takes nothing.
    fn is_shown(&self) -> bool {
        // Relaxed: as above.
        self.shown.load(Ordering::Relaxed) != 0
    }

    /// Nothing more is sent of it.
    pub(crate) fn end(&self) {
        // Relaxed: what leaves by mistake is what might have left before.
        self.is_over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Takes a report, if it can be true and counts a message that no report counted before: one that is repeated is no signal. How many losses
    /// are new.
    ///
    /// A receiver that began anew counts from nothing, and only messages behind those that were told of.
    pub(crate) fn take(&self, report: &RtReport) -> Option<u32> {
        // Relaxed: all of this is the endpoint's thread; others only read.
        let of = |count: &AtomicU32| count.load(Ordering::Relaxed);
        let untold = of(&self.next).wrapping_sub(of(&self.reported)).wrapping_sub(1);
        let ahead = report.newest.wrapping_sub(of(&self.reported));
        if ahead > untold || !serial::at_or_before(report.late, report.whole) {
            return None;
        }
        let anew = [report.whole, report.lost];
        let more = [0, 1].map(|which| anew[which].wrapping_sub(of(&self.sums[which])));
        let ahead = u64::from(ahead);
        let (([whole, lost], counted), most) = [(more, ahead + u64::from(of(&self.open))), (anew, ahead)]
            .map(|(counts, most)| ((counts, counts.map(u64::from).iter().sum::<u64>()), most))
            .into_iter()
            .find(|((_, counted), most)| (1..=*most).contains(counted))?;
        self.reported.store(report.newest, Ordering::Relaxed);
        self.open.store((most - counted) as u32, Ordering::Relaxed);
        for (sum, said) in self.sums.iter().zip(anew) {
            sum.store(said, Ordering::Relaxed);
        }
        self.whole.fetch_add(whole, Ordering::Relaxed);
        self.lost.fetch_add(lost, Ordering::Relaxed);
        Some(lost)
    }

    /// Takes a report that its receiver has no socket, if that is of a message which was sent, and none before another's. It is no loss on the
    /// way: it says nothing of the link.
    fn refuse(&self, report: &RtReport) -> bool {
        let [count, newest] = &self.refused;
        // Relaxed: as in `take`.
        let before = newest.load(Ordering::Relaxed);
        let sent = self
            .next
            .load(Ordering::Relaxed)
            .wrapping_sub(before)
            .wrapping_sub(1);
        let is_sent = report.newest.wrapping_sub(before) <= sent;
        if is_sent {
            newest.store(report.newest, Ordering::Relaxed);
            count.fetch_add(1, Ordering::Relaxed);
        }
        is_sent
    }

    /// The number of one more message.
    pub(crate) fn sends(&self) -> u32 {
        // Relaxed: the endpoint's thread alone sends.
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn whole(&self) -> u32 {
        self.whole.load(Ordering::Relaxed)
    }

    pub(crate) fn lost(&self) -> u32 {
        self.lost.load(Ordering::Relaxed)
    }

    pub(crate) fn refused(&self) -> u32 {
        self.refused[0].load(Ordering::Relaxed)
    }
}

impl Leaving {
    pub(crate) fn new(
        ends: LeavingEnds,
        hub: &Arc<Hub>,
        config: &SocketConfig,
        from: SocketAddrV4,
    ) -> Leaving {
        Leaving {
            ends,
            hub: Arc::clone(hub),
            outgoing: Outgoing::new(config.keep),
            begun: None,
            under_way: Vec::with_capacity(config.frames as usize),
            of_frame: vec![0; config.frames as usize],
            count: 0,
            from,
            free: (0..config.frames).collect(),
            declared: config.packets_per_second.map(Rate::new),
            held: None,
        }
    }

    fn take_orders(&mut self) {
        while let Ok(order) = self.ends.orders.pop() {
            if order.flow.is_over() {
                self.ends.unlock(order, SendOutcome::Unsent);
                continue;
            }
            let (priority, deadline) = (order.priority, order.deadline);
            if let Some(oldest) = self.outgoing.push(priority, deadline, order) {
                let waited = (self.hub.clock)().since(oldest.sent_at);
                let counts = &self.ends.state.counts;
                counts.superseded.fetch_add(1, Ordering::Relaxed);
                counts.times.superseded.record(waited.as_nanos() as u64);
                self.ends.unlock(oldest, SendOutcome::Superseded);
            }
        }
        if let Some(begun) = self.begun.take_if(|begun| begun.order.flow.is_over()) {
            self.ends.unlock(begun.order, SendOutcome::Unsent);
        }
    }

    /// Whether the next message waits for what it has to show.
    fn is_held(&self) -> bool {
        let is_held = |order: &Order| !order.flow.is_shown() && !order.flow.is_over();
        self.begun.is_none() && self.outgoing.peek().is_some_and(is_held)
    }

    /// Whether it has to wait longer. A receiver that never asked for a proof does so when it gets one without.
    fn is_too_early(&mut self, now: Time) -> bool {
        let is_held = self.is_held();
        let since = self.held.filter(|_| is_held).unwrap_or(now);
        let waits = is_held && now.since(since) < HELD_MOST;
        self.held = is_held.then_some(if waits { since } else { now });
        waits
    }

    /// The next message that may leave, from its first fragment on.
    fn begin(&mut self) -> Option<Begun> {
        loop {
            let (_, deadline) = self.outgoing.first()?;
            // The clock is read where it matters.
            let now = (deadline < Time::MAX).then(|| (self.hub.clock)());
            let order = match self.outgoing.pop(now.unwrap_or_default())? {
                Next::Send(order) | Next::Late(order) if order.flow.is_over() => {
                    self.ends.unlock(order, SendOutcome::Unsent);
                    continue;
                }
                Next::Send(order) => order,
                Next::Late(order) => {
                    let counts = &self.ends.state.counts;
                    counts.late_unsent.fetch_add(1, Ordering::Relaxed);
                    self.ends.unlock(order, SendOutcome::Late);
                    continue;
                }
            };
            let fragments = order.payload.bytes().len().div_ceil(self.hub.packet_payload_max);
            let number = order.flow.sends();
            self.count += 1;
            return Some(Begun {
                order,
                which: self.count,
                number,
                count: fragments.max(1) as u16, // of the longest message some fifty
                index: 0,
                in_flight: 0,
            });
        }
    }

    /// Writes a fragment into a frame, and puts it on the ring.
    fn put(&self, begun: &Begun, frame: u32, out: &mut TxBatch<'_>) -> bool {
        let (order, stride) = (&begun.order, self.hub.packet_payload_max);
        let message = order.payload.bytes();
        let offset = usize::from(begun.index) * stride;
        let packet = RealTimePacket {
            message: begun.number,
            index: begun.index,
            count: begun.count,
            deadline: order.deadline.map(|deadline| deadline.since(order.sent_at)),
            sent_at: order.sent_at,
            message_len: message.len() as u32,
            offset: offset as u32,
            port: order.flow.port,
            priority: order.priority,
            clock: Clock::Host,
            payload: &message[offset..message.len().min(offset + stride)],
        };
        let header = LmHeader::Extension {
            packet_type: TYPE_REALTIME,
            key: order.flow.key(),
            words: packet.words(),
        };
        let len = packet.payload.len() + RealTimePacket::TAIL_LEN;
        let head = header.encode(len as u16);
        let Some(space) = out.frame(frame) else {
            return false;
        };
        let (to_head, rest) = space.split_at_mut(head.len());
        to_head.copy_from_slice(&head);
        rest[..packet.payload.len()].copy_from_slice(packet.payload);
        rest[packet.payload.len()..len].copy_from_slice(&packet.tail());
        let trailer = Trailer::new(&header, &rest[..len], self.from);
        let trailer = trailer.as_bytes();
        rest[len..len + trailer.len()].copy_from_slice(trailer);
        out.put(frame, head.len() + len + trailer.len(), frame.into())
    }
}

impl Flow for Leaving {
    fn next(&mut self, _: u32, round: Time, out: &mut TxBatch<'_>) {
        self.take_orders();
        while out.room() > 0 && !self.free.is_empty() && !self.is_too_early(round) {
            let Some(mut begun) = self.begun.take().or_else(|| self.begin()) else {
                break;
            };
            let frame = self.free.pop_front().expect("there is one");
            if !self.put(&begun, frame, out) {
                // No frame for it: the socket asked how much fits one.
                self.free.push_front(frame);
                let counts = &self.ends.state.counts;
                counts.unsent.fetch_add(1, Ordering::Relaxed);
                self.ends.unlock(begun.order, SendOutcome::Unsent);
                continue;
            }
            if self
                .declared
                .as_mut()
                .is_some_and(|rate| rate.is_beyond((self.hub.clock)()))
            {
                let beyond = &self.ends.state.counts.beyond_rate;
                beyond.fetch_add(1, Ordering::Relaxed);
            }
            begun.index += 1;
            begun.in_flight += 1;
            self.of_frame[frame as usize] = begun.which;
            if begun.index < begun.count {
                self.begun = Some(begun);
                continue;
            }
            self.ends.state.counts.sent.fetch_add(1, Ordering::Relaxed);
            if begun.order.is_lent {
                self.under_way.push(begun);
            }
        }
    }

    fn departs(&self) -> Option<Time> {
        let waits = self.begun.is_some() || self.outgoing.peek().is_some() || !self.ends.orders.is_empty();
        let held = self
            .held
            .filter(|_| self.is_held() && self.ends.orders.is_empty());
        let due = held.map_or(Time::ZERO, |since| since + HELD_MOST);
        (waits && !self.free.is_empty()).then_some(due)
    }

    /// A message that has begun is as urgent as the one that waits for it.
    fn urgency(&mut self) -> (u8, Time) {
        self.take_orders();
        let begun = (self.begun.as_ref()).map(|begun| urgency(begun.order.priority, begun.order.deadline));
        let first = begun.into_iter().chain(self.outgoing.first()).min();
        first.unwrap_or((u8::MAX, Time::MAX))
    }

    fn sent(&mut self, token: u64, _: Option<Time>) {
        let frame = token as u32;
        self.free.push_back(frame);
        let which = self.of_frame[frame as usize];
        if let Some(begun) = self.begun.as_mut().filter(|begun| begun.which == which) {
            begun.in_flight -= 1;
            return;
        }
        let is_it = |begun: &Begun| begun.which == which;
        let Some(place) = self.under_way.iter().position(is_it) else {
            return;
        };
        self.under_way[place].in_flight -= 1;
        if self.under_way[place].in_flight == 0 {
            let order = self.under_way.swap_remove(place).order;
            self.ends.unlock(order, SendOutcome::Left);
        }
    }
}

/// Takes reports of all sockets' flows.
pub(crate) struct Reports(pub(crate) Arc<Hub>);

impl Handler for Reports {
    fn packet(&mut self, packet: Arrived<'_>, now: Time, _: &mut Replies) {
        let flows = locked(&self.0.flows);
        let flow = flows
            .iter()
            .find(|(peer, flow)| (*peer, flow.key()) == (packet.from(), packet.key()));
        let report = RtReport::read(packet.words(), packet.payload()).ok();
        let taken = (flow.zip(report)).and_then(|((_, flow), report)| match report.refused {
            true => flow.refuse(&report).then_some((0, Duration::ZERO)),
            false => Some((flow.take(&report)?, report.delay)),
        });
        let Some((lost, delay)) = taken else {
            self.0.refused_reports.fetch_add(1, Ordering::Relaxed);
            return;
        };
        self.0.smoothing.tell(lost, delay, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(newest: u32, whole: u32, late: u32, lost: u32) -> RtReport {
        RtReport {
            newest,
            whole,
            late,
            lost,
            delay: Duration::from_secs(1),
            port: 9,
            ..RtReport::default()
        }
    }

    #[test]
    fn a_report_is_taken_once_and_only_if_it_can_be_true() {
        // Numbers and sums wrap.
        for begin in [0, u32::MAX - 3] {
            let flow = Sent::new(Arc::default(), 7, 9);
            for (count, value) in [
                (&flow.next, begin.wrapping_add(10)),
                (&flow.reported, begin.wrapping_sub(1)),
                (&flow.sums[0], begin),
            ] {
                count.store(value, Ordering::Relaxed);
            }
            let take = |newest: u32, whole: u32, late: u32, lost: u32| {
                let [newest, whole, late] = [newest, whole, late].map(|sum| begin.wrapping_add(sum));
                flow.take(&report(newest, whole, late, lost))
            };
            assert_eq!(take(5, 4, 1, 2), Some(2));
            let refused = [
                ("once more", (5, 4, 1, 2)),
                ("the same of a newer message", (6, 4, 1, 2)),
                ("an older one", (5, 3, 1, 2)),
                ("fewer lost", (6, 5, 1, 1)),
                ("a message that was not sent", (10, 5, 1, 2)),
                ("more than were sent", (9, 8, 1, 3)),
                ("as many as there are numbers", (9, u32::MAX, 0, u32::MAX)),
                ("half of all numbers lost", (9, 5, 1, 1 << 31)),
            ];
            for (what, (newest, whole, late, lost)) in refused {
                assert_eq!(take(newest, whole, late, lost), None, "{what}, from {begin}");
            }
            assert_eq!(take(9, 5, 1, 3), Some(1), "from {begin}");
        }
        let flow = Sent::new(Arc::default(), 7, 9);
        flow.next.store(10, Ordering::Relaxed);
        assert_eq!(flow.take(&report(4, 2, 3, 0)), None, "more late than whole");
    }

    /// A report may tell of a message of which only the first packets came.
    #[test]
    fn the_newest_message_counts_when_it_is_whole() {
        let flow = Sent::new(Arc::default(), 7, 9);
        flow.next.store(6, Ordering::Relaxed);
        assert_eq!(flow.take(&report(5, 5, 0, 0)), Some(0));
        assert_eq!(flow.take(&report(5, 7, 0, 0)), None, "more than were sent");
        assert_eq!(flow.take(&report(5, 6, 0, 0)), Some(0));
        assert_eq!(flow.take(&report(5, 6, 0, 0)), None, "once more");
        assert_eq!(flow.whole(), 6);
    }

    #[test]
    fn a_receiver_that_began_anew_is_believed_at_once_and_what_the_old_one_said_no_more() {
        let flow = Sent::new(Arc::default(), 7, 9);
        flow.next.store(2000, Ordering::Relaxed);
        let old = [report(999, 990, 0, 10), report(1009, 999, 0, 11)];
        assert_eq!(old.map(|one| flow.take(&one)), [Some(10), Some(1)]);
        // It cannot have counted what was told of before it began.
        assert_eq!(flow.take(&report(1014, 3, 0, 3)), None);
        assert_eq!(flow.take(&report(1014, 3, 0, 2)), Some(2));
        assert_eq!(flow.take(&report(1016, 5, 0, 2)), Some(0));
        for replayed in old {
            assert_eq!(flow.take(&replayed), None, "{replayed:?}");
        }
        assert_eq!((flow.whole(), flow.lost()), (1004, 13), "of both");
    }
}
