//! Places in which nothing lands: they go to whoever waits for one, on another host as well.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use lm_dataplane::ipc::{Call, Event, Outcome as Told};
use lm_dataplane::{
    Admission, AdmissionConfig, ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, Outcome, PeerId,
    RecvError,
};
use lm_protocol::control::ControlMessage;
use lm_protocol::landing;
use lm_protocol::session::UNUSED_MAX;
use lm_protocol::wire::lm::{AnnounceEntry, LmHeader, Trailer};
use xtask::bed::{Bed, BedConfig, Host, INTERFACE, Launch, Program};

use crate::bed::{Daemon, Hosts, PATIENCE, arguments, beside, unpin, wait_until, words};
use crate::program::Client;

/// Places of a landing queue.
const PLACES: u16 = landing::PLACES as u16;
/// As long as a message is that takes many fragments.
const LEN: usize = 60_000;

/// The tag of messages of which nothing is sent.
const NOTHING: u64 = 666;

/// Three hosts on a switch with a daemon each: the receiver, one whose programs fill it, and one that comes later.
struct Three {
    daemons: Vec<Daemon>,
    cluster: Bed,
    folder: PathBuf,
}

impl Three {
    fn new(name: &str) -> Option<Three> {
        let folder = Hosts::folder(name)?;
        // Each program takes a queue.
        let queues = u32::from(PLACES) + 1;
        let cluster = Bed::new(&BedConfig {
            queues,
            landing_queue: Some(queues - 1),
            ..BedConfig::cluster(3)
        });
        let mut three = Three {
            daemons: Vec::new(),
            cluster: cluster.unwrap(),
            folder,
        };
        let key = three.folder.join("key");
        for number in 0..3 {
            let host = three.host(number);
            if number == 0 {
                let made = inside(host, &["keygen".to_owned(), key.to_str().unwrap().to_owned()]);
                assert!(made.finish().unwrap().status.success());
            }
            let daemon = three.start(number);
            three.daemons.push(daemon);
        }
        Some(three)
    }

    fn start(&self, number: usize) -> Daemon {
        let socket = self.socket(number);
        let started = inside(self.host(number), &arguments(&socket, &self.folder.join("key")));
        Daemon::serving(started, socket)
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
            patience: 4 * PATIENCE,
            memory: MemoryConfig {
                landing_len: if number == 0 { 16 << 20 } else { 0 },
                ..MemoryConfig::default()
            },
            admission: AdmissionConfig {
                by: Admission::Daemon(self.socket(number)),
                ..AdmissionConfig::default()
            },
            ..EndpointConfig::default()
        };
        let open = || Endpoint::open(&config).unwrap_or_else(|error| panic!("{error}"));
        self.host(number).enter(|| Ok(work(open()))).unwrap()
    }
}

fn inside(host: &Host, arguments: &[String]) -> Program {
    let [enter, namespace, program] = words(host);
    let launched = Launch::new(&enter).args([&namespace, &program]);
    launched.args(arguments).spawn().unwrap()
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
        loop {
            let message = match endpoint.try_recv() {
                Ok(Some(message)) => message,
                Err(RecvError::Incomplete { tag: NOTHING, .. }) => continue,
                nothing => {
                    assert!(matches!(nothing, Ok(None)), "{nothing:?}");
                    break;
                }
            };
            let tag = message.tag();
            assert!(*message == [tag as u8; LEN], "message {tag} is not what was sent");
            let from = endpoint.peer(message.peer()).address().unwrap();
            received.push((from.ip().octets()[3], tag));
        }
        endpoint.wait(Duration::from_millis(1));
    }
    received
}

/// Programs that announce a message each as often as they please, and send nothing of it.
struct Announcing(Vec<(Client, u64)>);

impl Announcing {
    /// So many on a host, each with a place.
    fn new(three: &Three, number: usize, count: u16) -> Announcing {
        let program = |n| {
            let mut client = Client::sender(&three.socket(number), three.host(number), 9000 + n);
            let ticket = client.ask(three.receiver(), LEN as u64);
            let key = client.granted(ticket).session_key;
            (client, key)
        };
        Announcing((0..count).map(program).collect())
    }

    fn announce(&self, to: SocketAddrV4) {
        for (client, session_key) in &self.0 {
            let header = LmHeader::Announce {
                session_key: *session_key,
                first: 0,
                entries: 1,
                sent: 0,
            };
            let payload = AnnounceEntry {
                len: LEN as u64,
                tag: NOTHING,
                delivery: None,
                windows_released: AnnounceEntry::ALL_WINDOWS,
                has_facts: false,
            }
            .encode();
            let udp = client.udp.as_ref().unwrap();
            let SocketAddr::V4(from) = udp.local_addr().unwrap() else {
                unreachable!("it was bound to an IPv4 address")
            };
            let mut bytes = header.encode(payload.len() as u16).to_vec();
            bytes.extend_from_slice(&payload);
            bytes.extend_from_slice(Trailer::new(&header, &payload, from).as_bytes());
            udp.send_to(&bytes, to).unwrap();
        }
    }
}

/// Works beside a receiver, which gets just these messages: the last number of a host's address, and a tag.
fn beside_receiver(name: &str, expected: &[(u8, u64)], work: impl FnOnce(&Three)) {
    let Some(three) = Three::new(name) else { return };
    let port = three.receiver().port();
    let receives = |over: &AtomicBool| three.with_endpoint(0, port, |endpoint| receive(endpoint, over));
    let ((), mut received) = beside(receives, || {
        wait_until("it receives", || {
            let queues = three.daemons[0].interface().queues;
            queues.iter().any(|queue| queue.role == "landing")
        });
        work(&three);
    });
    received.sort_unstable();
    assert_eq!(received, expected);
}

/// It lands again when the one that has its place is let go.
fn land_again(endpoint: &mut Endpoint, peer: PeerId, tag: u64, let_go: &Sender<()>) {
    let_go.send(()).expect("the other one is there");
    serve_until(endpoint, "it lands again", |endpoint| {
        endpoint.peer(peer).lands() == Some(true)
    });
    let before = endpoint.counters().messages_one_copy;
    deliver(endpoint, peer, tag);
    assert_eq!(endpoint.counters().messages_one_copy, before);
}

/// What comes later waits for a place, and gets one in which its messages land. It keeps it until it is let go.
fn come_later(three: &Three, tag: u64, placed: Sender<()>, let_go: Receiver<()>) {
    three.with_endpoint(2, 0, move |mut endpoint| {
        let peer = connect(&mut endpoint, three.receiver());
        serve_until(&mut endpoint, "it has a place", |endpoint| {
            endpoint.peer(peer).lands() == Some(true)
        });
        deliver(&mut endpoint, peer, tag);
        assert_eq!(endpoint.counters().messages_one_copy, 0);
        let _ = placed.send(());
        serve_until(&mut endpoint, "it is let go", |_| let_go.try_recv().is_ok());
    });
}

/// All places are one host's, whose daemon renews them: another host that waits gets one in which nothing lands. The program
/// whose it was hands a message over before it hears of that: it arrives all the same, and the next one lands again.
#[test]
fn an_unused_place_goes_to_another_host() {
    beside_receiver("unused", &[(2, 1), (2, 2), (2, 3), (3, 4)], |three| {
        let (to, daemon) = (three.receiver(), &three.daemons[0]);
        let (tell, told) = channel();
        let (wake, woken) = channel();
        let (let_go, gone) = channel();
        std::thread::scope(|scope| {
            // The first one has used its place, and is therefore the first to lose it.
            let first = scope.spawn(move || {
                three.with_endpoint(1, 0, move |mut endpoint| {
                    let peer = connect(&mut endpoint, to);
                    deliver(&mut endpoint, peer, 1);
                    tell.send(()).unwrap();
                    woken.recv().expect("its place is taken");
                    deliver(&mut endpoint, peer, 2);
                    let counters = endpoint.counters();
                    assert_eq!((counters.messages_one_copy, counters.sessions_lost), (1, 0));
                    land_again(&mut endpoint, peer, 3, &let_go);
                })
            });
            told.recv_timeout(PATIENCE).expect("the first one has its place");
            wait_until("its daemon knows", || {
                daemon.interface().sessions[0].delivered == 1
            });
            let _others = Announcing::new(three, 1, PLACES - 1);
            assert_eq!(daemon.interface().sessions.len(), usize::from(PLACES));
            let (placed, has_place) = channel();
            scope.spawn(move || come_later(three, 4, placed, gone));
            has_place
                .recv_timeout(PATIENCE)
                .expect("the other one has a place");
            wake.send(()).unwrap();
            first.join().unwrap();
        });
    });
}

/// Of places for which messages are announced, again and again, and of which nothing comes, one goes to whoever waits. A program that was
/// stopped behind its announcement goes on without, loses nothing, and lands again.
#[test]
fn a_place_whose_message_does_not_come_goes_to_another_host() {
    beside_receiver("stalled", &[(2, 1), (2, 2), (2, 3), (3, 4)], |three| {
        let (to, daemon) = (three.receiver(), &three.daemons[0]);
        let landing = |from: SocketAddrV4| {
            let sessions = daemon.interface().sessions;
            let its = { sessions.iter() }.find(|session| session.from == from);
            its.map(|session| session.lands)
        };
        let (tell, told) = channel();
        let (wake, woken) = channel();
        let (let_go, gone) = channel();
        std::thread::scope(|scope| {
            let stopped = scope.spawn(move || {
                three.with_endpoint(1, 0, move |mut endpoint| {
                    let peer = connect(&mut endpoint, to);
                    let mut region = endpoint.loan(peer, LEN as u64).unwrap();
                    std::io::Write::write_all(&mut region, &[1; LEN]).unwrap();
                    endpoint.try_send(region, 1).unwrap();
                    endpoint.poll();
                    tell.send(endpoint.local()).unwrap();
                    woken.recv().expect("it is let go on");
                    let mut outcome = None;
                    serve_until(&mut endpoint, "its message is settled", |endpoint| {
                        outcome = endpoint.try_completion().map(|completion| completion.outcome);
                        outcome.is_some()
                    });
                    assert_eq!(outcome, Some(Outcome::Delivered));
                    serve_until(&mut endpoint, "its place is another's", |endpoint| {
                        endpoint.peer(peer).lands() == Some(false)
                    });
                    deliver(&mut endpoint, peer, 2);
                    land_again(&mut endpoint, peer, 3, &let_go);
                })
            });
            let from = told.recv_timeout(PATIENCE).expect("the first one has its place");
            let others = Announcing::new(three, 1, PLACES - 1);
            let (stop, stopping) = channel::<()>();
            scope.spawn(move || {
                while stopping.recv_timeout(UNUSED_MAX / 10) == Err(RecvTimeoutError::Timeout) {
                    others.announce(to);
                }
            });
            assert_eq!(daemon.interface().sessions.len(), usize::from(PLACES));
            assert_eq!(landing(from), Some(true));
            let (placed, has_place) = channel();
            scope.spawn(move || come_later(three, 4, placed, gone));
            has_place
                .recv_timeout(PATIENCE)
                .expect("the other one has a place");
            assert_eq!(landing(from), Some(false));
            wake.send(()).unwrap();
            stopped.join().unwrap();
            drop(stop);
        });
    });
}

/// A sender that has a place, its ticket, and its session's key.
type Holder = (Client, u32, u64);

/// Programs on a host, each with a session of a receiver that does nothing by itself, and what they asked for.
fn fill(three: &Three, receiver: &mut Client) -> Vec<Holder> {
    let program = |n| {
        let mut client = Client::sender(&three.socket(1), three.host(1), 9000 + n);
        let ticket = client.ask(three.receiver(), LEN as u64);
        let key = client.granted(ticket).session_key;
        assert!(matches!(receiver.event(), Event::Opened { .. }));
        receiver.tell_progress(key, 0, None);
        (client, ticket, key)
    };
    (0..PLACES).map(program).collect()
}

/// All places are taken, nothing comes of the fourth session's message, and another sender comes: it has the fourth one's place. The sessions,
/// and the one that came, with its ticket.
fn set_one_aside(three: &Three, receiver: &mut Client) -> (Vec<Holder>, (Client, u32)) {
    let others = fill(three, receiver);
    let session_key = others[3].2;
    receiver.tell_progress(session_key, 1, Some((5000, false)));
    let mut waiting = Client::sender(&three.socket(2), three.host(2), 9000);
    let wanted = waiting.ask(three.receiver(), LEN as u64);
    let granted = waiting.granted(wanted);
    assert!(granted.lands);
    let Event::Opened { grant, .. } = receiver.event() else {
        panic!("not opened")
    };
    let Ok((_, ControlMessage::Grant(grant))) = grant.parse() else {
        panic!("no grant")
    };
    assert_eq!(grant.session_key, granted.session_key);
    assert_eq!(receiver.event(), Event::SetAside { session_key });
    let session_key = granted.session_key;
    assert_eq!(receiver.event(), Event::Landed { session_key });
    (others, (waiting, wanted))
}

/// Open and closing places of the receiver's queue.
fn places(three: &Three, receiver: &Client) -> (usize, usize) {
    let mut queues = three.daemons[0].interface().queues;
    let queue = queues.remove(receiver.landing_queue().into());
    (queue.open_places, queue.closing_places)
}

/// A session without a place has no gate, and has one again when it has something to send and a place is free.
#[test]
fn a_session_without_its_place_has_no_gate_until_it_lands_again() {
    let Some(three) = Three::new("holding") else {
        return;
    };
    let mut receiver = Client::receiver(&three.socket(0), three.host(0), 7168);
    let (others, (mut waiting, wanted)) = set_one_aside(&three, &mut receiver);
    let session_key = others[3].2;
    assert_eq!(places(&three, &receiver), (usize::from(PLACES), 0));
    let first_message = 0;
    let again = Call::OpenGate {
        session_key,
        first_message,
    };
    let refused = receiver.refused(again.clone(), &[]);
    assert!(refused.contains("no session"), "{refused}");
    assert!(receiver.hears_nothing(Duration::from_millis(100)));
    waiting.done(Call::End {
        ticket: wanted,
        messages: 0,
    });
    let Event::Closed {
        session_key: ended, ..
    } = receiver.event()
    else {
        panic!("not closed")
    };
    assert_eq!(receiver.event(), Event::Landed { session_key });
    receiver.done(Call::Released { session_key: ended });
    receiver.done(again);
    wait_until("the gate is open to it", || {
        places(&three, &receiver) == (usize::from(PLACES), 0)
    });
}

/// A session without its place is such with the next daemon as well. The program hears of it once more, since the daemon may have died before
/// it could say so.
#[test]
fn a_session_without_its_place_outlives_its_daemon() {
    let Some(mut three) = Three::new("aside") else {
        return;
    };
    let mut receiver = Client::receiver(&three.socket(0), three.host(0), 7168);
    let (mut others, _waiting) = set_one_aside(&three, &mut receiver);
    let (sender, ticket, session_key) = &mut others[3];
    let (ticket, session_key) = (*ticket, *session_key);
    wait_until("the state is written", || {
        let state = std::fs::read_to_string(three.folder.join("host0/state.json")).unwrap_or_default();
        state.contains("\"aside\":true")
    });
    three.daemons.remove(0).kill();
    let daemon = three.start(0);
    three.daemons.insert(0, daemon);
    let mut receiver = Client::connect(&three.socket(0)).hello().rejoin(&mut receiver);
    assert_eq!(receiver.joined().received.len(), usize::from(PLACES) + 1);
    assert_eq!(receiver.event(), Event::SetAside { session_key });
    receiver.tell_progress(session_key, 1, None);
    assert_eq!(places(&three, &receiver), (usize::from(PLACES), 0));
    // It is renewed and ended as before.
    std::thread::sleep(UNUSED_MAX + Duration::from_secs(1));
    receiver.tell_progress(session_key, 2, None);
    sender.done(Call::End { ticket, messages: 2 });
    assert_eq!(sender.outcome(ticket), Told::Ended { delivered: 2 });
}
