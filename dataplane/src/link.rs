//! The link, as the kernel tells of it when it is asked to send.
//!
//! An interface that is down (`ENETDOWN`) is a state and no error while patience lasts: its AF_XDP sockets stay bound, what is on
//! their rings stays there, and the gate stays attached (`xsk_notifier` of net/xdp/xsk.c acts on `NETDEV_UNREGISTER` alone).
//! An interface that is gone takes all of that along, and is an error at once.

use crate::port::WakeError;

#[derive(Debug, Default)]
pub(crate) struct Link {
    /// The kernel said so since the last look. What it did not take is tried again in every round, so it says so again.
    is_down: bool,
    down_since_ns: Option<u64>,
    /// When the kernel was last asked whether the interface is still there.
    pub(crate) looked_ns: u64,
    error: Option<WakeError>,
}

impl Link {
    /// A wake-up failed.
    #[cold]
    pub(crate) fn failed(&mut self, error: WakeError) {
        match error {
            WakeError::Down => self.is_down = true,
            error => self.error = Some(error),
        }
    }

    /// Looks at what was said since the last time.
    pub(crate) fn look(&mut self, now_ns: u64, patience_ns: u64) {
        if !std::mem::take(&mut self.is_down) {
            self.down_since_ns = None;
            return;
        }
        let since_ns = *self.down_since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) > patience_ns {
            self.error = Some(WakeError::Down);
        }
    }

    pub(crate) fn take_error(&mut self) -> Option<WakeError> {
        self.error.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn down_is_an_error_when_patience_ends_and_gone_is_one_at_once() {
        let mut link = Link::default();
        link.look(0, 100);
        for now_ns in [1, 50, 101] {
            link.failed(WakeError::Down);
            link.look(now_ns, 100);
            assert!(link.take_error().is_none());
        }
        // Up again, and down anew: patience begins anew.
        link.look(102, 100);
        for (now_ns, is_error) in [(150, false), (250, false), (251, true)] {
            link.failed(WakeError::Down);
            link.look(now_ns, 100);
            assert_eq!(matches!(link.take_error(), Some(WakeError::Down)), is_error);
        }
        link.failed(WakeError::Gone);
        assert!(matches!(link.take_error(), Some(WakeError::Gone)));
    }
}
