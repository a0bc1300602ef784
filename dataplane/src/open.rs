//! Opening an endpoint on an interface: which mode it can have there, then memory, gate, channels and steering.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use lm_cards::{Demand, Facts, Interface, Obstacle, chunk_len_for, judge, rx_ring_len};
use lm_ebpf::CpuCheck;
use lm_protocol::geometry::{Layout, LinkShape, MIN_MTU, Wire};
use lm_protocol::session::{Admit, Permit};
use lm_protocol::window::WindowShape;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::lm::with_digests;

use crate::bounds::{LANDING_RING_LEN, OnTheWay, PREFIX_LEN_MAX, TX_IN_FLIGHT_MAX};
use crate::config::EndpointConfig;
use crate::daemon::Daemon;
use crate::endpoint::Endpoint;
use crate::engine::{Fixed, Receives};
use crate::entropy::Entropy;
use crate::error::OpenError;
use crate::footprint::Footprint;
use crate::idle::Idle;
use crate::kernel::{KernelNic, KernelNicConfig};
use crate::memory::{HugePages, Umem};
use crate::open_daemon::daemon_for;
use crate::opening::{MemoryPlan, Parts, Queues};
use crate::port::{Caps, EffectiveMode, ModeRequest, Port};

/// Packets on the way to a veth device: its ring has 256 entries. With the rest of them at a sender whose own completions keep that ring
/// from overflowing four times as many: the receiver's kernel work goes on while the next credit is under way.
const ON_THE_WAY_VETH: OnTheWay = OnTheWay { held: 192, most: 768 };

/// The largest at which a packet goes in one frame whatever the driver does: a chunk of 4096 bytes has 256 bytes of headroom, and veth and
/// several drivers keep another 320 at its end (`skb_shared_info`). Messages of one fragment are no longer than that.
pub(crate) const MTU_IN_ONE_FRAME: u16 = 3498;

/// The largest MTU used: with an Ethernet header a packet is 65,535 bytes long.
const MTU_MAX: u16 = u16::MAX - 14;

/// Fill and RX ring of a landing channel on veth, where at most twice [`ON_THE_WAY_VETH`] are posted: short rings stay in the cache.
pub(crate) const LANDING_RING_LEN_VETH: u32 = 2048;

/// How long a granted session lives without a sign of life from its sender.
const LEASE: Duration = Duration::from_secs(5);

impl Endpoint {
    /// Opens an endpoint that admits every sender for messages up to `config.max_message_len`.
    ///
    /// # Errors
    /// [`OpenError`]; nothing stays attached.
    pub fn open(config: &EndpointConfig) -> Result<Endpoint, OpenError> {
        let everybody = Permit {
            max_message_len: config.max_message_len,
            lease: LEASE,
        };
        Endpoint::open_with(config, Box::new(everybody))
    }

    /// Opens an endpoint that asks `admit` about every sender.
    ///
    /// # Errors
    /// [`OpenError`]; nothing stays attached.
    pub fn open_with(config: &EndpointConfig, admit: Box<dyn Admit + Send>) -> Result<Endpoint, OpenError> {
        let daemon = daemon_for(config)?;
        if let Some(client) = daemon {
            let unplaced = EndpointConfig {
                general_queue: 0,
                landing_queue: None,
                ..config.clone()
            };
            let mut site = Site::look(&unplaced)?;
            let opened = Opened::by_daemon(config, client, &mut site)?;
            let warnings = site.warnings.clone();
            return opened.into_endpoint(site, warnings, admit);
        }
        let site = Site::look(config)?;
        let mut warnings = site.warnings.clone();
        let opened = match config.mode {
            ModeRequest::ZeroCopy => Opened::zero_copy(config, &site)?,
            ModeRequest::Copy | ModeRequest::Generic => Opened::copy(config, &site)?,
            ModeRequest::Auto if !site.may_have_zero_copy() => Opened::copy(config, &site)?,
            ModeRequest::Auto => match Opened::zero_copy(config, &site) {
                Ok(opened) => opened,
                Err(error) => {
                    warnings.push(format!("no zero-copy mode: {error}"));
                    Opened::copy(config, &site)?
                }
            },
        };
        warnings.extend(opened.warnings.iter().cloned());
        opened.into_endpoint(site, warnings, admit)
    }
}

/// Where an endpoint is to be opened.
pub(crate) struct Site {
    pub(crate) interface: Interface,
    link: LinkShape,
    /// Of the longest packets, and of those that go in one frame.
    pub(crate) layout: Layout,
    layout_in_one_frame: Layout,
    pub(crate) mtu: u16,
    window: WindowShape,
    pub(crate) queues: Queues,
    pub(crate) veth: bool,
    /// Packets that the device holds on each receive queue.
    rx_ring_len: u32,
    warnings: Vec<String>,
}

impl Site {
    fn look(config: &EndpointConfig) -> Result<Site, OpenError> {
        let interface = Interface::by_name(&config.interface)?;
        let link = LinkShape::IPV4;
        interface.check(u32::from(MIN_MTU))?;
        let (mtu, mut warnings) = effective_mtu(config, &interface)?;
        let layout = Layout::new(Wire::Lm, mtu, link)?;
        let layout_in_one_frame = Layout::new(Wire::Lm, mtu.min(MTU_IN_ONE_FRAME), link)?;
        let window = WindowShape::new(config.window_fragments)
            .map_err(|error| OpenError::Config(format!("{error}; choose a power of two, for example 256")))?;
        let queues = Queues::choose(config, &interface)?;
        if crate::route::default_route_interfaces().is_ok_and(|found| found.contains(&interface.index)) {
            warnings.push(format!(
                "{} carries the default route: attaching an XDP program may interrupt its link for a moment",
                interface.name
            ));
        }
        Ok(Site {
            veth: interface.kind.as_deref() == Some("veth") || interface.driver.as_deref() == Some("veth"),
            rx_ring_len: rx_ring_len(&interface),
            interface,
            link,
            layout,
            layout_in_one_frame,
            mtu,
            window,
            queues,
            warnings,
        })
    }

    pub(crate) fn local_ip(&self) -> Ipv4Addr {
        let address = self.interface.primary_address();
        address.expect("checked: the interface has an IPv4 address")
    }

    /// Packets handed to the driver and not yet completed, per channel.
    fn tx_in_flight(&self, plan: &MemoryPlan) -> u32 {
        plan.in_flight(match self.veth {
            true => ON_THE_WAY_VETH.held,
            false => TX_IN_FLIGHT_MAX,
        })
    }

    /// Whether it is worth asking: most virtual devices have none, which is no news.
    fn may_have_zero_copy(&self) -> bool {
        Facts::read(&self.interface).is_ok_and(|facts| facts.xdp.is_some_and(|features| features.zero_copy()))
    }
}

/// What was opened, before an engine is made of it.
pub(crate) struct Opened {
    config: EndpointConfig,
    plan: MemoryPlan,
    umem: Umem,
    pub(crate) nic: KernelNic,
    pub(crate) daemon: Option<Daemon>,
    parts: Parts<KernelNic>,
    landing_ring_len: u32,
    warnings: Vec<String>,
}

impl Opened {
    /// In copy mode.
    fn copy(config: &EndpointConfig, site: &Site) -> Result<Opened, OpenError> {
        let plan = MemoryPlan::new(
            config,
            &site.layout,
            chunk_len_for(None, u32::from(site.mtu)),
            Caps::copying(0),
        )?;
        let mut opened = Opened::open(config.clone(), plan, site)?;
        if !site.veth
            && let (Some(_), Some(landing)) = (site.queues.general, site.queues.landing)
            && let Err(error) = opened.nic.begin_steering(&site.interface, &[landing])
        {
            opened.warnings.push(format!(
                "fragments may come to another queue than {landing}, and are copied once more there: {error}"
            ));
        }
        Ok(opened)
    }

    /// In zero-copy mode, or not at all.
    fn zero_copy(config: &EndpointConfig, site: &Site) -> Result<Opened, OpenError> {
        let lands = site.queues.landing.is_some();
        let facts = Facts::read(&site.interface).map_err(OpenError::System)?;
        let chunk_len = chunk_len_for(facts.driver.as_deref(), u32::from(site.mtu));
        let caps = Caps {
            // What it writes beside packets shows before the first session ([`Probe`]).
            prefix_len: PREFIX_LEN_MAX,
            kept_frames: 2 * facts.rx_ring_len,
            lap: facts.landing_lap(),
            ..Caps::device()
        };
        let plan = MemoryPlan::new(config, &site.layout, chunk_len, caps)?;
        let demand = Demand {
            chunk_len,
            memory_len: plan.registered_len(),
        };
        let matters = |obstacle: &Obstacle| match obstacle {
            // It is switched off.
            Obstacle::RelaxedOrdering { .. } => false,
            // A sender's memory is read alone, and what it receives there does not overlap.
            Obstacle::OneQueue { .. } | Obstacle::FcsKept { .. } => lands,
            obstacle => obstacle.forbids_zero_copy(),
        };
        if let Some(obstacle) = judge(&facts, &demand).into_iter().find(matters) {
            return Err(OpenError::NoZeroCopy(obstacle));
        }
        if lands && site.queues.general.is_none() {
            return Err(OpenError::NoZeroCopy(Obstacle::OneQueue {
                interface: site.interface.name.clone(),
            }));
        }
        let config = EndpointConfig {
            huge_pages: HugePages::On,
            ..config.clone()
        };
        let mut opened = Opened::open(config, plan, site)?;
        if opened.nic.effective_mode() != EffectiveMode::ZeroCopy {
            return Err(OpenError::NoZeroCopy(Obstacle::NoZeroCopy {
                interface: site.interface.name.clone(),
                driver: facts.driver.unwrap_or_else(|| "unknown".into()),
            }));
        }
        // A module that is part of the kernel has no such file.
        let is_module = Path::new("/sys/module/virtio_net/initstate").exists();
        if facts.driver.as_deref() == Some("virtio_net") && is_module {
            tracing::warn!(
                "virtio_net is a loaded module, so that a fault of Linux 6.13 to 7.3 can make it lose all that is sent in zero-copy mode; \
                 if nothing arrives, use copy mode (--mode copy)"
            );
        }
        let steered = opened
            .nic
            .begin_steering(&site.interface, site.queues.landing.as_slice());
        if lands {
            steered.map_err(|error| OpenError::Port(error.into()))?;
        }
        Ok(opened)
    }

    fn open(config: EndpointConfig, plan: MemoryPlan, site: &Site) -> Result<Opened, OpenError> {
        // Long messages are rare and huge pages dear: what they need is taken when a sender announces some.
        let reserved_len = match config.huge_pages {
            HugePages::On => plan.registered_len(),
            HugePages::Auto | HugePages::Off => plan.total_len(),
        };
        let umem = Umem::reserved(plan.total_len(), reserved_len, config.huge_pages).map_err(|source| {
            OpenError::Memory {
                len: reserved_len,
                source,
            }
        })?;
        let local_ip = site.local_ip();
        let nic = KernelNic::open(&KernelNicConfig {
            interface_index: site.interface.index,
            local_ip,
            port: config.port,
            mode: match plan.device_moves {
                true => ModeRequest::ZeroCopy,
                false => config.mode,
            },
            landing_queues: site.queues.landing.as_slice(),
            cpu_check: CpuCheck::Rps,
            mapping: umem.mapping(),
            chunk_len: plan.chunk_len,
            multi_buffer: plan.is_multi_buffer(),
            poll_queues: config.poll_queues && site.veth,
        })?;
        Opened::assemble(config, plan, umem, nic, site)
    }

    /// With a NIC that has no channels yet.
    pub(crate) fn assemble(
        config: EndpointConfig,
        plan: MemoryPlan,
        umem: Umem,
        mut nic: KernelNic,
        site: &Site,
    ) -> Result<Opened, OpenError> {
        let landing_ring_len = match site.veth {
            true => LANDING_RING_LEN_VETH,
            false => LANDING_RING_LEN,
        };
        let tx_in_flight = site.tx_in_flight(&plan);
        let parts = Parts::open(&mut nic, &plan, site.queues, landing_ring_len, tx_in_flight)?;
        Ok(Opened {
            warnings: nic.warnings().to_vec(),
            config,
            plan,
            umem,
            nic,
            daemon: None,
            parts,
            landing_ring_len,
        })
    }

    fn into_endpoint(
        self,
        site: Site,
        warnings: Vec<String>,
        admit: Box<dyn Admit + Send>,
    ) -> Result<Endpoint, OpenError> {
        let Opened {
            config,
            plan,
            umem,
            mut nic,
            daemon,
            parts,
            landing_ring_len,
            ..
        } = self;
        let veth = site.veth;
        let generic = nic.effective_mode() == EffectiveMode::CopyGeneric;
        let mut entropy = Entropy::Kernel;
        let fixed = Fixed {
            local: nic.side().local(),
            sender_id: with_digests(entropy.draw(), config.integrity.has_digests()),
            mac: MacAddr(site.interface.mac),
            link: site.link,
            mtu: site.mtu,
            layout: site.layout_in_one_frame,
            chunk_len: plan.chunk_len,
            caps: Caps {
                tx_bound: if veth { ON_THE_WAY_VETH.held } else { 0 },
                tx_steers: veth,
                ..plan.caps
            },
            datagram: plan.datagram,
            window: site.window,
            integrity: config.integrity,
            patience_ns: config.patience.as_nanos() as u64,
            kept_frames: plan.caps.kept_frames,
            device_moves: plan.device_moves,
            tx_in_flight: site.tx_in_flight(&plan),
            transmit_registered_len: plan.landing_arena,
            receives: Receives {
                tx_queue: (site.queues.landing)
                    .filter(|_| veth)
                    .map(|queue| queue as u16 + u16::from(generic)),
                one_processor: generic,
                on_the_way: match config.packets_on_the_way {
                    Some(packets) => OnTheWay::by_anybody(packets),
                    None if veth => ON_THE_WAY_VETH,
                    None if !plan.is_zero_copy() => OnTheWay::by_anybody(u32::MAX),
                    // A packet that meets no descriptor of the card is lost, however many entries are posted behind.
                    None => OnTheWay::by_anybody(site.rx_ring_len / 4 * 3),
                },
                ring_len: landing_ring_len,
                max_message_len: config.max_message_len,
                landing_len: config.landing_len,
                in_order: config.in_order,
                exclusive: config.exclusive,
                may_copy: config.mode == ModeRequest::Auto,
            },
        };
        let idle = Idle::new(config.idle);
        let mut engine = parts.into_engine(nic, &config, fixed, umem, &plan, admit, daemon, entropy);
        if !fixed.caps.witness
            && let Some(landing) = &mut engine.landing
        {
            landing.footprint =
                Footprint::unknown(&site.interface.name, plan.chunk_len, plan.caps.kept_frames);
        }
        let mut endpoint = Endpoint {
            engine,
            clock: Instant::now(),
            idle,
            interface: site.interface,
            warnings,
            landing_start: plan.landing_arena,
        };
        // Posts the general frames, so that nothing is lost between here and the first poll.
        endpoint.poll();
        Ok(endpoint)
    }
}

fn effective_mtu(config: &EndpointConfig, interface: &Interface) -> Result<(u16, Vec<String>), OpenError> {
    let mut warnings = Vec::new();
    let available = interface.mtu.min(u32::from(u16::MAX)) as u16;
    let wanted = config.mtu.unwrap_or(available);
    if wanted > available {
        return Err(OpenError::Config(format!(
            "{} has an MTU of {available}, not {wanted}; ask for less, or raise it (ip link set {} mtu {wanted})",
            interface.name, interface.name
        )));
    }
    if wanted > MTU_MAX {
        warnings.push(format!(
            "{} has an MTU of {wanted}; LM uses {MTU_MAX}, so that no packet is longer than 65,535 bytes with its Ethernet header",
            interface.name
        ));
    }
    Ok((wanted.min(MTU_MAX), warnings))
}
