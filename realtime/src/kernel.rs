//! The kernel's traffic on the endpoint's interface: it gets what the smoother leaves after LM's own packets.
//!
//! A thread of its own follows the smoother: a change at the kernel may wait for others who configure interfaces, and the endpoint must not.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle, Thread};

use lm_cards::{Foreign, Interface, InterfaceError, Shaping, ShapingError, Traffic};
use lm_protocol::time::Time;

use crate::socket::{Hub, locked};

/// Preamble, check sequence and gap of a frame on the wire.
const WIRE_OVERHEAD_BYTES: f64 = 24.0;
/// The least rate: a host stays reachable. 64 kbit/s.
const LEAST_BYTES_PER_SECOND: u64 = 8000;
/// A rate that differs by less than one part of so many is not told.
const CHANGE_PART: u64 = 50;
/// Refreshes of which LM's departures and the kernel's packets are the mean.
const LOOKS: usize = 4;

/// Why the kernel's traffic does not follow the smoother.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FollowError {
    #[error("{0}")]
    Interface(#[from] InterfaceError),
    #[error("{0}")]
    Shaping(#[from] ShapingError),
    #[error("no thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// What is asked of the kernel's traffic, and who sees to it.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    wanted: Option<(String, Foreign)>,
    running: Weak<Follower>,
    /// To be woken when the rate has changed.
    thread: Option<Thread>,
    has_warned: bool,
}

impl Kernel {
    pub(crate) fn want(&mut self, interface: &str, foreign: Foreign) {
        self.wanted = Some((interface.to_owned(), foreign));
    }

    pub(crate) fn running(&self) -> Option<Arc<Follower>> {
        self.running.upgrade()
    }

    /// The rate has changed.
    pub(crate) fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }

    /// The follower that a socket keeps alive, if one is wanted and can be had. What stands against it is said once.
    pub(crate) fn follow(&mut self, hub: &Arc<Hub>) -> Option<Arc<Follower>> {
        let (interface, foreign) = self.wanted.clone()?;
        if let Some(running) = self.running() {
            return Some(running);
        }
        match Follower::start(&interface, foreign, hub) {
            Ok(follower) => {
                let follower = Arc::new(follower);
                self.thread = follower.thread.as_ref().map(|thread| thread.thread().clone());
                self.running = Arc::downgrade(&follower);
                Some(follower)
            }
            Err(error) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    unsmoothed(&interface, &error);
                }
                None
            }
        }
    }
}

fn unsmoothed(interface: &str, error: &dyn std::error::Error) {
    tracing::warn!(
        interface,
        "the smoother holds LM's own packets back, and not the kernel's: {error}"
    );
}

/// A thread that follows the smoother until the last socket is closed. Dropping it restores the interface.
#[derive(Debug)]
pub(crate) struct Follower {
    thread: Option<JoinHandle<()>>,
    told: Arc<Told>,
}

#[derive(Debug, Default)]
struct Told {
    ends: AtomicBool,
    traffic: Mutex<Traffic>,
}

impl Follower {
    fn start(interface: &str, foreign: Foreign, hub: &Arc<Hub>) -> Result<Follower, FollowError> {
        let shaped = Interface::by_name(interface)?;
        let share = Share::new(shaped.mtu);
        let rate = share.bytes_per_second(hub.credits_per_second().unwrap_or(0));
        let shaping = Shaping::apply(&shaped, rate, foreign)?;
        let told = Arc::new(Told::default());
        let (interface, hub, of_thread) = (interface.to_owned(), Arc::clone(hub), Arc::clone(&told));
        let follow = move || {
            if let Err(error) = follow(&hub, shaping, (share, rate), &of_thread) {
                unsmoothed(&interface, &error);
            }
            // All of the credits are LM's again.
            hub.refreshed(hub.now(), 0, false);
        };
        let thread = thread::Builder::new().name("lm-smoother".into()).spawn(follow)?;
        Ok(Follower {
            thread: Some(thread),
            told,
        })
    }

    pub(crate) fn traffic(&self) -> Traffic {
        *locked(&self.told.traffic)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // Release: nothing is ordered by it but the end itself.
        self.told.ends.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Its panic was told where it happened.
            let _ = thread.join();
        }
    }
}

/// Until it shall end, or the interface is gone. Dropping the shaping restores the interface.
fn follow(
    hub: &Hub,
    mut shaping: Shaping,
    (mut share, mut rate): (Share, u64),
    told: &Told,
) -> Result<(), ShapingError> {
    let mut refresh = hub.now();
    // Acquire: as in `drop`.
    while !told.ends.load(Ordering::Acquire) {
        let now = hub.now();
        let traffic = shaping.traffic()?;
        *locked(&told.traffic) = traffic;
        if now >= refresh {
            share.look(Look::new(now, hub.departures(), traffic));
        }
        let (credits_per_second, next) = hub.refreshed(now, share.packets_per_second(), traffic.waiting > 0);
        refresh = next;
        let wanted = share.bytes_per_second(credits_per_second);
        if wanted.abs_diff(rate) * CHANGE_PART >= rate {
            shaping.set_rate(wanted)?;
            rate = wanted;
        }
        thread::park_timeout(refresh.since(hub.now()));
    }
    Ok(())
}

/// Packets of LM that left, and whether more would have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Departures {
    /// Real-time and control packets.
    pub(crate) first: u64,
    pub(crate) others: u64,
    /// Others did not get the credits that they asked for.
    pub(crate) others_wait: bool,
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
            self.frame_len = (look.bytes - first.bytes) as f64 / f64::from(packets);
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
            let first = (to.lm.first - from.lm.first) as f64 / seconds;
            let others = (to.lm.others - from.lm.others) as f64 / seconds;
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
