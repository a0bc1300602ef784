//! Opening: how an endpoint's memory is divided, which queues carry what, and how an engine is put together on
//! any [`Port`]. [`crate::endpoint`] uses it on the kernel's, the engine's tests on the simulated one.

use std::time::{Duration, Instant};

use lm_protocol::geometry::Layout;
use lm_protocol::session::Admit;
use lm_protocol::zone::{XDP_PACKET_HEADROOM, ZoneShape};

use crate::admission::Admissions;
use crate::applying::Requests;
use crate::arena::{Arena, pages_len};
use crate::bounds::{
    DATAGRAM_LEN_MAX, GENERAL_FRAMES, InFlight, LANDING_LEN_SHARED, OUTGOING_MAX, PEERS_MAX, TRANSMIT_FRAMES,
    TRANSMIT_RING_LEN, ZONES_MAX,
};
use crate::capture::Capture;
use crate::checksum::Checksum;
use crate::config::EndpointConfig;
use crate::counters::Counters;
use crate::daemon::Daemon;
use crate::engine::{Engine, Fixed};
use crate::entropy::Entropy;
use crate::error::OpenError;
use crate::footprint::Footprint;
use crate::frames::FramePool;
use crate::handlers::Handlers;
use crate::introductions::Introductions;
use crate::landing::{Sessions, sure_len};
use crate::landing_channel;
use crate::landing_side::{Flow, LandingSide, Past, Watching};
use crate::looks::Looks;
use crate::memory::Umem;
use crate::notices::Notices;
use crate::over::{Device, PortMemory};
use crate::own_node::OwnNode;
use crate::packet_memory::PacketMemory;
use crate::peer::Peers;
use crate::port::{Caps, EffectiveMode, Port, PortError, QueueSpec, Role, RxQueue};
use crate::scheduler::{Scheduler, Transmit};
use crate::sending::Sending;
use crate::small::{General, Small};
use crate::stewarded::Stewarded;
use crate::told::Told;

/// Frames of their own for landing entries in zero-copy mode that have no place in a zone: three at each end of a 2 MiB page, and
/// one for each packet too many. At 2 KiB each, 512 KiB.
const SPARE_FRAMES: u32 = 256;

/// Fill and RX ring of the general channel: everything that can be posted fits (invariant I3d).
const GENERAL_RING_LEN: u32 = GENERAL_FRAMES;

/// How the UMEM is divided, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryPlan {
    pub(crate) chunk_len: u32,
    pub(crate) transmit_frames: u64,
    pub(crate) send_arena: u64,
    pub(crate) send_len: u64,
    pub(crate) landing_arena: u64,
    /// Landing memory registered at the start, and the most that can be.
    pub(crate) landing_len: u64,
    pub(crate) landing_len_max: u64,
    /// Where frames for entries that have no place in a landing zone are, and how many: zero-copy mode.
    pub(crate) spare_frames: u64,
    pub(crate) spare_count: u32,
    /// How packets come to the landing queue.
    pub(crate) caps: Caps,
    /// The device reads and writes the memory itself, whether messages land or not.
    pub(crate) device_moves: bool,
    /// Where long datagrams are received, in that case.
    pub(crate) datagram: u64,
    /// Descriptors that the longest packet takes on a TX ring.
    pub(crate) pieces_max: u32,
    pub(crate) checksum: Checksum,
}

impl MemoryPlan {
    /// ```text
    ///  | general frames | transmit frames | send arena | landing arena ...            |
    ///  |<----- registered by every channel ----------->|<- by the landing channel ->|
    /// ```
    /// Where entries may be for no fragment, spare frames lie before the landing arena; room for one datagram, where packets may be longer
    /// than a frame. `layout`: of the longest packets that are sent or land; `caps`: the device's, of which the plan says the capacity.
    pub(crate) fn new(
        config: &EndpointConfig,
        layout: &Layout,
        chunk_len: u32,
        caps: Caps,
    ) -> Result<MemoryPlan, OpenError> {
        let checksum = config.link.checksum;
        if checksum == Checksum::Offload && !caps.sums {
            return Err(OpenError::Config(
                "the driver sums no packets of AF_XDP up in zero-copy mode (netdev's xsk-features lack tx-checksum); \
                 use copy mode (--mode copy), or --checksum integrated"
                    .to_owned(),
            ));
        }
        // A layout's payload is a multiple of 8: a packet of another wire may be longer by less than that.
        let packet_len = u32::from(layout.max_frame_len()) + 7;
        let frame_capacity = chunk_len - XDP_PACKET_HEADROOM;
        let several = caps.witness && packet_len > frame_capacity;
        let frame_len = chunk_len.next_power_of_two();
        let transmit_frames = u64::from(GENERAL_FRAMES) * u64::from(frame_len);
        let send_arena = transmit_frames + u64::from(TRANSMIT_FRAMES) * u64::from(frame_len);
        let send_len = pages_len(config.memory.send_len);
        let spare_frames = send_arena + send_len;
        let lands = config.memory.landing_len > 0;
        let spare_count = match lands {
            true => spare_frame_count(&caps),
            false => 0,
        };
        let datagram = spare_frames + pages_len(u64::from(spare_count) * u64::from(frame_len));
        let landing_arena = datagram
            + match several {
                true => DATAGRAM_LEN_MAX,
                false => 0,
            };
        let (landing_len, landing_len_max) = match config.memory.landing_len {
            0 => (0, 0),
            len => {
                let limit = config.receive.max_message_len.min(layout.max_message_len());
                let largest = layout.message(limit)?;
                let zone_len = ZoneShape::new(&largest, chunk_len, caps.prefix_len).total_len();
                let len = pages_len(len);
                (
                    len,
                    sure_len(zone_len).max(len).max(pages_len(LANDING_LEN_SHARED)),
                )
            }
        };
        Ok(MemoryPlan {
            chunk_len,
            transmit_frames,
            send_arena,
            send_len,
            landing_arena,
            landing_len,
            landing_len_max,
            spare_frames,
            spare_count,
            caps: Caps {
                capacity: if several { frame_capacity } else { 0 },
                ..match lands {
                    true => caps,
                    false => Caps {
                        kept_frames: caps.kept_frames,
                        page_ends: caps.page_ends,
                        tx_bound: caps.tx_bound,
                        tx_steers: caps.tx_steers,
                        sums: caps.sums,
                        ahead: caps.ahead,
                        ..Caps::copying(0)
                    },
                }
            },
            device_moves: !caps.witness,
            datagram,
            pieces_max: packet_len.div_ceil(chunk_len - u32::from(checksum.room())),
            checksum,
        })
    }

    /// Whether messages land in zero-copy mode.
    pub(crate) fn is_zero_copy(&self) -> bool {
        !self.caps.witness
    }

    /// Packets in several frames, where some are longer than one.
    pub(crate) fn is_multi_buffer(&self) -> bool {
        self.caps.capacity > 0
    }

    /// What a port is told of it.
    pub(crate) fn port_memory<'a>(&self, umem: &'a Umem) -> PortMemory<'a> {
        PortMemory {
            mapping: umem.mapping(),
            chunk_len: self.chunk_len,
            multi_buffer: self.is_multi_buffer(),
            tx_metadata_len: self.checksum.room().into(),
        }
    }

    /// Descriptors on a TX ring and not completed, of as many as asked for: the longest packet must be possible.
    pub(crate) fn in_flight(&self, wanted: u32) -> u32 {
        wanted.max(self.pieces_max)
    }

    pub(crate) fn total_len(&self) -> u64 {
        self.landing_arena + self.landing_len_max
    }

    /// What is registered at the start.
    pub(crate) fn registered_len(&self) -> u64 {
        self.landing_arena + self.landing_len
    }
}

/// Frames for entries that have no place in a landing zone.
pub(crate) const fn spare_frame_count(caps: &Caps) -> u32 {
    let placeless = if caps.witness { 0 } else { SPARE_FRAMES };
    // Those that fill a lap up are out while the next ones are posted.
    placeless + 3 * (caps.lap - 1)
}

/// Which queues carry what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queues {
    pub(crate) general: Option<u32>,
    pub(crate) landing: Option<u32>,
}

impl Queues {
    pub(crate) fn choose(config: &EndpointConfig, device: &Device) -> Result<Queues, OpenError> {
        let queues = device.queues.max(1);
        if let Some(queue) = config.link.queue.filter(|&queue| queue >= queues) {
            return Err(OpenError::Config(format!(
                "{} has {queues} receive queue(s), so there is no queue {queue}; choose one below {queues} \
                 (--queue), or add queues (ethtool -L {} combined N)",
                device.name, device.name
            )));
        }
        let landing = config.link.queue.unwrap_or(u32::from(queues > 1));
        Ok(match (config.memory.landing_len, landing) {
            (0, _) => Queues {
                general: Some(0),
                landing: None,
            },
            // One queue for both: it lands, and small traffic uses the kernel's UDP socket.
            (_, 0) => Queues {
                general: None,
                landing: Some(0),
            },
            (_, landing) => Queues {
                general: Some(0),
                landing: Some(landing),
            },
        })
    }
}

/// The parts of an engine while it is being opened.
pub(crate) struct Parts<P: Port> {
    pub(crate) frames: FramePool,
    pub(crate) scheduler: Scheduler<P::Tx>,
    pub(crate) general: Option<General<P::Rx>>,
    pub(crate) landing: Option<LandingSide<P::Rx>>,
    pub(crate) landing_queues: Vec<u16>,
}

/// How long the queues of a program that has just ended are waited for before an endpoint opens. The kernel releases them from a work item
/// that takes the network configuration's lock (`xp_release_deferred`, net/xdp/xsk_buff_pool.c): beside programs that use the cores, and
/// namespaces that come and go, that took up to a second. Nobody waits for us yet, so more than [`BIND_PATIENCE`](crate::xsk::BIND_PATIENCE).
const QUEUE_PATIENCE: Duration = Duration::from_secs(5);

fn open_once_free<P: Port>(port: &mut P, spec: &QueueSpec) -> Result<(P::Rx, P::Tx), PortError> {
    let deadline = Instant::now() + QUEUE_PATIENCE;
    loop {
        match port.open(spec) {
            Err(PortError::Busy(_)) if Instant::now() < deadline => {}
            opened => {
                let queue = spec.queue;
                let (rx, tx) = opened?;
                return Ok((rx.ok_or(PortError::NoQueueOpen { queue })?, tx));
            }
        }
    }
}

impl<P: Port> Parts<P> {
    pub(crate) fn open(
        port: &mut P,
        plan: &MemoryPlan,
        queues: Queues,
        landing_ring_len: u32,
        in_flight: InFlight,
    ) -> Result<Parts<P>, OpenError> {
        let mut scheduler = Scheduler::new();
        let mut general = None;
        if let Some(queue) = queues.general {
            let spec = QueueSpec {
                queue,
                role: Role::General,
                copies: false,
                registered_len: plan.landing_arena,
                capacity: plan.caps.capacity,
                rx_len: GENERAL_RING_LEN,
                tx_len: TRANSMIT_RING_LEN,
            };
            let (rx, tx) = open_once_free(port, &spec)?;
            general = Some(General::new(queue, rx));
            scheduler.add_general(Transmit::new(queue, tx, in_flight, plan.checksum));
        }
        let mut landing = None;
        if let Some(queue) = queues.landing {
            let registered_len = plan.registered_len();
            let spec = landing_channel::queue_spec(
                queue,
                registered_len,
                landing_ring_len,
                plan.caps.capacity,
                !plan.is_zero_copy(),
            );
            let (rx, tx) = open_once_free(port, &spec)?;
            let spare = (plan.spare_count > 0).then(|| {
                FramePool::new(
                    plan.spare_frames,
                    plan.chunk_len.next_power_of_two(),
                    plan.spare_count,
                )
            });
            landing = Some(LandingSide {
                queue,
                sessions: Sessions::new(rx.accepted(), landing_ring_len, plan.caps, spare),
                past: Past::new(),
                arena: Arena::new(plan.landing_arena, plan.landing_len, ZONES_MAX),
                placing: None,
                drops: rx.drops(),
                rx,
                registered_len,
                is_open: true,
                failed_ns: [None; 2],
                transmit: scheduler.add(Transmit::new(queue, tx, in_flight, plan.checksum)),
                woken: false,
                flow: Flow::default(),
                footprint: Footprint::Known,
                led_ns: None,
                watching: Watching::default(),
            });
        }
        Ok(Parts {
            frames: FramePool::new(0, plan.chunk_len.next_power_of_two(), GENERAL_FRAMES),
            scheduler,
            general,
            landing,
            landing_queues: queues.landing.iter().map(|&queue| queue as u16).collect(),
        })
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn into_engine(
        self,
        port: P,
        config: &EndpointConfig,
        fixed: Fixed,
        umem: Umem,
        plan: &MemoryPlan,
        admit: Box<dyn Admit + Send>,
        daemon: Option<Daemon>,
        mut entropy: Entropy,
    ) -> Engine<P> {
        // Everything that can be outside at once: frames as messages, zones and who reads them early, unsent frames and regions.
        let outside = GENERAL_FRAMES as usize + 2 * ZONES_MAX + TRANSMIT_FRAMES as usize + OUTGOING_MAX;
        // Where a daemon grants, nobody else does.
        let capture = config.link.capture.clone().map(Capture::new);
        let (data, has_daemon) = (fixed.local, daemon.is_some());
        let boot_id = entropy.draw();
        let lands = port.effective_mode() != EffectiveMode::CopyGeneric;
        let introductions = Introductions::new(&mut entropy, config.admission.allow.clone());
        let node = (!has_daemon).then(|| {
            OwnNode::new(
                data,
                config.admission.key.clone(),
                config.patience,
                admit,
                boot_id,
                lands,
            )
        });
        let mut engine = Engine {
            port,
            fixed,
            memory: PacketMemory::new(umem, outside, capture),
            small: Small::new(
                self.general,
                self.frames,
                fixed.kept_frames,
                Handlers::new(fixed.mtu),
            ),
            sending: Sending::new(
                self.scheduler.walking(fixed.caps.tx_steers),
                // Each frame is shorter by the room before it.
                FramePool::new(
                    plan.transmit_frames + u64::from(plan.checksum.room()),
                    plan.chunk_len.next_power_of_two(),
                    TRANSMIT_FRAMES,
                ),
                (plan.send_arena, plan.send_len),
                data,
                (fixed.layout, fixed.chunk_len, fixed.checksum),
                fixed.caps.page_ends,
            ),
            landing: self.landing,
            peers: Peers::new(introductions.cookies()),
            admission: Admissions {
                requests: Requests::new(PEERS_MAX),
                node,
                stewarded: Stewarded::new(daemon),
                introductions,
                entropy,
                key: config.admission.key.clone(),
            },
            told: Told::new(GENERAL_FRAMES as usize + ZONES_MAX),
            counters: Counters::default(),
            notices: Notices::new(),
            looks: Looks::default(),
        };
        engine.open_to_requests(&self.landing_queues);
        engine
    }
}
