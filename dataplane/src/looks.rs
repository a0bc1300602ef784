//! When a round looks beyond the rings: at the kernel's sockets, and at what time alone brings.

use crate::bounds::GENERAL_FRAMES_FOR_SOCKET;

/// Poll the count of passed packets every so many rounds: it lies in many cache lines.
const COUNT_EVERY_ROUNDS: u32 = 64;
/// Or, where rounds are long, every so many nanoseconds: a request for a session waits for it.
const COUNT_EVERY_NS: u64 = 100_000;
/// Control datagrams taken in one round.
pub(crate) const CONTROL_PER_LOOK: usize = 64;
/// Datagrams taken from the kernel's data socket in one round.
pub(crate) const DATAGRAMS_PER_LOOK: usize = GENERAL_FRAMES_FOR_SOCKET as usize;
/// Read the sockets when the count has moved, and at least this often.
const SOCKETS_EVERY_NS: u64 = 1_000_000;
/// At least this often beside flows, so long after the count has moved: a read may run other programs' work of the
/// kernel's, and a flow waits for that.
const SOCKETS_SELDOM_NS: u64 = 16 * SOCKETS_EVERY_NS;
/// Rounds that are further apart than this were delayed by the application.
const PAUSE_NS: u64 = 100_000_000;
/// Timers need no more precision than this.
const TIMERS_EVERY_NS: u64 = 1_000_000;
/// A request for a [probe](crate::probe) that had no effect is repeated after this time.
const PROBE_EVERY_NS: u64 = 50_000_000;

#[derive(Debug, Default)]
pub(crate) struct Looks {
    round: u32,
    /// Packets that had been passed on at the last look.
    passed: u64,
    moved_ns: u64,
    counted_ns: u64,
    /// When the sockets were last read; 0: more waits there.
    sockets_ns: u64,
    timers_ns: u64,
    probes_ns: u64,
    /// The clock argument of the round that is running.
    now_ns: u64,
    /// The round before came late.
    is_late: bool,
}

impl Looks {
    /// A round begins. Whether the application did not poll for a while: said of the first of several long rounds.
    #[inline]
    pub(crate) fn begin(&mut self, now_ns: u64) -> bool {
        let since_ns = now_ns.saturating_sub(self.now_ns);
        self.now_ns = now_ns;
        let was_late = std::mem::replace(&mut self.is_late, since_ns >= PAUSE_NS);
        let pauses = self.is_late && !was_late;
        if pauses {
            self.timers_ns = now_ns;
        }
        pauses
    }

    /// The clock argument of the round that is running.
    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Whether to look at the count of passed packets: in each round where something `waits` for a datagram.
    #[inline]
    pub(crate) fn wants_count(&mut self, waits: bool, now_ns: u64) -> bool {
        self.round = self.round.wrapping_add(1);
        let is_due = self.round.is_multiple_of(COUNT_EVERY_ROUNDS)
            || now_ns.saturating_sub(self.counted_ns) >= COUNT_EVERY_NS;
        let wants = waits || self.sockets_ns == 0 || is_due;
        if wants {
            self.counted_ns = now_ns;
        }
        wants
    }

    /// Whether to read the sockets, now that the count is known; `seldom`, while it stands still.
    #[inline]
    pub(crate) fn wants_sockets(&mut self, passed: u64, seldom: bool, now_ns: u64) -> bool {
        if passed != self.passed {
            self.moved_ns = now_ns;
        }
        // It moves before the packet is in the socket.
        let stands = seldom && now_ns.saturating_sub(self.moved_ns) >= SOCKETS_SELDOM_NS;
        let every_ns = if stands {
            SOCKETS_SELDOM_NS
        } else {
            SOCKETS_EVERY_NS
        };
        if passed == self.passed && now_ns.saturating_sub(self.sockets_ns) < every_ns {
            return false;
        }
        (self.passed, self.sockets_ns) = (passed, now_ns);
        true
    }

    /// The sockets may hold more than was read, and the count does not move for that again.
    pub(crate) fn more_waits(&mut self) {
        self.sockets_ns = 0;
    }

    /// Whether timers are due.
    #[inline]
    pub(crate) fn wants_timers(&mut self, now_ns: u64) -> bool {
        let wants = now_ns.saturating_sub(self.timers_ns) >= TIMERS_EVERY_NS;
        if wants {
            self.timers_ns = now_ns;
        }
        wants
    }

    /// Whether probes may be asked for again.
    pub(crate) fn wants_probes(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.probes_ns) >= PROBE_EVERY_NS
    }

    /// A probe was asked for.
    pub(crate) fn asked_for_probe(&mut self, now_ns: u64) {
        self.probes_ns = now_ns;
    }

    /// Has the next round look at the sockets.
    #[cfg(test)]
    pub(crate) fn hurry(&mut self) {
        self.round = u32::MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beside_flows_sockets_are_read_seldom_where_the_count_stands() {
        let mut looks = Looks::default();
        let mut reads = |seldom, passed, from_ms: u64| {
            let eighths = from_ms * 8..(from_ms + 32) * 8;
            let read = |eighth: &u64| looks.wants_sockets(passed, seldom, eighth * SOCKETS_EVERY_NS / 8);
            eighths.filter(read).count()
        };
        assert_eq!(reads(false, 0, 100), 32);
        assert_eq!(reads(true, 0, 200), 2);
        // At once, and as without flows for a while.
        assert_eq!(reads(true, 1, 300), 17);
    }
}
