//! What the fuzz targets in `fuzz/` do with a fuzzer's bytes, and the tests with every input that is committed there. Each panics where
//! something is wrong. The daemon is the real one, with a gate of its own: both need root.

pub(crate) mod host;
mod program;

use std::cell::RefCell;
use std::os::fd::BorrowedFd;

use lm_dataplane::ipc::{Asked, Call, Mode, Reply, VERSION};

use crate::daemon::status::Status;
use host::Host;
use program::{Program, memory, udp};

/// A host with its daemon, and a program on it that nobody may harm.
struct Watched {
    honest: Program,
    host: Host,
    /// Descriptors that this process has while nobody else is connected.
    descriptors: usize,
}

/// What a gate keeps of its queues from their first use on, at most.
const DESCRIPTORS_OF_GATE: usize = 16;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

impl Watched {
    fn new() -> Watched {
        let host = Host::new("daemon");
        host.start().expect("a daemon");
        let mut honest = host.connect();
        honest.hello();
        let socket = udp(7168);
        let call = Call::Join {
            interface: host::INTERFACE.to_owned(),
            landing: true,
            mode: Mode::Auto,
        };
        let (reply, _) = honest.call(call, &[socket.as_ref()]);
        assert!(matches!(reply, Reply::Joined(_)), "{reply:?}");
        let mut watched = Watched {
            honest,
            host,
            descriptors: 0,
        };
        watched.settle();
        watched.descriptors = open_descriptors();
        watched
    }

    /// What the daemon says of itself when it has done with everybody else.
    fn settle(&mut self) {
        let is_alone = |status: &Status| {
            let taken = (status.interfaces[0].queues.iter()).filter(|queue| queue.pid.is_some());
            status.programs.len() == 1 && taken.count() == 2
        };
        host::wait_until("only the honest program has something", || {
            let status = self.honest.status();
            host::check_queues(&status);
            is_alone(&status)
        });
    }
}

/// Programs that say anything to their daemon. Input: steps of `[length, who and what, …bytes]`: who of two speaks (bit 0), which
/// descriptors travel beside it (bits 1 to 5), whether it connects anew before (bit 6), and whether the bytes are only the call, to be
/// numbered (bit 7).
///
/// Each call is answered under its number, what is no call ends the connection, and whatever happens the honest program keeps what it
/// has and nothing is left of the others.
pub fn daemon(bytes: &[u8]) {
    thread_local! {
        static WATCHED: RefCell<Option<Watched>> = const { RefCell::new(None) };
    }
    WATCHED.with_borrow_mut(|watched| {
        let watched = watched.get_or_insert_with(Watched::new);
        converse(watched, bytes);
        watched.settle();
        let most = watched.descriptors + DESCRIPTORS_OF_GATE;
        host::wait_until("descriptors are closed", || open_descriptors() <= most);
    });
}

fn converse(watched: &mut Watched, mut rest: &[u8]) {
    let files = [memory(true), memory(false)];
    let sockets = [udp(7300), udp(7301), udp(0)];
    let mut programs = [None, None];
    let mut number = 1;
    while let [len, what, tail @ ..] = rest {
        let (bytes, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = tail;
        let slot = &mut programs[usize::from(what & 1)];
        if what & 64 != 0 {
            *slot = None;
        }
        let program = slot.get_or_insert_with(|| {
            let mut program = watched.host.connect();
            program.hello();
            program
        });
        let all: [BorrowedFd<'_>; 5] = [
            files[0].as_ref(),
            sockets[0].as_ref(),
            sockets[1].as_ref(),
            files[1].as_ref(),
            sockets[2].as_ref(),
        ];
        let beside: Vec<_> = (0..5)
            .filter(|bit| what >> (bit + 1) & 1 == 1)
            .map(|bit| all[bit])
            .collect();
        let mut packet = Vec::new();
        if what & 128 != 0 {
            number += 1;
            packet.push(number);
            number %= 100;
        }
        packet.extend_from_slice(bytes);
        if packet.is_empty() || !program.send(&packet, &beside) {
            *slot = None;
            continue;
        }
        let asked = postcard::from_bytes::<Asked>(&packet);
        match (program.answer(), asked) {
            (Some((answered, _, _)), Ok(asked)) => assert_eq!(answered, asked.number),
            (Some(answer), Err(_)) => panic!("{answer:?} to what is no call"),
            // Who is dropped has said something that is no call, or too much beside it.
            (None, asked) => {
                assert!(asked.is_err() || beside.len() > 4, "dropped after {asked:?}");
                *slot = None;
            }
        }
    }
    let (reply, _) = watched.honest.call(Call::Touched { sessions: Vec::new() }, &[]);
    assert_eq!(reply, Reply::Done);
}

/// What a daemon finds that a dead one has left. Input: the programs of the interface as `state.json` has them; or after a first byte 0
/// the whole file.
///
/// The daemon starts and serves, whoever comes back by a token of the file is answered, and when they have gone nothing is theirs.
pub fn state(bytes: &[u8]) {
    thread_local! {
        static HOST: RefCell<Option<Host>> = const { RefCell::new(None) };
    }
    HOST.with_borrow_mut(|host| {
        let host = host.get_or_insert_with(|| {
            let host = Host::new("state");
            host.start().expect("a daemon");
            host.hand_over();
            host
        });
        let tokens = host.leave_state(bytes);
        host.start().expect("whatever was left");
        for token in tokens.into_iter().take(4) {
            let socket = udp(7168);
            let mut program = host.connect();
            program.hello();
            let (reply, _) = program.call(Call::Rejoin { token }, &[socket.as_ref()]);
            assert!(matches!(reply, Reply::Joined(_) | Reply::Refused(_)), "{reply:?}");
            if matches!(reply, Reply::Joined(_)) {
                let (reply, _) = program.call(Call::Touched { sessions: Vec::new() }, &[]);
                assert_eq!(reply, Reply::Done);
            }
        }
        let mut program = host.connect();
        program.hello();
        host::wait_until("who came back has gone", || {
            let status = program.status();
            host::check_queues(&status);
            status.programs.iter().all(|program| !program.connected)
        });
        drop(program);
        host.hand_over();
    });
}

/// A number that no call has, so that the first one is answered under it.
const HELLO: Asked = Asked {
    number: u32::MAX,
    call: Call::Hello { version: VERSION },
};

/// A configuration file: what is wrong is said in a line, and what is right keeps its bounds.
pub fn configuration(bytes: &[u8]) {
    use crate::config::{line_of, parse};
    let text = String::from_utf8_lossy(bytes);
    let meant = parse("lm.toml".as_ref(), &text).and_then(|config| {
        let checked = config.check();
        checked.map_err(|error| format!("{:?}: {error}", line_of(&text, error.key)))?;
        Ok(config)
    });
    match meant {
        Err(told) => assert!(!told.contains('\n'), "{told}"),
        Ok(config) => {
            let queues = config.queues_per_user(64);
            assert!(
                (1..=64).contains(&queues) && config.programs_per_user() >= 1,
                "{config:?}"
            );
            assert!(config.fixed_differences(&config).is_empty());
        }
    }
}

/// Works on a thread of its own, which moves to another namespace.
#[cfg(test)]
pub(crate) fn as_root(work: impl FnOnce() + Send + 'static) {
    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "a gate needs root");
        println!("SKIPPED: a gate needs root");
        return;
    }
    let worked = std::thread::spawn(work).join();
    worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::as_root;
    use super::replay::replay;

    #[test]
    fn the_corpus_of_configuration_is_survived() {
        replay("configuration", super::configuration);
    }

    #[test]
    fn the_corpus_of_daemon_is_survived() {
        as_root(|| replay("daemon", super::daemon));
    }

    /// A conversation with one byte in twenty altered, by some seeds that are always tried and one that never was; or by
    /// the one that LM_SEED names.
    fn altered(bytes: &[u8]) {
        let seeds = match std::env::var("LM_SEED") {
            Ok(seed) => vec![seed.parse().expect("LM_SEED is a number")],
            Err(_) => vec![1, 2, 3, 4, crate::clock::now().as_nanos()],
        };
        for seed in seeds {
            println!("seed {seed}; again: LM_SEED={seed}");
            // xorshift64, which stays at 0.
            let mut state: u64 = seed.max(1);
            let mut altered = bytes.to_vec();
            for byte in &mut altered {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                if state.is_multiple_of(20) {
                    *byte ^= (state >> 8) as u8;
                }
            }
            super::daemon(&altered);
        }
    }

    #[test]
    fn altered_conversations_are_survived() {
        as_root(|| replay("daemon", altered));
    }

    #[test]
    fn the_corpus_of_state_is_survived() {
        as_root(|| replay("state", super::state));
    }
}
