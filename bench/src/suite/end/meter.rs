//! What a transfer costs: processor time of this process, busy time of the machine, and LM's own work.

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Processor time while the time counted, in seconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cost {
    /// Of this process.
    pub process_s: f64,
    /// Of all cores of this machine, but for what has a nice value.
    pub machine_s: f64,
    /// What LM counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
}

/// What LM's endpoint counts of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Work {
    /// How often a device was woken.
    pub wakeups: u64,
    /// Payload bytes that user space copied.
    pub copied_bytes: u64,
}

/// Measures from [`Meter::begin`] on.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    begun: Option<Cost>,
}

impl Meter {
    /// From here on it counts; `work` is what LM has counted so far.
    pub(crate) fn begin(&mut self, work: Option<Work>) {
        self.begun = Some(read(work));
    }

    /// What it came to.
    pub(crate) fn end(&self, work: Option<Work>) -> Cost {
        let Some(begun) = self.begun else {
            return Cost::default();
        };
        let now = read(work);
        Cost {
            process_s: (now.process_s - begun.process_s).max(0.0),
            machine_s: now.machine_s - begun.machine_s,
            work: now.work.zip(begun.work).map(|(now, begun)| Work {
                wakeups: now.wakeups - begun.wakeups,
                copied_bytes: now.copied_bytes - begun.copied_bytes,
            }),
        }
    }
}

/// Everything so far.
fn read(work: Option<Work>) -> Cost {
    let process = clock_gettime(ClockId::ProcessCPUTime);
    Cost {
        process_s: process.tv_sec as f64 + process.tv_nsec as f64 / 1e9,
        machine_s: machine_busy_s().unwrap_or(0.0),
        work,
    }
}

/// Busy seconds of all cores since the machine started, from the first line of `/proc/stat` (proc_stat(5)): user, system, irq and
/// softirq, without what has a nice value.
fn machine_busy_s() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    busy_ticks(&text).map(|ticks| ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn busy_ticks(stat: &str) -> Option<u64> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let fields: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
    let [user, _nice, system, _idle, _iowait, irq, softirq, ..] = fields[..] else {
        return None;
    };
    Some(user + system + irq + softirq)
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
        let work = |wakeups| {
            Some(Work {
                wakeups,
                copied_bytes: 3 * wakeups,
            })
        };
        let mut meter = Meter::default();
        assert_eq!(meter.end(work(1)).work, None);
        meter.begin(work(5));
        let before = read(None).process_s;
        while read(None).process_s < before + 0.05 {
            std::hint::spin_loop();
        }
        let cost = meter.end(work(7));
        assert!(cost.process_s >= 0.05 && cost.work == work(2), "{cost:?}");
        assert_eq!(meter.end(None).work, None);
    }
}
