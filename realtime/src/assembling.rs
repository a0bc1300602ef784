//! Messages of several fragments that are not whole yet. Each fragment is copied once, into the block that the application will see.

use std::sync::Arc;
use std::time::Duration;

use lm_protocol::serial;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{Clock, RealTimePacket};

use crate::flows::FlowKey;
use crate::pool::{Block, Pool};

/// A message is given up when nothing of it has come for so long; one with a deadline as long as that says, within these.
const PATIENCE: Duration = Duration::from_millis(2);
const PATIENCE_MOST: Duration = Duration::from_millis(100);
/// Most fragments of a message: the longest has 47 of 1416 bytes.
const FRAGMENTS_MAX: usize = 256;

/// What all fragments of a message say alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    message: u32,
    count: u16,
    message_len: u32,
    stride: u32,
    deadline: Option<Duration>,
    sent_at: Time,
    priority: u8,
    clock: Clock,
}

impl Shape {
    /// `None`: it is none of a message of several fragments.
    fn of(packet: &RealTimePacket<'_>) -> Option<Shape> {
        let is_of_several = (2..=FRAGMENTS_MAX).contains(&usize::from(packet.count));
        let stride = packet.stride().filter(|_| is_of_several)?;
        Some(Shape {
            message: packet.message,
            count: packet.count,
            message_len: packet.message_len,
            stride,
            deadline: packet.deadline,
            sent_at: packet.sent_at,
            priority: packet.priority,
            clock: packet.clock,
        })
    }

    fn patience(&self) -> Duration {
        let deadline = self.deadline.unwrap_or_default();
        deadline.clamp(PATIENCE, PATIENCE_MOST)
    }
}

/// A message that is not whole.
#[derive(Debug)]
struct Assembly {
    flow: FlowKey,
    shape: Shape,
    block: Block,
    came: [u64; FRAGMENTS_MAX / 64],
    left: u16,
    begun: Time,
    /// It is given up then.
    until: Time,
}

/// What became of a fragment.
#[derive(Debug)]
pub(crate) enum Put {
    /// It was the last one.
    Whole(Block),
    /// Others are missing.
    Part,
    /// It was there.
    Twice,
    /// There is no block for its message.
    NoBlock,
    /// It fits no message, or not its own.
    Refused,
}

/// The messages of a socket that are not whole yet: as many as have a block.
#[derive(Debug)]
pub(crate) struct Assembling {
    /// In the order of flows and numbers, so that those of an address stand together.
    all: Vec<Assembly>,
    pool: Arc<Pool>,
}

impl Assembling {
    /// With so many blocks.
    pub(crate) fn new(pool: Arc<Pool>, blocks: usize) -> Assembling {
        Assembling {
            all: Vec::with_capacity(blocks),
            pool,
        }
    }

    fn place(&self, flow: FlowKey, message: u32) -> Result<usize, usize> {
        self.all
            .binary_search_by_key(&(flow, message), |one| (one.flow, one.shape.message))
    }

    /// Copies a fragment to its place.
    pub(crate) fn put(&mut self, flow: FlowKey, packet: &RealTimePacket<'_>, now: Time) -> Put {
        let Some(shape) = Shape::of(packet) else {
            return Put::Refused;
        };
        let place = match self.place(flow, shape.message) {
            Ok(place) if self.all[place].shape != shape => return Put::Refused,
            Ok(place) => place,
            Err(place) => {
                let Some(block) = self.pool.take(shape.message_len as usize) else {
                    return Put::NoBlock;
                };
                let assembly = Assembly {
                    flow,
                    shape,
                    block,
                    came: Default::default(),
                    left: shape.count,
                    begun: now,
                    until: now,
                };
                self.all.insert(place, assembly);
                place
            }
        };
        let assembly = &mut self.all[place];
        let index = usize::from(packet.index);
        let (word, bit) = (&mut assembly.came[index / 64], 1 << (index % 64));
        if *word & bit != 0 {
            return Put::Twice;
        }
        *word |= bit;
        let (from, len) = (packet.offset as usize, packet.payload.len());
        assembly.block.bytes_mut()[from..from + len].copy_from_slice(packet.payload);
        assembly.until = now + shape.patience();
        assembly.left -= 1;
        match assembly.left {
            0 => Put::Whole(self.all.remove(place).block),
            _ => Put::Part,
        }
    }

    /// Forgets what of a flow is not newer than a message.
    pub(crate) fn forget(&mut self, flow: FlowKey, message: u32) {
        self.all
            .retain(|one| one.flow != flow || !serial::at_or_before(one.shape.message, message));
    }

    /// Messages of an address that have a block as one of `len` bytes.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn unfinished(&self, address: std::net::Ipv4Addr, len: usize) -> usize {
        let is_its =
            |one: &&Assembly| one.flow.address == address && Some(one.block.kind) == self.pool.kind(len);
        self.all.iter().filter(is_its).count()
    }

    /// Has a message give way to one of `len` bytes that finds no block: the oldest of the address that has most of such.
    pub(crate) fn make_way(&mut self, len: usize) -> Option<(FlowKey, u32)> {
        let kind = self.pool.kind(len)?;
        let is_such = |one: &&Assembly| one.block.kind == kind;
        let of_address = self.all.chunk_by(|a, b| a.flow.address == b.flow.address);
        let most = of_address.max_by_key(|those| those.iter().filter(is_such).count())?;
        let oldest = most.iter().filter(is_such).min_by_key(|one| one.begun)?;
        let gone = (oldest.flow, oldest.shape.message);
        let place = self.place(gone.0, gone.1).ok()?;
        self.all.remove(place);
        Some(gone)
    }

    /// Gives messages up of which nothing came for too long; `given_up` hears of each.
    pub(crate) fn give_up(&mut self, now: Time, mut given_up: impl FnMut(FlowKey, u32)) {
        self.all.retain(|one| {
            let is_over = one.until < now;
            if is_over {
                given_up(one.flow, one.shape.message);
            }
            !is_over
        });
    }

    /// When one is given up unless something comes.
    pub(crate) fn due(&self) -> Option<Time> {
        self.all.iter().map(|one| one.until).min()
    }
}
