//! What lies behind a payload: the acknowledgement and the digest.

use super::{FLAG_ACKNOWLEDGES, FLAG_DIGEST, HEADER_LEN, LmError, LmHeader, RawHeader};
use crate::manifest::DIGEST_LEN;
use core::net::SocketAddrV4;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The digest at the end of a packet with this header and payload, sent from the data port `from`: XXH3 (64 bits), with the
/// header's key as seed, of the header's 24 bytes, the address, the port, XXH3 (64 bits, no seed) of the payload and, where there is
/// one, the acknowledgement.
#[inline]
pub fn packet_digest(header: &LmHeader, payload: &[u8], from: SocketAddrV4) -> u64 {
    const LEN: usize = HEADER_LEN + 6 + DIGEST_LEN;
    let mut bytes = [0; LEN + EagerAcknowledgement::LEN];
    let encoded = header.encode(payload.len() as u16);
    bytes[..HEADER_LEN].copy_from_slice(&encoded);
    bytes[HEADER_LEN..HEADER_LEN + 4].copy_from_slice(&from.ip().octets());
    bytes[HEADER_LEN + 4..HEADER_LEN + 6].copy_from_slice(&from.port().to_be_bytes());
    bytes[HEADER_LEN + 6..LEN].copy_from_slice(&xxh3_64(payload).to_be_bytes());
    let mut len = LEN;
    if let LmHeader::Eager {
        acknowledges: Some(acknowledgement),
        ..
    } = header
    {
        bytes[LEN..].copy_from_slice(&acknowledgement.encode());
        len += EagerAcknowledgement::LEN;
    }
    let [_, _, _, _, key @ .., _, _, _, _, _, _, _, _, _, _, _, _] = encoded;
    xxh3_64_with_seed(&bytes[..len], u64::from_be_bytes(key))
}

/// What follows the payload of a packet: acknowledgement and digest, where the header says that there are such.
///
/// ```
/// use lm_protocol::wire::lm::{self, LmHeader, Trailer};
///
/// let header = LmHeader::Credit { session_key: 7, packet_limit: 512, delivered: 3, announced: 9, lands: true };
/// let from = "10.0.0.1:7168".parse().unwrap();
/// let mut packet = header.encode(0).to_vec();
/// packet.extend_from_slice(Trailer::new(&header, &[], from).as_bytes());
/// let mut read = lm::parse_packet(&packet).unwrap();
/// assert!(read.is_intact(from));
/// assert!(!read.is_intact("10.0.0.2:7168".parse().unwrap()));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Trailer {
    bytes: [u8; EagerAcknowledgement::LEN + DIGEST_LEN],
    len: usize,
}

impl Trailer {
    /// That of a packet with this header and payload, sent from the data port `from`.
    #[inline]
    pub fn new(header: &LmHeader, payload: &[u8], from: SocketAddrV4) -> Trailer {
        let mut bytes = [0; EagerAcknowledgement::LEN + DIGEST_LEN];
        let mut len = 0;
        if let LmHeader::Eager {
            acknowledges: Some(acknowledgement),
            ..
        } = header
        {
            bytes[..EagerAcknowledgement::LEN].copy_from_slice(&acknowledgement.encode());
            len = EagerAcknowledgement::LEN;
        }
        if header.digest_len() > 0 {
            let digest = packet_digest(header, payload, from);
            bytes[len..len + DIGEST_LEN].copy_from_slice(&digest.to_be_bytes());
            len += DIGEST_LEN;
        }
        Trailer { bytes, len }
    }

    /// Its bytes: [`LmHeader::trailer_len`].
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// An acknowledgement that travels behind a message: which eager messages arrived at who sends it, and how many more may come.
///
/// ```text
///  0                       8               12              16
/// +-----------------------+---------------+---------------+
/// |     sender id u64     |   next u32    |   limit u32   |
/// +-----------------------+---------------+---------------+
/// ```
///
/// The message is sent again as it was, so an acknowledgement may come late. It then confirms nothing new; that something is lost
/// says an EAGER_ACK alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EagerAcknowledgement {
    /// Whose messages these are: an incarnation of the packet's receiver, which may be gone.
    pub sender_id: u64,
    /// All numbers before this one arrived (serial arithmetic).
    pub next: u32,
    /// Numbers before this one may be sent (serial arithmetic): the credit.
    pub limit: u32,
}

impl EagerAcknowledgement {
    /// Bytes of one.
    pub const LEN: usize = 16;

    /// Its bytes.
    #[inline]
    pub fn encode(&self) -> [u8; EagerAcknowledgement::LEN] {
        let mut bytes = [0; EagerAcknowledgement::LEN];
        bytes[..8].copy_from_slice(&self.sender_id.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.next.to_be_bytes());
        bytes[12..].copy_from_slice(&self.limit.to_be_bytes());
        bytes
    }

    /// That of the EAGER packet `bytes` with this header, if the header says that there is one.
    #[inline]
    pub(super) fn behind(raw: &RawHeader, bytes: &[u8]) -> Result<Option<EagerAcknowledgement>, LmError> {
        if raw.flags & FLAG_ACKNOWLEDGES == 0 {
            return Ok(None);
        }
        let digest_len = match raw.flags & FLAG_DIGEST {
            0 => 0,
            _ => DIGEST_LEN,
        };
        let payload_len = usize::from(raw.payload_len.get())
            .checked_sub(EagerAcknowledgement::LEN + digest_len)
            .ok_or(LmError::Length)?;
        let bytes: &[u8; EagerAcknowledgement::LEN] = bytes
            .get(HEADER_LEN + payload_len..)
            .and_then(<[u8]>::first_chunk)
            .ok_or(LmError::Truncated)?;
        let [sender_id @ .., _, _, _, _, _, _, _, _] = *bytes;
        let [_, _, _, _, _, _, _, _, next @ .., _, _, _, _] = *bytes;
        let [_, _, _, _, _, _, _, _, _, _, _, _, limit @ ..] = *bytes;
        Ok(Some(EagerAcknowledgement {
            sender_id: u64::from_be_bytes(sender_id),
            next: u32::from_be_bytes(next),
            limit: u32::from_be_bytes(limit),
        }))
    }
}
