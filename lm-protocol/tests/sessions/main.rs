//! Admission step by step, under virtual time.

mod asking;
mod granting;
mod places;
#[path = "../receiver/mod.rs"]
mod receiver;

use lm_protocol::control::*;
use lm_protocol::geometry::{Layout, LinkShape, Wire};
use lm_protocol::session::*;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::VERSION;
use receiver::*;
use std::net::SocketAddrV4;
use std::time::Duration;

fn grant_of(reply: Option<ControlMessage>) -> Grant {
    match reply {
        Some(ControlMessage::Grant(grant)) => grant,
        other => panic!("no grant: {other:?}"),
    }
}

fn reject_of(reply: Option<ControlMessage>) -> Reject {
    match reply {
        Some(ControlMessage::Reject(reject)) => reject,
        other => panic!("no rejection: {other:?}"),
    }
}

fn some_grant() -> Grant {
    let mut queues = Queues::default();
    let message = ControlMessage::Request(request(1));
    grant_of(Grantor::new(&[3]).handle(peer(1), 9, &message, Time::ZERO, &mut permit(), &mut queues))
}

// ---- the applicant --------------------------------------------------------------------------------------------------
