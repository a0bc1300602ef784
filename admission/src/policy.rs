//! The policy of one receiver: a list of allowed sender addresses and a limit of the message length.

use core::net::Ipv4Addr;
use core::time::Duration;

use lm_protocol::control::RejectReason;
use lm_protocol::session::{Admit, Application, Permit, Refusal};

use crate::Cidr;

/// A session of which nothing is heard for so long is over: its sender is gone. A live sender is heard far
/// more often, and whoever comes next waits no longer than this for a sender that was killed.
pub(crate) const LEASE: Duration = Duration::from_secs(5);

/// A session goes on for so long in silence while nobody else wants its place: the path may be cut, or a link down. Not under
/// `exclusive`, where hosts that want it are not heard here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Admits the senders whose address is on the list, for messages up to a limit.
///
/// ```
/// use lm_admission::Policy;
/// let policy = Policy { allow: vec!["192.0.2.0/24".parse().unwrap()], max_message_len: 1 << 20 };
/// assert!(policy.allows([192, 0, 2, 7].into()));
/// assert!(!policy.allows([198, 51, 100, 7].into()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Ranges of allowed addresses. An empty list allows every sender.
    pub allow: Vec<Cidr>,
    /// Longest message that is accepted, in bytes.
    pub max_message_len: u64,
}

impl Policy {
    /// Whether the list allows `sender`. An address is no proof of identity on a network where others can forge it.
    #[must_use]
    pub fn allows(&self, sender: Ipv4Addr) -> bool {
        self.allow.is_empty() || self.allow.iter().any(|range| range.contains(sender))
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

    const SENDER: Ipv4Addr = Ipv4Addr::new(10, 1, 2, 3);

    fn policy(allow: &[&str]) -> Policy {
        Policy {
            allow: allow.iter().map(|text| text.parse().unwrap()).collect(),
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
                repeats_apart: false,
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
