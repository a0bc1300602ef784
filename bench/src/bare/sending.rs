//! Packets to send, each in a number of chunks one after the other.

use std::io;
use std::time::{Duration, Instant};

use super::BATCH;
use super::frame::{HEADER_LEN, SEQUENCE_LEN};
use super::pace::Pace;
use super::socket::{CHUNKS_EACH_WAY, Socket};
use crate::suite::{Patience, SILENCE};

/// What a sender has on the way, and its memory. What was given back last is used first: the cache has it.
pub(super) struct Outgoing {
    /// First chunk of each packet that is free.
    pub(super) free: Vec<u64>,
    first: u64,
    chunks: u32,
    packet_len: u32,
    /// Most packets that may be in flight: not completed, and not taken by the receiver where it paces.
    most: u32,
    credit: u32,
    unfinished: u32,
    /// Written into each packet, where it is an answer.
    pub(super) answer: Option<[u8; HEADER_LEN]>,
    /// Of a batch: written, and how many more may be.
    written: u32,
    room: u32,
}

impl Outgoing {
    /// In all of the socket's memory for sending.
    pub(super) fn new(socket: &Socket, payload: usize, [most, credit]: [u32; 2]) -> Outgoing {
        let packet_len = (HEADER_LEN + payload) as u32;
        let chunks = socket.chunks(packet_len);
        let len = u64::from(chunks) * socket.chunk_len();
        let count = CHUNKS_EACH_WAY / chunks;
        let first = socket.first_to_send();
        Outgoing {
            free: (0..u64::from(count)).map(|n| first + n * len).collect(),
            first,
            chunks,
            packet_len,
            most: most.min(count),
            credit,
            unfinished: 0,
            answer: None,
            written: 0,
            room: 0,
        }
    }

    /// Writes headers into what is free.
    pub(super) fn fill(&self, socket: &Socket, headers: &[u8; HEADER_LEN]) {
        self.free.iter().for_each(|&chunk| socket.copy_in(chunk, headers));
    }

    /// Writes a packet with this number; it leaves with its batch.
    pub(super) fn send(&mut self, socket: &mut Socket, pace: Option<&Pace>, number: u64) -> io::Result<()> {
        if self.room == 0 {
            self.await_room(socket, pace, number)?;
        }
        let chunk = self.take();
        if let Some(headers) = &self.answer {
            socket.copy_in(chunk, headers);
        }
        socket.copy_in(chunk + HEADER_LEN as u64, &number.to_be_bytes());
        self.write(socket, chunk, self.packet_len);
        self.room -= 1;
        match self.room {
            0 => self.flush(socket),
            _ => Ok(()),
        }
    }

    /// Writes a packet that lies in its chunks; how many of its batch are written.
    pub(super) fn write(&mut self, socket: &mut Socket, chunk: u64, len: u32) -> u32 {
        socket.write_packet(self.written * self.chunks, chunk, len);
        self.written += 1;
        self.written
    }

    /// Packets that are written or handed over, and not finished.
    pub(super) fn on_the_way(&self) -> u32 {
        self.unfinished + self.written
    }

    /// Hands over what is written.
    pub(super) fn flush(&mut self, socket: &mut Socket) -> io::Result<()> {
        socket.tx.submit(self.written * self.chunks);
        self.unfinished += self.written;
        (self.written, self.room) = (0, 0);
        match socket.tx.is_drained() {
            true => Ok(()),
            false => socket.wake_tx(),
        }
    }

    /// Waits until packets may be sent: while many are on the way for a whole batch, since one completion must not cost one system call.
    fn await_room(&mut self, socket: &mut Socket, pace: Option<&Pace>, number: u64) -> io::Result<()> {
        let mut patience = Patience::until(Some(Instant::now() + SILENCE));
        loop {
            self.reap(socket);
            let on_the_way = pace.map_or(0, |pace| ((number - pace.count()) as u32).min(self.credit));
            let count = BATCH
                .min(self.most.saturating_sub(self.unfinished))
                .min(self.credit - on_the_way)
                .min(socket.tx.room() / self.chunks);
            let is_busy = self.unfinished > self.most / 2 || on_the_way > self.credit / 2;
            if count == BATCH || (count > 0 && !is_busy) {
                self.room = count;
                return Ok(());
            }
            if !socket.tx.is_drained() {
                socket.wake_tx()?;
            }
            if patience.is_over() {
                return Err(io::Error::other("nothing takes the packets any more"));
            }
            std::hint::spin_loop();
        }
    }

    fn take(&mut self) -> u64 {
        self.free.pop().expect("fewer packets in flight than room")
    }

    /// Takes finished packets back. All of a packet's chunks finish together.
    pub(super) fn reap(&mut self, socket: &mut Socket) {
        let len = u64::from(self.chunks) * socket.chunk_len();
        let (done, before) = (socket.completion.waiting(u32::MAX), self.free.len());
        for n in 0..done {
            // 6.18 loses bit 0 of completion addresses; chunks are aligned, so masking restores them everywhere.
            let chunk = socket.chunk_of(socket.completion.read(n));
            if (chunk - self.first).is_multiple_of(len) {
                self.free.push(chunk);
            }
        }
        socket.completion.release(done);
        self.unfinished -= (self.free.len() - before) as u32;
    }

    /// Sends a datagram through this queue to another port, where a UDP socket wants to learn the queue's NAPI id.
    pub(super) fn teach_queue(&mut self, socket: &mut Socket, headers: &[u8; HEADER_LEN]) -> io::Result<()> {
        // It keeps its own headers: it is not given back.
        let chunk = self.take();
        socket.copy_in(chunk, headers);
        socket.write_packet(0, chunk, (HEADER_LEN + SEQUENCE_LEN) as u32);
        socket.tx.submit(1);
        socket.wake_tx()?;
        let deadline = Instant::now() + Duration::from_millis(200);
        while socket.completion.waiting(1) == 0 && Instant::now() < deadline {
            socket.wake_tx()?;
            std::thread::yield_now();
        }
        let done = socket.completion.waiting(1);
        socket.completion.release(done);
        Ok(())
    }
}
