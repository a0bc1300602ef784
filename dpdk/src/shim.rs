//! The calls of shim.c, and a device as a value that closes it.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_ushort};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use lm_dataplane::memory::Mapping;

/// Packets that are received, and sent, in one call at most.
pub(crate) const BURST: usize = 64;
/// The longest packet in bytes.
pub(crate) const ROOM: usize = 2048;
/// Pairs of queues that are used of a device, at most.
pub(crate) const QUEUES: usize = 2;
/// Entries that a queue has room for.
pub(crate) const ENTRIES: u32 = 32768;
/// Packets that an aimed device holds on each receive queue.
pub(crate) const AIMED_RING: u32 = 128;
/// Room for what DPDK logs.
const SAID_LEN: usize = 4096;
/// No place in LM's memory.
pub(crate) const NONE: u64 = u64::MAX;

#[repr(C)]
struct RawPort {
    _opaque: [u8; 0],
}

/// Words, or null.
type Text = Option<NonNull<c_char>>;

/// Bytes of a packet.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) start: *const u8,
    pub(crate) len: usize,
    /// The entry where it was received, or where it lies in LM's memory, if it does; else [`NONE`].
    pub(crate) address: u64,
    pub(crate) queue: usize,
}

impl Packet {
    pub(crate) const fn new(start: *const u8, len: usize, address: u64, queue: usize) -> Packet {
        Packet {
            start,
            len,
            address,
            queue,
        }
    }
}

// SAFETY: an address and a length; what they are good for is said where they are used.
unsafe impl Send for Packet {}

/// A device's address, its MTU, how many pairs of its queues are used, and what could not be done.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts {
    pub(crate) mac: [u8; 6],
    pub(crate) mtu: c_ushort,
    pub(crate) queues: c_ushort,
    fault: Text,
}

/// Packets that no program saw.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counters {
    /// In several segments, too long, empty, of a VLAN, or on a landing queue without an entry.
    pub(crate) unfit: c_ulonglong,
    /// The device had no room.
    pub(crate) missed: c_ulonglong,
    /// Faults of the device, either way.
    pub(crate) errors: c_ulonglong,
    /// Bytes that were copied, beside those that the port copies.
    pub(crate) copied: c_ulonglong,
}

// SAFETY: as shim.c defines them.
unsafe extern "C" {
    #[cfg(feature = "faults")]
    safe static lm_dpdk_counts: [std::sync::atomic::AtomicU64; 4];
    #[cfg(feature = "faults")]
    fn lm_dpdk_put_in(seed: c_ulonglong, rate: c_uint, mistake: c_uint);
    fn lm_dpdk_said(into: *mut u8) -> usize;
    fn lm_dpdk_begin(count: c_int, arguments: *mut *mut c_char) -> Text;
    fn lm_dpdk_open(device: *const c_char, queues: u16, steers: bool, facts: *mut Facts) -> *mut RawPort;
    fn lm_dpdk_aim(port: *mut RawPort, memory: *mut u8, base: *mut u8, len: usize) -> *mut u8;
    fn lm_dpdk_start(port: *mut RawPort) -> Text;
    fn lm_dpdk_clear(port: *mut RawPort, queue: usize, lands: bool) -> Text;
    fn lm_dpdk_close(port: *mut RawPort) -> bool;
    fn lm_dpdk_post(port: *mut RawPort, queue: usize, entries: *const u64, count: c_uint);
    fn lm_dpdk_receive(port: *mut RawPort, packets: *mut Packet) -> c_uint;
    fn lm_dpdk_send(port: *mut RawPort, packets: *const Packet, count: c_uint) -> c_uint;
    fn lm_dpdk_done(port: *mut RawPort, queue: usize, done: *mut *const u64) -> c_uint;
    fn lm_dpdk_waits(port: *const RawPort) -> bool;
    fn lm_dpdk_is_up(port: *const RawPort) -> bool;
    fn lm_dpdk_counters(port: *const RawPort) -> Counters;
}

/// Puts faults of this seed in, in every port, `rate` of 1024 chances: packets that are lost, change places, come twice or in two segments, bursts
/// that are cut, and buffers that are refused. And a mistake, if it is not 0: what comes to the driver's own memory is copied with its headers (1), a
/// device that was stopped is believed to have no buffers (2), a short packet has others of its burst behind it (3), what is sent has room before it
/// that is the driver's (4); or a driver's: a device that is closed keeps buffers (5).
#[cfg(feature = "faults")]
pub fn put_in(seed: u64, rate: u32, mistake: u32) {
    // SAFETY: three numbers, which are looked at by whatever thread has a port.
    unsafe { lm_dpdk_put_in(seed, rate, mistake) };
}

/// Packets of all ports: taken to be sent, lost and doubled by faults, and received.
#[cfg(feature = "faults")]
pub fn counts() -> [u64; 4] {
    lm_dpdk_counts
        .each_ref()
        .map(|count| count.load(std::sync::atomic::Ordering::SeqCst))
}

/// What DPDK logged since this was asked last. It was begun.
fn said() -> String {
    let mut text = [0; SAID_LEN];
    // SAFETY: it writes no more, and has its stream since DPDK was begun.
    let len = unsafe { lm_dpdk_said(text.as_mut_ptr()) };
    String::from_utf8_lossy(&text[..len]).into_owned()
}

/// Begins DPDK with these arguments. Once in a process.
pub(crate) fn begin(arguments: &[CString]) -> Result<(), Fault> {
    let pointers = arguments.iter().map(|argument| argument.as_ptr().cast_mut());
    let mut pointers: Vec<*mut c_char> = pointers.chain([std::ptr::null_mut()]).collect();
    // SAFETY: a list of `argc` strings and a null, as main has it. DPDK keeps copies, and permutes the list alone.
    fault(unsafe { lm_dpdk_begin(arguments.len() as c_int, pointers.as_mut_ptr()) })
}

/// Memory that drivers may know, by its address, and the mapping that has its pages. DPDK does not get it back: once no port has that mapping it is
/// used again. There is one: DPDK begins with memory for one endpoint.
static BLOCK: Mutex<Option<(Arc<Mapping>, usize)>> = Mutex::new(None);

/// Devices come and go one at a time: DPDK's lists of them, and what it says meanwhile, are the process's.
static DEVICES: Mutex<()> = Mutex::new(());

/// A device. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct Link {
    port: NonNull<RawPort>,
    /// What was received last: it lies in the device's memory until the next receive.
    burst: [Packet; QUEUES * BURST],
    count: usize,
    /// LM's memory, where the device is given places there.
    aimed: Option<Arc<Mapping>>,
}

// SAFETY: shim.c ties a port to no thread, and `&mut self` keeps two from using it at once; its `&self` calls read what DPDK has for any thread.
unsafe impl Send for Link {}

/// What could not be done, and what DPDK logged about it.
pub(crate) type Fault = (&'static str, String);

fn fault(text: Text) -> Result<(), Fault> {
    let Some(text) = text else {
        return Ok(());
    };
    // SAFETY: a literal of shim.c's, with a zero at its end.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    Err((text.to_str().unwrap_or_default(), said()))
}

impl Link {
    /// Finds what `devargs` describe, to use at most `queues` pairs of queues. `steers`: what is sent on a queue leaves on the device's of that number.
    pub(crate) fn open(devargs: &CStr, queues: u16, steers: bool) -> Result<(Link, Facts), Fault> {
        let _one = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        drop(said());
        let mut facts = Facts::default();
        // SAFETY: a live string, and facts to be written.
        let port = unsafe { lm_dpdk_open(devargs.as_ptr(), queues, steers, &mut facts) };
        fault(facts.fault)?;
        let link = Link {
            port: NonNull::new(port).ok_or_else(|| ("has no memory", said()))?,
            burst: [Packet::new(std::ptr::null(), 0, NONE, 0); QUEUES * BURST],
            count: 0,
            aimed: None,
        };
        Ok((link, facts))
    }

    /// Gives the device places in this memory from its start on. `false`: another port uses DPDK's memory, or it is too short.
    pub(crate) fn aim(&mut self, mapping: &Arc<Mapping>) -> bool {
        let mut block = BLOCK.lock().unwrap_or_else(PoisonError::into_inner);
        if block.as_mut().is_some_and(|(of, _)| Arc::get_mut(of).is_none()) {
            return false;
        }
        let memory = block
            .take_if(|(of, _)| of.len() == mapping.len())
            .map_or(0, |(_, memory)| memory);
        let (base, len) = (mapping.base().as_ptr(), mapping.len() as usize);
        // SAFETY: a port that is not started; whole pages of the mapping that nothing was written to yet; and memory of as many bytes from an
        // earlier call whose mapping is gone, or null.
        let memory = unsafe { lm_dpdk_aim(self.port.as_ptr(), memory as *mut u8, base, len) };
        if !memory.is_null() {
            *block = Some((Arc::clone(mapping), memory as usize));
            self.aimed = Some(Arc::clone(mapping));
        }
        !memory.is_null()
    }

    /// Starts it: from now on packets come.
    pub(crate) fn start(&mut self) -> Result<(), Fault> {
        let _one = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        // That it was found was said with words, too.
        drop(said());
        // SAFETY: an open port.
        fault(unsafe { lm_dpdk_start(self.port.as_ptr()) })
    }

    /// Nothing that was posted or sent on a queue is the device's any more. It may be closed for that, and started anew. `lands`: from now on the queue's
    /// n-th packet is at its n-th entry.
    pub(crate) fn clear(&mut self, queue: usize, lands: bool) -> Result<(), Fault> {
        let _one = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        self.count = 0;
        // SAFETY: an open port, whose received packets are not looked at any more.
        fault(unsafe { lm_dpdk_clear(self.port.as_ptr(), queue, lands) })
    }

    /// Posts entries on a queue.
    ///
    /// # Safety
    ///
    /// Each begins a frame of the mapping, with [`ROOM`] bytes behind the headroom that nothing else writes or reads before its packet came, and no
    /// more than [`ENTRIES`] are unused.
    #[inline]
    pub(crate) unsafe fn post(&mut self, queue: usize, entries: &[u64]) {
        assert!(queue < QUEUES && self.aimed.is_some());
        let (first, count) = (entries.as_ptr(), entries.len() as c_uint);
        // SAFETY: an open port, one of its queues, and a list of places that it may write, as the caller says.
        unsafe { lm_dpdk_post(self.port.as_ptr(), queue, first, count) };
    }

    /// Takes what came; how many packets there are now.
    pub(crate) fn receive(&mut self) -> usize {
        // SAFETY: an open port, and room for a burst.
        self.count = unsafe { lm_dpdk_receive(self.port.as_ptr(), self.burst.as_mut_ptr()) } as usize;
        self.count
    }

    /// One of those, and what it says. It is not to be asked what a packet of a landing queue says ([`Link::clear`]), which others may be written over.
    #[inline]
    pub(crate) fn packet(&self, at: usize) -> Packet {
        self.burst[..self.count][at]
    }

    #[inline]
    pub(crate) fn bytes(&self, at: usize) -> &[u8] {
        let packet = self.packet(at);
        // SAFETY: the bytes of an mbuf that is freed by the next receive, which needs `&mut self`. The driver is trusted, as a device is, to
        // write no more to what it has given out.
        unsafe { std::slice::from_raw_parts(packet.start, packet.len) }
    }

    /// Sends packets, as long as the device takes those before them; how many. An aimed device's are its until they are [done](Link::done); those of
    /// another are copied.
    ///
    /// # Safety
    ///
    /// Each is [`ROOM`] bytes long at most, and may be read until this returns, or it is done.
    pub(crate) unsafe fn send(&mut self, packets: &[Packet]) -> usize {
        // SAFETY: an open port, and a list of packets that may be read and fit an mbuf, as the caller says.
        unsafe { lm_dpdk_send(self.port.as_ptr(), packets.as_ptr(), packets.len() as c_uint) as usize }
    }

    /// Sends one packet. `false`: there is no room.
    pub(crate) fn send_bytes(&mut self, packet: &[u8]) -> bool {
        assert!(packet.len() <= ROOM);
        // SAFETY: a live slice, of no more bytes.
        let taken = unsafe { self.send(&[Packet::new(packet.as_ptr(), packet.len(), NONE, 0)]) };
        taken == 1
    }

    /// Packets of a queue, where they lie, that the device is done with since this was asked.
    #[inline]
    pub(crate) fn done(&mut self, queue: usize) -> &[u64] {
        assert!(queue < QUEUES);
        let mut done = std::ptr::null();
        // SAFETY: an open port, one of its queues, and a pointer to be written.
        let count = unsafe { lm_dpdk_done(self.port.as_ptr(), queue, &mut done) } as usize;
        // SAFETY: as many lie there, in the port, until it is used again, which needs `&mut self`.
        unsafe { std::slice::from_raw_parts(done, count) }
    }

    /// Whether packets were taken that the device has not taken: [`Link::send`] has it try them again.
    pub(crate) fn waits(&self) -> bool {
        // SAFETY: an open port.
        unsafe { lm_dpdk_waits(self.port.as_ptr()) }
    }

    /// Whether there is something at the other end.
    pub(crate) fn is_up(&self) -> bool {
        // SAFETY: an open port.
        unsafe { lm_dpdk_is_up(self.port.as_ptr()) }
    }

    pub(crate) fn counters(&self) -> Counters {
        // SAFETY: an open port.
        unsafe { lm_dpdk_counters(self.port.as_ptr()) }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _one = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: an open port, which is not used any more.
        if unsafe { !lm_dpdk_close(self.port.as_ptr()) } {
            // Its driver may write there: it stays, and is not used again.
            std::mem::forget(self.aimed.take());
        }
    }
}
