//! The policy of one receiver: a list of allowed sender addresses and a limit of the message length.

use core::net::Ipv4Addr;
use core::time::Duration;

use ipnet::Ipv4Net;
use lm_protocol::control::RejectReason;
use lm_protocol::session::{Admit, Application, Permit, Refusal};

/// A session of which nothing is heard for so long is over: its sender is gone. A live sender is heard far
/// more often, and whoever comes next waits no longer than this for a sender that was killed.
pub(crate) const LEASE: Duration = Duration::from_secs(5);

/// A session goes on for so long in silence while nobody else wants its place: the path may be cut, or a link down. Not under
/// `exclusive`, where hosts that want it are not heard here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Admits the senders whose address is on the list, for messages up to a limit.
///
/// ```
/// use lm_admission::{Policy, range};
/// let policy = Policy { allow: vec![range("192.0.2.0/24").unwrap()], max_message_len: 1 << 20 };
/// assert!(policy.allows([192, 0, 2, 7].into()));
/// assert!(!policy.allows([198, 51, 100, 7].into()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Ranges of allowed addresses. An empty list allows every sender.
    pub allow: Vec<Ipv4Net>,
    /// Longest message that is accepted, in bytes.
    pub max_message_len: u64,
}

impl Policy {
    /// Whether the list allows `sender`. An address is no proof of identity on a network where others can forge it.
    #[must_use]
    pub fn allows(&self, sender: Ipv4Addr) -> bool {
        self.allow.is_empty() || self.allow.iter().any(|range| range.contains(&sender))
    }
}

/// The addresses that a text in CIDR notation (RFC 4632 §3.1) means; an address without a length means that one host (`/32`).
///
/// # Errors
/// One line with the remedy. Bits after the prefix are an error: `10.0.0.7/8` is more often a slip of the pen than the wish to allow
/// sixteen million hosts.
pub fn range(text: &str) -> Result<Ipv4Net, String> {
    let (address, bits) = text.split_once('/').unwrap_or((text, "32"));
    // A number's own parser would take "+8".
    let is_number = !bits.is_empty() && bits.bytes().all(|digit| digit.is_ascii_digit());
    let address: Option<Ipv4Addr> = address.parse().ok().filter(|_| is_number);
    let address = address.ok_or("not an IPv4 range; write it as 192.0.2.0/24")?;
    let range = bits
        .parse()
        .ok()
        .and_then(|bits| Ipv4Net::new(address, bits).ok());
    let range = range.ok_or("an IPv4 prefix has 0 to 32 bits")?;
    match range.trunc() {
        network if network == range => Ok(range),
        network => Err(format!(
            "bits are set after the prefix; write {network} for the network, or /32 for one host"
        )),
    }
}

/// The limit is the permit's: the grantor refuses a request for more and tells the sender how much it may.
impl Admit for Policy {
    fn admit(&mut self, application: &Application<'_>) -> Result<Permit, Refusal> {
        if !self.allows(*application.from.ip()) {
            return Err(RejectReason::NotAllowed.into());
        }
        Ok(Permit {
            max_message_len: self.max_message_len,
            lease: LEASE,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::SocketAddrV4;
    use lm_protocol::control::{ControlMessage, Request};
    use lm_protocol::geometry::LinkShape;
    use lm_protocol::session::{CloseReason, Grantor, Landing, Session, Terms};
    use lm_protocol::time::Time;
    use proptest::prelude::*;

    const SENDER: Ipv4Addr = Ipv4Addr::new(10, 1, 2, 3);

    fn policy(allow: &[&str]) -> Policy {
        Policy {
            allow: allow.iter().map(|text| range(text).unwrap()).collect(),
            max_message_len: 100,
        }
    }

    #[test]
    fn an_empty_list_allows_everybody() {
        assert!(policy(&[]).allows([203, 0, 113, 1].into()));
    }

    #[test]
    fn a_list_allows_what_is_on_it() {
        let policy = policy(&["10.0.0.0/8", "192.0.2.1"]);
        assert!(policy.allows([10, 1, 2, 3].into()));
        assert!(policy.allows([192, 0, 2, 1].into()));
        assert!(!policy.allows([192, 0, 2, 2].into()));
        assert!(!policy.allows([11, 0, 0, 0].into()));
    }

    #[test]
    fn accepts_networks_and_single_hosts() {
        for (text, shown) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("192.0.2.9", "192.0.2.9/32"),
        ] {
            assert_eq!(range(text).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn refuses_what_is_no_range() {
        for text in [
            "",
            "/",
            "/8",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0/8",
            "::1/64",
            "10.0.0.0/8/8",
            "10.0.0.0 /8",
        ] {
            let told = range(text).unwrap_err();
            assert_eq!(told, "not an IPv4 range; write it as 192.0.2.0/24", "{text:?}");
        }
        for text in ["10.0.0.0/33", "10.0.0.0/999"] {
            assert_eq!(range(text).unwrap_err(), "an IPv4 prefix has 0 to 32 bits");
        }
        assert_eq!(
            range("10.0.0.7/8").unwrap_err(),
            "bits are set after the prefix; write 10.0.0.0/8 for the network, or /32 for one host"
        );
    }

    #[test]
    fn the_edges_of_a_range() {
        let policy = policy(&["192.0.2.128/25"]);
        for (host, is_in) in [(127, false), (128, true), (255, true)] {
            assert_eq!(policy.allows([192, 0, 2, host].into()), is_in);
        }
        assert!(!policy.allows([192, 0, 3, 0].into()));
    }

    proptest! {
        #[test]
        fn text_never_panics(text in ".{0,40}") {
            let _ = range(&text);
        }

        #[test]
        fn contains_agrees_with_division(address: u32, probe: u32, bits in 0u8..=32) {
            let block = 1u64 << (32 - bits);
            let network = u64::from(address) / block * block;
            let range = range(&format!("{}/{bits}", Ipv4Addr::from(network as u32))).unwrap();
            prop_assert_eq!(range.contains(&Ipv4Addr::from(probe)), u64::from(probe) / block == network / block);
        }
    }

    /// A landing side that takes whatever the policy lets through.
    struct Willing;

    impl Landing for Willing {
        fn open(&mut self, _: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
            let layout = application.request.layout_at(1500, LinkShape::IPV4);
            Ok(Terms {
                session_key: 1,
                data_port: 7168,
                layout: layout.map_err(|_| RejectReason::Unsupported)?,
                tx_queue: None,
                prefix: 0,
                frames_per_packet: 1,
                fillers: 0,
                repeats_apart: false,
                goes_ahead: true,
                landing_port: None,
                max_message_len: permit.max_message_len,
                window: application.request.window,
                packet_limit: 1,
                first_message: 0,
            })
        }

        fn close(&mut self, _: &Session, _: CloseReason) -> u32 {
            0
        }
    }

    fn ask(policy: &mut Policy, max_message_len: u64) -> Option<ControlMessage> {
        let request = ControlMessage::Request(Request {
            data_port: 40_000,
            max_message_len,
            ..Request::default()
        });
        let from = SocketAddrV4::new(SENDER, 40_001);
        Grantor::new(&[1]).handle(from, 7, &request, Time::ZERO, policy, &mut Willing)
    }

    #[test]
    fn a_grantor_grants_refuses_and_names_the_limit() {
        let mut allowed = policy(&["10.0.0.0/8"]);
        let Some(ControlMessage::Grant(grant)) = ask(&mut allowed, 100) else {
            panic!("not granted")
        };
        assert_eq!(grant.max_message_len, 100);
        let Some(ControlMessage::Reject(reject)) = ask(&mut allowed, 101) else {
            panic!("not rejected")
        };
        assert_eq!((reject.reason, reject.limit), (RejectReason::TooLarge, 100));
        let Some(ControlMessage::Reject(reject)) = ask(&mut policy(&["192.0.2.0/24"]), 1) else {
            panic!("not rejected")
        };
        assert_eq!(reject.reason, RejectReason::NotAllowed);
    }
}
