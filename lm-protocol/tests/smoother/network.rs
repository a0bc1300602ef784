//! Hosts that send into one port of a switch (SS-RTUDP, figure 10), under virtual time and from a seed.
//!
//! ```text
//! others ─ leaf ─ HTB or credits ─┐
//!                                 ├─ the host's link ─ the switch's port: a FIFO that drops its tail ─ receiver ─ RT_REPORT ─ smoother
//! real-time ──────────────────────┘
//! ```
//!
//! All frames have the paper's length, so that a link or a port needs no more than the moment at which all its frames are through. A host has no
//! more than one event of a kind to come, and hosts meet at the port alone: the next event is the earliest of a few numbers.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

use lm_protocol::smoother::{Law, Parameters, Smoother};
use lm_protocol::time::Time;

/// 1500 bytes and an Ethernet header (table 4's rates have 1516, with padding).
const FRAME_LEN_BYTES: u16 = 1514;
/// The same on the wire.
const WIRE_LEN_BITS: u64 = (FRAME_LEN_BYTES as u64 + 24) * 8;
/// While packets come.
const REPORT_INTERVAL_NS: u64 = 5_000_000;
/// A report's way: two links, a switch, a kernel's wake-up.
const REPORT_DELAY_NS: u64 = 100_000;
/// Packets of others that come at once.
const BURST: u64 = 10;
const SECOND_NS: u64 = 1_000_000_000;

/// How others are held back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Held {
    /// Not at all.
    Not,
    /// The kernel's packets, by an HTB class that has the smoother's rate without what LM sends.
    ByHtb(Law),
    /// LM's own packets, by the smoother's credits.
    ByCredits(Law),
    /// By an HTB class of so many packets a second.
    Fixed(f64),
}

/// What a host offers, in packets a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered {
    pub(crate) real_time: u64,
    pub(crate) others: u64,
}

/// Figure 10's.
pub(crate) const PAPER: Offered = Offered {
    real_time: 400,
    others: 2500,
};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Bed {
    pub(crate) link_bits_per_second: u64,
    pub(crate) port_frames: u64,
    pub(crate) held: Held,
}

/// Figure 10's.
pub(crate) const FIGURE_10: Bed = Bed {
    link_bits_per_second: 100_000_000,
    port_frames: 32,
    held: Held::Not,
};

/// Packets of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    /// By the leaf of the host's own HTB.
    pub(crate) leaf_drops: u64,
    pub(crate) port_drops: u64,
    pub(crate) delivered: u64,
}

impl Tally {
    pub(crate) fn lost(&self) -> f64 {
        (self.leaf_drops + self.port_drops) as f64 / self.sent as f64
    }

    pub(crate) fn since(&self, before: &Tally) -> Tally {
        Tally {
            sent: self.sent - before.sent,
            leaf_drops: self.leaf_drops - before.leaf_drops,
            port_drops: self.port_drops - before.port_drops,
            delivered: self.delivered - before.delivered,
        }
    }
}

impl std::iter::Sum for Tally {
    fn sum<I: Iterator<Item = Tally>>(tallies: I) -> Tally {
        tallies.fold(Tally::default(), |sum, tally| Tally {
            sent: sum.sent + tally.sent,
            leaf_drops: sum.leaf_drops + tally.leaf_drops,
            port_drops: sum.port_drops + tally.port_drops,
            delivered: sum.delivered + tally.delivered,
        })
    }
}

/// A class of HTB: the kernel lets a frame go while there are tokens, and takes its length then.
struct Htb {
    rate_bits_per_second: u64,
    /// Billionths of a bit.
    tokens: i64,
    filled_ns: u64,
}

const FRAME_TOKENS: i64 = (WIRE_LEN_BITS * SECOND_NS) as i64;

impl Htb {
    fn may_send(&mut self, now_ns: u64) -> bool {
        let brought = (now_ns - self.filled_ns).saturating_mul(self.rate_bits_per_second);
        self.tokens = self
            .tokens
            .saturating_add(brought as i64 & i64::MAX)
            .min(2 * FRAME_TOKENS);
        self.filled_ns = now_ns;
        self.tokens > 0
    }

    fn next_ns(&self) -> u64 {
        let lacking = (1 - self.tokens).max(0) as u64;
        self.filled_ns + lacking.div_ceil(self.rate_bits_per_second)
    }
}

/// Frames on a link or at a port of it: up to when they take.
#[derive(Clone, Copy)]
struct Link {
    frame_ns: u64,
    free_ns: u64,
}

impl Link {
    fn push(&mut self, now_ns: u64) -> u64 {
        self.free_ns = self.free_ns.max(now_ns) + self.frame_ns;
        self.free_ns
    }
}

/// A frame on its way.
struct Frame {
    /// When it is through the link or the port that it is in.
    through_ns: u64,
    /// Of a real-time packet: 1, 2, …; 0: of others.
    number: u64,
    sent_ns: u64,
}

/// What the receiver knows of a host's flow.
#[derive(Default)]
struct Flow {
    newest: u64,
    lost: u64,
    /// Of the fastest packet: what all others took longer is what they waited.
    delay_least_ns: u64,
    delay_ns: Option<u64>,
    has_news: bool,
}

struct Report {
    arrives_ns: u64,
    lost: u64,
    delay_ns: u64,
}

struct Host {
    offered: Offered,
    smoother: Option<Smoother>,
    htb: Option<Htb>,
    link: Link,
    /// Others that wait in the leaf, and how many it holds.
    waiting: u64,
    leaf_frames: u64,
    /// Real-time packets between the last refreshes, and since the last one.
    departures: [u64; 5],
    refreshed_ns: [u64; 5],
    on_link: VecDeque<Frame>,
    /// Real-time packets in the port.
    in_port: VecDeque<Frame>,
    flow: Flow,
    reports: VecDeque<Report>,
    /// When LM hears that it misses others.
    missed_ns: VecDeque<u64>,
    /// Losses that a report has told of.
    lost: u64,
    /// When the port dropped real-time packets that its host has not answered with a lower rate, and how long others waited for one.
    dropped_ns: Vec<u64>,
    answered_ns: Vec<u64>,
    real_time: Tally,
    others: Tally,
    /// When each event comes, and the earliest of them.
    due_ns: [u64; EVENTS.len()],
    next_ns: u64,
}

#[derive(Clone, Copy)]
enum Event {
    /// A host has a real-time packet.
    RealTime,
    /// A host has a burst of others.
    Burst,
    /// An other may leave the leaf.
    Release,
    /// A frame has come through its host's link.
    AtPort,
    /// A real-time packet has come through the port.
    Received,
    /// Others of LM are missed.
    Missed,
    /// The receiver's interval ends.
    Interval,
    Report,
    Refresh,
}

const NEVER: u64 = u64::MAX;

const EVENTS: [Event; 9] = [
    Event::RealTime,
    Event::Burst,
    Event::Release,
    Event::AtPort,
    Event::Received,
    Event::Missed,
    Event::Interval,
    Event::Report,
    Event::Refresh,
];

pub(crate) struct Network {
    bed: Bed,
    now_ns: u64,
    hosts: Vec<Host>,
    port: Link,
    random: u64,
}

impl Network {
    pub(crate) fn new(bed: Bed, offered: &[Offered], seed: u64) -> Network {
        let frame_ns = WIRE_LEN_BITS * SECOND_NS / bed.link_bits_per_second;
        let link = Link { frame_ns, free_ns: 0 };
        let mut network = Network {
            bed,
            now_ns: 0,
            hosts: offered
                .iter()
                .map(|offered| Host::new(&bed, *offered, link))
                .collect(),
            port: link,
            random: seed,
        };
        for host in 0..offered.len() {
            let interval_ns = network.below(REPORT_INTERVAL_NS);
            network.at(interval_ns, host, Event::Interval);
            if let Some(smoother) = &network.hosts[host].smoother {
                let refresh_ns = smoother.next_refresh().as_nanos();
                network.at(refresh_ns, host, Event::Refresh);
            }
            network.stop(host, false);
        }
        network
    }

    /// A host sends nothing more, or begins to.
    pub(crate) fn stop(&mut self, host: usize, is_stopped: bool) {
        if is_stopped {
            self.at(NEVER, host, Event::RealTime);
            self.at(NEVER, host, Event::Burst);
        } else {
            let period_ns = SECOND_NS / self.hosts[host].offered.real_time;
            let real_time_ns = self.now_ns + self.below(period_ns);
            self.at(real_time_ns, host, Event::RealTime);
            self.next_burst(host);
        }
        self.hosts[host].find_next();
    }

    pub(crate) fn run_until(&mut self, end: Duration) {
        let end_ns = end.as_nanos() as u64;
        loop {
            let (mut host, mut next_ns) = (0, end_ns);
            for (at, sender) in self.hosts.iter().enumerate() {
                if sender.next_ns < next_ns {
                    (host, next_ns) = (at, sender.next_ns);
                }
            }
            self.now_ns = next_ns;
            if next_ns == end_ns {
                return;
            }
            for event in EVENTS {
                if self.hosts[host].due_ns[event as usize] == next_ns {
                    self.hosts[host].due_ns[event as usize] = NEVER;
                    self.step(event, host);
                }
            }
            self.hosts[host].find_next();
        }
    }

    pub(crate) fn real_time(&self) -> Tally {
        self.hosts.iter().map(|host| host.real_time).sum()
    }

    /// How long each dropped real-time packet waited for its host's lower rate.
    pub(crate) fn answered_ns(&self) -> impl Iterator<Item = u64> {
        self.hosts
            .iter()
            .flat_map(|host| host.answered_ns.iter().copied())
    }

    pub(crate) fn others(&self) -> Tally {
        self.hosts.iter().map(|host| host.others).sum()
    }

    pub(crate) fn others_of(&self, host: usize) -> Tally {
        self.hosts[host].others
    }

    /// Packets that were sent and are neither delivered nor dropped.
    pub(crate) fn under_way(&self) -> u64 {
        let in_host = |host: &Host| host.waiting + (host.on_link.len() + host.in_port.len()) as u64;
        self.hosts.iter().map(in_host).sum()
    }

    #[inline]
    fn at(&mut self, time_ns: u64, host: usize, event: Event) {
        self.hosts[host].due_ns[event as usize] = time_ns;
    }

    #[inline]
    fn below(&mut self, below: u64) -> u64 {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ z >> 31) * u128::from(below)) >> 64) as u64
    }

    fn next_burst(&mut self, host: usize) {
        let mean_ns = BURST * SECOND_NS / self.hosts[host].offered.others;
        let unit = (self.below(1 << 53) + 1) as f64 / (1u64 << 53) as f64;
        let gap_ns = (-unit.ln() * mean_ns as f64) as u64;
        self.at(self.now_ns + gap_ns, host, Event::Burst);
    }

    fn step(&mut self, event: Event, host: usize) {
        let now_ns = self.now_ns;
        match event {
            Event::RealTime => {
                self.hosts[host].send_real_time(now_ns);
                // A period ± 50 %.
                let period_ns = SECOND_NS / self.hosts[host].offered.real_time;
                let next_ns = now_ns + period_ns / 2 + self.below(period_ns);
                self.at(next_ns, host, Event::RealTime);
            }
            Event::Burst => {
                self.hosts[host].queue_burst();
                self.next_burst(host);
                self.hosts[host].release(self.bed.held, now_ns);
            }
            Event::Release => self.hosts[host].release(self.bed.held, now_ns),
            Event::AtPort => self.at_port(host),
            Event::Received => self.hosts[host].received(now_ns),
            Event::Missed => self.hosts[host].missed(now_ns),
            Event::Interval => {
                self.at(now_ns + REPORT_INTERVAL_NS, host, Event::Interval);
                if self.hosts[host].flow.has_news {
                    self.hosts[host].report(now_ns);
                }
            }
            Event::Report => self.hosts[host].reported(now_ns),
            Event::Refresh => self.hosts[host].refresh(now_ns),
        }
    }

    /// A frame comes to the port, which takes it or is full.
    fn at_port(&mut self, host: usize) {
        let full_ns = self.now_ns + (self.bed.port_frames - 1) * self.port.frame_ns;
        let is_taken = self.port.free_ns <= full_ns;
        if is_taken {
            self.port.push(self.now_ns);
        }
        self.hosts[host].left_link(is_taken, self.port.free_ns, self.bed.held);
    }
}

impl Host {
    fn new(bed: &Bed, offered: Offered, link: Link) -> Host {
        let link_rate = NonZeroU64::new(bed.link_bits_per_second).unwrap();
        let smoother = match bed.held {
            Held::Not | Held::Fixed(_) => None,
            Held::ByHtb(law) | Held::ByCredits(law) => {
                let parameters = Parameters {
                    law,
                    ..Parameters::of_link(link_rate, FRAME_LEN_BYTES)
                };
                Some(Smoother::new(parameters, Time::ZERO).unwrap())
            }
        };
        let htb = |packets_per_second: f64| Htb {
            rate_bits_per_second: (packets_per_second * WIRE_LEN_BITS as f64) as u64,
            tokens: 2 * FRAME_TOKENS,
            filled_ns: 0,
        };
        let mut host = Host {
            offered,
            htb: match bed.held {
                Held::Fixed(packets_per_second) => Some(htb(packets_per_second)),
                Held::ByHtb(_) => Some(htb(1.0)),
                Held::Not | Held::ByCredits(_) => None,
            },
            smoother,
            link,
            waiting: 0,
            leaf_frames: match bed.held {
                Held::Fixed(packets_per_second) => leaf_frames(packets_per_second),
                _ => u64::MAX,
            },
            departures: [0; 5],
            refreshed_ns: [0; 5],
            on_link: VecDeque::new(),
            in_port: VecDeque::new(),
            flow: Flow {
                delay_least_ns: NEVER,
                ..Flow::default()
            },
            reports: VecDeque::new(),
            missed_ns: VecDeque::new(),
            lost: 0,
            dropped_ns: Vec::new(),
            answered_ns: Vec::new(),
            real_time: Tally::default(),
            others: Tally::default(),
            due_ns: [NEVER; EVENTS.len()],
            next_ns: NEVER,
        };
        host.told(0, |_| {});
        host
    }

    fn find_next(&mut self) {
        let mut next_ns = NEVER;
        for due_ns in self.due_ns {
            next_ns = next_ns.min(due_ns);
        }
        self.next_ns = next_ns;
    }

    fn send_real_time(&mut self, now_ns: u64) {
        if let Some(smoother) = &mut self.smoother {
            smoother.spend(1, Time::from_nanos(now_ns));
        }
        self.departures[4] += 1;
        self.real_time.sent += 1;
        self.onto_link(self.real_time.sent, now_ns);
    }

    fn onto_link(&mut self, number: u64, now_ns: u64) {
        let through_ns = self.link.push(now_ns);
        if self.on_link.is_empty() {
            self.due_ns[Event::AtPort as usize] = through_ns;
        }
        self.on_link.push_back(Frame {
            through_ns,
            number,
            sent_ns: now_ns,
        });
    }

    /// A burst of others comes to the leaf.
    fn queue_burst(&mut self) {
        self.others.sent += BURST;
        let room = self.leaf_frames.saturating_sub(self.waiting);
        self.others.leaf_drops += BURST.saturating_sub(room);
        self.waiting += BURST.min(room);
    }

    /// Others leave the leaf as long as they may.
    fn release(&mut self, held: Held, now_ns: u64) {
        while self.waiting > 0 {
            if let Some(next_ns) = self.take(held, now_ns) {
                self.due_ns[Event::Release as usize] = next_ns;
                return;
            }
            self.waiting -= 1;
            self.onto_link(0, now_ns);
        }
    }

    /// The first frame of the link came to the port, which has taken it, and is through with all of its own at a moment.
    fn left_link(&mut self, is_taken: bool, through_ns: u64, held: Held) {
        let frame = self.on_link.pop_front().unwrap();
        let next = self.on_link.front().map_or(NEVER, |frame| frame.through_ns);
        self.due_ns[Event::AtPort as usize] = next;
        match (frame.number, is_taken) {
            (0, true) => self.others.delivered += 1,
            (0, false) => {
                self.others.port_drops += 1;
                if let Held::ByCredits(_) = held {
                    self.missed_ns.push_back(through_ns + REPORT_DELAY_NS);
                    self.due_ns[Event::Missed as usize] = self.missed_ns[0];
                }
            }
            (_, true) => {
                self.in_port.push_back(Frame { through_ns, ..frame });
                self.due_ns[Event::Received as usize] = self.in_port[0].through_ns;
            }
            (_, false) => {
                self.real_time.port_drops += 1;
                self.dropped_ns.push(frame.through_ns);
            }
        }
    }

    /// A real-time packet came through the port.
    fn received(&mut self, now_ns: u64) {
        let frame = self.in_port.pop_front().unwrap();
        let next = self.in_port.front().map_or(NEVER, |frame| frame.through_ns);
        self.due_ns[Event::Received as usize] = next;
        self.real_time.delivered += 1;
        let flow = &mut self.flow;
        let delay_ns = now_ns - frame.sent_ns;
        flow.delay_least_ns = flow.delay_least_ns.min(delay_ns);
        let waited_ns = delay_ns - flow.delay_least_ns;
        flow.delay_ns = Some(flow.delay_ns.map_or(waited_ns, |before| before.min(waited_ns)));
        let missing = frame.number - flow.newest - 1;
        flow.newest = frame.number;
        flow.lost += missing;
        flow.has_news = true;
        if missing > 0 {
            self.report(now_ns);
        }
    }

    fn report(&mut self, now_ns: u64) {
        self.reports.push_back(Report {
            arrives_ns: now_ns + REPORT_DELAY_NS,
            lost: self.flow.lost,
            delay_ns: self.flow.delay_ns.take().unwrap_or_default(),
        });
        self.due_ns[Event::Report as usize] = self.reports[0].arrives_ns;
        self.flow.has_news = false;
    }

    fn reported(&mut self, now_ns: u64) {
        let now = Time::from_nanos(now_ns);
        let report = self.reports.pop_front().unwrap();
        let next = self.reports.front().map_or(NEVER, |report| report.arrives_ns);
        self.due_ns[Event::Report as usize] = next;
        let lost = (report.lost - self.lost) as u32;
        self.lost = report.lost;
        self.told(now_ns, |smoother| {
            if lost > 0 {
                smoother.lost(lost, now);
            }
            smoother.delayed(Duration::from_nanos(report.delay_ns), now);
        });
    }

    fn missed(&mut self, now_ns: u64) {
        self.missed_ns.pop_front();
        self.due_ns[Event::Missed as usize] = self.missed_ns.front().copied().unwrap_or(NEVER);
        self.told(now_ns, |smoother| smoother.lost(1, Time::from_nanos(now_ns)));
    }

    fn refresh(&mut self, now_ns: u64) {
        self.departures.rotate_left(1);
        self.departures[4] = 0;
        self.refreshed_ns.rotate_left(1);
        self.refreshed_ns[4] = now_ns;
        self.told(now_ns, |smoother| smoother.advance(Time::from_nanos(now_ns)));
        let smoother = self.smoother.as_ref().unwrap();
        self.due_ns[Event::Refresh as usize] = smoother.next_refresh().as_nanos();
    }

    /// The smoother is told something; then the kernel's class is set if its rate is another by 2 %.
    fn told(&mut self, now_ns: u64, what: impl FnOnce(&mut Smoother)) {
        let Some(smoother) = &mut self.smoother else {
            return;
        };
        let before = smoother.rate().credits_per_second();
        what(smoother);
        if smoother.rate().credits_per_second() < before {
            self.answered_ns
                .extend(self.dropped_ns.drain(..).map(|dropped_ns| now_ns - dropped_ns));
        }
        let rate = f64::from(smoother.rate().credits_per_second());
        let Some(htb) = &mut self.htb else {
            self.leaf_frames = leaf_frames(rate);
            return;
        };
        let refreshed_ns = self.refreshed_ns[4] - self.refreshed_ns[0];
        let departures: u64 = self.departures[..4].iter().sum();
        let departures = departures as f64 * SECOND_NS as f64 / refreshed_ns.max(1) as f64;
        let share = ((rate - departures) * WIRE_LEN_BITS as f64).max(64_000.0) as u64;
        if share.abs_diff(htb.rate_bits_per_second) * 50 >= htb.rate_bits_per_second {
            htb.rate_bits_per_second = share;
            self.leaf_frames = leaf_frames(share as f64 / WIRE_LEN_BITS as f64);
        }
    }

    /// An other leaves, or when it may.
    fn take(&mut self, held: Held, now_ns: u64) -> Option<u64> {
        if held == Held::Not {
            return None;
        }
        match (&mut self.htb, &mut self.smoother) {
            (Some(htb), smoother) => {
                if !htb.may_send(now_ns) {
                    if let Some(smoother) = smoother {
                        smoother.credits().others_wait();
                    }
                    return Some(htb.next_ns());
                }
                htb.tokens -= FRAME_TOKENS;
                None
            }
            (None, Some(smoother)) => match smoother.take(1, Time::from_nanos(now_ns)) {
                0 => smoother.next().map(|next| next.as_nanos()),
                _ => None,
            },
            (None, None) => None,
        }
    }
}

/// 50 ms of a rate, in 64 KB to 4 MB.
fn leaf_frames(packets_per_second: f64) -> u64 {
    let frame_len_bytes = f64::from(FRAME_LEN_BYTES);
    let bytes = (packets_per_second * frame_len_bytes * 0.05).clamp(64e3, 4e6);
    (bytes / frame_len_bytes) as u64
}
