//! Programs that may not, lie, or die.

use std::os::fd::AsFd as _;
use std::time::Duration;

use lm_dataplane::ipc::*;
use lm_dataplane::memory::Mapping;
use xtask::bed::INTERFACE;

use crate::bed::{Hosts, Side, wait_until};
use crate::program::{Client, EXTREMES, MEMORY_LEN, Words, memory, udp};

#[test]
fn only_who_is_on_the_list() {
    let Some(hosts) = Hosts::new("list") else { return };
    let daemon = hosts.daemon_with(Side::Left, &["--allow-uid", "1234", "--allow-gid", "4321"]);
    let path = hosts.socket(Side::Left);
    let socket = udp(hosts.host(Side::Left), 7168);
    let mut stranger = Client::connect_as(&path, 1000).hello();
    stranger.refused_for(Client::join_call(true), &[socket.as_fd()], "--allow-uid 1000");
    stranger.refused_for(Call::Status, &[], "user 1000");
    for uid in [1234, 4321] {
        let mut friend = Client::connect_as(&path, uid).hello();
        let (reply, _) = friend.call_beside(Client::join_call(true), &[socket.as_fd()]);
        assert!(matches!(reply, Reply::Joined(_)), "{reply:?}");
        drop(friend);
        // A process that another test forks holds all our descriptors until it runs its own program.
        wait_until("its port is free", || daemon.status().programs.is_empty());
    }
    assert_eq!(daemon.status().refusals, 2);
    // However many strangers come, a user on the list still can: they have 16 connections, of which one user has 8.
    let mut crowd = Vec::new();
    let let_in = [1000, 1001, 1002].map(|uid| {
        let before = crowd.len();
        let all = (0..20).map(|_| Client::connect_as(&path, uid));
        crowd.extend(all.filter_map(|mut client| client.is_let_in().then_some(client)));
        crowd.len() - before
    });
    assert_eq!(let_in, [7, 8, 0], "beside the one of before");
    Client::connect_as(&path, 1234).hello();
    drop(crowd);
    daemon.stop();
}

#[test]
fn lies_are_refused_and_disturb_nobody() {
    let Some(hosts) = Hosts::new("lies") else { return };
    let daemon = hosts.daemon_with(Side::Left, &["--memory-max", "2M"]);
    let path = hosts.socket(Side::Left);
    let host = hosts.host(Side::Left);
    let mut honest = Client::receiver(&path, host, 7168);

    // Before Hello, and another version.
    let mut client = Client::connect(&path);
    client.refused_for(Client::join_call(true), &[], "Hello");
    client.refused_for(Call::Hello { version: 99 }, &[], "same release");
    let mut client = client.hello();
    // Sockets that show nothing.
    let stream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let control = honest.udp.as_ref().unwrap();
    for (beside, why) in [
        (vec![], "UDP socket"),
        (vec![stream.as_fd()], "UDP socket"),
        (vec![elsewhere.as_fd()], "not to 198.18.0.1"),
        (vec![control.as_fd()], "another program's"),
        (vec![control.as_fd(), elsewhere.as_fd()], "UDP socket"),
    ] {
        client.refused_for(Client::join_call(false), &beside, why);
    }
    client.refused_for(Call::Quiesce { queue: 0 }, &[], "Join");
    let socket = udp(host, 7170);
    for (interface, mode, why) in [
        ("lm9", Mode::Auto, "--interface lm9"),
        (INTERFACE, Mode::ZeroCopy, "--admission embedded"),
        (INTERFACE, Mode::Generic, "in the driver"),
        // The receiver has both queues.
        (INTERFACE, Mode::Auto, "all 2 queues of lm0 are taken"),
    ] {
        let call = Call::Join {
            interface: interface.to_owned(),
            landing: false,
            mode,
        };
        client.refused_for(call, &[socket.as_fd()], why);
    }
    assert_eq!(
        (honest.joined().general_queue, honest.landing_queue()),
        (Some(0), 1)
    );

    // Memory that is not what it is said to be.
    let (small, large) = (memory(MEMORY_LEN / 2), memory(4 << 20));
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, MEMORY_LEN).unwrap();
    for (registered_len, memory, why) in [
        (MEMORY_LEN, Some(&small), "bytes"),
        (MEMORY_LEN, Some(&unsealed), "F_SEAL_SHRINK"),
        (4 << 20, Some(&large), "--memory-max"),
        (1000, Some(&large), "whole pages"),
        (u64::MAX, Some(&large), "--memory-max"),
        (MEMORY_LEN, None, "beside the call"),
    ] {
        let beside: Vec<_> = memory.iter().map(|memory| memory.as_fd()).collect();
        honest.refused_for(
            Client::channel_call(0, Role::General, registered_len),
            &beside,
            why,
        );
    }
    let call = Client::channel_call(7, Role::Transmit, MEMORY_LEN);
    honest.refused_for(call, &[large.as_fd()], "queue 7");
    let mut call = Client::channel_call(0, Role::General, MEMORY_LEN);
    if let Call::OpenChannel(channel) = &mut call {
        channel.ring_lens[3] = 1 << 31;
    }
    honest.refused_for(call, &[large.as_fd()], "ring");
    // Sessions that are nobody's.
    let session_key = 1;
    for call in [
        Call::CloseGate { session_key },
        Call::Released { session_key },
        Call::Abort {
            session_key,
            delivered: 0,
        },
        Call::OpenGate {
            session_key,
            first_message: 0,
        },
    ] {
        honest.refused_for(call, &[], "no session");
    }
    for (to, why) in [
        ("198.18.0.1:7168", "this host"),
        ("192.0.2.1:7168", "not on the subnet"),
    ] {
        match honest.try_ask(to.parse().unwrap(), 1 << 20) {
            Reply::Refused(told) => assert!(told.contains(why), "{told}"),
            other => panic!("not refused: {other:?}"),
        }
    }
    // No call at all: the daemon hangs up, on this one only.
    client.send_bytes(&[0xff; 100], &[]);
    assert!(client.receive().is_none());
    let mut client = Client::connect(&path).hello();
    client.send_bytes(&[1; 8], &[large.as_fd(); 8]);
    assert!(client.receive().is_none());
    let mut client = Client::connect(&path).hello();
    client.send_bytes(&vec![0; MESSAGE_LEN_MAX + 1], &[]);
    assert!(client.receive().is_none());
    honest.tell_progress(1, 1, None);
    wait_until("only the honest one is left", || {
        daemon.status().programs.len() == 1
    });
    daemon.stop();
}

#[test]
fn who_goes_leaves_nothing() {
    let Some(hosts) = Hosts::new("goes") else { return };
    let left = hosts.daemon(Side::Left);
    let right = hosts.daemon(Side::Right);
    let descriptors = |id| std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().count();
    // Each queue gets its log when it is used first.
    let mut before = None;
    let receiver_at = std::net::SocketAddrV4::new(hosts.host(Side::Right).address(), 7168);
    for _ in 0..3 {
        let receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
        let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 7168);
        let ticket = sender.ask(receiver_at, 1 << 20);
        sender.granted(ticket);
        assert_eq!(right.interface().sessions.len(), 1);
        // It dies with a grant: all that it has goes with it, as the kernel sees to.
        drop(receiver);
        assert!(matches!(sender.outcome(ticket), Outcome::Lost));
        wait_until("nothing is left of the receiver", || {
            right.interface().sessions.is_empty() && right.is_free()
        });
        // A sender that dies ends its session as well.
        drop(sender);
        wait_until("nothing is left of the sender", || {
            left.status().programs.is_empty()
        });
        before.get_or_insert_with(|| descriptors(right.id()));
    }
    // A sender dies, and its receiver's place is free again once the receiver has done with it.
    let mut receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender = Client::sender(&hosts.socket(Side::Left), hosts.host(Side::Left), 7168);
    let ticket = sender.ask(receiver_at, 1 << 20);
    let session_key = sender.granted(ticket).session_key;
    assert!(matches!(receiver.event(), Event::Opened { .. }));
    drop(sender);
    match receiver.event() {
        Event::Closed { session_key: of, .. } => assert_eq!(of, session_key),
        other => panic!("not closed: {other:?}"),
    }
    assert_eq!(right.interface().queues[1].closing_places, 1);
    receiver.done(Call::Released { session_key });
    wait_until("the place is free", || {
        right.interface().queues[1].closing_places == 0
    });
    drop(receiver);
    wait_until("no descriptor is left", || {
        Some(descriptors(right.id())) <= before
    });
    left.stop();
    right.stop();
}

/// Whatever it waits for: the gate to be quiet, or the kernel to bind its socket. Whoever comes behind it finds it gone.
#[test]
fn one_that_dies_with_a_call_under_way_is_gone_at_once() {
    let Some(hosts) = Hosts::new("dies") else { return };
    let daemon = hosts.daemon(Side::Left);
    let (path, host) = (hosts.socket(Side::Left), hosts.host(Side::Left));
    let ask = || Client::connect(&path).hello().status();
    let mut late = 0;
    for round in 0..20 {
        let mut program = Client::receiver(&path, host, 7200 + round);
        let (queue, memory) = (program.landing_queue(), memory(64 << 20));
        match round % 2 {
            0 => program.send(Call::Quiesce { queue }, &[]),
            _ => program.send(
                Client::channel_call(queue, Role::Landing, 64 << 20),
                &[memory.as_fd()],
            ),
        };
        // It has taken the call.
        ask();
        program.hang_up();
        let found = ask();
        let is_free = found.interfaces[0].queues.iter().all(|queue| queue.pid.is_none());
        late += u32::from(!found.programs.is_empty() || !is_free);
        drop(program);
        wait_until("it is gone", || ask().programs.is_empty());
    }
    assert_eq!(late, 0, "of 20 programs");
    daemon.stop();
}

/// Memory that others write: a program counts its queues' packets itself, and may say anything.
#[test]
fn whatever_programs_write_into_their_logs_the_daemon_goes_on() {
    let Some(hosts) = Hosts::new("logs") else { return };
    let daemon = hosts.daemon(Side::Left);
    let (path, host) = (hosts.socket(Side::Left), hosts.host(Side::Left));
    let mut program = Client::receiver(&path, host, 7168);
    program.open(program.joined().general_queue.unwrap(), Role::General);
    // A socket, and its log.
    let log = |at: usize| Words(Mapping::of_file(program.channels[at].as_fd(), (1 << 19) + 4096).unwrap());
    let (logs, malformed) = (
        [log(1), log(3)],
        || daemon.interface().packets["gate_pass_malformed"],
    );
    for extreme in EXTREMES.into_iter().rev() {
        logs.iter().for_each(|log| log.fill(extreme));
        assert_eq!(malformed(), extreme.wrapping_add(extreme));
    }
    // They are added to what is retired when the queues get new ones.
    program.hang_up();
    wait_until("its queues are free", || daemon.is_free());
    assert_eq!(malformed(), u64::MAX - 1);
    daemon.stop();
}

#[test]
fn one_that_does_not_listen_holds_up_nobody() {
    let Some(hosts) = Hosts::new("deaf") else { return };
    let daemon = hosts.daemon_with(Side::Left, &["--programs-max", "3"]);
    let path = hosts.socket(Side::Left);
    let mut deaf = Client::connect(&path).hello();
    // Calls without end, and no answer taken: the daemon drops it when too much waits.
    let (number, call) = (9, Call::Status);
    let bytes = postcard::to_stdvec(&Asked { number, call }).unwrap();
    let mut patient = Client::connect(&path).hello();
    wait_until("it is dropped", || !deaf.try_send(&bytes));
    patient.done(Call::Hello { version: VERSION });
    // No more programs than are allowed: another one is turned away.
    let further: Vec<Client> = (0..2).map(|_| Client::connect(&path)).collect();
    let mut further: Vec<Client> = further.into_iter().map(Client::hello).collect();
    assert!(!Client::connect(&path).is_let_in());
    further.clear();
    wait_until("there is room again", || Client::connect(&path).is_let_in());
    assert!(patient.hears_nothing(Duration::from_millis(10)));
    daemon.stop();
}
