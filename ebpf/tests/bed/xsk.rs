//! A bare AF_XDP socket for the tests: aligned frames, all of them in the fill ring, never given back. It shares no
//! code with
//! `lm-dataplane`, so that gate and rings are checked against the kernel alone (include/uapi/linux/if_xdp.h).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

const SOL_XDP: libc::c_int = 283;
const FRAMES: u32 = 1024;
const FRAME_LEN: u32 = 4096;

pub(crate) struct Xsk {
    socket: OwnedFd,
    umem: *mut u8,
    rx: *mut u8,
    offsets: libc::xdp_mmap_offsets,
    consumed: u32,
}

fn map(fd: i32, len: usize, offset: i64) -> *mut u8 {
    let flags = if fd < 0 {
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
    } else {
        libc::MAP_SHARED | libc::MAP_POPULATE
    };
    // SAFETY: a fresh mapping; the tests leave it to the end of the process.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            fd,
            offset,
        )
    };
    assert_ne!(at, libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
    at.cast()
}

impl Xsk {
    /// Binds to a queue in copy mode.
    pub(crate) fn bind(ifindex: u32, queue: u32) -> Xsk {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        assert!(fd >= 0, "AF_XDP socket: {}", io::Error::last_os_error());
        // SAFETY: just made, owned by nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let umem = map(-1, (FRAMES * FRAME_LEN) as usize, 0);
        let set = |name: libc::c_int, value: *const libc::c_void, len: usize| {
            // SAFETY: callers pass an initialised value of this length.
            let done = unsafe { libc::setsockopt(fd, SOL_XDP, name, value, len as u32) };
            assert_eq!(done, 0, "XDP option {name}: {}", io::Error::last_os_error());
        };
        // SAFETY: integers only; zero is a value.
        let mut register: libc::xdp_umem_reg = unsafe { std::mem::zeroed() };
        (register.addr, register.len) = (umem as u64, u64::from(FRAMES * FRAME_LEN));
        register.chunk_size = FRAME_LEN;
        set(
            libc::XDP_UMEM_REG,
            (&raw const register).cast(),
            size_of_val(&register),
        );
        let ring_len = FRAMES;
        for ring in [
            libc::XDP_UMEM_FILL_RING,
            libc::XDP_UMEM_COMPLETION_RING,
            libc::XDP_RX_RING,
        ] {
            set(ring, (&raw const ring_len).cast(), 4);
        }
        // SAFETY: as above.
        let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&offsets) as u32;
        // SAFETY: `offsets` is writable for `len` bytes.
        let got = unsafe {
            libc::getsockopt(
                fd,
                SOL_XDP,
                libc::XDP_MMAP_OFFSETS,
                (&raw mut offsets).cast(),
                &raw mut len,
            )
        };
        assert_eq!(got, 0, "XDP_MMAP_OFFSETS: {}", io::Error::last_os_error());
        let rx = map(
            fd,
            offsets.rx.desc as usize + FRAMES as usize * 16,
            libc::XDP_PGOFF_RX_RING,
        );
        let fill = map(
            fd,
            offsets.fr.desc as usize + FRAMES as usize * 8,
            libc::XDP_UMEM_PGOFF_FILL_RING as i64,
        );
        for frame in 0..FRAMES {
            // SAFETY: inside the fill ring; the kernel reads it only below the producer.
            unsafe {
                let entries: *mut u64 = fill.add(offsets.fr.desc as usize).cast();
                entries.add(frame as usize).write(u64::from(frame * FRAME_LEN));
            }
        }
        // SAFETY: the fill ring's producer, aligned by the kernel. Release: pairs with the kernel's acquire load of it.
        unsafe {
            AtomicU32::from_ptr(fill.add(offsets.fr.producer as usize).cast())
                .store(FRAMES, Ordering::Release)
        };
        let address = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: libc::XDP_COPY,
            sxdp_ifindex: ifindex,
            sxdp_queue_id: queue,
            sxdp_shared_umem_fd: 0,
        };
        // SAFETY: an initialised address of this length.
        let bound = unsafe { libc::bind(fd, (&raw const address).cast(), size_of_val(&address) as u32) };
        assert_eq!(bound, 0, "bind: {}", io::Error::last_os_error());
        Xsk {
            socket,
            umem,
            rx,
            offsets,
            consumed: 0,
        }
    }

    /// The next packet, copied; `None` when the RX ring is empty.
    pub(crate) fn receive(&mut self) -> Option<Vec<u8>> {
        // SAFETY: the RX ring's producer. Acquire: pairs with the kernel's release store after it wrote the descriptor.
        let producer = unsafe {
            AtomicU32::from_ptr(self.rx.add(self.offsets.rx.producer as usize).cast()).load(Ordering::Acquire)
        };
        if producer == self.consumed {
            return None;
        }
        // SAFETY: inside the ring, below the producer; the frame lies in the UMEM and is not in the fill ring again.
        unsafe {
            let descriptors: *const libc::xdp_desc = self.rx.add(self.offsets.rx.desc as usize).cast();
            let descriptor = descriptors.add((self.consumed % FRAMES) as usize).read();
            self.consumed += 1;
            let mut packet = vec![0; descriptor.len as usize];
            self.umem
                .add(descriptor.addr as usize)
                .copy_to(packet.as_mut_ptr(), packet.len());
            Some(packet)
        }
    }
}

impl AsFd for Xsk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends raw frames out of an interface.
pub(crate) struct Sender(OwnedFd);

impl Sender {
    pub(crate) fn new(ifindex: u32) -> Sender {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        assert!(fd >= 0, "packet socket: {}", io::Error::last_os_error());
        // SAFETY: just made, owned by nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: integers and bytes only; zero is a value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        (address.sll_family, address.sll_ifindex) = (libc::AF_PACKET as u16, ifindex as i32);
        // SAFETY: an initialised address of this length.
        let bound = unsafe { libc::bind(fd, (&raw const address).cast(), size_of_val(&address) as u32) };
        assert_eq!(bound, 0, "bind: {}", io::Error::last_os_error());
        Sender(socket)
    }

    pub(crate) fn send(&self, frame: &[u8]) {
        // SAFETY: `frame` is readable for its length.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        assert_eq!(sent, frame.len() as isize, "send: {}", io::Error::last_os_error());
    }
}
