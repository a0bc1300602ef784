//! Counters: what an endpoint did, and why packets were dropped. Every drop moves exactly one named counter.

use crate::landing::{ArrivalCounters, RepairCounters, Violation};

macro_rules! drops {
    ($($(#[$meta:meta])* $name:ident),* $(,)?) => {
        /// Packets that an endpoint received and did not use, by reason.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Drops {
            $($(#[$meta])* pub $name: u64,)*
        }

        impl Drops {
            /// Name and count of every reason, in a fixed order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

drops! {
    /// Not a packet of ours, or its fields contradict each other.
    malformed,
    /// A packet of another version of LM.
    other_version,
    /// A packet whose digest is not that of its bytes, or that says that it has none while its sender says that all have one.
    corrupt,
    /// A fragment, or of unreliable messages all of them, whose bytes were not those that its sender's digest is of.
    fragment_corrupt,
    /// A manifest that contradicts what its sender said of the message before: the message was given up.
    manifest_contradictory,
    /// A well-formed packet that nothing waits for (another incarnation's, or of a kind that has no business here).
    unexpected,
    /// A packet for a session of ours with another key, or from another address.
    wrong_key,
    /// A packet for a session or a request that ended a while ago.
    late,
    /// An answer of the admission protocol that nothing waits for, or a request where no sessions are granted.
    control_unexpected,
    /// A request for a session that was refused. It was answered.
    request_refused,
    /// A credit, an acknowledgement, a request for fragments or the end of a session that no honest peer sends.
    implausible,
    /// A small message or a request from an address that may not send here.
    not_allowed,
    /// An eager message that had arrived before.
    eager_duplicate,
    /// An eager message before which another is missing.
    eager_out_of_order,
    /// An eager message that came when what its messages may hold of the general frames was held: others are reserved. It comes again.
    eager_no_frame,
    /// An announcement, or a word how much was sent, before which an announcement is missing: that was lost, or is late, and comes again.
    announcement_early,
    /// An announcement that no sender makes who keeps to what was granted.
    announcement_refused,
    /// A fragment of no session of ours that the gate did not accept.
    fragment_passed,
    /// A fragment that had arrived before.
    fragment_duplicate,
    /// A fragment of a message that is settled.
    fragment_stale,
    /// A fragment that contradicts its message's announcement.
    fragment_implausible,
    /// A fragment for which no memory was free; it was asked for again.
    fragment_no_room,
    /// A fragment of a message that was given up, because others of it never came.
    fragment_given_up,
    /// A fragment that the gate accepted and nobody looked at: something was wrong before it, or the channel was built anew.
    landing_discarded,
    /// The table of peers is full of peers that are owed something.
    peer_table_full,
    /// The sender's Ethernet address is not known yet.
    no_neighbour,
    /// A descriptor that names no frame which was posted, or more than that frame.
    foreign_frame,
    /// A completion of a packet that was not sent, or had been completed before. It counts as none.
    foreign_completion,
}

/// Violations of the pairing invariant (I3), by kind. In copy mode each one ended the sessions; in zero-copy mode, where digests
/// prove what arrived, the landing channel was built anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Violations {
    counts: [u64; Violation::ALL.len()],
}

impl Violations {
    pub(crate) fn count(&mut self, violation: Violation) {
        self.counts[violation as usize] += 1;
    }

    /// Name and count of every kind.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.counts;
        Violation::ALL
            .iter()
            .map(move |&violation| (violation.as_str(), counts[violation as usize]))
    }

    /// All kinds together.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// What an endpoint has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Messages that were confirmed, or, to a host without LM, sent.
    pub messages_sent: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Messages that ended otherwise.
    pub messages_failed: u64,
    /// Messages given to the application.
    pub messages_received: u64,
    /// Their bytes.
    pub bytes_received: u64,
    /// Messages reported as incomplete.
    pub messages_incomplete: u64,
    /// Messages given up because nothing came for too long.
    pub messages_stalled: u64,
    /// Payload bytes that this library copied: `send_copy`, and fragments that were lost or shifted by a loss, repeated apart, or lay at a page's end; and what a port
    /// that moves packets in this program copied ([`Port::copied`](crate::port::Port::copied)).
    pub user_copied_bytes: u64,
    /// Bytes put back at window edges (invariant I5).
    pub restored_bytes: u64,
    /// Packets handed over to the device, of all kinds, and how often it was woken for some.
    pub packets_sent: u64,
    /// See `packets_sent`.
    pub wakeups: u64,
    /// Fragments sent.
    pub data_packets_sent: u64,
    /// Fragments landed.
    pub landing_packets: u64,
    /// Fragments that are in messages which were shown to the application.
    pub fragments_delivered: u64,
    /// Payload bytes that are missing of messages which were delivered without them.
    pub missing_bytes: u64,
    /// Fragments that landed in the slot of another, because of a loss.
    pub fragments_displaced: u64,
    /// Fragments that came into frames of their own, or left from them, and were copied, because their places cross the end of a 2 MiB
    /// page or the driver has to be given whole laps of entries ([`crate::port::Caps::lap`]): zero-copy mode.
    pub page_end_fragments: u64,
    /// Fragments asked for again; each request counts.
    pub fragments_requested: u64,
    /// Fragments sent again on request.
    pub fragments_resent: u64,
    /// Manifests of messages asked for, because what came was not what their digests are of; each request counts.
    pub manifests_requested: u64,
    /// Packets with digests of fragments sent on request.
    pub manifest_packets_sent: u64,
    /// Eager messages sent again.
    pub eager_resent: u64,
    /// Fragments that came by the one-copy path, and were of use.
    pub fragments_one_copy: u64,
    /// Messages that were copied out of their landing zone, since packets were lost that were to use it up.
    pub messages_copied_out: u64,
    /// Messages that came unannounced.
    pub messages_ahead: u64,
    /// Those of them whose fragments were copied: a region of slots ended, or a packet was lost before them.
    pub messages_ahead_copied: u64,
    /// Times that there was no memory for such messages beside what the longest one needs: they were announced.
    pub open_refused: u64,
    /// Packets received on the general channel, dropped ones included.
    pub general_packets: u64,
    /// Packets that came through the kernel's data socket, dropped ones included.
    pub one_copy_packets: u64,
    /// Datagrams that came to the control port, dropped ones included.
    pub control_packets: u64,
    /// Zero-copy mode: packets of others, to the data or the control port, that came to the landing queue and were taken from there. They
    /// are `landing_packets` as well.
    pub landing_heard: u64,
    /// Packets other than fragments that were of use.
    pub packets_used: u64,
    /// Small messages and requests from addresses that are not known: their senders are challenged, and repeat them.
    pub challenged: u64,
    /// Credit packets sent.
    pub credits_sent: u64,
    /// Times that no general frame was free for a datagram of the kernel's socket.
    pub frames_exhausted: u64,
    /// Control datagrams that could not be sent.
    pub control_send_errors: u64,
    /// Completions that the application did not fetch in time.
    pub completions_discarded: u64,
    /// Messages of many fragments that came to their end while their session had no place.
    pub messages_one_copy: u64,
    /// How often a class of packets had nothing leave for 10 ms because a class before it took all that the port may send.
    pub classes_starved: u64,
    /// Messages of which a receiver had not heard when it ended their session, and which were handed over again to the one that followed.
    pub messages_again: u64,
    /// Sessions of ours that their receiver ended, mostly because others waited for the place: each was asked for again.
    pub sessions_lost: u64,
    /// Sessions granted to senders.
    pub sessions_granted: u64,
    /// Those of them that began without a place.
    pub sessions_one_copy: u64,
    /// Times that a session without a place got one.
    pub sessions_landed: u64,
    /// Sessions of senders that ended.
    pub sessions_ended: u64,
    /// Sessions that were to land and go on by the one-copy path, because their fragments never reached the landing queue.
    pub sessions_astray: u64,
    /// Times that a session gave its place to another one that waited for it.
    pub sessions_set_aside: u64,
    /// Times that the landing channel was lost, since its socket could not be replaced: sessions go on by the one-copy path, and it is tried
    /// again.
    pub landing_lost: u64,
    /// Times that landing memory was made longer.
    pub landing_grown: u64,
    /// Times that the landing channel was built anew while its sessions went on: after losses that left entries unused, for another
    /// sender's longer messages while nothing was under way, and in zero-copy mode after a violation.
    pub landing_rebuilt: u64,
    /// Regions of a [`ZoneSource`](crate::ZoneSource) that were too short for their message, beyond what the device can reach or another
    /// endpoint's: the message landed in the arena.
    pub regions_unfit: u64,
    /// Messages whose [`Incoming`](crate::Incoming) was dropped while they arrived: they are received all the same.
    pub incoming_dropped: u64,
    /// Violations of the pairing invariant.
    pub violations: Violations,
    /// Packets dropped, by reason.
    pub drops: Drops,
}

impl Counters {
    /// Adds what landed.
    pub(crate) fn arrivals(&mut self, arrivals: ArrivalCounters) {
        self.landing_packets += arrivals.landed;
        self.drops.fragment_stale += arrivals.stale;
        self.drops.landing_discarded += arrivals.discarded;
        self.open_refused += arrivals.open_refused;
    }

    /// Adds what a landing session did about losses.
    pub(crate) fn repair(&mut self, repair: RepairCounters) {
        self.fragments_displaced += repair.displaced;
        self.fragments_requested += repair.requested;
        self.fragments_one_copy += repair.datagrams;
        self.messages_copied_out += repair.copied_out;
        self.user_copied_bytes += repair.copied_bytes;
        self.drops.fragment_duplicate += repair.duplicate;
        self.drops.fragment_stale += repair.stale;
        self.drops.fragment_implausible += repair.implausible;
        self.drops.fragment_no_room += repair.no_room;
        self.drops.fragment_given_up += repair.given_up;
        self.drops.fragment_corrupt += repair.corrupt;
        self.drops.manifest_contradictory += repair.contradictory;
        self.manifests_requested += repair.manifests;
        self.messages_ahead += repair.ahead;
        self.messages_ahead_copied += repair.ahead_copied;
        self.packets_used += repair.fillers;
    }

    /// Everything that went wrong, by name: drops and violations.
    pub fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.drops.iter().chain(self.violations.iter())
    }
}
