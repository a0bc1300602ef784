//! What landing counts.

/// What happened, since it was last looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RepairCounters {
    /// Fragments that landed in another's slot.
    pub(crate) displaced: u64,
    /// Fragments that had arrived before.
    pub(crate) duplicate: u64,
    /// Fragments of messages that are settled.
    pub(crate) stale: u64,
    /// Fragments that contradict their message's announcement.
    pub(crate) implausible: u64,
    /// Fragments for which no memory was free.
    pub(crate) no_room: u64,
    /// Fragments of messages that were given up.
    pub(crate) given_up: u64,
    /// Fragments of messages that were shown.
    pub(crate) delivered: u64,
    /// Fragments taken from datagrams.
    pub(crate) datagrams: u64,
    /// Fragments asked for.
    pub(crate) requested: u64,
    /// Payload bytes copied.
    pub(crate) copied_bytes: u64,
    /// Messages copied out of their zone.
    pub(crate) copied_out: u64,
    /// Fragments whose digest is another than their sender's.
    pub(crate) corrupt: u64,
    /// Messages whose manifest contradicts their announcement.
    pub(crate) contradictory: u64,
    /// Requests for manifests.
    pub(crate) manifests: u64,
    /// Messages that came unannounced.
    pub(crate) ahead: u64,
    /// Of these, the ones whose fragments were copied, since they did not find their slots in one piece.
    pub(crate) ahead_copied: u64,
    /// Packets without a payload behind these.
    pub(crate) fillers: u64,
}

impl RepairCounters {
    /// Whether anything happened.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        *self != RepairCounters::default()
    }
}

/// What was done about fragments that landed, whatever became of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Edges {
    /// Bytes of windows' tails that were put back.
    pub(crate) restored_bytes: u64,
    /// Fragments taken from spare frames, because their places cross a page's end.
    pub(crate) page_ends: u64,
}

/// What became of packets, whatever session they were of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArrivalCounters {
    /// Fragments that landed.
    pub(crate) landed: u64,
    /// Of these, the ones of messages or sessions that are settled.
    pub(crate) stale: u64,
    /// Fragments that the gate accepted and that could not be believed, or kept.
    pub(crate) discarded: u64,
    /// Times that there was no memory for open entries.
    pub(crate) open_refused: u64,
}

impl ArrivalCounters {
    /// Whether anything happened.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        *self != ArrivalCounters::default()
    }
}
