//! Going on where an earlier daemon stopped: its gate is pinned, its programs run, its sessions flow.
//!
//! What both the gate and the state file have goes on: the sessions are adopted, for their receivers' programs have their lease to come
//! back; those that this host's programs send in are renewed. What only one of them has is over.

use std::time::Duration;

use lm_dataplane::ipc::{Control, Role};
use lm_protocol::admission::Ticket;
use lm_protocol::control::{ControlMessage, Grant, Request};
use lm_protocol::landing::SessionAdmission;
use lm_protocol::session::Session;

use super::Daemon;
use super::attachment::Attachment;
use super::calls::SENT_MAX;
use super::ground::{Holder, PLACES, Socket};
use super::program::{Member, Program, ProgramId, Sent};
use super::state::{InterfaceState, ProgramState, ReceivedState, State};
use crate::clock;

/// How long programs have to come back.
pub(crate) const AWAITED_FOR: Duration = Duration::from_secs(5);

impl Daemon {
    /// Takes over what the state has of an interface, as far as the gate agrees.
    pub(super) fn take_over(&mut self, position: usize, state: &State) {
        let namespace = super::attachment::namespace();
        let Some(attachment) = self.attachments[position].as_mut() else {
            return;
        };
        if !attachment.reopened {
            return;
        }
        let is_it = |known: &&InterfaceState| {
            known.index == attachment.index
                && known.namespace == namespace
                && known.address == attachment.address
        };
        let programs = state
            .interfaces
            .iter()
            .find(is_it)
            .map_or(&[][..], |known| &known.programs);
        for program in programs {
            let id = ProgramId(self.next_program);
            self.next_program += 1;
            if let Some(program) = awaited(attachment, id, program) {
                self.programs.insert(id, program);
            }
        }
        // What the gate lets through and nobody answers for.
        let known: Vec<u64> = (attachment.node.sessions())
            .filter(|(_, session)| session.has_place())
            .map(|(_, session)| session.grant.session_key)
            .collect();
        for open in attachment.ground.gate.open_sessions() {
            if !known.contains(&open.key) {
                tracing::warn!(queue = open.queue, "a session that nobody knows is closed");
                let closed = attachment.ground.gate.close_session(open.queue, open.row);
                closed.unwrap_or_else(|error| tracing::error!("cannot close it: {error}"));
            }
        }
        for queue in 0..attachment.ground.queues.len() as u16 {
            match attachment.ground.is_free(queue) {
                // A queue whose program is not known: as after its end.
                true => attachment.ground.vacate(queue),
                false => attachment.ground.want_quiet(queue),
            }
        }
        attachment.drive(|node, now, local, out| node.on_timer(now, local, out));
    }
}

/// A program that an earlier daemon knew, as far as its queues are there.
fn awaited(attachment: &mut Attachment, id: ProgramId, state: &ProgramState) -> Option<Program> {
    let now = clock::now();
    let queues = attachment.ground.queues.len();
    if state
        .channels
        .keys()
        .any(|&queue| usize::from(queue) >= queues || !attachment.ground.is_free(queue))
    {
        tracing::warn!(
            pid = state.credentials.pid,
            "a program's queues are not there any more: it is not awaited"
        );
        return None;
    }
    let mut member = Member {
        token: state.token,
        interface: attachment.stay.interface,
        data_port: state.data_port,
        general_queue: state.general_queue,
        landing_queue: state.landing_queue,
        memory: Default::default(),
        sent: Default::default(),
    };
    for (&queue, &(role, memory)) in &state.channels {
        let mut holder = Holder::new(id, state.data_port);
        holder.role = role;
        holder.away = true;
        if role == Some(Role::Landing) {
            holder.offer.clone_from(&state.offer);
        }
        attachment.ground.queues[usize::from(queue)] = Some(holder);
        attachment.ground.sockets[usize::from(queue)] = role.map(|_| Socket {
            uid: state.credentials.uid,
            len_bytes: memory,
            looked_for: false,
        });
        member.memory.insert(queue, memory);
    }
    let offering = state.offer.as_ref().map(|offer| offer.queue);
    if let Some(queue) = offering {
        let port = state.data_port;
        attachment.drive(|node, now, local, out| node.add_receiver(now, port, &[queue; PLACES], local, out));
    }
    let open = attachment.ground.gate.open_sessions();
    let mut adopted = 0;
    for received in &state.received {
        let Some((session, admission)) = session_of(received, *attachment.address.ip()) else {
            continue;
        };
        let queue = session.grant.landing_queue;
        let its_own = open.iter().find(|open| {
            open.queue == u32::from(queue) && open.row == admission.row() && open.key == admission.key
        });
        // Its program may have shut the gate for a moment: the session goes on, and the program opens it again.
        if !attachment.node.adopt(now, state.data_port, session) {
            continue;
        }
        adopted += 1;
        let open_until_ns = its_own.map_or(0, |open| open.active_until_ns);
        let open_until_ns = (!received.aside).then_some(open_until_ns);
        if let Err(error) = attachment.ground.adopt(&session, admission, open_until_ns) {
            tracing::error!(queue, "cannot go on with a session: {error}");
        }
        if !received.aside && its_own.is_none() {
            tracing::debug!(queue, "a session's gate is shut");
        }
    }
    for sent in state.sent.iter().take(SENT_MAX) {
        let (Some(request), Some(grant)) = (request_of(&sent.request), grant_of(&sent.grant)) else {
            continue;
        };
        let control = std::net::SocketAddrV4::new(*sent.to.ip(), attachment.address.port());
        let ticket = Ticket(sent.ticket);
        if attachment
            .node
            .resume(now, control, sent.to.port(), ticket, request, grant)
        {
            let (to, grant) = (sent.to, Some(grant));
            member.sent.insert(sent.ticket, Sent { to, request, grant });
        }
    }
    tracing::info!(
        pid = state.credentials.pid,
        data_port = state.data_port,
        received = adopted,
        sent = member.sent.len(),
        "a program is awaited"
    );
    let had = Some((member, now + AWAITED_FOR));
    Some(Program::new(state.credentials, None, had))
}

fn request_of(control: &Control) -> Option<Request> {
    match control.parse().ok()?.1 {
        ControlMessage::Request(request) => Some(request),
        _ => None,
    }
}

fn grant_of(control: &Control) -> Option<Grant> {
    match control.parse().ok()?.1 {
        ControlMessage::Grant(grant) => Some(grant),
        _ => None,
    }
}

/// A session as the earlier daemon granted it, and what it told the gate.
fn session_of(state: &ReceivedState, local_ip: std::net::Ipv4Addr) -> Option<(Session, SessionAdmission)> {
    let (request_id, _) = state.request.parse().ok()?;
    let (request, grant) = (request_of(&state.request)?, grant_of(&state.grant)?);
    let session = Session::granted_before(state.peer, request_id, request, grant, !state.aside);
    let admission = SessionAdmission {
        key: grant.session_key,
        wire: grant.layout.wire(),
        peer_ip: *state.peer.ip(),
        peer_port: grant
            .landing_port
            .map_or(request.data_port, std::num::NonZeroU16::get),
        local_ip,
        header_len: grant.layout.header_len(),
        payload_len: grant.layout.payload_len(),
        window_fragments: grant.window.fragments(),
        first_message: grant.first_message,
        active_until_ns: 0,
    };
    Some((session, admission))
}
