//! Grants between two daemons.

use std::net::SocketAddrV4;

use lm_dataplane::ipc::*;
use lm_protocol::admission::PROMISE;
use lm_protocol::control::{ControlMessage, RejectReason, Request};
use lm_protocol::geometry::Wire;

use crate::bed::{Hosts, Side, wait_until};
use crate::program::{Client, grant};

fn at(hosts: &Hosts, side: Side, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(hosts.host(side).address(), port)
}

#[test]
fn a_session_from_request_to_end() {
    let Some(hosts) = Hosts::new("session") else {
        return;
    };
    let (left, right) = (hosts.daemon(Side::Left), hosts.daemon(Side::Right));
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    sender.open(1, Role::Transmit);
    let ticket = sender.ask(at(&hosts, Side::Right, 7168), 1 << 20);
    let granted = sender.granted(ticket);
    let Event::Opened {
        from,
        row,
        request,
        grant: told,
    } = receiver.event()
    else {
        panic!("not opened")
    };
    assert_eq!(from, at(&hosts, Side::Left, 9000));
    assert_eq!(grant(&told), granted);
    assert_eq!(granted.data_port, 7168);
    assert_eq!((granted.landing_queue, granted.tx_queue), (1, Some(1)));
    assert!(
        matches!(request.parse().unwrap().1, ControlMessage::Request(request) if request.data_port == 9000)
    );

    let interface = right.interface();
    assert_eq!(interface.sessions.len(), 1);
    assert_eq!(interface.sessions[0].from, from);
    assert_eq!(
        (interface.queues[1].role.as_str(), interface.queues[1].open_places),
        ("landing", 1)
    );
    let list = |daemon: &crate::bed::Daemon| {
        let list = daemon.interface().recv_addrs;
        list.iter()
            .map(|entry| format!("{} {}", entry.address, entry.flag))
            .collect::<Vec<_>>()
    };
    assert_eq!(list(&right), ["198.18.0.2 10"]);
    // Told to all hosts of the subnet.
    wait_until("the other host knows", || list(&left) == ["198.18.0.2 01"]);

    // The same again is another session, of another program.
    let call = Call::End {
        ticket: ticket + 1,
        messages: 0,
    };
    sender.refused_for(call, &[], "ticket");
    let session_key = granted.session_key;
    receiver.tell_progress(session_key, 3, None);
    assert_eq!(right.interface().sessions[0].delivered, 3);
    sender.done(Call::End { ticket, messages: 4 });
    assert_eq!(sender.outcome(ticket), Outcome::Ended { delivered: 3 });
    let messages = Some(4);
    assert_eq!(
        receiver.event(),
        Event::Closed {
            session_key,
            messages,
            was_idle: false,
        }
    );
    assert_eq!(right.interface().queues[1].open_places, 0);
    receiver.done(Call::Released { session_key });
    wait_until("nothing is left of it", || {
        let queue = right.interface().queues.remove(1);
        queue.closing_places == 0
    });
    assert_eq!(
        usize::from(row),
        lm_protocol::landing::SessionAdmission::row_of(session_key) as usize
    );
    left.stop();
    right.stop();
}

#[test]
fn who_may_not_and_who_is_not_there() {
    let Some(hosts) = Hosts::new("refusals") else {
        return;
    };
    let left = hosts.daemon(Side::Left);
    let right = hosts.daemon(Side::Right);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    let reason = |outcome: Outcome| match outcome {
        Outcome::Rejected(control) => match control.parse().unwrap().1 {
            ControlMessage::Reject(reject) => format!("{:?} {}", reject.reason, reject.limit),
            other => panic!("{other:?}"),
        },
        other => panic!("not rejected: {other:?}"),
    };
    let ticket = sender.ask(at(&hosts, Side::Right, 7168), 1 << 20);
    assert_eq!(reason(sender.outcome(ticket)), "NoReceiver 0");

    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut offer = receiver.offer();
    offer.max_message_len = 1000;
    receiver.done(Call::Receive(offer.clone()));
    let ticket = sender.ask(at(&hosts, Side::Right, 7168), 1001);
    assert_eq!(reason(sender.outcome(ticket)), "TooLarge 1000");
    offer.allow = vec![("192.0.2.0".parse().unwrap(), 24)];
    receiver.done(Call::Receive(offer.clone()));
    let ticket = sender.ask(at(&hosts, Side::Right, 7168), 1000);
    assert_eq!(reason(sender.outcome(ticket)), "NotAllowed 0");
    offer.allow.push(("198.18.0.1".parse().unwrap(), 32));
    receiver.done(Call::Receive(offer));
    let ticket = sender.ask(at(&hosts, Side::Right, 7168), 1000);
    let key = sender.granted(ticket).session_key;
    assert!(matches!(receiver.event(), Event::Opened { .. }));

    // The receiver ends it: its sender is told, and how much was delivered is said.
    receiver.done(Call::Abort {
        session_key: key,
        delivered: 9,
    });
    assert_eq!(sender.outcome(ticket), Outcome::Lost);
    wait_until("its place is free", || {
        right.interface().queues[1].closing_places == 0
    });
    right.stop();

    // A host without a daemon.
    let request = sender.request(1000);
    let call = Call::Request {
        to: at(&hosts, Side::Right, 7168),
        request,
        patience_ms: 300,
    };
    let Reply::Requested(Decision::Requested(ticket)) = sender.call(call) else {
        panic!("not requested")
    };
    assert_eq!(sender.outcome(ticket), Outcome::Unreachable);
    left.stop();
}

#[test]
fn a_gate_is_shut_and_opened_under_its_session() {
    let Some(hosts) = Hosts::new("gate") else { return };
    let (left, right) = (hosts.daemon(Side::Left), hosts.daemon(Side::Right));
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    let ticket = sender.ask(at(&hosts, Side::Right, 7168), 1 << 20);
    let session_key = sender.granted(ticket).session_key;
    assert!(matches!(receiver.event(), Event::Opened { .. }));
    let queue = receiver.landing_queue();
    receiver.done(Call::CloseGate { session_key });
    receiver.done(Call::Quiesce { queue });
    // The channel is built anew; the kernel lets the old one go when its descriptor is closed.
    receiver.channels.clear();
    receiver.open(queue, Role::Landing);
    receiver.done(Call::OpenGate {
        session_key,
        first_message: 5,
    });
    assert_eq!(right.interface().sessions.len(), 1);
    sender.done(Call::End { ticket, messages: 0 });
    assert!(matches!(sender.outcome(ticket), Outcome::Ended { .. }));
    left.stop();
    right.stop();
}

#[test]
fn more_senders_than_places() {
    let Some(hosts) = Hosts::with_queues("places", 24) else {
        return;
    };
    let (left, right) = (hosts.daemon(Side::Left), hosts.daemon(Side::Right));
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    assert_eq!(receiver.landing_queue(), 23);
    let mut senders: Vec<(Client, u32)> = (0..17)
        .map(|number| {
            let host = hosts.host(Side::Left);
            let mut sender = Client::sender(&hosts.socket(Side::Left), host, 9000 + number);
            let ticket = sender.ask(at(&hosts, Side::Right, 7168), 1 << 20);
            (sender, ticket)
        })
        .collect();
    let granted: Vec<_> = (senders.iter_mut())
        .map(|(sender, ticket)| sender.granted(*ticket))
        .collect();
    // The last one begins without a place.
    let lands: Vec<bool> = granted.iter().map(|grant| grant.lands).collect();
    assert_eq!(lands, [&[true; 16][..], &[false]].concat());
    for _ in 0..17 {
        assert!(matches!(receiver.event(), Event::Opened { .. }));
    }
    assert_eq!(right.interface().queues[23].open_places, 16);
    // A place is free when the session in it is over: the last one gets it then.
    let (mut first, ticket) = senders.remove(0);
    first.done(Call::End { ticket, messages: 0 });
    assert!(matches!(receiver.event(), Event::Closed { .. }));
    let session_key = granted[16].session_key;
    assert_eq!(receiver.event(), Event::Landed { session_key });
    let first_message = 0;
    receiver.done(Call::OpenGate {
        session_key,
        first_message,
    });
    let sessions = right.interface().sessions;
    assert!(sessions.len() == 16 && sessions.iter().all(|session| session.lands));
    left.stop();
    right.stop();
}

/// Where the gate is in the network stack every session stays without a place, and what has no other path is refused.
#[test]
fn nothing_lands_in_generic_mode() {
    let Some(hosts) = Hosts::new("generic") else {
        return;
    };
    let left = hosts.daemon(Side::Left);
    let right = hosts.daemon_with(Side::Right, &["--mode", "generic"]);
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    let to = at(&hosts, Side::Right, 7168);

    let Ok((_, ControlMessage::Request(request))) = sender.request(60_000).parse() else {
        panic!("no request")
    };
    let fragments = ControlMessage::Request(Request {
        wire: Wire::IpFrag,
        ..request
    });
    let reply = sender.call(Call::Request {
        to,
        request: Control::new(1, &fragments),
        patience_ms: 10_000,
    });
    let Reply::Requested(Decision::Requested(ticket)) = reply else {
        panic!("not requested: {reply:?}")
    };
    let Outcome::Rejected(refusal) = sender.outcome(ticket) else {
        panic!("not rejected")
    };
    assert!(
        matches!(refusal.parse(), Ok((_, ControlMessage::Reject(reject))) if reject.reason == RejectReason::Unsupported)
    );

    let ticket = sender.ask(to, 1 << 20);
    let granted = sender.granted(ticket);
    assert_eq!(granted.landing_queue, receiver.landing_queue());
    assert_eq!((granted.tx_queue, granted.lands), (None, false));
    let Event::Opened { grant: told, .. } = receiver.event() else {
        panic!("not opened")
    };
    assert_eq!(grant(&told), granted);
    let interface = right.interface();
    assert_eq!(interface.gate, "generic");
    assert_eq!(
        (interface.sessions.len(), interface.sessions[0].lands),
        (1, false)
    );
    assert_eq!(interface.queues[1].open_places, 0);
    left.stop();
    right.stop();
}

#[test]
fn one_receiver_in_the_cluster_under_exclusive() {
    let Some(hosts) = Hosts::new("exclusive") else {
        return;
    };
    let policy = ["--policy", "exclusive", "--voter", "198.18.0.1"];
    let (left, right) = (
        hosts.daemon_with(Side::Left, &policy),
        hosts.daemon_with(Side::Right, &policy),
    );
    assert_eq!(left.status().policy, "exclusive");
    let mut here = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    // A voter that has just started abstains: it may have promised something in its life before. Until then nothing lands.
    let ticket = sender.ask(at(&hosts, Side::Right, 7168), 1 << 20);
    assert!(!sender.granted(ticket).lands);
    wait_until("it has the cluster's place after the voter's silence", || {
        right.interface().sessions.iter().any(|session| session.lands)
    });
    assert!(matches!(here.event(), Event::Opened { .. }));
    // Everybody knows, so nobody asks: neither the same receiver nor another one.
    wait_until("the sender's host knows", || {
        !left.interface().recv_addrs.is_empty()
    });
    let request = sender.request(1 << 20);
    let patience_ms = 1000;
    let call = |to| Call::Request {
        to,
        request: request.clone(),
        patience_ms,
    };
    let decision = sender.call(call(at(&hosts, Side::Right, 7168)));
    assert_eq!(decision, Reply::Requested(Decision::Cancel));
    let decision = sender.call(call("198.18.0.9:7168".parse().unwrap()));
    let Reply::Requested(Decision::OneCopy(nobody)) = decision else {
        panic!("not without a place: {decision:?}")
    };
    assert_eq!(sender.outcome(nobody), Outcome::Unreachable);
    // It stays so for longer than any promise, which is renewed.
    std::thread::sleep(PROMISE * 3 / 2);
    assert_eq!(right.interface().sessions.len(), 1);
    sender.done(Call::End { ticket, messages: 0 });
    assert!(matches!(sender.outcome(ticket), Outcome::Ended { .. }));
    left.stop();
    right.stop();
}
