//! Headers of a message's packets, prepared once and written per packet in a few nanoseconds.
//!
//! Between two packets of one message only the fragment's number differs, and the lengths in the last one. A template
//! holds all other bytes, and the IPv4 checksum's sum over them, so that writing a header is one copy of constant length
//! and a few stores; nothing is summed again for full-size fragments of the `lm` wire.

use super::addressing::Addressing;
use super::ipv4::{Ipv4Header, Ipv4Repr, PROTOCOL_UDP, fold, sum};
use super::lm::{self, LmHeader};
use super::udp::{self, UdpRepr};
use crate::geometry::{Geometry, Layout, Wire};
use zerocopy::IntoBytes;

/// Ethernet header with one tag, the longest that a template writes.
const MAX_ETHERNET_LEN: usize = 18;
const IP_LEN: usize = Ipv4Repr::HEADER_LEN;
const UDP_LEN: usize = UdpRepr::HEADER_LEN;

/// Headers without and with a tag.
const LM_LEN: usize = 14 + IP_LEN + UDP_LEN + lm::HEADER_LEN;
const LM_TAGGED_LEN: usize = MAX_ETHERNET_LEN + IP_LEN + UDP_LEN + lm::HEADER_LEN;
const _: () = assert!(LM_LEN == 66 && LM_TAGGED_LEN == 70);

// Offsets from the start of the IPv4 header.
const IP_TOTAL_LEN: usize = core::mem::offset_of!(Ipv4Header, total_len);
const IP_ID: usize = core::mem::offset_of!(Ipv4Header, id);
const IP_FRAGMENT: usize = core::mem::offset_of!(Ipv4Header, fragment);
const IP_CHECKSUM: usize = core::mem::offset_of!(Ipv4Header, checksum);
const UDP_LENGTH: usize = IP_LEN + 4;
const LM_PAYLOAD_LEN: usize = IP_LEN + UDP_LEN + 2;
const LM_MESSAGE: usize = IP_LEN + UDP_LEN + 12;
const LM_INDEX: usize = IP_LEN + UDP_LEN + 16;
const LM_COUNT: usize = IP_LEN + UDP_LEN + 20;

#[inline(always)]
fn put_u16<const N: usize>(out: &mut [u8; N], at: usize, value: u16) {
    out[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

#[inline(always)]
fn put_u32<const N: usize>(out: &mut [u8; N], at: usize, value: u32) {
    out[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

/// The headers of DATA packets (`lm` wire) of one session, and of one message at a time.
///
/// ```
/// # use core::net::Ipv4Addr;
/// # use lm_protocol::wire::ethernet::MacAddr;
/// use lm_protocol::geometry::{Layout, Wire};
/// use lm_protocol::wire::{Addressing, DataTemplate};
///
/// # let addressing = Addressing {
/// #     src_mac: MacAddr([2, 0, 0, 0, 0, 1]), dst_mac: MacAddr([2, 0, 0, 0, 0, 2]), vlan: None,
/// #     src_ip: Ipv4Addr::new(10, 0, 0, 1), dst_ip: Ipv4Addr::new(10, 0, 0, 2), src_port: 40_000, dst_port: 7168,
/// # };
/// let message = Layout::new(Wire::Lm, 1500, addressing.link())?.message(3000)?;
/// let session_key = 0x1122_3344_5566_7788;
/// let template = DataTemplate::new(
///     &addressing, session_key, 0, message.fragment_count(), message.layout().payload_len());
///
/// let mut region = vec![0; message.tx_region_len() as usize];
/// for index in (0..message.fragment_count()).rev() {
///     let frame = message.tx_frame_offset(index) as usize;
///     let header_len = template.write(&mut region[frame..], index, message.fragment_len(index));
///     assert_eq!(header_len, 66);
/// }
/// # Ok::<(), lm_protocol::geometry::GeometryError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DataTemplate {
    /// Headers of a full-size fragment 0; the first `header_len` bytes count.
    bytes: [u8; LM_TAGGED_LEN],
    tagged: bool,
    full_payload_len: u16,
    /// Sum over the IPv4 header without total length and checksum.
    ip_sum: u64,
}

impl DataTemplate {
    /// A template for message `message` of `count` fragments, where all fragments but the last carry
    /// `full_payload_len` bytes ([`Layout::payload_len`]; at most [`lm::MAX_PAYLOAD_LEN`]).
    pub fn new(
        addressing: &Addressing,
        session_key: u64,
        message: u32,
        count: u32,
        full_payload_len: u16,
    ) -> DataTemplate {
        let mut bytes = [0; LM_TAGGED_LEN];
        let header = LmHeader::Data {
            session_key,
            message,
            index: 0,
            count,
        };
        let full_payload_len = full_payload_len.min(lm::MAX_PAYLOAD_LEN as u16);
        addressing
            .write_headers(&mut bytes, &header, usize::from(full_payload_len))
            .expect("70 bytes hold any header, and the payload was limited");
        let ip_at = addressing.ethernet_len();
        let mut ip = [0; IP_LEN];
        ip.copy_from_slice(&bytes[ip_at..ip_at + IP_LEN]);
        put_u16(&mut ip, IP_TOTAL_LEN, 0);
        put_u16(&mut ip, IP_CHECKSUM, 0);
        DataTemplate {
            bytes,
            tagged: addressing.vlan.is_some(),
            full_payload_len,
            ip_sum: sum(&ip),
        }
    }

    /// The same session's next message: number and fragment count change, everything else stays.
    #[inline]
    pub fn set_message(&mut self, message: u32, count: u32) {
        let ip_at = self.header_len() - (LM_LEN - 14);
        put_u32(&mut self.bytes, ip_at + LM_MESSAGE, message);
        put_u32(&mut self.bytes, ip_at + LM_COUNT, count);
    }

    /// `H`: bytes that [`DataTemplate::write`] writes, 66 or with a tag 70.
    #[inline]
    pub const fn header_len(&self) -> usize {
        if self.tagged { LM_TAGGED_LEN } else { LM_LEN }
    }

    /// What [`DataTemplate::write`] writes for fragment 0 where it is a full one, and at which byte of it every other's index stands, a
    /// big-endian `u32`: full fragments differ in nothing else. `None` on a link with tags.
    #[inline]
    pub fn plain_header(&self) -> Option<(&[u8; LM_LEN], usize)> {
        let header = self.bytes.first_chunk().filter(|_| !self.tagged)?;
        Some((header, 14 + LM_INDEX))
    }

    /// Writes the headers of fragment `index`, which carries `payload_len` bytes, to the start of `out`; gives their
    /// length.
    ///
    /// # Panics
    ///
    /// If `out` is shorter than [`DataTemplate::header_len`].
    #[inline]
    pub fn write(&self, out: &mut [u8], index: u32, payload_len: u16) -> usize {
        if self.tagged {
            self.write_sized::<LM_TAGGED_LEN>(out, index, payload_len)
        } else {
            self.write_sized::<LM_LEN>(out, index, payload_len)
        }
    }

    #[inline(always)]
    fn write_sized<const N: usize>(&self, out: &mut [u8], index: u32, payload_len: u16) -> usize {
        let out: &mut [u8; N] = out.first_chunk_mut().expect("room for the headers");
        let ip_at = N - (LM_LEN - 14);
        out.copy_from_slice(&self.bytes[..N]);
        put_u32(out, ip_at + LM_INDEX, index);
        if payload_len != self.full_payload_len {
            self.set_lengths(out, ip_at, payload_len);
        }
        N
    }

    /// Only a message's last fragment comes here.
    #[cold]
    fn set_lengths<const N: usize>(&self, out: &mut [u8; N], ip_at: usize, payload_len: u16) {
        let total_len = payload_len.wrapping_add((IP_LEN + UDP_LEN + lm::HEADER_LEN) as u16);
        put_u16(out, ip_at + IP_TOTAL_LEN, total_len);
        put_u16(
            out,
            ip_at + IP_CHECKSUM,
            !fold(self.ip_sum + u64::from(total_len)),
        );
        put_u16(
            out,
            ip_at + UDP_LENGTH,
            payload_len.wrapping_add((UDP_LEN + lm::HEADER_LEN) as u16),
        );
        put_u16(out, ip_at + LM_PAYLOAD_LEN, payload_len);
    }
}

/// The headers of IP fragments (`ipfrag` wire) to one receiver, and of one message at a time.
///
/// Fragment 0 carries the UDP header of the whole datagram, the others none; each is a plain IPv4 fragment with the
/// identification of the message.
#[derive(Clone, Copy, Debug)]
pub struct IpFragTemplate {
    /// Ethernet and IPv4 header, then the UDP header.
    bytes: [u8; MAX_ETHERNET_LEN + IP_LEN + UDP_LEN],
    ethernet_len: u16,
    /// `S / 8`: the step of the fragment offset field.
    offset_step: u16,
    count: u32,
    /// Sum over the IPv4 header without total length, fragment field and checksum.
    ip_sum: u64,
}

impl IpFragTemplate {
    /// A template for message `message`, whose geometry is one of the `ipfrag` wire.
    ///
    /// `udp_checksum` is 0 for none (RFC 768, see [`super::udp`]) or what [`super::udp::checksum`] gives for the whole
    /// message. Returns `None` when the geometry is of another wire or of another link than `addressing`'s.
    pub fn new(
        addressing: &Addressing,
        geometry: &Geometry,
        message: u32,
        udp_checksum: u16,
    ) -> Option<IpFragTemplate> {
        if !fits(geometry.layout(), addressing) {
            return None;
        }
        let ethernet_len = addressing.ethernet_len();
        let ip = Ipv4Repr {
            src: addressing.src_ip,
            dst: addressing.dst_ip,
            protocol: PROTOCOL_UDP,
            dscp_ecn: 0,
            id: 0,
            dont_fragment: false,
            more_fragments: false,
            fragment_offset: 0,
            payload_len: 0,
        };
        let mut bytes = [0; MAX_ETHERNET_LEN + IP_LEN + UDP_LEN];
        addressing.write_ethernet(&mut bytes[..ethernet_len]);
        bytes[ethernet_len..ethernet_len + IP_LEN].copy_from_slice(ip.to_header().as_bytes());
        let udp = addressing.udp(0, 0).to_header();
        bytes[ethernet_len + IP_LEN..][..UDP_LEN].copy_from_slice(udp.as_bytes());

        let mut template = IpFragTemplate {
            bytes,
            ethernet_len: ethernet_len as u16,
            offset_step: geometry.layout().payload_len() / 8,
            count: 0,
            ip_sum: 0,
        };
        template.set_message(geometry, message, udp_checksum);
        Some(template)
    }

    /// Has this message's UDP header bear the checksum of the whole datagram, whose payload lies in these pieces.
    pub fn sum_up<'a>(&mut self, payload: impl IntoIterator<Item = &'a [u8]>) {
        let headers_len = self.header_len(0);
        udp::put_checksum(&mut self.bytes[..headers_len], payload);
    }

    /// The next message to the same receiver, with a geometry of the same layout.
    pub fn set_message(&mut self, geometry: &Geometry, message: u32, udp_checksum: u16) {
        let ip_at = usize::from(self.ethernet_len);
        // At most 65,507 on this wire.
        let udp_len = (geometry.message_len() as u16).wrapping_add(UDP_LEN as u16);
        put_u16(&mut self.bytes, ip_at + IP_ID, message as u16);
        put_u16(&mut self.bytes, ip_at + UDP_LENGTH, udp_len);
        put_u16(&mut self.bytes, ip_at + IP_LEN + udp::CHECKSUM, udp_checksum);
        self.count = geometry.fragment_count();

        let mut ip = [0; IP_LEN];
        ip.copy_from_slice(&self.bytes[ip_at..ip_at + IP_LEN]);
        for field in [IP_TOTAL_LEN, IP_FRAGMENT, IP_CHECKSUM] {
            put_u16(&mut ip, field, 0);
        }
        self.ip_sum = sum(&ip);
    }

    /// Bytes that [`IpFragTemplate::write`] writes for fragment `index`: 42 for the first, 34 for others, 4 more with a
    /// tag.
    #[inline]
    pub const fn header_len(&self, index: u32) -> usize {
        self.ethernet_len as usize + IP_LEN + UDP_LEN * (index == 0) as usize
    }

    /// Writes the headers of fragment `index`, which carries `payload_len` bytes of the message, to the start of `out`;
    /// gives their length.
    ///
    /// # Panics
    ///
    /// If `out` is shorter than [`IpFragTemplate::header_len`].
    #[inline]
    pub fn write(&self, out: &mut [u8], index: u32, payload_len: u16) -> usize {
        let header_len = self.header_len(index);
        let mut bytes = self.bytes;
        let ip_at = usize::from(self.ethernet_len);
        let total_len = (header_len - ip_at) as u16 + payload_len;
        // Offsets up to 65,535 / 8 fit the field's 13 bits; MORE_FRAGMENTS is bit 13.
        let more = u16::from(index + 1 < self.count) << 13;
        let fragment = (index as u16).wrapping_mul(self.offset_step) | more;
        put_u16(&mut bytes, ip_at + IP_TOTAL_LEN, total_len);
        put_u16(&mut bytes, ip_at + IP_FRAGMENT, fragment);
        let checksum = !fold(self.ip_sum + u64::from(total_len) + u64::from(fragment));
        put_u16(&mut bytes, ip_at + IP_CHECKSUM, checksum);
        out[..header_len].copy_from_slice(&bytes[..header_len]);
        header_len
    }
}

/// The layout's headers are the ones that the addressing gives.
fn fits(layout: &Layout, addressing: &Addressing) -> bool {
    layout.wire() == Wire::IpFrag && layout.link() == addressing.link()
}
