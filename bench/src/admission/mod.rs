//! Measuring programs for the admission between hosts: a host that asks, a receiver that is granted to, a program that asks its own
//! daemon, and a sender of what must not be believed.
//!
//! `ask` speaks the sealed protocol with the cluster's key over UDP, as a daemon does: its engine is the daemons' own
//! ([`lm_protocol::admission::Node`]). `receive` and `hop` are programs of a daemon and speak to it over its socket
//! ([`lm_dataplane::ipc`]); no packet of data is sent in any of them.

mod ask;
mod flood;
mod host;
mod program;

use ask::{AskArgs, ask};
use flood::{FloodArgs, flood};
use program::{HopArgs, ReceiveArgs, hop, receive};

use crate::cli::{Failure, print};

/// The programs.
#[derive(Debug, clap::Subcommand)]
pub enum Program {
    /// Ask a host's daemon for sessions, as a daemon does, and measure how long grants take
    Ask(AskArgs),
    /// Receive nothing, so that a daemon has somebody to grant sessions for
    Receive(ReceiveArgs),
    /// Ask this host's daemon for sessions, and measure how long grants take
    Hop(HopArgs),
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
        Program::Receive(args) => receive(args, ready)?,
        Program::Hop(args) => print(&hop(args)?),
        Program::Flood(args) => print(&flood(args, ready)?),
    }
    Ok(())
}

use lm_protocol::control::Request;
use lm_protocol::geometry::{LinkShape, Wire};
use lm_protocol::window::WindowShape;

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
