//! What the kernel does by itself with one NAPI instance, set for that instance alone: generic netlink family `netdev`
//! (Documentation/netlink/specs/netdev.yaml; `napi-set` since Linux 6.14).

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};

use lm_cards::netdev::Netdev;

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

impl Deferral {
    /// While an instance is ours: a hundred microseconds of polls without a packet, or so long without a poll, and the
    /// kernel runs it again. Longer than two budgets of packets take, because a timer that ends during a poll is lost.
    pub const KEPT: Deferral = Deferral {
        hard_irqs: 200,
        timeout_ns: 1_000_000,
    };
}

/// A deferral for one instance, ready to be set.
#[derive(Clone, Debug)]
pub struct Setting(Vec<u8>);

/// One NAPI instance of the network namespace of the thread that found it.
#[derive(Debug)]
pub struct Napi {
    family: Netdev,
    id: u32,
}

impl Napi {
    /// The instance with this id (`SO_INCOMING_NAPI_ID`).
    ///
    /// # Errors
    /// What the kernel answers: one before 6.7 has no such family.
    pub fn new(id: u32) -> io::Result<Napi> {
        let family = Netdev::open()?;
        Ok(Napi { family, id })
    }

    /// The ids of an interface's instances.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn ids_of(interface_index: u32) -> io::Result<Vec<u32>> {
        let answers = Netdev::open()?.ask(
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
        let family = Netdev::open()?;
        let of_type = |kind| {
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
        let [receives, sends] = QUEUE_TYPES.map(of_type);
        let (receives, sends) = (receives?, sends?);
        Ok(receives.filter(|_| receives == sends).map(|id| id as u32))
    }

    /// What is set now.
    ///
    /// # Errors
    /// What the kernel answers: `ENOENT` when the instance is gone.
    pub fn deferral(&self) -> io::Result<Deferral> {
        let id = (NETDEV_A_NAPI_ID, u64::from(self.id));
        let answers = self.family.ask(NETDEV_CMD_NAPI_GET, &[id], 0)?;
        let value = |kind| answers.first().and_then(|answer| answer.value(kind)).unwrap_or(0);
        Ok(Deferral {
            hard_irqs: value(NETDEV_A_NAPI_DEFER_HARD_IRQS) as u32,
            timeout_ns: value(NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT),
        })
    }

    /// What sets a deferral.
    pub fn setting(&self, deferral: Deferral) -> Setting {
        let request = self.family.prepared(
            NETDEV_CMD_NAPI_SET,
            &[
                (NETDEV_A_NAPI_ID, u64::from(self.id)),
                (NETDEV_A_NAPI_DEFER_HARD_IRQS, u64::from(deferral.hard_irqs)),
                (NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT, deferral.timeout_ns),
            ],
            NLM_F_ACK,
        );
        Setting(request)
    }

    /// Sets what was prepared. Allocates nothing.
    ///
    /// # Errors
    /// What the kernel answers: `EPERM` without `CAP_NET_ADMIN`, `EOPNOTSUPP` before Linux 6.14.
    pub fn set(&self, setting: &Setting) -> io::Result<()> {
        self.family.order(&setting.0)
    }
}

/// An instance, and what keeps it and leaves it as it was.
#[derive(Debug)]
pub struct Instance {
    napi: Napi,
    keep: Setting,
    leave: Setting,
}

impl Instance {
    /// The instance with this id; it is left as it is now.
    ///
    /// # Errors
    /// Those of [`Napi::new`] and [`Napi::deferral`].
    pub fn new(id: u32) -> io::Result<Instance> {
        let napi = Napi::new(id)?;
        let before = match napi.deferral()? {
            // Left by a program that was killed.
            Deferral::KEPT => Deferral::default(),
            before => before,
        };
        Ok(Instance::of(napi, before))
    }

    pub(crate) fn of(napi: Napi, before: Deferral) -> Instance {
        Instance {
            keep: napi.setting(Deferral::KEPT),
            leave: napi.setting(before),
            napi,
        }
    }

    /// Keeps it, or leaves it as it was. Allocates nothing.
    ///
    /// # Errors
    /// Those of [`Napi::set`].
    pub fn set(&self, keep: bool) -> io::Result<()> {
        self.napi.set(if keep { &self.keep } else { &self.leave })
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
        let family = Netdev::open().expect("Linux 6.7");
        let error = family.ask(200, &[], 0).expect_err("no such command");
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
    }
}
