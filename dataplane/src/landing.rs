//! Landing: where the fragments of large messages arrive. Steps 7 and 8 of the data's path: the gate's log and
//! the RX ring of the landing channel come in, whole messages go to [`crate::engine`].
//!
//! For payload stride `P`, header length `H` and zone start `R`, the packet of fragment `k` is posted at
//! `R + k·P − H`, in descending `k` inside a window. Each payload ends exactly where the packet before it put
//! its headers, and overwrites them (LM §3.2, figure 2):
//!
//! ```text
//!   window w (fragments lo..=hi)                window w+1
//!   ──────────────────────────────┐tail├────────────────────────
//!   lo │ lo+1 │  ...  │ hi        │ H  │ lo' │ lo'+1 │ ...
//!                                 └────┘
//!            headers of lo' land on the last H bytes of window w
//! ```
//! Those tail bytes are saved when `hi` has arrived and is final, the entry of `lo'` is posted only after that, and they are
//! put back when `lo'` has its RX descriptor (invariant I5). Everything else needs no copy.
//!
//! What makes a message final (I1, I3): the n-th descriptor lies at the n-th posted entry and has the length of the
//! n-th log entry; the header in each window's lowest slot, which nothing has overwritten yet, names what the log
//! says; no entry is posted that could still write there; and the kernel's drop counters did not move. Anything else
//! is a violation: nothing of the session is shown, the channel is built anew.
//!
//! A lost packet shifts those behind it by a slot (*displacement*). The log says which fragment is where, so
//! [`repair`] moves it to its place, and entries that are posted from then on are aimed where they will be met.
//!
//! A packet that is longer than a frame takes several, each of which begins where the one before it ends, so that it lies there in one
//! piece. The gate lets a packet land only where as many are posted as it takes ([`Log::set_slot`]): otherwise those behind it would begin
//! in the middle of a slot. What it does not let land takes the one-copy path.
//!
//! In zero-copy mode there is no log: [`zero_copy`] says what takes its place, and [`relocation`] finds by their digests what a loss
//! has shifted.

mod astray;
mod card;
mod claim;
mod integrity;
mod pairing;
mod posting;
mod receiving;
mod relocation;
mod repair;
mod run;
mod sessions;
mod strays;
mod zero_copy;

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use lm_protocol::control::Ended;
use lm_protocol::delivery::{Arrivals, Delivery, RequestTimer};
use lm_protocol::geometry::{Geometry, Layout};
use lm_protocol::integrity::Integrity;
use lm_protocol::landing::SessionAdmission;
use lm_protocol::rate::{Backoff, BackoffShape};
use lm_protocol::serial;
use lm_protocol::session::Unused;
use lm_protocol::time::Time;
use lm_protocol::window::{TailRule, WindowShape};
use lm_protocol::wire::lm::SETTLED_KEPT;
use lm_protocol::zone::{ZoneShape, frames_of};

use crate::arena::Arena;

use crate::bounds::IN_FLIGHT_MESSAGES_MAX;
use crate::completion::PeerId;
use crate::fragment_digests::PAYLOAD_LEN_MIN;
use crate::memory::{CHUNK_LEN_RANGE, PACKET_HEADROOM};
use crate::port::Caps;

use astray::Astray;
use claim::Claim;
use integrity::{Evidence, Proof};
use repair::Held;
pub(crate) use repair::{Remedy, RepairCounters};
use sessions::Entries;
pub(crate) use sessions::Sessions;
use strays::Strays;

/// A sender that loses packets has at least so many on the way, and so many more after each round trip without a decrease
/// ([`Backoff`]): whatever random loss alone does, it holds it near 112, which fills a path of 100 µs at 13 Gbit/s.
const BACKOFF_FLOOR: u32 = 32;
const BACKOFF_INCREASE: u32 = 16;
/// Losses of so many packets in a hundred are taken for the path's, not for a full queue's.
const BACKOFF_TOLERATED_PERCENT: u32 = 2;
/// Losses that come together count once: for a round trip, and not less than this.
const ROUND_TRIP_MIN_NS: u64 = 100_000;
/// Entries beyond what may be on the way, while packets are being lost: enough to the next round.
const POSTED_SLACK: u32 = 64;
/// [`InboundTerms::reach`] at most: fragments in the longest chunk, where the first has eight bytes less than others.
const REACH_MAX: usize =
    (*CHUNK_LEN_RANGE.end() as usize - PACKET_HEADROOM as usize) / (PAYLOAD_LEN_MIN as usize - 8);
/// Longest header that a saved tail can hold: Ethernet with two tags, IPv4, UDP, LM, and a driver's prefix.
const TAIL_LEN_MAX: usize = 128;

/// A landing zone taken from the arena: what goes back is exactly this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// Why a session's packets can no longer be trusted to lie where they should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// A descriptor came for which nothing was posted.
    Unposted,
    /// The descriptor's address is not the next posted one.
    Address,
    /// The log's sequence number is not the next one.
    Sequence,
    /// The log names another fragment than the slot's: a packet before it was lost (displacement).
    Displaced,
    /// Log and descriptor, or log and geometry, disagree on the length.
    Length,
    /// The header that survived in a window's lowest slot names something else.
    Header,
    /// The kernel counted a dropped packet on this socket.
    Statistics,
    /// Generic mode: two CPUs ran the gate for this queue.
    Processor,
}

impl Violation {
    pub(crate) const ALL: [Violation; 8] = [
        Violation::Unposted,
        Violation::Address,
        Violation::Sequence,
        Violation::Displaced,
        Violation::Length,
        Violation::Header,
        Violation::Statistics,
        Violation::Processor,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Violation::Unposted => "landing_unposted",
            Violation::Address => "landing_address",
            Violation::Sequence => "landing_sequence",
            Violation::Displaced => "landing_displaced",
            Violation::Length => "landing_length",
            Violation::Header => "landing_header",
            Violation::Statistics => "landing_statistics",
            Violation::Processor => "landing_processor",
        }
    }
}

/// A message that was announced and is not settled.
#[derive(Debug)]
struct Arriving {
    number: u32,
    tag: u64,
    geometry: Geometry,
    /// Length of the message; the geometry may have padding behind it.
    len: u64,
    announced_ns: u64,
    zone: Option<Zone>,
    /// `R`: UMEM address of the first payload byte.
    payload: u64,
    /// Packets of the session before this message's first.
    base: u64,
    /// Positions (transmit order) whose fill entry is posted, or never will be.
    posted: u32,
    /// Positions whose fill entry was used, or never will be.
    consumed: u32,
    /// Of these, the ones whose places are final (I1): nothing that is posted lets anybody write there but at saved tails. All of them,
    /// but in zero-copy mode, where the last ones lie within the chunks of the next entries ([`InboundTerms::reach`]).
    final_to: u32,
    /// Payload bytes of what lies at the last positions, until these are final; `None`: nothing that belongs there.
    landed: [Option<u16>; REACH_MAX + 1],
    /// Which fragments are here.
    arrivals: Arrivals,
    /// When to ask for those that are missing.
    timer: RequestTimer,
    /// Fragments of it that wait for their place to be free.
    held: u32,
    /// The application has it already, before its turn.
    shown: bool,
    /// Zero-copy mode: what is missing now was looked for by digest.
    located: bool,
    /// Zero-copy mode with IP fragments: payload bytes at the first one's place, if it is another, whose header is shorter; or 0.
    other_len: u16,
    /// Zero-copy mode: by how many packets what landed last was ahead of the entry's own, as far as was known then, less the
    /// session's corrections by then.
    ahead: i32,
    /// What is known about its bytes being its sender's.
    proof: Proof,
    /// When something was first found to be missing.
    missing_ns: Option<u64>,
    /// When a window's lowest entry may be posted and which tail is where (I5).
    rule: TailRule,
    /// Saved tails; [`TailRule::slot`] says which window uses which.
    tails: [Tail; 2],
}

/// The last bytes of a window while the header of the next window's lowest frame may be written over them.
#[derive(Clone, Copy, Debug)]
struct Tail {
    bytes: [u8; TAIL_LEN_MAX],
    /// The fragment that it belongs to is in its place.
    valid: bool,
}

impl Arriving {
    /// UMEM addresses of window `window`'s tail: where the header of the next window's lowest frame goes.
    fn tail_range(&self, window: u32, terms: &InboundTerms) -> Range<u64> {
        let lowest = (window + 1) * terms.window.fragments();
        let header = self.geometry.rx_header_range(lowest);
        self.payload.wrapping_add_signed(header.start) - u64::from(terms.caps.prefix_len)
            ..self.payload.wrapping_add_signed(header.end)
    }

    fn fragment_count(&self) -> u32 {
        self.geometry.fragment_count()
    }

    /// UMEM address of fragment `index`'s payload.
    #[inline]
    fn payload_of(&self, index: u32) -> u64 {
        self.payload + self.geometry.rx_payload_range(index).start
    }

    /// What lies at one of the last positions.
    #[inline]
    fn landed_at(&mut self, position: u32) -> &mut Option<u16> {
        &mut self.landed[position as usize % (REACH_MAX + 1)]
    }

    /// Packets of the session up to this message's last.
    fn end(&self) -> u64 {
        self.base + u64::from(self.fragment_count())
    }

    /// It goes to the application.
    fn landed(&self, missing: Vec<Range<u32>>) -> Landed {
        Landed {
            arrived: self.arrived(),
            early: false,
            zone: self.zone.expect("a posted message has a zone"),
            address: self.payload,
            len: self.len,
            number: self.number,
            tag: self.tag,
            announced_ns: self.announced_ns,
            missing,
        }
    }

    /// Fragments of it that are here.
    fn arrived(&self) -> u64 {
        let missing: u32 = self
            .arrivals
            .missing()
            .iter()
            .map(|range| range.end - range.start)
            .sum();
        u64::from(self.arrivals.expected() - missing)
    }

    /// Every fragment is in its place, and nothing can be written there any more (I1).
    fn is_final(&self) -> bool {
        self.consumed == self.fragment_count() && self.arrivals.is_complete() && self.held == 0
    }
}

/// A message whose every byte has arrived, or with a map of those that have.
#[derive(Clone, Debug)]
pub(crate) struct Landed {
    pub(crate) zone: Zone,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) number: u32,
    pub(crate) tag: u64,
    pub(crate) announced_ns: u64,
    /// Fragment indices that are not there, ascending: partial delivery.
    pub(crate) missing: Vec<Range<u32>>,
    /// How many fragments are.
    pub(crate) arrived: u64,
    /// Messages before it are not settled.
    early: bool,
}

impl Landed {
    /// Byte ranges of the message that are not there.
    pub(crate) fn missing_bytes(&self, layout: &Layout) -> Vec<Range<u64>> {
        let Ok(geometry) = layout.session_message(self.len) else {
            return Vec::new();
        };
        self.missing
            .iter()
            .map(|range| {
                let end = geometry.rx_payload_range(range.end - 1).end;
                geometry.rx_payload_range(range.start).start..end.min(self.len)
            })
            .filter(|range| !range.is_empty())
            .collect()
    }
}

/// A message that was given up: which fragments did not arrive where they should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GivenUp {
    pub(crate) number: u32,
    pub(crate) tag: u64,
    pub(crate) len: u64,
    /// Fragment indices, ascending.
    pub(crate) missing: Vec<Range<u32>>,
}

/// What the session's sender agreed to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InboundTerms {
    pub(crate) peer: PeerId,
    pub(crate) key: u64,
    pub(crate) layout: Layout,
    pub(crate) window: WindowShape,
    pub(crate) chunk_len: u32,
    pub(crate) caps: Caps,
    /// Generic mode: every packet of the session must have passed the gate on one CPU (invariant I3a).
    pub(crate) one_processor: bool,
    pub(crate) first_message: u32,
    pub(crate) messages_in_flight: u32,
    /// Packets that the sender may have on the way, at most.
    pub(crate) on_the_way: u32,
    /// Fill entries that may be posted at once.
    pub(crate) posted_max: u32,
    pub(crate) delivery: Delivery,
    /// Messages are shown in the order in which they were sent.
    pub(crate) in_order: bool,
    /// Whether the sender sends digests.
    pub(crate) integrity: Integrity,
    pub(crate) max_message_len: u64,
    pub(crate) registered_len: u64,
    /// Landing memory that messages of its address may take, in bytes.
    pub(crate) memory_max: u64,
    /// The gate does not admit it: all fragments come by the kernel's socket, and no entries are posted for them.
    pub(crate) one_copy: bool,
    /// It did once, and the session gave its place up.
    pub(crate) is_aside: bool,
    /// What the gate was told, to tell it again when the channel is built anew.
    pub(crate) admission: SessionAdmission,
}

impl InboundTerms {
    /// Frames that the packet of fragment `index` takes.
    #[inline]
    fn frames_of(&self, geometry: &Geometry, index: u32) -> u32 {
        match self.caps.capacity {
            0 => 1,
            capacity => frames_of(geometry.fragment(index).frame_len(), capacity),
        }
    }

    /// How many of the entries behind one, in its window, let somebody write where its payload lies. A device may write to a chunk's end;
    /// the kernel writes a packet that the gate admitted, which ends where the payload begins.
    #[inline]
    fn reach(&self) -> u32 {
        match self.caps.witness {
            true => 0,
            false => {
                let written = self.chunk_len - PACKET_HEADROOM as u32;
                written / u32::from(self.layout.first_payload_len())
            }
        }
    }
}

/// What is posted for one packet, or positions that will never have anything.
#[derive(Clone, Copy, Debug)]
struct Aim {
    /// UMEM address at which its packet will begin; [`Aim::SKIPPED`]: none was posted.
    start: u64,
    /// Which session's message it is for ([`Inbound::serial`]), and that session's place.
    serial: u32,
    place: u8,
    number: u32,
    position: u32,
    /// End of the positions that were left out, or that the entry is for: none, where it takes up a packet too many.
    until: u32,
    /// The entry is a spare frame: zero-copy mode.
    spare: bool,
    /// Fill entries, each one frame further than the last.
    frames: u8,
    /// It stands for as many more entries, each for the fragment behind the one before: copy mode, packets of one frame.
    more: u32,
    /// How far below the one before it each of these begins: a fragment's payload, in bytes.
    step: u32,
}

impl Aim {
    const SKIPPED: u64 = u64::MAX;

    /// Positions of a message for which nothing is posted.
    fn skipped(serial: u32, place: u8, number: u32, positions: Range<u32>) -> Aim {
        Aim {
            start: Aim::SKIPPED,
            serial,
            place,
            number,
            position: positions.start,
            until: positions.end,
            spare: false,
            frames: 1,
            more: 0,
            step: 0,
        }
    }

    /// The first of the entries that it stands for.
    #[inline]
    fn first(&self) -> Aim {
        Aim { more: 0, ..*self }
    }

    /// Whether `other` goes on where this ends.
    #[inline]
    fn is_followed_by(&self, other: &Aim) -> bool {
        let following = self.more + 1;
        (self.serial, self.place, self.number, self.step)
            == (other.serial, other.place, other.number, other.step)
            && self.step != 0
            && self.position + following == other.position
            && self
                .start
                .wrapping_sub(u64::from(following) * u64::from(self.step))
                == other.start
    }

    /// Leaves the first `count` of its entries, not all of them, out.
    #[inline]
    fn pass(&mut self, count: u32) {
        debug_assert!(count <= self.more);
        self.start -= u64::from(count) * u64::from(self.step);
        self.position += count;
        self.until += count;
        self.more -= count;
    }

    /// Whether it is a spare frame for no fragment.
    fn is_filler(&self) -> bool {
        self.spare && self.position >= self.until
    }
}

/// A session that lands on the channel.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) terms: InboundTerms,
    /// Tells it from others that had the same place.
    serial: u32,
    /// Entries are posted for it. If not, all its fragments come by the kernel's socket.
    lands: bool,
    astray: Astray,
    /// What the sender was last told.
    pub(crate) told: Told,
    /// Packets that it may have sent (cumulative, mod 2^32) while it is another session's turn.
    allowed: u32,
    /// It has left credit unused for long, while others were there.
    is_silent: bool,
    messages: VecDeque<Arriving>,
    complete: VecDeque<Landed>,
    /// First message in `messages` that is not fully posted.
    posting: usize,
    /// Next message number to be announced.
    pub(crate) announced: u32,
    /// All messages before this number are settled.
    pub(crate) delivered: u32,
    /// Packets of the announced messages.
    announced_packets: u64,
    /// All packets before this one have been accepted by the gate or overtaken by one that was. Zero-copy mode: packets that
    /// came, and that are known to be lost.
    accepted: u64,
    /// Zero-copy mode: by how much `accepted` was corrected, beside what came.
    corrections: i64,
    /// Zero-copy mode: what landed where nothing of its kind was expected.
    strays: Strays,
    claim: Option<Claim>,
    /// Message and position of the last packet that the gate accepted.
    last: Option<(u32, u32)>,
    /// Something is missing, or lies in the wrong place.
    troubled: bool,
    held: Held,
    /// Packets that the sender may have on the way now, and up to which they were counted as arrived.
    backoff: Backoff,
    confirmed: u64,
    /// Messages that were settled without being whole, of the last ones.
    broken: VecDeque<u32>,
    /// How long requests for missing fragments take to be answered, smoothed; 0: none was yet.
    answer_ns: u64,
    /// Last packet or announcement, for the message's time limit.
    pub(crate) progress_ns: u64,
    /// A pause of our own was forgiven since the last packet.
    forgiven: bool,
    /// What is posted next was posted before.
    posts_again: bool,
    /// Bytes that zones of its next messages may take.
    may_take: u64,
    evidence: Evidence,
    pub(crate) restored_bytes: u64,
    /// Fragments taken from spare frames, because their places cross a page's end.
    pub(crate) page_ends: u64,
    pub(crate) repair: RepairCounters,
}

/// What the sender of a session was last told.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    pub(crate) packet_limit: u32,
    /// When the limit was last raised.
    pub(crate) limit_ns: u64,
    pub(crate) delivered: u32,
    pub(crate) announced: u32,
    /// The sender asked, or repeated itself.
    pub(crate) asked: bool,
    /// Something changed since, first at `changed_ns`.
    pub(crate) changed: bool,
    pub(crate) changed_ns: u64,
}

/// Why a sender's announcement, or its word how much it sent, is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Untaken {
    /// An announcement before it is missing.
    Early,
    /// No honest sender says it.
    Implausible,
}

/// What a burst of descriptors brought.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Burst {
    pub(crate) packets: u32,
    pub(crate) window_ended: bool,
}

/// What bounds the packets on the way to `ceiling`, and to fewer after losses.
fn backoff_below(ceiling: u32) -> Backoff {
    let shape = BackoffShape {
        floor: BACKOFF_FLOOR.min(ceiling),
        ceiling,
        increase: BACKOFF_INCREASE,
        kept_eighths: 7,
        tolerated_percent: BACKOFF_TOLERATED_PERCENT,
    };
    Backoff::new(shape).expect("a ceiling that is not below the floor")
}

impl Inbound {
    /// `arena`: where its landing zones will be.
    pub(crate) fn new(terms: InboundTerms, arena: &Arena, now_ns: u64) -> Inbound {
        let ceiling = terms.on_the_way.clamp(1, terms.posted_max.max(1));
        Inbound {
            terms,
            serial: 0,
            lands: !terms.one_copy,
            astray: Astray::default(),
            told: Told {
                delivered: terms.first_message,
                announced: terms.first_message,
                ..Told::default()
            },
            allowed: 0,
            is_silent: false,
            messages: VecDeque::with_capacity(IN_FLIGHT_MESSAGES_MAX as usize),
            complete: VecDeque::with_capacity(IN_FLIGHT_MESSAGES_MAX as usize),
            posting: 0,
            announced: terms.first_message,
            delivered: terms.first_message,
            announced_packets: 0,
            accepted: 0,
            corrections: 0,
            strays: Strays::new(&terms.layout),
            claim: None,
            last: None,
            troubled: false,
            held: Held::default(),
            backoff: backoff_below(ceiling),
            confirmed: 0,
            broken: VecDeque::new(),
            answer_ns: 0,
            progress_ns: now_ns,
            forgiven: false,
            posts_again: false,
            may_take: u64::MAX,
            evidence: Evidence::new(&terms, arena),
            restored_bytes: 0,
            page_ends: 0,
            repair: RepairCounters::default(),
        }
    }

    /// Bytes of the arena that a message of this session takes, and where its payload begins in them.
    fn zone_of(&self, geometry: &Geometry) -> (u64, u64) {
        let shape = ZoneShape::new(geometry, self.terms.chunk_len, self.terms.caps.prefix_len);
        (shape.total_len(), shape.message_start())
    }

    /// Takes the announcement of a message that is not known. If it cannot, nothing changed.
    pub(crate) fn announce(&mut self, number: u32, len: u64, tag: u64, now_ns: u64) -> Result<(), Untaken> {
        // A sender has so many messages under way from the first on that we have not settled, which it may not know yet.
        let is_due = number.wrapping_sub(self.delivered) < self.terms.messages_in_flight;
        if !is_due || len > self.terms.max_message_len {
            return Err(Untaken::Implausible);
        }
        let Ok(geometry) = self.terms.layout.session_message(len) else {
            return Err(Untaken::Implausible);
        };
        if number != self.announced {
            return Err(Untaken::Early);
        }
        if self.messages.is_empty() {
            self.progress_ns = now_ns;
        }
        self.messages.push_back(Arriving {
            number,
            tag,
            geometry,
            len,
            announced_ns: now_ns,
            zone: None,
            payload: 0,
            base: self.announced_packets,
            posted: 0,
            consumed: 0,
            final_to: 0,
            landed: [None; REACH_MAX + 1],
            arrivals: Arrivals::new(geometry.fragment_count()),
            timer: RequestTimer::default(),
            held: 0,
            shown: false,
            located: false,
            other_len: 0,
            ahead: 0,
            proof: Proof::default(),
            missing_ns: None,
            rule: TailRule::new(self.terms.window, geometry.fragment_count()),
            tails: [Tail {
                bytes: [0; TAIL_LEN_MAX],
                valid: false,
            }; 2],
        });
        self.announced_packets += u64::from(geometry.fragment_count());
        self.announced = number.wrapping_add(1);
        Ok(())
    }

    /// The session's place on its channel: four bits of its key say it to the gate.
    pub(crate) fn place(&self) -> u8 {
        let terms = &self.terms;
        let tier = u8::from(terms.one_copy) + u8::from(terms.is_aside);
        terms.admission.place() as u8 + tier * sessions::ADMITTED
    }

    /// Whether it was granted to land, by a daemon if there is one; else the endpoint granted it by the one-copy path.
    pub(crate) fn was_to_land(&self) -> bool {
        !self.terms.one_copy || self.terms.is_aside
    }

    /// What its place is unused for; `None` while something lands there, or may.
    pub(crate) fn unused(&self, now_ns: u64) -> Option<Unused> {
        let is_idle = self.is_idle();
        let since_ns = match (is_idle, self.stalled_ns(now_ns)) {
            (true, _) => self.progress_ns,
            (false, 0) => return None,
            (false, stalled_ns) => now_ns - stalled_ns,
        };
        let since = Time::from_nanos(since_ns);
        Some(Unused { since, is_idle })
    }

    /// Packets that the sender may have on the way now.
    pub(crate) fn on_the_way(&self) -> u32 {
        self.backoff.allowed()
    }

    /// Packets were found to be lost.
    fn lost(&mut self, packets: u32, now_ns: u64) {
        let round_trip_ns = self.answer_ns.max(ROUND_TRIP_MIN_NS);
        self.backoff.lost(
            packets,
            Time::from_nanos(now_ns),
            Duration::from_nanos(round_trip_ns),
        );
    }

    /// What has come since this was last called counts as arrived.
    fn confirm(&mut self) {
        // In zero-copy mode it may have turned out that fewer came.
        let arrived = self.accepted.saturating_sub(self.confirmed);
        self.confirmed = self.confirmed.max(self.accepted);
        self.backoff.confirmed(arrived.min(u64::from(u32::MAX)) as u32);
    }

    /// Where the message with this number is in `messages`, if it is not settled.
    #[inline]
    fn position_of(&self, number: u32) -> Option<usize> {
        let at = number.wrapping_sub(self.messages.front()?.number) as usize;
        (at < self.messages.len()).then_some(at)
    }

    /// The front message goes: whole, or without what is `missing`.
    fn land(&mut self, missing: Vec<Range<u32>>) {
        let message = self
            .messages
            .pop_front()
            .expect("the message that just became whole");
        self.posting = self.posting.saturating_sub(1);
        // Its last fragments may have come without the gate: what comes next is the next message's.
        self.overtaken(message.end());
        match message.shown {
            true if self.complete.is_empty() => self.delivered = self.unsettled_from(),
            true => {}
            false => self.complete.push_back(message.landed(missing)),
        }
    }

    /// All packets of the session before `end` have come, or will not.
    #[inline]
    fn overtaken(&mut self, end: u64) {
        let accepted = self.accepted.max(end);
        self.corrections += (accepted - self.accepted) as i64;
        self.accepted = accepted;
    }

    /// Whole messages behind the front one are shown before it, where the application takes them in any order.
    #[inline]
    fn land_early(&mut self) {
        if self.terms.in_order {
            return;
        }
        for at in 1..self.messages.len() {
            let message = &self.messages[at];
            if !message.shown && message.is_final() && self.is_proved(at) {
                let message = &mut self.messages[at];
                message.shown = true;
                let early = Landed {
                    early: true,
                    ..message.landed(Vec::new())
                };
                self.complete.push_back(early);
            }
        }
    }

    /// Whether a message waits for [`next_landed`](Inbound::next_landed).
    pub(crate) fn has_landed(&self) -> bool {
        !self.complete.is_empty()
    }

    /// The next whole message. Call only after the kernel's statistics were found unchanged.
    pub(crate) fn next_landed(&mut self) -> Option<Landed> {
        let landed = self.complete.pop_front()?;
        if self.complete.is_empty() {
            self.delivered = self.unsettled_from();
        } else if !landed.early {
            self.delivered = landed.number.wrapping_add(1);
        }
        Some(landed)
    }

    /// Numbers of messages that were settled without being whole, as far as their sender may not know it yet.
    pub(crate) fn broken(&self) -> impl Iterator<Item = u32> + '_ {
        let kept = |number: &u32| serial::distance(*number, self.delivered) <= SETTLED_KEPT as i32;
        self.broken.iter().copied().filter(kept)
    }

    /// A message is settled without being whole.
    fn broke(&mut self, number: u32) {
        if self.broken.len() == SETTLED_KEPT as usize {
            self.broken.pop_front();
        }
        self.broken.push_back(number);
    }

    /// What its sender is told when it ends.
    pub(crate) fn ended(&self) -> Ended {
        let since_first = |number: u32| number.wrapping_sub(self.terms.first_message);
        Ended {
            session_key: self.terms.key,
            delivered: since_first(self.delivered),
            heard: Some(since_first(self.announced)),
        }
    }

    /// All messages from this number on were not shown to the application.
    pub(crate) fn shown_up_to(&self) -> u32 {
        let shown = self.messages.iter().rfind(|message| message.shown);
        shown.map_or(self.delivered, |message| message.number.wrapping_add(1))
    }

    /// Whether every posted entry was used and every announced message settled.
    pub(crate) fn is_idle(&self) -> bool {
        self.messages.is_empty() && self.complete.is_empty()
    }

    /// Nothing of it can be disturbed when the channel is built anew.
    pub(crate) fn is_quiet(&self) -> bool {
        !self.lands || self.is_idle()
    }

    /// Nanoseconds without progress while packets are owed to us; 0 when the next move is not the sender's.
    pub(crate) fn stalled_ns(&self, now_ns: u64) -> u64 {
        match self.messages.front() {
            Some(message)
                if message.posted > message.consumed
                    || (!self.lands && message.posted > 0)
                    || message.missing_ns.is_some()
                    || self.awaits_digests() =>
            {
                now_ns.saturating_sub(self.progress_ns)
            }
            // Others' packets used the entries that were posted for it, and it does not send what it may all the same.
            Some(_) if self.lands && self.left() > 0 => self.unused_credit_ns(now_ns),
            _ => 0,
        }
    }

    /// Nanoseconds that the sender has left credit unused which it was told of; 0: it has none.
    fn unused_credit_ns(&self, now_ns: u64) -> u64 {
        match serial::precedes(self.accepted_packets(), self.told.packet_limit) {
            true => now_ns.saturating_sub(self.progress_ns.max(self.told.limit_ns)),
            false => 0,
        }
    }

    /// Begins the message's time limit anew after a pause of our own, once until a packet comes: perhaps the sender
    /// waited for a credit of ours.
    pub(crate) fn forgive_pause(&mut self, now_ns: u64) {
        if !self.forgiven {
            self.forgiven = true;
            self.progress_ns = now_ns;
        }
    }

    /// Whether packets of announced messages are owed.
    fn awaits_packets(&self) -> bool {
        self.messages
            .iter()
            .any(|message| message.posted > message.consumed)
    }

    /// Packets of the session up to the last that was accepted (cumulative, mod 2^32).
    pub(crate) fn accepted_packets(&self) -> u32 {
        self.accepted as u32
    }

    /// Gives the session up: its zones (to be freed only when the channel was built anew, I1), and what is
    /// missing of each message.
    pub(crate) fn give_up(&mut self) -> (Vec<GivenUp>, Vec<Zone>) {
        let mut zones: Vec<Zone> = Vec::new();
        let mut given_up = Vec::new();
        self.repair.stale += self.strays.clear();
        for landed in self.complete.drain(..) {
            self.repair.given_up += landed.arrived;
            zones.push(landed.zone);
            let count = self
                .terms
                .layout
                .session_message(landed.len)
                .map_or(1, |g| g.fragment_count());
            given_up.push(GivenUp {
                number: landed.number,
                tag: landed.tag,
                len: landed.len,
                missing: std::iter::once(0..count).collect(),
            });
        }
        // What was shown early is the application's, or was in the list above.
        for mut message in self.messages.drain(..).filter(|message| !message.shown) {
            self.repair.given_up += message.arrived();
            zones.extend(message.zone);
            message.arrivals.claim(u32::MAX);
            let count = message.fragment_count();
            let missing = match message.arrivals.is_complete() {
                // It waits for an earlier one, or for digests: nothing of it was shown to be right.
                true => std::iter::once(0..count).collect(),
                false => repair::missing_indices(&self.terms.window, &message.arrivals, count),
            };
            given_up.push(GivenUp {
                number: message.number,
                tag: message.tag,
                len: message.len,
                missing,
            });
        }
        self.posting = 0;
        self.delivered = self.announced;
        (given_up, zones)
    }

    /// Fragments of messages that are not settled.
    #[cfg(test)]
    pub(crate) fn open_fragments(&self) -> u64 {
        let landed: u64 = self.complete.iter().map(|landed| landed.arrived).sum();
        let open = self.messages.iter().filter(|message| !message.shown);
        landed + open.map(Arriving::arrived).sum::<u64>() + self.strays.len()
    }

    /// Whether an announcement with this number was taken already.
    pub(crate) fn knows(&self, number: u32) -> bool {
        serial::precedes(number, self.announced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a sender may have on the way after 200 round trips that each lose so many packets in a thousand.
    fn allowed_with(lost_permille: u32) -> u32 {
        let mut backoff = backoff_below(768);
        let round_trip = Duration::from_micros(100);
        for at in 1..=200 {
            let now = Time::from_nanos(at * 100_000);
            backoff.lost(
                (backoff.allowed() * lost_permille).div_ceil(1000),
                now,
                round_trip,
            );
            backoff.confirmed(backoff.allowed());
        }
        backoff.allowed()
    }

    #[test]
    fn random_losses_do_not_hold_a_sender_back_and_full_queues_do() {
        assert_eq!(allowed_with(1), 768);
        assert_eq!(allowed_with(10), 768);
        assert!((100..=130).contains(&allowed_with(50)), "{}", allowed_with(50));
    }
}
