//! `lm-bench rt cycle`: a control loop's message each period, there and back, and how late each is, as `cyclictest` does it for a program that
//! only wakes up.
//!
//! Near: sleep until a message is due, send it, take the answer. Far: sleep until one comes, answer it. Two programs wake up between the time at
//! which a message was due and the one at which the far program has it. What each part of that took comes back with the answer, so that the
//! worst one has a cause.

use std::io::{BufWriter, Write as _};
use std::net::SocketAddrV4;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Duration;
use std::{fs::File, io};

use lm_dataplane::{DEFAULT_PORT, Endpoint};
use lm_realtime::{RealTime, RtSocket, SendOptions, SocketConfig, monotonic};
use rustix::thread::{clock_nanosleep_absolute, set_current_timer_slack};
use rustix::time::{ClockId, Timespec};
use serde::Serialize;

use super::real_time::{ASLEEP, PORT, introduce, open};
use super::sys;
use super::timetable::now_ns;
use crate::cli::{Failure, Mode, chain, parse_seconds};
use crate::files;
use crate::histogram::LatencyHistogram;
use crate::signals::Interrupt;

/// Messages whose answers count: later ones are lost.
const RECENT: usize = 64;
/// All is set up within this, and the last answer is here.
const LEAD_NS: u64 = 100_000_000;
const STEP: Duration = Duration::from_millis(10);
/// Number and due time; in an answer when it came, when the program had it, and how long the program has waited for its core since the one before.
const WORDS: usize = 5;
type Words = [u64; WORDS];

/// Send a message each period, and tell how late it was there
///
/// Start it on one host without --to, and on the other with it. `chrt -f 80` before both keeps other programs off their cores. One way counts
/// from the time at which a message was due to the one at which the far program has it, if both hosts have one clock, as namespaces of a host
/// do; there and back it counts anywhere.
#[derive(Debug, clap::Args)]
pub struct CycleArgs {
    /// Network interface
    #[arg(long)]
    interface: String,
    /// Where the other end is, which was started without this; without, be that end until ended
    #[arg(long, value_name = "HOST:PORT")]
    to: Option<SocketAddrV4>,
    /// How long, in seconds
    #[arg(long, default_value = "600", value_parser = parse_seconds)]
    seconds: Duration,
    /// Microseconds from one message to the next
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    period_us: u64,
    /// Write the histogram, of one way where that is known, to a file, in HdrHistogram's percentile text format (.hgrm), in microseconds
    #[arg(long, value_name = "FILE")]
    histogram: Option<PathBuf>,
    /// Write how much later than a period the messages were that missed theirs, in the same format
    #[arg(long, value_name = "FILE")]
    missed: Option<PathBuf>,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
}

/// Times in microseconds.
#[derive(Debug, Serialize)]
struct Times {
    p50: Option<f64>,
    p99: Option<f64>,
    p999: Option<f64>,
    p9999: Option<f64>,
    max: Option<f64>,
}

impl Times {
    fn of(histogram: &LatencyHistogram) -> Times {
        let at = |part| histogram.quantile_ns(part).map(us);
        Times {
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: at(1.0),
        }
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// What became of the messages.
#[derive(Debug, Serialize)]
pub struct Cycles {
    period_us: u64,
    /// Messages that were due, and were sent: the rest was due while the near program slept.
    due: u64,
    sent: u64,
    /// Sent, and never answered.
    lost: u64,
    /// There later than a period after they were due, or back, where one way is not known; and how much later.
    missed: u64,
    missed_us: Times,
    /// From when one was due to when the far program had it; `null`: the hosts have two clocks.
    one_way_us: Option<Times>,
    /// From when one was due to when its answer was here.
    round_trip_us: Times,
    /// How late the near program woke up.
    woke_us: Times,
    worst: Option<Worst>,
}

/// The slowest one.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Worst {
    /// When it was due, in seconds after the first.
    at_s: f64,
    took_us: f64,
    /// How late the near program woke up; until the message had left, had come, and was the far program's.
    parts_us: [f64; 4],
    /// How long each program waited for its core.
    waited_us: [f64; 2],
    cause: String,
}

/// A message under way: times in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Cycle {
    number: Option<u64>,
    due: u64,
    woke: u64,
    left: u64,
    waited: u64,
}

/// What is known of all messages so far.
struct Tally {
    period_ns: u64,
    begins_ns: u64,
    one_way: LatencyHistogram,
    round_trip: LatencyHistogram,
    woke: LatencyHistogram,
    missed: [LatencyHistogram; 2],
    has_one_clock: bool,
    /// One way, and there and back.
    worst: [Option<(u64, Worst)>; 2],
}

impl Tally {
    fn new(period_ns: u64, begins_ns: u64) -> Tally {
        let [one_way, round_trip, woke, missed, missed_back] = [(); 5].map(|()| LatencyHistogram::new());
        Tally {
            period_ns,
            begins_ns,
            one_way,
            round_trip,
            woke,
            missed: [missed, missed_back],
            has_one_clock: true,
            worst: [None, None],
        }
    }

    /// An answer that was here at `back`.
    fn answered(&mut self, cycle: &Cycle, [.., came, taken, far_waited]: Words, back: u64) {
        // Clocks of two hosts are not within a round trip of each other.
        self.has_one_clock &= cycle.woke <= came && came <= taken && taken <= back;
        let took = [taken.saturating_sub(cycle.due), back.saturating_sub(cycle.due)];
        self.one_way.record_ns(took[0]);
        self.round_trip.record_ns(took[1]);
        // The other host may have it before the system call that sent it is over.
        let left = cycle.left.min(came);
        let parts = [
            cycle.woke - cycle.due,
            left.saturating_sub(cycle.woke),
            came.saturating_sub(left),
            taken.saturating_sub(came),
        ];
        for (which, took) in took.into_iter().enumerate() {
            if took > self.period_ns {
                self.missed[which].record_ns(took - self.period_ns);
            }
            let worst = &mut self.worst[which];
            if worst.as_ref().is_none_or(|(longest, _)| took > *longest) {
                let worst_now = Worst {
                    at_s: (cycle.due - self.begins_ns) as f64 / 1e9,
                    took_us: us(took),
                    parts_us: parts.map(us),
                    waited_us: [cycle.waited, far_waited].map(us),
                    cause: cause(parts, [cycle.waited, far_waited]),
                };
                *worst = Some((took, worst_now));
            }
        }
    }
}

/// Why one took so long: its longest part, and whether a program had the core meanwhile.
fn cause(parts: [u64; 4], waited: [u64; 2]) -> String {
    let (which, longest) = (parts.into_iter().enumerate())
        .max_by_key(|(_, part)| *part)
        .expect("there are four");
    let what = [
        "the near program woke up late",
        "the near program was held up while it sent",
        "the packet was under way, or the far program woke up late",
        "the far program was held up before it had the message",
    ][which];
    let why = match waited[which / 2] >= longest / 2 {
        true => "another program had its core",
        false => "no other program had its core: interrupts, a deep sleep, or a hypervisor",
    };
    format!("{what}: {why}")
}

/// How long the calling thread has been ready to run, and another one ran (`schedstat` of the kernel's sched-stats.rst).
struct Waiting {
    file: Option<File>,
    before: u64,
}

impl Waiting {
    fn new() -> Waiting {
        let mut waiting = Waiting {
            file: File::open("/proc/thread-self/schedstat").ok(),
            before: 0,
        };
        waiting.since();
        waiting
    }

    /// Since this was asked last, in nanoseconds; 0 where the kernel does not tell.
    fn since(&mut self) -> u64 {
        let mut text = [0; 80];
        let read = self
            .file
            .as_ref()
            .and_then(|file| file.read_at(&mut text, 0).ok());
        let text = std::str::from_utf8(&text[..read.unwrap_or(0)]).unwrap_or("");
        let now = text
            .split(' ')
            .nth(1)
            .and_then(|word| word.parse().ok())
            .unwrap_or(0);
        now - std::mem::replace(&mut self.before, now)
    }
}

fn failed(error: &dyn std::error::Error) -> Failure {
    Failure::new(chain(error))
}

fn to_bytes(words: Words) -> [u8; 8 * WORDS] {
    let mut bytes = [0; 8 * WORDS];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn read(bytes: &[u8]) -> Option<Words> {
    let (words, rest) = bytes.as_chunks::<8>();
    let words: [[u8; 8]; WORDS] = words.try_into().ok().filter(|_| rest.is_empty())?;
    Some(words.map(u64::from_le_bytes))
}

/// Runs one end. `ready` is called when the far one may be sent to; `print` has what became of the near one's messages.
///
/// # Errors
/// A one-line reason why there is no endpoint, or no such file.
pub fn cycle(args: &CycleArgs, ready: impl FnOnce(), print: impl FnOnce(&Cycles)) -> Result<(), Failure> {
    let interrupt = Interrupt::install().map_err(|error| failed(&error))?;
    // Without the right to do so it is as late as the machine lets it be. Timers are as exact as those of real-time threads.
    let _unlocked = sys::keep_memory();
    let _coarse = set_current_timer_slack(NonZeroU64::new(1));
    let port = if args.to.is_some() { 0 } else { DEFAULT_PORT };
    let mut endpoint = open(&args.interface, Mode::Auto, port, ASLEEP)?;
    let real_time = RealTime::new(&mut endpoint, None, monotonic).map_err(|error| failed(&error))?;
    let config = SocketConfig {
        drops_late: false,
        ..SocketConfig::default()
    };
    let mut socket = (real_time.socket(&mut endpoint, PORT, &config)).map_err(|error| failed(&error))?;
    let Some(to) = args.to else {
        ready();
        return answer(&mut endpoint, &mut socket, &interrupt);
    };
    let mut written = Vec::new();
    for path in [&args.histogram, &args.missed] {
        let file = path
            .as_ref()
            .map(|path| files::create(path, args.force).map(|file| (path, file)));
        written.push(file.transpose()?);
    }
    introduce(&mut endpoint, &mut socket, to)?;
    let (cycles, histograms) =
        ask(&mut endpoint, &mut socket, args, &interrupt).map_err(|error| failed(&error))?;
    for (histogram, file) in histograms.iter().zip(written) {
        let Some((path, file)) = file else { continue };
        let mut out = BufWriter::new(file);
        let written = histogram.write_hgrm(&mut out).and_then(|()| out.flush());
        written.map_err(|error| files::cannot_write(path, &error))?;
    }
    print(&cycles);
    Ok(())
}

fn ask(
    endpoint: &mut Endpoint,
    socket: &mut RtSocket,
    args: &CycleArgs,
    interrupt: &Interrupt,
) -> io::Result<(Cycles, [LatencyHistogram; 2])> {
    let period_ns = args.period_us * 1000;
    let count = (args.seconds.as_nanos() as u64 / period_ns).max(1);
    let begins_ns = now_ns() + LEAD_NS;
    let mut tally = Tally::new(period_ns, begins_ns);
    let mut recent = [Cycle::default(); RECENT];
    let mut waiting = Waiting::new();
    let (mut number, mut due_count, mut sent) = (0, 0, 0);
    while number < count && !interrupt.is_set() {
        let due = begins_ns + number * period_ns;
        await_answers(endpoint, socket, &mut recent, &mut tally, due)?;
        let woke = now_ns();
        tally.woke.record_ns(woke - due);
        let words = [number, due, 0, 0, 0];
        let has_sent = socket.send(&to_bytes(words), SendOptions::default()).is_ok();
        endpoint.poll();
        recent[number as usize % RECENT] = Cycle {
            number: has_sent.then_some(number),
            due,
            woke,
            left: now_ns(),
            waited: waiting.since(),
        };
        sent += u64::from(has_sent);
        // What was due meanwhile is not sent any more.
        let next = (now_ns().saturating_sub(begins_ns) / period_ns + 1).clamp(number + 1, count);
        due_count += next - number;
        number = next;
    }
    await_answers(endpoint, socket, &mut recent, &mut tally, now_ns() + LEAD_NS)?;
    let answered = tally.round_trip.count();
    let known = usize::from(!tally.has_one_clock);
    let cycles = Cycles {
        period_us: args.period_us,
        due: due_count,
        sent,
        lost: sent - answered,
        missed: tally.missed[known].count(),
        missed_us: Times::of(&tally.missed[known]),
        one_way_us: tally.has_one_clock.then(|| Times::of(&tally.one_way)),
        round_trip_us: Times::of(&tally.round_trip),
        woke_us: Times::of(&tally.woke),
        worst: tally.worst[known].take().map(|(_, worst)| worst),
    };
    let [missed, missed_back] = tally.missed;
    let histograms = match tally.has_one_clock {
        true => [tally.one_way, missed],
        false => [tally.round_trip, missed_back],
    };
    Ok((cycles, histograms))
}

/// Takes answers until the next message is due. While none is missing it sleeps as `cyclictest` does.
fn await_answers(
    endpoint: &mut Endpoint,
    socket: &mut RtSocket,
    recent: &mut [Cycle; RECENT],
    tally: &mut Tally,
    until_ns: u64,
) -> io::Result<()> {
    let mut is_missing = recent.iter().any(|cycle| cycle.number.is_some());
    while now_ns() < until_ns {
        if !is_missing {
            sleep_until(until_ns)?;
            break;
        }
        if endpoint.poll() == 0 {
            endpoint.wait(Duration::from_nanos(until_ns.saturating_sub(now_ns())));
        }
        while let Some(answer) = socket.recv() {
            let back = now_ns();
            let Some(words) = read(&answer) else { continue };
            let cycle = &mut recent[words[0] as usize % RECENT];
            if cycle.number.take_if(|number| *number == words[0]).is_some() {
                tally.answered(cycle, words, back);
            }
            is_missing = recent.iter().any(|cycle| cycle.number.is_some());
        }
    }
    Ok(())
}

fn sleep_until(time_ns: u64) -> io::Result<()> {
    let time = Timespec {
        tv_sec: (time_ns / 1_000_000_000) as i64,
        tv_nsec: (time_ns % 1_000_000_000) as i64,
    };
    match clock_nanosleep_absolute(ClockId::Monotonic, &time) {
        // A signal, perhaps the one that ends it.
        Ok(()) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Answers whoever asks, until it is ended.
fn answer(endpoint: &mut Endpoint, socket: &mut RtSocket, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut waiting = Waiting::new();
    let mut answered = None;
    while !interrupt.is_set() {
        if endpoint.poll() == 0 {
            endpoint.wait(STEP);
        }
        // Who greets is known from then on.
        while let Ok(Some(_)) = endpoint.try_recv() {}
        while let Some(message) = socket.recv() {
            let taken = now_ns();
            let (from, came) = (message.info().from, message.info().received_at.as_nanos());
            let Some([number, due, ..]) = read(&message) else {
                continue;
            };
            if answered != Some(from) {
                (socket.connect(endpoint, from, PORT)).map_err(|error| failed(&error))?;
                answered = Some(from);
            }
            let words = [number, due, came, taken, waiting.since()];
            // One for which there is no room is lost like any other.
            let _ = socket.send(&to_bytes(words), SendOptions::default());
            endpoint.poll();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn tally_of(answers: &[(Cycle, Words, u64)]) -> Tally {
        let mut tally = Tally::new(MS, 0);
        for (cycle, words, back) in answers {
            tally.answered(cycle, *words, *back);
        }
        tally
    }

    fn cycle(number: u64, waited: u64) -> Cycle {
        let due = number * MS;
        Cycle {
            number: Some(number),
            due,
            woke: due + 10_000,
            left: due + 15_000,
            waited,
        }
    }

    #[test]
    fn the_worst_one_has_its_cause() {
        let words = |number: u64, came: u64, waited: u64| {
            let due = number * MS;
            [number, due, due + came, due + came + 2000, waited]
        };
        let tally = tally_of(&[
            (cycle(0, 0), words(0, 30_000, 0), 50_000),
            (cycle(1, 0), words(1, 1_400_000, 1_300_000), 3 * MS),
            (cycle(2, 0), words(2, 12_000, 0), 5 * MS),
        ]);
        assert!(tally.has_one_clock);
        let [(_, one_way), (_, round_trip)] = tally.worst.clone().map(Option::unwrap);
        assert_eq!(one_way.parts_us, [10.0, 5.0, 1385.0, 2.0]);
        assert_eq!((one_way.at_s, one_way.took_us), (0.001, 1402.0));
        assert!(
            one_way
                .cause
                .ends_with("far program woke up late: another program had its core")
        );
        // The far program had it before the near one was back from its system call.
        assert_eq!(round_trip.parts_us, [10.0, 2.0, 0.0, 2.0]);
        assert_eq!(tally.missed.each_ref().map(LatencyHistogram::count), [1, 2]);
        assert!(cause([9, 1, 1, 1], [0, 9]).contains("a hypervisor"));
    }

    #[test]
    fn clocks_of_two_hosts_are_told_apart() {
        for off in [-(3600 * 1_000_000_000_i64), 3600 * 1_000_000_000] {
            let [came, taken] =
                [1_030_000, 1_032_000].map(|time: i64| (time + off + 3601 * 1_000_000_000) as u64);
            let mut near = cycle(1, 0);
            for time in [&mut near.due, &mut near.woke, &mut near.left] {
                *time += 3601 * 1_000_000_000;
            }
            let back = near.due + 50_000;
            let tally = tally_of(&[(near, [1, near.due, came, taken, 0], back)]);
            assert!(!tally.has_one_clock);
            assert_eq!(tally.worst[1].as_ref().unwrap().0, 50_000);
        }
    }

    #[test]
    fn words_survive_the_way() {
        assert_eq!(
            read(&to_bytes([1, 2, 3, 4, u64::MAX])),
            Some([1, 2, 3, 4, u64::MAX])
        );
        assert_eq!(read(&[0; 8 * WORDS + 1]), None);
        assert_eq!(read(&[]), None);
    }
}
