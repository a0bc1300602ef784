//! LM itself, used as its users would use it: through [`lm_dataplane::Endpoint`] alone.
//!
//! What is measured of it is in [`crate::suite`]; here are programs that know every byte of what they send, and an endpoint's options.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use clap::{Args, ValueEnum};
use lm_dataplane::{
    Admission, AdmissionConfig, ConnectError, ConnectOptions, Depth, Endpoint, EndpointConfig, IdleStrategy,
    LinkConfig, MemoryConfig, PeerId, ReceiveConfig, Session,
};

use crate::cli::{ChecksumOption, DeliveryOption, Failure, IntegrityOption, Mode};
use crate::link;

/// Send and landing memory that a program takes at least, and for how many messages of the length measured.
const MEMORY_LEN: u64 = 4 << 20;

/// How an endpoint waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Idle {
    /// Never gives its core away: both sides have one of their own.
    Spin,
    /// The endpoint's default: spin, then yield, then sleep.
    Default,
}

/// Options of an endpoint.
#[derive(Debug, Clone, Args)]
pub struct EndpointArgs {
    /// Network interface [default: the route's]
    #[arg(long, short, value_name = "IF")]
    pub interface: Option<String>,
    /// How packets pass between driver and program
    #[arg(long, value_enum, default_value_t = Mode::Auto)]
    pub mode: Mode,
    /// How to wait
    #[arg(long, value_enum, default_value_t = Idle::Spin)]
    pub idle: Idle,
    /// Largest IP packet to send and accept, in bytes [default: the interface's MTU]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(576..))]
    pub mtu: Option<u16>,
    /// Packets in the device and on the way at once: full, auto, or a number
    #[arg(long, value_name = "PACKETS", value_parser = crate::cli::parse_depth, default_value = "full")]
    pub depth: Depth,
    /// What is in the UDP checksum of packets that leave
    #[arg(long, value_enum, default_value_t = ChecksumOption::None)]
    pub checksum: ChecksumOption,
    /// Take IP fragments in zero-copy mode, too: of their sender's traffic, what cards hash by addresses alone is lost then
    #[arg(long)]
    pub exclusive: bool,
    /// Who may use the interface: auto, embedded, or the path of an admission daemon's socket
    #[arg(long, value_name = "WHO", value_parser = crate::cli::parse_admission, default_value = "auto")]
    pub admission: Admission,
}

impl EndpointArgs {
    /// Opens an endpoint that sends or receives `messages` of `message_len` bytes at a time.
    ///
    /// # Errors
    ///
    /// Why there is none, in one line.
    pub fn open(
        &self,
        towards: Option<Ipv4Addr>,
        port: u16,
        message_len: u64,
        messages: u32,
        integrity: IntegrityOption,
    ) -> Result<Endpoint, Failure> {
        let interface = match (&self.interface, towards) {
            (Some(name), _) => name.clone(),
            (None, Some(to)) => link::interface_towards(to)?,
            (None, None) => link::default_interface()?,
        };
        // Headers between the fragments and zone margins come to less than an eighth and 16 KiB a message.
        let memory = u64::from(messages) * (message_len + message_len / 8 + (16 << 10));
        let config = EndpointConfig {
            interface,
            port,
            integrity: integrity.into(),
            idle: match self.idle {
                Idle::Spin => IdleStrategy::SPIN,
                Idle::Default => IdleStrategy::default(),
            },
            link: LinkConfig {
                mode: self.mode.into(),
                mtu: self.mtu,
                depth: self.depth,
                checksum: self.checksum.into(),
                ..LinkConfig::default()
            },
            receive: ReceiveConfig {
                max_message_len: message_len.max(1 << 20),
                exclusive: self.exclusive,
            },
            memory: MemoryConfig {
                landing_len: memory.max(MEMORY_LEN),
                send_len: memory.max(MEMORY_LEN),
                ..MemoryConfig::default()
            },
            admission: AdmissionConfig {
                by: self.admission.clone(),
                ..AdmissionConfig::default()
            },
            ..EndpointConfig::default()
        };
        let endpoint = Endpoint::open(&config)?;
        for warning in endpoint.status().warnings() {
            eprintln!("lm-bench: {warning}");
        }
        Ok(endpoint)
    }
}

/// Connects, with a session only where messages do not fit one packet.
///
/// # Errors
///
/// Why not, in one line.
pub fn connect(
    endpoint: &mut Endpoint,
    to: SocketAddrV4,
    options: &ConnectOptions,
) -> Result<PeerId, ConnectError> {
    let without = ConnectOptions {
        session: Session::Later,
        ..*options
    };
    let peer = endpoint.connect(to, &without)?;
    if endpoint.peer(peer).max_message_len() < options.max_message_len {
        endpoint.peer(peer).open_session(options)?;
    }
    Ok(peer)
}

/// What the measuring programs ask a receiver for.
pub fn session_options(
    message_len: u64,
    messages_in_flight: u32,
    delivery: DeliveryOption,
) -> ConnectOptions {
    ConnectOptions {
        max_message_len: message_len,
        messages_in_flight,
        delivery: delivery.into(),
        timeout: Duration::from_secs(3),
        ..ConnectOptions::default()
    }
}
