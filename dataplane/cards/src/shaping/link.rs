//! An interface's root qdisc, a class of HTB, and segmentation, by rtnetlink(7) and ethtool.

use std::io;
use std::time::Duration;

use netlink_packet_core::{
    DefaultNla, Emitable, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_ECHO, NLM_F_EXCL, NLM_F_REPLACE, Nla,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::tc::{
    TcAttribute, TcFilterU32, TcFilterU32Option, TcHandle, TcHeader, TcMessage, TcOption, TcStats2, TcU32Key,
    TcU32Selector, TcU32SelectorFlags,
};
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use serde::{Deserialize, Serialize};
use zerocopy::{Immutable, IntoBytes};

use crate::ethtool::{Ethtool, EthtoolError};
use crate::netlink;

/// Handle of our root qdisc, 4c4d: as `tc` writes it: "LM".
pub(super) const ROOT_HANDLE: u32 = 0x4c4d_0000;
/// The class of what is not EF.
const OTHERS: u32 = ROOT_HANDLE | 2;
/// How long the kernel may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Preamble, check sequence and gap: what a frame takes on the wire beside what `tc` counts.
pub(super) const WIRE_OVERHEAD_BYTES: u32 = 24;
/// Frames that leave the class at once.
const BURST_FRAMES: u64 = 2;
/// What waits in the class at most: 50 ms of its rate, within these bounds in bytes.
const LEAF_PART: u64 = 20;
const LEAF_BYTES: (u64, u64) = (64 << 10, 4 << 20);
const ROOT: &str = "root qdisc";
const CLASS: &str = "class of HTB";
const LEAF: &str = "qdisc of a class";
const FILTER: &str = "filter u32";
const GSO: &str = "gso_max_segs";
/// What the kernel may know no kind of.
pub(super) const NEEDS_MODULE: [&str; 3] = [ROOT, LEAF, FILTER];

// linux/rtnetlink.h and linux/pkt_sched.h.
const TCA_OPTIONS: u16 = 2;
const TCA_HTB_PARMS: u16 = 1;
const TCA_HTB_INIT: u16 = 2;
const TCA_HTB_RATE64: u16 = 6;
const TCA_HTB_CEIL64: u16 = 7;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_BURST: u16 = 6;
const LINKLAYER_ETHERNET: u8 = 1;
/// Of the scheduler's clock (`PSCHED_SHIFT` in net/pkt_sched.h).
const TICK_NS: u64 = 64;

const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;

/// `struct tc_htb_glob`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct HtbInit {
    version: u32,
    rate_to_quantum: u32,
    default_class: u32,
    debug: u32,
    direct_packets: u32,
}

/// `struct tc_ratespec`.
#[derive(Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C)]
struct RateSpec {
    cell_log: u8,
    link_layer: u8,
    overhead: u16,
    cell_align: i16,
    least_len: u16,
    bytes_per_second: u32,
}

/// `struct tc_htb_opt`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct HtbClass {
    rate: RateSpec,
    ceil: RateSpec,
    buffer_ticks: u32,
    ceil_buffer_ticks: u32,
    quantum: u32,
    level: u32,
    priority: u32,
}

/// `struct tc_tbf_qopt`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct TokenBucket {
    rate: RateSpec,
    peak_rate: RateSpec,
    limit: u32,
    buffer_ticks: u32,
    longest_len: u32,
}

fn rate_spec(bytes_per_second: u64) -> RateSpec {
    RateSpec {
        cell_log: 0,
        link_layer: LINKLAYER_ETHERNET,
        overhead: WIRE_OVERHEAD_BYTES as u16,
        cell_align: -1,
        least_len: 0,
        bytes_per_second: u32::try_from(bytes_per_second).unwrap_or(u32::MAX),
    }
}

/// A root qdisc that is not the kernel's default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Qdisc {
    pub(super) kind: String,
    pub(super) handle: u32,
    /// As the kernel tells them, and takes them.
    options: Vec<u8>,
}

/// Kinds whose options are all there is to them.
const CLASSLESS: [&str; 11] = [
    "bfifo",
    "cake",
    "codel",
    "fq",
    "fq_codel",
    "noqueue",
    "pfifo",
    "pfifo_fast",
    "pie",
    "sfq",
    "tbf",
];

/// No qdisc has longer options, in bytes; an attribute's length has 16 bits.
const OPTIONS_MAX: usize = 1 << 12;

impl Qdisc {
    pub(super) fn is_restorable(&self) -> bool {
        let is_known = CLASSLESS.contains(&self.kind.as_str()) && self.options.len() <= OPTIONS_MAX;
        self.handle != 0 && self.handle & 0xffff == 0 && is_known
    }

    /// What makes it again.
    pub(super) fn attributes(&self) -> Vec<TcAttribute> {
        let options = TcAttribute::Other(DefaultNla::new(TCA_OPTIONS, self.options.clone()));
        let options = (!self.options.is_empty()).then_some(options);
        let kind = TcAttribute::Kind(self.kind.clone());
        [kind].into_iter().chain(options).collect()
    }
}

/// What has passed a class so far, and what waits in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that left, Ethernet headers and all, without what the wire adds.
    pub bytes: u64,
    /// Packets that left. Wraps.
    pub packets: u32,
    /// Packets for which there was no room. Wraps.
    pub dropped: u32,
    /// Packets that wait.
    pub waiting: u32,
}

/// An interface.
pub(super) struct Link {
    index: u32,
    socket: Socket,
    pub(super) ethtool: Ethtool,
}

impl Link {
    /// An interface of the calling thread's network namespace.
    pub(super) fn open(index: u32) -> Result<Link, EthtoolError> {
        let open = || -> io::Result<Link> {
            let socket = netlink::open(NETLINK_ROUTE)?;
            // A kernel that does not answer is an error, and holds nothing up.
            set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
            let ethtool = Ethtool::open(index)?;
            Ok(Link {
                index,
                socket,
                ethtool,
            })
        };
        open().map_err(EthtoolError::of_call("socket(2)"))
    }

    /// The root qdisc; `None` for the kernel's default, whose handle is 0.
    pub(super) fn root(&self) -> Result<Option<Qdisc>, EthtoolError> {
        let request = RouteNetlinkMessage::GetQueueDiscipline(self.message(0, 0, Vec::new()));
        let all = netlink::ask(&self.socket, &request, NLM_F_DUMP);
        let mut all = all.map_err(|error| EthtoolError::new(ROOT, error))?.into_iter();
        let root = all.find_map(|message| match message {
            RouteNetlinkMessage::NewQueueDiscipline(message)
                if message.header.index == self.index as i32 && message.header.parent == TcHandle::ROOT =>
            {
                Some(message)
            }
            _ => None,
        });
        Ok(root.map(Qdisc::from).filter(|root| root.handle != 0))
    }

    /// Makes our HTB the root qdisc: what nothing classifies is in [`OTHERS`], once that is there. Packets marked EF pass unshaped, before all
    /// others (`HTB_DIRECT`).
    pub(super) fn set_root(&self) -> Result<(), EthtoolError> {
        self.set_root_of("htb")
    }

    fn set_root_of(&self, kind: &str) -> Result<(), EthtoolError> {
        let init = HtbInit {
            version: 3,
            rate_to_quantum: 10,
            default_class: OTHERS & 0xffff,
            debug: 0,
            direct_packets: 0,
        };
        let options = TcAttribute::Options(vec![option(TCA_HTB_INIT, init.as_bytes())]);
        let attributes = vec![TcAttribute::Kind(kind.into()), options];
        self.put(ROOT, TcHandle::ROOT.into(), ROOT_HANDLE, attributes)
    }

    /// Puts a qdisc in the place of what is there.
    fn put(
        &self,
        what: &'static str,
        parent: u32,
        handle: u32,
        attributes: Vec<TcAttribute>,
    ) -> Result<(), EthtoolError> {
        let qdisc = RouteNetlinkMessage::NewQueueDiscipline(self.message(parent, handle, attributes));
        self.order(what, &qdisc, NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Puts the qdisc back that was there before; `None`: the kernel makes its default one.
    pub(super) fn restore_root(&self, before: Option<&Qdisc>) -> Result<(), EthtoolError> {
        let root = TcHandle::ROOT.into();
        let Some(before) = before else {
            let ours = RouteNetlinkMessage::DelQueueDiscipline(self.message(root, ROOT_HANDLE, Vec::new()));
            return self.order(ROOT, &ours, 0);
        };
        self.put(ROOT, root, before.handle, before.attributes())
    }

    /// Has packets of DSCP EF (46) pass unshaped.
    pub(super) fn let_ef_pass(&self) -> Result<(), EthtoolError> {
        // The second byte of an IPv4 header; of an IPv6 header the traffic class lies across the first two.
        for (priority, protocol, value, mask) in [
            (1, ETH_P_IP, 0x00b8_0000, 0x00fc_0000),
            (2, ETH_P_IPV6, 0x0b80_0000, 0x0fc0_0000),
        ] {
            let mut key = TcU32Key::default();
            (key.val, key.mask) = (value, mask);
            let mut selector = TcU32Selector::default();
            (selector.flags, selector.nkeys) = (TcU32SelectorFlags::Terminal, 1);
            selector.keys = vec![key];
            let options = TcAttribute::Options(vec![
                TcOption::U32(TcFilterU32Option::ClassId(ROOT_HANDLE.into())),
                TcOption::U32(TcFilterU32Option::Selector(selector)),
            ]);
            let kind = TcAttribute::Kind(TcFilterU32::KIND.into());
            let mut message = self.message(ROOT_HANDLE, 0, vec![kind, options]);
            message.header.info = priority << 16 | u32::from(protocol.to_be());
            let filter = RouteNetlinkMessage::NewTrafficFilter(message);
            self.order(FILTER, &filter, NLM_F_CREATE | NLM_F_EXCL)?;
        }
        Ok(())
    }

    /// Gives the class a rate in bytes a second on the wire, and makes it if it is not there. What waits in it stays.
    pub(super) fn set_class(&self, bytes_per_second: u64, frame_len: u32) -> Result<(), EthtoolError> {
        let rate = rate_spec(bytes_per_second);
        let burst = BURST_FRAMES * u64::from(frame_len + WIRE_OVERHEAD_BYTES);
        let burst_ns = burst * 1_000_000_000 / bytes_per_second.max(1);
        let buffer_ticks = u32::try_from(burst_ns.div_ceil(TICK_NS)).unwrap_or(u32::MAX);
        let class = HtbClass {
            rate,
            ceil: rate,
            buffer_ticks,
            ceil_buffer_ticks: buffer_ticks,
            quantum: frame_len,
            level: 0,
            priority: 0,
        };
        let rate = bytes_per_second.to_ne_bytes();
        let options = TcAttribute::Options(vec![
            option(TCA_HTB_PARMS, class.as_bytes()),
            option(TCA_HTB_RATE64, &rate),
            option(TCA_HTB_CEIL64, &rate),
        ]);
        let kind = TcAttribute::Kind("htb".into());
        let class = self.message(TcHandle::ROOT.into(), OTHERS, vec![kind, options]);
        self.order(CLASS, &RouteNetlinkMessage::NewTrafficClass(class), NLM_F_CREATE)?;
        let limit = (bytes_per_second / LEAF_PART).clamp(LEAF_BYTES.0, LEAF_BYTES.1) as u32;
        // Its rate holds nothing back. What is longer than its bucket it cuts into frames: a TCP connection that was there before keeps the
        // `gso_max_segs` that it found.
        let cutter = TokenBucket {
            rate: rate_spec(u32::MAX.into()),
            peak_rate: RateSpec::default(),
            limit,
            buffer_ticks: 0,
            longest_len: 0,
        };
        let frame_on_wire = frame_len + WIRE_OVERHEAD_BYTES;
        let options = TcAttribute::Options(vec![
            option(TCA_TBF_PARMS, cutter.as_bytes()),
            option(TCA_TBF_BURST, &frame_on_wire.to_ne_bytes()),
        ]);
        let attributes = vec![TcAttribute::Kind("tbf".into()), options];
        self.put(LEAF, OTHERS, 0, attributes)
    }

    /// What passes the class.
    pub(super) fn traffic(&self) -> Result<Traffic, EthtoolError> {
        let request = RouteNetlinkMessage::GetTrafficClass(self.message(0, OTHERS, Vec::new()));
        // Else the kernel tells those alone that listen to changes (`tclass_get_notify` in net/sched/sch_api.c).
        let answer = netlink::ask(&self.socket, &request, NLM_F_ECHO);
        let mut answer = answer.map_err(|error| EthtoolError::new(CLASS, error))?;
        let mut traffic = Traffic::default();
        let Some(RouteNetlinkMessage::NewTrafficClass(class)) = answer.pop() else {
            return Ok(traffic);
        };
        for statistic in class.attributes.iter().flat_map(|attribute| match attribute {
            TcAttribute::Stats2(statistics) => statistics.as_slice(),
            _ => &[],
        }) {
            match statistic {
                TcStats2::Basic(basic) => (traffic.bytes, traffic.packets) = (basic.bytes, basic.packets),
                TcStats2::Queue(queue) => (traffic.dropped, traffic.waiting) = (queue.drops, queue.qlen),
                _ => {}
            }
        }
        Ok(traffic)
    }

    pub(super) fn gso_max_segs(&self) -> Result<u32, EthtoolError> {
        let mut request = LinkMessage::default();
        request.header.index = self.index;
        let answer = netlink::one_by(&self.socket, &RouteNetlinkMessage::GetLink(request));
        let RouteNetlinkMessage::NewLink(link) = answer.map_err(|error| EthtoolError::new(GSO, error))?
        else {
            return Err(EthtoolError::Unsupported { what: GSO });
        };
        let found = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::GsoMaxSegs(segments) => Some(*segments),
            _ => None,
        });
        found.ok_or(EthtoolError::Unsupported { what: GSO })
    }

    pub(super) fn set_gso_max_segs(&self, segments: u32) -> Result<(), EthtoolError> {
        let mut request = LinkMessage::default();
        request.header.index = self.index;
        request.attributes = vec![LinkAttribute::GsoMaxSegs(segments)];
        self.order(GSO, &RouteNetlinkMessage::SetLink(request), 0)
    }

    /// Which features by which a card cuts TCP itself ([`is_tso`]) are on, or off, and can be switched.
    pub(super) fn tso(&self, on: bool) -> Result<Vec<String>, EthtoolError> {
        let mut features = self.ethtool.features()?;
        features.retain(|one| one.on == on && one.changeable && is_tso(&one.name));
        Ok(features.into_iter().map(|one| one.name).collect())
    }

    pub(super) fn set_features(&self, names: &[String], on: bool) -> Result<(), EthtoolError> {
        let wanted: Vec<_> = names.iter().map(|name| (name.as_str(), on)).collect();
        self.ethtool.set_features(&wanted)
    }

    fn message(&self, parent: u32, handle: u32, attributes: Vec<TcAttribute>) -> TcMessage {
        let header = TcHeader {
            index: self.index as i32,
            handle: handle.into(),
            parent: parent.into(),
            ..TcHeader::default()
        };
        TcMessage::from_parts(header, attributes)
    }

    fn order(
        &self,
        what: &'static str,
        message: &RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), EthtoolError> {
        let request = netlink::serialized(message, NLM_F_ACK | flags);
        netlink::order(&self.socket, &request).map_err(|error| EthtoolError::new(what, error))
    }
}

/// Whether it is a feature by which a card cuts TCP itself, so that what leaves the qdisc as one is many frames: `tx-tcp6-segmentation`.
pub(super) fn is_tso(name: &str) -> bool {
    name.starts_with("tx-tcp") && name.ends_with("-segmentation")
}

fn option(kind: u16, value: &[u8]) -> TcOption {
    TcOption::Other(DefaultNla::new(kind, value.to_vec()))
}

impl From<TcMessage> for Qdisc {
    fn from(message: TcMessage) -> Qdisc {
        let mut qdisc = Qdisc {
            kind: String::new(),
            handle: message.header.handle.into(),
            options: Vec::new(),
        };
        for attribute in &message.attributes {
            match attribute {
                TcAttribute::Kind(kind) => qdisc.kind.clone_from(kind),
                TcAttribute::Options(options) => qdisc.options = bytes_of(options),
                _ => {}
            }
        }
        qdisc
    }
}

/// What is in `TCA_OPTIONS`. Of kinds that the crate does not know it is kept as one option, the attribute itself.
fn bytes_of(options: &[TcOption]) -> Vec<u8> {
    let mut bytes;
    match options {
        [TcOption::Other(whole)] if whole.kind() == TCA_OPTIONS => {
            bytes = vec![0; whole.value_len()];
            whole.emit_value(&mut bytes);
        }
        options => {
            bytes = vec![0; options.buffer_len()];
            options.emit(&mut bytes);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shaping::ShapingError;

    #[test]
    fn structs_are_as_long_as_the_kernels() {
        assert_eq!(
            [size_of::<HtbInit>(), size_of::<RateSpec>(), size_of::<HtbClass>()],
            [20, 12, 44]
        );
    }

    /// As a kernel answers that has no HTB. Nothing is changed.
    #[test]
    fn a_kind_that_the_kernel_does_not_know_is_named() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: needs root");
            return;
        }
        let error = Link::open(1)
            .expect("loopback")
            .set_root_of("no-such-kind")
            .expect_err("not known");
        let error = ShapingError::from(error);
        assert!(matches!(error, ShapingError::NoHtb), "{error}");
        assert!(
            error.to_string().contains("modprobe -a sch_htb cls_u32"),
            "{error}"
        );
    }
}
