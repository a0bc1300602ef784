//! Which mistake is made: one of `mutants.rs`, or none.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::mutants::MUTANTS;

const NONE: usize = usize::MAX;
static MADE: AtomicUsize = AtomicUsize::new(NONE);
static TURN: Mutex<()> = Mutex::new(());

/// Asked by the code under test. Nothing is ordered by it: it changes only while nobody asks.
pub(crate) fn is_made(number: usize) -> bool {
    MADE.load(Ordering::Relaxed) == number
}

/// Makes a mistake, or none, until it is dropped. One at a time.
pub(crate) struct Made(#[allow(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Made {
    pub(crate) fn new(name: Option<&str>) -> Made {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let number = name.map(|name| {
            (MUTANTS.iter().position(|mutant| mutant.name == name))
                .unwrap_or_else(|| panic!("mutants.rs has no \"{name}\""))
        });
        MADE.store(number.unwrap_or(NONE), Ordering::Relaxed);
        Made(turn)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        MADE.store(NONE, Ordering::Relaxed);
    }
}
