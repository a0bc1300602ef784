//! What the gate did with a packet, and how often.

use crate::layout::VERDICT_ROW;

macro_rules! verdicts {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// What became of a packet (`enum lm_verdict`). Each packet that the gate sees counts under exactly one
        /// verdict.
        ///
        /// From [`Verdict::PassOneCopy`] on, the packet went to the kernel's stack and may reach the UDP socket on the
        /// data port: the *one-copy path*.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Verdict {
            $($(#[$doc])* $variant,)*
        }

        impl Verdict {
            /// Every verdict, in the order of its number.
            pub const ALL: &'static [Verdict] = &[$(Verdict::$variant,)*];

            /// Stable name for reports: `gate_` and what happened.
            pub const fn name(self) -> &'static str {
                match self { $(Verdict::$variant => $name,)* }
            }
        }
    };
}

verdicts! {
    /// A fragment of the open session: logged, to the queue's XSK. In zero-copy mode any packet, unread and not logged.
    RedirectLanding = "gate_redirect_landing",
    /// A small LM packet: to the general queue's XSK.
    RedirectGeneral = "gate_redirect_general",
    /// Not IPv4, not UDP, not our address or not our ports.
    PassForeign = "gate_pass_foreign",
    /// To the control port.
    PassControl = "gate_pass_control",
    /// To the data port of a program on another queue, whose log counts it
    /// ([`Log::passed_elsewhere`](crate::Log::passed_elsewhere)).
    PassElsewhere = "gate_pass_elsewhere",
    /// A small LM packet on a queue that is not general, or has no XSK.
    PassOneCopy = "gate_pass_one_copy",
    /// UDP to our address with IPv4 options.
    PassOptions = "gate_pass_options",
    /// An IPv4 fragment that no open `ipfrag` session of this queue claims.
    PassFragment = "gate_pass_fragment",
    /// Lengths that contradict each other, or too short for its headers.
    PassMalformed = "gate_pass_malformed",
    /// Another version of LM.
    PassVersion = "gate_pass_version",
    /// Type 0 or 14 on the data port.
    PassType = "gate_pass_type",
    /// DATA, but no open `lm` session on this queue.
    PassNoSession = "gate_pass_no_session",
    /// DATA with another session's key.
    PassKey = "gate_pass_key",
    /// The right key from or to another address or port.
    PassPeer = "gate_pass_peer",
    /// Header length differs from the session's.
    PassHeader = "gate_pass_header",
    /// Index not below count, or an offset that is not a multiple of the fragment length.
    PassIndex = "gate_pass_index",
    /// Payload or frame length is not what the fragment's place demands.
    PassLength = "gate_pass_length",
    /// Beyond the highest announced message.
    PassLimit = "gate_pass_limit",
    /// Not after the last accepted fragment: duplicate or late.
    PassOrder = "gate_pass_order",
    /// User space has posted no frame for it (I3c).
    PassUnposted = "gate_pass_unposted",
    /// The frames that come next are posted for a packet of another length: where packets take several.
    PassSlot = "gate_pass_slot",
    /// Everything right, but the queue has no XSK.
    PassNoSocket = "gate_pass_no_socket",
}

impl Verdict {
    /// The packet went to an XSK.
    pub const fn is_redirect(self) -> bool {
        matches!(self, Verdict::RedirectLanding | Verdict::RedirectGeneral)
    }

    /// The kernel's data socket may receive the packet.
    pub const fn may_reach_data_socket(self) -> bool {
        self as u32 >= Verdict::PassOneCopy as u32
    }
}

/// A copy of counters at one moment: packets per [`Verdict`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    rows: [u64; VERDICT_ROW],
}

impl Counters {
    /// Packets with this verdict.
    pub fn get(&self, verdict: Verdict) -> u64 {
        self.rows[verdict as usize]
    }

    /// All verdicts with their counts, also the zeros.
    pub fn iter(&self) -> impl Iterator<Item = (Verdict, u64)> + '_ {
        Verdict::ALL.iter().map(|&verdict| (verdict, self.get(verdict)))
    }

    /// Packets that the gate saw.
    pub fn total(&self) -> u64 {
        self.iter()
            .fold(0, |sum: u64, (_, count)| sum.wrapping_add(count))
    }

    /// What was counted since `earlier`, a snapshot of the same counters.
    #[must_use]
    pub fn since(&self, earlier: &Counters) -> Counters {
        let mut rows = self.rows;
        rows.iter_mut()
            .zip(earlier.rows)
            .for_each(|(row, before)| *row = row.wrapping_sub(before));
        Counters { rows }
    }

    /// These and others together.
    #[must_use]
    pub fn plus(&self, other: &Counters) -> Counters {
        let mut sum = *self;
        other.iter().for_each(|(verdict, count)| sum.add(verdict, count));
        sum
    }

    /// Modulo 2^64: a program counts its own queues in memory that it writes.
    pub(crate) fn add(&mut self, verdict: Verdict, count: u64) {
        let row = &mut self.rows[verdict as usize];
        *row = row.wrapping_add(count);
    }
}

const _: () = assert!(Verdict::ALL.len() <= VERDICT_ROW);
