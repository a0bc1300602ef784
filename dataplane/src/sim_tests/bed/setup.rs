//! What a bed is made of: its configuration, and an engine on a port.

use super::*;

pub(crate) const PORT: u16 = 7168;
pub(crate) const IPS: [Ipv4Addr; 2] = [ip(0), ip(1)];

pub(crate) const fn ip(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, 0, host as u8 + 1)
}

/// Virtual time between two rounds.
pub(crate) const ROUND_NS: u64 = 7_000;

#[derive(Clone, Debug)]
pub(crate) struct BedConfig {
    pub(crate) mtu: u16,
    pub(crate) window: u32,
    /// General and landing queue of each host; on a switch the second counts for all but the first.
    pub(crate) queues: [Queues; 2],
    pub(crate) landing_len: u64,
    pub(crate) send_len: u64,
    pub(crate) max_message_len: u64,
    pub(crate) ring_start: u32,
    pub(crate) tx_in_flight: u32,
    pub(crate) on_the_way: u32,
    /// As [`Caps::tx_bound`], with which all of them get all the credit that there is.
    pub(crate) tx_bound: u32,
    /// Whether each host has no more in the device and on the way than keep both busy; on a switch the second counts for all but the first.
    pub(crate) adapts: [bool; 2],
    pub(crate) patience: Duration,
    pub(crate) lease: Duration,
    /// Fill and RX ring of the landing channels.
    pub(crate) landing_ring_len: u32,
    /// Whether the bed watches over free landing memory and zones' margins. Not where the soak does, or where nothing
    /// may be allocated.
    pub(crate) guarded: bool,
    /// What both hosts do for what they send.
    pub(crate) integrity: Integrity,
    pub(crate) checksum: Checksum,
    /// Whether IP fragments may land in zero-copy mode.
    pub(crate) exclusive: bool,
    /// What the device writes beside packets is found out before the first session.
    pub(crate) probing: bool,
    pub(crate) mode: ModeRequest,
    /// The cluster's key of each host, made of this byte; on a switch the second counts for all but the first.
    pub(crate) keys: [Option<u8>; 2],
    /// What the hosts' random numbers come from.
    pub(crate) seed: u64,
    pub(crate) wire: WireConfig,
}

pub(crate) const TWO_QUEUES: Queues = Queues {
    general: Some(0),
    landing: Some(1),
};

impl Default for BedConfig {
    fn default() -> BedConfig {
        BedConfig {
            mtu: 1500,
            window: 64,
            queues: [TWO_QUEUES; 2],
            landing_len: 2 << 20,
            send_len: 2 << 20,
            max_message_len: 8 << 20,
            ring_start: 0u32.wrapping_sub(100),
            tx_in_flight: 192,
            on_the_way: 192,
            tx_bound: 0,
            adapts: [false; 2],
            patience: Duration::from_secs(2),
            lease: Duration::from_secs(5),
            landing_ring_len: LANDING_RING_LEN,
            guarded: true,
            integrity: Integrity::Manifest,
            checksum: Checksum::None,
            exclusive: false,
            probing: false,
            mode: ModeRequest::ZeroCopy,
            keys: [None; 2],
            seed: 0,
            wire: WireConfig::default(),
        }
    }
}

/// The incarnation of a host: bit 0 says that there are digests.
pub(crate) fn sender_id(host: usize, integrity: Integrity) -> u64 {
    with_digests(0x1000_0000_0000 * (host as u64 + 1), integrity.has_digests())
}

pub(crate) fn data_address(host: usize) -> SocketAddrV4 {
    SocketAddrV4::new(ip(host), PORT)
}

/// A device that takes entries by the batch, and whose packets have a prefix.
pub(crate) const BATCHED: ZeroCopy = ZeroCopy {
    batch: 16,
    ring_len: 64,
    burst: 64,
    prefix_len: 12,
    pad_to: 0,
    lap: 1,
};

/// A wire between devices of one kind.
pub(crate) fn wire_of(semantics: Semantics) -> WireConfig {
    WireConfig {
        semantics: [semantics; 2],
        ..WireConfig::default()
    }
}

/// Loss, repetition and overtaking of everything.
pub(crate) fn bad_link(seed: u64) -> Impairments {
    Impairments {
        seed,
        loss_ppm: 60_000,
        duplicate_ppm: 60_000,
        duplicate_delay_max_ns: 3_000_000,
        reorder_ppm: 60_000,
        reorder_packets_max: 5,
        reorder_hold_max_ns: 1_000_000,
        ..Impairments::default()
    }
}

/// What an application of the bed's asks for.
pub(crate) fn endpoint_config(config: &BedConfig) -> EndpointConfig {
    EndpointConfig {
        patience: config.patience,
        integrity: config.integrity,
        link: LinkConfig {
            mtu: Some(config.mtu),
            mode: config.mode,
            checksum: config.checksum,
            ..LinkConfig::default()
        },
        receive: ReceiveConfig {
            max_message_len: config.max_message_len,
            exclusive: config.exclusive,
        },
        memory: MemoryConfig {
            landing_len: config.landing_len,
            send_len: config.send_len,
            ..MemoryConfig::default()
        },
        ..EndpointConfig::default()
    }
}

fn layout_of(mtu: u16) -> Layout {
    Layout::new(WireMode::Lm, mtu, LinkShape::IPV4).expect("an MTU of at least 576")
}

/// The memory of a host with such a device.
pub(crate) fn plan(config: &BedConfig, caps: Caps) -> MemoryPlan {
    let chunk_len = chunk_len_for(None, config.mtu.into());
    MemoryPlan::new(&endpoint_config(config), &layout_of(config.mtu), chunk_len, caps).expect("a plan")
}

/// An engine on any port.
pub(crate) fn engine_on<P: Port>(
    config: &BedConfig,
    host: usize,
    mut port: P,
    umem: Umem,
    plan: &MemoryPlan,
) -> Engine<P> {
    let queues = config.queues[host.min(1)];
    let mut endpoint = endpoint_config(config);
    endpoint.admission.key =
        config.keys[host.min(1)].map(|byte| ClusterKey::new(&[byte; 32]).expect("long enough"));
    if queues.landing.is_none() {
        endpoint.memory.landing_len = 0;
    }
    let tx_in_flight = InFlight {
        most: plan.in_flight(config.tx_in_flight),
        adapts: config.adapts[host.min(1)],
    };
    let parts =
        Parts::open(&mut port, plan, queues, config.landing_ring_len, tx_in_flight).expect("channels");
    let fixed = Fixed {
        local: port.side().local(),
        sender_id: sender_id(host, config.integrity),
        mac: MacAddr(simnic::mac_of(ip(host))),
        link: LinkShape::IPV4,
        mtu: config.mtu,
        layout: layout_of(config.mtu.min(MTU_IN_ONE_FRAME)),
        chunk_len: plan.chunk_len,
        caps: Caps {
            tx_bound: config.tx_bound,
            tx_steers: true,
            ..plan.caps
        },
        datagram: plan.datagram,
        integrity: config.integrity,
        checksum: plan.checksum,
        patience_ns: config.patience.as_nanos() as u64,
        device_moves: plan.device_moves,
        kept_frames: plan.caps.kept_frames,
        tx_in_flight,
        transmit_registered_len: plan.landing_arena,
        receives: Receives {
            tx_queue: (queues.landing).map(|queue| queue as u16),
            on_the_way: OnTheWay {
                held: config.on_the_way,
                most: config.on_the_way.saturating_mul(2),
            },
            adapts: config.adapts[host.min(1)],
            ring_len: config.landing_ring_len,
            max_message_len: endpoint.receive.max_message_len,
            landing_len: endpoint.memory.landing_len,
            exclusive: endpoint.receive.exclusive,
            may_copy: endpoint.link.mode == ModeRequest::Auto,
        },
    };
    let permit = Permit {
        max_message_len: config.max_message_len,
        lease: config.lease,
    };
    let entropy = Entropy::Seeded(config.seed << 8 | host as u64);
    let mut engine = parts.into_engine(
        port,
        &endpoint,
        fixed,
        umem,
        plan,
        Box::new(permit),
        None,
        entropy,
    );
    // So it calls itself towards its peer; others know it by other numbers.
    let peer = data_address(usize::from(host == 0));
    engine.fixed.sender_id = engine.fixed.sender_id.wrapping_sub(engine.peers.alias(peer));
    if config.probing {
        let landing = engine.landing.as_mut().expect("a landing queue");
        landing.footprint = Footprint::unknown("sim0", plan.chunk_len, plan.caps.kept_frames);
    }
    engine
}
