//! Many hosts under one virtual time, on a network that loses, doubles, delays and reorders; hosts and daemons that die and come
//! back, and somebody who records everything and sends it again. All of it from one seed.

pub(crate) use crate::cluster::*;
use crate::gate::*;
use lm_protocol::admission::*;
use lm_protocol::session::Session;
use lm_protocol::time::Time;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// The data queue of every host.
const QUEUE: u16 = 1;
/// Datagrams that the attacker keeps.
const RECORDED: usize = 256;
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Datagram {
        to: usize,
        from: usize,
        datagram: Datagram,
    },
    Wake {
        host: usize,
        life: u64,
    },
    Start {
        job: u64,
    },
    Finish {
        job: u64,
    },
    /// The job must have been told by now.
    Judge {
        job: u64,
    },
    Die {
        host: usize,
        death: Death,
    },
    Begin {
        host: usize,
    },
    Attack,
    Audit,
}

pub(crate) struct World {
    pub(crate) setup: Setup,
    pub(crate) now: Time,
    pub(crate) random: Random,
    pub(crate) hosts: Vec<Host>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) events: BTreeMap<(Time, u64), Event>,
    sequence: u64,
    pub(crate) recorded: VecDeque<(usize, usize, Datagram)>,
    tickets: BTreeMap<(usize, Ticket), usize>,
    /// Hosts whose gate admits, or did lately.
    active: BTreeSet<usize>,
    pub(crate) datagrams: u64,
    pub(crate) most_active: usize,
    pub(crate) attacks: u64,
    /// Actions are put into `aside`, for the test to do.
    pub(crate) is_aside: bool,
    pub(crate) aside: Vec<(usize, Action)>,
    /// Tickets that are no job's are the test's own.
    pub(crate) is_lenient: bool,
}

impl World {
    pub(crate) fn new(setup: Setup) -> World {
        let mut random = Random(setup.seed);
        let hosts = (0..setup.hosts)
            .map(|host| {
                let (offset, rate) = match setup.is_drifting {
                    true => (random.below(1 << 40), 1024 - DRIFT + random.below(2 * DRIFT + 1)),
                    false => (0, 1024),
                };
                Host {
                    address: address(host),
                    node: None,
                    gate: Gate {
                        is_exclusive: setup.voters > 0,
                        ..Gate::new(host, setup.places)
                    },
                    life: 0,
                    offset,
                    rate,
                    wake: None,
                    kept: Vec::new(),
                    last_active: None,
                    began: Time::ZERO,
                }
            })
            .collect();
        let mut world = World {
            now: Time::ZERO,
            random,
            hosts,
            jobs: Vec::new(),
            events: BTreeMap::new(),
            sequence: 0,
            recorded: VecDeque::new(),
            tickets: BTreeMap::new(),
            active: BTreeSet::new(),
            datagrams: 0,
            most_active: 0,
            attacks: 0,
            is_aside: false,
            aside: Vec::new(),
            is_lenient: false,
            setup,
        };
        for host in 0..world.setup.hosts {
            world.begin(host);
        }
        world
    }

    fn at(&mut self, at: Time, event: Event) {
        self.sequence += 1;
        self.events.insert((at.max(self.now), self.sequence), event);
    }

    /// A program at `sender` will want to send `len` bytes to `receiver`, which takes `hold`.
    pub(crate) fn job(&mut self, at: Time, sender: usize, receiver: usize, len: u64, hold: Duration) -> u64 {
        let job = self.jobs.len() as u64;
        self.jobs.push(Job {
            sender,
            receiver,
            len,
            hold,
            fate: Fate::Nothing,
            asked: at,
            granted: None,
            is_rejected: false,
            life: 0,
            ticket: None,
            grant: None,
            gone: None,
        });
        self.at(at, Event::Start { job });
        job
    }

    pub(crate) fn die(&mut self, at: Time, host: usize, death: Death, down: Duration) {
        self.at(at, Event::Die { host, death });
        self.at(at + down, Event::Begin { host });
    }

    pub(crate) fn attack(&mut self, at: Time) {
        self.at(at, Event::Attack);
    }

    pub(crate) fn audit(&mut self, at: Time) {
        self.at(at, Event::Audit);
    }

    /// Runs until a moment, or until nothing can happen any more.
    pub(crate) fn run(&mut self, until: Time) {
        while let Some((&(at, sequence), _)) = self.events.first_key_value()
            && at <= until
        {
            let event = self.events.remove(&(at, sequence)).unwrap();
            self.now = at;
            self.step(event);
        }
        if until != Time::MAX {
            self.now = until;
        }
    }

    fn step(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Datagram { to, from, datagram } => {
                let name = self.hosts[from].address;
                let is_heard = self.with(to, |node, local_now, local, out| {
                    let strangers = node.counters().strangers;
                    node.on_datagram(local_now, name, datagram.as_bytes(), local, out);
                    node.counters().strangers == strangers
                });
                // What nobody took may be taken once, later.
                if is_heard == Some(true) {
                    self.recorded.push_back((to, from, datagram));
                }
                if self.recorded.len() > RECORDED {
                    self.recorded.pop_front();
                }
            }
            Event::Wake { host, life } => {
                if self.hosts[host].life == life && self.hosts[host].wake.is_some_and(|wake| wake <= now) {
                    self.hosts[host].wake = None;
                    self.with(host, |node, local_now, local, out| {
                        node.on_timer(local_now, local, out)
                    });
                }
            }
            Event::Start { job } => self.start(job),
            Event::Finish { job } => self.finish(job),
            Event::Judge { job } => {
                let Job {
                    fate, life, sender, ..
                } = self.jobs[job as usize];
                let is_same_life = self.hosts[sender].node.is_some() && self.hosts[sender].life == life;
                assert!(
                    fate != Fate::Asking || !is_same_life,
                    "job {job} was told nothing: {:?}",
                    self.jobs[job as usize]
                );
            }
            Event::Die { host, death } => self.end_life(host, death),
            Event::Begin { host } => self.begin(host),
            Event::Attack => self.strike(),
            Event::Audit => self.look(),
        }
    }

    /// Lets a host's node do something, and does what it says.
    pub(crate) fn with<R>(
        &mut self,
        host: usize,
        act: impl FnOnce(&mut Node, Time, &mut Local<'_>, &mut Vec<Action>) -> R,
    ) -> Option<R> {
        let now = self.now;
        let it = &mut self.hosts[host];
        let local_now = it.local(now);
        let node = it.node.as_mut()?;
        let mut permit = permit();
        let mut local = Local {
            policy: &mut permit,
            landing: &mut it.gate,
        };
        let mut out = Vec::new();
        let result = act(node, local_now, &mut local, &mut out);
        let deadline = node.next_deadline().map(|local| it.global(local).max(now));
        if let Some(deadline) = deadline
            && it.wake.is_none_or(|wake| deadline < wake)
        {
            it.wake = Some(deadline);
            let life = it.life;
            self.at(deadline, Event::Wake { host, life });
        }
        if self.is_aside {
            self.aside.extend(out.into_iter().map(|action| (host, action)));
            return Some(result);
        }
        for action in out {
            self.act(host, action);
        }
        self.check_active(host);
        Some(result)
    }

    fn act(&mut self, host: usize, action: Action) {
        match action {
            Action::Send { to, datagram } => {
                let to = u32::from(*to.ip()) - 0x0a00_0001;
                self.transmit(host, to as usize, datagram);
            }
            Action::SendToAll { datagram } => {
                for to in (0..self.hosts.len()).filter(|&to| to != host) {
                    self.transmit(host, to, datagram);
                }
            }
            Action::Tell { ticket, outcome } => self.tell(host, ticket, outcome),
            other => panic!("unknown action {other:?}"),
        }
    }

    fn transmit(&mut self, from: usize, to: usize, datagram: Datagram) {
        self.datagrams += 1;
        assert!(self.datagrams < self.setup.datagrams_max, "a storm");
        let Weather {
            loss_per_mille,
            duplicate_per_mille,
            delay_min,
            delay_max,
        } = self.setup.weather;
        let copies = 1 + usize::from(self.random.chance(duplicate_per_mille));
        for _ in 0..copies {
            if !self.random.chance(loss_per_mille) {
                let spread = self.random.below((delay_max - delay_min).as_nanos() as u64 + 1);
                let at = self.now + delay_min + Duration::from_nanos(spread);
                self.at(at, Event::Datagram { to, from, datagram });
            }
        }
    }

    /// Never two active receivers under `exclusive`.
    fn check_active(&mut self, host: usize) {
        let now = self.now;
        if self.hosts[host].is_active(now) {
            self.hosts[host].last_active = Some(now);
            self.active.insert(host);
        } else {
            self.active.remove(&host);
        }
        if self.setup.voters > 0 {
            // Others' tenures may have ended, with nobody there to notice.
            let hosts = &self.hosts;
            self.active.retain(|&host| hosts[host].is_active(now));
        }
        self.most_active = self.most_active.max(self.active.len());
        assert!(
            self.setup.voters == 0 || self.active.len() <= 1,
            "active at once: {:?}",
            self.active
        );
    }

    fn start(&mut self, job: u64) {
        let Job {
            sender,
            receiver,
            len,
            ..
        } = self.jobs[job as usize];
        let to = self.hosts[receiver].address;
        let patience = self.setup.patience;
        let now = self.now;
        // Its ticket is known before anything about it is told.
        let it = &mut self.jobs[job as usize];
        it.asked = now;
        it.life = self.hosts[sender].life;
        it.fate = Fate::Asking;
        let decided = self.with(sender, |node, local_now, local, out| {
            node.request(local_now, to, PORT, request(job, len), patience, local, out)
        });
        let it = &mut self.jobs[job as usize];
        match decided {
            None => it.fate = Fate::Nothing,
            Some(Ok(Decision::Requested(ticket) | Decision::OneCopy(ticket))) => {
                it.ticket = Some(ticket);
                self.tickets.insert((sender, ticket), job as usize);
                self.at(
                    now + patience + patience / 8 + Duration::from_millis(10),
                    Event::Judge { job },
                );
            }
            Some(Ok(Decision::Cancel)) => it.fate = Fate::Cancelled,
            Some(Err(TooMany)) => it.fate = Fate::TimedOut,
        }
    }

    fn finish(&mut self, job: u64) {
        let Job {
            sender,
            life,
            ticket,
            fate,
            ..
        } = self.jobs[job as usize];
        if fate == Fate::Holding && self.hosts[sender].life == life {
            self.jobs[job as usize].fate = Fate::Done;
            self.jobs[job as usize].gone = Some(self.now);
            if let Some(ticket) = ticket {
                self.with(sender, |node, now, local, out| {
                    node.end(now, ticket, 1, local, out)
                });
            }
        }
    }

    fn tell(&mut self, host: usize, ticket: Ticket, outcome: Outcome) {
        let Some(&number) = self.tickets.get(&(host, ticket)) else {
            if self.is_lenient {
                return;
            }
            panic!("{ticket:?} is nobody's: {outcome:?}");
        };
        let now = self.now;
        let job = &mut self.jobs[number];
        match outcome {
            Outcome::Granted(grant) if !grant.lands => {
                assert_eq!(job.fate, Fate::Asking, "granted twice: {job:?}");
                job.fate = Fate::OneCopy;
                job.gone = Some(now);
                self.with(host, |node, now, local, out| {
                    node.end(now, ticket, 1, local, out);
                });
                return;
            }
            Outcome::Granted(grant) => {
                assert_eq!(job.fate, Fate::Asking, "granted twice: {job:?}");
                job.fate = Fate::Holding;
                job.grant = Some(grant);
                job.granted = Some(now);
                let (at, number) = (now + job.hold, number as u64);
                self.at(at, Event::Finish { job: number });
                return;
            }
            Outcome::Ended { .. } | Outcome::Unconfirmed => {
                assert!(matches!(job.fate, Fate::Done | Fate::OneCopy));
                return;
            }
            Outcome::Rejected(_) => {
                assert_eq!(job.fate, Fate::Asking);
                job.is_rejected = true;
                job.fate = match self.setup.voters {
                    0 => Fate::TimedOut,
                    _ => Fate::Cancelled,
                };
            }
            Outcome::Unreachable => {
                assert_eq!(job.fate, Fate::Asking);
                job.fate = Fate::Unreachable;
            }
            Outcome::Lost => {
                assert_eq!(job.fate, Fate::Holding);
                job.fate = Fate::Lost;
            }
            other => panic!("{job:?}: {other:?}"),
        }
        job.gone = Some(now);
    }

    fn end_life(&mut self, host: usize, death: Death) {
        let now = self.now;
        let it = &mut self.hosts[host];
        let Some(node) = it.node.take() else { return };
        it.kept = node.sessions().map(|(_, session)| *session).collect();
        if death == Death::Host {
            it.gate.open.clear();
            it.gate.aside.clear();
            it.kept.clear();
        }
        let keeps_jobs = death == Death::Daemon && self.random.chance(500);
        for job in self.jobs.iter_mut().filter(|job| job.sender == host) {
            let is_open = matches!(job.fate, Fate::Asking | Fate::Holding);
            if is_open && !(keeps_jobs && job.fate == Fate::Holding) {
                job.fate = Fate::Nothing;
                job.gone = Some(now);
            }
        }
    }

    fn begin(&mut self, host: usize) {
        if self.hosts[host].node.is_some() {
            return;
        }
        let boot_id = self.random.next();
        let adopts = self.random.chance(500);
        let now = self.now;
        let config = Config {
            address: self.hosts[host].address,
            boot_id,
            key: Some(key()),
            policy: self.setup.policy(),
            limits: self.setup.limits,
        };
        let it = &mut self.hosts[host];
        it.life += 1;
        it.began = now;
        it.wake = None;
        it.node = Some(Node::new(config, it.local(now)));
        let kept = std::mem::take(&mut it.kept);
        // The gate keeps what it was told while nobody looked.
        if !adopts {
            it.gate.open.clear();
            it.gate.aside.clear();
            it.gate.until = None;
        }
        let queues = vec![QUEUE; self.setup.places];
        self.with(host, |node, now, local, out| {
            node.add_receiver(now, PORT, &queues, local, out);
            for session in kept.iter().filter(|_| adopts) {
                let Session {
                    peer,
                    request_id,
                    request,
                    grant,
                    ..
                } = *session;
                let has_place = session.has_place();
                let again = Session::granted_before(peer, request_id, request, grant, has_place);
                assert!(node.adopt(now, PORT, again));
            }
            // What it took over has leases to watch.
            node.on_timer(now, local, out);
        });
        // Programs that kept their sessions.
        let life = self.hosts[host].life;
        for number in 0..self.jobs.len() {
            let job = self.jobs[number];
            if job.sender != host || job.fate != Fate::Holding || job.life == life {
                continue;
            }
            let (Some(ticket), Some(grant)) = (job.ticket, job.grant) else {
                continue;
            };
            let to = self.hosts[job.receiver].address;
            let request = request(number as u64, job.len);
            let resumed = self.with(host, |node, now, _, _| {
                node.resume(now, to, PORT, ticket, request, grant)
            });
            assert_eq!(resumed, Some(true));
            self.jobs[number].life = life;
        }
    }
}

/// A node's state, but not what it counts.
pub(crate) fn fingerprint(node: &Node) -> String {
    let text = format!("{node:?}");
    let (head, counters) = text.split_once("counters: Counters {").expect("counters in it");
    let (_, tail) = counters.split_once('}').expect("an end of it");
    let (start, sequence) = head.split_once("sequence: ").expect("a sequence in it");
    let (_, rest) = sequence.split_once(',').expect("an end of it");
    format!("{start}{rest}{tail}")
}
