//! Nodes without a key, of endpoints that admit by themselves: anybody may speak to them.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use lm_protocol::admission::{Action, Config, Limits, Local, Node, Policy, Taken};
use lm_protocol::control::{ControlMessage, Request};
use lm_protocol::geometry::LinkShape;
use lm_protocol::session::{Application, CloseReason, Landing, Permit, Refusal, Session, Terms};
use lm_protocol::time::Time;

/// One queue, which anybody may have.
struct Queue {
    next_key: u64,
}

impl Landing for Queue {
    fn open(&mut self, _: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
        self.next_key += 1;
        Ok(Terms {
            session_key: self.next_key,
            data_port: 7168,
            layout: (application.request.layout_at(1500, LinkShape::IPV4)).expect("a legal MTU"),
            tx_queue: None,
            prefix: 0,
            frames_per_packet: 1,
            fillers: 0,
            repeats_apart: false,
            goes_ahead: true,
            landing_port: None,
            max_message_len: permit.max_message_len,
            window: application.request.window,
            packet_limit: 256,
            first_message: 0,
        })
    }

    fn close(&mut self, _: &Session, _: CloseReason) -> u32 {
        0
    }
}

fn host(number: u8) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, number), 7169)
}

fn request(sender_id: u64, max_message_len: u64) -> ControlMessage {
    ControlMessage::Request(Request {
        sender_id,
        data_port: 7168,
        max_message_len,
        ..Request::default()
    })
}

struct Receiver {
    node: Node,
    queue: Queue,
    permit: Permit,
    actions: Vec<Action>,
}

impl Receiver {
    fn new() -> Receiver {
        let config = Config {
            address: host(1),
            boot_id: 7,
            key: None,
            policy: Policy::Concurrent,
            limits: Limits {
                waiting_of_address: 4,
                patience: Duration::from_secs(1),
                ..Limits::default()
            },
        };
        let mut receiver = Receiver {
            node: Node::new(config, Time::ZERO),
            queue: Queue { next_key: 0 },
            permit: Permit {
                max_message_len: 1 << 30,
                lease: Duration::from_secs(600),
            },
            actions: Vec::new(),
        };
        receiver.act(|node, local, out| node.add_receiver(Time::ZERO, 7168, &[1], local, out));
        receiver
    }

    fn act<R>(&mut self, work: impl FnOnce(&mut Node, &mut Local<'_>, &mut Vec<Action>) -> R) -> R {
        let mut local = Local {
            policy: &mut self.permit,
            landing: &mut self.queue,
        };
        work(&mut self.node, &mut local, &mut self.actions)
    }

    fn hear(&mut self, now: Time, from: SocketAddrV4, number: u32, message: &ControlMessage) -> Taken {
        self.act(|node, local, out| node.on_message(now, from, (number, message), local, out))
    }

    fn holder(&self) -> Option<SocketAddrV4> {
        let mut sessions = self.node.sessions();
        sessions.next().map(|(_, session)| session.peer)
    }

    /// The session that there is ends, and whoever is next has its place.
    fn end(&mut self, now: Time) {
        let key = self
            .node
            .sessions()
            .next()
            .expect("a session")
            .1
            .grant
            .session_key;
        self.act(|node, local, out| node.close(now, key, local, out));
    }
}

/// A host that asks for short messages a hundred times over has few turns before another one's first.
#[test]
fn who_asks_often_has_few_turns() {
    let mut receiver = Receiver::new();
    let mut now = Time::from_millis(1);
    assert_eq!(receiver.hear(now, host(2), 1, &request(2, 1 << 20)), Taken::Used);
    for number in 0..100 {
        receiver.hear(now, host(3), number, &request(3, 1));
    }
    receiver.hear(now, host(4), 1, &request(4, 1 << 20));
    for _ in 0..4 {
        // They ask on.
        now += Duration::from_secs(2);
        for number in 0..100 {
            receiver.hear(now, host(3), number, &request(3, 1));
        }
        receiver.hear(now, host(4), 1, &request(4, 1 << 20));
        receiver.end(now);
        assert_eq!(receiver.holder(), Some(host(3)));
    }
    receiver.end(now);
    assert_eq!(receiver.holder(), Some(host(4)));
}

/// Only whoever saw a request can answer it, and a grant of what was taken back is given back.
#[test]
fn answers_that_nobody_waits_for() {
    let mut receiver = Receiver::new();
    let mut sender = Receiver::new();
    let now = Time::from_millis(1);
    let ControlMessage::Request(wanted) = request(5, 1 << 20) else {
        unreachable!("it is one");
    };
    sender.node.number_from(0xdead_beef);
    let asked = sender
        .act(|node, local, out| node.request(now, host(1), 7168, wanted, Duration::from_secs(3), local, out));
    let ticket = match asked {
        Ok(lm_protocol::admission::Decision::Requested(ticket)) => ticket,
        other => panic!("{other:?}"),
    };
    assert_eq!(ticket.0, 0xdead_beef);
    receiver.hear(now, host(9), ticket.0, &ControlMessage::Request(wanted));
    let (grant_number, grant) = sent(&receiver.actions).pop().expect("an answer");
    // Another number, another address.
    assert_eq!(sender.hear(now, host(1), 1, &grant), Taken::Unasked(1));
    assert_eq!(
        sender.hear(now, host(8), grant_number, &grant),
        Taken::Unasked(grant_number)
    );
    sender.actions.clear();
    sender.act(|node, local, out| node.end(now, ticket, 0, local, out));
    assert!(matches!(sent(&sender.actions)[..], [(_, ControlMessage::End(_))]));
    sender.actions.clear();
    assert_eq!(
        sender.hear(now, host(1), grant_number, &grant),
        Taken::Unasked(grant_number)
    );
    let ControlMessage::Grant(grant) = grant else {
        panic!("{grant:?}");
    };
    assert!(
        matches!(sent(&sender.actions)[..], [(_, ControlMessage::End(end))] if end.session_key == grant.session_key)
    );
    assert!(sender.node.is_leaving());
}

/// A receiver that grants leases of no time: its sender renews them in measure, and no turn of its goes on for ever.
#[test]
fn a_lease_of_no_time_is_renewed_in_measure() {
    let (mut receiver, mut sender) = (Receiver::new(), Receiver::new());
    let mut now = Time::from_millis(1);
    let wanted = Request {
        data_port: 7168,
        ..Request::default()
    };
    let patience = Duration::from_secs(3);
    let asked = sender.act(|node, local, out| node.request(now, host(1), 7168, wanted, patience, local, out));
    let Ok(lm_protocol::admission::Decision::Requested(ticket)) = asked else {
        panic!("{asked:?}")
    };
    receiver.hear(now, host(9), ticket.0, &ControlMessage::Request(wanted));
    let (_, mut grant) = sent(&receiver.actions).pop().expect("an answer");
    let ControlMessage::Grant(terms) = &mut grant else {
        panic!("{grant:?}")
    };
    terms.lease_ms = 0;
    assert_eq!(sender.hear(now, host(1), ticket.0, &grant), Taken::Used);
    sender.actions.clear();
    let end = now + Duration::from_secs(1);
    while now < end {
        assert_eq!(sender.hear(now, host(1), ticket.0, &grant), Taken::Used);
        now = sender.node.next_deadline().map_or(end, |due| due.max(now));
        sender.act(|node, local, out| node.on_timer(now, local, out));
    }
    assert!(sent(&sender.actions).len() <= 101);
}

fn sent(actions: &[Action]) -> Vec<(u32, ControlMessage)> {
    let messages = actions.iter().filter_map(|action| match action {
        Action::Send { datagram, .. } => ControlMessage::parse(datagram.as_bytes()).ok(),
        _ => None,
    });
    messages.collect()
}
