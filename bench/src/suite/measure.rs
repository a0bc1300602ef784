//! One measurement: a program on each host, from the far one's start to both reports.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use lm_measure::statistics::Summary;

use super::bare::{BareSpec, Recipe, Way};
use super::catalogue::{Entry, How, On};
use super::child::{Launch, Place, Running};
use super::end::{Cost, Counted, Counts, Outcome, Spec, Task, Transport};
use super::frozen::Frozen;
use super::host::{LINK, LinkEnd};
use super::schema::{LatencyRound, Link, PerMessage, Round, TransferRound, What};
use super::serve::{Far, Hello};
use super::tools::ToolSpec;
use crate::cli::{Failure, Mode};
use crate::histogram::LatencyHistogram;
use crate::link::interface_towards;

/// UDP and TCP port of our kernel ends; a second socket has the next one.
const PORT: u16 = 7172;
/// Length of the round trips' messages beside a load.
pub(super) const SHORT: u64 = 64;
/// Time for everything but what is measured: start, the link, connections, warm-up of slow round trips.
const SET_UP: Duration = Duration::from_secs(15 + LINK.as_secs());

/// The two ends of a link.
pub(super) struct Pair {
    pub(super) near: LinkEnd,
    pub(super) far: LinkEnd,
    /// What it is called, if not by its driver.
    place: Option<String>,
}

impl Pair {
    fn new(far: &mut Far, address: Ipv4Addr, place: Option<&str>) -> Result<Pair, Failure> {
        let interface = interface_towards(address)?;
        let source = lm_dataplane::route::resolve(address, None)
            .map_err(|error| Failure::new(crate::cli::chain(&error)))?
            .source;
        let near = LinkEnd::of(source)?;
        if near.interface != interface {
            return Err(Failure::new(format!(
                "packets to {address} leave through {interface}, which has not their source address {source}; check the routes"
            )));
        }
        Ok(Pair {
            near,
            far: far.link(address)?,
            place: place.map(str::to_owned),
        })
    }

    pub(super) fn link(&self, mode: &str) -> Link {
        self.near.link(&self.far, self.place.as_deref(), mode)
    }
}

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) warm_up: f64,
    pub(super) seconds: f64,
    /// Round trips.
    pub(super) count: u64,
    /// Round trips a second, by the clock.
    pub(super) rate: Option<f64>,
    /// Most to send, in bits per second.
    pub(super) bit_rate: Option<f64>,
    /// How packets pass between driver and LM.
    pub(super) mode: Mode,
}

/// Both hosts and all links between them.
pub(super) struct Bench {
    pub(super) far: Far,
    core: u32,
    pub(super) main: Pair,
    plain: Option<Pair>,
    steered: Option<Pair>,
    polled: Option<Pair>,
    offloads: Option<Pair>,
    pub(super) here: Hello,
    /// What is counted beside time.
    pub(super) counted: Counted,
    /// The best way of each system on bare AF_XDP.
    recipes: BTreeMap<&'static str, Recipe>,
    /// Builds whose ends can be measured beside ours.
    frozen: Vec<Frozen>,
    /// How AF_XDP has moved LM's packets, as its ends have told.
    modes: BTreeSet<String>,
}

/// Addresses of the other host.
pub(super) struct Addresses {
    pub(super) control: SocketAddrV4,
    pub(super) plain: Option<Ipv4Addr>,
    pub(super) steered: Option<Ipv4Addr>,
    pub(super) polled: Option<Ipv4Addr>,
    pub(super) offloads: Option<Ipv4Addr>,
}

impl Bench {
    pub(super) fn connect(
        to: &Addresses,
        place: Option<&str>,
        core: u32,
        frozen: &[Frozen],
    ) -> Result<Bench, Failure> {
        let mut far = Far::connect(to.control)?;
        let mut pair = |address: Option<Ipv4Addr>| {
            let pair = address.map(|address| Pair::new(&mut far, address, place));
            pair.transpose()
        };
        let (plain, steered) = (pair(to.plain)?, pair(to.steered)?);
        let (polled, offloads) = (pair(to.polled)?, pair(to.offloads)?);
        Ok(Bench {
            main: Pair::new(&mut far, *to.control.ip(), place)?,
            plain,
            steered,
            polled,
            offloads,
            far,
            core,
            here: Hello::of_this_host(core),
            counted: Counted::default(),
            recipes: BTreeMap::new(),
            frozen: frozen.to_vec(),
            modes: BTreeSet::new(),
        })
    }

    /// Both ends are on one machine: its busy time is counted once, and shared memory paces bare packets.
    pub(super) fn same_machine(&self) -> bool {
        self.here.machine == self.far.hello.machine
    }

    /// The link that a system runs on, or why there is none.
    pub(super) fn pair(&self, on: On) -> Result<&Pair, &'static str> {
        match on {
            On::Main => Ok(&self.main),
            On::Plain => Ok(self.plain.as_ref().unwrap_or(&self.main)),
            On::Steered => {
                let steered = self.steered.as_ref().or(Some(&self.main));
                steered.filter(|pair| pair.far.has_steering()).ok_or(
                    "no link has receive packet steering: name the host's address on one with --rps-host",
                )
            }
            On::Polled => {
                let polled = self.polled.as_ref().or(Some(&self.main));
                polled.filter(|pair| pair.near.has_napi() && pair.far.has_napi()).ok_or(
                    "no link has NAPI instances that sockets can poll: name the host's address on one with --napi-host (veth: ethtool -K IF gro on)",
                )
            }
            On::Offloads => {
                let offloads = self.offloads.as_ref().or(Some(&self.main));
                offloads.filter(|pair| pair.near.has_segmentation()).ok_or(
                    "no link has segmentation offloads: name the host's address on one with --offloads-host",
                )
            }
        }
    }

    /// Why a system cannot be measured at all.
    pub(super) fn absence(&self, entry: &Entry) -> Option<String> {
        if let Err(why) = self.pair(entry.on) {
            return Some(why.to_owned());
        }
        if let Some(congestion) = entry.options.strip_prefix("--congestion ") {
            let path = "/proc/sys/net/ipv4/tcp_available_congestion_control";
            let offered = std::fs::read_to_string(path).unwrap_or_default();
            let is_offered = offered.split_whitespace().any(|one| one == congestion);
            return (!is_offered)
                .then(|| format!("this kernel does not offer it; modprobe tcp_{congestion}"));
        }
        let How::Tool(tool) = entry.how else { return None };
        let (program, package) = tool.program();
        let missing = |here: bool| {
            let whose = if here { "this host" } else { "the other host" };
            Some(format!(
                "{program} is not installed on {whose}: apt-get install {package}"
            ))
        };
        if !self.here.tools.contains(&tool) {
            return missing(true);
        }
        if !self.far.hello.tools.contains(&tool) {
            return missing(false);
        }
        None
    }

    /// The links that some systems run on.
    pub(super) fn links(&self, entries: &[Entry]) -> Vec<Link> {
        let mut links: Vec<Link> = Vec::new();
        for entry in entries {
            let Ok(pair) = self.pair(entry.on) else { continue };
            let link = pair.link(&self.mode(entry.on));
            if !links.iter().any(|known| known.interface == link.interface) {
                links.push(link);
            }
        }
        links
    }

    /// How AF_XDP moves packets on a link: bare programs copy unless zero-copy mode is asked for, LM takes what the driver has.
    fn mode(&self, on: On) -> String {
        match on {
            On::Main if self.modes.is_empty() => "native copy".to_owned(),
            On::Main => self.modes.iter().cloned().collect::<Vec<_>>().join(" and "),
            _ => "none".to_owned(),
        }
    }

    /// What a system's link is called.
    pub(super) fn link_name(&self, on: On) -> String {
        self.pair(on)
            .map_or_else(|_| String::new(), |pair| pair.link("").name)
    }

    /// Measures once. The histogram is there for round trips of our own ends.
    pub(super) fn measure(
        &mut self,
        entry: &Entry,
        what: What,
        size: u64,
        at: u32,
        extent: Extent,
    ) -> Result<(Round, Option<LatencyHistogram>), Failure> {
        let pair = self.pair(entry.on).map_err(Failure::new)?;
        let (near, far) = (pair.near.clone(), pair.far.clone());
        let limit = Duration::from_secs_f64(extent.warm_up + extent.seconds) + SET_UP;
        match entry.how {
            How::Ours(_) | How::Frozen => {
                let transport = match entry.how {
                    How::Ours(transport) => transport,
                    _ => Transport::Lm,
                };
                let spec = Spec {
                    transport,
                    task: task(what, extent),
                    size,
                    address: SocketAddrV4::new(far.address, port(transport)),
                    mtu: near.mtu.min(far.mtu),
                    mode: extent.mode,
                    counted: self.counted.clone(),
                };
                // A far end that only answers has no end of its own.
                let stop = what == What::Latency;
                let launch = match entry.how {
                    How::Frozen => Launch::Frozen(entry.id.to_owned(), spec),
                    _ => Launch::End(spec),
                };
                let [here, there] = self.run(&launch, (&near, entry.options), limit, stop)?;
                let here = outcome(&here)?;
                took_mode(&here, extent.mode)?;
                if what == What::Latency && here.lost_messages > 0 {
                    return Err(Failure::new(format!(
                        "{} answers are missing",
                        here.lost_messages
                    )));
                }
                let there = if stop {
                    Outcome::default()
                } else {
                    outcome(&there)?
                };
                self.modes.extend(here.mode.clone());
                self.modes.extend(there.mode.clone());
                Ok(self.round(what, at, &here, &there))
            }
            How::Bare => {
                let count = (what == What::Latency).then_some(extent.count);
                let windows = [extent.warm_up, extent.seconds];
                let ends = [&near, &far];
                let recipe = if count.is_some() {
                    Recipe::NativeSpinning
                } else {
                    self.recipe(entry)
                };
                let zero_copy = extent.mode == Mode::ZeroCopy;
                let way = Way { recipe, zero_copy };
                let mut spec = BareSpec::new(way, ends, size, count, windows, self.same_machine());
                spec.counted = self.counted.clone();
                let launch = Launch::Bare(spec.clone());
                let [here, there] = self.run(&launch, (&near, ""), limit, count.is_some())?;
                if zero_copy {
                    self.modes.insert("native zero-copy".to_owned());
                }
                match count {
                    Some(_) => Ok(self.round(what, at, &outcome(&here)?, &Outcome::default())),
                    None => Ok((spec.round(at, &here, &there)?, None)),
                }
            }
            How::Tool(tool) => {
                let spec = ToolSpec {
                    tool,
                    address: SocketAddrV4::new(far.address, tool.port()),
                    size,
                    seconds: extent.seconds,
                    count: extent.count,
                };
                let [here, _] = self.run(&Launch::Tool(spec.clone()), (&near, ""), limit, true)?;
                Ok((spec.round(at, &here)?, None))
            }
        }
    }

    /// Runs both programs; what the near and the far one printed. A far one that has no end is stopped.
    fn run(
        &mut self,
        launch: &Launch,
        (near, options): (&LinkEnd, &str),
        limit: Duration,
        stop: bool,
    ) -> Result<[String; 2], Failure> {
        self.far.start(launch, limit)?;
        let here = Running::start(
            launch,
            Place::Near(&near.interface, options),
            self.core,
            limit,
            &self.frozen,
        )
        .and_then(Running::finish);
        let here = match here {
            Ok(text) => text,
            Err(failure) => {
                self.far.stop()?;
                return Err(failure);
            }
        };
        let there = if stop {
            self.far.stop().map(|()| String::new())?
        } else {
            self.far.finish()?
        };
        Ok([here, there])
    }

    fn round(
        &self,
        what: What,
        at: u32,
        here: &Outcome,
        there: &Outcome,
    ) -> (Round, Option<LatencyHistogram>) {
        if matches!(what, What::Latency | What::LatencyUnderLoad) {
            let mut histogram = LatencyHistogram::new();
            histogram.record_counts(here.round_trips.iter().copied());
            let quantile = |quantile| histogram.quantile_ns(quantile).unwrap_or(0) as f64;
            let round = LatencyRound {
                at,
                count: histogram.count(),
                min_ns: Some(quantile(0.0)),
                p50_ns: quantile(0.5),
                p90_ns: Some(quantile(0.9)),
                p99_ns: Some(quantile(0.99)),
                p999_ns: Some(quantile(0.999)),
                max_ns: Some(quantile(1.0)),
                mean_ns: histogram.mean_ns(),
                load_bits_per_s: (what == What::LatencyUnderLoad && there.seconds > 0.0)
                    .then(|| there.bytes as f64 * 8.0 / there.seconds),
                counts: per_message([(&here.cost, here.messages), (&there.cost, 0)]),
            };
            return (Round::Latency(round), Some(histogram));
        }
        // The sender's time may have counted a little longer or shorter.
        let part = if here.seconds > 0.0 {
            there.seconds / here.seconds
        } else {
            1.0
        };
        let machine = if self.same_machine() {
            0.0
        } else {
            here.cost.machine_s * part
        };
        let round = TransferRound {
            at,
            bytes: there.bytes,
            messages: there.messages,
            lost_messages: there.lost_messages,
            seconds: there.seconds,
            cpu_seconds_send: here.cost.process_s * part,
            cpu_seconds_receive: there.cost.process_s,
            cpu_seconds_machine: there.cost.machine_s + machine,
            spare_fraction: [here.cost.spare, there.cost.spare]
                .into_iter()
                .flatten()
                .collect(),
            counts: per_message([(&here.cost, here.messages), (&there.cost, there.messages)]),
        };
        (Round::Transfer(round), None)
    }

    /// Tries every recipe of bare AF_XDP `turns` times and keeps the best. Gives each one's median throughput in bits per second; none
    /// where it failed.
    pub(super) fn choose_recipe(
        &mut self,
        entry: &Entry,
        size: u64,
        turns: u32,
        extent: Extent,
    ) -> Vec<(Recipe, Option<f64>)> {
        let mut speeds = Recipe::ALL.map(|_| Vec::new());
        for at in 0..turns {
            for (recipe, speeds) in Recipe::ALL.into_iter().zip(&mut speeds) {
                self.recipes.insert(entry.id, recipe);
                if let Ok((Round::Transfer(round), _)) =
                    self.measure(entry, What::Throughput, size, at, extent)
                {
                    speeds.push(round.bits_per_s());
                }
            }
        }
        let medians = speeds.map(|speeds| Summary::of_finite(speeds).map(|speeds| speeds.median));
        let tried: Vec<_> = Recipe::ALL.into_iter().zip(medians).collect();
        let best = tried
            .iter()
            .filter_map(|(recipe, speed)| Some((*recipe, (*speed)?)))
            .max_by(|one, other| one.1.total_cmp(&other.1));
        let best = best.map_or(Recipe::NativePolled, |(recipe, _)| recipe);
        self.recipes.insert(entry.id, best);
        tried
    }

    /// Takes this recipe of bare AF_XDP, untried.
    pub(super) fn take_recipe(&mut self, entry: &Entry, recipe: Recipe) {
        self.recipes.insert(entry.id, recipe);
    }

    /// The way that was chosen for a system on bare AF_XDP.
    pub(super) fn recipe(&self, entry: &Entry) -> Recipe {
        self.recipes
            .get(entry.id)
            .copied()
            .unwrap_or(Recipe::NativePolled)
    }
}

fn outcome(text: &str) -> Result<Outcome, Failure> {
    serde_json::from_str(text).map_err(|error| Failure::new(format!("an end's report: {error}")))
}

/// A frozen build that knows no modes takes what the driver has, whatever is asked for.
fn took_mode(outcome: &Outcome, asked: Mode) -> Result<(), Failure> {
    let wanted = match asked {
        Mode::Auto => return Ok(()),
        Mode::ZeroCopy => "native zero-copy",
        Mode::Copy => "native copy",
        Mode::Generic => "generic copy",
    };
    match outcome.mode.as_deref() {
        None => Ok(()),
        Some(mode) if mode == wanted => Ok(()),
        Some(mode) => Err(Failure::new(format!(
            "it took {mode} mode where {wanted} was asked for"
        ))),
    }
}

fn port(transport: Transport) -> u16 {
    match transport {
        transport if transport.is_lm() => lm_dataplane::DEFAULT_PORT,
        _ => PORT,
    }
}

/// What was counted, for each message of the near and of the far end, which have so many.
pub(super) fn per_message(ends: [(&Cost, u64); 2]) -> PerMessage {
    let of_both = |of: fn(&Counts) -> Option<u64>| {
        let of_end = |(cost, messages): (&Cost, u64)| Some(of(&cost.counts)? as f64 / messages.max(1) as f64);
        ends.into_iter().filter_map(of_end).collect()
    };
    PerMessage {
        calls_per_message: of_both(|counts| counts.system_calls),
        wakeups_per_message: of_both(|counts| counts.wakeups),
        doorbells_per_message: of_both(|counts| counts.doorbells),
        copied_bytes_per_message: of_both(|counts| counts.copied_bytes),
    }
}

fn task(what: What, extent: Extent) -> Task {
    let Extent { count, seconds, .. } = extent;
    match what {
        What::Latency => Task::RoundTrips {
            count,
            seconds,
            rate: extent.rate,
        },
        What::LatencyUnderLoad => Task::RoundTripsUnderLoad {
            count,
            seconds,
            rate: None,
        },
        What::Throughput | What::Cpu => Task::Stream {
            warm_up: extent.warm_up,
            seconds,
            rate: extent.bit_rate,
            spare: what == What::Cpu,
        },
    }
}
