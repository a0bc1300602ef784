//! What programs ask, and what they get.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::time::Duration;

use lm_dataplane::ipc::{self, Asked, Call, Decision, Event, Offer, Reply, Role, Said};
use lm_protocol::admission::{self, Ticket};
use lm_protocol::control::ControlMessage;

use super::Daemon;
use super::connections::is_operator;
use super::ground::PLACES;
use super::program::{Pending, ProgramId, Sent};
use crate::clock;
use crate::socket::Credentials;

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
        let mut pending = Pending {
            number,
            call,
            beside,
            xsk: None,
        };
        match self.on_call(id, &pending.call, &mut pending.beside) {
            Ok(None) => {
                if let Some(program) = self.programs.get_mut(&id) {
                    program.pending = Some(pending);
                }
                self.go_on(id);
            }
            answer => self.answer(id, number, answer),
        }
    }

    pub(super) fn answer(&mut self, id: ProgramId, number: u32, answer: Answer) {
        let Some(program) = self.programs.get_mut(&id) else {
            return;
        };
        let (reply, beside) = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => return,
            Err(what) => {
                let (pid, uid) = (program.credentials.pid, program.credentials.uid);
                tracing::info!(pid, uid, "refused: {what}");
                self.refusals += 1;
                (Reply::Refused(what), Vec::new())
            }
        };
        if let Err(broken) = program.say(&Said::Reply(number, reply), beside) {
            self.drop_program(id, &broken.to_string());
        }
    }

    /// Does what a call asks for, or what it begins with: one without an answer yet is taken up again by [`Daemon::go_on`].
    fn on_call(&mut self, id: ProgramId, call: &Call, beside: &mut Vec<OwnedFd>) -> Answer {
        let sent_beside = match call {
            Call::Request { .. } => self.sent_beside(id),
            _ => 0,
        };
        let Some(program) = self.programs.get_mut(&id) else {
            return Ok(None);
        };
        let Credentials { uid, gid, .. } = program.credentials;
        match *call {
            Call::Hello { version } if version == ipc::VERSION => {
                program.greeted = true;
                return done();
            }
            Call::Hello { version } => {
                return Err(format!(
                    "the program speaks version {version} and this daemon version {}: use programs and daemon of the \
                     same release",
                    ipc::VERSION
                ));
            }
            _ if !program.greeted => return Err("the first call must be Hello".to_owned()),
            Call::Status if is_operator(uid) => return Ok(None),
            _ if !self.config.allows(uid, gid) => {
                return Err(format!(
                    "user {uid} (primary group {gid}) is not on the daemon's list: start it with --allow-uid {uid}, or \
                     --allow-gid {gid}"
                ));
            }
            Call::Status => return Ok(None),
            Call::Join { .. } | Call::Rejoin { .. } if program.member.is_some() => {
                return Err("this connection has an endpoint already: open another one".to_owned());
            }
            Call::Join { .. } => {
                self.look_for_sockets();
                return Ok(None);
            }
            Call::Rejoin { token } => return self.rejoin(id, token, beside),
            Call::Smooth { ref interface } => return self.smooth(id, interface),
            _ => {}
        }
        let Some(member) = program.member.as_mut() else {
            return Err("call Join before".to_owned());
        };
        let Some(attachment) = self.attachments[member.interface].as_mut() else {
            return Err("the interface is gone".to_owned());
        };
        let ground = &mut attachment.ground;
        match *call {
            Call::OpenChannel(ref channel) => return self.open_channel(id, channel, beside),
            Call::CloseChannel { queue } => {
                ground.held_by(queue, id)?;
                member.memory.remove(&queue);
                let data_port = member.data_port;
                if member.landing_queue == Some(queue) {
                    attachment
                        .drive(|node, now, local, out| node.remove_receiver(now, data_port, local, out));
                    attachment.ground.clear(queue);
                } else if member.general_queue == Some(queue) {
                    ground.clear(queue);
                } else {
                    ground.vacate(queue);
                }
                self.is_changed = true;
            }
            Call::Receive(ref offer) => {
                check_offer(offer, member.landing_queue, ground.mtu)?;
                let (queue, data_port) = (offer.queue, member.data_port);
                let holder = ground.held_by(queue, id)?;
                if holder.role != Some(Role::Landing) {
                    return Err(format!("queue {queue} has no landing channel: open it before"));
                }
                if holder.offer.replace(offer.clone()).is_none() {
                    attachment.drive(|node, now, local, out| {
                        node.add_receiver(now, data_port, &[queue; PLACES], local, out);
                    });
                }
                self.is_changed = true;
            }
            Call::CloseGate { session_key } => {
                let (queue, row) = ground.session_of(id, session_key)?;
                ground.shut(queue, row).map_err(|error| error.to_string())?;
            }
            Call::Quiesce { queue } => {
                ground.held_by(queue, id)?;
                return Ok(None);
            }
            Call::OpenGate { session_key, .. } => {
                ground.session_of(id, session_key)?;
                return Ok(None);
            }
            Call::Released { session_key } => {
                ground.release(id, session_key)?;
                // Somebody may wait for the place.
                attachment.drive(|node, now, local, out| node.on_timer(now, local, out));
            }
            Call::Abort {
                session_key,
                delivered,
            } => {
                ground.granted(id, session_key)?.delivered = delivered;
                ground.expect_abort(Some(session_key));
                attachment.drive(|node, now, local, out| node.close(now, session_key, local, out));
                attachment.ground.expect_abort(None);
                self.is_changed = true;
            }
            Call::Touched { ref sessions } => {
                let now = clock::now();
                for progress in sessions {
                    // One that is over by now: its program will hear of it.
                    if ground.set_progress(id, progress, now).is_ok() && progress.is_heard {
                        attachment.node.touched(now, progress.session_key);
                    }
                }
                // One that is aside may be done.
                attachment.drive(|node, now, local, out| node.on_timer(now, local, out));
            }
            Call::Request {
                to,
                ref request,
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
                let (decision, ticket) = match decision {
                    admission::Decision::Requested(Ticket(ticket)) => {
                        (Decision::Requested(ticket), Some(ticket))
                    }
                    admission::Decision::OneCopy(Ticket(ticket)) => (Decision::OneCopy(ticket), Some(ticket)),
                    admission::Decision::Cancel => (Decision::Cancel, None),
                };
                let grant = None;
                member
                    .sent
                    .extend(ticket.map(|ticket| (ticket, Sent { to, request, grant })));
                return Ok(Some((Reply::Requested(decision), Vec::new())));
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
                    let told = program.say(&Said::Event(Event::Told { ticket, outcome }), Vec::new());
                    told.map_err(|broken| broken.to_string())?;
                }
                self.is_changed = true;
            }
            Call::Vouch {
                to,
                sender_id,
                cookie,
            } => {
                let from = SocketAddrV4::new(*attachment.address.ip(), member.data_port);
                let word = self.key.word(from, to, sender_id, cookie);
                return Ok(Some((Reply::Word(word), Vec::new())));
            }
            Call::Confirm {
                from,
                sender_id,
                cookie,
                word,
            } => {
                let to = SocketAddrV4::new(*attachment.address.ip(), member.data_port);
                if !self.key.is_word(from, to, (sender_id, cookie), &word) {
                    return Err(format!(
                        "{from} has no daemon that speaks for it with the cluster's key: start lm-admissiond there"
                    ));
                }
            }
            Call::Hello { .. }
            | Call::Join { .. }
            | Call::Rejoin { .. }
            | Call::Smooth { .. }
            | Call::Status => {}
        }
        done()
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
