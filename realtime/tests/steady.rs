//! Once sockets are open and have talked, messages of any length cost neither an allocation nor a page fault, on a veth pair of this kernel.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;
mod veth;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use bed::Pair;
use lm_dataplane::Endpoint;
use lm_realtime::{Blocks, RtBuffer, RtSocket, SendError, SendOptions, SocketConfig};

struct Counting;

thread_local! {
    /// Allocations of this thread.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

fn count_one() {
    // A thread that is ending has no counter any more, and is none of ours.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator unchanged; the counter is a plain thread-local cell whose use allocates nothing
// (const-initialised, without a destructor).
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count_one();
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, len) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Lengths of messages in turn: of one packet, and of each kind of block.
const LENS: [usize; 8] = [4, 64, 1416, 64, 3996, 16_284, 64, 65_436];
const WARM_UP: u32 = 2000;
const MESSAGES: u32 = 50_000;
const MILLION: u32 = 1_000_000;

/// Page faults of this thread: those for which a page was there, and those that read one.
fn faults() -> [i64; 2] {
    let mut usage = std::mem::MaybeUninit::uninit();
    // SAFETY: getrusage(2) writes the structure, whose address is valid.
    let done = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    assert_eq!(done, 0);
    // SAFETY: it was written.
    let usage: libc::rusage = unsafe { usage.assume_init() };
    [usage.ru_minflt, usage.ru_majflt]
}

struct Ends {
    near: Endpoint,
    far: Endpoint,
    sender: RtSocket,
    receiver: RtSocket,
    /// Every third message is written in it.
    buffer: Option<RtBuffer>,
    sent: u32,
    unlocked: u32,
}

impl Ends {
    /// Sends so many messages, each when the one before has come.
    fn exchange(&mut self, payload: &mut [u8], count: u32) -> u32 {
        let mut came = 0;
        for _ in 0..count {
            let number = self.sent;
            self.sent += 1;
            let len = LENS[number as usize % LENS.len()];
            payload[len - 4..len].copy_from_slice(&number.to_be_bytes());
            match self.buffer.take_if(|_| number.is_multiple_of(3)) {
                Some(mut buffer) => {
                    buffer[..len].copy_from_slice(&payload[..len]);
                    let sent = self.sender.send_buffer(buffer, len, SendOptions::default());
                    sent.expect("it is connected");
                }
                None => {
                    let sent = self.sender.send(&payload[..len], SendOptions::default());
                    sent.expect("the endpoint polls");
                }
            }
            // One that the kernel loses is not waited for.
            let limit = Instant::now() + Duration::from_secs(1);
            while Instant::now() < limit {
                self.near.poll();
                self.far.poll();
                if let Some((buffer, _)) = self.sender.unlocked() {
                    self.buffer = Some(buffer);
                    self.unlocked += 1;
                }
                // An earlier one may have been given up by this loop, when this machine had no time for a second.
                if let Some(message) = self.receiver.recv()
                    && message.info().number == number
                {
                    assert!(message[..] == payload[..len], "message {number}");
                    came += 1;
                    break;
                }
            }
        }
        came
    }
}

#[test]
fn messages_of_any_length_allocate_nothing_and_fault_no_page() {
    if !bed::root() {
        return;
    }
    // As the other long loops: `cargo xtask soak --long`.
    let messages = match std::env::var_os("LM_LONG") {
        None => MESSAGES,
        Some(_) => MILLION,
    };
    // As a real-time program does: else the kernel may take pages of its code away, whatever the sockets do. Nothing comes before it is touched.
    // SAFETY: mlockall(2) takes flags alone and changes no byte of memory.
    let locked = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) };
    assert_eq!(locked, 0, "root may lock memory");
    let pair = Pair::new(1);
    let config = SocketConfig {
        keep: 4,
        frames: 48,
        blocks: Blocks {
            of_1: 6,
            of_4: 6,
            of_8: 0,
            of_16: 6,
        },
        ..SocketConfig::default()
    };
    let ([near, far], [mut sender, receiver]) = veth::connected(&pair, &config);
    let mut ends = Ends {
        near,
        far,
        buffer: sender.buffer(65_436),
        sender,
        receiver,
        sent: 0,
        unlocked: 0,
    };
    let mut payload: Vec<u8> = (0..65_436u32).map(|at| ((at * 7919) >> 8) as u8).collect();
    assert!(ends.exchange(&mut payload, WARM_UP) > WARM_UP / 2);
    let (allocations, before) = (COUNT.get(), faults());
    let came = ends.exchange(&mut payload, messages);
    let after = faults();
    assert_eq!(COUNT.get() - allocations, 0, "allocations");
    assert_eq!(after, before, "minor and major page faults");
    assert!(
        came > messages / 10 * 9,
        "{came} came: {:?}",
        ends.receiver.statistics()
    );
    assert!(ends.unlocked > messages / 4, "{} in lent memory", ends.unlocked);
    // The counters count.
    drop(std::hint::black_box(vec![1u8; 1 << 24]));
    assert!(COUNT.get() > allocations && faults()[0] > after[0]);
    assert_eq!(
        ends.sender.send(&[0; 65_437], SendOptions::default()),
        Err(SendError::TooLong(65_436))
    );
}
