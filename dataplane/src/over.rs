//! Opening an endpoint on any [`Port`]: what it depends on of a device, and how the parts come together.

use std::sync::Arc;
use std::time::Duration;

use lm_protocol::geometry::{Layout, LinkShape, MIN_MTU, Wire};
use lm_protocol::session::{Admit, Permit};
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::with_digests;

use crate::bounds::{InFlight, LANDING_RING_LEN, OnTheWay, TX_IN_FLIGHT_MAX};
use crate::config::{Depth, EndpointConfig};
use crate::daemon::Daemon;
use crate::endpoint::Endpoint;
use crate::engine::{Fixed, Receives};
use crate::entropy::Entropy;
use crate::error::OpenError;
use crate::footprint::Footprint;
use crate::idle::Idle;
use crate::memory::{HugePages, Mapping, Umem};
use crate::opening::{MemoryPlan, Parts, Queues};
use crate::port::{Caps, EffectiveMode, ModeRequest, Port, PortError};

/// The largest at which a packet goes in one frame whatever the driver does: a chunk of 4096 bytes has 256 bytes of headroom, and veth and
/// several drivers keep another 320 at its end (`skb_shared_info`). Messages of one fragment are no longer than that.
pub(crate) const MTU_IN_ONE_FRAME: u16 = 3498;

/// The largest MTU used: with an Ethernet header a packet is 65,535 bytes long.
const MTU_MAX: u16 = u16::MAX - 14;

/// Fill and RX ring of a landing channel where at most twice [`Caps::tx_bound`] are posted: short rings stay in the cache.
pub(crate) const LANDING_RING_LEN_BOUND: u32 = 2048;

/// How long a granted session lives without a sign of life from its sender.
const LEASE: Duration = Duration::from_secs(5);

/// A network interface, as far as an endpoint depends on it.
#[derive(Clone, Debug)]
pub struct Device {
    /// Its name, for messages.
    pub name: String,
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Longest IP packet in bytes.
    pub mtu: u32,
    /// How many receive queues it has.
    pub queues: u32,
    /// Packets that it holds on each receive queue, where it reads and writes the memory itself.
    pub rx_ring_len: u32,
    /// Length of a frame with its headroom, 2048 to 4096 bytes.
    pub chunk_len: u32,
    /// How packets come and leave. [`Caps::capacity`] is not looked at.
    pub caps: Caps,
}

/// The memory that an endpoint's packets lie in: what a port is told when it is opened.
#[derive(Clone, Copy, Debug)]
pub struct PortMemory<'a> {
    /// The memory.
    pub mapping: &'a Arc<Mapping>,
    /// Length of a frame with its headroom, in bytes.
    pub chunk_len: u32,
    /// Whether packets may be longer than a frame holds: they take several then.
    pub multi_buffer: bool,
    /// Bytes right before each packet to send that say what the device is to do with it, as its descriptor says then
    /// ([`Descriptor::options`](crate::ring::Descriptor::options): `XDP_TX_METADATA`); 0: none. Only where the device [sums](Caps::sums).
    pub tx_metadata_len: u32,
}

impl<P: Port> Endpoint<P> {
    /// Opens an endpoint on a port of another kind than the kernel's: `open` makes one that moves packets in the memory it is given. The
    /// endpoint admits every sender itself, for messages up to `config.receive.max_message_len`.
    ///
    /// What `config` says of the interface's name, its mode, the port number and the daemon is not looked at.
    ///
    /// # Errors
    /// [`OpenError`]; nothing stays open.
    pub fn over(
        device: &Device,
        config: &EndpointConfig,
        open: impl FnOnce(PortMemory<'_>) -> Result<P, PortError>,
    ) -> Result<Endpoint<P>, OpenError> {
        Endpoint::over_with(device, config, Box::new(everybody(config)), open)
    }

    /// As [`Endpoint::over`], but `admit` is asked about every sender.
    ///
    /// # Errors
    /// [`OpenError`]; nothing stays open.
    pub fn over_with(
        device: &Device,
        config: &EndpointConfig,
        admit: Box<dyn Admit + Send>,
        open: impl FnOnce(PortMemory<'_>) -> Result<P, PortError>,
    ) -> Result<Endpoint<P>, OpenError> {
        let (shape, warnings) = Shape::new(config, device)?;
        let plan = MemoryPlan::new(config, &shape.layout, device.chunk_len, device.caps)?;
        let umem = reserve(config, &plan, HugePages::Auto)?;
        let port = open(plan.port_memory(&umem))?;
        let opened = Opened::assemble(config.clone(), plan, umem, port, &shape)?;
        opened.into_endpoint(device.clone(), &shape, warnings, admit)
    }
}

/// Every sender, for messages as long as the endpoint takes.
pub(crate) fn everybody(config: &EndpointConfig) -> Permit {
    Permit {
        max_message_len: config.receive.max_message_len,
        lease: LEASE,
    }
}

/// The memory that is planned.
pub(crate) fn reserve(
    config: &EndpointConfig,
    plan: &MemoryPlan,
    pages: HugePages,
) -> Result<Umem, OpenError> {
    // Long messages are rare and huge pages dear: what they need is taken when a sender announces some.
    let reserved_len = match pages {
        HugePages::On => plan.registered_len(),
        HugePages::Auto | HugePages::Off => plan.total_len(),
    };
    let umem = match (config.memory.lend, pages) {
        (false, pages) => Umem::reserved(plan.total_len(), reserved_len, pages),
        (true, HugePages::On) => {
            let error = "memory that other processes are lent is never in huge pages; use copy mode, or do not lend it";
            return Err(OpenError::Config(error.into()));
        }
        (true, _) => Umem::shared(plan.total_len()),
    };
    umem.map_err(|source| OpenError::Memory {
        len: reserved_len,
        source,
    })
}

/// What packets look like, and which queues carry them.
pub(crate) struct Shape {
    /// Of the longest packets, and of those that go in one frame.
    pub(crate) layout: Layout,
    layout_in_one_frame: Layout,
    pub(crate) mtu: u16,
    pub(crate) queues: Queues,
}

impl Shape {
    /// Of an endpoint on that device; with what its user should know.
    pub(crate) fn new(config: &EndpointConfig, device: &Device) -> Result<(Shape, Vec<String>), OpenError> {
        if device.mtu < u32::from(MIN_MTU) {
            return Err(OpenError::Config(format!(
                "{} has an MTU of {}; LM needs {MIN_MTU}",
                device.name, device.mtu
            )));
        }
        let (mtu, warnings) = effective_mtu(config, device)?;
        let shape = Shape {
            layout: Layout::new(Wire::Lm, mtu, LinkShape::IPV4)?,
            layout_in_one_frame: Layout::new(Wire::Lm, mtu.min(MTU_IN_ONE_FRAME), LinkShape::IPV4)?,
            mtu,
            queues: Queues::choose(config, device)?,
        };
        Ok((shape, warnings))
    }
}

/// Fill and RX ring of the landing channel.
fn landing_ring_len(caps: &Caps) -> u32 {
    match caps.tx_bound {
        0 => LANDING_RING_LEN,
        _ => LANDING_RING_LEN_BOUND,
    }
}

/// Handed to the driver and not yet completed, per channel.
fn tx_in_flight(plan: &MemoryPlan, depth: Depth) -> InFlight {
    let held = match plan.caps.tx_bound {
        0 => TX_IN_FLIGHT_MAX,
        bound => bound,
    };
    InFlight {
        most: plan.in_flight(held),
        adapts: depth.adapts(),
    }
}

/// What was opened, before an engine is made of it.
pub(crate) struct Opened<P: Port> {
    config: EndpointConfig,
    plan: MemoryPlan,
    umem: Umem,
    pub(crate) port: P,
    pub(crate) daemon: Option<Daemon>,
    parts: Parts<P>,
}

impl<P: Port> Opened<P> {
    /// With a port that has no queues yet.
    pub(crate) fn assemble(
        config: EndpointConfig,
        plan: MemoryPlan,
        umem: Umem,
        mut port: P,
        shape: &Shape,
    ) -> Result<Opened<P>, OpenError> {
        let ring_len = landing_ring_len(&plan.caps);
        let in_flight = tx_in_flight(&plan, config.link.depth);
        let parts = Parts::open(&mut port, &plan, shape.queues, ring_len, in_flight)?;
        Ok(Opened {
            config,
            plan,
            umem,
            port,
            daemon: None,
            parts,
        })
    }

    /// Packets that a sender may have on the way, in the device or posted.
    fn on_the_way(&self, device: &Device) -> OnTheWay {
        match self.plan.caps.tx_bound {
            0 if !self.plan.is_zero_copy() => OnTheWay::by_anybody(u32::MAX),
            // A packet that meets no descriptor of the card is lost, however many entries are posted behind.
            0 => OnTheWay::by_anybody(device.rx_ring_len / 4 * 3),
            // Of a sender whose own completions keep the far ring from overflowing four times as many: the receiver's work goes on while
            // the next credit is under way.
            held => OnTheWay { held, most: 4 * held },
        }
    }

    pub(crate) fn into_endpoint(
        self,
        device: Device,
        shape: &Shape,
        mut warnings: Vec<String>,
        admit: Box<dyn Admit + Send>,
    ) -> Result<Endpoint<P>, OpenError> {
        let on_the_way = self.on_the_way(&device);
        let Opened {
            config,
            plan,
            umem,
            mut port,
            daemon,
            parts,
        } = self;
        let generic = port.effective_mode() == EffectiveMode::CopyGeneric;
        if generic && shape.queues.landing.is_some() {
            warnings.push(format!(
                "{} is in generic mode, where large messages are copied instead of landing: use an interface whose \
                 driver runs XDP programs (--mode copy)",
                device.name
            ));
        }
        let mut entropy = port.seed().map_or(Entropy::Kernel, Entropy::Seeded);
        let fixed = Fixed {
            local: port.side().local(),
            sender_id: with_digests(entropy.draw(), config.integrity.has_digests()),
            mac: MacAddr(device.mac),
            link: LinkShape::IPV4,
            mtu: shape.mtu,
            layout: shape.layout_in_one_frame,
            chunk_len: plan.chunk_len,
            caps: plan.caps,
            datagram: plan.datagram,
            integrity: config.integrity,
            checksum: plan.checksum,
            patience_ns: config.patience.as_nanos() as u64,
            kept_frames: plan.caps.kept_frames,
            device_moves: plan.device_moves,
            tx_in_flight: tx_in_flight(&plan, config.link.depth),
            transmit_registered_len: plan.landing_arena,
            receives: Receives {
                tx_queue: (shape.queues.landing)
                    .filter(|_| plan.caps.tx_steers && !generic)
                    .map(|queue| queue as u16),
                on_the_way,
                adapts: config.link.depth.adapts(),
                ring_len: landing_ring_len(&plan.caps),
                max_message_len: config.receive.max_message_len,
                landing_len: config.memory.landing_len,
                exclusive: config.receive.exclusive,
                may_copy: config.link.mode == ModeRequest::Auto,
            },
        };
        let mut engine = parts.into_engine(port, &config, fixed, umem, &plan, admit, daemon, entropy);
        if !fixed.caps.witness
            && let Some(landing) = &mut engine.landing
        {
            landing.footprint = Footprint::unknown(&device.name, plan.chunk_len, plan.caps.kept_frames);
        }
        let mut endpoint = Endpoint {
            engine,
            idle: Idle::new(config.idle),
            waker: None,
            device,
            warnings,
            landing_start: plan.landing_arena,
        };
        // Posts the general frames, so that nothing is lost between here and the first poll.
        endpoint.poll();
        Ok(endpoint)
    }
}

fn effective_mtu(config: &EndpointConfig, device: &Device) -> Result<(u16, Vec<String>), OpenError> {
    let mut warnings = Vec::new();
    let available = device.mtu.min(u32::from(u16::MAX)) as u16;
    let wanted = config.link.mtu.unwrap_or(available);
    let name = &device.name;
    if wanted > available {
        return Err(OpenError::Config(format!(
            "{name} has an MTU of {available}, not {wanted}; ask for less, or raise it (ip link set {name} mtu \
             {wanted})"
        )));
    }
    if wanted > MTU_MAX {
        warnings.push(format!(
            "{name} has an MTU of {wanted}; LM uses {MTU_MAX}, so that no packet is longer than 65,535 bytes with its \
             Ethernet header"
        ));
    }
    Ok((wanted.min(MTU_MAX), warnings))
}
