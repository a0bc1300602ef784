//! Why the kernel's traffic is not shaped.

use std::io;

use super::link::NEEDS_MODULE;
use crate::ethtool::EthtoolError;
use crate::journal::JournalError;

/// Why the kernel's traffic on an interface is not shaped; one line each, with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShapingError {
    /// The kernel has no HTB, or no u32 filters.
    #[error(
        "the kernel has no HTB, or no u32 filters; load them (modprobe -a sch_htb cls_u32), or take a kernel with \
         NET_SCH_HTB and NET_CLS_U32"
    )]
    NoHtb,
    /// The root qdisc was set by somebody.
    #[error(
        "{interface} has a root qdisc that somebody set ({kind} {major:x}:), which is left alone; take it away \
         (tc qdisc del dev {interface} root){}",
        match .is_restorable {
            true => ", or have it replaced meanwhile (Foreign::Replace, lm-admissiond --replace-qdisc)",
            false => ": it has classes, which could not be restored",
        }
    )]
    Foreign {
        /// Name of the interface.
        interface: String,
        /// The qdisc's kind.
        kind: String,
        /// The major number of its handle.
        major: u16,
        /// Whether it could be restored, so that it may be replaced.
        is_restorable: bool,
    },
    /// What was changed before, and is to be undone.
    #[error(transparent)]
    Journal(JournalError),
    /// The interface.
    #[error(transparent)]
    Device(EthtoolError),
}

impl From<EthtoolError> for ShapingError {
    fn from(error: EthtoolError) -> ShapingError {
        match error {
            EthtoolError::System { what, source }
                if source.kind() == io::ErrorKind::NotFound && NEEDS_MODULE.contains(&what) =>
            {
                ShapingError::NoHtb
            }
            error => ShapingError::Device(error),
        }
    }
}

impl From<JournalError> for ShapingError {
    fn from(error: JournalError) -> ShapingError {
        match error {
            JournalError::Device(error) => error.into(),
            error => ShapingError::Journal(error),
        }
    }
}
