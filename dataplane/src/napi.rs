//! What the kernel does by itself with one NAPI instance, set for that instance alone: generic netlink family `netdev`
//! (Documentation/netlink/specs/netdev.yaml; `napi-set` since Linux 6.14).

use std::fmt;
use std::io;

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLM_F_ACK, NLM_F_DUMP, NlasIterator, ParseableParametrized,
};
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use netlink_sys::{Socket, protocols::NETLINK_GENERIC};

use lm_cards::netlink::{ask, open, order, serialized};

// `include/uapi/linux/netdev.h`.
const NETDEV_CMD_QUEUE_GET: u8 = 10;
const NETDEV_CMD_NAPI_GET: u8 = 11;
const NETDEV_CMD_NAPI_SET: u8 = 14;
const NETDEV_A_QUEUE_ID: u16 = 1;
const NETDEV_A_QUEUE_IFINDEX: u16 = 2;
const NETDEV_A_QUEUE_TYPE: u16 = 3;
const NETDEV_A_QUEUE_NAPI_ID: u16 = 4;
/// `enum netdev_queue_type`: receive, transmit.
const QUEUE_TYPES: [u64; 2] = [0, 1];
const NETDEV_A_NAPI_IFINDEX: u16 = 1;
const NETDEV_A_NAPI_ID: u16 = 2;
const NETDEV_A_NAPI_DEFER_HARD_IRQS: u16 = 5;
const NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT: u16 = 6;

/// When the kernel goes on with an instance that was polled and had no more packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deferral {
    /// Polls without packets after which interrupts (on veth: whoever sends) take over again; 0: at once.
    pub hard_irqs: u32,
    /// Nanoseconds after which a softirq polls, if nobody did.
    pub timeout_ns: u64,
}

/// A deferral for one instance, ready to be set.
#[derive(Clone, Debug)]
pub struct Setting(Vec<u8>);

/// One NAPI instance of the network namespace of the thread that found it.
pub struct Napi {
    socket: Socket,
    family: u16,
    id: u32,
}

impl fmt::Debug for Napi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Napi")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl Napi {
    /// The instance with this id (`SO_INCOMING_NAPI_ID`).
    ///
    /// # Errors
    /// What the kernel answers: one before 6.7 has no such family.
    pub fn new(id: u32) -> io::Result<Napi> {
        let socket = open(NETLINK_GENERIC)?;
        let name = GenlCtrlAttrs::FamilyName(NetdevNapi::family_name().to_owned());
        let request = GenlMessage::from_payload(GenlCtrl {
            cmd: GenlCtrlCmd::GetFamily,
            nlas: vec![name],
        });
        let mut answers = Vec::new();
        ask(&socket, &request, 0, &mut answers)?;
        let mut attributes = answers.into_iter().flat_map(|answer| answer.into_parts().1.nlas);
        let family = attributes.find_map(|attribute| match attribute {
            GenlCtrlAttrs::FamilyId(family) => Some(family),
            _ => None,
        });
        let family = family.ok_or(io::ErrorKind::NotFound)?;
        Ok(Napi { socket, family, id })
    }

    /// The ids of an interface's instances.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn ids_of(interface_index: u32) -> io::Result<Vec<u32>> {
        let answers = Napi::new(0)?.ask(
            NETDEV_CMD_NAPI_GET,
            &[(NETDEV_A_NAPI_IFINDEX, interface_index.into())],
            NLM_F_DUMP,
        )?;
        let ids = answers.iter().filter_map(|answer| answer.value(NETDEV_A_NAPI_ID));
        Ok(ids.map(|id| id as u32).collect())
    }

    /// The one instance that both receives and sends for a queue. `None` where each way has its own, or the driver does not say whose it is.
    ///
    /// # Errors
    /// What the kernel answers: one before 6.8 does not know the question, and `ENOENT` says that there is no such queue.
    pub(crate) fn shared_by(interface_index: u32, queue: u32) -> io::Result<Option<u32>> {
        let mut family = Napi::new(0)?;
        let mut of_type = |kind| {
            let queue = [
                (NETDEV_A_QUEUE_ID, queue.into()),
                (NETDEV_A_QUEUE_IFINDEX, interface_index.into()),
                (NETDEV_A_QUEUE_TYPE, kind),
            ];
            let answers = family.ask(NETDEV_CMD_QUEUE_GET, &queue, 0)?;
            io::Result::Ok(
                answers
                    .first()
                    .and_then(|answer| answer.value(NETDEV_A_QUEUE_NAPI_ID)),
            )
        };
        let [receives, sends] = QUEUE_TYPES.map(&mut of_type);
        let (receives, sends) = (receives?, sends?);
        Ok(receives.filter(|_| receives == sends).map(|id| id as u32))
    }

    /// What is set now.
    ///
    /// # Errors
    /// What the kernel answers: `ENOENT` when the instance is gone.
    pub fn deferral(&mut self) -> io::Result<Deferral> {
        let id = (NETDEV_A_NAPI_ID, u64::from(self.id));
        let answers = self.ask(NETDEV_CMD_NAPI_GET, &[id], 0)?;
        let value = |kind| answers.first().and_then(|answer| answer.value(kind)).unwrap_or(0);
        Ok(Deferral {
            hard_irqs: value(NETDEV_A_NAPI_DEFER_HARD_IRQS) as u32,
            timeout_ns: value(NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT),
        })
    }

    /// What sets a deferral.
    pub fn setting(&self, deferral: Deferral) -> Setting {
        let request = self.message(
            NETDEV_CMD_NAPI_SET,
            &[
                (NETDEV_A_NAPI_ID, u64::from(self.id)),
                (NETDEV_A_NAPI_DEFER_HARD_IRQS, u64::from(deferral.hard_irqs)),
                (NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT, deferral.timeout_ns),
            ],
        );
        Setting(serialized(&request, NLM_F_ACK))
    }

    /// Sets what was prepared. Allocates nothing.
    ///
    /// # Errors
    /// What the kernel answers: `EPERM` without `CAP_NET_ADMIN`, `EOPNOTSUPP` before Linux 6.14.
    pub fn set(&self, setting: &Setting) -> io::Result<()> {
        order(&self.socket, &setting.0)
    }

    fn message(&self, command: u8, attributes: &[(u16, u64)]) -> GenlMessage<NetdevNapi> {
        let mut message = GenlMessage::from_payload(NetdevNapi {
            command,
            attributes: attributes.to_vec(),
        });
        message.set_resolved_family_id(self.family);
        message
    }

    fn ask(&mut self, command: u8, attributes: &[(u16, u64)], flags: u16) -> io::Result<Vec<NetdevNapi>> {
        let request = self.message(command, attributes);
        let mut answers = Vec::new();
        ask(&self.socket, &request, flags, &mut answers)?;
        Ok(answers.into_iter().map(|answer| answer.into_parts().1).collect())
    }
}

/// A message of the family about an instance: its integer attributes.
#[derive(Clone, Debug)]
struct NetdevNapi {
    command: u8,
    attributes: Vec<(u16, u64)>,
}

impl NetdevNapi {
    fn value(&self, kind: u16) -> Option<u64> {
        (self.attributes.iter()).find_map(|&(of, value)| (of == kind).then_some(value))
    }

    fn nlas(&self) -> Vec<DefaultNla> {
        (self.attributes.iter())
            .map(|&(kind, value)| match kind {
                // `uint` in the specification: 4 or 8 bytes.
                NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT => DefaultNla::new(kind, value.to_ne_bytes().to_vec()),
                _ => DefaultNla::new(kind, (value as u32).to_ne_bytes().to_vec()),
            })
            .collect()
    }
}

impl GenlFamily for NetdevNapi {
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

impl Emitable for NetdevNapi {
    fn buffer_len(&self) -> usize {
        self.nlas().as_slice().buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.nlas().as_slice().emit(buffer);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for NetdevNapi {
    fn parse_with_param(bytes: &[u8], header: GenlHeader) -> Result<NetdevNapi, DecodeError> {
        let mut attributes = Vec::new();
        for nla in NlasIterator::new(bytes) {
            let nla = nla?;
            let value = match *nla.value() {
                [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]).into(),
                [a, b, c, d, e, f, g, h] => u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
                _ => continue,
            };
            attributes.push((nla.kind(), value));
        }
        Ok(NetdevNapi {
            command: header.cmd,
            attributes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_instances_shares_none() {
        match Napi::shared_by(1, 0) {
            Ok(shared) => assert_eq!(shared, None, "the loopback has queues and no instance"),
            Err(error) => println!("NOT IN THIS KERNEL: {error}"),
        }
        assert!(Napi::shared_by(1, 99).is_err(), "no such queue");
        assert!(Napi::shared_by(i32::MAX as u32, 0).is_err(), "no such device");
    }

    /// As a kernel before 6.8 answers to `queue-get`, and one before 6.14 to `napi-set`.
    #[test]
    fn a_command_that_the_kernel_has_not_is_an_error() {
        let mut family = Napi::new(0).expect("Linux 6.7");
        let error = family.ask(200, &[], 0).expect_err("no such command");
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
    }
}
