//! What programs ask, and what they get.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use lm_dataplane::daemon::ipc::{
    self, Asked, Call, Control, Decision, Event, Joined, Mode, Offer, Reply, Role,
};
use lm_ebpf::EffectiveMode;
use lm_protocol::admission::{self, Ticket};
use lm_protocol::control::ControlMessage;
use lm_protocol::time::Time;
use rustix::fs::SealFlags;
use rustix::net::SocketType;

use super::Daemon;
use super::ground::{PLACES, Place};
use super::program::{Member, Pending, Program, ProgramId, Sent};
use super::worker::{Bound, Done};
use super::{attachment::Attachment, random_u64};

/// Requests and sessions that a program may have as sender.
const SENT_MAX: usize = 1024;

/// Longest ring, in entries.
const RING_LEN_MAX: u32 = 1 << 16;

/// Longest that a request may wait for its answer.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// An answer; none yet where the call takes longer.
type Answer = Result<Option<(Reply, Vec<OwnedFd>)>, String>;

fn done() -> Answer {
    Ok(Some((Reply::Done, Vec::new())))
}

impl Daemon {
    /// A packet of a program.
    pub(super) fn on_packet(&mut self, id: ProgramId, bytes: &[u8], beside: Vec<OwnedFd>) {
        let Ok(Asked { number, call }) = postcard::from_bytes::<Asked>(bytes) else {
            self.drop_program(id, "it sent something that is no call");
            return;
        };
        self.calls += 1;
        let answer = self.on_call(id, number, call, beside);
        self.answer(id, number, answer);
    }

    fn answer(&mut self, id: ProgramId, number: u32, answer: Answer) {
        let Some(program) = self.programs.get_mut(&id) else { return };
        let told = match answer {
            Ok(Some((reply, beside))) => program.reply(number, reply, beside),
            Ok(None) => Ok(()),
            Err(what) => {
                tracing::info!(pid = program.credentials.pid, uid = program.credentials.uid, "refused: {what}");
                self.refusals += 1;
                program.reply(number, Reply::Refused(what), Vec::new())
            }
        };
        if let Err(broken) = told {
            self.drop_program(id, &broken.to_string());
        }
    }

    fn on_call(&mut self, id: ProgramId, number: u32, call: Call, beside: Vec<OwnedFd>) -> Answer {
        let Some(program) = self.programs.get_mut(&id) else { return Ok(None) };
        let credentials = program.credentials;
        if let Call::Hello { version } = call {
            if version != ipc::VERSION {
                return Err(format!(
                    "the program speaks version {version} and this daemon version {}: use programs and daemon of the same release",
                    ipc::VERSION
                ));
            }
            program.greeted = true;
            return done();
        }
        if !program.greeted {
            return Err("the first call must be Hello".to_owned());
        }
        if call == Call::Status {
            // Root and the daemon's own user may look, though they may not join.
            let may_look = credentials.uid == 0
                || credentials.uid == rustix::process::getuid().as_raw()
                || self.config.allows(credentials.uid, credentials.gid);
            return match may_look {
                true => Ok(Some((Reply::Status, vec![self.status_file()?]))),
                false => Err(not_allowed(credentials.uid, credentials.gid)),
            };
        }
        if !self.config.allows(credentials.uid, credentials.gid) {
            return Err(not_allowed(credentials.uid, credentials.gid));
        }
        match call {
            Call::Join {
                interface,
                landing,
                mode,
            } => return self.join(id, &interface, landing, mode, &beside),
            Call::Rejoin { token } => return self.rejoin(id, token, &beside),
            _ => {}
        }
        let Some(member) = program.member.as_mut() else {
            return Err("call Join before".to_owned());
        };
        let Some(attachment) = self.attachments[member.interface].as_mut() else {
            return Err("the interface is gone".to_owned());
        };
        match call {
            Call::OpenChannel {
                queue,
                role,
                registered_len,
                chunk_len,
                ring_lens,
            } => {
                let channel = Channel {
                    queue,
                    role,
                    registered_len,
                    chunk_len,
                    ring_lens,
                };
                self.open_channel(id, number, &channel, beside)
            }
            Call::CloseChannel { queue } => {
                if attachment.ground.held_by(queue, id).is_none() {
                    return Err(not_yours(queue));
                }
                member.memory.remove(&queue);
                let data_port = member.data_port;
                if member.landing_queue == Some(queue) {
                    attachment.drive(|node, now, local, out| node.remove_receiver(now, data_port, local, out));
                    attachment.ground.clear(queue);
                } else if member.general_queue == Some(queue) {
                    attachment.ground.clear(queue);
                } else {
                    attachment.ground.vacate(queue);
                }
                self.is_changed = true;
                done()
            }
            Call::Receive(offer) => {
                let data_port = member.data_port;
                let landing_queue = member.landing_queue;
                check_offer(&offer, landing_queue, attachment.ground.mtu)?;
                let queue = offer.queue;
                let Some(holder) = attachment.ground.held_by(queue, id) else {
                    return Err(not_yours(queue));
                };
                if holder.role != Some(Role::Landing) {
                    return Err(format!("queue {queue} has no landing channel: open it before"));
                }
                let is_first = holder.offer.replace(offer).is_none();
                if is_first {
                    attachment.drive(|node, now, local, out| {
                        node.add_receiver(now, data_port, &[queue; PLACES], local, out);
                    });
                }
                self.is_changed = true;
                done()
            }
            Call::CloseGate { session_key } => {
                let Some((queue, place)) = attachment.ground.session_of(id, session_key) else {
                    return Err(no_session(session_key));
                };
                attachment.ground.shut(queue, place).map_err(|error| error.to_string())?;
                done()
            }
            Call::Quiesce { queue } => {
                if attachment.ground.held_by(queue, id).is_none() {
                    return Err(not_yours(queue));
                }
                program.pending = Some((number, Pending::Quiesce { queue }));
                self.go_on(id);
                Ok(None)
            }
            Call::OpenGate {
                session_key,
                first_message,
            } => {
                let found = attachment.ground.session_of(id, session_key);
                let Some((queue, _)) = found else {
                    return Err(no_session(session_key));
                };
                let pending = Pending::OpenGate {
                    queue,
                    session_key,
                    first_message,
                };
                program.pending = Some((number, pending));
                self.go_on(id);
                Ok(None)
            }
            Call::Released { session_key } => {
                if !attachment.ground.release(id, session_key) {
                    return Err(no_session(session_key));
                }
                // Somebody may wait for the place.
                attachment.drive(|node, now, local, out| node.on_timer(now, local, out));
                done()
            }
            Call::Abort {
                session_key,
                delivered,
            } => {
                if !attachment.ground.set_delivered(id, session_key, delivered) {
                    return Err(no_session(session_key));
                }
                attachment.ground.expect_abort(Some(session_key));
                attachment.drive(|node, now, local, out| node.close(now, session_key, local, out));
                attachment.ground.expect_abort(None);
                self.is_changed = true;
                done()
            }
            Call::Touched { sessions } => {
                for (session_key, delivered) in sessions {
                    // One that is over by now: its program will hear of it.
                    if attachment.ground.set_delivered(id, session_key, delivered) {
                        attachment.node.touched(crate::clock::now(), session_key);
                    }
                }
                done()
            }
            Call::Request {
                to,
                request,
                patience_ms,
            } => {
                let Ok((_, ControlMessage::Request(request))) = request.parse() else {
                    return Err("the request is no LM_REQ".to_owned());
                };
                if request.data_port != member.data_port {
                    return Err("the request names another data port than the program's".to_owned());
                }
                if member.sent.len() >= SENT_MAX {
                    return Err(format!("a program has {SENT_MAX} sessions and requests at most: end some"));
                }
                attachment.reachable(to)?;
                let control = std::net::SocketAddrV4::new(*to.ip(), attachment.address.port());
                let patience = Duration::from_millis(patience_ms.into()).min(PATIENCE_MAX);
                let decision = attachment
                    .drive(|node, now, local, out| {
                        node.request(now, control, to.port(), request, patience, local, out)
                    })
                    .map_err(|error| format!("{error}: end some"))?;
                let decision = match decision {
                    admission::Decision::Requested(Ticket(ticket)) => {
                        let grant = None;
                        member.sent.insert(ticket, Sent { to, request, grant });
                        Decision::Requested(ticket)
                    }
                    admission::Decision::OneCopy => Decision::OneCopy,
                    admission::Decision::Cancel => Decision::Cancel,
                };
                Ok(Some((Reply::Requested(decision), Vec::new())))
            }
            Call::End { ticket, messages } => {
                let Some(sent) = member.sent.get(&ticket) else {
                    return Err(format!("there is no ticket {ticket}"));
                };
                // A request that is taken back is over at once, and nothing follows from the node.
                let is_asking = sent.grant.is_none();
                attachment.drive(|node, now, local, out| node.end(now, Ticket(ticket), messages, local, out));
                if is_asking && member.sent.remove(&ticket).is_some() {
                    let outcome = ipc::Outcome::Unconfirmed;
                    program
                        .tell(Event::Told { ticket, outcome })
                        .map_err(|broken| broken.to_string())?;
                }
                self.is_changed = true;
                done()
            }
            Call::Hello { .. } | Call::Join { .. } | Call::Rejoin { .. } | Call::Status => done(),
        }
    }

    fn join(&mut self, id: ProgramId, name: &str, landing: bool, mode: Mode, beside: &[OwnedFd]) -> Answer {
        let Some(position) = self.config.interfaces.iter().position(|known| known == name) else {
            return Err(format!(
                "this daemon does not serve {name}: it serves {}; start it with --interface {name}",
                self.config.interfaces.join(", ")
            ));
        };
        if self.programs.get(&id).is_some_and(|program| program.member.is_some()) {
            return Err("this connection has an endpoint already: open another one".to_owned());
        }
        let Some(attachment) = self.attachments[position].as_mut() else {
            return Err(format!("{name} is gone: wait for it to come back"));
        };
        let generic = attachment.ground.gate.mode() == EffectiveMode::Generic;
        match (mode, generic) {
            (Mode::ZeroCopy, _) => {
                return Err(
                    "zero-copy mode is not for programs without privileges, whose ring entries some drivers believe: run it with \
                     privileges and --admission embedded, or without --mode zero-copy"
                        .to_owned(),
                );
            }
            (Mode::Copy, true) => {
                return Err(format!(
                    "the gate of {name} is in the network stack: start the daemon with --mode copy, or use --mode generic"
                ));
            }
            (Mode::Generic, false) => {
                return Err(format!(
                    "the gate of {name} is in the driver: start the daemon with --mode generic, or use --mode copy"
                ));
            }
            _ => {}
        }
        let data_port = data_port(attachment, beside)?;
        let is_taken = |other: &Program| {
            let member = other.member.as_ref();
            member.is_some_and(|member| member.interface == position && member.data_port == data_port)
        };
        if self.programs.values().any(is_taken) {
            return Err(format!("port {data_port} of {name} is another program's: bind another one"));
        }
        let ground = &mut attachment.ground;
        let queues = 0..ground.queues.len() as u16;
        let free: Vec<u16> = queues.filter(|&queue| ground.is_free(queue)).collect();
        let landing_queue = free.last().copied().filter(|_| landing);
        let general_queue = free.first().copied().filter(|&queue| Some(queue) != landing_queue);
        if landing_queue.or(general_queue).is_none() {
            return Err(format!(
                "all {} queues of {name} are taken (`lm-admissiond status` shows by whom): end a program, or give the interface more \
                 queues (ethtool -L)",
                ground.queues.len()
            ));
        }
        for queue in landing_queue.into_iter().chain(general_queue) {
            ground.take(queue, id, data_port);
        }
        let token = random_u64();
        let joined = Joined {
            token,
            interface_index: attachment.index,
            general_queue,
            landing_queue,
            generic,
            control_port: attachment.address.port(),
            received: Vec::new(),
            sent: Vec::new(),
        };
        if let Some(program) = self.programs.get_mut(&id) {
            tracing::info!(
                interface = name,
                pid = program.credentials.pid,
                uid = program.credentials.uid,
                data_port,
                ?general_queue,
                ?landing_queue,
                "joined"
            );
            program.member = Some(Member {
                token,
                interface: position,
                data_port,
                general_queue,
                landing_queue,
                memory: Default::default(),
                sent: Default::default(),
            });
        }
        self.is_changed = true;
        Ok(Some((Reply::Joined(joined), Vec::new())))
    }

    /// A program of an earlier daemon comes back.
    fn rejoin(&mut self, id: ProgramId, token: u64, beside: &[OwnedFd]) -> Answer {
        let uid = self.programs.get(&id).map(|program| program.credentials.uid);
        let is_it = |program: &Program| {
            program.connection.is_none()
                && Some(program.credentials.uid) == uid
                && program.member.as_ref().is_some_and(|member| member.token == token)
        };
        let found = self.programs.iter().find(|(_, program)| is_it(program)).map(|(&id, _)| id);
        let Some(old) = found else {
            return Err("nothing is left of what an earlier daemon gave: join anew".to_owned());
        };
        let member = self.programs[&old].member.clone();
        let Some(member) = member else { return Ok(None) };
        let Some(attachment) = self.attachments[member.interface].as_mut() else {
            return Err("the interface is gone".to_owned());
        };
        if data_port(attachment, beside)? != member.data_port {
            return Err(format!("the socket is not bound to the program's port {}", member.data_port));
        }
        attachment.ground.renumber(old, id);
        let sessions = attachment.node.sessions();
        let received = sessions
            .filter(|(port, _)| *port == member.data_port)
            .map(|(_, session)| session.grant.session_key)
            .collect();
        let joined = Joined {
            token,
            interface_index: attachment.index,
            general_queue: member.general_queue,
            landing_queue: member.landing_queue,
            generic: attachment.ground.gate.mode() == EffectiveMode::Generic,
            control_port: attachment.address.port(),
            received,
            sent: member.sent.keys().copied().collect(),
        };
        self.programs.remove(&old);
        if let Some(program) = self.programs.get_mut(&id) {
            tracing::info!(pid = program.credentials.pid, data_port = member.data_port, "came back");
            program.member = Some(member);
        }
        self.is_changed = true;
        Ok(Some((Reply::Joined(joined), Vec::new())))
    }

    fn open_channel(&mut self, id: ProgramId, number: u32, channel: &Channel, mut beside: Vec<OwnedFd>) -> Answer {
        let memory_max = self.config.memory_max_bytes;
        let Some(program) = self.programs.get_mut(&id) else { return Ok(None) };
        let Some(member) = program.member.as_mut() else { return Ok(None) };
        let Some(attachment) = self.attachments[member.interface].as_mut() else { return Ok(None) };
        let &Channel { queue, role, .. } = channel;
        let is_right = match role {
            Role::General => member.general_queue == Some(queue),
            Role::Landing => member.landing_queue == Some(queue),
            Role::Transmit => attachment.ground.is_free(queue) || attachment.ground.held_by(queue, id).is_some(),
        };
        if !is_right {
            return Err(match role {
                Role::Transmit => format!("queue {queue} is another program's, or the interface has none of that number"),
                _ => not_yours(queue),
            });
        }
        let others = member.memory_bytes() - member.memory.get(&queue).copied().unwrap_or(0);
        if channel.registered_len > memory_max.saturating_sub(others) {
            return Err(format!(
                "a program may have {memory_max} bytes of registered memory: use less, or start the daemon with a larger --memory-max"
            ));
        }
        let memory = match (beside.pop(), beside.is_empty()) {
            (Some(memory), true) => memory,
            _ => return Err("the memory must be beside the call, and nothing else".to_owned()),
        };
        channel.check(&memory)?;
        let ground = &mut attachment.ground;
        if ground.is_free(queue) {
            ground.take(queue, id, member.data_port);
        }
        // What the program has there goes first; its sessions go on, behind a closed gate.
        if let Some(holder) = ground.held_by(queue, id) {
            let open: Vec<usize> = (0..PLACES)
                .filter(|&place| matches!(holder.places[place], Place::Open { .. }))
                .collect();
            for place in open {
                ground.shut(queue, place).map_err(|error| error.to_string())?;
            }
        }
        ground.gate.unregister_xsk(queue.into()).map_err(|error| error.to_string())?;
        member.memory.insert(queue, channel.registered_len);
        let pending = Pending::Channel {
            queue,
            role,
            xsk: None,
        };
        program.pending = Some((number, pending));
        let bind = channel.binding(attachment.index, memory);
        if let Err(error) = self.workers.bind(id, queue, bind) {
            program.pending = None;
            return Err(format!("no thread to open the channel on: {error}"));
        }
        Ok(None)
    }

    /// What another thread has done.
    pub(super) fn on_done(&mut self, done: Done) {
        match done {
            Done::Quiet { stay, queue, quiet } => {
                let attachment = self.attachments[stay.interface].as_mut();
                // Its interface may have gone meanwhile.
                let Some(attachment) = attachment.filter(|attachment| attachment.stay == stay) else {
                    return;
                };
                attachment.ground.finish_quiesce(queue, quiet);
                // Somebody may wait for a place.
                attachment.drive(|node, now, local, out| node.on_timer(now, local, out));
                let waiting: Vec<ProgramId> = self
                    .programs
                    .iter()
                    .filter(|(_, program)| program.pending.is_some())
                    .map(|(&id, _)| id)
                    .collect();
                for id in waiting {
                    self.go_on(id);
                }
            }
            Done::Bound { program: id, queue, xsk } => {
                let Some(program) = self.programs.get_mut(&id) else { return };
                let Some((number, Pending::Channel { xsk: slot, .. })) = &mut program.pending else {
                    return;
                };
                match xsk {
                    Ok(bound) => {
                        *slot = Some(bound);
                        self.go_on(id);
                    }
                    Err(what) => {
                        let number = *number;
                        program.pending = None;
                        program.readable = true;
                        if let Some(member) = &mut program.member {
                            member.memory.remove(&queue);
                        }
                        self.answer(id, number, Err(what));
                    }
                }
            }
        }
    }

    /// Goes on with the call of a program that could not be answered yet.
    fn go_on(&mut self, id: ProgramId) {
        let Some(program) = self.programs.get_mut(&id) else { return };
        let Some((number, pending)) = program.pending.take() else { return };
        let attachment = (program.member.as_ref()).and_then(|member| self.attachments[member.interface].as_mut());
        let Some(attachment) = attachment else { return };
        let ground = &mut attachment.ground;
        let is_ready = match &pending {
            Pending::Channel { xsk: None, .. } => false,
            Pending::Channel { queue, role, .. } => *role == Role::Transmit || ground.gate.is_ready((*queue).into()),
            Pending::Quiesce { queue } | Pending::OpenGate { queue, .. } => ground.is_quiet(*queue),
        };
        if !is_ready {
            program.pending = Some((number, pending));
            return;
        }
        program.readable = true;
        let answer = match pending {
            Pending::Channel {
                queue,
                role,
                xsk: Some(bound),
            } => {
                self.is_changed = true;
                install(attachment, id, queue, role, bound)
            }
            Pending::Channel { .. } | Pending::Quiesce { .. } => done(),
            Pending::OpenGate {
                queue,
                session_key,
                first_message,
            } => open_gate(attachment, id, queue, session_key, first_message),
        };
        self.answer(id, number, answer);
    }

    /// Tells programs what the nodes and gates have for them.
    pub(super) fn deliver(&mut self) {
        use super::ground::News;
        let mut telling: Vec<(ProgramId, Event)> = Vec::new();
        for position in 0..self.attachments.len() {
            let Some(attachment) = self.attachments[position].as_mut() else { continue };
            for news in std::mem::take(&mut attachment.ground.news) {
                self.is_changed = true;
                match news {
                    News::Opened {
                        program,
                        session_key,
                        place,
                    } => {
                        let session = attachment
                            .node
                            .sessions()
                            .find(|(_, session)| session.grant.session_key == session_key)
                            .map(|(_, session)| *session);
                        // One that ended in the same turn: its program never heard of it.
                        let Some(session) = session else {
                            attachment.ground.release(program, session_key);
                            continue;
                        };
                        let request_id = session.request_id;
                        let event = Event::Opened {
                            from: session.data_peer(),
                            place,
                            request: Control::new(request_id, &ControlMessage::Request(session.request)),
                            grant: Control::new(request_id, &ControlMessage::Grant(session.grant)),
                        };
                        telling.push((program, event));
                    }
                    News::Closed {
                        program,
                        session_key,
                        messages,
                    } => {
                        let is_released = attachment.ground.session_of(program, session_key).is_none_or(|(queue, place)| {
                            matches!(
                                attachment.ground.place(queue, place),
                                Some(Place::Free | Place::Closing { released: true, .. })
                            )
                        });
                        if !is_released {
                            let event = Event::Closed {
                                session_key,
                                messages,
                            };
                            telling.push((program, event));
                        }
                    }
                }
            }
            for (Ticket(ticket), outcome, fallback) in std::mem::take(&mut attachment.told) {
                let has_ticket = |program: &Program| {
                    let member = program.member.as_ref();
                    member.is_some_and(|member| member.interface == position && member.sent.contains_key(&ticket))
                };
                let found = self.programs.iter_mut().find(|(_, program)| has_ticket(program));
                let Some((&id, program)) = found else { continue };
                self.is_changed = true;
                let control = |message| Control::new(ticket, &message);
                let mut goes_on = None;
                let outcome = match outcome {
                    admission::Outcome::Granted(grant) => {
                        goes_on = Some(grant);
                        ipc::Outcome::Granted(control(ControlMessage::Grant(grant)))
                    }
                    admission::Outcome::Rejected(reject) => ipc::Outcome::Rejected(
                        control(ControlMessage::Reject(reject)),
                        fallback == admission::Fallback::OneCopy,
                    ),
                    admission::Outcome::Unreachable => ipc::Outcome::Unreachable,
                    admission::Outcome::Incompatible(_) => ipc::Outcome::Incompatible,
                    admission::Outcome::Lost => ipc::Outcome::Lost,
                    admission::Outcome::Ended { delivered } => ipc::Outcome::Ended { delivered },
                    _ => ipc::Outcome::Unconfirmed,
                };
                if let Some(member) = &mut program.member {
                    match goes_on {
                        Some(grant) => {
                            if let Some(sent) = member.sent.get_mut(&ticket) {
                                sent.grant = Some(grant);
                            }
                        }
                        None => {
                            member.sent.remove(&ticket);
                        }
                    }
                }
                telling.push((id, Event::Told { ticket, outcome }));
            }
        }
        for (id, event) in telling {
            let told = self.programs.get_mut(&id).map(|program| program.tell(event));
            if let Some(Err(broken)) = told {
                self.drop_program(id, &broken.to_string());
            }
        }
    }

    /// A program is gone, or is treated as if it were: everything that it had goes.
    pub(super) fn drop_program(&mut self, id: ProgramId, why: &str) {
        let Some(program) = self.programs.remove(&id) else { return };
        if let Some(connection) = &program.connection {
            self.forget(connection.raw_fd());
        }
        let Some(member) = program.member else { return };
        tracing::info!(pid = program.credentials.pid, data_port = member.data_port, "a program ends: {why}");
        self.is_changed = true;
        let Some(attachment) = self.attachments[member.interface].as_mut() else { return };
        for holder in attachment.ground.queues.iter_mut().flatten().filter(|holder| holder.program == id) {
            // Nobody is left to be told of sessions that end now.
            holder.away = true;
        }
        attachment.drive(|node, now, local, out| {
            node.remove_receiver(now, member.data_port, local, out);
            for &ticket in member.sent.keys() {
                node.end(now, Ticket(ticket), 0, local, out);
            }
        });
        for queue in 0..attachment.ground.queues.len() as u16 {
            if attachment.ground.held_by(queue, id).is_some() {
                attachment.ground.vacate(queue);
            }
        }
    }

    /// Programs that did not come back to the new daemon in time.
    pub(super) fn give_up_awaited(&mut self, now: Time) {
        let late = |program: &Program| program.connection.is_none() && program.awaited_until.is_some_and(|until| until <= now);
        let late: Vec<ProgramId> = (self.programs.iter())
            .filter(|(_, program)| late(program))
            .map(|(&id, _)| id)
            .collect();
        for id in late {
            self.drop_program(id, "it did not come back");
        }
    }
}

/// What [`Call::OpenChannel`] asks for.
struct Channel {
    queue: u16,
    role: Role,
    registered_len: u64,
    chunk_len: u32,
    ring_lens: [u32; 4],
}

impl Channel {
    fn check(&self, memory: &OwnedFd) -> Result<(), String> {
        if !(2048..=4096).contains(&self.chunk_len) {
            return Err("a chunk has 2048 to 4096 bytes".to_owned());
        }
        let is_ring = |len: &u32| len.is_power_of_two() && *len <= RING_LEN_MAX;
        if !self.ring_lens.iter().all(is_ring) {
            return Err(format!("a ring's length is a power of two, up to {RING_LEN_MAX}"));
        }
        if self.registered_len == 0 || !self.registered_len.is_multiple_of(4096) {
            return Err("whole pages are registered, and at least one".to_owned());
        }
        let stat = rustix::fs::fstat(memory).map_err(|error| format!("the memory is no file: {error}"))?;
        if (stat.st_size as u64) < self.registered_len {
            return Err(format!(
                "the memory has {} bytes, and {} are to be registered",
                stat.st_size, self.registered_len
            ));
        }
        const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
        let is_sealed = rustix::fs::fcntl_get_seals(memory).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let is_huge = rustix::fs::fstatfs(memory).is_ok_and(|found| found.f_type as u64 == HUGETLBFS_MAGIC);
        match is_sealed || is_huge {
            true => Ok(()),
            false => Err("the memory can shrink: seal it (F_SEAL_SHRINK)".to_owned()),
        }
    }

    /// Registers the memory and binds the XSK: on a thread of its own, because pinning takes its time, and the kernel lets a queue go late.
    fn binding(
        &self,
        interface_index: u32,
        memory: OwnedFd,
    ) -> impl FnOnce() -> Result<Bound, String> + Send + 'static + use<> {
        let [fill_len, rx_len, tx_len, completion_len] = self.ring_lens;
        let (queue, registered_len, chunk_len) = (self.queue, self.registered_len, self.chunk_len);
        move || {
            let _ = (interface_index, memory, fill_len, rx_len, tx_len, completion_len, queue, registered_len, chunk_len);
            Err("bind_for".to_owned())
        }
    }
}

/// Lets the gate know a channel, and gives it to its program.
fn install(attachment: &mut Attachment, id: ProgramId, queue: u16, role: Role, bound: Bound) -> Answer {
    let ground = &mut attachment.ground;
    let Some(holder) = ground.held_by(queue, id) else {
        return Err(not_yours(queue));
    };
    let (old, data_port) = (holder.role.replace(role), holder.data_port);
    let mut beside = vec![bound.fd];
    if role != Role::Transmit {
        let told = |error: lm_ebpf::GateError| error.to_string();
        let gate = &mut ground.gate;
        let number = u32::from(queue);
        let gate_role = match role {
            Role::General => lm_ebpf::Role::General,
            _ => lm_ebpf::Role::Landing,
        };
        let mut installed = || -> Result<OwnedFd, String> {
            gate.set_data_port(number, data_port).map_err(told)?;
            if old != Some(role) {
                gate.set_role(number, gate_role).map_err(told)?;
            }
            gate.register_xsk(number, beside[0].as_fd()).map_err(told)?;
            let log = gate.log_fd(number).map_err(told)?.try_clone_to_owned();
            log.map_err(|error| error.to_string())
        };
        match installed() {
            Ok(log) => beside.push(log),
            Err(what) => {
                ground.clear(queue);
                return Err(what);
            }
        }
    }
    let zero_copy = bound.zero_copy;
    Ok(Some((Reply::ChannelOpened { zero_copy }, beside)))
}

fn open_gate(
    attachment: &mut Attachment,
    id: ProgramId,
    queue: u16,
    session_key: u64,
    first_message: u32,
) -> Answer {
    let ground = &mut attachment.ground;
    let found = ground.session_of(id, session_key);
    let place = found.and_then(|(_, place)| ground.place(queue, place));
    let Some(Place::Open { admission, .. }) = place else {
        return Err(no_session(session_key));
    };
    admission.first_message = first_message;
    let admission = *admission;
    ground.gate.open_session(queue.into(), &admission).map_err(|error| error.to_string())?;
    done()
}

/// The port of the socket beside a call, if it shows that the port is the program's.
fn data_port(attachment: &Attachment, beside: &[OwnedFd]) -> Result<u16, String> {
    let own = attachment.address.ip();
    let wanted = || format!("beside the call must be a UDP socket that is bound to {own}");
    let [socket] = beside else { return Err(wanted()) };
    if rustix::net::sockopt::socket_type(socket) != Ok(SocketType::DGRAM) {
        return Err(wanted());
    }
    let bound = rustix::net::getsockname(socket).ok();
    let bound = bound.and_then(|address| std::net::SocketAddrV4::try_from(address).ok());
    match bound {
        Some(bound) if bound.ip() == own && bound.port() != 0 => match bound.port() == attachment.address.port() {
            true => Err("that is the control port: bind another one".to_owned()),
            false => Ok(bound.port()),
        },
        Some(bound) => Err(format!("the socket is bound to {bound}, not to {own} of {}", attachment.name)),
        None => Err(wanted()),
    }
}

fn check_offer(offer: &Offer, landing_queue: Option<u16>, mtu: u16) -> Result<(), String> {
    if landing_queue != Some(offer.queue) {
        return Err(not_yours(offer.queue));
    }
    if offer.mtu > mtu || offer.mtu < 576 {
        return Err(format!("the MTU of the interface is {mtu}, and {} was offered", offer.mtu));
    }
    if !offer.window_max.is_power_of_two() {
        return Err("the longest window must be a power of two".to_owned());
    }
    if !(2048..=4096).contains(&offer.chunk_len) {
        return Err("a chunk has 2048 to 4096 bytes".to_owned());
    }
    match offer.allow.iter().all(|(_, len)| *len <= 32) {
        true => Ok(()),
        false => Err("an IPv4 prefix has 0 to 32 bits".to_owned()),
    }
}

fn not_allowed(uid: u32, gid: u32) -> String {
    format!(
        "user {uid} (primary group {gid}) is not on the daemon's list: start it with --allow-uid {uid}, or --allow-gid {gid}"
    )
}

fn not_yours(queue: u16) -> String {
    format!("queue {queue} is not the program's for that")
}

fn no_session(session_key: u64) -> String {
    format!("the program has no session {session_key:#018x}")
}
