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
//! piece. The gate lets a packet land only where as many are posted as it takes ([`RxQueue::set_slot`](crate::port::RxQueue)): otherwise those behind it would begin
//! in the middle of a slot. What it does not let land takes the one-copy path.
//!
//! In zero-copy mode there is no log: [`zero_copy`] says what takes its place, and [`relocation`] finds by their digests what a loss
//! has shifted.
//!
//! Who owns what: a channel has [`Sessions`] and their [`entries`]; a session is an [`Inbound`], in parts that keep their fields to themselves.
//!
//! | part | knows |
//! |---|---|
//! | [`order::Order`], [`order::Settled`] | which messages are announced, and posted for; which are settled |
//! | [`arriving::Arriving`] | of one message: its slots and their tails, its gaps, what its sender says of its bytes |
//! | [`progress::Progress`], [`progress::Pace`] | which packets have come, what the sender claims; how many may be on the way |
//! | [`places::Places`], [`evidence::Evidence`] | what is held aside, what was counted; digests and manifests |
//! | [`strays::Strays`], [`astray::Astray`] | what landed for no fragment; what speaks against the session's packets landing |
//!
//! Messages that somebody else decides of are [`placed`]'s. What concerns several of them works on a view: [`posting::Poster`], [`care::Care`], [`repair::Watch`], [`relocation`].

mod aims;
mod arriving;
mod astray;
mod card;
mod care;
mod claim;
mod counts;
mod displaced;
mod entries;
mod evidence;
mod held;
mod inbound;
mod open;
mod order;
mod pairing;
mod placed;
mod places;
mod posting;
mod progress;
mod receiving;
mod relocation;
mod repair;
mod run;
mod sessions;
mod showing;
mod strays;
mod terms;
mod violation;
mod zero_copy;
mod zones;

pub(crate) use arriving::{About, GivenUp, Landed, Zone};
pub(crate) use care::Datagram;
pub(crate) use counts::{ArrivalCounters, RepairCounters};
pub(crate) use entries::FOREIGN_LEN_MAX;
pub(crate) use inbound::Inbound;
pub(crate) use progress::Untaken;
pub(crate) use repair::Remedy;
pub(crate) use sessions::Sessions;
pub(crate) use terms::{InboundTerms, Limits, reach};
pub(crate) use violation::Violation;
pub(crate) use zones::{Memory, share_of, sure_len};
