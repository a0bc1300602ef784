//! The kernel's traffic on an interface follows a smoother: it gets what that leaves after LM's own packets.
//!
//! A thread of its own does it: a change at the kernel may wait for others who configure interfaces, and whoever sends must not.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use lm_protocol::smoother::Departures;
use lm_protocol::time::Time;

use super::{Foreign, Shaping, ShapingError, Traffic};
use crate::interface::{Interface, InterfaceError};

/// Preamble, check sequence and gap of a frame on the wire.
const WIRE_OVERHEAD_BYTES: f64 = 24.0;
/// The least rate: a host stays reachable. 64 kbit/s.
const LEAST_BYTES_PER_SECOND: u64 = 8000;
/// A rate that differs by less than one part of so many is not told.
const CHANGE_PART: u64 = 50;
/// Refreshes of which LM's departures and the kernel's packets are the mean.
const LOOKS: usize = 4;

/// A smoother as it is followed.
pub trait Followed: Send + Sync + 'static {
    /// What time it is for it.
    fn now(&self) -> Time;

    /// Makes the refresh that is due. `kernel`: how many packets a second it sends meanwhile, and whether more would leave; `None`: it is not
    /// held back. Gives λ, in packets a second, and when the next refresh is.
    fn refreshed(&self, kernel: Option<(u32, bool)>) -> (u32, Time);

    /// What LM has sent.
    fn departures(&self) -> Departures;
}

/// A thread that lets time pass for a smoother, and has the kernel's traffic follow it. Dropping it restores the interface.
#[derive(Debug)]
pub struct Follower {
    thread: Option<JoinHandle<()>>,
    told: Arc<Told>,
}

#[derive(Debug, Default)]
struct Told {
    ends: AtomicBool,
    traffic: Mutex<Option<Traffic>>,
}

impl Told {
    fn tell(&self, traffic: Option<Traffic>) {
        // A panic elsewhere is that thread's failure; a number is a number.
        *self.traffic.lock().unwrap_or_else(PoisonError::into_inner) = traffic;
    }
}

impl Follower {
    /// Has the kernel's traffic on an interface of the calling thread's network namespace follow a smoother.
    ///
    /// # Errors
    /// What stands against it, in one line, with the remedy.
    pub fn start(interface: &str, foreign: Foreign, followed: Arc<dyn Followed>) -> Result<Follower, String> {
        let kernel = Kernel::shape(interface, foreign, &*followed)?;
        Follower::spawn(interface, Some(kernel), followed)
    }

    /// Lets time pass for a smoother, where the kernel's traffic does not follow it.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn alone(interface: &str, followed: Arc<dyn Followed>) -> Result<Follower, String> {
        Follower::spawn(interface, None, followed)
    }

    fn spawn(
        interface: &str,
        kernel: Option<Kernel>,
        followed: Arc<dyn Followed>,
    ) -> Result<Follower, String> {
        let told = Arc::new(Told::default());
        told.tell(kernel.as_ref().map(|_| Traffic::default()));
        let (interface, of_thread) = (interface.to_owned(), Arc::clone(&told));
        let follow = move || {
            be_ordinary();
            follow(&interface, &*followed, kernel, &of_thread);
        };
        let thread = thread::Builder::new().name("lm-smoother".into()).spawn(follow);
        Ok(Follower {
            thread: Some(thread.map_err(|error| format!("no thread: {error}"))?),
            told,
        })
    }

    /// What of the kernel's traffic has left, and what waits, at the last refresh; `None`: it is not held back.
    pub fn traffic(&self) -> Option<Traffic> {
        *self.told.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rate has changed.
    pub fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // Release: nothing is ordered by it but the end itself.
        self.told.ends.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // Its panic was told where it happened.
            let _ = thread.join();
        }
    }
}

/// The kernel's traffic, while it is shaped.
struct Kernel {
    shaping: Shaping,
    share: Share,
    rate: u64,
}

impl Kernel {
    fn shape(interface: &str, foreign: Foreign, followed: &dyn Followed) -> Result<Kernel, String> {
        let shaped = Interface::by_name(interface).map_err(|error: InterfaceError| error.to_string())?;
        let share = Share::new(shaped.mtu);
        let rate = share.bytes_per_second(followed.refreshed(None).0);
        let shaping = Shaping::apply(&shaped, rate, foreign).map_err(|error| error.to_string())?;
        Ok(Kernel { shaping, share, rate })
    }

    /// A look at what it sends, and the rate that it gets; when the next look is due.
    fn follow(&mut self, followed: &dyn Followed, refresh: Time, told: &Told) -> Result<Time, ShapingError> {
        let (now, traffic) = (followed.now(), self.shaping.traffic()?);
        told.tell(Some(traffic));
        if now >= refresh {
            self.share.look(Look::new(now, followed.departures(), traffic));
        }
        let kernel = (self.share.packets_per_second(), traffic.waiting > 0);
        let (credits_per_second, next) = followed.refreshed(Some(kernel));
        let wanted = self.share.bytes_per_second(credits_per_second);
        if wanted.abs_diff(self.rate) * CHANGE_PART >= self.rate {
            self.shaping.set_rate(wanted)?;
            self.rate = wanted;
        }
        Ok(next)
    }
}

/// The policy of who started the thread may be a real-time one, and in its calls the kernel sees to others' packets, for milliseconds.
#[expect(unsafe_code, reason = "a thread's policy")]
fn be_ordinary() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameters are live, and 0 is this thread. To be of the ordinary class again takes no privilege.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters) };
}

/// Until it shall end. Dropping the kernel's shaping restores the interface.
fn follow(interface: &str, followed: &dyn Followed, mut kernel: Option<Kernel>, told: &Told) {
    let mut refresh = followed.now();
    // Acquire: as in `drop`.
    while !told.ends.load(Ordering::Acquire) {
        refresh = match &mut kernel {
            None => followed.refreshed(None).1,
            Some(shaped) => shaped.follow(followed, refresh, told).unwrap_or_else(|error| {
                tracing::warn!(
                    interface,
                    "the kernel's traffic follows the smoother no more: {error}"
                );
                kernel = None;
                told.tell(None);
                refresh
            }),
        };
        thread::park_timeout(refresh.since(followed.now()));
    }
    drop(kernel);
    // All of the credits are LM's again.
    followed.refreshed(None);
}

/// What had left up to a moment.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: Time,
    lm: Departures,
    /// Packets of the kernel, and their bytes.
    packets: u32,
    bytes: u64,
}

impl Look {
    fn new(at: Time, lm: Departures, traffic: Traffic) -> Look {
        Look {
            at,
            lm,
            packets: traffic.packets,
            bytes: traffic.bytes,
        }
    }
}

/// The kernel's share of the credits: what LM leaves, and half of what real time leaves, if LM's others would take more than that.
#[derive(Debug)]
struct Share {
    looks: VecDeque<Look>,
    /// Mean length of the kernel's frames; of the longest before there are some.
    frame_len: f64,
}

impl Share {
    fn new(mtu: u32) -> Share {
        Share {
            looks: VecDeque::with_capacity(LOOKS + 2),
            frame_len: f64::from(mtu) + 14.0,
        }
    }

    fn look(&mut self, look: Look) {
        self.looks.push_back(look);
        if self.looks.len() > LOOKS + 1 {
            self.looks.pop_front();
        }
        let first = self.looks[0];
        let packets = look.packets.wrapping_sub(first.packets);
        if packets > 0 {
            self.frame_len = look.bytes.saturating_sub(first.bytes) as f64 / f64::from(packets);
        }
    }

    /// First and last look, and the seconds between them.
    fn span(&self) -> Option<(&Look, &Look, f64)> {
        let (first, last) = (self.looks.front()?, self.looks.back()?);
        let seconds = last.at.since(first.at).as_secs_f64();
        (seconds > 0.0).then_some((first, last, seconds))
    }

    /// What the kernel sends.
    fn packets_per_second(&self) -> u32 {
        let packets = |(first, last, seconds): (&Look, &Look, f64)| {
            f64::from(last.packets.wrapping_sub(first.packets)) / seconds
        };
        self.span().map_or(0.0, packets) as u32
    }

    /// What the kernel may send of so many credits a second.
    fn bytes_per_second(&self, credits_per_second: u32) -> u64 {
        let (first, others, others_wait) = self.span().map_or((0.0, 0.0, false), |(from, to, seconds)| {
            // Modulo 2^64, and programs may write what is less than it was.
            let grown = |to: u64, from: u64| (to.wrapping_sub(from) as i64).max(0) as f64 / seconds;
            let first = grown(to.lm.first, from.lm.first);
            let others = grown(to.lm.others, from.lm.others);
            (first, others, to.lm.others_wait)
        });
        let for_others = f64::from(credits_per_second) - first;
        let mut left = for_others - others;
        if others_wait {
            left = left.max(for_others / 2.0);
        }
        ((left * (self.frame_len + WIRE_OVERHEAD_BYTES)) as u64).max(LEAST_BYTES_PER_SECOND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(millis: u64, first: u64, packets: u32, bytes: u64) -> Look {
        let traffic = Traffic {
            packets,
            bytes,
            ..Traffic::default()
        };
        let lm = Departures {
            first,
            ..Departures::default()
        };
        Look::new(Time::from_millis(millis), lm, traffic)
    }

    #[test]
    fn the_kernel_gets_what_lm_leaves_in_frames_of_its_own_length() {
        let mut share = Share::new(1500);
        // Frames of full length, before anything is known: 4000 of 1538 bytes.
        assert_eq!(share.bytes_per_second(4000), 6_152_000);
        assert_eq!(share.packets_per_second(), 0);
        // 400 a second of LM, and 100 frames of 126 bytes, 150 with what the wire adds.
        for step in 0..9 {
            share.look(look(
                10 * step,
                4 * step,
                u32::MAX.wrapping_add(step as u32),
                126 * step,
            ));
        }
        assert_eq!(share.bytes_per_second(4000), 3600 * 150);
        assert_eq!(share.packets_per_second(), 100);
        // LM has become more: after four refreshes nothing else is known.
        for step in 9..13 {
            share.look(look(10 * step, 32 + 30 * (step - 8), step as u32 - 1, 126 * step));
        }
        assert_eq!(share.bytes_per_second(4000), 1000 * 150);
        // LM has it all: the host stays reachable.
        assert_eq!(share.bytes_per_second(3000), LEAST_BYTES_PER_SECOND);
        assert_eq!(share.bytes_per_second(10), LEAST_BYTES_PER_SECOND);
        // Nothing of the kernel's left: its frames stay as long as they were.
        for step in 13..18 {
            share.look(look(10 * step, 152 + 30 * (step - 12), 12, 1638));
        }
        assert_eq!(share.bytes_per_second(4000), 1000 * 150);
    }

    /// 400 real-time packets a second, and so many others of LM.
    fn share_beside(others: u64, others_wait: bool) -> u64 {
        let mut share = Share::new(1500);
        for step in 0..5 {
            let mut look = look(10 * step, 4 * step, 0, 0);
            (look.lm.others, look.lm.others_wait) = (others * step / 100, others_wait);
            share.look(look);
        }
        share.bytes_per_second(4000) / 1538
    }

    #[test]
    fn lms_others_and_the_kernel_have_half_each_or_what_the_other_does_not_want() {
        assert_eq!(share_beside(3600, true), 1800);
        assert_eq!(share_beside(3600, false), 5);
        assert_eq!(share_beside(600, true), 3000);
        assert_eq!(share_beside(600, false), 3000);
        assert_eq!(share_beside(0, false), 3600);
    }
}
