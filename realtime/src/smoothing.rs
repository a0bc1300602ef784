//! The smoother of an endpoint's interface: its own, or the one that programs behind the admission daemon share.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lm_cards::{Followed, Follower, Foreign};
use lm_dataplane::{Class, Shaper, SharedSmoother, Signal, Waker};
use lm_protocol::smoother::{Credits, Departures, Smoother};
use lm_protocol::time::Time;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::socket::{locked, monotonic};

/// How long after it went the daemon is looked for again.
const PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};

/// A moment that credits name may be wrong, where other programs write it: they are asked again after this time at the latest.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// What holds an interface's other packets back.
#[derive(Debug)]
pub(crate) struct Smoothing {
    source: Source,
    /// What time it was for the endpoint, and when.
    begun: (Time, Instant),
    /// How far the credits' time is ahead of the endpoint's.
    ahead: Duration,
    kernel: Mutex<Kernel>,
}

/// Where credits come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// Nothing does.
    Nothing,
    Own(Mutex<Smoother>),
    Daemons(Lease),
}

/// What is asked of the kernel's traffic, and who sees to it.
#[derive(Debug, Default)]
struct Kernel {
    wanted: Option<(String, Foreign)>,
    running: Weak<Follower>,
    has_warned: bool,
}

impl Smoothing {
    /// Of an endpoint whose time is `now`.
    pub(crate) fn new(source: Source, now: Time) -> Smoothing {
        Smoothing {
            // All programs that share credits have the host's clock.
            ahead: match source {
                Source::Daemons(_) => monotonic().since(now),
                Source::Nothing | Source::Own(_) => Duration::ZERO,
            },
            source,
            begun: (now, Instant::now()),
            kernel: Mutex::default(),
        }
    }

    pub(crate) fn is_there(&self) -> bool {
        !matches!(self.source, Source::Nothing)
    }

    /// The credits do something at a moment of the endpoint's.
    fn with<R>(&self, now: Time, ask: impl FnOnce(&Credits, Time) -> R) -> Option<R> {
        match &self.source {
            Source::Nothing => None,
            Source::Own(smoother) => {
                let mut smoother = locked(smoother);
                smoother.advance(now);
                Some(ask(smoother.credits(), now))
            }
            Source::Daemons(lease) => Some(lease.with(|credits| ask(credits, now + self.ahead))),
        }
    }

    pub(crate) fn credits_per_second(&self) -> Option<u32> {
        self.with(Time::ZERO, |credits, _| credits.rate().credits_per_second())
    }

    /// So many packets a second are a socket's until what this gives is dropped; or how many are left.
    pub(crate) fn declare(self: &Arc<Self>, rate: Option<NonZeroU32>) -> Result<Option<Declared>, u64> {
        let Some(rate) = rate else { return Ok(None) };
        self.with(Time::ZERO, |credits, _| credits.declare(rate.get()))
            .unwrap_or(Ok(()))?;
        Ok(Some(Declared(Arc::clone(self), rate)))
    }

    /// Packets of full length that the link takes in 100 µs, where its rate is known.
    pub(crate) fn port_bound(&self) -> Option<u32> {
        let frames_per_second = self.with(Time::ZERO, |credits, _| credits.link_frames_per_second())??;
        Some(frames_per_second.get() / 10_000)
    }

    /// Real-time packets, or messages' packets, were lost, or were on their way for so much longer than others.
    pub(crate) fn tell(&self, lost: u32, delay: Duration, now: Time) {
        match &self.source {
            Source::Nothing => {}
            Source::Own(smoother) => {
                let mut smoother = locked(smoother);
                let before = smoother.rate();
                if lost > 0 {
                    smoother.lost(lost, now);
                }
                smoother.delayed(delay, now);
                if smoother.rate() != before {
                    tracing::debug!(
                        packets_per_second = smoother.rate().credits_per_second(),
                        signals = smoother.signals(),
                        "a loss or a delay lowers the smoother's rate"
                    );
                    if let Some(follower) = locked(&self.kernel).running.upgrade() {
                        follower.wake();
                    }
                }
            }
            Source::Daemons(lease) => lease.with(|credits| {
                if lost > 0 {
                    credits.tell_lost(lost);
                }
                credits.tell_delayed(delay);
            }),
        }
    }

    /// The kernel's traffic is to follow an own smoother. A daemon has its own do so.
    pub(crate) fn hold_kernel(&self, interface: &str, foreign: Foreign) {
        if let Source::Own(_) = self.source {
            locked(&self.kernel).wanted = Some((interface.to_owned(), foreign));
        }
    }

    pub(crate) fn follower(&self) -> Option<Arc<Follower>> {
        locked(&self.kernel).running.upgrade()
    }

    /// Whether the kernel's traffic follows the smoother, own or the daemon's.
    pub(crate) fn holds_kernel(&self) -> bool {
        match &self.source {
            Source::Daemons(lease) => lease.with(Credits::holds_kernel),
            Source::Nothing | Source::Own(_) => self.follower().is_some_and(|own| own.traffic().is_some()),
        }
    }

    /// The follower that a socket keeps alive, if one is wanted.
    pub(crate) fn follow(self: &Arc<Self>) -> Option<Arc<Follower>> {
        let mut kernel = locked(&self.kernel);
        let (interface, foreign) = kernel.wanted.clone()?;
        if let Some(running) = kernel.running.upgrade() {
            return Some(running);
        }
        let followed = Arc::clone(self) as Arc<dyn Followed>;
        let follower = match Follower::start(&interface, foreign, followed) {
            Ok(follower) => Arc::new(follower),
            Err(what) => {
                if !std::mem::replace(&mut kernel.has_warned, true) {
                    tracing::warn!(
                        interface,
                        "the smoother holds LM's own packets back, and not the kernel's: {what}"
                    );
                }
                return None;
            }
        };
        kernel.running = Arc::downgrade(&follower);
        Some(follower)
    }
}

/// A socket's declared rate.
#[derive(Debug)]
pub(crate) struct Declared(Arc<Smoothing>, NonZeroU32);

impl Drop for Declared {
    fn drop(&mut self) {
        (self.0).with(Time::ZERO, |credits, _| credits.undeclare(self.1.get()));
    }
}

impl Followed for Smoothing {
    fn now(&self) -> Time {
        self.begun.0 + self.begun.1.elapsed()
    }

    fn refreshed(&self, kernel: Option<(u32, bool)>) -> (u32, Time) {
        let Source::Own(smoother) = &self.source else {
            // A daemon's has its own follower.
            return (0, Time::MAX);
        };
        let (kernels_per_second, they_wait) = kernel.unwrap_or_default();
        let mut smoother = locked(smoother);
        if they_wait {
            smoother.credits().others_wait();
        }
        smoother.set_elsewhere(kernels_per_second, self.now());
        (smoother.rate().credits_per_second(), smoother.next_refresh())
    }

    fn departures(&self) -> Departures {
        let departures = self.with(self.now(), |credits, _| credits.departures());
        departures.unwrap_or_default()
    }
}

/// Asks the smoother for all that leaves the port and is neither real-time nor control.
#[derive(Debug)]
pub(crate) struct Smoothed {
    pub(crate) smoothing: Arc<Smoothing>,
    /// When it was asked last.
    pub(crate) asked: Time,
}

impl Shaper for Smoothed {
    fn take(&mut self, class: Class, packets: u32, now: Time) -> u32 {
        self.asked = now;
        let taken = self.smoothing.with(now, |credits, now| match class {
            Class::Control | Class::RealTime => {
                credits.spend(packets, now);
                packets
            }
            Class::Small | Class::Bulk => credits.take(packets, now),
        });
        taken.unwrap_or(packets)
    }

    fn signal(&mut self, signal: Signal) {
        match signal {
            Signal::Left {
                class,
                allowed,
                packets,
                ..
            } => {
                self.smoothing.with(self.asked, |credits, now| {
                    match (allowed.checked_sub(packets), class) {
                        (Some(unused), Class::Control | Class::RealTime) => credits.unspend(unused),
                        (Some(unused), _) => credits.give_back(unused),
                        // Control packets were not asked for.
                        (None, _) => credits.spend(packets - allowed, now),
                    }
                });
            }
            // Those of messages: their receivers asked for them again.
            Signal::Lost { packets, .. } => self.smoothing.tell(packets, Duration::ZERO, self.asked),
            _ => {}
        }
    }

    fn next(&self, class: Class) -> Option<Time> {
        match class {
            Class::Control | Class::RealTime => None,
            _ => {
                let next = self.smoothing.with(self.asked, |credits, _| credits.next())??;
                let ahead = self.smoothing.ahead;
                let next = Time::ZERO + next.since(Time::ZERO + ahead);
                Some(next.min(self.asked + ASK_AGAIN))
            }
        }
    }
}

/// The daemon's smoother, for as long as this is there: where the daemon goes, its credits go on, and a thread asks the next one.
#[derive(Debug)]
pub(crate) struct Lease {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    smoother: RwLock<Arc<SharedSmoother>>,
    ends: AtomicBool,
    waker: Waker,
}

impl Lease {
    /// # Errors
    /// Why there is no smoother, in one line.
    pub(crate) fn ask(daemon: &Path, interface: &str) -> Result<Lease, String> {
        let smoother = SharedSmoother::ask(daemon, interface).map_err(|error| error.to_string())?;
        let smoother = Arc::new(smoother);
        let shared = Arc::new(Shared {
            smoother: RwLock::new(Arc::clone(&smoother)),
            ends: AtomicBool::new(false),
            waker: Waker::new().map_err(|error| error.to_string())?,
        });
        let (of_thread, daemon, interface) = (Arc::clone(&shared), daemon.to_owned(), interface.to_owned());
        let thread = thread::Builder::new()
            .name("lm-smoother".into())
            .spawn(move || of_thread.renew(smoother, &daemon, &interface))
            .map_err(|error| error.to_string())?;
        Ok(Lease {
            shared,
            thread: Some(thread),
        })
    }

    fn with<R>(&self, ask: impl FnOnce(&Credits) -> R) -> R {
        let smoother = self
            .shared
            .smoother
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        ask((**smoother).as_ref())
    }
}

impl Shared {
    /// Until it ends: has a smoother, and when the daemon is gone asks the next one for it.
    fn renew(&self, smoother: Arc<SharedSmoother>, daemon: &Path, interface: &str) {
        let mut held = Some(smoother);
        let mut told = String::new();
        self.waker.arm();
        // Acquire: as in `drop`.
        while !self.ends.load(Ordering::Acquire) {
            let mut wait = vec![PollFd::new(&self.waker, PollFlags::IN)];
            wait.extend(
                { &held }
                    .iter()
                    .map(|smoother| PollFd::new(&**smoother, PollFlags::IN)),
            );
            // A signal ends it as well.
            let _ = rustix::event::poll(&mut wait, held.is_none().then_some(&PAUSE));
            let is_gone = wait.get(1).is_some_and(|daemon| !daemon.revents().is_empty());
            if is_gone {
                tracing::warn!(
                    interface,
                    "the admission daemon is gone; its smoother goes on at the last rate"
                );
                held = None;
            } else if held.is_none() {
                match SharedSmoother::ask(daemon, interface) {
                    Ok(smoother) => {
                        let smoother = held.insert(Arc::new(smoother));
                        *self.smoother.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(smoother);
                    }
                    Err(error) => {
                        let what = error.to_string();
                        if what != told {
                            tracing::warn!(interface, "no smoother yet: {what}");
                            told = what;
                        }
                    }
                }
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Release: nothing is ordered by it but the end itself.
        self.shared.ends.store(true, Ordering::Release);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.take() {
            // Its panic was told where it happened.
            let _ = thread.join();
        }
    }
}
