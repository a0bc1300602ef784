//! The one clock of a daemon: CLOCK_MONOTONIC, which the gate reads too (`bpf_ktime_get_ns`).

use lm_protocol::time::Time;
use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since the machine started, without the time that it slept.
pub(crate) fn now() -> Time {
    let now = clock_gettime(ClockId::Monotonic);
    Time::from_nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}
