//! Generic netlink family `netdev` (Documentation/netlink/specs/netdev.yaml, since Linux 6.3): what a driver offers AF_XDP,
//! and messages of integer attributes for everything else that the family answers.

use std::io;

use netlink_packet_core::{DecodeError, DefaultNla, Emitable, NlasIterator, ParseableParametrized};
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use netlink_sys::{Socket, protocols::NETLINK_GENERIC};

use crate::netlink::{ask, open, order, serialized};

/// `NETDEV_CMD_DEV_GET`, and its attributes `NETDEV_A_DEV_IFINDEX`, `…_XDP_FEATURES` and `…_XSK_FEATURES`.
const GET_DEVICE: u8 = 1;
const INTERFACE_INDEX: u16 = 1;
const XDP_FEATURES: u16 = 3;
const XSK_FEATURES: u16 = 6;

/// `NETDEV_XDP_ACT_XSK_ZEROCOPY`.
const XSK_ZERO_COPY: u64 = 1 << 3;
/// `NETDEV_XSK_FLAGS_TX_CHECKSUM`.
const TX_CHECKSUM: u64 = 1 << 1;

/// The family, by a socket of the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Netdev {
    socket: Socket,
    family: u16,
}

impl Netdev {
    /// Asks for the family's number.
    ///
    /// # Errors
    ///
    /// What the kernel answers: `ENOENT` before Linux 6.3.
    pub fn open() -> io::Result<Netdev> {
        let socket = open(NETLINK_GENERIC)?;
        let name = GenlCtrlAttrs::FamilyName(Attributes::family_name().to_owned());
        let request = GenlMessage::from_payload(GenlCtrl {
            cmd: GenlCtrlCmd::GetFamily,
            nlas: vec![name],
        });
        let answers = ask(&socket, &request, 0)?.into_iter();
        let mut attributes = answers.flat_map(|answer| answer.into_parts().1.nlas);
        let family = attributes.find_map(|attribute| match attribute {
            GenlCtrlAttrs::FamilyId(family) => Some(family),
            _ => None,
        });
        let family = family.ok_or(io::ErrorKind::NotFound)?;
        Ok(Netdev { socket, family })
    }

    /// Asks, with `NLM_F_` flags; the answers.
    ///
    /// # Errors
    ///
    /// What the kernel answers: `EOPNOTSUPP` for a command of a later kernel.
    pub fn ask(&self, command: u8, attributes: &[(u16, u64)], flags: u16) -> io::Result<Vec<Attributes>> {
        let answers = ask(&self.socket, &self.message(command, attributes), flags)?;
        Ok(answers.into_iter().map(|answer| answer.into_parts().1).collect())
    }

    /// A request as [`Netdev::order`] takes it.
    pub fn prepared(&self, command: u8, attributes: &[(u16, u64)], flags: u16) -> Vec<u8> {
        serialized(&self.message(command, attributes), flags)
    }

    /// Sends a prepared request with `NLM_F_ACK`. Allocates nothing.
    ///
    /// # Errors
    ///
    /// What the kernel answers.
    pub fn order(&self, request: &[u8]) -> io::Result<()> {
        order(&self.socket, request)
    }

    fn message(&self, command: u8, attributes: &[(u16, u64)]) -> GenlMessage<Attributes> {
        let mut message = GenlMessage::from_payload(Attributes {
            command,
            all: attributes.to_vec(),
        });
        message.set_resolved_family_id(self.family);
        message
    }
}

/// A message of the family: its integer attributes.
#[derive(Clone, Debug)]
pub struct Attributes {
    command: u8,
    all: Vec<(u16, u64)>,
}

impl Attributes {
    /// The value of an attribute.
    pub fn value(&self, kind: u16) -> Option<u64> {
        (self.all.iter()).find_map(|&(of, value)| (of == kind).then_some(value))
    }

    fn nlas(&self) -> Vec<DefaultNla> {
        (self.all.iter())
            .map(|&(kind, value)| match u32::try_from(value) {
                Ok(value) => DefaultNla::new(kind, value.to_ne_bytes().to_vec()),
                // `uint` of the specification: 4 or 8 bytes.
                Err(_) => DefaultNla::new(kind, value.to_ne_bytes().to_vec()),
            })
            .collect()
    }
}

impl GenlFamily for Attributes {
    fn family_name() -> &'static str {
        "netdev"
    }

    fn command(&self) -> u8 {
        self.command
    }

    fn version(&self) -> u8 {
        1
    }
}

impl Emitable for Attributes {
    fn buffer_len(&self) -> usize {
        self.nlas().as_slice().buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.nlas().as_slice().emit(buffer);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Attributes {
    fn parse_with_param(bytes: &[u8], header: GenlHeader) -> Result<Attributes, DecodeError> {
        let mut all = Vec::new();
        for nla in NlasIterator::new(bytes) {
            let nla = nla?;
            let value = match *nla.value() {
                [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]).into(),
                [a, b, c, d, e, f, g, h] => u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
                _ => continue,
            };
            all.push((nla.kind(), value));
        }
        Ok(Attributes {
            command: header.cmd,
            all,
        })
    }
}

/// What a driver says that it can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpFeatures {
    /// `NETDEV_XDP_ACT_*`.
    pub xdp: u64,
    /// `NETDEV_XSK_FLAGS_*`; 0 before Linux 6.8.
    pub xsk: u64,
}

impl XdpFeatures {
    /// What the driver of an interface in the calling thread's network namespace offers; `None` before Linux 6.3.
    ///
    /// # Errors
    ///
    /// What the kernel says: `ENODEV` for an interface that it does not know.
    pub fn read(interface_index: u32) -> io::Result<Option<XdpFeatures>> {
        let family = match Netdev::open() {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            family => family?,
        };
        let answers = family.ask(GET_DEVICE, &[(INTERFACE_INDEX, interface_index.into())], 0)?;
        let answer = answers.first().ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(XdpFeatures::of(answer)))
    }

    /// Whether AF_XDP sockets can be in zero-copy mode.
    pub fn zero_copy(&self) -> bool {
        self.xdp & XSK_ZERO_COPY != 0
    }

    /// Whether it sums packets of AF_XDP sockets up in zero-copy mode, where their metadata asks for it.
    pub fn sums(&self) -> bool {
        self.xsk & TX_CHECKSUM != 0
    }

    fn of(answer: &Attributes) -> XdpFeatures {
        let value = |kind| answer.value(kind).unwrap_or(0);
        XdpFeatures {
            xdp: value(XDP_FEATURES),
            xsk: value(XSK_FEATURES),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(bytes: &[u8]) -> Result<Attributes, DecodeError> {
        let header = GenlHeader {
            cmd: GET_DEVICE,
            version: 1,
        };
        Attributes::parse_with_param(bytes, header)
    }

    #[test]
    fn features_are_read_from_their_attributes() {
        let attributes = [
            DefaultNla::new(INTERFACE_INDEX, 7_u32.to_ne_bytes().to_vec()),
            DefaultNla::new(XDP_FEATURES, 0b1011_u64.to_ne_bytes().to_vec()),
            DefaultNla::new(XSK_FEATURES, 2_u64.to_ne_bytes().to_vec()),
            DefaultNla::new(99, b"of a later kernel".to_vec()),
        ];
        let mut answer = vec![0; attributes.as_slice().buffer_len()];
        attributes.as_slice().emit(&mut answer);
        let features = XdpFeatures::of(&parse(&answer).expect("an answer"));
        assert_eq!((features.xdp, features.xsk), (11, 2));
        assert!(features.zero_copy() && features.sums());
        assert!(!XdpFeatures::default().zero_copy());
    }

    #[test]
    fn the_kernels_loopback_has_no_zero_copy() {
        let Some(features) = XdpFeatures::read(1).expect("every namespace has a loopback") else {
            println!("NOT IN THIS KERNEL: XDP features of a device");
            return;
        };
        assert!(!features.zero_copy());
        let error = XdpFeatures::read(i32::MAX as u32).expect_err("no such device");
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }

    proptest! {
        #[test]
        fn answers_of_any_bytes_do_not_panic(bytes: Vec<u8>) {
            if let Ok(attributes) = parse(&bytes) {
                XdpFeatures::of(&attributes);
            }
        }
    }
}
