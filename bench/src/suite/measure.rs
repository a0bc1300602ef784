//! One measurement: a program on each host, from the far one's start to both reports.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU64;
use std::thread;
use std::time::Duration;

use super::args::CompareArgs;
use super::child::{Launch, Place, Running};
use super::end::{Cost, Outcome, Spec, Task, Work};
use super::host::{LINK, LinkEnd};
use super::schema::{Link, Load, Round, Times, What};
use super::serve::{self, Far, Hello};
use super::systems::{How, System};
use super::tools::ToolSpec;
use crate::cli::Failure;
use crate::histogram::LatencyHistogram;
use crate::link::{self, interface_towards};

/// UDP and TCP port of our kernel ends; a second socket has the next one.
const PORT: u16 = 7172;
/// UDP ports of bare streams and round trips: what is left of a stream, in whatever keeps packets on the way, is no answer.
const BARE_PORTS: [u16; 2] = [7300, 7302];
/// Port of a load beside them.
const LOAD_PORT: u16 = 7174;
/// How much later a load begins: what holds it back is there then.
const LOAD_AFTER: Duration = Duration::from_millis(300);
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

/// Both hosts and the links between them.
pub(super) struct Bench {
    pub(super) far: Far,
    core: u32,
    pub(super) main: Pair,
    /// For the kernel's systems, where it is not the same.
    pub(super) plain: Option<Pair>,
    pub(super) here: Hello,
    /// Hosts that send, too.
    also: Vec<Far>,
    /// A stream beside each measurement.
    load: Option<System>,
    /// How AF_XDP has moved packets, as ends have told.
    modes: BTreeSet<String>,
}

impl Bench {
    pub(super) fn connect(args: &CompareArgs) -> Result<Bench, Failure> {
        let control = |host: &String| match host.contains(':') {
            true => link::resolve(host),
            false => link::resolve(&format!("{host}:{}", serve::PORT)),
        };
        let to = control(&args.host)?;
        let mut far = Far::connect(to)?;
        let plain = args.peer_host.map(|address| Pair::new(&mut far, address));
        let also = args.also.iter().map(|host| Far::connect(control(host)?));
        Ok(Bench {
            main: Pair::new(&mut far, *to.ip())?,
            plain: plain.transpose()?,
            far,
            core: args.core,
            here: Hello::of_this_host(args.core),
            also: also.collect::<Result<_, _>>()?,
            load: args.load.clone(),
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
        args: &CompareArgs,
    ) -> Result<(Round, Option<LatencyHistogram>), Failure> {
        let pair = self.pair(system);
        let (near, far) = (pair.near.clone(), pair.far.clone());
        let limit = Duration::from_secs_f64(args.warm_up + args.seconds) + SET_UP;
        let round_trips = what == What::RoundTrips;
        if let Some(tool) = system.how.tool() {
            let spec = ToolSpec {
                tool,
                address: SocketAddrV4::new(far.address, tool.port()),
                size,
                seconds: args.seconds,
            };
            let [here, ..] = self.run(&Launch::Tool(spec.clone()), None, &near, limit, true)?;
            return Ok((spec.round(at, &here)?, None));
        }
        let (address, mtu) = (far.address, near.mtu.min(far.mtu));
        let senders = 1 + self.also.len() as u32;
        let spec = |system: &System, task, size, port| Spec {
            system: system.clone(),
            task,
            size,
            address: SocketAddrV4::new(address, port),
            mtu,
            mode: system.options.mode.unwrap_or(args.mode),
            senders,
            queues: 1,
            pace: None,
            goes_first: false,
        };
        let port = match (system.how, round_trips) {
            (How::Lm | How::RealTime, _) => lm_dataplane::DEFAULT_PORT,
            (How::Bare, _) => BARE_PORTS[usize::from(round_trips)],
            _ => PORT,
        };
        let paced = what == What::Stream && self.same_machine() && near.is_virtual();
        let launch = Launch::End(Spec {
            goes_first: self.load.is_some(),
            queues: near.queues.min(far.queues),
            pace: paced.then(|| std::process::id().into()),
            ..spec(system, task(what, args), size, port)
        });
        let load = self.load.as_ref().map(|load| {
            let (options, task) = (&load.options, task(What::Stream, args));
            let task = match task {
                Task::Stream { warm_up, seconds, .. } => Task::Stream {
                    warm_up,
                    seconds,
                    rate: options.bits.map(|bits| bits.get() as f64),
                },
                other => other,
            };
            Launch::End(spec(load, task, options.bytes.bytes(), LOAD_PORT))
        });
        // A far end that only answers has no end of its own.
        let [here, there, beside] = self.run(&launch, load.as_ref(), &near, limit, round_trips)?;
        let here = outcome(&here)?;
        let there = match round_trips {
            true => Outcome::default(),
            false => outcome(&there)?,
        };
        if round_trips && args.rate.is_none() && here.lost_messages > 0 {
            return Err(Failure::new(format!(
                "{} answers are missing",
                here.lost_messages
            )));
        }
        let load = load.map(|_| outcome(&beside)).transpose()?;
        self.modes
            .extend([&here, &there].into_iter().filter_map(|end| end.mode.clone()));
        let (round, histogram) = self.round(what, at, &here, &there);
        let load = load.map(|load| Load {
            bytes: load.bytes,
            seconds: load.seconds,
            messages: load.messages,
            lost_messages: load.lost_messages,
        });
        Ok((Round { load, ..round }, histogram))
    }

    /// Runs both programs, and a load beside them; what the near and the far one printed, and the load's far one. A far one that has no end is
    /// stopped.
    fn run(
        &mut self,
        launch: &Launch,
        load: Option<&Launch>,
        near: &LinkEnd,
        limit: Duration,
        stop: bool,
    ) -> Result<[String; 3], Failure> {
        let ended = self.run_all(launch, load, near, limit, stop);
        if stop || ended.is_err() {
            self.far.stop()?;
        }
        self.also.iter_mut().try_for_each(Far::stop)?;
        ended
    }

    fn run_all(
        &mut self,
        launch: &Launch,
        load: Option<&Launch>,
        near: &LinkEnd,
        limit: Duration,
        stop: bool,
    ) -> Result<[String; 3], Failure> {
        for launch in load.into_iter().chain([launch]) {
            self.far.start(launch, limit)?;
        }
        let mut running = Vec::new();
        for launch in [launch].into_iter().chain(load) {
            if !running.is_empty() {
                thread::sleep(LOAD_AFTER);
            }
            for other in &mut self.also {
                other.send(launch, limit)?;
            }
            running.push(Running::start(
                launch,
                Place::Near(&near.interface),
                self.core,
                limit,
            )?);
        }
        let here = running.remove(0).finish()?;
        let beside = match load {
            Some(_) => self.far.finish()?,
            None => String::new(),
        };
        let there = match stop {
            true => String::new(),
            false => self.far.finish()?,
        };
        Ok([here, there, beside])
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
                lost_messages: here.lost_messages,
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

/// What an end printed.
fn outcome(text: &str) -> Result<Outcome, Failure> {
    serde_json::from_str(text).map_err(|error| Failure::new(format!("an end's report: {error}")))
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

fn task(what: What, args: &CompareArgs) -> Task {
    let CompareArgs {
        count,
        seconds,
        warm_up,
        ..
    } = *args;
    let per_second = |rate: Option<NonZeroU64>| rate.map(|rate| rate.get() as f64);
    match what {
        What::RoundTrips => Task::RoundTrips {
            count,
            seconds,
            rate: per_second(args.rate),
            warm_up: (per_second(args.rate).unwrap_or(0.0) * warm_up) as u64,
        },
        What::Beside => Task::Beside { count, seconds },
        What::Stream => Task::Stream {
            warm_up,
            seconds,
            rate: per_second(args.bit_rate),
        },
    }
}
