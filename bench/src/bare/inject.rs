//! Sending packets made elsewhere, each through the queue it shall leave on: the last step of the impairment box.

use std::io;

use super::ifindex;
use super::socket::{CHUNK_LEN, CHUNKS_EACH_WAY, Moved, Socket};

/// Packets of one queue that the kernel has and has not finished: veth's ring takes 256.
const IN_FLIGHT: u32 = 192;
/// Packets handed over before the kernel is woken.
const BATCH: u32 = 32;

/// One queue of an interface, for sending alone.
#[derive(Debug)]
pub(crate) struct Injector {
    socket: Socket,
    free: Vec<u64>,
    unfinished: u32,
    unsent: u32,
}

/// A packet in the memory of an [`Injector`], not yet sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    chunk: u64,
    len: u32,
}

impl Injector {
    /// Most packets that one injector stores.
    pub(crate) const CAPACITY: u32 = CHUNKS_EACH_WAY;

    pub(crate) fn open(interface: &str, queue: u32) -> io::Result<Injector> {
        let first = u64::from(CHUNKS_EACH_WAY) * CHUNK_LEN;
        Ok(Injector {
            socket: Socket::open(ifindex(interface)?, queue, 0, CHUNK_LEN, Moved::ByKernel)?,
            free: (0..u64::from(CHUNKS_EACH_WAY))
                .map(|n| first + n * CHUNK_LEN)
                .collect(),
            unfinished: 0,
            unsent: 0,
        })
    }

    /// Copies a packet in; `None` when there is no room or the packet is too long.
    pub(crate) fn store(&mut self, packet: &[u8]) -> Option<Stored> {
        if packet.len() > CHUNK_LEN as usize {
            return None;
        }
        let chunk = self.free.pop()?;
        self.socket.copy_in(chunk, packet);
        Some(Stored {
            chunk,
            len: packet.len() as u32,
        })
    }

    /// Hands a stored packet to the kernel; `false` when it has enough for now.
    pub(crate) fn send(&mut self, packet: Stored) -> io::Result<bool> {
        if self.unfinished >= IN_FLIGHT {
            self.flush()?;
        }
        if self.unfinished >= IN_FLIGHT {
            return Ok(false);
        }
        let descriptor = libc::xdp_desc {
            addr: packet.chunk,
            len: packet.len,
            options: 0,
        };
        // The ring holds as many as there are chunks.
        self.socket.tx.write(0, descriptor);
        self.socket.tx.submit(1);
        self.unfinished += 1;
        self.unsent += 1;
        if self.unsent >= BATCH {
            self.flush()?;
        }
        Ok(true)
    }

    /// Wakes the kernel where it is needed and takes finished packets back.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if !self.socket.tx.is_drained() {
            self.socket.wake_tx()?;
        }
        self.unsent = 0;
        loop {
            let done = self.socket.completion.waiting(u32::MAX);
            if done == 0 {
                return Ok(());
            }
            for n in 0..done {
                // 6.18 loses bit 0 of completion addresses; chunks are aligned.
                self.free.push(self.socket.completion.read(n) & !(CHUNK_LEN - 1));
            }
            self.socket.completion.release(done);
            self.unfinished -= done;
        }
    }
}

/// Lets this thread run before ordinary ones, which may spin on every core there is. Without the privilege nothing changes:
/// delays are then kept less well.
pub(crate) fn take_precedence() {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: a live sched_param; 0 means the calling thread.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) };
}

/// The index of an interface, by name.
pub(crate) fn interface_index(name: &str) -> io::Result<u32> {
    ifindex(name)
}
