//! Two endpoints of one process, without privileges: `net_vhost` and `net_virtio_user` on both ends of a socket.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use lm_dataplane::{ConnectOptions, Counters, Delivery, Endpoint, EndpointConfig};
use lm_dataplane::{MemoryConfig, ModeRequest, OpenError, ReceiveConfig, RecvError};
use lm_dpdk::{DpdkConfig, DpdkNic, counts, put_in};
use lm_protocol::session::Permit;

const PORT: u16 = 7168;
pub(crate) const A: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub(crate) const B: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// An ordinary user of no group.
const ORDINARY: u32 = 65534;

/// One pair at a time: each end keeps a core busy.
static ALONE: Mutex<()> = Mutex::new(());

static NUMBER: AtomicU32 = AtomicU32::new(0);

type Opened = Result<Endpoint<DpdkNic>, OpenError>;

/// A socket in a folder of its own.
pub(crate) struct Wire {
    pub(crate) folder: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

impl Wire {
    pub(crate) fn new() -> Wire {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        if nix::unistd::geteuid().is_root() {
            nix::unistd::setgroups(&[]).expect("root may");
            nix::unistd::setresgid(ORDINARY.into(), ORDINARY.into(), ORDINARY.into()).expect("root may");
            nix::unistd::setresuid(ORDINARY.into(), ORDINARY.into(), ORDINARY.into()).expect("root may");
        }
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("procfs");
        assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("lm-dpdk-{}-{number}", std::process::id()));
        let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
        made.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        Wire {
            folder,
            _alone: alone,
        }
    }

    /// Both ends; `arguments` are of the second, which is aimed where there are two queues.
    pub(crate) fn ends(&self, queues: u32, arguments: &str) -> [Endpoint<DpdkNic>; 2] {
        let ends = self.try_ends(queues, arguments, ModeRequest::Auto);
        ends.map(|end| end.unwrap_or_else(|error| panic!("{error}")))
    }

    /// The second in that mode.
    pub(crate) fn try_ends(&self, queues: u32, arguments: &str, mode: ModeRequest) -> [Opened; 2] {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let socket = self.folder.join(format!("{number}.sock"));
        let socket = socket.display();
        let listens = format!("net_vhost{number},iface={socket},queues={queues}");
        let connects = format!("net_virtio_user{number},path={socket},queues={queues},{arguments}");
        [open(listens, A, ModeRequest::Auto), open(connects, B, mode)]
    }
}

/// Runs the test of this name in a process of its own. `true`: this is that process. Another test counts this one's allocations, and waits.
pub(crate) fn alone(test: &str) -> bool {
    if std::env::var_os("LM_ALONE").is_none() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let program = std::env::current_exe().expect("a program");
        let ran = Command::new(program)
            .args(["--exact", test])
            .env("LM_ALONE", "")
            .output();
        let ran = ran.expect("it starts");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stdout));
        return false;
    }
    true
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Before another test has its turn.
        put_in(0, 0, 0);
        let left: Vec<_> = (std::fs::read_dir(&self.folder).expect("it is there").flatten()).collect();
        let _ = std::fs::remove_dir_all(&self.folder);
        let is_clean = std::thread::panicking() || left.is_empty();
        assert!(is_clean, "closed ports leave nothing: {left:?}");
    }
}

fn config() -> EndpointConfig {
    EndpointConfig {
        port: PORT,
        memory: MemoryConfig {
            landing_len: 1 << 20,
            send_len: 32 << 20,
            ..MemoryConfig::default()
        },
        receive: ReceiveConfig {
            max_message_len: 64 << 20,
            ..ReceiveConfig::default()
        },
        ..EndpointConfig::default()
    }
}

fn open(device: String, address: Ipv4Addr, mode: ModeRequest) -> Opened {
    let dpdk = DpdkConfig {
        device,
        address: Ipv4Net::new_assert(address, 24),
        gateway: None,
    };
    let permit = Permit {
        max_message_len: config().receive.max_message_len,
        lease: Duration::from_secs(5),
    };
    let mut config = config();
    config.link.mode = mode;
    lm_dpdk::open(&dpdk, &config, Box::new(permit))
}

/// Byte `at` of message `tag`.
fn byte(tag: u64, at: usize) -> u8 {
    let mixed = (tag << 32 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// Does a step until it is done.
pub(crate) fn until<E: std::fmt::Debug>(patience: Duration, mut step: impl FnMut() -> Result<(), E>) {
    let deadline = Instant::now() + patience;
    while let Err(why) = step() {
        assert!(Instant::now() < deadline, "{why:?}");
    }
}

/// Sends messages of these lengths from one end to the other in a session, up to four under way, and ends it within another message; all bytes are
/// compared, and packets are counted where nothing is under way before these messages and behind them. What both ends counted.
pub(crate) fn carry(
    ends: &mut [Endpoint<DpdkNic>; 2],
    to: Ipv4Addr,
    delivery: Delivery,
    lens: &[usize],
    patience: Duration,
) -> [Counters; 2] {
    let [from, receiver] = ends;
    let options = ConnectOptions {
        max_message_len: 64 << 20,
        messages_in_flight: 4,
        delivery,
        timeout: patience,
        ..ConnectOptions::default()
    };
    let (alive, sender) = mpsc::channel::<()>();
    // Looks of the receiver's that found nothing.
    let looks = &AtomicU32::new(0);
    let done = |is_done: bool| is_done.then_some(()).ok_or("the other end does nothing");
    std::thread::scope(|scope| {
        // Gone however this side ends.
        let _alive = alive;
        let receiving = scope.spawn(move || {
            let mut missing: Vec<_> = (0..).zip(lens).collect();
            while !missing.is_empty() {
                let came = loop {
                    match receiver.recv(Some(Duration::from_millis(1))) {
                        Err(RecvError::TimedOut) if sender.try_recv() == Err(TryRecvError::Empty) => {
                            looks.fetch_add(1, Ordering::SeqCst);
                        }
                        came => break came,
                    }
                };
                let message = came.unwrap_or_else(|error| panic!("{missing:?}: {error}"));
                let (tag, len) = (message.tag(), message.len());
                let wrong = (0..len).find(|&at| message[at] != byte(tag, at));
                assert_eq!(wrong, None, "of message {tag}, {len} bytes, {delivery:?}");
                let at = missing.iter().position(|expected| *expected == (tag, &len));
                missing.swap_remove(at.unwrap_or_else(|| panic!("{tag} of {len} bytes, not {missing:?}")));
            }
            let counters = receiver.counters();
            until(patience, || {
                // Of the last message something may have come.
                let _ = receiver.try_recv();
                receiver.wait(Duration::from_millis(1));
                looks.fetch_add(1, Ordering::SeqCst);
                done(receiver.counters().sessions_ended > counters.sessions_ended)
            });
            counters
        });
        let peer = from.connect(SocketAddrV4::new(to, PORT), &options);
        let peer = peer.unwrap_or_else(|error| panic!("{error}"));
        // How many more packets came than were sent and not lost, when both ends find nothing.
        let quiet = |from: &mut Endpoint<DpdkNic>| {
            let mut packets = [0; 4];
            until(patience, || {
                let look = looks.load(Ordering::SeqCst);
                let before = std::mem::replace(&mut packets, counts());
                until(patience, || {
                    from.poll();
                    done(looks.load(Ordering::SeqCst) > look + 1)
                });
                done(before == packets)
            });
            let [sent, lost, doubled, came] = packets.map(|count| count as i64);
            came - (sent - lost + doubled)
        };
        let before = quiet(from);
        let failed = from.counters().messages_failed;
        let send = |from: &mut Endpoint<DpdkNic>, tag, len| {
            let payload: Vec<u8> = (0..len).map(|at| byte(tag, at)).collect();
            until(patience, || {
                from.poll();
                from.try_send_copy(peer, &payload, tag).map(drop)
            });
        };
        for (tag, &len) in (0..).zip(lens) {
            send(from, tag, len);
        }
        until(patience, || {
            assert!(!receiving.is_finished(), "the receiver ended");
            from.flush(Duration::from_millis(100))
        });
        assert_eq!(quiet(from), before, "{:?}", counts());
        let counters = from.counters();
        assert_eq!(counters.messages_failed, failed, "{counters:?}");
        send(from, 99, 4 << 20);
        until(patience, || {
            from.poll();
            done(from.counters().data_packets_sent > counters.data_packets_sent)
        });
        from.peer(peer).end_session();
        until(patience, || {
            from.poll();
            from.wait(Duration::from_millis(1));
            done(receiving.is_finished())
        });
        let received = receiving.join();
        [
            counters,
            received.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        ]
    })
}
