//! Send region: where an application writes a message that is to be sent. Step 1 of the data's path: loaned
//! by [`crate::endpoint`], filled by the application, goes to [`crate::outbound`] or [`crate::eager`].
//!
//! ```text
//!  region start (16-byte aligned)
//!  ├─ hole ─┤──── payload 0 ────┤─ hole ─┤──── payload 1 ────┤ ...        (LM §3.1, figure 1)
//! ```
//! Headers go into the holes when the message is sent; every packet is then one contiguous run of bytes.

use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use lm_protocol::geometry::Geometry;

use crate::completion::{PeerId, SendError};
use crate::release::{Loaned, Released};
use crate::words::{Words, WordsError};

/// How many payload ranges one `preadv` fills (Linux allows 1024; the gain is gone long before).
const RANGES_PER_READ: usize = 64;

/// Memory for one message to one peer, with holes for the headers.
///
/// Write the payload with [`io::Write`] (which skips the holes), range by range with
/// [`payloads_mut`](SendRegion::payloads_mut), or straight from a file with
/// [`read_from`](SendRegion::read_from); then hand it to [`crate::Endpoint::send`]. Dropping it unsent gives
/// the memory back.
///
/// ```no_run
/// # fn f(endpoint: &mut lm_dataplane::Endpoint, peer: lm_dataplane::PeerId) -> Result<(), Box<dyn std::error::Error>> {
/// use std::io::Write;
/// let mut region = endpoint.loan(peer, 7168)?;
/// region.write_all(&[0x5a; 7168])?;
/// endpoint.send(region, 0)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SendRegion {
    pub(crate) loaned: Arc<Loaned>,
    /// What the drop gives back; `None` once it is sent.
    pub(crate) released: Option<Released>,
    /// UMEM address of the region's first byte.
    pub(crate) start: u64,
    pub(crate) geometry: Geometry,
    pub(crate) peer: PeerId,
    /// Length of the message: the geometry may have padding behind it ([`Layout::session_message`]).
    ///
    /// [`Layout::session_message`]: lm_protocol::geometry::Layout::session_message
    len: u64,
    /// For a receiver with LM, which knows the message's length without its headers.
    in_session: bool,
    written: u64,
    /// Few messages have some, and each region is moved several times.
    pub(crate) words: Option<Box<Words>>,
}

impl SendRegion {
    pub(crate) fn new(
        loaned: Arc<Loaned>,
        released: Released,
        start: u64,
        geometry: Geometry,
        len: u64,
        peer: PeerId,
        in_session: bool,
    ) -> SendRegion {
        SendRegion {
            loaned,
            released: Some(released),
            start,
            geometry,
            peer,
            len,
            in_session,
            written: 0,
            words: None,
        }
    }

    /// Fragments that carry bytes of the message.
    fn payload_fragments(&self) -> u32 {
        match self.len < self.geometry.message_len() {
            // Padded to two.
            true => 1,
            false => self.geometry.fragment_count(),
        }
    }

    /// Length of the message in bytes, as asked for with `loan`.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Bytes written so far through [`io::Write`] or [`read_from`](SendRegion::read_from).
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The peer that the region was loaned for.
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// Gives opaque bytes along, 48 at most: whoever decides at the receiver where the message lands sees them
    /// ([`Announced::words`](crate::Announced::words)).
    ///
    /// # Errors
    /// [`WordsError`]; the message has those that it had.
    pub fn set_words(&mut self, words: &[u8]) -> Result<(), WordsError> {
        if !self.in_session || matches!(self.released, Some(Released::TransmitFrame(_))) {
            return Err(WordsError::NotAnnounced);
        }
        self.words = Some(Box::new(Words::new(words)?));
        Ok(())
    }

    /// The payload ranges in message order, holes left out. Together they are `len()` bytes.
    pub fn payloads_mut(&mut self) -> Payloads<'_> {
        self.payloads_from(0)
    }

    /// Where the payload lies in the endpoint's memory, in bytes, in message order and holes left out: as
    /// [`payloads_mut`](SendRegion::payloads_mut), for another process that fills it ([`Status::memory_file`](crate::Status::memory_file)).
    pub fn umem_ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        (0..self.payload_fragments()).map(|index| self.umem_range(index))
    }

    pub(crate) fn payloads_from(&mut self, position: u64) -> Payloads<'_> {
        let stride = u64::from(self.geometry.layout().payload_len());
        let fragments = self.payload_fragments();
        let mut next = (position / stride).min(u64::from(fragments)) as u32;
        // With `ipfrag` the first fragment is shorter than the stride, so the guess can be one too low.
        while next < fragments {
            let fragment = self.geometry.fragment(next);
            if position < (fragment.offset + u64::from(fragment.len)).min(self.len) {
                break;
            }
            next += 1;
        }
        let skip = match next < fragments {
            true => (position - self.geometry.fragment(next).offset) as usize,
            false => 0,
        };
        Payloads {
            region: self,
            next,
            skip,
        }
    }

    /// Fills the rest of the region from `file`, starting at byte `offset` of it: the kernel writes straight
    /// into the payload ranges. Returns the number of bytes read; fewer than were missing means end of file.
    ///
    /// # Errors
    /// What `preadv(2)` reports; the bytes before the error count as written.
    pub fn read_from(&mut self, file: &File, offset: u64) -> io::Result<u64> {
        let begin = self.written;
        while self.written < self.len() && self.read_some(file, offset + (self.written - begin))? > 0 {}
        Ok(self.written - begin)
    }

    /// Fills the next payload ranges from `file`, as many as one call takes. Returns the number of bytes; 0: end of file.
    pub(crate) fn read_some(&mut self, file: &File, offset: u64) -> io::Result<usize> {
        let position = self.written;
        let mut payloads = self.payloads_from(position);
        let mut used = 0;
        let mut ranges: [IoSliceMut<'_>; RANGES_PER_READ] = std::array::from_fn(|_| {
            let range = payloads.next().unwrap_or_default();
            used += usize::from(!range.is_empty());
            IoSliceMut::new(range)
        });
        let read = loop {
            match rustix::io::preadv(file.as_fd(), &mut ranges[..used], offset) {
                Err(rustix::io::Errno::INTR) => {}
                read => break read?,
            }
        };
        self.written += read as u64;
        Ok(read)
    }

    /// All before `position` counts as written.
    pub(crate) fn set_written(&mut self, position: u64) {
        self.written = position;
    }

    /// Makes the message shorter: only its first `len` bytes are sent. A longer `len` changes nothing.
    ///
    /// For input whose length shows only when it ends.
    pub fn truncate(&mut self, len: u64) {
        if len >= self.len {
            return;
        }
        let layout = *self.geometry.layout();
        let geometry = match self.in_session {
            true => layout.session_message(len),
            false => layout.message(len),
        };
        self.geometry = geometry.expect("shorter than a message that fits");
        self.len = len;
        self.written = self.written.min(len);
        self.zero_padding();
    }

    /// Padding is sent as well: nothing of an earlier message may be in it.
    pub(crate) fn zero_padding(&mut self) {
        if self.len == self.geometry.message_len() {
            return;
        }
        for index in 0..self.geometry.fragment_count() {
            let range = self.geometry.tx_payload_range(index);
            let used = self.len.saturating_sub(self.geometry.message_offset(index));
            let start = (range.start + used).min(range.end);
            let pad_len = range.end - start;
            let pointer = self.loaned.pointer(self.start + start, pad_len);
            // SAFETY: the range lies inside the mapping (checked by `pointer`) and inside this region, which only
            // this value can reach until it is sent; `&mut self` excludes every slice of it.
            unsafe { std::ptr::write_bytes(pointer, 0, pad_len as usize) };
        }
    }

    /// Takes the memory out of the region: the engine owns it from here on.
    pub(crate) fn into_sent(mut self) -> (Released, u64, Geometry, u64) {
        let released = self.released.take().expect("a region is sent once");
        (released, self.start, self.geometry, self.len)
    }

    /// UMEM addresses of fragment `index`'s payload.
    fn umem_range(&self, index: u32) -> Range<u64> {
        let fragment = self.geometry.fragment(index);
        let address = self.start + self.geometry.tx_payload_offset(index);
        let end = (fragment.offset + u64::from(fragment.len)).min(self.len);
        address..address + end - fragment.offset
    }

    fn range_mut(&mut self, index: u32, skip: usize) -> &mut [u8] {
        let range = self.umem_range(index);
        let (address, len) = (
            range.start + skip as u64,
            (range.end - range.start) as usize - skip,
        );
        let pointer = self.loaned.pointer(address, len as u64);
        // SAFETY: the range lies inside the mapping (checked by `pointer`) and inside this region, which
        // only this value can reach until it is sent: the engine neither reads it nor gives it to the kernel
        // before. Of a message that is sent while it is written (`MessageWriter`) that goes for what is not released, and nothing else
        // comes here. `&mut self` excludes every other slice of it.
        unsafe { std::slice::from_raw_parts_mut(pointer, len) }
    }
}

impl Write for SendRegion {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let position = self.written;
        let Some(range) = self.payloads_from(position).next() else {
            return Ok(0);
        };
        let count = range.len().min(bytes.len());
        range[..count].copy_from_slice(&bytes[..count]);
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for SendRegion {
    fn drop(&mut self) {
        if let Some(released) = self.released {
            self.loaned.give_back(released);
        }
    }
}

/// A message that was not taken now; `region` gives it back.
#[derive(Debug)]
pub struct TrySendError {
    /// The message.
    pub region: SendRegion,
    /// Why.
    pub reason: SendError,
}

/// Iterator over the payload ranges of a [`SendRegion`], in message order.
#[derive(Debug)]
pub struct Payloads<'a> {
    region: &'a mut SendRegion,
    next: u32,
    skip: usize,
}

impl<'a> Iterator for Payloads<'a> {
    type Item = &'a mut [u8];

    fn next(&mut self) -> Option<&'a mut [u8]> {
        if self.next >= self.region.payload_fragments() {
            return None;
        }
        let (index, skip) = (self.next, std::mem::take(&mut self.skip));
        self.next += 1;
        let range = self.region.range_mut(index, skip);
        let (pointer, len) = (range.as_mut_ptr(), range.len());
        // SAFETY: payload ranges of different fragments never overlap (geometry property, tested), each is
        // returned once, and the region stays mutably borrowed for 'a.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
    }
}
