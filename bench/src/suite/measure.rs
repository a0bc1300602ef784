//! One measurement: a program on each host, from the far one's start to both reports.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use super::bare::BareSpec;
use super::child::{Launch, Place, Running};
use super::end::{Cost, Outcome, Spec, Task, Work};
use super::host::{LINK, LinkEnd};
use super::schema::{Link, Round, Times, What};
use super::serve::{Far, Hello};
use super::systems::{How, System};
use super::tools::ToolSpec;
use crate::cli::{Failure, Mode};
use crate::histogram::LatencyHistogram;
use crate::link::interface_towards;

/// UDP and TCP port of our kernel ends; a second socket has the next one.
const PORT: u16 = 7172;
/// Length of round trips' messages beside a load, and of those for which no length is named.
pub(super) const SHORT: u64 = 64;
/// Time for everything but what is measured: start, the link, connections, warm-up of slow round trips.
const SET_UP: Duration = Duration::from_secs(15 + LINK.as_secs());

/// The two ends of a link.
pub(super) struct Pair {
    pub(super) near: LinkEnd,
    pub(super) far: LinkEnd,
}

impl Pair {
    fn new(far: &mut Far, address: Ipv4Addr) -> Result<Pair, Failure> {
        let interface = interface_towards(address)?;
        let source = lm_dataplane::route::resolve(address, None)
            .map_err(|error| Failure::new(crate::cli::chain(&error)))?
            .source;
        let near = LinkEnd::of(source)?;
        if near.interface != interface {
            return Err(Failure::new(format!(
                "packets to {address} leave through {interface}, which has not their source address {source}; check \
                 the routes"
            )));
        }
        Ok(Pair {
            near,
            far: far.link(address)?,
        })
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

/// Both hosts and the links between them.
pub(super) struct Bench {
    pub(super) far: Far,
    core: u32,
    pub(super) main: Pair,
    /// For the kernel's systems, where it is not the same.
    pub(super) plain: Option<Pair>,
    pub(super) here: Hello,
    /// How AF_XDP has moved packets, as ends have told.
    modes: BTreeSet<String>,
}

impl Bench {
    pub(super) fn connect(
        control: SocketAddrV4,
        plain: Option<Ipv4Addr>,
        core: u32,
    ) -> Result<Bench, Failure> {
        let mut far = Far::connect(control)?;
        Ok(Bench {
            main: Pair::new(&mut far, *control.ip())?,
            plain: plain.map(|address| Pair::new(&mut far, address)).transpose()?,
            far,
            core,
            here: Hello::of_this_host(core),
            modes: BTreeSet::new(),
        })
    }

    /// Both ends are on one machine: its busy time is counted once, and shared memory paces bare packets.
    pub(super) fn same_machine(&self) -> bool {
        self.here.machine == self.far.hello.machine
    }

    /// The link that a system runs on.
    pub(super) fn pair(&self, system: &System) -> &Pair {
        match (&self.plain, system.how) {
            (Some(plain), how) if !how.is_lm() && how != How::Bare => plain,
            _ => &self.main,
        }
    }

    /// Why a system cannot be measured at all.
    pub(super) fn absence(&self, system: &System) -> Option<String> {
        if let Some(congestion) = &system.options.congestion {
            let path = "/proc/sys/net/ipv4/tcp_available_congestion_control";
            let offered = std::fs::read_to_string(path).unwrap_or_default();
            let is_offered = offered.split_whitespace().any(|one| one == congestion);
            return (!is_offered)
                .then(|| format!("this kernel does not offer it; modprobe tcp_{congestion}"));
        }
        let tool = system.how.tool()?;
        let hosts = [(&self.here, "this host"), (&self.far.hello, "the other host")];
        let without = hosts.into_iter().find(|(hello, _)| !hello.tools.contains(&tool));
        let program = tool.program();
        without.map(|(_, host)| format!("{program} is not installed on {host}: apt-get install {program}"))
    }

    /// The links that systems run on, LM's own first.
    pub(super) fn links(&self) -> Vec<Link> {
        let modes = self.modes.iter().cloned().collect::<Vec<_>>().join(" and ");
        let mode = if modes.is_empty() { "none" } else { &modes };
        let plain = self.plain.iter().map(|pair| pair.near.link(&pair.far, "none"));
        std::iter::once(self.main.near.link(&self.main.far, mode))
            .chain(plain)
            .collect()
    }

    /// Measures once. The histogram is there for round trips of our own ends.
    pub(super) fn measure(
        &mut self,
        system: &System,
        what: What,
        size: u64,
        at: u32,
        extent: Extent,
    ) -> Result<(Round, Option<LatencyHistogram>), Failure> {
        let pair = self.pair(system);
        let (near, far) = (pair.near.clone(), pair.far.clone());
        let limit = Duration::from_secs_f64(extent.warm_up + extent.seconds) + SET_UP;
        let round_trips = what == What::RoundTrips;
        if let Some(tool) = system.how.tool() {
            let spec = ToolSpec {
                tool,
                address: SocketAddrV4::new(far.address, tool.port()),
                size,
                seconds: extent.seconds,
            };
            let [here, _] = self.run(&Launch::Tool(spec.clone()), &near, limit, true)?;
            return Ok((spec.round(at, &here)?, None));
        }
        let launch = match system.how {
            How::Bare => {
                let count = round_trips.then_some(extent.count);
                let windows = [extent.warm_up, extent.seconds];
                let zero_copy = extent.mode == Mode::ZeroCopy;
                Launch::Bare(BareSpec::new(
                    zero_copy,
                    [&near, &far],
                    size,
                    count,
                    windows,
                    self.same_machine(),
                ))
            }
            how => Launch::End(Spec {
                system: system.clone(),
                task: task(what, extent),
                size,
                address: SocketAddrV4::new(
                    far.address,
                    if how.is_lm() {
                        lm_dataplane::DEFAULT_PORT
                    } else {
                        PORT
                    },
                ),
                mtu: near.mtu.min(far.mtu),
                mode: extent.mode,
            }),
        };
        // A far end that only answers has no end of its own.
        let [here, there] = self.run(&launch, &near, limit, round_trips)?;
        let here = outcome(&launch, &here)?;
        let there = match round_trips {
            true => Outcome::default(),
            false => outcome(&launch, &there)?,
        };
        if round_trips && here.lost_messages > 0 {
            return Err(Failure::new(format!(
                "{} answers are missing",
                here.lost_messages
            )));
        }
        self.modes
            .extend([&here, &there].into_iter().filter_map(|end| end.mode.clone()));
        Ok(self.round(what, at, &here, &there))
    }

    /// Runs both programs; what the near and the far one printed. A far one that has no end is stopped.
    fn run(
        &mut self,
        launch: &Launch,
        near: &LinkEnd,
        limit: Duration,
        stop: bool,
    ) -> Result<[String; 2], Failure> {
        self.far.start(launch, limit)?;
        let here = Running::start(launch, Place::Near(&near.interface), self.core, limit);
        let here = match here.and_then(Running::finish) {
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
        let work = work_per_message([(&here.cost, here.messages), (&there.cost, there.messages)]);
        let counts = Round {
            at,
            bytes: there.bytes,
            seconds: there.seconds,
            wakeups_per_message: work.iter().map(|work| work[0]).collect(),
            copied_bytes_per_message: work.iter().map(|work| work[1]).collect(),
            ..Round::default()
        };
        if what != What::Stream {
            let mut histogram = LatencyHistogram::new();
            histogram.record_counts(here.round_trips.iter().copied());
            let quantile = |quantile| Some(histogram.quantile_ns(quantile).unwrap_or(0) as f64);
            let times = Times {
                min_ns: quantile(0.0),
                p50_ns: quantile(0.5).unwrap_or(0.0),
                p99_ns: quantile(0.99),
                p999_ns: quantile(0.999),
                max_ns: quantile(1.0),
                mean_ns: histogram.mean_ns(),
            };
            let round = Round {
                messages: histogram.count(),
                times: Some(times),
                ..counts
            };
            return (round, Some(histogram));
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
        let round = Round {
            messages: there.messages,
            lost_messages: there.lost_messages,
            cpu_seconds_send: here.cost.process_s * part,
            cpu_seconds_receive: there.cost.process_s,
            cpu_seconds_machine: there.cost.machine_s + machine,
            ..counts
        };
        (round, None)
    }
}

/// What an end printed; a bare one has moved packets in the mode that it was started for, or not at all.
fn outcome(launch: &Launch, text: &str) -> Result<Outcome, Failure> {
    let mut outcome: Outcome =
        serde_json::from_str(text).map_err(|error| Failure::new(format!("an end's report: {error}")))?;
    if let Launch::Bare(spec) = launch {
        outcome.mode = Some(spec.mode().to_owned());
    }
    Ok(outcome)
}

/// Wake-ups and copied bytes for each message, of the ends that know.
fn work_per_message(ends: [(&Cost, u64); 2]) -> Vec<[f64; 2]> {
    let of_end = |(cost, messages): (&Cost, u64)| {
        let Work {
            wakeups,
            copied_bytes,
        } = cost.work?;
        Some([wakeups, copied_bytes].map(|count| count as f64 / messages.max(1) as f64))
    };
    ends.into_iter().filter_map(of_end).collect()
}

fn task(what: What, extent: Extent) -> Task {
    let Extent { count, seconds, .. } = extent;
    match what {
        What::RoundTrips => Task::RoundTrips {
            count,
            seconds,
            rate: extent.rate,
        },
        What::Beside => Task::Beside {
            count,
            seconds,
            rate: None,
        },
        What::Stream => Task::Stream {
            warm_up: extent.warm_up,
            seconds,
            rate: extent.bit_rate,
        },
    }
}
