//! Sending packets made elsewhere, each through the queue it shall leave on: the last step of the impairment box ([`lm_box`]).

use std::io;

use lm_box::{Inject, LIMIT_MAX};

use super::ifindex;
use super::socket::{CHUNK_LEN, CHUNKS_EACH_WAY, Moved, Socket};

/// Packets of one queue that the kernel has and has not finished: veth's ring takes 256.
const IN_FLIGHT: u32 = 192;
/// Packets handed over before the kernel is woken.
const BATCH: u32 = 32;

/// One queue of an interface, for sending alone.
#[derive(Debug)]
pub struct Injector {
    socket: Socket,
    free: Vec<u64>,
    unfinished: u32,
    unsent: u32,
}

/// A packet in the memory of an [`Injector`], not yet sent.
#[derive(Debug, Clone, Copy)]
pub struct Stored {
    chunk: u64,
    len: u32,
}

const _: () = assert!(CHUNKS_EACH_WAY >= LIMIT_MAX);

impl Inject for Injector {
    type Stored = Stored;

    fn open(interface: &str, queue: u32) -> io::Result<Injector> {
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

    fn store(&mut self, packet: &[u8]) -> Option<Stored> {
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

    fn send(&mut self, packet: Stored) -> io::Result<bool> {
        if self.unfinished >= IN_FLIGHT {
            self.flush()?;
        }
        if self.unfinished >= IN_FLIGHT {
            return Ok(false);
        }
        // The ring holds as many as there are chunks.
        self.socket.write_packet(0, packet.chunk, packet.len);
        self.socket.tx.submit(1);
        self.unfinished += 1;
        self.unsent += 1;
        if self.unsent >= BATCH {
            self.flush()?;
        }
        Ok(true)
    }

    fn flush(&mut self) -> io::Result<()> {
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
