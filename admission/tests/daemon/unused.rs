//! Places in which nothing lands: they go to whoever waits for one, on another host as well.

use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use lm_dataplane::{Admission, ConnectOptions, Endpoint, EndpointConfig, Outcome, PeerId, Start};
use lm_ebpf::SessionAdmission;
use lm_protocol::session::UNUSED_MAX;
use xtask::bed::{Cluster, ClusterConfig, Host, INTERFACE, Launch};

use crate::bed::{Daemon, Hosts, PATIENCE, arguments, unpin, wait_until, words};
use crate::program::Client;

/// Places of a landing queue.
const PLACES: u16 = SessionAdmission::PLACES as u16;
/// As long as a message is that takes many fragments.
const LEN: usize = 60_000;

/// Three hosts on a switch with a daemon each: the receiver, one whose programs fill it, and one that comes later.
struct Three {
    daemons: Vec<Daemon>,
    cluster: Cluster,
    folder: PathBuf,
}

impl Three {
    fn new(name: &str) -> Option<Three> {
        let folder = Hosts::folder(name)?;
        // Each program takes a queue.
        let queues = u32::from(PLACES) + 1;
        let cluster = Cluster::new(&ClusterConfig {
            hosts: 3,
            queues,
            landing_queue: Some(queues - 1),
        });
        let mut three = Three {
            daemons: Vec::new(),
            cluster: cluster.unwrap(),
            folder,
        };
        let key = three.folder.join("key");
        for (number, host) in three.cluster.hosts().iter().enumerate() {
            let [enter, namespace, program] = words(host);
            let inside = |words: &[String]| {
                Launch::new(&enter)
                    .args([&namespace, &program])
                    .args(words)
                    .spawn()
            };
            if number == 0 {
                let made = inside(&["keygen".to_owned(), key.to_str().unwrap().to_owned()]);
                assert!(made.unwrap().finish().unwrap().status.success());
            }
            let socket = three.socket(number);
            let started = inside(&arguments(&socket, &key));
            three.daemons.push(Daemon::serving(started.unwrap(), socket));
        }
        Some(three)
    }

    fn host(&self, number: usize) -> &Host {
        &self.cluster.hosts()[number]
    }

    fn socket(&self, number: usize) -> PathBuf {
        self.folder.join(format!("host{number}")).join("socket")
    }

    /// Where the receiver is.
    fn receiver(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.host(0).address(), 7168)
    }

    /// An endpoint on a host, by that host's daemon, and what it does there.
    fn with_endpoint<T: Send>(&self, number: usize, port: u16, work: impl FnOnce(Endpoint) -> T + Send) -> T {
        let config = EndpointConfig {
            interface: INTERFACE.to_owned(),
            port,
            landing_len: if number == 0 { 16 << 20 } else { 0 },
            admission: Admission::Daemon(self.socket(number)),
            ..EndpointConfig::default()
        };
        let open = || Endpoint::open(&config).unwrap_or_else(|error| panic!("{error}"));
        self.host(number).enter(|| Ok(work(open()))).unwrap()
    }
}

impl Drop for Three {
    fn drop(&mut self) {
        self.daemons.clear();
        self.cluster.hosts().iter().for_each(unpin);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn serve_until(endpoint: &mut Endpoint, what: &str, mut is_so: impl FnMut(&mut Endpoint) -> bool) {
    wait_until(what, || {
        endpoint.poll();
        endpoint.wait(Duration::from_millis(1));
        is_so(endpoint)
    });
}

/// Messages that land, or none.
fn connect(endpoint: &mut Endpoint, to: SocketAddrV4) -> PeerId {
    let options = ConnectOptions {
        max_message_len: LEN as u64,
        start: Start::WhenGranted,
        timeout: 2 * UNUSED_MAX,
        ..ConnectOptions::default()
    };
    endpoint
        .connect(to, &options)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn deliver(endpoint: &mut Endpoint, peer: PeerId, tag: u64) {
    endpoint
        .send_copy(peer, &[tag as u8; LEN], tag)
        .unwrap_or_else(|error| panic!("{error}"));
    let mut outcome = None;
    serve_until(endpoint, "the message is settled", |endpoint| {
        outcome = endpoint.try_completion().map(|completion| completion.outcome);
        outcome.is_some()
    });
    assert_eq!(outcome, Some(Outcome::Delivered), "message {tag}");
}

/// What a receiver gets until it is over: tags, by the host that each is from.
fn receive(mut endpoint: Endpoint, over: &AtomicBool) -> Vec<(u8, u64)> {
    let mut received = Vec::new();
    while !over.load(Ordering::Acquire) {
        while let Some(message) = endpoint.try_recv().unwrap() {
            let tag = message.tag();
            assert!(*message == [tag as u8; LEN], "message {tag} is not what was sent");
            let from = endpoint.peer_address(message.peer()).unwrap();
            received.push((from.ip().octets()[3], tag));
        }
        endpoint.wait(Duration::from_millis(1));
    }
    received
}

/// All places are one host's, whose daemon renews them: another host that waits gets one in which nothing lands. Whose it was delivers
/// its messages all the same, and lands again where another place was unused for as long.
#[test]
fn an_unused_place_goes_to_another_host() {
    let Some(three) = Three::new("unused") else { return };
    let (over, to) = (AtomicBool::new(false), three.receiver());
    let sessions = || three.daemons[0].interface().sessions;
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| three.with_endpoint(0, to.port(), |endpoint| receive(endpoint, &over)));
        let work = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_until("it receives", || {
                let queues = three.daemons[0].interface().queues;
                queues.iter().any(|queue| queue.role == "landing")
            });
            // The first one has used its place, and is therefore the first to lose it.
            let first = scope.spawn(|| {
                three.with_endpoint(1, 0, |mut endpoint| {
                    let peer = connect(&mut endpoint, to);
                    deliver(&mut endpoint, peer, 1);
                    tell.send(()).unwrap();
                    let lost = |endpoint: &mut Endpoint| endpoint.counters().sessions_lost == 1;
                    serve_until(&mut endpoint, "its place is taken", lost);
                    deliver(&mut endpoint, peer, 2);
                    let lands = |endpoint: &mut Endpoint| {
                        let counters = endpoint.counters();
                        counters.sessions_changed_over == 1 || counters.messages_one_copy == 0
                    };
                    serve_until(&mut endpoint, "it lands again", lands);
                    let before = endpoint.counters().messages_one_copy;
                    deliver(&mut endpoint, peer, 3);
                    assert_eq!(endpoint.counters().messages_one_copy, before);
                })
            });
            told.recv_timeout(PATIENCE).expect("the first one has its place");
            wait_until("its daemon knows", || sessions()[0].delivered == 1);
            let mut others: Vec<Client> = (1..PLACES)
                .map(|number| Client::sender(&three.socket(1), three.host(1), 9000 + number))
                .collect();
            for other in &mut others {
                let ticket = other.ask(to, LEN as u64);
                other.granted(ticket);
            }
            assert_eq!(sessions().len(), usize::from(PLACES));
            three.with_endpoint(2, 0, |mut endpoint| {
                let peer = connect(&mut endpoint, to);
                deliver(&mut endpoint, peer, 4);
                assert_eq!(endpoint.counters().messages_one_copy, 0);
            });
            first.join().unwrap();
        }));
        over.store(true, Ordering::Release);
        let mut received = receiver.join().unwrap();
        if let Err(panic) = work {
            std::panic::resume_unwind(panic);
        }
        received.sort_unstable();
        assert_eq!(received, [(2, 1), (2, 2), (2, 3), (3, 4)]);
    });
}
