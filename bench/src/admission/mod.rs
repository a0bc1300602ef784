//! Measuring programs for the admission between hosts: a host that asks, and a sender of what must not be believed.
//!
//! Both speak the sealed protocol with the cluster's key over UDP, as a daemon does: their engine is the daemons' own
//! ([`lm_protocol::admission::Node`]).

mod ask;
mod flood;
mod host;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;

use lm_protocol::control::Request;
use lm_protocol::geometry::{LinkShape, Wire};
use lm_protocol::window::WindowShape;

use ask::{AskArgs, ask};
use flood::{FloodArgs, flood};

use crate::cli::{Failure, print};

/// The programs.
#[derive(Debug, clap::Subcommand)]
pub enum Program {
    /// Ask a host's daemon for sessions, as a daemon does, and measure how long grants take
    Ask(AskArgs),
    /// Send a daemon what it must not believe
    Flood(FloodArgs),
}

/// Runs a program and prints what it reports.
///
/// # Errors
///
/// A one-line reason when the key cannot be read, a socket not be opened, or the daemon not be reached.
pub fn run(program: &Program, ready: impl FnOnce()) -> Result<(), Failure> {
    match program {
        Program::Ask(args) => print(&ask(args)?),
        Program::Flood(args) => print(&flood(args, ready)?),
    }
    Ok(())
}

/// Whom the programs talk to, and as whom.
#[derive(Debug, Clone, clap::Args)]
pub struct Ends {
    /// Own address
    #[arg(long, value_name = "ADDRESS")]
    pub bind: Ipv4Addr,
    /// Address and control port of the daemon
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub to: SocketAddrV4,
    /// File with the cluster's key
    #[arg(long, value_name = "FILE")]
    pub key_file: PathBuf,
}

/// What every request asks for: a session for messages of 1 MiB.
fn request(sender_id: u64, data_port: u16) -> Request {
    Request {
        sender_id,
        data_port,
        mtu: 1500,
        wire: Wire::Lm,
        link: LinkShape::IPV4,
        max_message_len: 1 << 20,
        window: WindowShape::DEFAULT,
        messages_in_flight: 4,
        uncompleted_max: 0,
        capabilities: 0,
        delivery: Default::default(),
        integrity: Default::default(),
        lands: true,
    }
}
