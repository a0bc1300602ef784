//! Bytes on the wire: parsed with every byte treated as hostile, built without allocation.
//!
//! ```text
//!  lm       | Ethernet 14 (+4 tag) | IPv4 20 | UDP 8 | LM 24 | payload ≤ P |
//!  ipfrag   | Ethernet 14 (+4 tag) | IPv4 20 | UDP 8 | payload             |  first fragment
//!           | Ethernet 14 (+4 tag) | IPv4 20 | payload                     |  all others
//! ```
//!
//! * [`parse_frame`] reads a whole frame; [`lm::parse_datagram`] what came through a kernel UDP socket.
//! * [`Addressing::write_headers`] builds the headers of any single LM packet; [`DataTemplate`] and [`IpFragTemplate`]
//!   are made once a message and write one packet's headers in a few nanoseconds.
//!
//! Packets of the `lm` wire are atomic datagrams (RFC 6864): "don't fragment" is set and the identification is 0. The
//! fixed-size headers are `zerocopy` views whose sizes and offsets are asserted at compile time; what was parsed is
//! copied out of the packet, so later writes to that memory change nothing.

mod addressing;
pub mod ethernet;
mod frame;
pub mod ipfrag;
pub mod ipv4;
pub mod lm;
mod template;
pub mod udp;

pub use addressing::{Addressing, BuildError};
pub use frame::{Frame, Transport, parse_frame};
pub use template::{DataTemplate, IpFragTemplate};

/// Why a frame is not one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// The bytes end before the headers or the payload that they announce.
    #[error("the packet is truncated")]
    Truncated,
    /// EtherType or IP version of something else: ARP, IPv6, a second tag…
    #[error("not IPv4")]
    NotIpv4,
    /// IPv4 options, which LM never sends.
    #[error("IPv4 options")]
    IpOptions,
    /// IPv4 header length or total length impossible.
    #[error("impossible IPv4 length")]
    IpLength,
    /// IPv4 header checksum wrong.
    #[error("wrong IPv4 header checksum")]
    IpChecksum,
    /// An IP fragment that cannot be part of any datagram: not a multiple of 8 bytes, or ending behind 65,535.
    #[error("impossible IPv4 fragment")]
    IpFragment,
    /// A protocol other than UDP.
    #[error("not UDP")]
    NotUdp,
    /// UDP length field below 8 or different from what the packet carries.
    #[error("UDP length differs from the packet's")]
    UdpLength,
    /// UDP, but not a legal LM packet.
    #[error(transparent)]
    Lm(#[from] lm::LmError),
}
