//! Programs' connections: who may connect, and who is read next.

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use lm_dataplane::ipc::Reply;
use mio::unix::SourceFd;
use mio::{Interest, Token};

use super::program::{Program, ProgramId};
use super::{Daemon, PROGRAMS};
use crate::socket::{Broken, Connection, Credentials};

/// Connections that are accepted in a turn, at most.
const ACCEPTED_PER_TURN: usize = 16;

/// Programs that may not join, and are connected all the same, at most; half of them of one user.
const STRANGERS_MAX: usize = 16;

/// Root and the daemon's own user may look at everything, though they may not join.
pub(super) fn is_operator(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::getuid().as_raw()
}

impl Daemon {
    /// Programs that could not take all that they were told are watched until they can; the others would wake the loop for nothing.
    pub(super) fn watch_deaf(&mut self) {
        for (id, program) in &mut self.programs {
            let Some(connection) = &mut program.connection else {
                continue;
            };
            if connection.is_crowded {
                // One that is broken is read as broken.
                let _ = connection.flush();
            }
            let has_waiting = connection.has_waiting();
            if has_waiting == program.is_deaf {
                continue;
            }
            let interests = match has_waiting {
                true => Interest::READABLE | Interest::WRITABLE,
                false => Interest::READABLE,
            };
            let (token, fd) = (Token(PROGRAMS + id.0), connection.raw_fd());
            match self
                .poll
                .registry()
                .reregister(&mut SourceFd(&fd), token, interests)
            {
                Ok(()) => program.is_deaf = has_waiting,
                Err(error) => tracing::warn!("cannot watch a program: {error}"),
            }
        }
    }

    pub(super) fn accept(&mut self) {
        if !std::mem::take(&mut self.accepting) {
            return;
        }
        self.unread
            .retain(|(_, connection)| connection.holds_descriptors());
        for _ in 0..ACCEPTED_PER_TURN {
            let Some(listener) = &self.listener else { return };
            let (connection, credentials) = match listener.accept() {
                Ok(Some(accepted)) => accepted,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!("cannot accept a program: {error}");
                    return;
                }
            };
            // Strangers are told so, but cannot take the places of those that may come.
            let may_come = |who: Credentials| is_operator(who.uid) || self.config.allows(who.uid, who.gid);
            let is_friend = may_come(credentials);
            let others = self
                .programs
                .values()
                .filter(|program| program.connection.is_some());
            let connected = others
                .filter(|program| may_come(program.credentials) == is_friend)
                .count();
            let own = self.connections_of(credentials.uid);
            let unread = (self.unread.iter()).filter(|(who, _)| who.uid == credentials.uid);
            let turned_away = match is_friend {
                true if own >= self.config.programs_per_user() => {
                    Some("the user has as many programs connected as --programs-per-user lets it")
                }
                true if unread.count() >= self.config.programs_per_user() => Some(
                    "as many of the user's programs were hung up and hold answers that they have not read",
                ),
                // Whoever looks after the daemon must not be kept out.
                true if connected.max(self.unread.len()) >= self.config.programs_max
                    && !is_operator(credentials.uid) =>
                {
                    Some("as many programs are connected as --programs-max lets in")
                }
                false if connected >= STRANGERS_MAX || own >= STRANGERS_MAX / 2 => {
                    Some("as many programs are connected as there may be of those that may not join")
                }
                _ => None,
            };
            if let Some(why) = turned_away {
                let Credentials { pid, uid, .. } = credentials;
                tracing::warn!(pid, uid, "turned away: {why}");
                continue;
            }
            let id = ProgramId(self.next_program);
            self.next_program += 1;
            match self.watch(connection.raw_fd(), PROGRAMS + id.0) {
                Ok(()) => {
                    let program = Program::new(credentials, Some(connection), None);
                    self.programs.insert(id, program);
                }
                Err(error) => tracing::warn!("cannot watch a program: {error}"),
            }
        }
        // Perhaps there are more.
        self.accepting = true;
    }

    pub(super) fn on_program_event(&mut self, id: ProgramId, hung_up: bool) {
        let Some(program) = self.programs.get_mut(&id) else {
            return;
        };
        program.readable = true;
        program.hung_up |= hung_up;
        let flushed = program.connection.as_mut().map(Connection::flush);
        if let Some(Err(broken)) = flushed {
            self.drop_program(id, &broken.to_string());
        } else if hung_up {
            // What it has is free for the programs that are read in this turn.
            self.read_program(id);
        }
    }

    /// Takes a call of each user, of its connections in turn; and then answers one question.
    pub(super) fn read_programs(&mut self) {
        let mut turn = BTreeMap::new();
        for (&id, program) in self.programs.iter().filter(|(_, program)| program.can_be_read()) {
            let next = (program.read_at, id);
            let first = turn.entry(program.credentials.uid).or_insert(next);
            *first = next.min(*first);
        }
        for (_, id) in turn.into_values() {
            self.read_program(id);
        }
        self.answer_question();
    }

    /// Takes a call of a program. One that hung up waits for no answer.
    fn read_program(&mut self, id: ProgramId) {
        let Some(program) = self.programs.get_mut(&id) else {
            return;
        };
        if program.pending.is_some() {
            return self.drop_program(id, &Broken::Ended.to_string());
        }
        self.reads += 1;
        program.read_at = self.reads;
        match program.connection.as_ref().map(Connection::receive) {
            Some(Ok(Some(packet))) => self.on_packet(id, &packet.bytes, packet.descriptors),
            Some(Ok(None)) | None => program.readable = false,
            Some(Err(broken)) => self.drop_program(id, &broken.to_string()),
        }
    }

    /// Questions come after everything that programs wait for to go on: one in each turn, of the users in turn.
    fn answer_question(&mut self) {
        let asked = self.programs.iter().filter(|(_, program)| program.has_question());
        let next = asked.min_by_key(|(_, program)| {
            let uid = program.credentials.uid;
            (uid <= self.last_asked, uid, program.read_at)
        });
        let Some((&id, program)) = next else { return };
        let uid = program.credentials.uid;
        self.last_asked = uid;
        self.finish(id, |daemon, _| {
            let file = daemon.status_file(uid);
            Some(file.map(|file| Some((Reply::Status, vec![file]))))
        });
    }

    /// The poll tells what there is to read, by this token.
    pub(super) fn watch(&self, fd: RawFd, token: usize) -> std::io::Result<()> {
        let registry = self.poll.registry();
        registry.register(&mut SourceFd(&fd), Token(token), Interest::READABLE)
    }

    /// A connection is closed: the poll forgets it.
    pub(super) fn forget(&self, fd: RawFd) {
        let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
    }
}
