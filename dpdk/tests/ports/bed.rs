//! Two endpoints of one process, without privileges: `net_vhost` and `net_virtio_user` on both ends of a socket.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use lm_dataplane::{
    ConnectOptions, Counters, Delivery, Endpoint, EndpointConfig, MemoryConfig, OpenError, ReceiveConfig,
    RecvError,
};
use lm_dpdk::{DpdkConfig, DpdkNic, put_in};
use lm_protocol::session::Permit;

const PORT: u16 = 7168;
pub(crate) const A: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub(crate) const B: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// An ordinary user of no group.
const ORDINARY: u32 = 65534;

/// One pair at a time: each end keeps a core busy.
static ALONE: Mutex<()> = Mutex::new(());

type Opened = Result<Endpoint<DpdkNic>, OpenError>;

/// A socket in a folder of its own.
pub(crate) struct Wire {
    pub(crate) folder: PathBuf,
    number: u32,
    _alone: MutexGuard<'static, ()>,
}

impl Wire {
    pub(crate) fn new() -> Wire {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
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
            number,
            _alone: alone,
        }
    }

    /// Both ends; `arguments` are of the second, which is aimed where there are two queues.
    pub(crate) fn ends(&self, queues: u32, arguments: &str) -> [Endpoint<DpdkNic>; 2] {
        let ends = self.try_ends(0, queues, arguments);
        ends.map(|end| end.unwrap_or_else(|error| panic!("{error}")))
    }

    pub(crate) fn try_ends(&self, pair: u32, queues: u32, arguments: &str) -> [Opened; 2] {
        let (number, socket) = (
            1000 * pair + self.number,
            self.folder.join(format!("{pair}.sock")),
        );
        let [listens, connects] = ["net_vhost", "net_virtio_user"].map(|driver| format!("{driver}{number}"));
        let socket = socket.display();
        [
            open(format!("{listens},iface={socket},queues={queues}"), A),
            open(format!("{connects},path={socket},queues={queues},{arguments}"), B),
        ]
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Before another test has its turn.
        put_in(0, 0, 0);
        let left: Vec<_> = std::fs::read_dir(&self.folder)
            .expect("it is there")
            .flatten()
            .collect();
        let _ = std::fs::remove_dir_all(&self.folder);
        assert!(
            std::thread::panicking() || left.is_empty(),
            "closed ports leave nothing: {left:?}"
        );
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

fn open(device: String, address: Ipv4Addr) -> Opened {
    let dpdk = DpdkConfig {
        device,
        address: Ipv4Net::new_assert(address, 24),
        gateway: None,
    };
    let permit = Permit {
        max_message_len: config().receive.max_message_len,
        lease: Duration::from_secs(5),
    };
    lm_dpdk::open(&dpdk, &config(), Box::new(permit))
}

/// Byte `at` of message `tag`.
fn byte(tag: u64, at: usize) -> u8 {
    let mixed = (tag << 32 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// Sends messages of these lengths from one end to the other in a session, up to four under way, and ends it within another message; all bytes are
/// compared. What both counted.
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
    std::thread::scope(|scope| {
        // Gone however this side ends.
        let _alive = alive;
        let receiving = scope.spawn(move || {
            let mut missing: Vec<_> = (0..).zip(lens).collect();
            while !missing.is_empty() {
                let came = loop {
                    match receiver.recv(Some(Duration::from_millis(100))) {
                        Err(RecvError::TimedOut) if sender.try_recv() == Err(TryRecvError::Empty) => {}
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
            let deadline = Instant::now() + patience;
            while receiver.counters().sessions_ended == counters.sessions_ended {
                assert!(
                    Instant::now() < deadline,
                    "the session does not end: {counters:?}"
                );
                // Of the last message something may have come.
                let _ = receiver.try_recv();
                receiver.wait(Duration::from_millis(1));
            }
            counters
        });
        let peer = from.connect(SocketAddrV4::new(to, PORT), &options);
        let peer = peer.unwrap_or_else(|error| panic!("{error}"));
        let failed = from.counters().messages_failed;
        let deadline = Instant::now() + patience;
        let send = |from: &mut Endpoint<DpdkNic>, tag, len| {
            let payload: Vec<u8> = (0..len).map(|at| byte(tag, at)).collect();
            while let Err(error) = from.try_send_copy(peer, &payload, tag) {
                assert!(Instant::now() < deadline, "{tag}: {error}");
                from.poll();
            }
        };
        for (tag, &len) in (0..).zip(lens) {
            send(from, tag, len);
        }
        while let Err(error) = from.flush(Duration::from_millis(100)) {
            assert!(!receiving.is_finished() && Instant::now() < deadline, "{error}");
        }
        let counters = from.counters();
        assert_eq!(counters.messages_failed, failed, "{counters:?}");
        send(from, 99, 4 << 20);
        while from.counters().data_packets_sent == counters.data_packets_sent {
            assert!(Instant::now() < deadline, "nothing leaves: {counters:?}");
            from.poll();
        }
        from.peer(peer).end_session();
        while !receiving.is_finished() {
            assert!(Instant::now() < deadline, "the receiver does not end");
            from.poll();
            from.wait(Duration::from_millis(1));
        }
        let received = receiving
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        [counters, received]
    })
}
