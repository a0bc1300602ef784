//! The client against daemons that go, come back, or talk nonsense: a thread at the other end of a real socket says what the case wants.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    listen, recv, send, shutdown, socket_with,
};

use super::client::News;
use super::ipc::{Asked, Call, Control, Event, Joined, MESSAGE_LEN_MAX, Mode, Outcome, Reply, Said};
use super::{Client, DaemonError};
use crate::sim_tests::grant;

/// What a daemon sends to a call; `None`: it ends.
type Packets = Option<Vec<Vec<u8>>>;

/// A socket's path, which goes with it.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("lm-client-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Place(path)
    }

    fn listen(&self) -> OwnedFd {
        let _ = std::fs::remove_file(&self.0);
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&self.0).unwrap()).unwrap();
        listen(&socket, 4).unwrap();
        socket
    }

    /// A daemon for one connection: `answer` says what it sends to each call, as bytes; it ends when that is `None`.
    fn daemon(&self, mut answer: impl FnMut(Asked) -> Packets + Send + 'static) -> JoinHandle<()> {
        let listener = self.listen();
        std::thread::spawn(move || {
            let connection = accept(&listener).unwrap();
            let mut bytes = [0u8; MESSAGE_LEN_MAX];
            loop {
                let (len, _) = recv(&connection, &mut bytes[..], RecvFlags::empty()).unwrap();
                if len == 0 {
                    return;
                }
                let asked = postcard::from_bytes(&bytes[..len]).expect("a call");
                let Some(said) = answer(asked) else { return };
                for bytes in said {
                    send(&connection, &bytes, SendFlags::NOSIGNAL).unwrap();
                }
            }
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn said(said: &Said) -> Vec<u8> {
    postcard::to_stdvec(said).unwrap()
}

fn reply(number: u32, reply: Reply) -> Packets {
    Some(vec![said(&Said::Reply(number, reply))])
}

fn joined(received: Vec<u64>, sent: Vec<u32>) -> Reply {
    Reply::Joined(Joined {
        token: 77,
        interface_index: 1,
        general_queue: Some(0),
        landing_queue: Some(1),
        generic: false,
        control_port: 7169,
        received,
        sent,
    })
}

fn udp() -> UdpSocket {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()
}

/// The news that come within a second, until `enough`.
fn news_until(client: &mut Client, enough: impl Fn(&[News]) -> bool) -> Vec<News> {
    let start = Instant::now();
    let mut found = Vec::new();
    while !enough(&found) {
        assert!(start.elapsed() < Duration::from_secs(5), "{found:?}");
        match client.look(true) {
            Some(news) => found.push(news),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    found
}

#[test]
fn nobody_listens() {
    let error = Client::connect(Path::new("/nowhere/socket")).unwrap_err();
    assert!(matches!(error, DaemonError::Absent { .. }), "{error}");
    assert!(error.to_string().contains("--admission embedded"), "{error}");
    // A daemon that was killed leaves its socket behind.
    let place = Place::new("left");
    // Shut down, as closing alone is not enough while a process that another test forks holds a copy.
    shutdown(place.listen(), Shutdown::Both).unwrap();
    let error = Client::connect(&place.0).unwrap_err();
    assert!(matches!(error, DaemonError::Absent { .. }), "{error}");
}

#[test]
fn what_cannot_be_is_one_line() {
    type Answer = fn(u32) -> Packets;
    let cases: [(&str, Answer); 5] = [
        ("no message", |_| Some(vec![vec![0xff; 40]])),
        ("another reply", |number| reply(number, Reply::Status)),
        ("too long", |_| Some(vec![vec![7; 3 * MESSAGE_LEN_MAX]])),
        ("an end", |_| None),
        ("a refusal", |number| {
            reply(number, Reply::Refused("use the same release".to_owned()))
        }),
    ];
    for (name, answer) in cases {
        let place = Place::new("nonsense");
        let daemon = place.daemon(move |asked| answer(asked.number));
        let error = Client::connect(&place.0).unwrap_err().to_string();
        assert!(
            !error.contains('\n') && error.contains("admission daemon"),
            "{name}: {error}"
        );
        daemon.join().unwrap();
    }
}

#[test]
fn absurd_queues_are_refused() {
    let place = Place::new("absurd");
    let daemon = place.daemon(|asked| match asked.call {
        Call::Join { .. } => {
            let Reply::Joined(mut joined) = joined(vec![], vec![]) else {
                return None;
            };
            joined.landing_queue = Some(u16::MAX);
            reply(asked.number, Reply::Joined(joined))
        }
        _ => reply(asked.number, Reply::Done),
    });
    let mut client = Client::connect(&place.0).unwrap();
    let error = client.join("lo", true, Mode::Auto, udp().as_fd()).unwrap_err();
    assert!(matches!(error, DaemonError::Nonsense(_)), "{error}");
    drop(client);
    daemon.join().unwrap();
}

#[test]
fn a_silent_daemon_is_given_up() {
    let place = Place::new("silent");
    let daemon = place.daemon(|asked| match asked.call {
        Call::Hello { .. } => reply(asked.number, Reply::Done),
        _ => Some(Vec::new()),
    });
    let mut client = Client::connect(&place.0).unwrap();
    let start = Instant::now();
    let error = client.done(Call::Quiesce { queue: 1 }, &[]).unwrap_err();
    assert!(matches!(error, DaemonError::Silent), "{error}");
    assert!(start.elapsed() >= Duration::from_millis(1900));
    drop(client);
    daemon.join().unwrap();
}

#[test]
fn events_come_before_replies_and_calls_in_their_order() {
    let place = Place::new("order");
    let daemon = place.daemon(|asked| {
        let told = |ticket| {
            let outcome = Outcome::Unreachable;
            said(&Said::Event(Event::Told { ticket, outcome }))
        };
        let done = said(&Said::Reply(asked.number, Reply::Done));
        Some(match asked.call {
            Call::Hello { .. } => vec![done],
            Call::Released { session_key } => vec![told(session_key as u32), done],
            _ => vec![told(99), done],
        })
    });
    let mut client = Client::connect(&place.0).unwrap();
    for session_key in 1..4 {
        client.tell(Call::Released { session_key });
    }
    client.done(Call::Quiesce { queue: 1 }, &[]).unwrap();
    let news = news_until(&mut client, |news| news.len() == 4);
    let tickets: Vec<u32> = (news.iter())
        .filter_map(|news| match news {
            News::Event(Event::Told { ticket, .. }) => Some(*ticket),
            _ => None,
        })
        .collect();
    assert_eq!(tickets, [1, 2, 3, 99]);
    drop(client);
    daemon.join().unwrap();
}

/// News are taken a look's worth at a time, and what has ended is not kept.
#[test]
fn what_has_ended_is_not_kept() {
    const ENDS: u32 = 200;
    let place = Place::new("kept");
    let daemon = place.daemon(|asked| {
        let done = said(&Said::Reply(asked.number, Reply::Done));
        let Call::Released { session_key } = asked.call else {
            return Some(vec![done]);
        };
        let (ticket, outcome) = (session_key as u32, Outcome::Lost);
        let grant = Control::new(1, &grant(session_key));
        let opened = Event::Opened {
            from: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7168),
            row: 1,
            request: grant.clone(),
            grant,
        };
        let closed = Event::Closed {
            session_key,
            messages: None,
            was_idle: false,
        };
        let events = [opened, closed, Event::Told { ticket, outcome }].map(|event| said(&Said::Event(event)));
        Some(events.into_iter().chain([done]).collect())
    });
    let mut client = Client::connect(&place.0).unwrap();
    for ticket in 0..ENDS {
        client.asked(ticket);
        client.tell(Call::Released {
            session_key: ticket.into(),
        });
    }
    for _ in 0..3 * ENDS {
        news_until(&mut client, |news| news.len() == 1);
        let [news, received, sent] = client.kept();
        assert!(news < 64 && received <= 1 && sent <= ENDS as usize);
    }
    assert_eq!(client.kept(), [0; 3]);
    drop(client);
    daemon.join().unwrap();
}

/// A client that connects, joins, and has a ticket when its daemon goes.
fn with_ticket(place: &Place) -> Client {
    let daemon = place.daemon(|asked| match asked.call {
        Call::Join { .. } => reply(asked.number, joined(vec![], vec![])),
        Call::Touched { .. } => None,
        _ => reply(asked.number, Reply::Done),
    });
    let mut client = Client::connect(&place.0).unwrap();
    client.join("lo", true, Mode::Auto, udp().as_fd()).unwrap();
    client.asked(5);
    client.asked(6);
    client.tell(Call::Touched { sessions: vec![] });
    daemon.join().unwrap();
    client
}

#[test]
fn a_daemon_that_comes_back_says_what_is_left() {
    let place = Place::new("back");
    let mut client = with_ticket(&place);
    let daemon = place.daemon(|asked| match asked.call {
        Call::Rejoin { token: 77 } => reply(asked.number, joined(vec![], vec![6])),
        Call::Hello { .. } | Call::Released { .. } => reply(asked.number, Reply::Done),
        other => panic!("{other:?}"),
    });
    let news = news_until(&mut client, |news| !news.is_empty());
    assert!(
        matches!(
            news[..],
            [News::Event(Event::Told {
                ticket: 5,
                outcome: Outcome::Lost
            })]
        ),
        "{news:?}"
    );
    client.done(Call::Released { session_key: 1 }, &[]).unwrap();
    drop(client);
    daemon.join().unwrap();
}

#[test]
fn a_daemon_that_knows_nothing_ends_everything() {
    let place = Place::new("disowned");
    let mut client = with_ticket(&place);
    let daemon = place.daemon(|asked| match asked.call {
        Call::Rejoin { .. } => reply(asked.number, Reply::Refused("join anew".to_owned())),
        _ => reply(asked.number, Reply::Done),
    });
    let news = news_until(&mut client, |news| news.len() == 3);
    assert!(
        matches!(&news[2], News::Disowned(what) if what == "join anew"),
        "{news:?}"
    );
    assert!(matches!(
        client.done(Call::Quiesce { queue: 1 }, &[]),
        Err(DaemonError::Gone)
    ));
    daemon.join().unwrap();
}
