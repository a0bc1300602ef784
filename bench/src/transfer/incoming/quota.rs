//! What may come in all.

use crate::output::OutputError;
use crate::size::{ByteSize, approximate};
use crate::transfer::wire::Refusal;

/// How many bytes may come in all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quota {
    pub(super) max: u64,
    pub(super) taken: u64,
}

impl Quota {
    /// What was counted does not count any more.
    pub(super) fn give_back(&mut self, bytes: u64) {
        self.taken = self.taken.saturating_sub(bytes);
    }

    /// Whether `len` bytes more may come.
    pub(super) fn check(&self, len: u64) -> Result<(), OutputError> {
        let left = self.max - self.taken;
        if len <= left {
            return Ok(());
        }
        let text = format!(
            "{} of the {} that the receiver takes in all are left; send less, or start it with a larger --max-bytes",
            approximate(left),
            ByteSize::new(self.max)
        );
        Err(OutputError::new(Refusal::DiskFull, text))
    }
}
