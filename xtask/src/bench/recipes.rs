//! What `cargo xtask bench core` compares, and by which programs and settings: the *recipe*.
//!
//! Every sample has a fresh bed, one receiver and one sender, each on a core of its own. The programs are those of
//! `lm-bench`, in release mode; a receiver says `ready` on standard error as soon as a sender may start. All beds are
//! the same [`BedConfig::default`]: two queues each way, no receive packet steering, no threaded NAPI, veth's own
//! queueing. So the kernel's rows are the kernel's plain default, and what LM does to be fast it does itself:
//!
//! - XDP in the driver (native mode), where one CPU at a time runs a queue's program (invariant I3);
//! - queue 0 carries small messages; the sender's core runs the receiver's kernel work inline, which is the shortest way
//!   for a single packet;
//! - where packets come in bulk the receiving core runs that work itself, by busy polling the queue through a UDP socket
//!   that knows the queue's NAPI instance: the two cores then work side by side;
//! - at most 192 packets in flight (veth's ring takes 256), 32 descriptors for each system call;
//! - sender and receiver spin: a sleeping receiver costs a wake-up of tens of microseconds.
//!
//! `bench/RECIPE.md` tells how the same is done on real hosts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{Comparison, Contender, Sample, Target, Unit, memory};
use crate::bed::{Bed, BedConfig, Host, INTERFACE, Launch, Program};
use crate::ends::{self, Ends};
use crate::machine::two_cores;
use crate::workspace::Programs;

/// How long one throughput sample lasts, in seconds of the receiver's clock.
pub(super) const SECONDS: f64 = 1.0;
/// Seconds before them that do not count.
const WARM_UP: f64 = 0.2;
/// How long a bare sender goes on: its start, the receiver's warm-up, and some to spare.
const SENDING_SECONDS: f64 = SECONDS + 1.0;
/// Round trips of one sample.
const ROUND_TRIPS: u32 = 20_000;
/// Payload of a full UDP datagram that fits one packet of 1500 bytes.
pub(super) const FULL_PACKET: u32 = 1472;
/// Names that several comparisons share.
const UDP_BLOCKING: &str = "kernel UDP, blocking";
const UDP_SPINNING: &str = "kernel UDP, spinning";
pub(super) const BARE: &str = "bare AF_XDP";
const BARE_KEPT: &str = "bare AF_XDP, LM's recipe";
/// What bare AF_XDP is measured with: name, switches of both sides, and of the sender. The second has what LM has: the queue's interrupts
/// deferred, polls of 128 packets, and 768 of them by credit. LM shall reach its part of whichever is faster.
const BARE_RECIPES: [(&str, &str, &str); 2] = [
    (BARE, "--busy-poll udp", "--in-flight 192"),
    (
        BARE_KEPT,
        "--busy-poll udp --busy-budget 128 --keep-napi --posted 1536",
        "--in-flight 192 --credit 768",
    ),
];
/// LM shall reach this part of what bare AF_XDP moves.
const PART_OF_BARE: f64 = 0.85;

/// What a sender and a receiver reported, as the JSON objects they printed.
#[derive(Debug)]
pub(super) struct Reports {
    /// The sender's, or the pinging side's.
    pub(super) sender: Value,
    /// The receiver's; `null` for one that was stopped.
    pub(super) receiver: Value,
}

/// How a measurement by two programs ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Both end by themselves.
    Both,
    /// The sender does, and then the receiver is asked to.
    Sender,
    /// The receiver has measured, and then the sender is asked to.
    Receiver,
}

/// Starts `receiver` on the right host, waits until it is ready, and runs `sender` on the left host.
pub(super) fn receive_and_send(
    bed: &Bed,
    programs: &Programs,
    receiver: &[String],
    sender: &[String],
    ending: Ending,
) -> Result<Reports> {
    let [sending, receiving] = two_cores();
    let lm_bench = programs.path("lm-bench");
    let limit = Duration::from_secs(30);
    let launch = |words: &[String], core| Launch::new(&lm_bench).args(words).core(core).time_limit(limit);
    let mut receiver = bed.right().spawn(launch(receiver, receiving))?;
    receiver.await_text("ready")?;
    let sender = bed.left().spawn(launch(sender, sending))?;
    let sender = match ending {
        Ending::Receiver => finish_sender(sender, &mut receiver)?,
        _ => sender.finish()?.json()?,
    };
    let receiver = if ending == Ending::Sender {
        receiver.stop()?;
        Value::Null
    } else {
        receiver.finish()?.json()?
    };
    Ok(Reports { sender, receiver })
}

/// What a sender reports that ends by itself, or is asked to when the receiver has measured; nothing of one that does not listen then,
/// since it waits for what was lost.
pub(super) fn finish_sender(mut sender: Program, receiver: &mut Program) -> Result<Value> {
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

pub(super) fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// What the receiver has received counts.
pub(super) fn stream_sample(reports: Reports) -> Result<Sample> {
    Ok(Sample {
        value: ends::gbit_per_s(&reports.receiver)?,
        report: json!({"sender": reports.sender, "receiver": reports.receiver}),
    })
}

/// The pinging side's median counts.
fn round_trip_sample(reports: Reports) -> Result<Sample> {
    Ok(Sample {
        value: ends::median_us(&reports.sender)?,
        report: reports.sender,
    })
}

/// A stream between two ends, on a bed that has been made for it.
pub(super) fn stream(bed: &Bed, programs: &Programs, ends: &Ends) -> Result<Sample> {
    let (far, near) = (ends.far(), ends.near());
    stream_sample(receive_and_send(bed, programs, &far, &near, Ending::Receiver)?)
}

/// The kernel's rows mean nothing where an XDP program looks at every packet.
fn require_plain(bed: &Bed) -> Result<()> {
    let plain = !bed.left().has_xdp_program()? && !bed.right().has_xdp_program()?;
    ensure!(plain, "an XDP program is attached on the bed of a kernel row");
    Ok(())
}

/// Kernel UDP as any program uses it: blocking calls, the kernel's own settings.
fn udp_stream(message_len: u32) -> Contender {
    let ends = Ends::stream("udp-blocking", message_len.into(), [WARM_UP, SECONDS]);
    Contender {
        name: UDP_BLOCKING,
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| {
            require_plain(bed)?;
            stream(bed, programs, &ends)
        }),
    }
}

fn udp_round_trip(spin: bool) -> Contender {
    let (name, transport, count) = match spin {
        true => (UDP_SPINNING, "udp-spinning", ROUND_TRIPS),
        false => (UDP_BLOCKING, "udp-blocking", ROUND_TRIPS / 4),
    };
    let ends = Ends::round_trips(transport, 64, count, None);
    Contender {
        name,
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| {
            require_plain(bed)?;
            round_trip(bed, programs, &ends)
        }),
    }
}

fn round_trip(bed: &Bed, programs: &Programs, ends: &Ends) -> Result<Sample> {
    let (far, near) = (ends.far(), ends.near());
    round_trip_sample(receive_and_send(bed, programs, &far, &near, Ending::Sender)?)
}

/// LM as its tools have it by default comes first wherever it is measured, under this name; whatever is set otherwise is named so.
pub(super) const LM: &str = "LM";
/// Kernel UDP has no digests either, but a checksum that a veth pair never computes.
const LM_NO_DIGESTS: &str = "LM, no digests";
pub(super) const NO_DIGESTS: &str = "lm-no-integrity";

/// A stream of LM by its tools' defaults under its own name, or by what `delivery` and `transport` change of them.
pub(super) fn lm_stream_ends(
    name: &str,
    message_len: u32,
    transport: &'static str,
    delivery: Option<&str>,
) -> Ends {
    let ends = Ends::stream(transport, message_len.into(), [WARM_UP, SECONDS]);
    let ends = match delivery {
        Some(delivery) => ends.options(&format!("--delivery {delivery}"), ""),
        None => ends,
    };
    check_name(name, &ends);
    ends
}

/// A name alone promises the tools' defaults.
fn check_name(name: &str, ends: &Ends) {
    assert_eq!(name == LM, ends.is_default(), "{name} is measured with {ends:?}");
}

/// A stream with something set otherwise than the tools have it.
pub(super) fn lm_stream_with(
    name: &'static str,
    message_len: u32,
    transport: &'static str,
    delivery: Option<&str>,
) -> Contender {
    let ends = lm_stream_ends(name, message_len, transport, delivery);
    Contender {
        name,
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| stream(bed, programs, &ends)),
    }
}

fn lm_round_trip(name: &'static str, transport: &'static str) -> Contender {
    let ends = Ends::round_trips(transport, 64, ROUND_TRIPS, None);
    check_name(name, &ends);
    Contender {
        name,
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| round_trip(bed, programs, &ends)),
    }
}

/// Whom a bare sender on the left host talks to, as its options.
pub(super) fn bare_addresses(bed: &Bed) -> Result<Vec<String>> {
    let mac = |host: &Host| host.read_file(&format!("/sys/class/net/{INTERFACE}/address"));
    let (left, right) = (bed.left(), bed.right());
    Ok(words(&format!(
        "--to {} --to-mac {} --from {} --from-mac {}",
        right.address(),
        mac(right)?,
        left.address(),
        mac(left)?
    )))
}

/// The most that packets of this payload reach without any protocol, by each of the best recipes for two cores that are known.
fn bare_streams(payload: u32) -> [Contender; 2] {
    BARE_RECIPES.map(|(name, both, sending)| Contender {
        name,
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| bare_stream(bed, programs, both, sending, payload)),
    })
}

/// A bare stream, by the switches of both sides and of the sender.
fn bare_stream(bed: &Bed, programs: &Programs, both: &str, sending: &str, payload: u32) -> Result<Sample> {
    let pace = PaceFile::new();
    let both = format!(
        "--interface {INTERFACE} --queue 1 --mode native {both} --pace {}",
        pace.path().display()
    );
    let receiver = words(&format!("bare-recv {both} --seconds {SECONDS}"));
    let mut sender = words(&format!(
        "bare-send {both} {sending} --payload {payload} --seconds {SENDING_SECONDS}"
    ));
    sender.extend(bare_addresses(bed)?);
    stream_sample(receive_and_send(bed, programs, &receiver, &sender, Ending::Both)?)
}

/// The same on a bed that somebody else has made: through the impairment box, for example.
pub(super) fn bare_stream_on(bed: &Bed, programs: &Programs) -> Result<Sample> {
    let (_, both, sending) = BARE_RECIPES[0];
    bare_stream(bed, programs, both, sending, FULL_PACKET)
}

fn bare_round_trip() -> Contender {
    Contender {
        name: BARE,
        bed: BedConfig::default(),
        measure: Box::new(|bed, programs| {
            let both = format!("--interface {INTERFACE} --queue 0 --mode native");
            let answering = words(&format!("bare-pong {both}"));
            let mut asking = words(&format!("bare-ping {both} --payload 64 --count {ROUND_TRIPS}"));
            asking.extend(bare_addresses(bed)?);
            round_trip_sample(receive_and_send(
                bed,
                programs,
                &answering,
                &asking,
                Ending::Sender,
            )?)
        }),
    }
}

/// The file through which a bare receiver paces its sender, in a folder that `lm-bench` makes for it; removed afterwards.
pub(super) struct PaceFile(PathBuf);

impl PaceFile {
    pub(super) fn new() -> PaceFile {
        let folder = std::env::temp_dir().join(format!("lm-bench-pace-{}", std::process::id()));
        PaceFile(folder.join("pace"))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PaceFile {
    fn drop(&mut self) {
        // A receiver that did not start has made none.
        let _ = std::fs::remove_file(&self.0);
        let _ = self.0.parent().map(std::fs::remove_dir);
    }
}

/// Streams of messages of one length: LM and kernel UDP.
fn streams(key: &'static str, title: &'static str, message_len: u32, ratio: f64) -> Comparison {
    Comparison {
        key,
        title,
        unit: Unit::GbitPerSecond,
        contenders: vec![
            lm_stream_with(LM, message_len, "lm", None),
            lm_stream_with(LM_NO_DIGESTS, message_len, NO_DIGESTS, None),
            udp_stream(message_len),
        ],
        targets: vec![Target::RatioAtLeast(UDP_BLOCKING, ratio)],
        most_rounds: None,
    }
}

/// Adds bare AF_XDP with the packets that such messages make.
fn with_bare(mut comparison: Comparison, message_len: u32) -> Comparison {
    comparison
        .contenders
        .extend(bare_streams(message_len.min(FULL_PACKET)));
    let target = |(name, ..): (&'static str, _, _)| Target::RatioAtLeast(name, PART_OF_BARE);
    comparison.targets.extend(BARE_RECIPES.map(target));
    comparison
}

/// 64 KiB messages, as `cargo xtask run` shows them.
pub fn throughput_64k() -> Comparison {
    streams("throughput_64k", "throughput, 64 KiB", 65_536, 1.8)
}

/// 64-byte round trips, as `cargo xtask run` shows them.
pub fn round_trip_64() -> Comparison {
    Comparison {
        key: "round_trip_64",
        title: "round trip, 64 B, p50",
        unit: Unit::Microseconds,
        contenders: vec![
            lm_round_trip(LM, "lm"),
            lm_round_trip(LM_NO_DIGESTS, NO_DIGESTS),
            udp_round_trip(true),
            udp_round_trip(false),
        ],
        targets: vec![
            Target::RatioAtMost(UDP_SPINNING, 0.70),
            Target::RatioAtMost(UDP_BLOCKING, 0.10),
        ],
        most_rounds: None,
    }
}

/// Everything of `cargo xtask bench core`.
pub fn core() -> Vec<Comparison> {
    let mut round_trip = round_trip_64();
    round_trip.contenders.push(bare_round_trip());
    vec![
        with_bare(streams("throughput_1k", "throughput, 1 KiB", 1024, 3.0), 1024),
        with_bare(streams("throughput_7168", "throughput, 7168 B", 7168, 2.2), 7168),
        with_bare(throughput_64k(), 65_536),
        with_bare(
            streams_for_show("throughput_1m", "throughput, 1 MiB", 1 << 20),
            1 << 20,
        ),
        round_trip,
        memory::one_gibibyte(),
    ]
}

/// As [`streams`], with no target beside UDP.
fn streams_for_show(key: &'static str, title: &'static str, message_len: u32) -> Comparison {
    Comparison {
        targets: Vec::new(),
        ..streams(key, title, message_len, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{delivery, loss};
    use super::*;

    /// [`check_name`] has looked at each when it was made.
    #[test]
    fn headline_rows_are_the_tools_defaults() {
        let mut with_lm = 0;
        for comparison in core()
            .into_iter()
            .chain(delivery::comparisons())
            .chain(loss::all())
        {
            let first = |part: &str| {
                comparison
                    .contenders
                    .iter()
                    .position(|one| one.name.starts_with(part))
            };
            let Some(at) = first("LM") else { continue };
            with_lm += 1;
            assert_eq!(comparison.contenders[at].name, LM, "{}", comparison.key);
            let has_digests_off = first("LM, no digests").is_some();
            assert!(
                has_digests_off || ["memory_1g", "box"].contains(&comparison.key),
                "{}",
                comparison.key
            );
        }
        assert!(with_lm > 10);
    }
}
