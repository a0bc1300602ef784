//! **b**, figure 9 of SS-RTUDP: round trips of real time beside a TCP stream that takes most of a link.
//!
//! The link is a switch's port towards the receiver: one FIFO that knows no classes. Segmentation offloads are on, so that a TCP packet of many
//! segments takes its host's queue as one. What asks and what answers sleeps meanwhile and goes before others (`SCHED_FIFO`); TCP's
//! sender shares a core with the one, its receiver with the other.
//!
//! TCP connects when what holds it back is there: one that is held by hand keeps the `gso_max_segs` that its interface had then. It is held to
//! what LM's smoother gave the kernel in its last run beside TCP. A round trip that was lost has no time and is counted beside.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::rate::BitRate;
use lm_measure::statistics::Quantile;
use serde_json::{Value, json};

use super::{Contender, Experiment, SET_UP_S, count, now_ns, number};
use crate::bed::{Bed, BedConfig, Launch, Port, Program};
use crate::ends::{self, Ends, RealTime, Timetable};
use crate::machine::two_cores;
use crate::workspace::Programs;

/// Payload of a real-time message, and how many there are in a second.
const MESSAGE_LEN: u64 = 64;
const RATE: f64 = 400.0;
/// What the port keeps.
const BUFFER_FRAMES: u32 = 128;
/// On the wire a frame of full length takes so many bytes, and has so many of TCP's payload.
const FRAME_LEN: f64 = 1538.0;
const SEGMENT_LEN: f64 = 1448.0;
/// What a smoother leaves the kernel in any case: 64 kbit/s.
const HELD_LEAST: f64 = 64e3 / 8.0 / FRAME_LEN;
/// All programs have started within this, and then TCP begins; the timetable begins when a smoother has found its rate.
const BEFORE_TCP: Duration = Duration::from_secs(1);
const LEAD: Duration = Duration::from_secs(4);
/// TCP counts from the timetable's begin to its end, with some time to spare at both.
const MARGIN: f64 = 0.5;
const TCP_MESSAGE_LEN: u64 = 1 << 16;

/// Round trips on a link of this rate, beside a TCP stream with this congestion control, and alone.
pub fn under_tcp(link: BitRate, congestion: &'static str, seconds: f64) -> Experiment {
    let held = Rc::default();
    let contenders = [
        ("LM, paced", How::Lm, Some(congestion)),
        ("LM, idle", How::Lm, None),
        ("kernel UDP, EF", How::Udp, Some(congestion)),
        ("kernel UDP, EF, idle", How::Udp, None),
        ("kernel UDP, EF, TCP held by hand", How::UdpHeld, Some(congestion)),
    ];
    let contender = |(name, how, congestion)| {
        let case = Case {
            how,
            congestion,
            link,
            seconds,
            held: Rc::clone(&held),
        };
        Contender {
            name,
            bed: BedConfig {
                senders: Some(1),
                port: Some(Port {
                    rate: link,
                    frames: BUFFER_FRAMES,
                }),
                // As for table 4: nothing lands here.
                queues: 1,
                segmentation_offloads: true,
                ..BedConfig::default()
            },
            measure: Box::new(move |bed: &Bed, programs: &Programs| case.measure(bed, programs)),
        }
    };
    Experiment {
        key: "under_tcp",
        contenders: contenders.into_iter().map(contender).collect(),
        columns: &[
            "/time_us/p50",
            "/time_us/p99",
            "/time_us/max",
            "/lost_percent",
            "/tcp/goodput_mbit",
            "/tcp/link_percent",
        ],
    }
}

/// Who asks for round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// LM's real-time sockets, whose smoother holds TCP back.
    Lm,
    /// Kernel UDP with priority. Nothing is held back.
    Udp,
    /// The same, with TCP in a class of HTB.
    UdpHeld,
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
    fn measure(&self, bed: &Bed, programs: &Programs) -> Result<Value> {
        if self.how == How::UdpHeld {
            let held = self.held.get();
            bed.hold_senders(held.context("LM is measured first: leave its row in")?)?;
        }
        let timetable = Timetable {
            port: 7168,
            size: MESSAGE_LEN,
            begins_ns: now_ns() + LEAD.as_nanos() as u64,
            seconds: self.seconds,
            rate: RATE,
            burst: 1,
            is_answered: true,
        };
        let running = self.start(bed, programs, timetable)?;
        std::thread::sleep(BEFORE_TCP);
        let start_tcp = |name| self.start_tcp(bed, programs, timetable.begins_ns, name);
        let tcp = self.congestion.map(start_tcp).transpose()?;
        let mut report = self.round_trips(running)?;
        if let Some([sender, mut receiver]) = tcp {
            let sender = finish_sender(sender, &mut receiver)?;
            let received = receiver.finish()?.json()?;
            let mbit_per_s = ends::gbit_per_s(&received)? * 1e3;
            report["tcp"] = json!({
                "goodput_mbit": mbit_per_s, "congestion": sender["congestion"],
                "link_percent": mbit_per_s * 1e8 * FRAME_LEN / SEGMENT_LEN / self.link.0 as f64,
            });
        }
        Ok(report)
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
        let system = format!("tcp --congestion {congestion}");
        let tcp = Ends::stream(&system, TCP_MESSAGE_LEN, [warm_up, self.seconds - 2.0 * MARGIN])
            .sending(self.seconds + SET_UP_S);
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
        };
        let (far, near) = match self.how {
            How::Lm => (real_time.far(), real_time.near(0)),
            _ => (timetable.far(), timetable.near(0)),
        };
        let [sending, receiving] = two_cores();
        let launch = |words, core| launch(programs, words, core, self.seconds).goes_first();
        let mut receiver = bed.right().spawn(launch(far, receiving))?;
        receiver.await_text("ready")?;
        Ok([bed.left().spawn(launch(near, sending))?, receiver])
    }

    fn round_trips(&self, [sender, receiver]: [Program; 2]) -> Result<Value> {
        let sent = sender.finish()?.json()?;
        receiver.finish()?;
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
        let came = times.len() as u64;
        ensure!((1..=due).contains(&came), "{came} came of {due} messages");
        let quantile = |part| Quantile::of(&times, part).map(|found| found.value);
        Ok(json!({
            "time_us": {"p50": quantile(0.5), "p99": quantile(0.99), "max": times.last()},
            "lost_percent": super::percent(due - came, due),
            "due": due, "offered": sent["offered"], "smoothed": sent["smoothed"], "held_frames": self.held.get(),
        }))
    }
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
