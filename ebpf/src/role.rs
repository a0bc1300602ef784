//! What each queue is for.

/// What a receive queue is for (`enum lm_role`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum Role {
    /// Not ours: every packet passes.
    #[default]
    None,
    /// Small LM packets are redirected to the queue's XSK.
    General,
    /// Fragments of its open sessions are redirected to the queue's XSK and logged.
    Landing,
    /// Everything is redirected to the queue's XSK, unread and without a log: the device has written the packets before
    /// the gate runs, perhaps over each other's headers (zero-copy mode). The queue must carry nothing but its session.
    LandingZeroCopy,
    /// As [`Role::General`], but no more packets are redirected than [`Log::set_posted`](crate::Log::set_posted)
    /// allows: the others pass, and the driver uses their frames again. Some drivers must never lack frames (zero-copy
    /// mode).
    GeneralZeroCopy,
}

impl Role {
    /// Whether sessions land on such a queue.
    pub const fn lands(self) -> bool {
        matches!(self, Role::Landing | Role::LandingZeroCopy)
    }
}
