//! Geometry: where each fragment's header and payload lie, on both sides.
//!
//! Three questions, all answered in a few instructions a fragment:
//!
//! * which bytes of the message fragment `k` carries ([`Geometry::fragment`]);
//! * where its frame and payload lie in the sender's region (application level fragmentation, LM section 3.1):
//!   `[hole][payload 0][hole][payload 1]…`, one contiguous frame each, no gather and no copy;
//! * where its frame starts in the receiver's landing zone (driver level defragmentation, LM section 3.2): `H` bytes
//!   before its payload's place, so that the fragment below it overwrites its header.
//!
//! ```text
//! send region    0     hole        stride                    2·stride
//!                |hole| payload 0  |hole| payload 1          |hole| payload 2 …
//!                  ^frame 0          ^frame 1                  ^frame 2          (2 bytes into the hole)
//!
//! landing zone   R-H    R          R+P-H  R+P        R+2P-H R+2P
//!                |hdr 0| payload 0 ........|payload 1 ........|payload 2 …
//!                |<---- frame 0 ---------->|
//!                                   |<---- frame 1 ---------->|    its header lies where payload 0 ends
//! ```
//!
//! Nothing about header lengths is a constant: they follow from the [`Wire`] and the [`LinkShape`].

mod error;

use core::fmt;
use core::iter::FusedIterator;
use core::ops::Range;

pub use error::GeometryError;

/// Length of an Ethernet header without tags, in bytes.
pub const ETHERNET_HEADER_LEN: u16 = 14;
/// Length of one 802.1Q tag, in bytes.
pub const VLAN_TAG_LEN: u16 = 4;
/// Length of an IPv4 header without options, in bytes (RFC 791).
pub const IPV4_HEADER_LEN: u16 = 20;
/// The smallest MTU that a link may have: what every host accepts (RFC 791).
pub const MIN_MTU: u16 = 576;
/// Length of a UDP header, in bytes (RFC 768).
pub const UDP_HEADER_LEN: u16 = 8;
/// Length of an LM header, in bytes.
pub const LM_HEADER_LEN: u16 = 24;

/// Longest message of the `lm` wire: 4 GiB.
pub const MAX_LM_MESSAGE_LEN: u64 = 1 << 32;

/// Bytes between the start of a hole and the start of the frame in it.
///
/// A hole is the paper's: the Ethernet header padded to a multiple of 4 in front, so that the IP header is aligned
/// (the 14 bytes become 16, hence holes of 44 and 36). Frames therefore start 2 bytes into their hole, at even
/// addresses: AF_XDP completions lose bit 0 of the address on Linux 6.18.
const FRAME_OFFSET_IN_HOLE: u8 = 2;

/// How a message's fragments are carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Wire {
    /// Each fragment is a UDP datagram of its own with an LM header. Any message up to 4 GiB.
    Lm = 0,
    /// The paper's: the message is one UDP datagram, each fragment an IP fragment of it. Up to 65,507 bytes on IPv4.
    IpFrag = 1,
}

impl Wire {
    /// The name used in options and reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Wire::Lm => "lm",
            Wire::IpFrag => "ipfrag",
        }
    }

    /// The byte that stands for it in control messages.
    pub const fn to_u8(self) -> u8 {
        self as u8
    }

    /// The inverse of [`Wire::to_u8`].
    pub const fn from_u8(byte: u8) -> Option<Wire> {
        match byte {
            0 => Some(Wire::Lm),
            1 => Some(Wire::IpFrag),
            _ => None,
        }
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a link puts in front of UDP: the inputs that all header lengths follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinkShape {
    /// 802.1Q tags in the frame as AF_XDP sees it, 0 to 2. A device that strips tags has 0 here.
    pub vlan_tags: u8,
}

impl LinkShape {
    /// IPv4 without tags.
    pub const IPV4: LinkShape = LinkShape { vlan_tags: 0 };

    /// Bytes of the Ethernet header with its tags.
    pub const fn ethernet_len(self) -> u16 {
        ETHERNET_HEADER_LEN + VLAN_TAG_LEN * self.vlan_tags as u16
    }
}

/// The constants of a session: wire, link, header and payload lengths.
///
/// `H`, the header length, is the distance from a frame's start to the first byte of *message* in the first fragment's
/// frame; `P`, the stride, is the distance between the places of consecutive frames in a landing zone. On the `lm`
/// wire every fragment but the last carries `P` bytes. On the `ipfrag` wire the first one carries `P − 8`, because the
/// UDP header takes 8 bytes of the IP payload.
///
/// ```
/// use lm_protocol::geometry::{Layout, LinkShape, Wire};
///
/// let lm = Layout::new(Wire::Lm, 1500, LinkShape::IPV4)?;
/// assert_eq!((lm.header_len(), lm.payload_len()), (66, 1448));
///
/// let ipfrag = Layout::new(Wire::IpFrag, 1500, LinkShape::IPV4)?;
/// assert_eq!((ipfrag.fragment_header_len(0), ipfrag.fragment_header_len(1)), (42, 34));
/// assert_eq!((ipfrag.fragment_hole_len(0), ipfrag.fragment_hole_len(1)), (44, 36));
/// assert_eq!(ipfrag.payload_len(), 1480);
/// # Ok::<(), lm_protocol::geometry::GeometryError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    wire: Wire,
    link: LinkShape,
    /// Header bytes of the first fragment's frame.
    header_len: u16,
    /// Bytes of the first fragment's slot that are UDP header: 8 on `ipfrag`, else 0. The first fragment's header is
    /// longer, and its payload shorter, by this much.
    skew: u8,
    /// Bytes between the start of a hole and the start of the frame in it.
    frame_offset_in_hole: u8,
    payload_len: u16,
}

impl Layout {
    /// The layout for an MTU (bytes of an IP packet): the largest payload that is a multiple of 8.
    ///
    /// # Errors
    ///
    /// [`GeometryError::MtuTooSmall`] below [`MIN_MTU`], [`GeometryError::MtuTooLarge`] where a frame would exceed
    /// 65,535 bytes, [`GeometryError::TooManyVlanTags`].
    pub const fn new(wire: Wire, mtu: u16, link: LinkShape) -> Result<Layout, GeometryError> {
        if link.vlan_tags > 2 {
            return Err(GeometryError::TooManyVlanTags { tags: link.vlan_tags });
        }
        if mtu < MIN_MTU {
            let minimum = MIN_MTU;
            return Err(GeometryError::MtuTooSmall { mtu, minimum });
        }
        let maximum = u16::MAX - link.ethernet_len();
        if mtu > maximum {
            return Err(GeometryError::MtuTooLarge { mtu, maximum });
        }
        Ok(Layout::with_payload_len(
            wire,
            link,
            Layout::payload_len_at(wire, mtu),
        ))
    }

    /// The layout that a peer's grant describes.
    ///
    /// # Errors
    ///
    /// [`GeometryError::HeaderLen`] or [`GeometryError::PayloadLen`] when the parts do not belong together,
    /// [`GeometryError::TooManyVlanTags`].
    pub const fn from_parts(
        wire: Wire,
        header_len: u16,
        payload_len: u16,
        link: LinkShape,
    ) -> Result<Layout, GeometryError> {
        if link.vlan_tags > 2 {
            return Err(GeometryError::TooManyVlanTags { tags: link.vlan_tags });
        }
        let minimum = Layout::payload_len_at(wire, MIN_MTU);
        let maximum = Layout::payload_len_at(wire, u16::MAX - link.ethernet_len());
        if payload_len < minimum || payload_len > maximum || !payload_len.is_multiple_of(8) {
            return Err(GeometryError::PayloadLen {
                given: payload_len,
                minimum,
                maximum,
            });
        }
        let layout = Layout::with_payload_len(wire, link, payload_len);
        if header_len != layout.header_len {
            return Err(GeometryError::HeaderLen {
                given: header_len,
                expected: layout.header_len,
            });
        }
        Ok(layout)
    }

    /// The same wire and payload length behind the headers of another link.
    ///
    /// A grant describes the packets as the receiver sees them; where one side's device adds or strips tags, the sender's
    /// headers differ in length. Payloads and their places do not.
    ///
    /// # Errors
    ///
    /// As for [`Layout::from_parts`]: a payload that the other link cannot carry.
    pub const fn on_link(self, link: LinkShape) -> Result<Layout, GeometryError> {
        let header_len = Layout::with_payload_len(self.wire, link, self.payload_len).header_len;
        Layout::from_parts(self.wire, header_len, self.payload_len, link)
    }

    const fn with_payload_len(wire: Wire, link: LinkShape, payload_len: u16) -> Layout {
        let below_udp = link.ethernet_len() + IPV4_HEADER_LEN;
        let (above_ip, skew) = match wire {
            Wire::Lm => (UDP_HEADER_LEN + LM_HEADER_LEN, 0),
            Wire::IpFrag => (UDP_HEADER_LEN, UDP_HEADER_LEN as u8),
        };
        Layout {
            wire,
            link,
            header_len: below_udp + above_ip,
            skew,
            payload_len,
            frame_offset_in_hole: FRAME_OFFSET_IN_HOLE,
        }
    }

    /// The same with `room` bytes before each frame in a send region, a multiple of 8: for what a device is told of a packet (AF_XDP's
    /// transmit metadata). Holes are longer by that; on the wire and in a landing zone nothing changes.
    pub const fn with_room(self, room: u8) -> Layout {
        Layout {
            frame_offset_in_hole: FRAME_OFFSET_IN_HOLE + room,
            ..self
        }
    }

    /// Largest multiple of 8 that fits an IP packet of `mtu` bytes. IP fragment offsets count in units of 8 bytes; the
    /// `lm` wire keeps the same rule, so that frames start at even addresses and payloads are aligned.
    const fn payload_len_at(wire: Wire, mtu: u16) -> u16 {
        let inside_ip = match wire {
            Wire::Lm => UDP_HEADER_LEN + LM_HEADER_LEN,
            Wire::IpFrag => 0,
        };
        (mtu - IPV4_HEADER_LEN - inside_ip) & !7
    }

    /// The wire.
    #[inline]
    pub const fn wire(&self) -> Wire {
        self.wire
    }

    /// The link that the header lengths follow from.
    #[inline]
    pub const fn link(&self) -> LinkShape {
        self.link
    }

    /// `H`: header bytes in front of the first fragment's payload (66 on `lm`, 42 on `ipfrag`, for untagged IPv4).
    ///
    /// Also the distance by which every frame starts before `k·P` in a landing zone, on both wires.
    #[inline]
    pub const fn header_len(&self) -> u16 {
        self.header_len
    }

    /// Header bytes of fragment `index`'s frame. On `ipfrag` only fragment 0 has a UDP header (42, then 34).
    #[inline]
    pub const fn fragment_header_len(&self, index: u32) -> u16 {
        self.header_len - (self.skew * (index != 0) as u8) as u16
    }

    /// `P`: the stride of payloads, and the payload bytes of a middle fragment. A multiple of 8.
    #[inline]
    pub const fn payload_len(&self) -> u16 {
        self.payload_len
    }

    /// Message bytes in the first fragment of a message that needs more than one: `P`, or `P − 8` on `ipfrag`.
    #[inline]
    pub const fn first_payload_len(&self) -> u16 {
        self.payload_len - self.skew as u16
    }

    /// Longest frame, in bytes: `H + P` on `lm`. A gate admits nothing longer (invariant I2).
    #[inline]
    pub const fn max_frame_len(&self) -> u16 {
        self.header_len - self.skew as u16 + self.payload_len
    }

    /// Bytes of the hole in front of the first fragment's payload in a send region: even, the paper's 44 on `ipfrag`.
    #[inline]
    pub const fn hole_len(&self) -> u16 {
        self.header_len + self.frame_offset_in_hole as u16
    }

    /// Bytes of the hole in front of fragment `index`'s payload (on `ipfrag` 44, then 36).
    #[inline]
    pub const fn fragment_hole_len(&self, index: u32) -> u16 {
        self.fragment_header_len(index) + self.frame_offset_in_hole as u16
    }

    /// Longest message, in bytes: 4 GiB on `lm`, one UDP datagram on `ipfrag` (65,507).
    pub const fn max_message_len(&self) -> u64 {
        match self.wire {
            Wire::Lm => MAX_LM_MESSAGE_LEN,
            Wire::IpFrag => (u16::MAX - IPV4_HEADER_LEN - UDP_HEADER_LEN) as u64,
        }
    }

    /// The geometry of a message of `len` bytes.
    ///
    /// # Errors
    ///
    /// [`GeometryError::MessageTooLong`] beyond [`Layout::max_message_len`].
    pub const fn message(self, len: u64) -> Result<Geometry, GeometryError> {
        let maximum = self.max_message_len();
        if len > maximum {
            return Err(GeometryError::MessageTooLong { len, maximum });
        }
        let slots = (len + self.skew as u64).div_ceil(self.payload_len as u64);
        // An empty message is one fragment without payload. 4 GiB / 520 (the smallest P) is far below 2^32.
        let fragment_count = if slots == 0 { 1 } else { slots as u32 };
        Ok(Geometry {
            layout: self,
            message_len: len,
            fragment_count,
        })
    }
}

impl Layout {
    /// The geometry of a message of `len` bytes inside a session: as [`Layout::message`], but on the `ipfrag` wire never
    /// less than two fragments, and on the `lm` wire never less than a byte.
    ///
    /// A UDP datagram that fits one packet is no IP fragment, so nothing in it says that it belongs to a session. Such a
    /// message travels as the shortest datagram of two fragments, and an empty one as a fragment of one byte, since a
    /// fragment without payload has no place in a landing zone. What follows a message's own bytes is padding; its length
    /// is the announced one.
    ///
    /// ```
    /// use lm_protocol::geometry::{Layout, LinkShape, Wire};
    ///
    /// let layout = Layout::new(Wire::IpFrag, 1500, LinkShape::IPV4)?;
    /// assert_eq!(layout.message(1472)?.fragment_count(), 1); // any UDP program understands it, no gate can
    /// assert_eq!(layout.session_message(1460)?.fragment_count(), 2);
    /// assert_eq!(layout.session_message(1460)?.message_len(), 1473);
    /// assert_eq!(layout.session_message(7168)?, layout.message(7168)?);
    ///
    /// let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4)?;
    /// assert_eq!(layout.session_message(0)?.message_len(), 1);
    /// # Ok::<(), lm_protocol::geometry::GeometryError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Layout::message`].
    pub const fn session_message(self, len: u64) -> Result<Geometry, GeometryError> {
        let least = match self.wire {
            Wire::Lm => 1,
            Wire::IpFrag => self.first_payload_len() as u64 + 1,
        };
        self.message(if len < least { least } else { len })
    }
}

/// One fragment of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Number within the message, from 0.
    pub index: u32,
    /// First byte of the message that it carries.
    pub offset: u64,
    /// Message bytes that it carries.
    pub len: u16,
    /// Bytes in front of them in its frame.
    pub header_len: u16,
}

impl Fragment {
    /// Bytes of its frame, without Ethernet padding.
    #[inline]
    pub const fn frame_len(&self) -> u16 {
        self.header_len + self.len
    }

    /// The bytes of the message that it carries.
    #[inline]
    pub const fn message_range(&self) -> Range<u64> {
        self.offset..self.offset + self.len as u64
    }
}

/// Places of one message's fragments. Small and `Copy`; every question is a few instructions.
///
/// Questions about a fragment `index` are meant for `index < fragment_count()`. Beyond it the answers are the
/// arithmetic's continuation with a length of 0; nothing panics.
///
/// ```
/// use lm_protocol::geometry::{Layout, LinkShape, Wire};
///
/// let message = Layout::new(Wire::Lm, 1500, LinkShape::IPV4)?.message(3000)?;
/// assert_eq!(message.fragment_count(), 3);
/// assert_eq!(message.fragment(2).message_range(), 2896..3000);
/// // Send region: hole 68, frame 2 bytes into it.
/// assert_eq!(message.tx_frame_offset(1), 1516 + 2);
/// assert_eq!(message.tx_payload_offset(1), 1516 + 68);
/// // Landing zone: frame 1's header lies in the last 66 bytes of payload 0.
/// assert_eq!(message.rx_frame_start(1), 1448 - 66);
/// # Ok::<(), lm_protocol::geometry::GeometryError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    layout: Layout,
    message_len: u64,
    fragment_count: u32,
}

impl Geometry {
    /// The session's constants.
    #[inline]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes of the message.
    #[inline]
    pub const fn message_len(&self) -> u64 {
        self.message_len
    }

    /// Fragments of the message, at least 1.
    #[inline]
    pub const fn fragment_count(&self) -> u32 {
        self.fragment_count
    }

    /// Bytes of the message in front of fragment `index`.
    #[inline]
    pub const fn message_offset(&self, index: u32) -> u64 {
        index as u64 * self.layout.payload_len as u64 - self.skew_unless_first(index)
    }

    /// Message bytes in fragment `index`.
    #[inline]
    pub const fn fragment_len(&self, index: u32) -> u16 {
        let offset = self.message_offset(index);
        let left = self.message_len.saturating_sub(offset);
        let room = self.layout.payload_len - (self.layout.skew * (index == 0) as u8) as u16;
        if left < room as u64 { left as u16 } else { room }
    }

    /// Fragment `index` of the message.
    #[inline]
    pub const fn fragment(&self, index: u32) -> Fragment {
        Fragment {
            index,
            offset: self.message_offset(index),
            len: self.fragment_len(index),
            header_len: self.layout.fragment_header_len(index),
        }
    }

    /// All fragments by ascending index (for the order on the wire see [`crate::window::WindowShape`]).
    pub fn fragments(
        &self,
    ) -> impl DoubleEndedIterator<Item = Fragment> + ExactSizeIterator + FusedIterator + use<> {
        let geometry = *self;
        // On 64-bit targets the count fits; a u32 range has no ExactSizeIterator.
        (0..self.fragment_count as usize).map(move |index| geometry.fragment(index as u32))
    }

    /// The fragment that carries byte `offset` of the message; the last one for offsets at or behind the end.
    #[inline]
    pub const fn fragment_at(&self, offset: u64) -> u32 {
        let slot = offset.saturating_add(self.layout.skew as u64) / self.layout.payload_len as u64;
        let last = self.fragment_count - 1;
        if slot < last as u64 { slot as u32 } else { last }
    }

    // ---- the sender's region, relative to its 16-byte aligned start -------------------------------------------------

    /// Distance between the holes of consecutive fragments in a send region.
    ///
    /// The same for all fragments, also on `ipfrag`: 44 + 1472 = 36 + 1480.
    #[inline]
    pub const fn tx_stride(&self) -> u64 {
        self.layout.max_frame_len() as u64 + self.layout.frame_offset_in_hole as u64
    }

    /// Bytes of the send region: holes and payloads, rounded up to a multiple of 16 so that regions can follow each
    /// other.
    #[inline]
    pub const fn tx_region_len(&self) -> u64 {
        let last = self.fragment_count - 1;
        (self.tx_payload_offset(last) + self.fragment_len(last) as u64).next_multiple_of(16)
    }

    /// Where fragment `index`'s frame starts: even for every fragment.
    #[inline]
    pub const fn tx_frame_offset(&self, index: u32) -> u64 {
        index as u64 * self.tx_stride() + self.layout.frame_offset_in_hole as u64
    }

    /// Where fragment `index`'s payload starts: a multiple of 4.
    #[inline]
    pub const fn tx_payload_offset(&self, index: u32) -> u64 {
        self.tx_frame_offset(index) + self.layout.fragment_header_len(index) as u64
    }

    /// Where fragment `index`'s payload lies.
    #[inline]
    pub const fn tx_payload_range(&self, index: u32) -> Range<u64> {
        let start = self.tx_payload_offset(index);
        start..start + self.fragment_len(index) as u64
    }

    // ---- the receiver's landing zone, relative to R, where the message will start ------------------------------------

    /// Where fragment `index`'s packet starts, relative to `R`: `index·P − H` on both wires, negative for fragment 0.
    #[inline]
    pub const fn rx_frame_start(&self, index: u32) -> i64 {
        index as i64 * self.layout.payload_len as i64 - self.layout.header_len as i64
    }

    /// Where fragment `index`'s header lies, relative to `R`: in front of its payload, over the end of the payload below.
    #[inline]
    pub const fn rx_header_range(&self, index: u32) -> Range<i64> {
        let start = self.rx_frame_start(index);
        start..start + self.layout.fragment_header_len(index) as i64
    }

    /// Where fragment `index`'s payload lies, relative to `R`: where it lies in the message.
    #[inline]
    pub const fn rx_payload_range(&self, index: u32) -> Range<u64> {
        let start = self.message_offset(index);
        start..start + self.fragment_len(index) as u64
    }

    /// Bytes behind `R` that admitted packets may write: `N·P`, rounded up to a multiple of 64 (invariant I2).
    #[inline]
    pub const fn rx_zone_payload_len(&self) -> u64 {
        (self.fragment_count as u64 * self.layout.payload_len as u64).next_multiple_of(64)
    }

    #[inline]
    const fn skew_unless_first(&self, index: u32) -> u64 {
        (self.layout.skew * (index != 0) as u8) as u64
    }
}
