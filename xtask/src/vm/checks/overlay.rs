//! The check `overlay`: what a landing zone's memory holds before, after each packet, and at the end, on the driver's zero-copy path.
//!
//! `lm-bench overlay` receives a message packet by packet and tells what each byte is; it compares all of its memory with what geometry
//! says. Here its trace is held against the mechanism itself: which bytes must be headers, which payload, and which nobody may write.

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::devices::Device;
use super::super::guest::{cards, facts};
use super::super::protocol::Plan;
use crate::bed::{Launch, ip};

/// A message's way into memory: what `lm-bench overlay` prints, as far as it is needed here, and where that was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// The kernel's release.
    pub kernel: String,
    /// The receiving card's driver.
    pub driver: String,
    /// The landing queue.
    pub queue: u32,
    /// Whether the kernel says that the sending socket is in zero-copy mode.
    pub zero_copy_send: bool,
    /// Whether it says so of the receiving one.
    pub zero_copy_receive: bool,
    /// What the driver writes beside a packet.
    pub footprint: Footprint,
    /// Lengths of message and zone.
    pub shape: Shape,
    /// The memory, step by step.
    pub steps: Vec<Step>,
}

/// What the driver writes beside a packet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Footprint {
    /// From the first byte that it writes before it to the packet.
    pub prefix_len: u32,
    /// How many of those it writes.
    pub prefix_written: u32,
    /// Bytes behind it.
    pub trailer_len: u32,
    /// Shortest packet that was tried, in bytes.
    pub from_len: u32,
    /// Longest one.
    pub to_len: u32,
    /// Lengths that were tried.
    pub lengths: u32,
    /// Packets.
    pub packets: u32,
}

/// Lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// The message.
    pub message_len: i64,
    /// Its fragments.
    pub fragments: u32,
    /// Fragments of a window.
    pub window: u32,
    /// A packet's headers.
    pub header_len: i64,
    /// Payload of every fragment but the last.
    pub payload_len: i64,
    /// From the zone's start to the message's.
    pub front_margin: i64,
    /// The whole zone.
    pub zone_len: i64,
}

/// The memory after something happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
    /// Fragments whose entries are posted and not used.
    pub posted: Vec<u32>,
    /// What the zone's bytes are.
    pub runs: Vec<Run>,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The memory was painted, and entries posted.
    Painted,
    /// A packet came.
    Packet {
        /// Its fragment.
        fragment: u32,
    },
    /// The end of a window was put back.
    TailRestored {
        /// The window.
        window: u32,
    },
}

/// Bytes that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Where they begin, from the message's first byte on.
    pub at: i64,
    /// How many.
    pub len: i64,
    /// What they are.
    #[serde(flatten)]
    pub what: What,
}

/// What a byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// As it was painted.
    Paint,
    /// Written by the driver in front of a packet.
    Prefix {
        /// The packet's fragment.
        fragment: u32,
    },
    /// A packet's headers.
    Header {
        /// Its fragment.
        fragment: u32,
    },
    /// Payload at its place.
    Payload {
        /// Its fragment.
        fragment: u32,
    },
    /// Anything else.
    Foreign,
}

/// Two cards of this namespace, set up, in a guest that sends nothing by itself.
#[derive(Debug)]
pub(super) struct Pair([String; 2]);

impl Pair {
    pub(super) fn of(device: Option<Device>) -> Result<Pair> {
        let driver = device.and_then(Device::driver);
        let driver = driver.context("this check is of a device with a driver")?;
        let found = cards(driver);
        let [one, other] = found.as_slice() else {
            bail!("{} interfaces with the driver {driver} instead of 2", found.len());
        };
        // IPv6 would send packets of its own over the link.
        let _ = std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
        let pair = Pair([one.interface.clone(), other.interface.clone()]);
        let up = |name: &String| format!("link set {name} mtu 1500 up");
        ip::batch(None, &pair.0.each_ref().map(up)).context("cannot set up the cards")?;
        Ok(pair)
    }

    /// Runs `lm-bench overlay` from the first to the second card.
    pub(super) fn overlay(&self) -> Result<Value> {
        let [from, to] = &self.0;
        let program = Launch::new("/bin/lm-bench").args(["overlay", "--from", from, "--interface", to]);
        program.spawn()?.finish()?.json().context("lm-bench overlay")
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let down = |name: &String| format!("link set {name} down");
        // Whoever takes them next sets them up anew.
        let _ = ip::batch(None, &self.0.each_ref().map(down));
    }
}

pub(super) fn check(_: &Plan, device: Option<Device>) -> Result<Value> {
    let pair = Pair::of(device)?;
    let mut report = pair.overlay()?;
    report["kernel"] = json!(facts()["kernel"]);
    let trace: Trace = serde_json::from_value(report.clone()).context("lm-bench overlay's report")?;
    verify(&trace)?;
    Ok(report)
}

/// Holds a trace against what the mechanism promises.
///
/// # Errors
/// Names the first promise that it breaks.
pub fn verify(trace: &Trace) -> Result<()> {
    let (shape, footprint) = (&trace.shape, &trace.footprint);
    ensure!(
        trace.zero_copy_send && trace.zero_copy_receive,
        "not in zero-copy mode: sender {}, receiver {}",
        trace.zero_copy_send,
        trace.zero_copy_receive
    );
    // virtio's header has 12 bytes; the last two are written only where packets may have several buffers.
    let prefixes: &[(u32, u32)] = match trace.driver.as_str() {
        "virtio_net" => &[(12, 10), (12, 12), (10, 10)],
        _ => &[(0, 0)],
    };
    ensure!(
        prefixes.contains(&(footprint.prefix_len, footprint.prefix_written)) && footprint.trailer_len == 0,
        "the driver {} writes beside packets: {footprint:?}",
        trace.driver
    );
    ensure!(
        (footprint.from_len, footprint.to_len) == (60, 1514)
            && footprint.lengths >= 100
            && footprint.packets == 2 * footprint.lengths,
        "too few lengths were tried: {footprint:?}"
    );
    let window = |fragment: u32| fragment / shape.window;
    let mut order: Vec<u32> = (0..shape.fragments).collect();
    order.sort_by_key(|&fragment| (window(fragment), std::cmp::Reverse(fragment)));
    let packets: Vec<u32> = trace
        .steps
        .iter()
        .filter_map(|step| match step.event {
            Event::Packet { fragment } => Some(fragment),
            _ => None,
        })
        .collect();
    ensure!(packets == order, "packets came as {packets:?}, not as {order:?}");

    let mut arrived = Vec::new();
    let mut restored = 0;
    for step in &trace.steps {
        match step.event {
            Event::Painted => {}
            Event::Packet { fragment } => arrived.push(fragment),
            Event::TailRestored { window } => restored = window + 1,
        }
        let expected = runs(trace, &arrived, restored);
        ensure!(
            step.runs == expected,
            "after {:?} the memory is {:?} and should be {expected:?}",
            step.event,
            step.runs
        );
    }
    let last = trace.steps.last().context("an empty trace")?;
    let message: Vec<&Run> = last
        .runs
        .iter()
        .filter(|run| (0..shape.message_len).contains(&run.at))
        .collect();
    let is_whole = message.len() == shape.fragments as usize
        && message
            .iter()
            .zip(0..)
            .all(|(run, fragment)| run.what == What::Payload { fragment });
    ensure!(is_whole, "at the end the message is not contiguous: {message:?}");
    Ok(())
}

/// What a zone holds when these fragments have come and the tails of so many windows were put back. It is said the other way round than
/// packets come: header bytes lie in front of a fragment as long as the fragment below is not there *after* it.
fn runs(trace: &Trace, arrived: &[u32], restored: u32) -> Vec<Run> {
    let shape = &trace.shape;
    let prefix_written = i64::from(trace.footprint.prefix_written);
    let covered = shape.header_len + i64::from(trace.footprint.prefix_len);
    let mut runs = Vec::new();
    let mut at = -shape.front_margin;
    let mut put = |end: i64, what: What| {
        if end > at {
            runs.push(Run {
                at,
                len: end - at,
                what,
            });
            at = end;
        }
    };
    let came = |fragment: u32| arrived.iter().position(|&one| one == fragment);
    for fragment in 0..shape.fragments {
        let start = i64::from(fragment) * shape.payload_len;
        let end = (start + shape.payload_len).min(shape.message_len);
        let Some(turn) = came(fragment) else { continue };
        if fragment == 0 || came(fragment - 1).is_none() {
            put(start - covered, What::Paint);
        }
        let is_covered = fragment.checked_sub(1).is_none_or(|below| {
            let is_restored = below / shape.window < restored && fragment.is_multiple_of(shape.window);
            came(below).is_none_or(|earlier| earlier < turn) && !is_restored
        });
        if is_covered {
            put(start - covered + prefix_written, What::Prefix { fragment });
            let below = fragment.checked_sub(1).filter(|&below| came(below).is_some());
            let below = below.map_or(What::Paint, |fragment| What::Payload { fragment });
            put(start - shape.header_len, below);
            put(start, What::Header { fragment });
        }
        // The headers of the fragment above lie on this one's end where that came later and was not put back.
        let above = fragment + 1;
        let is_overwritten = came(above).is_some_and(|later| later > turn)
            && !(above.is_multiple_of(shape.window) && fragment / shape.window < restored);
        put(
            if is_overwritten { end - covered } else { end },
            What::Payload { fragment },
        );
    }
    put(shape.zone_len - shape.front_margin, What::Paint);
    runs
}
