//! What a socket has done.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::histogram::Histogram;

/// How long things took at a socket, in nanoseconds, and how many messages were lost in a row.
#[derive(Debug, Default)]
pub struct Histograms {
    /// From sending to arrival, of messages whose sender has our clock.
    pub latency: Histogram,
    /// By how much the way of a message took longer or less long than that of its flow's message before.
    pub jitter: Histogram,
    /// How much longer a message took than the fastest of its flow in the last ten seconds.
    pub delay: Histogram,
    /// Messages, not time: lost in a row.
    pub lost: Histogram,
    /// How far behind its deadline a message came.
    pub late: Histogram,
    /// The time between two messages that had a period or more between them without one.
    pub missed: Histogram,
    /// How long a message had waited when it gave way to a newer one before it left.
    pub superseded: Histogram,
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) times: Histograms,
    pub(crate) sent: AtomicU64,
    pub(crate) unsent: AtomicU64,
    pub(crate) late_unsent: AtomicU64,
    pub(crate) superseded: AtomicU64,
    pub(crate) whole: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) late: AtomicU64,
    pub(crate) missed: AtomicU64,
    pub(crate) overtaken: AtomicU64,
    pub(crate) no_block: AtomicU64,
    pub(crate) beyond_rate: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) superseded_here: AtomicU64,
}

/// What a socket has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Messages that left.
    pub sent: u64,
    /// Messages whose deadline passed before they left.
    pub late_unsent: u64,
    /// Messages that gave way to newer ones before they left.
    pub superseded: u64,
    /// Packets that left and were more than the socket declared: of any second's, so many are none.
    pub beyond_rate: u64,
    /// Of the messages that left, how many came, and how many did not, as far as their receiver said. Sums of 32 bits, which wrap.
    pub reported_whole: u32,
    /// As `reported_whole`.
    pub reported_lost: u32,
    /// Reports that the receiver has no such socket: one in 5 ms at most, while messages leave for it.
    pub reported_refused: u32,
    /// Messages that came.
    pub whole: u64,
    /// Messages that did not come, by the gaps in their numbers.
    pub lost: u64,
    /// Messages that came behind their deadline.
    pub late: u64,
    /// Periods that passed without a message.
    pub missed: u64,
    /// Packets that came twice, or behind a newer message.
    pub overtaken: u64,
    /// Packets of messages for which there was no block or frame: longer than the socket's longest, or the application kept all of them.
    pub no_block: u64,
    /// Bytes of messages of several packets, which were copied once each.
    pub copied_bytes: u64,
    /// Messages that came and gave way to newer ones before they were received here.
    pub superseded_here: u64,
    /// Packets for no socket here, that no socket understands, or that do not show what their sender proved: of the whole endpoint.
    pub refused_packets: u64,
    /// Reports that cannot be true, or of no flow: of the whole endpoint.
    pub refused_reports: u64,
    /// Flows that come and are known now: of the whole endpoint.
    pub flows: u64,
    /// Looks at one of these because a report of it was due, or it was silent: of the whole endpoint.
    pub flow_looks: u64,
}

impl Counts {
    /// What is counted at a socket; of its flow and of its endpoint nothing.
    pub(crate) fn read(&self) -> Statistics {
        // Relaxed: each number is right for itself.
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Statistics {
            sent: of(&self.sent),
            late_unsent: of(&self.late_unsent),
            superseded: of(&self.superseded),
            beyond_rate: of(&self.beyond_rate),
            whole: of(&self.whole),
            lost: of(&self.lost),
            late: of(&self.late),
            missed: of(&self.missed),
            overtaken: of(&self.overtaken),
            no_block: of(&self.no_block),
            copied_bytes: of(&self.copied_bytes),
            superseded_here: of(&self.superseded_here),
            ..Statistics::default()
        }
    }
}
