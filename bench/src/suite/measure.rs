//! One measurement: a program on each host, from the far one's start to both reports.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU64;
use std::thread;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::args::CompareArgs;
use super::child::Running;
use super::end::{Outcome, Side, Spec, Task, Work};
use super::host::{LINK, LinkEnd};
use super::schema::{Link, Load, Round, Times, What};
use super::serve::{self, Far, Hello, Request};
use super::systems::{How, System};
use super::tools;
use crate::cli::Failure;
use crate::histogram::LatencyHistogram;
use crate::link::{self, interface_towards};

/// UDP and TCP port of our kernel ends; a second socket has the next one.
const PORT: u16 = 7172;
/// UDP ports of bare streams and round trips: what is left of a stream, in whatever keeps packets on the way, is no answer.
const BARE_PORTS: [u16; 2] = [7300, 7302];
/// Port of a load beside them.
const LOAD_PORT: u16 = 7174;
/// Ports of far ends that are not of this workspace: each program's own.
const IPERF3_PORT: u16 = 5201;
const SOCKPERF_PORT: u16 = 11_111;
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
        let source = lm_dataplane::route::resolve(address, None)?.source;
        let near = LinkEnd::of(source)?;
        if near.link.interface != interface {
            return Err(Failure::new(format!(
                "packets to {address} leave through {interface}, which has not their source address {source}; check \
                 the routes"
            )));
        }
        Ok(Pair {
            near,
            far: far.ask(&Request::Link(address))?,
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
        let without = hosts
            .into_iter()
            .find(|(hello, _)| !hello.tools.iter().any(|one| one == tool));
        without.map(|(_, host)| format!("{tool} is not installed on {host}: apt-get install {tool}"))
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

    /// Measures once. The histogram has round trips of our own ends.
    pub(super) fn measure(
        &mut self,
        system: &System,
        what: What,
        size: u64,
        at: u32,
        args: &CompareArgs,
    ) -> Result<(Round, LatencyHistogram), Failure> {
        let Pair { near, far } = self.pair(system);
        let (interface, is_virtual) = (near.link.interface.clone(), near.is_virtual);
        let link = near.link(far, "");
        let round_trips = what == What::RoundTrips;
        let tool = system.how.tool();
        let spec = |system: &System, task, size, port| Spec {
            system: system.clone(),
            task,
            size,
            address: SocketAddrV4::new(far.address, port),
            mtu: link.mtu,
            mode: system.options.mode.unwrap_or(args.mode),
            senders: 1 + self.also.len() as u32,
            queues: 1,
            pace: None,
            goes_first: false,
        };
        let port = match system.how {
            How::Lm | How::RealTime => lm_dataplane::DEFAULT_PORT,
            How::Bare => BARE_PORTS[usize::from(round_trips)],
            How::Iperf3 | How::Iperf3Tcp => IPERF3_PORT,
            How::Sockperf | How::SockperfSpinning => SOCKPERF_PORT,
            _ => PORT,
        };
        let per_second = |rate: Option<NonZeroU64>| rate.map(|rate| rate.get() as f64);
        let stream = |rate| Task::Stream {
            warm_up: args.warm_up,
            seconds: args.seconds,
            rate: per_second(rate),
        };
        let (count, seconds) = (args.count, args.seconds);
        let task = match what {
            What::Stream => stream(args.bit_rate),
            What::Beside => Task::Beside { count, seconds },
            What::RoundTrips => Task::RoundTrips {
                count,
                seconds,
                rate: per_second(args.rate),
                warm_up: (per_second(args.rate).unwrap_or(0.0) * args.warm_up) as u64,
            },
        };
        let paced = what == What::Stream && self.same_machine() && is_virtual;
        let load = self.load.as_ref().filter(|_| tool.is_none());
        let main = Spec {
            goes_first: load.is_some(),
            queues: link.queues,
            pace: paced.then(|| std::process::id().into()),
            ..spec(system, task, size, port)
        };
        let load = load.map(|load| {
            let (bytes, bits) = (load.options.bytes, load.options.bits);
            spec(load, stream(bits), bytes.bytes(), LOAD_PORT)
        });
        // A far end that only answers has no end of its own.
        let answers = round_trips || tool.is_some();
        let [here, there, beside] = self.run(&main, load.as_ref(), &interface, args, answers)?;
        if let Some(program) = tool {
            return Ok((tools::round(program, at, &here)?, LatencyHistogram::new()));
        }
        let here: Outcome = said(&here)?;
        let there = match round_trips {
            true => Outcome::default(),
            false => said(&there)?,
        };
        if round_trips && args.rate.is_none() && here.lost_messages > 0 {
            return Err(Failure::new(format!(
                "{} answers are missing",
                here.lost_messages
            )));
        }
        self.modes
            .extend([&here, &there].into_iter().filter_map(|end| end.mode.clone()));
        let (round, histogram) = self.round(what, at, &here, &there);
        let load: Option<Load> = load.map(|_| said(&beside)).transpose()?;
        Ok((Round { load, ..round }, histogram))
    }

    /// Runs both programs, and a load beside them; what the near and the far one printed, and the load's far one. A far one that only answers
    /// has no end, and is stopped.
    fn run(
        &mut self,
        main: &Spec,
        load: Option<&Spec>,
        interface: &str,
        args: &CompareArgs,
        answers: bool,
    ) -> Result<[String; 3], Failure> {
        let limit = Duration::from_secs_f64(args.warm_up + args.seconds) + SET_UP;
        let start = |side, spec: &Spec| Request::Start(side, Box::new(spec.clone()), limit.as_secs_f64());
        let mut run_all = || {
            for spec in load.into_iter().chain([main]) {
                self.far.ask::<()>(&start(Side::Far, spec))?;
            }
            let mut running = Vec::new();
            for spec in [main].into_iter().chain(load) {
                if !running.is_empty() {
                    thread::sleep(LOAD_AFTER);
                }
                for other in &mut self.also {
                    other.ask::<()>(&start(Side::Near, spec))?;
                }
                running.push(Running::start(spec, Side::Near, interface, self.core, limit)?);
            }
            let here = running.remove(0).finish()?;
            let mut finish = |ends| match ends {
                true => self.far.ask(&Request::Finish),
                false => Ok(String::new()),
            };
            let beside = finish(load.is_some())?;
            Ok([here, finish(!answers)?, beside])
        };
        let ended = run_all();
        if answers || ended.is_err() {
            self.far.ask::<()>(&Request::Stop)?;
        }
        for other in &mut self.also {
            other.ask::<()>(&Request::Stop)?;
        }
        ended
    }

    /// What both ends have measured: round trips are the near one's, what travels one way is the far one's.
    fn round(&self, what: What, at: u32, here: &Outcome, there: &Outcome) -> (Round, LatencyHistogram) {
        let mut histogram = LatencyHistogram::new();
        histogram.record_counts(here.round_trips.iter().copied());
        let quantile = |quantile| histogram.quantile_ns(quantile).unwrap_or(0) as f64;
        let is_stream = what == What::Stream;
        let times = Times {
            min_ns: Some(quantile(0.0)),
            p50_ns: quantile(0.5),
            p99_ns: Some(quantile(0.99)),
            p999_ns: Some(quantile(0.999)),
            max_ns: Some(quantile(1.0)),
            mean_ns: histogram.mean_ns(),
        };
        let counted = if is_stream { there } else { here };
        // The sender's time may have counted a little longer or shorter.
        let part = match here.seconds > 0.0 {
            true => there.seconds / here.seconds,
            false => 1.0,
        };
        let machine = match self.same_machine() {
            true => 0.0,
            false => here.cost.machine_s * part,
        };
        let per_message = |of: fn(Work) -> u64| {
            let of_end = |end: &&Outcome| Some(of(end.cost.work?) as f64 / end.messages.max(1) as f64);
            [here, there].iter().filter_map(of_end).collect()
        };
        let round = Round {
            at,
            messages: counted.messages,
            lost_messages: counted.lost_messages,
            bytes: there.bytes,
            seconds: there.seconds,
            cpu_seconds_send: here.cost.process_s * part,
            cpu_seconds_receive: there.cost.process_s,
            cpu_seconds_machine: there.cost.machine_s + machine,
            times: (!is_stream).then_some(times),
            wakeups_per_message: per_message(|work| work.wakeups),
            copied_bytes_per_message: per_message(|work| work.copied_bytes),
            load: None,
        };
        (round, histogram)
    }
}

/// What an end printed.
fn said<T: DeserializeOwned>(text: &str) -> Result<T, Failure> {
    serde_json::from_str(text).map_err(|error| Failure::new(format!("an end's report: {error}")))
}
