//! The kernel's traffic beside real-time sockets, under this kernel.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;
mod veth;

use std::io::Write;
use std::net::UdpSocket;
use std::num::NonZeroU64;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bed::Pair;
use lm_dataplane::{Endpoint, IdleStrategy, MemoryConfig};
use lm_protocol::smoother::Parameters;
use lm_protocol::time::Time;
use lm_realtime::{
    Deadline, Foreign, Info, OpenError, RealTime, RtSocket, SendOptions, SocketConfig, monotonic,
};
use rustix::process::{Resource, Rlimit, setrlimit};

/// 1472 bytes of payload are so many as `tc` counts them.
const FRAME_LEN: usize = 1514;
const REAL_TIME_GAP: Duration = Duration::from_millis(2);

const IDLE: IdleStrategy = IdleStrategy {
    spin: Duration::ZERO,
    yields: 0,
    sleep: Some(Duration::from_millis(1)),
};

fn link() -> Option<Parameters> {
    let rate = NonZeroU64::new(100_000_000).expect("positive");
    Some(Parameters::of_link(rate, FRAME_LEN as u16))
}

/// A socket of this number, which is free.
fn plain(real_time: &RealTime, endpoint: &mut Endpoint, number: u16) -> RtSocket {
    let socket = real_time.socket(endpoint, number, &SocketConfig::default());
    socket.expect("free")
}

/// Real time on `va`, and what came of its socket.
fn socket(endpoint: &mut Endpoint) -> (RealTime, RtSocket) {
    let real_time = RealTime::new(endpoint, link(), monotonic).expect("no other handler");
    real_time.hold_kernel("va", Foreign::Keep);
    let socket = plain(&real_time, endpoint, 1);
    (real_time, socket)
}

/// What `tc` shows of `va`.
fn qdiscs() -> String {
    let output = Command::new("tc").args(["qdisc", "show", "dev", "va"]).output();
    String::from_utf8(output.expect("tc").stdout).expect("text")
}

/// Packets of the kernel and of LM beside λ.
struct Window {
    begun: Instant,
    packets: u64,
    credits: Vec<f64>,
}

impl Window {
    fn new(packets: u64) -> Window {
        Window {
            begun: Instant::now(),
            packets,
            credits: Vec::new(),
        }
    }

    /// What part of λ left.
    fn part(&self, packets: u64) -> f64 {
        let lambda = self.credits.iter().sum::<f64>() / self.credits.len() as f64;
        (packets - self.packets) as f64 / self.begun.elapsed().as_secs_f64() / lambda
    }
}

/// What the log would have.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn logged(what: impl FnOnce()) -> String {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, what);
    let bytes = log.0.lock().expect("no panic").clone();
    String::from_utf8(bytes).expect("text")
}

#[test]
fn the_kernel_gets_what_the_smoother_leaves_until_the_last_socket_is_closed() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(2);
    let sink = pair.b.run(|| UdpSocket::bind("10.77.0.2:9").expect("free"));
    sink.set_nonblocking(true).expect("a socket");
    let flood = pair.a.run(|| UdpSocket::bind("10.77.0.1:0").expect("free"));
    flood.connect("10.77.0.2:9").expect("a route");
    flood.set_nonblocking(true).expect("a socket");
    let mut far = pair.b.run(|| veth::open("vb", IDLE));
    let of_far = RealTime::new(&mut far, None, monotonic).expect("no other handler");
    let mut received = plain(&of_far, &mut far, 1);
    pair.a.run(|| {
        let before = qdiscs();
        let mut near = veth::open("va", IDLE);
        let (real_time, mut socket) = socket(&mut near);
        let second = plain(&real_time, &mut near, 2);
        veth::connect(&mut socket, &mut near, &mut far);
        // λ rises by 20 packets a second in 10 ms; looked at in windows, the first of which begins when both run.
        let begun = Instant::now();
        let (mut next, mut windows, mut window) = (begun, Vec::new(), None::<Window>);
        while windows.len() < 6 {
            while flood.send(&[0; 1472]).is_ok() {}
            while sink.recv(&mut [0; 2048]).is_ok() {}
            if Instant::now() >= next {
                next += REAL_TIME_GAP;
                let _ = socket.send(&[1; 1000], SendOptions::default());
            }
            near.poll();
            far.poll();
            while received.recv().is_some() {}
            if begun.elapsed() > Duration::from_millis(500) {
                let kernel = real_time.kernel_traffic().expect("it is held");
                let packets = u64::from(kernel.packets) + socket.statistics().sent;
                let window = window.get_or_insert(Window::new(packets));
                window
                    .credits
                    .push(f64::from(real_time.credits_per_second().expect("a smoother")));
                if window.begun.elapsed() > Duration::from_millis(400) {
                    windows.push(window.part(packets));
                    *window = Window::new(packets);
                }
            }
            // The kernel and the other end get their core.
            std::thread::sleep(Duration::from_micros(300));
        }
        // A machine that has no time for a class of two frames loses some of its rate.
        assert!(windows.iter().all(|part| *part < 1.1), "{windows:?} of λ");
        assert!(windows.iter().any(|part| *part > 0.9), "{windows:?} of λ");
        let statistics = socket.statistics();
        assert!(statistics.sent > 800, "{statistics:?}");
        // Reports came, which λ goes by.
        assert!(statistics.reported_whole > 500, "{statistics:?}");
        drop(socket);
        assert!(qdiscs().contains("htb 4c4d:"), "{}", qdiscs());
        drop(second);
        assert_eq!(qdiscs(), before);
        assert_eq!(real_time.kernel_traffic(), None);
        // Sockets come again, and so does the class; with its endpoint goes nothing else.
        let again = plain(&real_time, &mut near, 2);
        assert!(real_time.kernel_traffic().is_some());
        drop(near);
        drop(again);
        assert_eq!(qdiscs(), before);
    });
}

#[test]
fn what_stands_against_it_is_said_once_and_sockets_work_without() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    pair.a
        .command("tc", "qdisc add dev va root handle 77: bfifo limit 12345");
    pair.a.run(|| {
        let before = qdiscs();
        let mut endpoint = veth::open("va", IDLE);
        let text = logged(|| {
            let (real_time, socket) = socket(&mut endpoint);
            assert_eq!(real_time.kernel_traffic(), None);
            let second = plain(&real_time, &mut endpoint, 2);
            drop((socket, second));
            drop(plain(&real_time, &mut endpoint, 1));
        });
        assert_eq!(text.matches("WARN").count(), 1, "{text}");
        assert!(
            text.contains("and not the kernel's: va has a root qdisc that somebody set (bfifo 77:)"),
            "{text}"
        );
        assert_eq!(qdiscs(), before);
    });
}

/// Kilobytes that this process has locked.
fn locked_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the kernel's");
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    number.expect("locked memory").trim().parse().expect("a number")
}

/// Of two pools of 4 MB, the second is beyond the limit: neither stays, and what is smaller opens. Then no memory may be locked.
fn open_beyond_memlock() {
    const CAP_IPC_LOCK: u32 = 14;
    let pair = Pair::new(1);
    pair.a.run(|| {
        let mut endpoint = veth::open("va", IDLE);
        let real_time = RealTime::new(&mut endpoint, None, monotonic).expect("no other handler");
        bed::drop_capability(CAP_IPC_LOCK);
        let lock_at_most = |bytes| {
            let [current, maximum] = [Some(bytes); 2];
            setrlimit(Resource::Memlock, Rlimit { current, maximum }).expect("a lower limit");
        };
        lock_at_most(6 << 20);
        let mut config = SocketConfig::default();
        config.blocks.of_16 = 60;
        let before = locked_kb();
        let text = logged(|| {
            for _ in 0..2 {
                let error = real_time.socket(&mut endpoint, 1, &config).expect_err("8 MB");
                assert!(matches!(error, OpenError::Blocks(_)), "{error}");
                assert!(error.to_string().contains("ulimit -l"), "{error}");
            }
        });
        assert_eq!(locked_kb(), before);
        let pages = std::fs::read_to_string("/proc/meminfo").expect("the kernel's");
        let has_huge = !pages.contains("HugePages_Free:        0");
        let said = text.matches("vm.nr_hugepages").count();
        assert!(said == 1 || has_huge, "{text}");
        real_time
            .socket(&mut endpoint, 1, &SocketConfig::default())
            .expect("its number is free, and it is smaller");
        // A process that may lock nothing is told so, and what to do.
        lock_at_most(0);
        let error = real_time
            .socket(&mut endpoint, 1, &SocketConfig::default())
            .expect_err("not permitted");
        let OpenError::Blocks(source) = &error else {
            panic!("{error}");
        };
        assert_eq!(source.raw_os_error(), Some(libc::EPERM));
        assert!(error.to_string().contains("ulimit -l"), "{error}");
    });
}

/// Limits are of a process: another one has it.
#[test]
fn pools_beyond_memlock_are_an_error_and_leave_nothing_behind() {
    const CHILD: &str = "LM_TEST_MEMLOCK";
    if !bed::root() {
        return;
    }
    if std::env::var_os(CHILD).is_some() {
        return open_beyond_memlock();
    }
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    again.args([
        "--exact",
        "pools_beyond_memlock_are_an_error_and_leave_nothing_behind",
    ]);
    let output = again.env(CHILD, "").output().expect("this program again");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// One queue, and messages land there: what is small, real time too, comes by the kernel's socket.
#[test]
fn without_a_general_queue_real_time_is_exchanged_by_the_kernels_socket() {
    const COUNT: u8 = 100;
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    let open = |interface: &str| {
        let mut endpoint = veth::open_with(interface, IDLE, MemoryConfig::default());
        let real_time = RealTime::new(&mut endpoint, None, monotonic).expect("no other handler");
        let socket = plain(&real_time, &mut endpoint, 1);
        (endpoint, socket)
    };
    let (mut near, mut near_socket) = pair.a.run(|| open("va"));
    let (mut far, mut far_socket) = pair.b.run(|| open("vb"));
    let [at_near, at_far] = [near.local(), far.local()];
    let to_far = pair.a.run(|| veth::peer(&mut near, at_far));
    let to_near = pair.b.run(|| veth::peer(&mut far, at_near));
    near_socket.connect(&mut near, to_far, 1).expect("frames");
    far_socket.connect(&mut far, to_near, 1).expect("frames");
    let begun = Instant::now();
    for number in 0..COUNT {
        near_socket
            .send(&[number; 900], SendOptions::default())
            .expect("room");
        let answer = loop {
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "{number} has no answer"
            );
            pair.a.run(|| near.poll());
            pair.b.run(|| far.poll());
            if let Some(message) = far_socket.recv() {
                far_socket.send(&message, SendOptions::default()).expect("room");
            }
            if let Some(message) = near_socket.recv() {
                break message;
            }
        };
        assert_eq!((&answer[..], answer.info().lost), (&[number; 900][..], 0));
    }
    for endpoint in [&near, &far] {
        assert!(
            endpoint.counters().one_copy_packets >= COUNT.into(),
            "{:?}",
            endpoint.counters()
        );
    }
}

#[test]
fn a_link_that_goes_holds_nobody_up() {
    if !bed::root() {
        return;
    }
    let pair = Pair::new(1);
    pair.a.run(|| {
        let mut endpoint = veth::open("va", IDLE);
        let (real_time, socket) = socket(&mut endpoint);
        assert!(real_time.kernel_traffic().is_some());
        pair.a.ip("link delete va");
        let begun = Instant::now();
        // Several refreshes of the smoother.
        while begun.elapsed() < Duration::from_millis(50) {
            endpoint.poll();
        }
        drop(socket);
        drop(endpoint);
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    });
}

/// What becomes of messages for which a receiver with this clock is so late.
fn infos(clock: fn() -> Time, options: SendOptions, waits: &[Duration]) -> Vec<Info> {
    let pair = Pair::new(1);
    let mut far = pair.b.run(|| veth::open("vb", IDLE));
    let of_far = RealTime::new(&mut far, None, clock).expect("no other handler");
    let config = SocketConfig {
        drops_late: false,
        ..SocketConfig::default()
    };
    let mut received = of_far.socket(&mut far, 1, &config).expect("free");
    pair.a.run(|| {
        let mut near = veth::open("va", IDLE);
        let of_near = RealTime::new(&mut near, None, monotonic).expect("no other handler");
        let mut socket = of_near.socket(&mut near, 1, &config).expect("free");
        veth::connect(&mut socket, &mut near, &mut far);
        let each = waits.iter().map(|waits| {
            socket.send(&[1; 64], options).expect("room");
            near.poll();
            std::thread::sleep(*waits);
            loop {
                far.poll();
                near.poll();
                if let Some(message) = received.recv() {
                    return *message.info();
                }
            }
        });
        each.collect()
    })
}

#[test]
fn what_waits_for_its_program_is_not_delayed() {
    if !bed::root() {
        return;
    }
    const WAITS: Duration = Duration::from_millis(200);
    let info = infos(monotonic, SendOptions::default(), &[Duration::ZERO, WAITS])[1];
    assert!(info.received_at.since(info.sent_at) >= WAITS, "{info:?}");
    assert!(info.delay < WAITS / 2, "{info:?}");
}

/// Nothing waits for an hour: the stamp is of another clock than the receiver's, and tells nothing of how late a message is.
#[test]
fn a_stamp_of_another_clock_is_not_believed() {
    if !bed::root() {
        return;
    }
    let options = SendOptions {
        deadline: Some(Deadline::In(Duration::from_secs(60))),
        ..SendOptions::default()
    };
    let ahead = || monotonic() + Duration::from_secs(3600);
    let infos = infos(ahead, options, &[Duration::ZERO; 2]);
    assert!(infos.iter().all(|info| !info.late), "{infos:?}");
}
