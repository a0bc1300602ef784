//! What a sender says it has sent, and how long it may be before that is taken for lost.

/// A round counts for no more than this part of the time that is to pass.
const ATTENDED_PART: u64 = 4;

/// What a sender says it has sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    /// Packets of the session.
    pub(super) sent: u64,
    /// When it said so.
    pub(super) since_ns: u64,
    /// When what came was looked at last.
    looked_ns: u64,
    /// For so long nothing has come although it was looked for.
    attended_ns: u64,
}

impl Claim {
    pub(super) fn new(sent: u64, now_ns: u64) -> Claim {
        Claim {
            sent,
            since_ns: now_ns,
            looked_ns: now_ns,
            attended_ns: 0,
        }
    }

    /// What came until `now_ns` was looked at, and the last packet came at `progress_ns`. Whether nothing has come for `grace_ns`.
    ///
    /// Time in which nobody looked counts little: an application that comes back after a while finds what came meanwhile only
    /// then, and the kernel may have more of it than one round brings.
    pub(super) fn outlasts(&mut self, grace_ns: u64, progress_ns: u64, now_ns: u64) -> bool {
        if progress_ns > self.looked_ns {
            (self.looked_ns, self.attended_ns) = (progress_ns, 0);
        }
        let pause_ns = now_ns.saturating_sub(self.looked_ns);
        self.attended_ns += pause_ns.min(grace_ns / ATTENDED_PART);
        self.looked_ns = self.looked_ns.max(now_ns);
        self.attended_ns >= grace_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE_NS: u64 = 200_000;

    /// When a claim of time 0 is believed that is looked at every `every_ns`, with a packet at `progress_ns`.
    fn believed_ns(every_ns: u64, progress_ns: u64) -> u64 {
        let mut claim = Claim::new(7, 0);
        (1..)
            .map(|round| round * every_ns)
            .find(|&now_ns| {
                let came_ns = if now_ns < progress_ns { 0 } else { progress_ns };
                claim.outlasts(GRACE_NS, came_ns, now_ns)
            })
            .unwrap()
    }

    #[test]
    fn who_looks_all_the_time_believes_it_after_the_grace() {
        assert_eq!(believed_ns(1_000, 0), GRACE_NS);
        assert_eq!(believed_ns(50_000, 0), GRACE_NS);
    }

    #[test]
    fn a_packet_begins_it_anew() {
        assert_eq!(believed_ns(1_000, 150_000), 150_000 + GRACE_NS);
        assert_eq!(believed_ns(1_000, GRACE_NS), 2 * GRACE_NS);
    }

    #[test]
    fn who_was_away_looks_some_times_more() {
        assert_eq!(believed_ns(1_000_000, 0), 4_000_000);
        let mut claim = Claim::new(7, 0);
        let looks = [5_000_000, 5_002_000, 5_150_000, 5_151_000, 5_250_000];
        let believed = looks.map(|now_ns| claim.outlasts(GRACE_NS, 0, now_ns));
        assert_eq!(believed, [false; 5]);
        assert!(claim.outlasts(GRACE_NS, 0, 5_300_000));
    }

    /// What waits in a socket is looked at later than the rest.
    #[test]
    fn a_look_from_before_counts_for_nothing() {
        let mut claim = Claim::new(7, 1_000_000);
        assert!(!claim.outlasts(GRACE_NS, 0, 0));
        assert!(!claim.outlasts(GRACE_NS, 0, 1_040_000));
        assert!(
            (1_050_000..)
                .step_by(10_000)
                .take(15)
                .all(|now_ns| !claim.outlasts(GRACE_NS, 0, now_ns))
        );
        assert!(claim.outlasts(GRACE_NS, 0, 1_200_000));
    }
}
