//! What a driver offers AF_XDP, over the kernel's generic netlink family `netdev` (`linux/netdev.h`, since Linux 6.3).

use std::io;

use netlink_packet_core::{
    DefaultNla, Emitable, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_GENERIC};

/// `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY`, `CTRL_ATTR_FAMILY_ID` and `CTRL_ATTR_FAMILY_NAME` of `linux/genetlink.h`.
const CONTROLLER: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// `NETDEV_CMD_DEV_GET`, and its attributes `NETDEV_A_DEV_IFINDEX`, `…_XDP_FEATURES`, `…_XDP_ZC_MAX_SEGS` and
/// `…_XSK_FEATURES`.
const GET_DEVICE: u8 = 1;
const INTERFACE_INDEX: u16 = 1;
const XDP_FEATURES: u16 = 3;
const ZERO_COPY_SEGMENTS: u16 = 4;
const XSK_FEATURES: u16 = 6;

/// `NETDEV_XDP_ACT_XSK_ZEROCOPY`.
const XSK_ZERO_COPY: u64 = 1 << 3;
/// `NETDEV_XSK_FLAGS_TX_CHECKSUM`.
const TX_CHECKSUM: u64 = 1 << 1;

/// What a driver says that it can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpFeatures {
    /// `NETDEV_XDP_ACT_*`.
    pub xdp: u64,
    /// `NETDEV_XSK_FLAGS_*`; 0 before Linux 6.8.
    pub xsk: u64,
    /// Most frames of one packet in zero-copy mode; 0 before Linux 6.6.
    pub zero_copy_segments: u32,
}

impl XdpFeatures {
    /// What the driver of an interface in the calling thread's network namespace offers; `None` before Linux 6.3.
    ///
    /// # Errors
    ///
    /// What the kernel says: `ENODEV` for an interface that it does not know.
    pub fn read(interface_index: u32) -> io::Result<Option<XdpFeatures>> {
        let family = match ask(CONTROLLER, GET_FAMILY, FAMILY_NAME, b"netdev\0") {
            Ok(attributes) => family_id(&attributes)?,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        let answer = ask(
            family,
            GET_DEVICE,
            INTERFACE_INDEX,
            &interface_index.to_ne_bytes(),
        )?;
        XdpFeatures::parse(&answer).map(Some)
    }

    /// Whether AF_XDP sockets can be in zero-copy mode.
    pub fn zero_copy(&self) -> bool {
        self.xdp & XSK_ZERO_COPY != 0
    }

    /// Whether it sums packets of AF_XDP sockets up in zero-copy mode, where their metadata asks for it.
    pub fn sums(&self) -> bool {
        self.xsk & TX_CHECKSUM != 0
    }

    fn parse(attributes: &[u8]) -> io::Result<XdpFeatures> {
        let mut features = XdpFeatures::default();
        for attribute in NlasIterator::new(attributes) {
            let attribute = attribute.map_err(io::Error::other)?;
            match attribute.kind() {
                XDP_FEATURES => features.xdp = u64::from_ne_bytes(number(attribute.value())?),
                XSK_FEATURES => features.xsk = u64::from_ne_bytes(number(attribute.value())?),
                ZERO_COPY_SEGMENTS => {
                    features.zero_copy_segments = u32::from_ne_bytes(number(attribute.value())?);
                }
                _ => {}
            }
        }
        Ok(features)
    }
}

fn family_id(attributes: &[u8]) -> io::Result<u16> {
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.map_err(io::Error::other)?;
        if attribute.kind() == FAMILY_ID {
            return Ok(u16::from_ne_bytes(number(attribute.value())?));
        }
    }
    Err(io::Error::from(io::ErrorKind::InvalidData))
}

/// The bytes of a number.
fn number<const LEN: usize>(value: &[u8]) -> io::Result<[u8; LEN]> {
    value
        .try_into()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// A message of a generic netlink family.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Generic {
    family: u16,
    command: u8,
    attributes: Vec<u8>,
}

/// Length of `struct genlmsghdr`: command, version and two reserved bytes.
const HEADER_LEN: usize = 4;

impl NetlinkSerializable for Generic {
    fn message_type(&self) -> u16 {
        self.family
    }

    fn buffer_len(&self) -> usize {
        HEADER_LEN + self.attributes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer[..HEADER_LEN].copy_from_slice(&[self.command, 1, 0, 0]);
        buffer[HEADER_LEN..].copy_from_slice(&self.attributes);
    }
}

impl NetlinkDeserializable for Generic {
    type Error = io::Error;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> io::Result<Generic> {
        match payload.split_at_checked(HEADER_LEN) {
            Some((head, attributes)) => Ok(Generic {
                family: header.message_type,
                command: head[0],
                attributes: attributes.to_vec(),
            }),
            None => Err(io::Error::from(io::ErrorKind::InvalidData)),
        }
    }
}

/// One question with one attribute; the answer's attributes.
fn ask(family: u16, command: u8, kind: u16, value: &[u8]) -> io::Result<Vec<u8>> {
    let attribute = DefaultNla::new(kind, value.to_vec());
    let mut attributes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut attributes);
    let question = Generic {
        family,
        command,
        attributes,
    };
    let mut message = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::InnerMessage(question));
    message.header.flags = NLM_F_REQUEST;
    message.header.sequence_number = 1;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);

    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&bytes, 0)?;
    let (bytes, _) = socket.recv_from_full()?;
    read(&bytes)
}

/// The attributes of an answer.
fn read(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let answer: NetlinkMessage<Generic> = NetlinkMessage::deserialize(bytes).map_err(io::Error::other)?;
    match answer.payload {
        NetlinkPayload::InnerMessage(answer) => Ok(answer.attributes),
        NetlinkPayload::Error(error) => Err(match error.code {
            // Not `ErrorMessage::to_io`, which negates i32::MIN.
            Some(code) => io::Error::from_raw_os_error(code.get().saturating_neg()),
            None => io::Error::from(io::ErrorKind::InvalidData),
        }),
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let attribute = DefaultNla::new(kind, value.to_vec());
        let mut bytes = vec![0; attribute.buffer_len()];
        attribute.emit(&mut bytes);
        bytes
    }

    #[test]
    fn features_are_read_from_their_attributes() {
        let mut answer = attribute(INTERFACE_INDEX, &7_u32.to_ne_bytes());
        answer.extend(attribute(XDP_FEATURES, &0b1011_u64.to_ne_bytes()));
        answer.extend(attribute(ZERO_COPY_SEGMENTS, &17_u32.to_ne_bytes()));
        answer.extend(attribute(XSK_FEATURES, &2_u64.to_ne_bytes()));
        answer.extend(attribute(99, b"of a later kernel"));
        let features = XdpFeatures::parse(&answer).expect("an answer");
        assert_eq!(
            (features.xdp, features.xsk, features.zero_copy_segments),
            (11, 2, 17)
        );
        assert!(features.zero_copy() && features.sums());
        assert!(!XdpFeatures::default().zero_copy());
        let narrow = attribute(XDP_FEATURES, &1_u32.to_ne_bytes());
        assert!(XdpFeatures::parse(&narrow).is_err(), "a number of another length");
        assert!(family_id(&answer[8..]).is_err(), "an answer without a family");
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
            if let Ok(attributes) = read(&bytes) {
                XdpFeatures::parse(&attributes).ok();
            }
            XdpFeatures::parse(&bytes).ok();
            family_id(&bytes).ok();
        }
    }
}
