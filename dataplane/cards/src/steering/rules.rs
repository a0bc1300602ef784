//! Flow rules (ntuple): which packets a card puts on a given receive queue, whatever their hash.
//!
//! Tested byte by byte and against a model of a card, but *untested on hardware*: drivers differ in which rules they
//! take, and say so only when one is inserted.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use zerocopy::FromZeros;

use crate::ethtool::uapi::{FlowSpec, UDP_V4_FLOW};

/// Packets, and the receive queue that they go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct FlowRule {
    /// Destination address: the receiver's.
    pub(crate) destination: Ipv4Addr,
    /// Source address, if it matters.
    pub(crate) source: Option<Ipv4Addr>,
    /// Protocol and ports.
    pub(crate) ports: FlowPorts,
    /// The receive queue.
    pub(crate) queue: u32,
}

/// Which of the packets between two addresses. The journal's file names the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum FlowPorts {
    /// UDP with these ports. Never an IP fragment but the first of its datagram: the others have no ports.
    Udp {
        /// Destination port.
        destination: u16,
        /// Source port, if it matters. One rule for a session's source port keeps other packets for the destination port,
        /// such as small messages, off the landing queue.
        source: Option<u16>,
    },
}

impl FlowRule {
    /// The rule in the kernel's form, for the given place in the card's table.
    pub(super) fn encode(&self, location: u32) -> FlowSpec {
        let mut spec = FlowSpec::new_zeroed();
        let mut part = |at: usize, bytes: &[u8]| {
            spec.header[at..at + bytes.len()].copy_from_slice(bytes);
            spec.header_mask[at..at + bytes.len()].fill(0xff);
        };
        // `struct ethtool_tcpip4_spec`.
        part(4, &self.destination.octets());
        if let Some(source) = self.source {
            part(0, &source.octets());
        }
        let FlowPorts::Udp { destination, source } = self.ports;
        part(10, &destination.to_be_bytes());
        if let Some(source) = source {
            part(8, &source.to_be_bytes());
        }
        spec.flow_type = UDP_V4_FLOW;
        spec.ring_cookie = u64::from(self.queue);
        spec.location = location;
        spec
    }

    /// Whether a card's rule is this one, wherever it lies. Fields that drivers fill in although nobody asked (type of
    /// service, VLAN) count only if they must match.
    pub(super) fn is(&self, spec: &FlowSpec) -> bool {
        let own = self.encode(spec.location);
        let masked = |spec: &FlowSpec| -> [u8; 12] {
            std::array::from_fn(|at| spec.header[at] & spec.header_mask[at])
        };
        own.flow_type == spec.flow_type
            && own.ring_cookie == spec.ring_cookie
            && own.header_mask[..13] == spec.header_mask[..13]
            && masked(&own) == masked(spec)
            && spec.extension_mask == [0; 20]
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    const RULE: FlowRule = FlowRule {
        destination: Ipv4Addr::new(10, 1, 2, 3),
        source: None,
        ports: FlowPorts::Udp {
            destination: 7168,
            source: None,
        },
        queue: 5,
    };

    /// The bytes that differ from zero, by offset in `struct ethtool_rx_flow_spec`.
    fn bytes(rule: &FlowRule, location: u32) -> Vec<(usize, u8)> {
        let spec = rule.encode(location);
        spec.as_bytes()
            .iter()
            .copied()
            .enumerate()
            .filter(|(_, byte)| *byte != 0)
            .collect()
    }

    #[test]
    fn a_rule_for_a_port_is_what_the_header_says() {
        let mut expected = vec![(0, 2)]; // flow_type UDP_V4_FLOW
        expected.extend([(8, 10), (9, 1), (10, 2), (11, 3)]); // h_u.udp_ip4_spec.ip4dst
        expected.push((14, 0x1c)); // pdst 7168, big-endian
        expected.extend((80..84).map(|at| (at, 0xff))); // m_u.udp_ip4_spec.ip4dst
        expected.extend([(86, 0xff), (87, 0xff)]); // pdst
        expected.push((152, 5)); // ring_cookie
        expected.push((160, 9)); // location
        assert_eq!(bytes(&RULE, 9), expected);
    }

    #[test]
    fn a_rule_for_a_session_has_all_four_numbers() {
        let rule = FlowRule {
            source: Some(Ipv4Addr::new(10, 1, 2, 9)),
            ports: FlowPorts::Udp {
                destination: 7168,
                source: Some(0xc0a1),
            },
            ..RULE
        };
        let mut expected = vec![(0, 2)];
        expected.extend([(4, 10), (5, 1), (6, 2), (7, 9), (8, 10), (9, 1), (10, 2), (11, 3)]);
        expected.extend([(12, 0xc0), (13, 0xa1), (14, 0x1c)]);
        expected.extend((76..88).map(|at| (at, 0xff)));
        expected.push((152, 5));
        expected.extend((160..164).map(|at| (at, 0xff))); // RX_CLS_LOC_ANY
        assert_eq!(bytes(&rule, crate::ethtool::uapi::LOCATION_ANY), expected);
    }

    #[test]
    fn a_rule_knows_itself_and_no_other() {
        let session = FlowRule {
            ports: FlowPorts::Udp {
                destination: 7168,
                source: Some(50000),
            },
            ..RULE
        };
        let mut rules = vec![RULE, session];
        for rule in rules.clone() {
            rules.push(FlowRule { queue: 6, ..rule });
            rules.push(FlowRule {
                source: Some(Ipv4Addr::new(10, 1, 2, 4)),
                ..rule
            });
            rules.push(FlowRule {
                destination: Ipv4Addr::new(10, 1, 2, 4),
                ..rule
            });
        }
        for (at, rule) in rules.iter().enumerate() {
            for (other_at, other) in rules.iter().enumerate() {
                assert_eq!(
                    rule.is(&other.encode(7)),
                    at == other_at,
                    "{rule:?} and {other:?}"
                );
            }
        }
        // What a driver fills in.
        let mut spec = RULE.encode(3);
        spec.header[0] = 77;
        spec.header[12] = 4;
        assert!(RULE.is(&spec));
        // What must match in addition makes it another's.
        spec.header_mask[12] = 0xff;
        assert!(!RULE.is(&spec));
        let mut spec = RULE.encode(3);
        spec.extension_mask[10] = 0xff;
        assert!(!RULE.is(&spec));
        // A narrower address is another's.
        let mut spec = RULE.encode(3);
        spec.header_mask[7] = 0;
        assert!(!RULE.is(&spec));
    }
}
