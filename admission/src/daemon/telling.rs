//! What programs are told unasked, and what becomes of what they had when they go.

use lm_dataplane::ipc::{self, Call, Control, Event, Said};
use lm_protocol::admission::{self, Ticket};
use lm_protocol::control::ControlMessage;
use lm_protocol::time::Time;

use super::Daemon;
use super::ground::Socket;
use super::program::{Pending, Program, ProgramId};

impl Daemon {
    /// Tells programs what the nodes and gates have for them.
    pub(super) fn deliver(&mut self) {
        use super::ground::News;
        let mut telling: Vec<(ProgramId, Event)> = Vec::new();
        for attachment in self.attachments.iter_mut().flatten() {
            let mut unheard_of = Vec::new();
            for (program, news) in std::mem::take(&mut attachment.ground.news) {
                self.is_changed = true;
                let event = match news {
                    News::Event(Event::Closed { session_key, .. }) if unheard_of.contains(&session_key) => {
                        continue;
                    }
                    News::Event(event) => event,
                    News::Opened { session_key, row } => {
                        let mut sessions = attachment.node.sessions().map(|(_, session)| *session);
                        // One that ended in the same turn: its program never heard of it.
                        let Some(session) = sessions.find(|session| session.grant.session_key == session_key)
                        else {
                            drop(sessions);
                            let _ = attachment.ground.release(program, session_key);
                            unheard_of.push(session_key);
                            continue;
                        };
                        let request_id = session.request_id;
                        Event::Opened {
                            from: session.data_peer(),
                            row,
                            request: Control::new(request_id, &ControlMessage::Request(session.request)),
                            grant: Control::new(request_id, &ControlMessage::Grant(session.told())),
                        }
                    }
                };
                telling.push((program, event));
            }
            for (Ticket(ticket), outcome) in std::mem::take(&mut attachment.told) {
                let found = self.programs.iter_mut().find_map(|(&id, program)| {
                    let member = program.member.as_mut()?;
                    let is_its =
                        member.interface == attachment.stay.interface && member.sent.contains_key(&ticket);
                    is_its.then_some((id, member))
                });
                let Some((id, member)) = found else { continue };
                self.is_changed = true;
                let control = |message| Control::new(ticket, &message);
                match (&outcome, member.sent.get_mut(&ticket)) {
                    (&admission::Outcome::Granted(grant), Some(sent)) => sent.grant = Some(grant),
                    _ => drop(member.sent.remove(&ticket)),
                }
                let outcome = match outcome {
                    admission::Outcome::Granted(grant) => {
                        ipc::Outcome::Granted(control(ControlMessage::Grant(grant)))
                    }
                    admission::Outcome::Rejected(reject) => {
                        ipc::Outcome::Rejected(control(ControlMessage::Reject(reject)))
                    }
                    admission::Outcome::Unreachable | admission::Outcome::NotListening => {
                        ipc::Outcome::Unreachable
                    }
                    admission::Outcome::Incompatible => ipc::Outcome::Incompatible,
                    admission::Outcome::Lost => ipc::Outcome::Lost,
                    admission::Outcome::Ended { delivered } => ipc::Outcome::Ended { delivered },
                    _ => ipc::Outcome::Unconfirmed,
                };
                telling.push((id, Event::Told { ticket, outcome }));
            }
        }
        for (id, event) in telling {
            if let Some(program) = self.programs.get_mut(&id)
                && let Err(broken) = program.say(&Said::Event(event), Vec::new())
            {
                self.drop_program(id, &broken.to_string());
            }
        }
    }

    /// A program is gone, or is treated as if it were: everything that it had goes.
    pub(super) fn drop_program(&mut self, id: ProgramId, why: &str) {
        let Some(program) = self.programs.remove(&id) else {
            return;
        };
        if let Some(mut connection) = program.connection {
            self.forget(connection.raw_fd());
            if connection.holds_descriptors() {
                connection.hang_up();
                self.unread.push((program.credentials, connection));
            }
        }
        if let Some(position) = program.smooths {
            self.unsmooth(position);
        }
        let Some(member) = program.member else { return };
        tracing::info!(
            pid = program.credentials.pid,
            data_port = member.data_port,
            "a program ends: {why}"
        );
        self.is_changed = true;
        let Some(attachment) = self.attachments[member.interface].as_mut() else {
            return;
        };
        // No program is left to be told of sessions that end now.
        attachment
            .ground
            .held_all(id)
            .for_each(|holder| holder.away = true);
        attachment.drive(|node, now, local, out| {
            node.remove_receiver(now, member.data_port, local, out);
            for &ticket in member.sent.keys() {
                node.end(now, Ticket(ticket), 0, local, out);
            }
        });
        for queue in 0..attachment.ground.queues.len() as u16 {
            if attachment.ground.held_by(queue, id).is_ok() {
                attachment.ground.vacate(queue);
            }
        }
        if let Some(Pending {
            call: Call::OpenChannel(channel),
            xsk: None,
            ..
        }) = program.pending
        {
            // The kernel is at it still: what that takes is its user's until then.
            attachment.ground.sockets[usize::from(channel.queue)] = Some(Socket {
                uid: program.credentials.uid,
                len_bytes: member.memory.get(&channel.queue).copied().unwrap_or(0),
                looked_for: true,
            });
        }
        self.look_for_sockets();
    }

    /// Programs that did not come back to the new daemon in time.
    pub(super) fn give_up_awaited(&mut self, now: Time) {
        let late = |program: &Program| {
            program.connection.is_none() && program.awaited_until.is_some_and(|until| until <= now)
        };
        self.drop_programs(self.programs_that(late), "it did not come back");
    }

    pub(super) fn programs_that(&self, are_wanted: impl Fn(&Program) -> bool) -> Vec<ProgramId> {
        let wanted = self.programs.iter().filter(|(_, program)| are_wanted(program));
        wanted.map(|(&id, _)| id).collect()
    }

    pub(super) fn drop_programs(&mut self, gone: Vec<ProgramId>, why: &str) {
        for id in gone {
            self.drop_program(id, why);
        }
    }
}
