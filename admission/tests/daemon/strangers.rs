//! Programs that may not, lie, or die.

use std::os::fd::AsFd as _;
use std::time::Duration;

use lm_dataplane::ipc::*;
use lm_dataplane::memory::Mapping;
use xtask::bed::{BedConfig, Host, Side};

use crate::bed::{Hosts, wait_until};
use crate::program::{Client, EXTREMES, MEMORY_LEN, Words, memory, udp};

#[test]
fn only_who_is_on_the_list() {
    let Some(hosts) = Hosts::new("list") else { return };
    let daemon = hosts.daemon_with(Side::Left, &["--allow-uid", "1234", "--allow-gid", "4321"]);
    let path = hosts.socket(Side::Left);
    let socket = udp(hosts.host(Side::Left), 7168);
    let mut stranger = Client::connect_as(&path, 1000).hello();
    let told = stranger.refused(Client::join_call(true), &[socket.as_fd()]);
    assert!(told.contains("--allow-uid 1000"), "{told}");
    assert!(stranger.refused(Call::Status, &[]).contains("user 1000"));
    for uid in [1234, 4321] {
        let mut friend = Client::connect_as(&path, uid).hello();
        let (reply, _) = friend.call_beside(Client::join_call(true), &[socket.as_fd()]);
        assert!(matches!(reply, Reply::Joined(_)), "{reply:?}");
        drop(friend);
        // A process that another test forks holds all our descriptors until it runs its own program.
        wait_until("its port is free", || daemon.status().programs.is_empty());
    }
    assert_eq!(daemon.status().refusals, 2);
    // However many strangers come, who may come still can.
    let crowd: Vec<Client> = (0..40).map(|_| Client::connect_as(&path, 1000)).collect();
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
    assert!(client.refused(Client::join_call(true), &[]).contains("Hello"));
    assert!(
        client
            .refused(Call::Hello { version: 99 }, &[])
            .contains("same release")
    );
    let mut client = client.hello();
    // Sockets that show nothing.
    let stream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let control = honest.udp.as_ref().unwrap();
    for (beside, told) in [
        (vec![], "UDP socket"),
        (vec![stream.as_fd()], "UDP socket"),
        (vec![elsewhere.as_fd()], "not to 198.18.0.1"),
        (vec![control.as_fd()], "another program's"),
        (vec![control.as_fd(), elsewhere.as_fd()], "UDP socket"),
    ] {
        let what = client.refused(Client::join_call(false), &beside);
        assert!(what.contains(told), "{what}");
    }
    assert!(client.refused(Call::Quiesce { queue: 0 }, &[]).contains("Join"));
    let call = Call::Join {
        interface: "lm9".to_owned(),
        landing: true,
        mode: Mode::Auto,
    };
    assert!(client.refused(call, &[]).contains("--interface lm9"));
    let socket = udp(host, 7170);
    for (mode, told) in [
        (Mode::ZeroCopy, "--admission embedded"),
        (Mode::Generic, "in the driver"),
    ] {
        let call = Call::Join {
            interface: "lm0".to_owned(),
            landing: false,
            mode,
        };
        let what = client.refused(call, &[socket.as_fd()]);
        assert!(what.contains(told), "{what}");
    }
    // The receiver has both queues.
    assert_eq!(
        (honest.joined().general_queue, honest.landing_queue()),
        (Some(0), 1)
    );
    let what = client.refused(Client::join_call(false), &[socket.as_fd()]);
    assert!(what.contains("all 2 queues of lm0 are taken"), "{what}");

    // Memory that is not what it is said to be.
    let small = memory(MEMORY_LEN / 2);
    let open = |registered_len| Client::channel_call(0, Role::General, registered_len);
    assert!(
        honest
            .refused(open(MEMORY_LEN), &[small.as_fd()])
            .contains("bytes")
    );
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, MEMORY_LEN).unwrap();
    assert!(
        honest
            .refused(open(MEMORY_LEN), &[unsealed.as_fd()])
            .contains("F_SEAL_SHRINK")
    );
    let large = memory(4 << 20);
    assert!(
        honest
            .refused(open(4 << 20), &[large.as_fd()])
            .contains("--memory-max")
    );
    assert!(
        honest
            .refused(open(1000), &[large.as_fd()])
            .contains("whole pages")
    );
    assert!(
        honest
            .refused(open(u64::MAX), &[large.as_fd()])
            .contains("--memory-max")
    );
    assert!(honest.refused(open(MEMORY_LEN), &[]).contains("beside the call"));
    let call = Client::channel_call(7, Role::Transmit, MEMORY_LEN);
    assert!(honest.refused(call, &[large.as_fd()]).contains("queue 7"));
    let call = Call::OpenChannel {
        queue: 0,
        role: Role::General,
        registered_len: MEMORY_LEN,
        chunk_len: 2048,
        multi_buffer: false,
        ring_lens: [64, 64, 64, 1 << 31],
    };
    assert!(honest.refused(call, &[large.as_fd()]).contains("ring"));
    // Sessions that are nobody's.
    for call in [
        Call::CloseGate { session_key: 1 },
        Call::Released { session_key: 1 },
        Call::Abort {
            session_key: 1,
            delivered: 0,
        },
        Call::OpenGate {
            session_key: 1,
            first_message: 0,
        },
    ] {
        assert!(honest.refused(call, &[]).contains("no session"));
    }
    let own = "198.18.0.1:7168".parse().unwrap();
    let away = "192.0.2.1:7168".parse().unwrap();
    for (to, told) in [(own, "this host"), (away, "not on the subnet")] {
        let request = honest.request(1 << 20);
        let call = Call::Request {
            to,
            request,
            patience_ms: 1000,
        };
        let what = honest.refused(call, &[]);
        assert!(what.contains(told), "{what}");
    }
    // No call at all: the daemon hangs up, on this one only.
    client.send_bytes(&[0xff; 100], &[]);
    assert!(client.receive().is_none());
    let client = Client::connect(&path).hello();
    let beside = [large.as_fd(); 8];
    client.send_bytes(&[1; 8], &beside);
    let mut client = client;
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
            let interface = right.interface();
            let is_free = |queue: &lm_admission::daemon::status::QueueStatus| queue.role == "free";
            interface.sessions.is_empty() && interface.queues.iter().all(is_free)
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
    let is_free = |queue: &lm_admission::daemon::status::QueueStatus| queue.role == "free";
    wait_until("its queues are free", || {
        daemon.interface().queues.iter().all(is_free)
    });
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
    let bytes = postcard::to_stdvec(&Asked {
        number: 9,
        call: Call::Status,
    })
    .unwrap();
    let is_up = std::cell::Cell::new(true);
    let patient = Client::connect(&path).hello();
    wait_until("it is dropped", || {
        is_up.set(deaf.try_send(&bytes));
        !is_up.get()
    });
    let mut patient = patient;
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

/// Numbers from a seed (xorshift64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// One of everything that a program can say.
fn any_call(numbers: &mut Numbers, request: &Control) -> Call {
    let queue = numbers.below(4) as u16;
    let session_key = numbers.below(3);
    match numbers.below(15) {
        0 => Call::Hello { version: VERSION },
        1 => Client::join_call(numbers.below(2) == 0),
        2 => Call::Rejoin { token: session_key },
        3 => Client::channel_call(queue, Role::Landing, MEMORY_LEN),
        4 => Client::channel_call(queue, Role::General, MEMORY_LEN >> numbers.below(3)),
        5 => Client::channel_call(queue, Role::Transmit, MEMORY_LEN),
        6 => Call::CloseChannel { queue },
        7 => Call::Receive(Offer {
            queue,
            mtu: 1500 >> numbers.below(2),
            chunk_len: 2048,
            max_message_len: numbers.below(u64::MAX),
            window_max: 1 << numbers.below(32),
            allow: vec![([198, 18, 0, 0].into(), numbers.below(40) as u8)],
        }),
        8 => Call::CloseGate { session_key },
        9 => Call::Quiesce { queue },
        10 => Call::OpenGate {
            session_key,
            first_message: 0,
        },
        11 => Call::Released { session_key },
        12 => Call::Abort {
            session_key,
            delivered: 1,
        },
        13 => Call::Request {
            to: std::net::SocketAddrV4::new([198, 18, 0, numbers.below(4) as u8].into(), 7168),
            request: request.clone(),
            patience_ms: numbers.below(100) as u32,
        },
        _ => Call::End {
            ticket: numbers.below(5) as u32,
            messages: 0,
        },
    }
}

/// Some that are always tried, and one that never was; or the one that LM_SEED names.
fn seeds() -> Vec<u64> {
    match std::env::var("LM_SEED") {
        Ok(seed) => vec![seed.parse().expect("LM_SEED is a number")],
        Err(_) => {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
            vec![1, 2, 3, now.tv_sec as u64 ^ (now.tv_nsec as u64) << 32]
        }
    }
}

/// Programs that say anything, until each is shown the door: ten of them, and as many more as it takes until 25 calls were
/// answered (how soon each must go is the seed's matter).
fn say_anything(seed: u64, path: &std::path::Path, host: &Host, request: &Control) {
    // The generator stays at 0.
    let mut numbers = Numbers(seed.max(1));
    let memory = memory(MEMORY_LEN);
    let socket = udp(host, 7300);
    let mut answered = 0;
    let mut programs = 0;
    while programs < 10 || answered < 25 {
        assert!(programs < 200, "{answered} calls of 200 programs were answered");
        programs += 1;
        let mut client = Client::connect(path).hello();
        for number in 2..42 {
            let call = any_call(&mut numbers, request);
            let mut bytes = postcard::to_stdvec(&Asked { number, call }).unwrap();
            // Every fifth is damaged.
            if numbers.below(5) == 0 {
                let at = numbers.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << numbers.below(8);
                bytes.truncate(1 + numbers.below(bytes.len() as u64) as usize);
            }
            let both = [memory.as_fd(), socket.as_fd()];
            let beside = match numbers.below(4) {
                0 => &both[..0],
                1 => &both[..1],
                2 => &both[1..],
                _ => &both[..],
            };
            if !(client.try_send_beside(&bytes, beside) && client.is_answered()) {
                break;
            }
            answered += 1;
        }
    }
}

#[test]
fn nothing_that_a_program_says_harms_others() {
    let Some(hosts) = Hosts::with(
        "anything",
        &BedConfig {
            queues: 4,
            ..BedConfig::default()
        },
    ) else {
        return;
    };
    let daemon = hosts.daemon(Side::Left);
    let path = hosts.socket(Side::Left);
    let host = hosts.host(Side::Left);
    let mut honest = Client::receiver(&path, host, 7168);
    for seed in seeds() {
        println!(
            "seed {seed}; again: LM_SEED={seed} cargo xtask test nothing_that_a_program_says_harms_others"
        );
        say_anything(seed, &path, host, &honest.request(1000));
        honest.done(Call::Touched { sessions: Vec::new() });
        wait_until("nothing is left of the others", || {
            let status = daemon.status();
            let queues = &status.interfaces[0].queues;
            let taken = queues.iter().filter(|queue| queue.role != "free").count();
            status.programs.len() == 1 && taken == 2
        });
    }
    assert_eq!(daemon.interface().queues[3].role, "landing");
    Client::receiver(&path, host, 7301);
    daemon.stop();
}
