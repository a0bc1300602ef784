//! Flows: packets of the class [`Class::RealTime`](super::Class::RealTime) that others than the engine make, with frames and descriptors
//! that are theirs alone.

use std::collections::VecDeque;

use lm_protocol::time::Time;
use lm_protocol::wire::Addressing;

use super::{Class, Shaping};
use crate::completion::PeerId;
use crate::memory::Umem;

/// Packets that leave before messages and that the engine does not make. It asks for them in each round: the most urgent flow first, and those that are equally
/// urgent in turn.
pub trait Flow: Send {
    /// Puts up to `budget` packets into `out`, of those that are due at `now`.
    fn next(&mut self, budget: u32, now: Time, out: &mut TxBatch<'_>);

    /// When its next packet is due; `None` while there is none. It is asked for packets from then on.
    fn departs(&self) -> Option<Time>;

    /// How urgent its next packet is: a rank and a deadline, the lower ones first. Where several flows have something
    /// due, each is asked before one of them has its turn.
    fn urgency(&mut self) -> (u8, Time) {
        (0, Time::MAX)
    }

    /// The device does not read the packet that was put with `token` any more: found at the time given, which is late by a round; `None`
    /// if nobody knows whether it left, because its queue was built anew.
    fn sent(&mut self, token: u64, at: Option<Time>);
}

/// What a flow is for, and what is kept for it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowSpec {
    /// Where its packets go: the data port of this peer. `None`: nowhere yet, and it is asked for none
    /// ([`Extensions::aim_flow`](crate::Extensions::aim_flow)).
    pub to: Option<PeerId>,
    /// Frames: each has room for one packet of up to [`TxBatch::payload_max`] bytes.
    pub frames: u32,
    /// Descriptors: packets that the device may have at once.
    pub descriptors: u32,
    /// Packets of messages that the device may have on each queue while the flow is there, and two at least: nothing overtakes them. `None`:
    /// a burst of bulk on the flow's own queue.
    pub messages: Option<u32>,
}

/// Names a flow of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowId(pub(super) u64);

/// Why there is no flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlowError {
    /// No such peer.
    #[error("the endpoint knows no such peer; resolve it first")]
    UnknownPeer,
    /// No such flow.
    #[error("the endpoint has no such flow; it was taken out")]
    UnknownFlow,
    /// It needs at least one of each.
    #[error("a flow needs at least one frame and one descriptor")]
    Empty,
    /// Too little send memory.
    #[error("there is no memory for so many frames; open the endpoint with more (send_len)")]
    NoMemory,
    /// Others need the rest of the queue.
    #[error("only {left} descriptors are left for flows; ask for fewer")]
    NoDescriptors {
        /// How many there are.
        left: u32,
    },
}

/// Where a flow puts its packets. Frames are named from 0 on; those that the device reads are not written.
#[derive(Debug)]
pub struct TxBatch<'a> {
    umem: &'a Umem,
    lane: &'a mut Lane,
    addressing: Addressing,
    left: u32,
    /// UMEM address and length of what goes to the ring.
    ready: &'a mut Vec<(u64, u32)>,
}

impl TxBatch<'_> {
    /// Most bytes behind the UDP header.
    pub fn payload_max(&self) -> usize {
        self.lane.frame_len as usize - self.addressing.udp_header_len()
    }

    /// Packets that can be put now.
    pub fn room(&self) -> u32 {
        self.left
    }

    /// A frame's payload, to be written. `None`: there is no such frame, or the device reads it.
    pub fn frame(&mut self, frame: u32) -> Option<&mut [u8]> {
        let is_free = (self.lane.frames.get(frame as usize)).is_some_and(|state| state.in_flight == 0);
        if !is_free {
            return None;
        }
        let below = self.addressing.udp_header_len() as u64;
        let (start, len) = (
            self.lane.address(frame) + below,
            u64::from(self.lane.frame_len) - below,
        );
        // SAFETY: the range lies inside memory that was allocated for this flow alone. No descriptor of it is with the device (`in_flight`),
        // and the reference ends before `put` can give it one: both borrow the batch mutably.
        Some(unsafe { self.umem.mapping().slice_mut(start, len) })
    }

    /// Puts a frame with `len` bytes of payload, an LM header first, on the ring, behind headers up to UDP's; [`Flow::sent`] gets `token`. A frame may be put
    /// again while the device reads it, with as many bytes. `false`: no room, no such frame, or another length.
    pub fn put(&mut self, frame: u32, len: usize, token: u64) -> bool {
        let lane = &mut *self.lane;
        let address = lane.address(frame);
        let Some(state) = lane.frames.get_mut(frame as usize) else {
            return false;
        };
        let mut headers = [0u8; 64];
        let payload = address + self.addressing.udp_header_len() as u64;
        let packet_type = self.umem.read_header::<1>(payload)[0] & 0xf;
        let Ok(header_len) = (self.addressing).write_udp_headers(&mut headers, packet_type, len) else {
            return false;
        };
        let packet_len = (header_len + len) as u32;
        let is_other = state.in_flight > 0 && state.packet_len != packet_len;
        if self.left == 0 || packet_len > lane.frame_len || is_other {
            return false;
        }
        if state.in_flight == 0 {
            self.umem.copy_to(address, &headers[..header_len]);
        }
        state.in_flight += 1;
        state.packet_len = packet_len;
        lane.pending.push_back((frame, token));
        self.left -= 1;
        self.ready.push((address, packet_len));
        true
    }
}

/// What is kept for a flow.
#[derive(Debug)]
struct Lane {
    /// Where its packets go, if anywhere.
    addressing: Option<Addressing>,
    /// UMEM address of its memory, and its length.
    start: u64,
    len: u64,
    frame_len: u32,
    /// Bytes before each frame.
    room: u32,
    frames: Vec<Frame>,
    descriptors: u32,
    messages: Option<u32>,
    /// Frame and token of what the device has, the oldest first.
    pending: VecDeque<(u32, u64)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Frame {
    in_flight: u32,
    packet_len: u32,
}

/// Bytes of memory for so many frames, each with room before it.
pub(crate) fn flow_memory_len(frames: u32, frame_len: u32, room: u8) -> u64 {
    u64::from(frames) * (u64::from(frame_len) + u64::from(room))
}

impl Lane {
    fn address(&self, frame: u32) -> u64 {
        self.start + u64::from(self.room) + u64::from(frame) * u64::from(self.frame_len + self.room)
    }

    /// The token of the oldest packet that lies at `address`.
    fn take_pending(&mut self, address: u64) -> Option<u64> {
        let frame = (address.checked_sub(self.start)? / u64::from(self.frame_len + self.room)) as u32;
        let position = self.pending.iter().position(|(pending, _)| *pending == frame)?;
        let (_, token) = self.pending.remove(position)?;
        self.frames[frame as usize].in_flight -= 1;
        Some(token)
    }
}

struct Registered {
    id: FlowId,
    /// `None`: it is gone, and its memory stays until the device has read it.
    flow: Option<Box<dyn Flow>>,
    lane: Lane,
}

impl Registered {
    /// Packets that it has descriptors for.
    fn budget(&self) -> u32 {
        self.lane.descriptors - self.lane.pending.len() as u32
    }

    /// The flow, if it has something due, and where to send it, and a descriptor.
    fn due(&mut self, now: Time) -> Option<&mut dyn Flow> {
        if self.lane.addressing.is_none() || self.budget() == 0 {
            return None;
        }
        let flow = self.flow.as_mut()?;
        let is_due = flow.departs().is_some_and(|due| due <= now);
        is_due.then_some(flow.as_mut())
    }
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Registered")
            .field(&self.id)
            .field(&self.lane)
            .finish()
    }
}

/// Memory that a flow had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Vacated {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// What became of a flow's turn.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asked {
    /// It has nothing to send, or no descriptor.
    Nothing,
    /// It may not send now, and is the first to be asked next.
    Held,
    /// Of so many that were allowed it sent so many packets, of so many bytes together.
    Put { allowed: u32, packets: u32, bytes: u64 },
}

/// The flows of an endpoint, in the order of the turns of those that are equally urgent.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    all: VecDeque<Registered>,
    last: u64,
    ready: Vec<(u64, u32)>,
}

impl Flows {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Descriptors that are kept for flows.
    pub(super) fn descriptors(&self) -> u32 {
        let staying = self.all.iter().filter(|registered| registered.flow.is_some());
        staying.map(|registered| registered.lane.descriptors).sum()
    }

    /// Descriptors that messages may have on each queue, where a flow says so.
    pub(super) fn messages(&self) -> Option<u32> {
        let staying = self.all.iter().filter(|registered| registered.flow.is_some());
        staying.filter_map(|registered| registered.lane.messages).min()
    }

    /// A flow with memory from UMEM address `start` on: its frames, one after the other, with `room` bytes before each.
    pub(super) fn add(
        &mut self,
        spec: &FlowSpec,
        addressing: Option<Addressing>,
        (start, frame_len): (u64, u32),
        room: u8,
        flow: Box<dyn Flow>,
    ) -> FlowId {
        self.last += 1;
        let id = FlowId(self.last);
        let lane = Lane {
            addressing,
            start,
            len: flow_memory_len(spec.frames, frame_len, room),
            frame_len,
            room: room.into(),
            frames: vec![Frame::default(); spec.frames as usize],
            descriptors: spec.descriptors,
            messages: spec.messages,
            pending: VecDeque::with_capacity(spec.descriptors as usize),
        };
        self.ready.reserve(spec.descriptors as usize);
        self.all.push_back(Registered {
            id,
            flow: Some(flow),
            lane,
        });
        id
    }

    /// Has a flow's packets go elsewhere; `false`: there is none of that name.
    pub(super) fn aim(&mut self, id: FlowId, addressing: &Addressing) -> bool {
        let is_it = |registered: &&mut Registered| registered.id == id && registered.flow.is_some();
        let Some(registered) = self.all.iter_mut().find(is_it) else {
            return false;
        };
        registered.lane.addressing = Some(*addressing);
        true
    }

    /// Takes a flow out.
    pub(super) fn remove(&mut self, id: FlowId) -> Option<Box<dyn Flow>> {
        let registered = self.all.iter_mut().find(|registered| registered.id == id)?;
        registered.flow.take()
    }

    /// Memory of a flow that is gone, and of which the device reads nothing more.
    pub(super) fn vacated(&mut self) -> Option<Vacated> {
        let is_done =
            |registered: &Registered| registered.flow.is_none() && registered.lane.pending.is_empty();
        let position = self.all.iter().position(is_done)?;
        let Lane { start, len, .. } = self.all.remove(position)?.lane;
        Some(Vacated { start, len })
    }

    /// Asks the most urgent flow that has something due for as many packets as `allowed` allows of those that it has descriptors for, or for
    /// one where others have something due, too; `put` gets the UMEM address and length of each.
    pub(super) fn ask(
        &mut self,
        umem: &Umem,
        now: Time,
        allowed: impl FnOnce(u32) -> u32,
        mut put: impl FnMut(u64, u32),
    ) -> Asked {
        let all = self.all.iter_mut().enumerate();
        let mut flows = all.filter_map(|(at, registered)| Some((at, registered.due(now)?)));
        let (first, second) = (flows.next(), flows.next());
        let due = 1 + u32::from(second.is_some());
        let at = match (first, second) {
            (None, _) => return Asked::Nothing,
            (Some((only, _)), None) => only,
            (Some(first), Some(second)) => {
                let flows = [first, second].into_iter().chain(flows);
                let urgent = flows.map(|(at, flow)| (flow.urgency(), at)).min();
                urgent.map_or(0, |(_, at)| at)
            }
        };
        let budget = match due {
            1 => self.all[at].budget(),
            _ => 1,
        };
        let allowed = allowed(budget);
        if allowed == 0 {
            return Asked::Held;
        }
        // The next turn is another's, if that is as urgent.
        if self.all.len() > 1
            && let Some(registered) = self.all.remove(at)
        {
            self.all.push_back(registered);
        }
        let Some(Registered { flow, lane, .. }) = self.all.back_mut() else {
            return Asked::Nothing;
        };
        let Some((flow, addressing)) = flow.as_mut().zip(lane.addressing) else {
            return Asked::Nothing;
        };
        let mut batch = TxBatch {
            umem,
            lane,
            addressing,
            left: allowed,
            ready: &mut self.ready,
        };
        flow.next(allowed, now, &mut batch);
        let (packets, mut bytes) = (self.ready.len() as u32, 0);
        for (address, len) in self.ready.drain(..) {
            put(address, len);
            bytes += u64::from(len);
        }
        Asked::Put {
            allowed,
            packets,
            bytes,
        }
    }

    /// How many flows there are to ask.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// The device is done with the packet at `address`. `false`: it has none of a flow there.
    #[cold]
    pub(crate) fn completed(&mut self, address: u64, now: Time) -> bool {
        let is_its = |registered: &&mut Registered| {
            let Lane { start, len, .. } = registered.lane;
            (start..start + len).contains(&address)
        };
        let Some(registered) = self.all.iter_mut().find(is_its) else {
            return false;
        };
        let token = registered.lane.take_pending(address);
        if let (Some(token), Some(flow)) = (token, &mut registered.flow) {
            flow.sent(token, Some(now));
        }
        token.is_some()
    }

    /// Their queue was built anew: what the device had has no completion.
    pub(super) fn abandoned(&mut self) {
        for Registered { flow, lane, .. } in &mut self.all {
            lane.frames.fill(Frame::default());
            for (_, token) in lane.pending.drain(..) {
                if let Some(flow) = flow {
                    flow.sent(token, None);
                }
            }
        }
    }

    /// Whether something is due that shapers let go.
    #[inline]
    pub(crate) fn are_due(&self, shaping: &Shaping, now: Time) -> bool {
        !self.all.is_empty() && self.depart(shaping).is_some_and(|due| due <= now)
    }

    /// When the next packet of a flow is due that has descriptors left, and shapers let it go.
    pub(super) fn depart(&self, shaping: &Shaping) -> Option<Time> {
        let able = self.all.iter().filter(|registered| {
            let lane = &registered.lane;
            lane.addressing.is_some() && (lane.pending.len() as u32) < lane.descriptors
        });
        let due = able.filter_map(|registered| registered.flow.as_ref()?.departs());
        due.min()
            .map(|due| shaping.next(Class::RealTime).map_or(due, |next| next.max(due)))
    }
}
