//! The calls of shim.c, and a device as a value that closes it.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_ushort};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// Packets that are received, and sent, in one call at most.
pub(crate) const BURST: usize = 64;
/// The longest packet in bytes.
pub(crate) const ROOM: usize = 2048;

#[repr(C)]
struct RawPort {
    _opaque: [u8; 0],
}

/// Bytes of a packet.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) start: *const u8,
    pub(crate) len: usize,
    /// Where that is in the queue's memory, and which queue it is.
    pub(crate) address: u64,
    pub(crate) queue: usize,
}

impl Packet {
    /// One of no queue.
    const fn new(start: *const u8, len: usize) -> Packet {
        Packet {
            start,
            len,
            address: 0,
            queue: 0,
        }
    }
}

// SAFETY: an address and a length; what they are good for is said where they are used.
unsafe impl Send for Packet {}

#[repr(C)]
struct RawFacts {
    mac: [u8; 6],
    mtu: c_ushort,
    fault: *const c_char,
}

/// Packets that no program saw.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counters {
    /// In several segments, too long, empty, or of a VLAN.
    pub(crate) unfit: c_ulonglong,
    /// The device had no room.
    pub(crate) missed: c_ulonglong,
    /// Faults of the device, either way.
    pub(crate) errors: c_ulonglong,
}

// SAFETY: as shim.c defines them.
unsafe extern "C" {
    fn lm_dpdk_said(into: *mut c_char, room: usize) -> usize;
    fn lm_dpdk_begin(count: c_int, arguments: *mut *mut c_char) -> c_int;
    fn lm_dpdk_open(devargs: *const c_char, name: *const c_char, facts: *mut RawFacts) -> *mut RawPort;
    fn lm_dpdk_close(port: *mut RawPort);
    fn lm_dpdk_receive(port: *mut RawPort, packets: *mut Packet) -> c_uint;
    fn lm_dpdk_send(port: *mut RawPort, packets: *const Packet, count: c_uint) -> c_uint;
    fn lm_dpdk_waits(port: *const RawPort) -> bool;
    fn lm_dpdk_is_up(port: *const RawPort) -> bool;
    fn lm_dpdk_counters(port: *const RawPort) -> Counters;
}

/// What DPDK logged since this was asked last.
pub(crate) fn said() -> String {
    let mut text = [0; 4096];
    // SAFETY: the room is that of `text`.
    let len = unsafe { lm_dpdk_said(text.as_mut_ptr().cast(), text.len()) };
    String::from_utf8_lossy(&text[..len]).into_owned()
}

/// Begins DPDK with these arguments. Once in a process.
pub(crate) fn begin(arguments: &[CString]) -> std::io::Result<()> {
    let pointers = arguments.iter().map(|argument| argument.as_ptr().cast_mut());
    let mut pointers: Vec<*mut c_char> = pointers.chain([std::ptr::null_mut()]).collect();
    // SAFETY: a list of `argc` strings and a null, as main has it. DPDK keeps copies, and permutes the list alone.
    match unsafe { lm_dpdk_begin(arguments.len() as c_int, pointers.as_mut_ptr()) } {
        0 => Ok(()),
        error => Err(std::io::Error::from_raw_os_error(error)),
    }
}

/// A device's address and its MTU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) mac: [u8; 6],
    pub(crate) mtu: u16,
}

/// Devices come and go one at a time: DPDK's lists of them, and what it says meanwhile, are the process's.
static DEVICES: Mutex<()> = Mutex::new(());

/// A started device. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct Link {
    port: NonNull<RawPort>,
    /// What was received last: it lies in the device's memory until the next receive.
    burst: [Packet; BURST],
    count: usize,
}

// SAFETY: shim.c ties a port to no thread, and `&mut self` keeps two from using it at once; its `&self` calls read what DPDK has for any thread.
unsafe impl Send for Link {}

impl Link {
    /// Opens what `devargs` describe, whose device is called `name`; or says what cannot be done, and what DPDK logged about it.
    pub(crate) fn open(devargs: &CStr, name: &CStr) -> Result<(Link, Facts), (&'static str, String)> {
        let _one = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        drop(said());
        let mut facts = RawFacts {
            mac: [0; 6],
            mtu: 0,
            fault: std::ptr::null(),
        };
        // SAFETY: two live strings, and facts to be written.
        let port = unsafe { lm_dpdk_open(devargs.as_ptr(), name.as_ptr(), &mut facts) };
        let Some(port) = NonNull::new(port) else {
            // SAFETY: where there is no port, a literal says why.
            let fault = unsafe { CStr::from_ptr(facts.fault) };
            return Err((fault.to_str().unwrap_or_default(), said()));
        };
        let known = Facts {
            mac: facts.mac,
            mtu: facts.mtu,
        };
        let burst = [Packet::new(std::ptr::null(), 0); BURST];
        let count = 0;
        Ok((Link { port, burst, count }, known))
    }

    /// Takes what came; how many packets there are now.
    pub(crate) fn receive(&mut self) -> usize {
        // SAFETY: an open port, and room for a burst.
        self.count = unsafe { lm_dpdk_receive(self.port.as_ptr(), self.burst.as_mut_ptr()) } as usize;
        self.count
    }

    /// One of those.
    #[inline]
    pub(crate) fn packet(&self, at: usize) -> &[u8] {
        let packet = self.burst[..self.count][at];
        // SAFETY: the bytes of an mbuf that is freed by the next receive, which needs `&mut self`. The driver is trusted, as a device is, to
        // write no more to what it has given out.
        unsafe { std::slice::from_raw_parts(packet.start, packet.len) }
    }

    /// Copies packets, as long as the device takes those before them; how many. Their memory is free then.
    ///
    /// # Safety
    ///
    /// Each is [`ROOM`] bytes long at most, and may be read until this returns.
    pub(crate) unsafe fn send(&mut self, packets: &[Packet]) -> usize {
        // SAFETY: an open port, and a list of packets that may be read and fit an mbuf, as the caller says.
        unsafe { lm_dpdk_send(self.port.as_ptr(), packets.as_ptr(), packets.len() as c_uint) as usize }
    }

    /// Sends one packet. `false`: there is no room.
    pub(crate) fn send_bytes(&mut self, packet: &[u8]) -> bool {
        assert!(packet.len() <= ROOM);
        // SAFETY: a live slice, of no more bytes.
        let taken = unsafe { self.send(&[Packet::new(packet.as_ptr(), packet.len())]) };
        taken == 1
    }

    /// Whether packets were copied that the device has not taken: [`Link::send`] has it try them again.
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
        unsafe { lm_dpdk_close(self.port.as_ptr()) };
    }
}
