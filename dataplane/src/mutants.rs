//! Mistakes in the engine's rules, one of which at a time a test puts in: the soak has to find each
//! ([`crate::sim_tests`]`::soak`). Where a rule stands it asks `mutant!(Name)`, which is `false` in everything but tests.

/// Whether a mistake is put in.
#[cfg(not(test))]
macro_rules! mutant {
    ($name:ident) => {
        false
    };
}

/// Whether a mistake is put in.
#[cfg(test)]
macro_rules! mutant {
    ($name:ident) => {
        crate::mutants::PUT_IN.get() == Some(crate::mutants::Mutant::$name)
    };
}

pub(crate) use mutant;

/// A mistake.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// I1: a zone is free although entries posted in it are unused.
    ZoneFreedEarly,
    /// I5: a window's lowest entry does not wait for the tail that its header goes over.
    LowestUnheld,
    /// I5: a tail is not put back.
    TailLost,
    /// Zero-copy mode: a message is shown whatever its digest.
    Unproved,
    /// A message's memory is its application's again while the device may read it.
    SentMemoryFreed,
    /// A small message that comes again is taken again.
    TakenTwice,
    /// A message that comes unannounced claims entries that are not in one piece.
    ClaimedAcross,
    /// The lowest fragment of such a message travels first.
    SentForward,
    /// Zero-copy mode: such a message is shown although the device may write there, and nothing follows it.
    NoFillers,
    /// Facts are believed whatever their hash.
    FactsUnhashed,
    /// Zero-copy mode: there is credit for packets that the device has no entry for.
    CreditUnposted,
}

#[cfg(test)]
impl Mutant {
    /// All that any traffic shows.
    pub(crate) const ALL: [Mutant; 6] = [
        Mutant::ZoneFreedEarly,
        Mutant::LowestUnheld,
        Mutant::TailLost,
        Mutant::Unproved,
        Mutant::SentMemoryFreed,
        Mutant::TakenTwice,
    ];
}

#[cfg(test)]
thread_local! {
    /// The one that is put in on this thread.
    pub(crate) static PUT_IN: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
}
