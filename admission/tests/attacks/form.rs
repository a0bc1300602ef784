//! The forms that a receiver has, and three hosts for either.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lm_dataplane::{Admission, AdmissionConfig, ClusterKey, Counters, EndpointConfig, IdleStrategy};
use xtask::bed::{BedConfig, Host, INTERFACE, Launch, ip};

use crate::bed::{Daemon, Hosts, Side, arguments, beside, unpin, words};
use crate::forger::Forger;
use crate::program::as_user;
use crate::traffic::{Alone, Flag, PATIENCE, check, open};

/// The honest sender's data address: a port of its own choice, so that it comes again as the same.
pub(crate) const HONEST: SocketAddrV4 = SocketAddrV4::new(Side::Left.address(), 7300);
/// The receiver's.
pub(crate) const RECEIVER: SocketAddrV4 = SocketAddrV4::new(Side::Right.address(), 7168);
/// The control port of whoever admits to the receiver, in both forms.
pub(crate) const CONTROL: SocketAddrV4 = SocketAddrV4::new(Side::Right.address(), 7169);

/// Whose programs daemons serve.
const USER: u32 = 2001;

/// Who admits senders to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The endpoint itself, which has the privileges.
    Embedded,
    /// The daemon of its host: it is of a program without privileges.
    Daemon,
}

impl Form {
    /// Runs a program of this form: with all privileges, or as a user who has none.
    pub(crate) fn program<T: Send>(self, work: impl FnOnce() -> T + Send) -> T {
        match self {
            Form::Embedded => work(),
            Form::Daemon => as_user(USER, work),
        }
    }
}

/// The hosts: an honest sender's, the receiver's, and one more sender's, who lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Honest,
    Receiver,
    Attacker,
}

const ALL: [At; 3] = [At::Honest, At::Receiver, At::Attacker];

/// Three hosts on a switch, with one form of endpoints.
pub(crate) struct Bed {
    form: Form,
    keys: [Option<PathBuf>; 3],
    daemons: Vec<(At, Daemon)>,
    hosts: Hosts,
    /// The receiver's counters.
    counters: Mutex<Counters>,
    _alone: Alone,
}

impl Bed {
    /// For tests in which somebody lies: daemons have one key, and endpoints that admit by themselves none. `None`: skipped.
    pub(crate) fn new(form: Form) -> Option<Bed> {
        Bed::among(form, false)
    }

    /// For tests in which nobody does. `None`: skipped.
    pub(crate) fn honest(form: Form) -> Option<Bed> {
        Bed::among(form, true)
    }

    fn among(form: Form, are_honest: bool) -> Option<Bed> {
        let key = (form == Form::Daemon).then_some("key");
        Bed::build(form, [key; 3], are_honest)
    }

    /// Hosts with keys of these names: a daemon's, or endpoints'. `None`: skipped.
    pub(crate) fn with_keys(form: Form, keys: [Option<&str>; 3]) -> Option<Bed> {
        Bed::build(form, keys, false)
    }

    fn build(form: Form, keys: [Option<&str>; 3], are_honest: bool) -> Option<Bed> {
        let alone = Alone::new(are_honest);
        let config = BedConfig {
            senders: Some(2),
            ..BedConfig::default()
        };
        let hosts = Hosts::with("attacks", &config)?;
        let key = |name: &str| {
            let path = hosts.folder.join(name);
            if !path.exists() {
                let made = hosts.tool(Side::Left, ["keygen".as_ref(), path.as_os_str()]);
                assert!(made.finish().unwrap().status.success());
            }
            path
        };
        let mut bed = Bed {
            form,
            keys: keys.map(|name| name.map(key)),
            daemons: Vec::new(),
            hosts,
            counters: Mutex::default(),
            _alone: alone,
        };
        if form == Form::Daemon {
            for at in ALL {
                let daemon = bed.keys[at as usize].as_ref().map(|key| bed.start(at, key));
                bed.daemons.extend(daemon.map(|daemon| (at, daemon)));
            }
        }
        Some(bed)
    }

    fn start(&self, at: At, key: &Path) -> Daemon {
        let [enter, namespace, program] = words(self.host(at));
        let started = Launch::new(enter)
            .args([namespace, program])
            .args(arguments(&self.socket(at), key))
            .args(["--allow-uid".to_owned(), USER.to_string()])
            .spawn();
        Daemon::serving(started.unwrap(), self.socket(at))
    }

    pub(crate) fn form(&self) -> Form {
        self.form
    }

    pub(crate) fn host(&self, at: At) -> &Host {
        match at {
            At::Honest => self.hosts.bed.left(),
            At::Receiver => self.hosts.bed.right(),
            At::Attacker => self.hosts.bed.senders()[1],
        }
    }

    /// Has the switch bring everything for the receiver to this queue of two.
    pub(crate) fn steer_to_receiver(&self, queue: u32) {
        self.hosts.bed.steer_to_receiver(queue).unwrap();
    }

    pub(crate) fn socket(&self, at: At) -> PathBuf {
        self.hosts.folder.join(format!("{at:?}")).join("socket")
    }

    /// The receiver's daemon, where it has one.
    pub(crate) fn daemon(&self) -> Option<&Daemon> {
        let mut daemons = self.daemons.iter();
        Some(&daemons.find(|(at, _)| *at == At::Receiver)?.1)
    }

    /// Ends the receiver's daemon, where it has one: what it wrote to standard error.
    pub(crate) fn end_daemon(&mut self) -> Option<String> {
        let position = self.daemons.iter().position(|(at, _)| *at == At::Receiver)?;
        Some(self.daemons.remove(position).1.stop().stderr)
    }

    /// A host's key.
    pub(crate) fn key(&self, at: At) -> Vec<u8> {
        let text = std::fs::read_to_string(self.keys[at as usize].as_ref().unwrap()).unwrap();
        let digit = |byte: u8| (byte as char).to_digit(16).unwrap() as u8;
        let pairs = text.trim().as_bytes().chunks(2);
        pairs.map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    }

    /// Gives the attacker's host two more addresses.
    pub(crate) fn more_addresses(&self) -> [Ipv4Addr; 2] {
        let addresses = [4, 5].map(|last| Ipv4Addr::new(198, 18, 0, last));
        let commands = addresses.map(|ip| format!("address add {ip}/24 dev {INTERFACE}"));
        ip::batch(Some(self.host(At::Attacker).name()), &commands).unwrap();
        addresses
    }

    /// An endpoint's on a host.
    pub(crate) fn config(&self, at: At) -> EndpointConfig {
        let (admission, key) = match self.form {
            Form::Embedded => {
                let key = self.keys[at as usize].is_some().then(|| self.key(at));
                let key = key.map(|key| ClusterKey::new(&key).unwrap());
                (Admission::Embedded, key)
            }
            Form::Daemon => (Admission::Daemon(self.socket(at)), None),
        };
        EndpointConfig {
            admission: AdmissionConfig {
                by: admission,
                key,
                ..config(at).admission
            },
            ..config(at)
        }
    }

    /// Does something on a host.
    pub(crate) fn on<T: Send>(&self, at: At, work: impl FnOnce() -> T + Send) -> T {
        self.host(at).enter(|| Ok(work())).unwrap()
    }

    /// Does on a host what opens an endpoint.
    pub(crate) fn program<T: Send>(&self, at: At, work: impl FnOnce() -> T + Send) -> T {
        self.on(at, || self.form.program(work))
    }

    /// Runs a receiver, and a sender on each other host.
    pub(crate) fn run(
        &self,
        receive: impl FnOnce() + Send,
        honest: impl FnOnce() + Send,
        attacker: impl FnOnce() + Send,
    ) {
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| self.program(At::Receiver, receive));
            let honest = scope.spawn(|| self.program(At::Honest, honest));
            let attacker = scope.spawn(|| self.program(At::Attacker, attacker));
            for host in [honest, attacker, receiver] {
                host.join().unwrap();
            }
        });
    }

    /// The counters of the receiver that [`Bed::beside_receiver`] runs.
    pub(crate) fn counters(&self) -> Counters {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works beside a receiver; everything that it takes must be the honest sender's next message. How many it took.
    pub(crate) fn beside_receiver<T: Send>(
        &self,
        config: &EndpointConfig,
        work: impl FnOnce() -> T + Send,
    ) -> (T, (u64, Counters)) {
        let listens = Flag::default();
        let receive =
            |over: &AtomicBool| self.program(At::Receiver, || self.receive_in_order(&listens, over, config));
        beside(receive, || {
            listens.wait();
            work()
        })
    }

    fn receive_in_order(
        &self,
        listens: &Flag,
        over: &AtomicBool,
        config: &EndpointConfig,
    ) -> (u64, Counters) {
        let mut b = open(config);
        listens.set();
        let mut next = 0;
        while !over.load(Ordering::Acquire) {
            while let Some(message) = b.try_recv().expect("no failure") {
                assert_eq!(b.peer(message.peer()).address(), Some(HONEST));
                check(&b, &message, next, message.len() as u64);
                next += 1;
            }
            *self.counters.lock().unwrap_or_else(PoisonError::into_inner) = b.counters();
            b.wait(Duration::from_millis(1));
        }
        (next, b.counters())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for (_, daemon) in self.daemons.drain(..) {
            if std::thread::panicking() {
                drop(daemon);
            } else {
                daemon.stop();
            }
        }
        unpin(self.host(At::Attacker));
    }
}

/// An endpoint's on a host of a bed, whoever admits to it.
pub(crate) fn config(at: At) -> EndpointConfig {
    EndpointConfig {
        interface: INTERFACE.to_owned(),
        port: match at {
            At::Honest => HONEST.port(),
            At::Receiver => RECEIVER.port(),
            At::Attacker => 0,
        },
        // On a machine that is busy besides, an honest host gets its turn late, and beside an attack packets are lost.
        patience: PATIENCE,
        // Tests share their cores: leave them when there is nothing to do.
        idle: IdleStrategy {
            spin: Duration::from_micros(20),
            yields: 50,
            ..IdleStrategy::default()
        },
        ..EndpointConfig::default()
    }
}

/// Runs an attack from the attacker's host while `work` is done. How many packets it sent. What is due after a turn of
/// the machine's other work is dropped, but for a few: all of it in one burst would be more than any socket holds.
pub(crate) fn under_attack<T>(
    bed: &Bed,
    mut attack: impl FnMut(&Forger, u64) + Send,
    per_second: u64,
    work: impl FnOnce() -> T,
) -> (T, u64) {
    let mut attacks = |over: &AtomicBool| {
        let (forger, start, mut sent, mut done) = (Forger::new(INTERFACE), Instant::now(), 0, 0);
        while !over.load(Ordering::Acquire) {
            let due = (start.elapsed().as_secs_f64() * per_second as f64) as u64;
            for _ in 0..(due - done).min(4) {
                attack(&forger, sent);
                forger.answer();
                sent += 1;
            }
            done = due;
            std::thread::sleep(Duration::from_micros(200));
        }
        sent
    };
    beside(|over| bed.on(At::Attacker, || attacks(over)), work)
}
