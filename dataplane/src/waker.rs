//! Wakers: who sleeps is woken by another thread, which makes a system call only where somebody sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

/// Wakes a thread that waits until its descriptor is readable. What there is to do lies elsewhere: a queue, a flag.
///
/// Who wakes writes that first, and who sleeps [arms](Waker::arm) the waker first and looks for it then, so that one of the two sees the other.
#[derive(Debug)]
pub struct Waker {
    event: OwnedFd,
    is_armed: AtomicBool,
}

impl Waker {
    /// One that is not armed.
    ///
    /// # Errors
    ///
    /// eventfd(2)'s.
    pub fn new() -> io::Result<Waker> {
        Ok(Waker {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_armed: AtomicBool::new(false),
        })
    }

    /// The next wake-up makes the descriptor readable; those before do not.
    pub fn arm(&self) {
        // It does not block. One that is later than this read wakes once for nothing.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.is_armed.store(true, Ordering::Relaxed);
        // Pairs with that of `wake`: this store before the look at what there is to do, there the work before the look at this.
        fence(Ordering::SeqCst);
    }

    /// Nobody sleeps: wake-ups cost no call.
    pub fn disarm(&self) {
        // Relaxed: a wake-up that is early or late by it costs a call.
        self.is_armed.store(false, Ordering::Relaxed);
    }

    /// There is something to do. From any thread; never waits.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.is_armed.load(Ordering::Relaxed) && self.is_armed.swap(false, Ordering::Relaxed) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

impl AsFd for Waker {
    /// Readable when it was woken while armed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn is_readable(waker: &Waker, timeout_ms: i32) -> bool {
        let mut poll = libc::pollfd {
            fd: waker.as_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one live entry.
        unsafe { libc::poll(&raw mut poll, 1, timeout_ms) == 1 }
    }

    #[test]
    fn only_an_armed_waker_wakes() {
        let waker = Waker::new().unwrap();
        waker.wake();
        assert!(!is_readable(&waker, 0));
        waker.arm();
        assert!(!is_readable(&waker, 0));
        waker.wake();
        waker.wake();
        assert!(is_readable(&waker, 0));
        waker.arm();
        assert!(!is_readable(&waker, 0), "what was before is over");
        waker.disarm();
        waker.wake();
        assert!(!is_readable(&waker, 0));
    }

    /// Each of many tasks is seen, whenever the other thread goes to sleep.
    #[test]
    fn no_wake_up_is_missed() {
        const TASKS: u32 = 20_000;
        let (waker, tasks) = (Arc::new(Waker::new().unwrap()), Arc::new(AtomicU32::new(0)));
        let (waking, of_waking) = (Arc::clone(&waker), Arc::clone(&tasks));
        let other = std::thread::spawn(move || {
            for task in 1..=TASKS {
                of_waking.store(task, Ordering::Release);
                waking.wake();
                if task % 7 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let mut seen = 0;
        while seen < TASKS {
            waker.arm();
            match tasks.load(Ordering::Acquire) {
                now if now > seen => seen = now,
                _ => assert!(is_readable(&waker, 10_000), "asleep behind task {seen}"),
            }
        }
        other.join().unwrap();
    }
}
