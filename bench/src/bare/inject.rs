//! Sending packets made elsewhere, each through the queue it shall leave on: the last step of the impairment box ([`lm_box`]).

use std::io;

use lm_box::{Inject, LIMIT_MAX};

use super::BATCH;
use super::frame::HEADER_LEN;
use super::sending::Outgoing;
use super::socket::{CHUNK_LEN, CHUNKS_EACH_WAY, Socket};

/// Packets of one queue that the kernel has and has not finished: veth's ring takes 256.
const IN_FLIGHT: u32 = 192;

/// One queue of an interface, for sending alone.
pub struct Injector {
    socket: Socket,
    outgoing: Outgoing,
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

    fn open(ifindex: u32, queue: u32) -> io::Result<Injector> {
        let socket = Socket::open(ifindex, queue, 0, CHUNK_LEN, false)?;
        let longest = CHUNK_LEN as usize - HEADER_LEN;
        Ok(Injector {
            outgoing: Outgoing::new(&socket, longest, [IN_FLIGHT; 2]),
            socket,
        })
    }

    fn store(&mut self, packet: &[u8]) -> Option<Stored> {
        if packet.len() > CHUNK_LEN as usize {
            return None;
        }
        let chunk = self.outgoing.free.pop()?;
        self.socket.copy_in(chunk, packet);
        Some(Stored {
            chunk,
            len: packet.len() as u32,
        })
    }

    fn send(&mut self, packet: Stored) -> io::Result<bool> {
        if self.outgoing.on_the_way() >= IN_FLIGHT {
            self.flush()?;
        }
        if self.outgoing.on_the_way() >= IN_FLIGHT {
            return Ok(false);
        }
        // The ring holds as many as there are chunks.
        if self.outgoing.write(&mut self.socket, packet.chunk, packet.len) >= BATCH {
            self.flush()?;
        }
        Ok(true)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.outgoing.flush(&mut self.socket)?;
        self.outgoing.reap(&mut self.socket);
        Ok(())
    }
}
