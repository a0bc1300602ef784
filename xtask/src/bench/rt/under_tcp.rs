//! **b**, figure 9 of SS-RTUDP: round trips of real time beside a TCP stream that takes most of a link.
//!
//! The link is a switch's port towards the receiver: one FIFO that knows no classes. Segmentation offloads are on, so that a TCP packet of many
//! segments takes its host's queue as one. What asks and what answers sleeps meanwhile and goes before others (`SCHED_FIFO`); TCP's
//! sender shares a core with the one, its receiver with the other.
//!
//! TCP connects when what holds it back is there: one that is held by hand keeps the `gso_max_segs` that its interface had then.
//!
//! Who is held by hand is held to what LM's smoother gave the kernel in its last run beside TCP. A round trip that was lost has no time and is counted
//! beside.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::rate::BitRate;
use lm_measure::statistics::Quantile;
use serde_json::{Value, json};

use super::super::Unit::{MbitPerSecond, Microseconds, Percent};
use super::super::{Column, Comparison, Contender, Sample, Target};
use super::{SET_UP_S, count, now_ns, number};
use crate::bed::{Bed, BedConfig, Launch, Port, Program};
use crate::ends::{self, Ends, RealTime, Timetable};
use crate::machine::two_cores;
use crate::workspace::Programs;

const LM: &str = "LM, paced";
const LM_IDLE: &str = "LM, idle";
const WAKING: &str = "cyclictest, TCP held by hand";
const UDP: &str = "kernel UDP, EF";
const UDP_IDLE: &str = "kernel UDP, EF, idle";
const UDP_HELD: &str = "kernel UDP, EF, TCP held by hand";
const UDP_HELD_IDLE: &str = "kernel UDP, EF, held by hand, idle";

/// Payload of a real-time message, and how many there are in a second.
const MESSAGE_LEN: u64 = 64;
const RATE: f64 = 400.0;
/// How long one is measured.
const SECONDS: f64 = 8.0;
/// Messages of bandwidth: three packets, which take so many bytes of the wire; so much of the link is offered, and kept beside TCP.
const LONG_LEN: u64 = 4096;
const LONG_ON_WIRE: f64 = 4466.0;
const OFFERED_PART: f64 = 0.9;
const BANDWIDTH_KEPT: f64 = 0.9;
/// What the port keeps.
const BUFFER_FRAMES: u32 = 128;
/// On the wire a frame of full length takes so many bytes, and has so many of TCP's payload.
const FRAME_LEN: f64 = 1538.0;
const SEGMENT_LEN: f64 = 1448.0;
/// Frame times that real time may wait for: two of HTB's burst, and one on the wire.
const FRAMES: f64 = 3.0;
/// What a smoother leaves the kernel in any case: 64 kbit/s.
const HELD_LEAST: f64 = 64e3 / 8.0 / FRAME_LEN;
/// What is asked beside kernel UDP without a smoother, and beside what `tc` alone can do.
const OF_UDP: f64 = 0.25;
const OF_HELD: f64 = 1.0;
/// What TCP is to have of the link, in percent, and of what it has alone at the same rate.
const LINK_LEAST: f64 = 75.0;
const KEPT_LEAST: f64 = 0.9;
/// All programs have started within this, and then TCP begins; the timetable begins when a smoother has found its rate.
const BEFORE_TCP: Duration = Duration::from_secs(1);
const LEAD: Duration = Duration::from_secs(4);
/// TCP counts from the timetable's begin to its end, with some time to spare at both.
const MARGIN: f64 = 0.5;
const TCP_MESSAGE_LEN: u64 = 1 << 16;
/// `cyclictest` counts wake-ups that are late by less than this, in microseconds, one by one.
const WAKING_MOST_US: usize = 20_000;

/// A link under a congestion control, and what the page says of it.
struct Under {
    link: BitRate,
    congestion: &'static str,
    key: &'static str,
    title: &'static str,
    columns: &'static [Column],
}

macro_rules! under {
    ($rate:literal, $congestion:literal, $key:literal, $title:literal) => {
        Under {
            link: BitRate($rate),
            congestion: $congestion,
            key: concat!("b_under_tcp_", $key),
            title: concat!($title, ", round trip p99"),
            columns: &columns([
                concat!($title, ", round trip p50"),
                concat!($title, ", longest round trip"),
                concat!($title, ", round trips lost"),
                concat!($title, ", TCP"),
                concat!($title, ", TCP of the link"),
            ]),
        }
    };
}

const UNDER: [Under; 4] = [
    under!(100_000_000, "cubic", "100_cubic", "100 Mbit/s under TCP cubic"),
    under!(100_000_000, "bbr", "100_bbr", "100 Mbit/s under TCP BBR"),
    under!(500_000_000, "cubic", "500_cubic", "500 Mbit/s under TCP cubic"),
    under!(500_000_000, "bbr", "500_bbr", "500 Mbit/s under TCP BBR"),
];

const BANDWIDTHS: [(BitRate, &str, &str); 2] = [
    (
        BitRate(100_000_000),
        "b_under_tcp_100_bandwidth",
        "100 Mbit/s under TCP cubic, 4096 B real time",
    ),
    (
        BitRate(500_000_000),
        "b_under_tcp_500_bandwidth",
        "500 Mbit/s under TCP cubic, 4096 B real time",
    ),
];

/// On each link, under each congestion control.
pub(super) fn all() -> Vec<Comparison> {
    let of = |one: Under| Comparison {
        key: one.key,
        title: one.title,
        columns: one.columns,
        ..under_tcp(one.link, one.congestion, SECONDS)
    };
    let bandwidth = |(link, key, title)| Comparison {
        key,
        title,
        ..bandwidth(link, SECONDS)
    };
    (UNDER.into_iter().map(of))
        .chain(BANDWIDTHS.into_iter().map(bandwidth))
        .collect()
}

/// What of messages that take most of the link by themselves comes through beside a TCP stream, and alone.
fn bandwidth(link: BitRate, seconds: f64) -> Comparison {
    let contender = |name, congestion| {
        contender(
            name,
            Case {
                how: How::LmOneWay,
                congestion,
                link,
                seconds,
                held: Rc::default(),
            },
        )
    };
    Comparison {
        key: "b_under_tcp_bandwidth",
        title: "4096 B real time",
        unit: MbitPerSecond,
        contenders: vec![contender(LM, Some("cubic")), contender(LM_IDLE, None)],
        targets: vec![Target::RatioAtLeast(LM_IDLE, BANDWIDTH_KEPT)],
        columns: &[],
        most_rounds: None,
    }
}

fn contender(name: &'static str, case: Case) -> Contender {
    Contender {
        name,
        bed: BedConfig {
            senders: Some(1),
            port: Some(Port {
                rate: case.link,
                frames: BUFFER_FRAMES,
            }),
            // As for table 4: nothing lands here.
            queues: 1,
            segmentation_offloads: true,
            ..BedConfig::default()
        },
        measure: Box::new(move |bed, programs| case.measure(bed, programs)),
    }
}

/// Round trips on a link of this rate, beside a TCP stream with this congestion control, and alone.
pub fn under_tcp(link: BitRate, congestion: &'static str, seconds: f64) -> Comparison {
    let held = Rc::default();
    let of = |name, how, is_idle: bool| {
        let case = Case {
            how,
            congestion: (!is_idle).then_some(congestion),
            link,
            seconds,
            held: Rc::clone(&held),
        };
        contender(name, case)
    };
    let frame_us = FRAME_LEN * 8e6 / link.0 as f64;
    let of_link = |report: &Value| number(report, "/tcp/link_percent");
    Comparison {
        key: "b_under_tcp",
        title: "round trip p99",
        unit: Microseconds,
        contenders: vec![
            of(LM, How::Lm, false),
            of(WAKING, How::Waking, false),
            of(LM_IDLE, How::Lm, true),
            of(UDP, How::Udp, false),
            of(UDP_IDLE, How::Udp, true),
            of(UDP_HELD, How::UdpHeld, false),
            of(UDP_HELD_IDLE, How::UdpHeld, true),
        ],
        targets: vec![
            Target::ExcessAtMost(&[LM_IDLE, WAKING], FRAMES * frame_us),
            Target::RatioAtMost(UDP, OF_UDP),
            Target::RatioAtMost(UDP_HELD, OF_HELD),
            Target::ReportAtLeast("% of the link for TCP", of_link, LINK_LEAST),
        ],
        columns: UNDER[0].columns,
        most_rounds: None,
    }
}

const fn columns([p50, longest, lost, tcp, of_link]: [&'static str; 5]) -> [Column; 5] {
    [
        Column::new("/time_us/p50", p50, Microseconds),
        Column::new("/time_us/max", longest, Microseconds),
        Column::new("/lost_percent", lost, Percent),
        Column {
            targets: &[Target::RatioAtLeast(WAKING, KEPT_LEAST)],
            ..Column::new("/tcp/goodput_mbit", tcp, MbitPerSecond)
        },
        Column::new("/tcp/link_percent", of_link, Percent),
    ]
}

/// Who asks for round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// LM's real-time sockets, whose smoother holds TCP back.
    Lm,
    /// The same, and nobody answers: what counts is how much comes.
    LmOneWay,
    /// Kernel UDP with priority. Nothing is held back.
    Udp,
    /// The same, with TCP in a class of HTB.
    UdpHeld,
    /// Nobody: TCP is alone in that class, and what is measured is how late programs wake up beside it.
    Waking,
}

struct Case {
    how: How,
    /// TCP's; without, there is none.
    congestion: Option<&'static str>,
    link: BitRate,
    seconds: f64,
    /// Frames a second that the kernel had in LM's last run beside TCP.
    held: Rc<Cell<Option<f64>>>,
}

impl Case {
    /// One run on a fresh bed.
    fn measure(&self, bed: &Bed, programs: &Programs) -> Result<Sample> {
        if matches!(self.how, How::UdpHeld | How::Waking) {
            bed.hold_senders(
                self.held
                    .get()
                    .context("LM is measured first: leave its row in")?,
            )?;
        }
        let is_answered = self.how != How::LmOneWay;
        let timetable = Timetable {
            port: 7168,
            size: if is_answered { MESSAGE_LEN } else { LONG_LEN },
            begins_ns: now_ns() + LEAD.as_nanos() as u64,
            seconds: self.seconds,
            rate: match is_answered {
                true => RATE,
                false => OFFERED_PART * self.link.0 as f64 / 8.0 / LONG_ON_WIRE,
            },
            burst: 1,
            is_answered,
        };
        let running = match self.how {
            How::Waking => None,
            _ => Some(self.start(bed, programs, timetable)?),
        };
        std::thread::sleep(BEFORE_TCP);
        let start_tcp = |name| self.start_tcp(bed, programs, timetable.begins_ns, name);
        let tcp = self.congestion.map(start_tcp).transpose()?;
        let mut report = match running {
            Some(running) => self.round_trips(running)?,
            None => self.waking(bed, timetable.begins_ns)?,
        };
        if let Some([sender, mut receiver]) = tcp {
            let sender = finish_sender(sender, &mut receiver)?;
            let received = receiver.finish()?.json()?;
            let mbit_per_s = ends::gbit_per_s(&received)? * 1e3;
            report["tcp"] = json!({
                "goodput_mbit": mbit_per_s, "congestion": sender["congestion"],
                "link_percent": mbit_per_s * 1e8 * FRAME_LEN / SEGMENT_LEN / self.link.0 as f64,
            });
        }
        let value = if is_answered {
            "/time_us/p99"
        } else {
            "/goodput_mbit"
        };
        Ok(Sample {
            value: number(&report, value).context("there was no answer at all")?,
            report,
        })
    }

    /// A stream that is there before the timetable begins, and after it is over.
    fn start_tcp(
        &self,
        bed: &Bed,
        programs: &Programs,
        begins_ns: u64,
        congestion: &str,
    ) -> Result<[Program; 2]> {
        let warm_up = begins_ns.saturating_sub(now_ns()) as f64 / 1e9 + MARGIN;
        let tcp = Ends::stream("tcp", TCP_MESSAGE_LEN, [warm_up, self.seconds - 2.0 * MARGIN])
            .sending(self.seconds + SET_UP_S)
            .options(&format!("--congestion {congestion}"), "");
        let [sending, receiving] = two_cores();
        let mut receiver = (bed.right()).spawn(launch(programs, tcp.far(), receiving, self.seconds))?;
        receiver.await_text("ready")?;
        let sender = (bed.left()).spawn(launch(programs, tcp.near(), sending, self.seconds))?;
        Ok([sender, receiver])
    }

    /// Both ends of round trips by a timetable.
    fn start(&self, bed: &Bed, programs: &Programs, timetable: Timetable) -> Result<[Program; 2]> {
        let real_time = RealTime {
            timetable,
            smoother: Some(("paced", self.link)),
            streams: false,
        };
        let (far, near) = match self.how {
            How::Lm | How::LmOneWay => (real_time.far(), real_time.near(0)),
            _ => (timetable.far(), timetable.near(0)),
        };
        let [sending, receiving] = two_cores();
        let launch = |words, core| launch(programs, words, core, self.seconds).goes_first();
        let mut receiver = bed.right().spawn(launch(far, receiving))?;
        receiver.await_text("ready")?;
        Ok([bed.left().spawn(launch(near, sending))?, receiver])
    }

    fn round_trips(&self, [sender, receiver]: [Program; 2]) -> Result<Value> {
        let (sent, received) = (sender.finish()?.json()?, receiver.finish()?.json()?);
        // Alone LM's smoother has another rate: nothing asks for more.
        if self.congestion.is_some()
            && let Some(credits) = number(&sent, "/smoothed/credits_mean")
        {
            // What was not real time's. Reports come the other way.
            let real_time = count(&sent, "/messages")? as f64 / self.seconds;
            self.held.set(Some((credits - real_time).max(HELD_LEAST)));
        }
        let times = ends::latencies_us(sent.get("round_trips"));
        let due = count(&sent, "/offered/due")?;
        let came = match self.how {
            How::LmOneWay => count(&received, "/messages")?,
            _ => times.len() as u64,
        };
        ensure!(came <= due, "{came} came of {due} messages");
        let quantile = |part| Quantile::of(&times, part).map(|found| found.value);
        Ok(json!({
            "time_us": {"p50": quantile(0.5), "p99": quantile(0.99), "max": times.last()},
            "lost_percent": super::percent(due - came, due),
            "goodput_mbit": ends::gbit_per_s(&received)? * 1e3,
            "due": due, "offered": sent["offered"], "smoothed": sent["smoothed"], "held_frames": self.held.get(),
        }))
    }

    /// How late programs wake up on both cores.
    fn waking(&self, bed: &Bed, begins_ns: u64) -> Result<Value> {
        std::thread::sleep(Duration::from_nanos(begins_ns.saturating_sub(now_ns())));
        let program = cyclictest(self.seconds).goes_first();
        let running = bed.left().spawn(program).context("install rt-tests")?;
        let times = wake_ups(&running.finish()?.stdout);
        let quantile = |part| Quantile::of(&times, part).map(|found| found.value);
        Ok(json!({"time_us": {"p50": quantile(0.5), "p99": quantile(0.99), "max": times.last()}}))
    }
}

/// Looks each millisecond, on both cores, how late it wakes up.
pub(super) fn cyclictest(seconds: f64) -> Launch {
    let [one, other] = two_cores();
    let words = format!(
        "--quiet --mlockall --interval=1000 --threads=2 --affinity={one},{other} --histogram={WAKING_MOST_US} --duration={}",
        seconds.ceil()
    );
    Launch::new("cyclictest").args(words.split(' '))
}

/// In microseconds, shortest first, of what `cyclictest` prints: lines of a time, and of how many wake-ups of each thread were so late.
pub(super) fn wake_ups(printed: &str) -> Vec<f64> {
    let mut all = Vec::new();
    for line in printed.lines().filter(|line| !line.starts_with('#')) {
        let mut numbers = line.split_whitespace().map_while(|word| word.parse::<u64>().ok());
        let Some(late_us) = numbers.next() else { continue };
        all.extend(std::iter::repeat_n(late_us as f64, numbers.sum::<u64>() as usize));
    }
    all
}

fn launch(programs: &Programs, words: Vec<String>, core: usize, seconds: f64) -> Launch {
    let limit = seconds + 2.0 * SET_UP_S;
    Launch::new(programs.path("lm-bench"))
        .args(["--time-limit", &limit.to_string()])
        .args(words)
        .core(core)
        .time_limit(Duration::from_secs_f64(limit))
}

/// What a sender reports that ends by itself, or is asked to when the receiver has measured; nothing of one that does not listen then,
/// since it waits for what was lost.
fn finish_sender(mut sender: Program, receiver: &mut Program) -> Result<Value> {
    while !sender.has_ended()? {
        if receiver.has_printed() || receiver.has_ended()? {
            let output = sender.stop()?;
            return if output.status.success() {
                output.json()
            } else {
                Ok(Value::Null)
            };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    sender.finish()?.json()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wake_ups_of_both_threads_count() {
        let printed = "# /dev/cpu_dma_latency set to 0us\n# Histogram\n000000 000000\t000000\n000001 000002\t000001\n\
                       000007 000000\t000001\n# Total: 000000002 000000002\n";
        assert_eq!(wake_ups(printed), [1.0, 1.0, 1.0, 7.0]);
        assert!(wake_ups("cyclictest: no\n").is_empty());
    }

    #[test]
    fn targets_name_contenders_and_frames_take_their_time() {
        let all = all();
        for one in &all[..UNDER.len()] {
            let names: Vec<&str> = one.contenders.iter().map(|contender| contender.name).collect();
            assert_eq!(names[0], LM);
            for name in [LM_IDLE, WAKING, UDP, UDP_HELD] {
                assert!(names.contains(&name), "{name}");
            }
        }
        let waits = |number: usize| all[number].targets[0].bound();
        assert!((waits(0) - 369.12).abs() < 0.01 && (waits(2) - 73.824).abs() < 0.01);
    }
}
