//! What a transfer costs: processor time of this process, its system calls, busy time of the machine, and what is left of the core.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::sys;

/// How long the idle core is looked at.
const CALIBRATION: Duration = Duration::from_millis(300);
/// Turns of the spare loop between two looks at the clock: some 20 µs.
const TURNS: u64 = 10_000;

/// Processor time while the time counted, in seconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Cost {
    /// Of this process.
    pub process_s: f64,
    /// Of all cores of this machine, but for what has a nice value.
    pub machine_s: f64,
    /// What a loop of the lowest priority got of this core, as a part of what it gets when the core is idle.
    pub spare: Option<f64>,
    /// System calls of the thread that did the work, where they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_calls: Option<u64>,
}

/// What a meter looks at besides.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Metered {
    /// What is left of this core, by a loop of the lowest priority; the core must be idle when the meter is made.
    pub(crate) spare: bool,
    /// System calls, by the number of the tracepoint that each passes; the kernel takes a longer way for each of them then.
    pub(crate) system_calls: Option<u64>,
}

/// Measures from its making on, in the thread that made it.
pub(crate) struct Meter {
    spare: Option<Spare>,
    system_calls: Option<File>,
    begun: Option<Reading>,
}

#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    process_s: f64,
    machine_s: f64,
    turns: u64,
    system_calls: Option<u64>,
}

impl Meter {
    pub(crate) fn new(metered: Metered) -> io::Result<Meter> {
        Ok(Meter {
            spare: metered.spare.then(Spare::start).transpose()?,
            system_calls: metered.system_calls.map(count_system_calls).transpose()?,
            begun: None,
        })
    }

    fn read(&self) -> Reading {
        let process = clock_gettime(ClockId::ProcessCPUTime);
        let process_s = process.tv_sec as f64 + process.tv_nsec as f64 / 1e9;
        let (turns, loop_s) = self.spare.as_ref().map_or((0, 0.0), Spare::read);
        Reading {
            at: Instant::now(),
            process_s: process_s - loop_s,
            machine_s: machine_busy_s().unwrap_or(0.0),
            turns,
            system_calls: None,
        }
    }

    /// So far, this reading among them.
    fn system_calls(&self) -> Option<u64> {
        let mut count = [0; 8];
        let mut counter = self.system_calls.as_ref()?;
        counter.read_exact(&mut count).ok()?;
        Some(u64::from_ne_bytes(count))
    }

    /// From here on it counts.
    pub(crate) fn begin(&mut self) {
        let mut begun = self.read();
        // After what the other figures take, and before it at the end.
        begun.system_calls = self.system_calls();
        self.begun = Some(begun);
    }

    /// What it came to.
    pub(crate) fn end(&self) -> Cost {
        let Some(begun) = self.begun else {
            return Cost::default();
        };
        let system_calls = self.system_calls();
        let now = self.read();
        let seconds = (now.at - begun.at).as_secs_f64();
        Cost {
            process_s: (now.process_s - begun.process_s).max(0.0),
            machine_s: now.machine_s - begun.machine_s,
            spare: self
                .spare
                .as_ref()
                .map(|spare| (now.turns - begun.turns) as f64 / seconds / spare.idle_turns_per_s),
            system_calls: system_calls
                .zip(begun.system_calls)
                .map(|(now, begun)| now - begun - 1),
        }
    }
}

/// The counter of this thread's system calls.
fn count_system_calls(tracepoint: u64) -> io::Result<File> {
    sys::count_passes(tracepoint).map_err(|error| {
        let what = format!(
            "cannot count passes of tracepoint {tracepoint}: {error}; name that of raw_syscalls/sys_enter, as root"
        );
        io::Error::new(error.kind(), what)
    })
}

/// Busy seconds of all cores since the machine started, from the first line of `/proc/stat` (proc_stat(5)): user, system, irq and
/// softirq, without what has a nice value: that is the spare loop.
fn machine_busy_s() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    busy_ticks(&text).map(|ticks| ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn busy_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (user, _nice, system, _idle, _iowait, irq, softirq) =
        (next()?, next()?, next()?, next()?, next()?, next()?, next()?);
    Some(user + system + irq + softirq)
}

/// The paper's *looper* (LM §4): a loop that nobody waits for.
struct Spare {
    shared: Arc<Shared>,
    idle_turns_per_s: f64,
}

#[derive(Default)]
struct Shared {
    turns: AtomicU64,
    /// Processor time of the loop itself.
    busy_ns: AtomicU64,
    stop: AtomicBool,
}

impl Spare {
    fn start() -> io::Result<Spare> {
        let shared = Arc::new(Shared::default());
        let (sender, started) = std::sync::mpsc::channel();
        let its = Arc::clone(&shared);
        thread::spawn(move || {
            let idle = sys::become_idle();
            let failed = idle.is_err();
            if sender.send(idle).is_ok() && !failed {
                run(&its);
            }
        });
        started
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("the spare loop did not start")))?;
        let (before, begun) = (shared.turns.load(Ordering::Relaxed), Instant::now());
        thread::sleep(CALIBRATION);
        let turns = shared.turns.load(Ordering::Relaxed) - before;
        if turns == 0 {
            return Err(io::Error::other(
                "the core is never idle; leave it alone, or choose another with --core",
            ));
        }
        Ok(Spare {
            shared,
            idle_turns_per_s: turns as f64 / begun.elapsed().as_secs_f64(),
        })
    }

    /// Turns so far, and the seconds they took.
    fn read(&self) -> (u64, f64) {
        // Relaxed: two lone numbers, each a little old; nothing is published with them.
        let busy = self.shared.busy_ns.load(Ordering::Relaxed);
        (self.shared.turns.load(Ordering::Relaxed), busy as f64 / 1e9)
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn run(shared: &Shared) {
    while !shared.stop.load(Ordering::Relaxed) {
        for turn in 0..TURNS {
            std::hint::black_box(turn);
        }
        shared.turns.fetch_add(TURNS, Ordering::Relaxed);
        let busy = clock_gettime(ClockId::ThreadCPUTime);
        let busy_ns = busy.tv_sec as u64 * 1_000_000_000 + busy.tv_nsec as u64;
        shared.busy_ns.store(busy_ns, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_everything_but_nice_and_idle() {
        assert_eq!(
            busy_ticks("cpu  1 20 300 4000 50000 600000 7000000 8 9 10\ncpu0 1\n"),
            Some(7_600_301)
        );
        assert_eq!(busy_ticks("intr 1"), None);
        assert!(machine_busy_s().is_some_and(|seconds| seconds > 0.0));
    }

    #[test]
    fn work_costs() {
        let mut meter = Meter::new(Metered::default()).unwrap();
        meter.begin();
        let before = meter.begun.unwrap().process_s;
        while meter.read().process_s < before + 0.05 {
            std::hint::spin_loop();
        }
        let cost = meter.end();
        assert!(
            cost.process_s >= 0.05 && cost.spare.is_none() && cost.system_calls.is_none(),
            "{cost:?}"
        );
    }

    #[test]
    fn system_calls_are_counted_one_by_one() {
        let id = std::fs::read_to_string("/sys/kernel/tracing/events/raw_syscalls/sys_enter/id");
        let Ok(id) = id else {
            println!("NOT IN THIS KERNEL: the tracepoint of system calls");
            return;
        };
        let mut meter = Meter::new(Metered {
            system_calls: Some(id.trim().parse().unwrap()),
            ..Metered::default()
        })
        .unwrap();
        for calls in [0, 3] {
            meter.begin();
            for _ in 0..calls {
                let _time = clock_gettime(ClockId::ProcessCPUTime);
            }
            assert_eq!(meter.end().system_calls, Some(calls));
        }
    }
}
