//! What programs ask, and what they get.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::time::Duration;

use lm_dataplane::ipc::{self, Asked, Call, Decision, Event, Offer, Reply, Role};
use lm_protocol::admission::{self, Ticket};
use lm_protocol::control::ControlMessage;

use super::Daemon;
use super::channels::Channel;
use super::connections::is_operator;
use super::ground::PLACES;
use super::program::{Pending, ProgramId, Sent};
use crate::clock;

/// Requests and sessions that a program may have as sender: so many tickets fit into one [`Reply::Joined`], with the keys of all that it
/// may have as receiver.
pub(super) const SENT_MAX: usize = 640;

/// Longest that a request may wait for its answer.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// An answer; none yet where the call takes longer.
pub(super) type Answer = Result<Option<(Reply, Vec<OwnedFd>)>, String>;

pub(super) fn done() -> Answer {
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

    pub(super) fn answer(&mut self, id: ProgramId, number: u32, answer: Answer) {
        let Some(program) = self.programs.get_mut(&id) else {
            return;
        };
        let told = match answer {
            Ok(Some((reply, beside))) => program.reply(number, reply, beside),
            Ok(None) => Ok(()),
            Err(what) => {
                let (pid, uid) = (program.credentials.pid, program.credentials.uid);
                tracing::info!(pid, uid, "refused: {what}");
                self.refusals += 1;
                program.reply(number, Reply::Refused(what), Vec::new())
            }
        };
        if let Err(broken) = told {
            self.drop_program(id, &broken.to_string());
        }
    }

    fn on_call(&mut self, id: ProgramId, number: u32, call: Call, beside: Vec<OwnedFd>) -> Answer {
        let sent_beside = match call {
            Call::Request { .. } => self.sent_beside(id),
            _ => 0,
        };
        let Some(program) = self.programs.get_mut(&id) else {
            return Ok(None);
        };
        let credentials = program.credentials;
        if let Call::Hello { version } = call {
            if version != ipc::VERSION {
                return Err(format!(
                    "the program speaks version {version} and this daemon version {}: use programs and daemon of the \
                     same release",
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
            let may_look =
                is_operator(credentials.uid) || self.config.allows(credentials.uid, credentials.gid);
            return match may_look {
                true => {
                    program.question = Some(number);
                    Ok(None)
                }
                false => Err(not_allowed(credentials.uid, credentials.gid)),
            };
        }
        if !self.config.allows(credentials.uid, credentials.gid) {
            return Err(not_allowed(credentials.uid, credentials.gid));
        }
        match call {
            Call::Join { .. } | Call::Rejoin { .. } if program.member.is_some() => {
                return Err("this connection has an endpoint already: open another one".to_owned());
            }
            Call::Join {
                interface,
                landing,
                mode,
            } => {
                program.pending = Some((
                    number,
                    Pending::Join {
                        interface,
                        landing,
                        mode,
                        beside,
                    },
                ));
                self.look_for_sockets();
                self.go_on(id);
                return Ok(None);
            }
            Call::Rejoin { token } => return self.rejoin(id, token, &beside),
            Call::Smooth { interface } => return self.smooth(id, &interface),
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
                multi_buffer,
                ring_lens,
            } => {
                let channel = Channel {
                    queue,
                    role,
                    registered_len,
                    chunk_len,
                    multi_buffer,
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
                    attachment
                        .drive(|node, now, local, out| node.remove_receiver(now, data_port, local, out));
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
                let Some((queue, row)) = attachment.ground.session_of(id, session_key) else {
                    return Err(no_session(session_key));
                };
                attachment
                    .ground
                    .shut(queue, row)
                    .map_err(|error| error.to_string())?;
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
                let now = clock::now();
                for progress in sessions {
                    // One that is over by now: its program will hear of it.
                    if attachment.ground.set_progress(id, &progress, now) && progress.is_heard {
                        attachment.node.touched(now, progress.session_key);
                    }
                }
                // One that is aside may be done.
                attachment.drive(|node, now, local, out| node.on_timer(now, local, out));
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
                let max = self.config.share(admission::Limits::default().outgoing as u64) as usize;
                if member.sent.len() >= SENT_MAX || sent_beside >= max {
                    return Err(format!(
                        "a program has {SENT_MAX} sessions and requests at most, and all of a user's {max}: end some"
                    ));
                }
                attachment.reachable(to)?;
                let control = SocketAddrV4::new(*to.ip(), attachment.address.port());
                let patience = Duration::from_millis(patience_ms.into()).min(PATIENCE_MAX);
                let decision = attachment
                    .drive(|node, now, local, out| {
                        node.request(now, control, to.port(), request, patience, local, out)
                    })
                    .map_err(|error| format!("{error}: end some"))?;
                if let admission::Decision::Requested(ticket) | admission::Decision::OneCopy(ticket) =
                    decision
                {
                    let grant = None;
                    member.sent.insert(ticket.0, Sent { to, request, grant });
                }
                let decision = match decision {
                    admission::Decision::Requested(ticket) => Decision::Requested(ticket.0),
                    admission::Decision::OneCopy(ticket) => Decision::OneCopy(ticket.0),
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
            Call::Vouch {
                to,
                sender_id,
                cookie,
            } => {
                let from = SocketAddrV4::new(*attachment.address.ip(), member.data_port);
                let word = self.key.word(from, to, sender_id, cookie);
                Ok(Some((Reply::Word(word), Vec::new())))
            }
            Call::Confirm {
                from,
                sender_id,
                cookie,
                word,
            } => {
                let to = SocketAddrV4::new(*attachment.address.ip(), member.data_port);
                match self.key.is_word(from, to, (sender_id, cookie), &word) {
                    true => done(),
                    false => Err(format!(
                        "{from} has no daemon that speaks for it with the cluster's key: start lm-admissiond there"
                    )),
                }
            }
            Call::Hello { .. }
            | Call::Join { .. }
            | Call::Rejoin { .. }
            | Call::Smooth { .. }
            | Call::Status => done(),
        }
    }
}

fn check_offer(offer: &Offer, landing_queue: Option<u16>, mtu: u16) -> Result<(), String> {
    if landing_queue != Some(offer.queue) {
        return Err(not_yours(offer.queue));
    }
    if offer.mtu > mtu || offer.mtu < 576 {
        return Err(format!(
            "the MTU of the interface is {mtu}, and {} was offered",
            offer.mtu
        ));
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
        "user {uid} (primary group {gid}) is not on the daemon's list: start it with --allow-uid {uid}, or \
         --allow-gid {gid}"
    )
}

pub(super) fn not_yours(queue: u16) -> String {
    format!("queue {queue} is not the program's for that")
}

pub(super) fn no_session(session_key: u64) -> String {
    format!("the program has no session {session_key:#018x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::ground::ROWS;

    #[test]
    fn whatever_a_program_has_it_can_be_told_when_it_comes_back() {
        let joined = ipc::Joined {
            token: u64::MAX,
            interface_index: u32::MAX,
            general_queue: Some(u16::MAX),
            landing_queue: Some(u16::MAX),
            generic: true,
            control_port: u16::MAX,
            received: vec![u64::MAX; ROWS],
            sent: vec![u32::MAX; SENT_MAX],
        };
        let said = ipc::Said::Reply(u32::MAX, Reply::Joined(joined));
        let len = postcard::to_stdvec(&said).unwrap().len();
        assert!(len <= ipc::MESSAGE_LEN_MAX, "{len}");
    }
}
