//! Writer: a message that is sent while it is written. Step 1 of the data's path, beside [`crate::region`]: begun by
//! [`PeerHandle::begin`](crate::PeerHandle::begin), it is filled window by window, and what is *released* of it leaves
//! ([`crate::outbound`]).
//!
//! ```text
//!  any thread: MessageWriter ── Watermark ──▶ engine's thread: Outgoing
//!    writes behind the watermark                reads before it, and writes headers into the holes before it
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use lm_protocol::streaming::{Watermark, Writer, WriterError};

use crate::completion::{PeerId, SendToken};
use crate::region::{Payloads, SendRegion};

/// A message to one peer that is sent while it is written.
///
/// It is written like a [`SendRegion`]. What fills a *window* (some fragments: the receiver says how many) is released by itself and
/// leaves; what is released cannot be written again. [`finish`](MessageWriter::finish) releases the rest. Dropped before, the message is
/// aborted: its receiver is told, and [`Outcome::Aborted`](crate::Outcome::Aborted) completes it.
///
/// May be moved to another thread, while one polls the endpoint. It outlives its session and its endpoint: then it writes for nobody
/// ([`is_settled`](MessageWriter::is_settled)). Messages of a session keep their order, so that one which waits for its writer holds up those
/// behind it: a slow writer wants a session of its own.
///
/// ```no_run
/// # fn f(endpoint: &mut lm_dataplane::Endpoint, peer: lm_dataplane::PeerId) -> Result<(), Box<dyn std::error::Error>> {
/// use std::io::Write;
/// let mut writer = endpoint.peer(peer).begin(64 << 20, 0)?;
/// let writing = std::thread::spawn(move || -> std::io::Result<()> {
///     for _ in 0..64 {
///         writer.write_all(&[0x5a; 1 << 20])?;
///     }
///     writer.finish().map_err(std::io::Error::other)
/// });
/// while !writing.is_finished() {
///     endpoint.poll();
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MessageWriter {
    writer: Writer,
    watermark: Arc<Watermark>,
    token: SendToken,
    /// Behind the others: what it gives back when it is dropped says that nothing is written any more.
    region: SendRegion,
}

impl MessageWriter {
    pub(crate) fn new(
        region: SendRegion,
        writer: Writer,
        watermark: Arc<Watermark>,
        token: SendToken,
    ) -> MessageWriter {
        MessageWriter {
            writer,
            watermark,
            token,
            region,
        }
    }

    /// Names the message in its [`Completion`](crate::Completion).
    pub fn token(&self) -> SendToken {
        self.token
    }

    /// The peer that it is for.
    pub fn peer(&self) -> PeerId {
        self.region.peer()
    }

    /// Length of the message in bytes; never 0.
    #[allow(clippy::len_without_is_empty, reason = "no such message is empty")]
    pub fn len(&self) -> u64 {
        self.region.len()
    }

    /// Bytes before this one are written.
    pub fn written(&self) -> u64 {
        self.writer.written()
    }

    /// Bytes before this one are released, and may have left.
    pub fn released(&self) -> u64 {
        self.writer.writable().start
    }

    /// Whether the message has come to its end, whatever is written: its session is over, or its endpoint gone, or its receiver would not have
    /// it. Its completion says which.
    pub fn is_settled(&self) -> bool {
        Arc::strong_count(&self.watermark) == 1
    }

    /// The payload ranges that are not released, in message order. All of them count as written from now on: say with
    /// [`release`](MessageWriter::release) how far they are.
    pub fn payloads_mut(&mut self) -> Payloads<'_> {
        let writable = self.writer.writable();
        let from = writable.start;
        // Of a message that has ended there are none.
        if self.writer.wrote(writable.clone()).is_ok() {
            self.region.set_written(writable.end);
        }
        self.region.payloads_from(from)
    }

    /// Fills the rest of the message from `file`, starting at byte `offset` of it: the kernel writes straight into the payload ranges, and what
    /// fills a window is released at once. Returns the number of bytes read; fewer than were missing means end of file.
    ///
    /// # Errors
    /// As those of writing, and what `preadv(2)` reports; the bytes before the error count as written.
    pub fn read_from(&mut self, file: &File, offset: u64) -> io::Result<u64> {
        let begin = self.written();
        while self.written() < self.len() {
            self.check()?;
            let position = self.written();
            let read = self.region.read_some(file, offset + (position - begin))?;
            if read == 0 {
                break;
            }
            self.has_written(read)?;
        }
        Ok(self.written() - begin)
    }

    /// Releases the windows that end at or before byte `up_to`, but for the last one, which [`finish`](MessageWriter::finish) releases.
    ///
    /// # Errors
    /// [`WriterError`]: it is beyond what is written, or before what is released, or the message has ended.
    pub fn release(&mut self, up_to: u64) -> Result<(), WriterError> {
        let before = self.released();
        let release = self.writer.release(up_to)?;
        if self.released() > before {
            self.watermark.publish(release);
        }
        Ok(())
    }

    /// Releases all of the message.
    ///
    /// # Errors
    /// [`WriterError`]: not all of it is written, or it has ended.
    pub fn finish(&mut self) -> Result<(), WriterError> {
        let release = self.writer.finish()?;
        self.watermark.publish(release);
        Ok(())
    }

    /// Whether there is anybody to write for.
    fn check(&self) -> io::Result<()> {
        if self.writer.writable().is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, WriterError::Ended));
        }
        if self.is_settled() {
            return Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "the message was settled before it was written: its completion says why",
            ));
        }
        Ok(())
    }

    /// The next `count` bytes are written.
    fn has_written(&mut self, count: usize) -> io::Result<()> {
        let from = self.written();
        let to = from + count as u64;
        self.writer.wrote(from..to).map_err(io::Error::other)?;
        self.release(to).map_err(io::Error::other)
    }
}

impl Write for MessageWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        let count = self.region.write(bytes)?;
        // Of ranges that were lent only `release` says how far they are.
        if count > 0 {
            self.has_written(count)?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for MessageWriter {
    fn drop(&mut self) {
        if let Some(release) = self.writer.abort() {
            self.watermark.publish(release);
        }
    }
}
