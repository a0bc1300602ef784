//! What a WINDOWS packet says: digests of windows, each sent as its window leaves, and again when it is asked for.

use super::{LmError, MAX_PAYLOAD_LEN};
use crate::manifest::{DIGEST_LEN, digests};

/// A WINDOWS packet: digests of consecutive windows of a message ([`window_digest`](crate::manifest::window_digest)), at least one.
///
/// ```text
///  0       1       2       4             12          16              20          24                24 + 8n       24 + 8n + 8
/// +-------+-------+-------+-------------+-----------+---------------+-----------+-----------------+-------------+
/// |ver| 10|   2   |pay.len| session key |  message  | first window  | windows n | n × digest u64  | digest u64  |
/// +-------+-------+-------+-------------+-----------+---------------+-----------+-----------------+-------------+
/// ```
///
/// Without any digests it is a request: the receiver of the session wants those of the windows that the words name, each as it leaves.
///
/// The last digest is the packet's. An extension's packets have their header and that digest from
/// [`LmHeader::Extension`](super::LmHeader::Extension), so only its words and its payload are here.
///
/// ```
/// use lm_protocol::wire::lm::WindowsPacket;
///
/// let mut payload = [0; 1448];
/// let (words, len) = WindowsPacket::write(&mut payload, 1, 5, [11, 12].into_iter()).unwrap();
/// assert_eq!((words, len), ([1, 5, 2], 16));
/// let packet = WindowsPacket::read(words, &payload[..len])?;
/// assert_eq!((packet.message, packet.first), (1, 5));
/// assert!(packet.digests().eq([11, 12]));
/// # Ok::<(), lm_protocol::wire::lm::LmError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowsPacket<'a> {
    /// Number of the message.
    pub message: u32,
    /// Window whose digest comes first.
    pub first: u32,
    payload: &'a [u8],
}

impl<'a> WindowsPacket<'a> {
    /// Writes the payload to the start of `out`; the header's words, and the payload's length. `None` where there is no digest, where they
    /// have no room there or in a packet, and where no message has so many windows.
    pub fn write(
        out: &mut [u8],
        message: u32,
        first: u32,
        digests: impl ExactSizeIterator<Item = u64>,
    ) -> Option<([u32; 3], usize)> {
        let len = digests.len() * DIGEST_LEN;
        let count = u32::try_from(digests.len()).ok()?;
        first.checked_add(count)?;
        // The packet's own digest needs room, too.
        let out = out
            .get_mut(..len)
            .filter(|_| count > 0 && len <= MAX_PAYLOAD_LEN - DIGEST_LEN)?;
        for (bytes, digest) in out.as_chunks_mut::<DIGEST_LEN>().0.iter_mut().zip(digests) {
            *bytes = digest.to_be_bytes();
        }
        Some(([message, first, count], len))
    }

    /// Reads the words of a header of [`TYPE_WINDOWS`](super::TYPE_WINDOWS), and the payload.
    ///
    /// # Errors
    ///
    /// [`LmError::Length`] where there is no digest, or the payload has not as many as the header says; [`LmError::Index`] where no message
    /// has so many windows.
    pub fn read([message, first, count]: [u32; 3], payload: &'a [u8]) -> Result<WindowsPacket<'a>, LmError> {
        if count == 0 || u64::from(count) * DIGEST_LEN as u64 != payload.len() as u64 {
            return Err(LmError::Length);
        }
        first.checked_add(count).ok_or(LmError::Index)?;
        Ok(WindowsPacket {
            message,
            first,
            payload,
        })
    }

    /// The windows' digests, in order.
    pub fn digests(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        digests(self.payload)
    }
}
