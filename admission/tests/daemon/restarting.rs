//! Daemons that die, and those that go on for them; interfaces that come and go.

use std::net::SocketAddrV4;
use std::os::fd::AsFd as _;
use std::process::Command;

use lm_dataplane::ipc::*;
use lm_protocol::admission::PROMISE;
use xtask::bed::INTERFACE;

use crate::bed::{Hosts, Side, wait_until};
use crate::program::Client;

fn receiver_at(hosts: &Hosts) -> SocketAddrV4 {
    SocketAddrV4::new(hosts.host(Side::Right).address(), 7168)
}

/// A receiver on the right with a session of a sender on the left: both, the ticket and the key.
fn session(hosts: &Hosts) -> (Client, Client, u32, u64) {
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    let ticket = sender.ask(receiver_at(hosts), 1 << 20);
    let session_key = sender.granted(ticket).session_key;
    assert!(matches!(receiver.event(), Event::Opened { .. }));
    (receiver, sender, ticket, session_key)
}

#[test]
fn the_receivers_daemon_is_killed() {
    let Some(hosts) = Hosts::new("receivers") else {
        return;
    };
    let (left, right) = (hosts.daemon(Side::Left), hosts.daemon(Side::Right));
    let (mut receiver, mut sender, ticket, session_key) = session(&hosts);
    // What was changed is in the file a moment later.
    wait_until("the state is written", || {
        let state = std::fs::read_to_string(hosts.folder.join("Right/state.json")).unwrap_or_default();
        state.contains("\"received\":[{")
    });
    right.kill();
    assert!(receiver.receive().is_none());
    // The gate is there meanwhile, and nobody was told anything.
    assert!(hosts.host(Side::Right).has_xdp_program().unwrap());
    assert_eq!(hosts.pins(Side::Right).len(), 1);

    let right = hosts.daemon(Side::Right);
    let awaited = right.status().programs.remove(0);
    assert!(!awaited.connected);
    // Only who knows the token, is the same user and shows the socket comes in its place.
    let path = hosts.socket(Side::Right);
    let token = receiver.joined().token;
    let mut stranger = Client::connect(&path).hello();
    stranger.refused_for(Call::Rejoin { token: token ^ 1 }, &[], "join anew");
    let other = crate::program::udp(hosts.host(Side::Right), 7999);
    stranger.refused_for(Call::Rejoin { token }, &[other.as_fd()], "7168");
    let mut receiver = Client::connect(&path).hello().rejoin(&mut receiver);
    assert_eq!(receiver.joined().received, [session_key]);
    assert_eq!(receiver.landing_queue(), 1);
    stranger.refused_for(Call::Rejoin { token }, &[other.as_fd()], "join anew");

    // The session goes on, and its gate was never shut.
    let interface = right.interface();
    assert_eq!(
        (interface.sessions.len(), interface.queues[1].open_places),
        (1, 1)
    );
    receiver.tell_progress(session_key, 2, None);
    sender.done(Call::End { ticket, messages: 2 });
    assert_eq!(sender.outcome(ticket), Outcome::Ended { delivered: 2 });
    assert!(matches!(receiver.event(), Event::Closed { .. }));
    receiver.done(Call::Released { session_key });
    // And so does its receiver.
    wait_until("the place is free", || {
        right.interface().queues[1].closing_places == 0
    });
    let ticket = sender.ask(receiver_at(&hosts), 1 << 20);
    sender.granted(ticket);
    assert!(matches!(receiver.event(), Event::Opened { .. }));
    left.stop();
    right.stop();
    assert!(hosts.pins(Side::Right).is_empty());
}

#[test]
fn the_senders_daemon_is_killed() {
    let Some(hosts) = Hosts::new("senders") else {
        return;
    };
    let (left, right) = (hosts.daemon(Side::Left), hosts.daemon(Side::Right));
    let (mut receiver, mut sender, ticket, _) = session(&hosts);
    wait_until("the state is written", || {
        let state = std::fs::read_to_string(hosts.folder.join("Left/state.json")).unwrap_or_default();
        state.contains("\"sent\":[{")
    });
    left.kill();
    let left = hosts.daemon(Side::Left);
    let mut sender = Client::connect(&hosts.socket(Side::Left))
        .hello()
        .rejoin(&mut sender);
    assert_eq!(sender.joined().sent, [ticket]);
    // The new daemon renews its lease.
    let mut before_s = f64::INFINITY;
    wait_until("the lease is renewed", || {
        let left_s = right.interface().sessions[0].expires_in_s;
        left_s > std::mem::replace(&mut before_s, left_s)
    });
    sender.done(Call::End { ticket, messages: 1 });
    assert!(matches!(sender.outcome(ticket), Outcome::Ended { .. }));
    assert!(matches!(
        receiver.event(),
        Event::Closed {
            messages: Some(1),
            ..
        }
    ));
    left.stop();
    right.stop();
}

/// Under `exclusive` as well: what the gate lets through stands on the voters' word to this host, in whichever life.
#[test]
fn an_exclusive_session_goes_on() {
    let Some(hosts) = Hosts::new("exclusively") else {
        return;
    };
    let policy = ["--policy", "exclusive", "--voter", "198.18.0.1"];
    let left = hosts.daemon_with(Side::Left, &policy);
    let mut right = hosts.daemon_with(Side::Right, &policy);
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 9000);
    // A voter that has just started abstains.
    let (mut ticket, mut session_key) = (0, 0);
    wait_until("granted after the voter's silence", || {
        ticket = sender.ask(receiver_at(&hosts), 1 << 20);
        match sender.outcome(ticket) {
            Outcome::Granted(control) => {
                session_key = crate::program::grant(&control).session_key;
                true
            }
            _ => false,
        }
    });
    assert!(matches!(receiver.event(), Event::Opened { .. }));
    wait_until("the state is written", || {
        let state = std::fs::read_to_string(hosts.folder.join("Right/state.json")).unwrap_or_default();
        state.contains("\"received\":[{")
    });
    // Killed, and killed again, and ended by its unit.
    for is_killed in [true, true, false] {
        match is_killed {
            true => drop(right.kill()),
            false => right.hand_over(),
        }
        right = hosts.daemon_with(Side::Right, &policy);
        receiver = Client::connect(&hosts.socket(Side::Right))
            .hello()
            .rejoin(&mut receiver);
        assert_eq!(receiver.joined().received, [session_key]);
        // Longer than any promise: the new daemon has asked for its own.
        std::thread::sleep(PROMISE * 5 / 4);
        let interface = right.interface();
        assert_eq!(
            (interface.sessions.len(), interface.queues[1].open_places),
            (1, 1)
        );
        // Everybody else still knows.
        assert_eq!(left.interface().recv_addrs.len(), 1);
    }
    // Built anew, its gate is as long open as the host may receive, and not for ever.
    receiver.done(Call::CloseGate { session_key });
    receiver.done(Call::Quiesce { queue: 1 });
    receiver.done(Call::OpenGate {
        session_key,
        first_message: 0,
    });
    sender.done(Call::End { ticket, messages: 0 });
    assert!(matches!(sender.outcome(ticket), Outcome::Ended { .. }));
    left.stop();
    right.stop();
}

#[test]
fn who_does_not_come_back_is_gone() {
    let Some(hosts) = Hosts::new("lost") else { return };
    let (left, right) = (hosts.daemon(Side::Left), hosts.daemon(Side::Right));
    let (receiver, mut sender, ticket, _) = session(&hosts);
    right.hand_over();
    assert!(hosts.host(Side::Right).has_xdp_program().unwrap());
    let right = hosts.daemon(Side::Right);
    assert_eq!(right.interface().sessions.len(), 1);
    drop(receiver);
    // As its death would have: its sender is told, and its queues are others'.
    assert_eq!(sender.outcome(ticket), Outcome::Lost);
    wait_until("its queues are free", || right.is_free());
    assert!(right.status().programs.is_empty());
    Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    left.stop();
    right.stop();
}

#[test]
fn what_the_state_does_not_know_is_closed() {
    let Some(hosts) = Hosts::new("unknown") else {
        return;
    };
    let (left, right) = (hosts.daemon(Side::Left), hosts.daemon(Side::Right));
    let (_receiver, mut sender, ticket, _) = session(&hosts);
    right.kill();
    std::fs::remove_file(hosts.folder.join("Right/state.json")).unwrap();
    let right = hosts.daemon(Side::Right);
    let interface = right.interface();
    assert!(interface.sessions.is_empty());
    wait_until("the queues are free", || right.is_free());
    // The sender's daemon asks, and hears of another life.
    assert_eq!(sender.outcome(ticket), Outcome::Lost);
    left.stop();
    let output = right.stop();
    assert!(
        output.stderr.contains("a session that nobody knows is closed"),
        "{}",
        output.stderr
    );
}

fn ip(arguments: &str) {
    let done = Command::new("ip")
        .args(arguments.split_whitespace())
        .status()
        .unwrap();
    assert!(done.success(), "ip {arguments}");
}

fn unplug(hosts: &Hosts) {
    let one = hosts.host(Side::Left).name();
    ip(&format!("-n {one} link delete {INTERFACE}"));
}

fn plug_in(hosts: &Hosts) {
    let (one, other) = (hosts.host(Side::Left).name(), hosts.host(Side::Right).name());
    let queues = "numrxqueues 2 numtxqueues 2";
    ip(&format!(
        "link add {INTERFACE} netns {one} {queues} type veth peer name {INTERFACE} netns {other} {queues}"
    ));
    ip(&format!("-n {other} link set {INTERFACE} up"));
    ip(&format!("-n {one} addr add 198.18.0.1/24 dev {INTERFACE}"));
    ip(&format!("-n {one} link set {INTERFACE} up"));
}

#[test]
fn an_interface_goes_while_no_daemon_looks() {
    let Some(hosts) = Hosts::new("unseen") else { return };
    hosts.daemon(Side::Left).kill();
    let old = hosts.pins(Side::Left);
    assert_eq!(old.len(), 1);
    unplug(&hosts);
    plug_in(&hosts);
    let left = hosts.daemon(Side::Left);
    let new = hosts.pins(Side::Left);
    assert_eq!(new.len(), 1, "{new:?}");
    assert_ne!(old, new);
    left.stop();
    assert!(hosts.pins(Side::Left).is_empty());
}

#[test]
fn an_interface_goes_and_comes_back() {
    let Some(hosts) = Hosts::new("vanish") else { return };
    let left = hosts.daemon(Side::Left);
    let mut program = Client::receiver(&hosts.socket(Side::Left), hosts.host(Side::Left), 7168);
    unplug(&hosts);
    assert!(program.receive().is_none());
    wait_until("it is named", || {
        left.interface().absent.is_some_and(|why| why.contains(INTERFACE))
    });
    let mut late = Client::connect(&hosts.socket(Side::Left)).hello();
    late.refused_for(Client::join_call(true), &[], "gone");
    wait_until("no pin is left", || hosts.pins(Side::Left).is_empty());

    plug_in(&hosts);
    wait_until("it is served again", || left.interface().absent.is_none());
    drop(program);
    // Another port: a process that another test forks may hold the first one's for a moment still.
    Client::receiver(&hosts.socket(Side::Left), hosts.host(Side::Left), 7300);
    left.stop();
    assert!(hosts.pins(Side::Left).is_empty());
}
