//! What the programs of one user may have together, so that other users find something.

use std::collections::BTreeMap;
use std::sync::Arc;

use lm_dataplane::memory::Mapping;
use lm_dataplane::xsk::{BindMode, Xsk, XskConfig, XskError, XskOptions};

use super::Daemon;
use super::ground::{Holder, Socket};
use super::program::{Program, ProgramId};
use super::worker::Done;

impl Daemon {
    fn of_user(&self, uid: u32) -> impl Iterator<Item = (&ProgramId, &Program)> {
        let programs = self.programs.iter();
        programs.filter(move |(_, program)| program.credentials.uid == uid)
    }

    /// How many more of an interface's queues a user may have.
    ///
    /// # Errors
    /// One line with the remedy where it is none.
    pub(super) fn queues_left(&self, uid: u32, position: usize) -> Result<usize, String> {
        let Some(attachment) = &self.attachments[position] else {
            return Ok(0);
        };
        let queues = &attachment.ground.queues;
        let is_its_own = |id| self.of_user(uid).any(|(of, _)| *of == id);
        let has = |(holder, socket): &(&Option<Holder>, &Option<Socket>)| match holder {
            Some(holder) => is_its_own(holder.program),
            None => socket.is_some_and(|socket| socket.uid == uid),
        };
        let held = queues.iter().zip(&attachment.ground.sockets).filter(has).count();
        let max = self.config.queues_per_user(queues.len());
        match max.saturating_sub(held) {
            0 => Err(format!(
                "user {uid} has {held} of the {} queues of {}, and may have {max}: end a program, or start the daemon \
                 with a larger --queues-per-user",
                queues.len(),
                attachment.name
            )),
            left => Ok(left),
        }
    }

    /// Whether a user may register so many bytes more, beside all that its programs have.
    ///
    /// # Errors
    /// One line with the remedy.
    pub(super) fn check_memory(&self, uid: u32, position: usize, queue: u16, len: u64) -> Result<(), String> {
        let members = self
            .of_user(uid)
            .filter_map(|(_, program)| program.member.as_ref());
        let mut memory: BTreeMap<(usize, u16), u64> = BTreeMap::new();
        for (position, attachment) in (0..).zip(&self.attachments) {
            let sockets = attachment
                .iter()
                .flat_map(|attachment| (0u16..).zip(&attachment.ground.sockets));
            let own = sockets
                .filter_map(|(queue, socket)| Some((queue, socket.filter(|socket| socket.uid == uid)?)));
            memory.extend(own.map(|(queue, socket)| ((position, queue), socket.len_bytes)));
        }
        for member in members {
            let registered = member.memory.iter();
            memory.extend(registered.map(|(&queue, &len)| ((member.interface, queue), len)));
        }
        // What is there on the queue goes first.
        memory.remove(&(position, queue));
        let registered: u64 = memory.values().sum();
        let machine = rustix::system::sysinfo();
        let machine_bytes = machine.totalram as u64 * u64::from(machine.mem_unit);
        let max = self.config.memory_per_user_bytes(machine_bytes);
        match len > max.saturating_sub(registered) {
            true => Err(format!(
                "user {uid} has {registered} bytes of registered memory, and may have {max}: use less, or start the \
                 daemon with a larger --memory-per-user"
            )),
            false => Ok(()),
        }
    }

    /// Sessions and requests that a program's user has as sender on its interface.
    pub(super) fn sent_beside(&self, id: ProgramId) -> usize {
        let Some(program) = self.programs.get(&id) else {
            return 0;
        };
        let interface = program.member.as_ref().map(|member| member.interface);
        let own = self
            .of_user(program.credentials.uid)
            .filter_map(|(_, program)| program.member.as_ref());
        own.filter(|member| Some(member.interface) == interface)
            .map(|member| member.sent.len())
            .sum()
    }

    /// Looks, on other threads, whether sockets are gone whose programs are.
    pub(super) fn look_for_sockets(&mut self) {
        for attachment in self.attachments.iter_mut().flatten() {
            let (stay, index) = (attachment.stay, attachment.index);
            for queue in attachment.ground.look_for_sockets() {
                let looking = self.workers.spawn("look", move || Done::Looked {
                    stay,
                    queue,
                    is_there: is_queue_busy(index, queue),
                });
                if let Err(error) = looking {
                    tracing::warn!(queue, "no thread to look for a socket on: {error}");
                    attachment.ground.found_socket(queue, true);
                }
            }
        }
    }

    /// Whether it is being found out if sockets of a user are gone.
    pub(super) fn is_looking_for(&self, uid: u32) -> bool {
        let grounds = self
            .attachments
            .iter()
            .flatten()
            .map(|attachment| &attachment.ground);
        let mut sockets = grounds.flat_map(|ground| ground.queues.iter().zip(&ground.sockets));
        sockets.any(|(holder, socket)| {
            holder.is_none() && socket.is_some_and(|socket| socket.uid == uid && socket.looked_for)
        })
    }

    /// Connections of a user.
    pub(super) fn connections_of(&self, uid: u32) -> usize {
        self.of_user(uid)
            .filter(|(_, program)| program.connection.is_some())
            .count()
    }
}

/// How often a queue is tried, a second each time: beside programs that use every processor the kernel's work item that
/// releases a socket waits for seconds.
const TRIES: u32 = 5;

/// Tries whether the kernel lets another XSK have a queue, which it does when the last one is gone.
fn is_queue_busy(interface_index: u32, queue: u16) -> bool {
    const LEN: u64 = 1 << 14;
    let Ok(mapping) = Mapping::shared(LEN) else {
        return true;
    };
    let config = XskConfig {
        interface_index,
        queue: queue.into(),
        mapping: &Arc::new(mapping),
        registered_len: LEN,
        chunk_len: 2048,
        fill_len: 64,
        completion_len: 64,
        rx_len: 64,
        tx_len: 64,
        bind: BindMode::Copy,
    };
    let mut tries = (0..TRIES).map(|_| Xsk::bind_for(&config, &XskOptions::default()));
    let bound = tries.find(|bound| !matches!(bound, Err(XskError::Busy { .. })));
    bound.is_none_or(|bound| bound.is_err())
}
