//! Two endpoints of one process, without privileges: `net_vhost` and `net_virtio_user` on both ends of a socket.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lm_dataplane::{
    ConnectOptions, Counters, Delivery, Endpoint, EndpointConfig, MemoryConfig, ReceiveConfig,
};
use lm_dpdk::{DpdkConfig, DpdkNic};
use lm_protocol::session::Permit;

const PORT: u16 = 7168;
pub(crate) const A: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub(crate) const B: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// An ordinary user of no group.
const ORDINARY: u32 = 65534;

/// One pair at a time: each end keeps a core busy.
static ALONE: Mutex<()> = Mutex::new(());

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

    fn socket(&self) -> String {
        self.folder.join("lm.sock").display().to_string()
    }

    /// Both ends; `arguments` are of the second.
    pub(crate) fn ends(&self, arguments: &str) -> [Endpoint<DpdkNic>; 2] {
        let (number, socket) = (self.number, self.socket());
        [
            open(format!("net_vhost{number},iface={socket}"), A),
            open(format!("net_virtio_user{number},path={socket},{arguments}"), B),
        ]
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
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

fn open(device: String, address: Ipv4Addr) -> Endpoint<DpdkNic> {
    let dpdk = DpdkConfig {
        device,
        address,
        prefix_len: 24,
        gateway: None,
    };
    let permit = Permit {
        max_message_len: config().receive.max_message_len,
        lease: Duration::from_secs(5),
    };
    lm_dpdk::open(&dpdk, &config(), Box::new(permit)).unwrap_or_else(|error| panic!("{error}"))
}

/// Byte `at` of message `tag`.
fn byte(tag: u64, at: usize) -> u8 {
    let mixed = (tag << 32 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// Sends messages of these lengths from one end to the other, up to four under way; all bytes are compared. What both counted.
pub(crate) fn carry(
    ends: &mut [Endpoint<DpdkNic>; 2],
    to: Ipv4Addr,
    delivery: Delivery,
    lens: &[usize],
) -> [Counters; 2] {
    let over = AtomicBool::new(false);
    let [from, receiver] = ends;
    let options = ConnectOptions {
        max_message_len: 64 << 20,
        messages_in_flight: 4,
        delivery,
        timeout: PATIENCE,
        ..ConnectOptions::default()
    };
    /// Says so however this side ends.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    std::thread::scope(|scope| {
        let sending = Over(&over);
        let receiving = scope.spawn(|| {
            for (tag, &len) in (0..).zip(lens) {
                let message = receiver
                    .recv(Some(PATIENCE))
                    .unwrap_or_else(|error| panic!("{tag}: {error}"));
                assert_eq!((message.tag(), message.len()), (tag, len));
                let wrong = (0..len).find(|&at| message[at] != byte(tag, at));
                assert_eq!(wrong, None, "of message {tag}, {len} bytes");
            }
            while !over.load(Ordering::Acquire) {
                receiver.poll();
                receiver.wait(Duration::from_millis(1));
            }
        });
        let peer = from.connect(SocketAddrV4::new(to, PORT), &options);
        let peer = peer.unwrap_or_else(|error| panic!("{error}"));
        for (tag, &len) in (0..).zip(lens) {
            let payload: Vec<u8> = (0..len).map(|at| byte(tag, at)).collect();
            let sent = from.send_copy(peer, &payload, tag);
            sent.unwrap_or_else(|error| panic!("{tag}: {error}"));
        }
        from.flush(PATIENCE).expect("confirmed");
        drop(sending);
        if let Err(panic) = receiving.join() {
            std::panic::resume_unwind(panic);
        }
    });
    [from.counters(), receiver.counters()]
}
