//! Measuring programs for the admission between hosts: a host that asks, a receiver that is granted to, a program that asks its own
//! daemon, and a sender of what must not be believed.
//!
//! [`ask`] speaks the sealed protocol with the cluster's key over UDP, as a daemon does: its engine is the daemons' own
//! ([`lm_protocol::admission::Node`]). [`receive`] and [`hop`] are programs of a daemon and speak to it over its socket
//! ([`lm_dataplane::ipc`]); no packet of data is sent in any of them.

mod ask;
mod flood;
mod host;
mod program;

pub use ask::{AskArgs, AskReport, ask};
pub use flood::{FloodArgs, FloodReport, flood};
pub use program::{HopArgs, HopReport, ReceiveArgs, hop, receive};

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
        paced: false,
        delivery: Default::default(),
        integrity: Default::default(),
    }
}
