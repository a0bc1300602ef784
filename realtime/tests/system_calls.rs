//! Once a socket is open its loop and its endpoint make no system calls but those that wake, receive and tell the time: under a filter
//! (seccomp(2)) that kills the process for any other.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;
mod veth;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use bed::Pair;
use lm_dataplane::{Endpoint, IdleStrategy};
use lm_realtime::{RealTime, RtSocket, SendOptions, SocketConfig, monotonic};

const TEST: &str = "nothing_but_wake_ups_receiving_and_clocks";
/// In a child: which thread makes a call that is not allowed, or none does.
const CHILD: &str = "LM_TEST_FORBIDDEN_CALL";
/// What its end says when all is well.
const DONE: i32 = 77;
const WARM_UP: u32 = 200;
const MESSAGES: u32 = 5000;
/// Lengths of messages in turn: of one packet, and of blocks.
const LENS: [usize; 4] = [4, 1416, 3996, 16_284];

/// Calls that wake: the device (sendto), the other thread, which has an eventfd (read, write). That wait for packets, and take them, or a
/// refusal (SO_ERROR), from the kernel's sockets. And the clock's, where it is not read without a call.
const WAKE_UP: [libc::c_long; 1] = [libc::SYS_sendto];
const OF_EIGHT_BYTES: [libc::c_long; 2] = [libc::SYS_read, libc::SYS_write];
const RECEIVE: [libc::c_long; 3] = [libc::SYS_recvfrom, libc::SYS_getsockopt, libc::SYS_ppoll];
const CLOCK: [libc::c_long; 1] = [libc::SYS_clock_gettime];

/// From now on the calling thread may make those, and end the process.
const IDLE: IdleStrategy = IdleStrategy {
    spin: Duration::from_micros(5),
    yields: 0,
    sleep: Some(Duration::from_millis(10)),
};

fn confine() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let allow = step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    // The call's number, and the low word of its third argument.
    let mut program = vec![step(LOAD, 0, 0, 0)];
    let calls = WAKE_UP
        .iter()
        .chain(&RECEIVE)
        .chain(&CLOCK)
        .chain(&[libc::SYS_exit_group]);
    for call in calls {
        program.extend([step(IS, *call as u32, 0, 1), allow]);
    }
    for call in OF_EIGHT_BYTES {
        program.extend([
            step(IS, call as u32, 0, 4),
            step(LOAD, 32, 0, 0),
            step(IS, 8, 0, 1),
            allow,
            step(RETURN, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
        ]);
    }
    program.push(step(RETURN, libc::SECCOMP_RET_KILL_PROCESS, 0, 0));
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: prctl(2) takes numbers here, and then a filter, which it copies; both change what the calling thread may do and nothing else.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter)
    };
    assert_eq!(done, 0, "a kernel with seccomp filters");
}

fn socket(endpoint: &mut Endpoint) -> RtSocket {
    let real_time = RealTime::new(endpoint, None, monotonic).expect("no other handler");
    let mut config = SocketConfig {
        frames: 48,
        ..SocketConfig::default()
    };
    (config.blocks.of_1, config.blocks.of_4) = (18, 18);
    real_time.socket(endpoint, 1, &config).expect("memory")
}

/// Sends each message back.
fn answer(mut end: Endpoint, mut socket: RtSocket) -> ! {
    let mut connected = None;
    loop {
        if end.poll() == 0 {
            end.wait(Duration::from_millis(10));
        }
        while let Ok(Some(_)) = end.try_recv() {}
        while let Some(message) = socket.recv() {
            let from = message.info().from;
            if connected != Some(from) {
                socket.connect(&mut end, from, 1).expect("a peer");
                connected = Some(from);
            }
            let _ = socket.send(&message, SendOptions::default());
        }
    }
}

/// Sends so many messages, each when the answer to the one before has come or is taken for lost, in lent memory every other time.
fn ask(socket: &mut RtSocket, payload: &[u8], count: u32) -> u32 {
    let mut answered = 0;
    for number in 0..count {
        let len = LENS[number as usize % LENS.len()];
        match socket.buffer(len).filter(|_| number % 2 == 0) {
            Some(mut buffer) => {
                buffer[..len].copy_from_slice(&payload[..len]);
                let sent = socket.send_buffer(buffer, len, SendOptions::default());
                assert!(sent.is_ok());
            }
            None => drop(socket.send(&payload[..len], SendOptions::default())),
        }
        let mut is_answered = false;
        while !is_answered && socket.wait(Some(Duration::from_millis(100))) {
            while socket.unlocked().is_some() {}
            if let Some(message) = socket.recv() {
                is_answered = message[..] == payload[..len];
            }
        }
        answered += u32::from(is_answered);
    }
    answered
}

/// The one thread asks, the other one drives its endpoint, both confined. Ends the process.
fn child(forbidden: &str) -> ! {
    let pair = Pair::new(1);
    let (mut near, mut far) = (
        pair.a.run(|| veth::open("va", IDLE)),
        pair.b.run(|| veth::open("vb", IDLE)),
    );
    let (mut asking, answering) = (socket(&mut near), socket(&mut far));
    let to = far.local();
    let payload: Vec<u8> = (0..LENS[3] as u32).map(|at| ((at * 7919) >> 8) as u8).collect();
    let forbidden_here = |here: &str| {
        if forbidden == here {
            // SAFETY: getppid(2) takes nothing and cannot fail.
            unsafe { libc::getppid() };
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| pair.b.run(|| answer(far, answering)));
        pair.a.run(|| {
            let peer = veth::peer(&mut near, to);
            asking.connect(&mut near, peer, 1).expect("a peer");
            near.flush(Duration::from_secs(5)).expect("it answers");
            scope.spawn(move || {
                assert!(ask(&mut asking, &payload, WARM_UP) > WARM_UP / 2);
                confine();
                let answered = ask(&mut asking, &payload, MESSAGES);
                forbidden_here("loop");
                let is_well = answered > MESSAGES * 9 / 10;
                // SAFETY: ends the process without a word; what it has is the kernel's to clean up.
                unsafe { libc::_exit(if is_well { DONE } else { 1 }) }
            });
            for _ in 0..1000 {
                if near.poll() == 0 {
                    near.wait(Duration::from_millis(1));
                }
            }
            confine();
            forbidden_here("endpoint");
            loop {
                if near.poll() == 0 {
                    near.wait(Duration::from_millis(10));
                }
            }
        })
    })
}

fn ended(forbidden: &str) -> ExitStatus {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", TEST]).env(CHILD, forbidden);
    command.output().expect("this program again").status
}

#[test]
fn nothing_but_wake_ups_receiving_and_clocks() {
    if !bed::root() {
        return;
    }
    if let Ok(forbidden) = std::env::var(CHILD) {
        child(&forbidden);
    }
    let is_killed = |status: ExitStatus| status.signal() == Some(libc::SIGSYS);
    let status = ended("none");
    assert!(!is_killed(status), "another call was made: {status}");
    assert_eq!(status.code(), Some(DONE), "{status}");
    // The filter is there, on either thread.
    for thread in ["loop", "endpoint"] {
        let status = ended(thread);
        assert!(is_killed(status), "{thread}: {status}");
    }
}
