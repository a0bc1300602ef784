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
    /// What was counted.
    #[serde(default, skip_serializing_if = "Counts::is_empty")]
    pub counts: Counts,
}

/// What the kernel did meanwhile, where it was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// System calls of the thread that did the work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_calls: Option<u64>,
    /// Those of its calls that are to wake an AF_XDP socket's driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wakeups: Option<u64>,
    /// Writes to a device that tell it of descriptors, on this core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doorbells: Option<u64>,
    /// Bytes that the kernel copied on this core, and payload that the program did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_bytes: Option<u64>,
}

impl Counts {
    fn is_empty(&self) -> bool {
        *self == Counts::default()
    }
}

/// What is counted beside time: tracepoints of the kernel, by number. What is measured takes longer then, as the kernel takes a longer way
/// through each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
pub struct Counted {
    /// Count system calls, too, by the kernel's tracepoint of this number (both hosts have the same kernel): in the file id of raw_syscalls/sys_enter in
    /// tracefs. What is measured takes longer for it, as the kernel takes a longer way for each
    #[arg(long = "count-system-calls", value_name = "NUMBER")]
    #[serde(default)]
    system_calls: Option<u64>,
    /// Count wake-ups of AF_XDP sockets as well: tracepoints that this program passes in each, separated by commas
    #[arg(long = "count-wakeups", value_name = "NUMBERS", value_delimiter = ',')]
    #[serde(default)]
    wakeups: Vec<u64>,
    /// Count doorbells as well: tracepoints that the driver passes on this program's core with each, separated by commas. One that is passed without as
    /// well has a filter of the kernel's behind it, without spaces: 1234:packets>0
    #[arg(long = "count-doorbells", value_name = "NUMBERS", value_delimiter = ',', value_parser = passes)]
    #[serde(default)]
    doorbells: Vec<Passes>,
    /// Count copied bytes as well: tracepoints that the kernel passes on this program's core with each copy, separated by commas, with filters as doorbells
    /// have them; their field `len` says how many bytes it has
    #[arg(long = "count-copies", value_name = "NUMBERS", value_delimiter = ',', value_parser = passes)]
    #[serde(default)]
    copies: Vec<Passes>,
}

/// Of a length, which is positive.
const LEN_BITS: u32 = 31;

/// A tracepoint's number, and which of its passes count.
type Passes = (u64, Option<String>);

fn passes(text: &str) -> Result<Passes, String> {
    let (number, filter) = match text.split_once(':') {
        Some((number, filter)) => (number, Some(filter.to_owned())),
        None => (text, None),
    };
    let number = number.parse().map_err(|_| format!("{number} is no number"))?;
    Ok((number, filter))
}

impl Counted {
    /// Arguments of a program that counts the same.
    pub(crate) fn words(&self) -> String {
        let numbers = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let filtered = |all: &[Passes]| {
            let word = |(number, filter): &Passes| match filter {
                Some(filter) => format!("{number}:{filter}"),
                None => number.to_string(),
            };
            all.iter().map(word).collect::<Vec<_>>().join(",")
        };
        let mut words = String::new();
        for (option, numbers) in [
            ("system-calls", numbers(self.system_calls.as_slice())),
            ("wakeups", numbers(&self.wakeups)),
            ("doorbells", filtered(&self.doorbells)),
            ("copies", filtered(&self.copies)),
        ] {
            if !numbers.is_empty() {
                words.push_str(&format!(" --count-{option} {numbers}"));
            }
        }
        words
    }
}

/// What a meter looks at besides.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metered {
    /// What is left of this core, by a loop of the lowest priority; the core must be idle when the meter is made.
    pub(crate) spare: bool,
    /// What is counted.
    pub(crate) counted: Counted,
}

/// Measures from its making on, in the thread that made it.
pub(crate) struct Meter {
    spare: Option<Spare>,
    counters: Counters,
    begun: Option<Reading>,
}

#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    process_s: f64,
    machine_s: f64,
    turns: u64,
    counts: Counts,
}

impl Meter {
    pub(crate) fn new(metered: Metered) -> io::Result<Meter> {
        Ok(Meter {
            spare: metered.spare.then(Spare::start).transpose()?,
            counters: Counters::new(&metered.counted)?,
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
            counts: Counts::default(),
        }
    }

    /// From here on it counts. `copied`: payload bytes that the program has copied so far; `None` where it does not know, then nobody's are counted.
    pub(crate) fn begin(&mut self, copied: Option<u64>) {
        let mut begun = self.read();
        // After what the other figures take, and before it at the end.
        begun.counts.copied_bytes = self.counters.copied_bytes(copied);
        begun.counts.wakeups = self.counters.wakeups();
        begun.counts.doorbells = self.counters.doorbells();
        begun.counts.system_calls = self.counters.system_calls();
        self.begun = Some(begun);
    }

    /// What it came to, with what the program has copied until now.
    pub(crate) fn end(&self, copied: Option<u64>) -> Cost {
        let Some(begun) = self.begun else {
            return Cost::default();
        };
        let counts = Counts {
            system_calls: self.counters.system_calls(),
            wakeups: self.counters.wakeups(),
            doorbells: self.counters.doorbells(),
            copied_bytes: self.counters.copied_bytes(copied),
        };
        let now = self.read();
        let seconds = (now.at - begun.at).as_secs_f64();
        Cost {
            process_s: (now.process_s - begun.process_s).max(0.0),
            machine_s: now.machine_s - begun.machine_s,
            spare: self
                .spare
                .as_ref()
                .map(|spare| (now.turns - begun.turns) as f64 / seconds / spare.idle_turns_per_s),
            counts: counts.since(&begun.counts),
        }
    }
}

impl Counts {
    /// What came since; of system calls the one that reads their number at the end is among them.
    fn since(&self, begun: &Counts) -> Counts {
        let came = |now: Option<u64>, begun: Option<u64>| Some(now? - begun?);
        Counts {
            system_calls: came(self.system_calls, begun.system_calls).map(|count| count - 1),
            wakeups: came(self.wakeups, begun.wakeups),
            doorbells: came(self.doorbells, begun.doorbells),
            copied_bytes: came(self.copied_bytes, begun.copied_bytes),
        }
    }
}

/// Counters of the kernel's, for the thread that made them and its core.
struct Counters {
    system_calls: Vec<File>,
    wakeups: Vec<File>,
    doorbells: Vec<File>,
    /// Passes whose `len` has this bit: the kernel counts passes, and adds up no lengths.
    copies: Vec<(u32, File)>,
}

impl Counters {
    fn new(counted: &Counted) -> io::Result<Counters> {
        let core = Some(rustix::thread::sched_getcpu() as i32);
        let own = |at: &u64| counter(*at, None, None);
        let on_core = |(at, filter): &Passes| counter(*at, core, filter.as_deref());
        let with_bit = |(passes, bit): (&Passes, u32)| {
            let filter = match &passes.1 {
                Some(filter) => format!("{filter}&&len&{}", 1 << bit),
                None => format!("len&{}", 1 << bit),
            };
            Ok((bit, counter(passes.0, core, Some(&filter))?))
        };
        let bits = |passes| (0..LEN_BITS).map(move |bit| (passes, bit));
        Ok(Counters {
            system_calls: counted.system_calls.iter().map(own).collect::<io::Result<_>>()?,
            wakeups: counted.wakeups.iter().map(own).collect::<io::Result<_>>()?,
            doorbells: counted.doorbells.iter().map(on_core).collect::<io::Result<_>>()?,
            copies: counted
                .copies
                .iter()
                .flat_map(bits)
                .map(with_bit)
                .collect::<io::Result<_>>()?,
        })
    }

    /// So far, this reading among them.
    fn system_calls(&self) -> Option<u64> {
        sum(&self.system_calls)
    }

    fn wakeups(&self) -> Option<u64> {
        sum(&self.wakeups)
    }

    fn doorbells(&self) -> Option<u64> {
        sum(&self.doorbells)
    }

    /// With the program's own.
    fn copied_bytes(&self, own: Option<u64>) -> Option<u64> {
        let of_bit = |(bit, counter): &(u32, File)| Some(read(counter)? << bit);
        let kernels: Option<u64> = self.copies.iter().map(of_bit).sum();
        (!self.copies.is_empty()).then_some(kernels? + own?)
    }
}

/// What these have counted; `None` where there is none.
fn sum(counters: &[File]) -> Option<u64> {
    (!counters.is_empty()).then(|| counters.iter().map(read).sum())?
}

fn read(mut counter: &File) -> Option<u64> {
    let mut count = [0; 8];
    counter.read_exact(&mut count).ok()?;
    Some(u64::from_ne_bytes(count))
}

/// A counter of passes, of this thread or of a core.
fn counter(tracepoint: u64, core: Option<i32>, filter: Option<&str>) -> io::Result<File> {
    sys::count_passes(tracepoint, core, filter).map_err(|error| {
        let what = format!(
            "cannot count passes of tracepoint {tracepoint}: {error}; name one that tracefs has, as root"
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
    use std::io::Write as _;

    use super::*;

    /// Its number; `None`, which is said: it is not in this kernel.
    fn tracepoint(name: &str) -> Option<u64> {
        let id = std::fs::read_to_string(format!("/sys/kernel/tracing/events/{name}/id"));
        if id.is_err() {
            println!("NOT IN THIS KERNEL: the tracepoint {name}");
        }
        id.ok()?.trim().parse().ok()
    }

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
        meter.begin(Some(0));
        let before = meter.begun.unwrap().process_s;
        while meter.read().process_s < before + 0.05 {
            std::hint::spin_loop();
        }
        let cost = meter.end(Some(0));
        assert!(
            cost.process_s >= 0.05 && cost.spare.is_none() && cost.counts.is_empty(),
            "{cost:?}"
        );
    }

    #[test]
    fn system_calls_are_counted_one_by_one() {
        let Some(id) = tracepoint("raw_syscalls/sys_enter") else {
            return;
        };
        let mut meter = Meter::new(Metered {
            counted: Counted {
                system_calls: Some(id),
                ..Counted::default()
            },
            ..Metered::default()
        })
        .unwrap();
        for calls in [0, 3] {
            meter.begin(Some(0));
            for _ in 0..calls {
                let _time = clock_gettime(ClockId::ProcessCPUTime);
            }
            assert_eq!(meter.end(Some(0)).counts.system_calls, Some(calls));
        }
    }

    #[test]
    fn passes_of_several_tracepoints_add_up_in_the_thread_and_on_its_core() {
        let Some(id) = tracepoint("raw_syscalls/sys_enter") else {
            return;
        };
        let id: u64 = id;
        let counted = Counted {
            wakeups: vec![id, id],
            doorbells: vec![(id, None), (id, Some("id<0".to_owned()))],
            ..Counted::default()
        };
        assert_eq!(
            counted.words(),
            format!(" --count-wakeups {id},{id} --count-doorbells {id},{id}:id<0")
        );
        assert_eq!(passes("7:id<0"), Ok((7, Some("id<0".to_owned()))));
        let core = rustix::thread::sched_getcpu();
        let mut meter = Meter::new(Metered {
            counted,
            ..Metered::default()
        })
        .unwrap();
        meter.begin(Some(0));
        for _ in 0..100 {
            let _time = clock_gettime(ClockId::ProcessCPUTime);
        }
        let counts = meter.end(Some(0)).counts;
        assert!(counts.wakeups >= Some(200), "{counts:?}");
        // The thread may have moved.
        assert!(
            counts.doorbells >= Some(100) || rustix::thread::sched_getcpu() != core,
            "{counts:?}"
        );
    }

    /// By a tracepoint of the kernel's own that has the field: it is passed when TCP's payload is copied to a program.
    #[test]
    fn lengths_of_copies_add_up_with_the_programs_own() {
        let Some(id) = tracepoint("skb/skb_copy_datagram_iovec") else {
            return;
        };
        let mut own = rustix::thread::CpuSet::new();
        own.set(rustix::thread::sched_getcpu());
        rustix::thread::sched_setaffinity(None, &own).unwrap();
        let counted = Counted {
            copies: vec![(id, None), (id, Some("len<0".to_owned()))],
            ..Counted::default()
        };
        let words = format!(" --count-copies {id},{id}:len<0");
        assert_eq!(counted.words(), words);
        let mut meter = Meter::new(Metered {
            counted,
            ..Metered::default()
        })
        .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = listener.accept().unwrap().0;
        let mut bytes = [0; 50_001];
        meter.begin(Some(7));
        for _ in 0..20 {
            near.write_all(&bytes).unwrap();
            far.read_exact(&mut bytes).unwrap();
        }
        let copied = |until| meter.end(until).counts.copied_bytes;
        // Others on this core may have copied a little.
        let by_kernel = copied(Some(7)).unwrap();
        assert!((1_000_020..1_500_000).contains(&by_kernel), "{by_kernel}");
        assert!(copied(Some(1_000_007)) >= Some(by_kernel + 1_000_000));
        assert_eq!(copied(None), None);
    }
}
