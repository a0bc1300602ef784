//! The credits of an interface's smoother, in memory that the daemon and its programs have mapped.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use lm_protocol::smoother::Credits;

use crate::shared::SharedMemory;

/// Credits in a map. It may be cloned: all are one page.
#[derive(Clone, Debug)]
pub struct CreditPage {
    memory: Arc<SharedMemory>,
}

impl CreditPage {
    /// Maps credits that the gate's owner handed over.
    ///
    /// # Errors
    /// The descriptor is of no such map, or cannot be mapped.
    pub fn of_map(map: BorrowedFd<'_>) -> io::Result<CreditPage> {
        let memory = SharedMemory::of_map(map, size_of::<Credits>())?;
        Ok(CreditPage {
            memory: Arc::new(memory),
        })
    }
}

impl AsRef<Credits> for CreditPage {
    #[inline]
    fn as_ref(&self) -> &Credits {
        self.memory.credits()
    }
}
