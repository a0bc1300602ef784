//! Channels: a program's memory, the XSK over it, and the gate in front of it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use lm_dataplane::ipc::{Call, Channel, Reply, Role};
use lm_dataplane::memory::Mapping;
use lm_dataplane::xsk::{BindMode, Xsk, XskConfig, XskOptions};
use rustix::fs::SealFlags;

use super::Daemon;
use super::attachment::Attachment;
use super::calls::{Answer, done, no_session, not_yours};
use super::ground::{ROWS, Row, Socket};
use super::program::{Member, Pending, Program, ProgramId};
use super::worker::{Bound, Done, Stay};

/// Longest ring, in entries.
const RING_LEN_MAX: u32 = 1 << 16;

impl Daemon {
    /// Begins to open a channel.
    pub(super) fn open_channel(
        &mut self,
        id: ProgramId,
        channel: &Channel,
        beside: &mut Vec<OwnedFd>,
    ) -> Answer {
        let Some((uid, interface)) = self.endpoint_of(id) else {
            return Ok(None);
        };
        let memory_max = self.config.memory_max.0;
        let left = self.queues_left(uid, interface);
        let memory_left = self.check_memory(uid, interface, channel.queue, channel.registered_len);
        let Some((member, attachment)) = parts(&mut self.programs, &mut self.attachments, id) else {
            return Ok(None);
        };
        let &Channel { queue, role, .. } = channel;
        let is_right = match role {
            Role::General => member.general_queue == Some(queue),
            Role::Landing => member.landing_queue == Some(queue),
            Role::Transmit => {
                attachment.ground.is_free(queue) || attachment.ground.held_by(queue, id).is_ok()
            }
        };
        if !is_right {
            return Err(match role {
                Role::Transmit => {
                    format!("queue {queue} is another program's, or the interface has none of that number")
                }
                _ => not_yours(queue),
            });
        }
        let others = member.memory_bytes() - member.memory.get(&queue).copied().unwrap_or(0);
        if channel.registered_len > memory_max.saturating_sub(others) {
            return Err(format!(
                "a program may have {memory_max} bytes of registered memory: use less, or start the daemon with a \
                 larger --memory-max"
            ));
        }
        memory_left?;
        if attachment.ground.is_free(queue) {
            left?;
        }
        let memory = match (beside.pop(), beside.is_empty()) {
            (Some(memory), true) => memory,
            _ => return Err("the memory must be beside the call, and nothing else".to_owned()),
        };
        check(channel, &memory)?;
        let ground = &mut attachment.ground;
        if ground.is_free(queue) {
            ground.take(queue, id, member.data_port);
        }
        // What the program has there goes first; its sessions go on, behind a closed gate.
        if let Ok(holder) = ground.held_by(queue, id) {
            let open: Vec<usize> = (0..ROWS)
                .filter(|&row| matches!(holder.rows[row], Row::Taken { has_place: true, .. }))
                .collect();
            for row in open {
                ground.shut(queue, row).map_err(|error| error.to_string())?;
            }
        }
        ground
            .gate
            .unregister_xsk(queue.into())
            .map_err(|error| error.to_string())?;
        member.memory.insert(queue, channel.registered_len);
        let (stay, bind) = (
            attachment.stay,
            binding(channel.clone(), attachment.index, memory),
        );
        let bound = self.workers.spawn("bind", move || Done::Bound {
            stay,
            program: id,
            queue,
            xsk: bind(),
        });
        bound.map_err(|error| format!("no thread to open the channel on: {error}"))?;
        Ok(None)
    }

    /// The user of a program that has an endpoint, and the position of its interface.
    fn endpoint_of(&self, id: ProgramId) -> Option<(u32, usize)> {
        let program = self.programs.get(&id)?;
        Some((program.credentials.uid, program.member.as_ref()?.interface))
    }

    /// An interface, which may have gone meanwhile.
    fn still_there(&mut self, stay: Stay) -> Option<&mut Attachment> {
        let attachment = self.attachments[stay.interface].as_mut();
        attachment.filter(|attachment| attachment.stay == stay)
    }

    /// What another thread has done.
    pub(super) fn on_done(&mut self, done: Done) {
        match done {
            Done::Quiet { stay, queue, quiet } => {
                let Some(attachment) = self.still_there(stay) else {
                    return;
                };
                attachment.ground.finish_quiesce(queue, quiet);
                // Somebody may wait for a place.
                attachment.drive(|node, now, local, out| node.on_timer(now, local, out));
                self.all_go_on();
            }
            Done::Looked {
                stay,
                queue,
                is_there,
            } => {
                if let Some(attachment) = self.still_there(stay) {
                    attachment.ground.found_socket(queue, is_there);
                }
                self.all_go_on();
            }
            Done::Written => self.is_writing = false,
            Done::Bound {
                stay,
                program: id,
                queue,
                xsk,
            } => {
                let Some(program) = self.programs.get_mut(&id) else {
                    // It has died meanwhile, and its user has back what it took.
                    drop(xsk);
                    let is_there = false;
                    return self.on_done(Done::Looked {
                        stay,
                        queue,
                        is_there,
                    });
                };
                let Some(pending) = &mut program.pending else {
                    return;
                };
                let uid = program.credentials.uid;
                let failed = xsk.map(|bound| pending.xsk = Some(bound)).err();
                if let Some((member, attachment)) = parts(&mut self.programs, &mut self.attachments, id) {
                    let ground = &mut attachment.ground;
                    let is_assigned = [member.general_queue, member.landing_queue].contains(&Some(queue));
                    if failed.is_none() {
                        // Whatever was bound there before is gone.
                        ground.sockets[usize::from(queue)] = Some(Socket {
                            uid,
                            len_bytes: member.memory.get(&queue).copied().unwrap_or(0),
                            looked_for: false,
                        });
                    } else if member.memory.remove(&queue).is_some()
                        && !is_assigned
                        && ground.held_by(queue, id).is_ok()
                    {
                        ground.vacate(queue);
                    }
                }
                match failed {
                    None => self.go_on(id),
                    Some(what) => self.finish(id, |_, _| Some(Err(what))),
                }
            }
        }
    }

    /// Goes on with every call that could not be answered yet.
    fn all_go_on(&mut self) {
        for id in self.programs_that(|program| program.pending.is_some()) {
            self.go_on(id);
        }
    }

    /// Answers the call of a program that could not be answered yet, if it can be now.
    pub(super) fn go_on(&mut self, id: ProgramId) {
        self.finish(id, |daemon, pending| daemon.end_of_call(id, pending));
    }

    /// Ends the call that a program has under way, if there is an answer.
    pub(super) fn finish(
        &mut self,
        id: ProgramId,
        answer: impl FnOnce(&mut Daemon, &mut Pending) -> Option<Answer>,
    ) {
        let pending = |daemon: &mut Daemon| daemon.programs.get_mut(&id)?.pending.take();
        let Some(mut pending) = pending(self) else { return };
        let answer = answer(self, &mut pending);
        let Some(program) = self.programs.get_mut(&id) else {
            return;
        };
        let Some(answer) = answer else {
            program.pending = Some(pending);
            return;
        };
        program.readable = true;
        // A program that is refused may bind the port anew at once.
        let number = pending.number;
        drop(pending);
        self.answer(id, number, answer);
    }

    /// The answer of a call that could not be answered yet; `None`: it cannot be now.
    fn end_of_call(&mut self, id: ProgramId, pending: &mut Pending) -> Option<Answer> {
        if let Call::Join {
            interface,
            landing,
            mode,
        } = &pending.call
        {
            let uid = self.programs.get(&id)?.credentials.uid;
            let is_ready = !self.is_looking_for(uid);
            return is_ready.then(|| self.join((id, uid), interface, *landing, *mode, &pending.beside));
        }
        let (_, attachment) = parts(&mut self.programs, &mut self.attachments, id)?;
        let ground = &mut attachment.ground;
        match &pending.call {
            Call::OpenChannel(channel) => {
                let may_be_used =
                    channel.role == Role::Transmit || ground.gate.is_ready(channel.queue.into());
                let bound = pending.xsk.take_if(|_| may_be_used)?;
                self.is_changed = true;
                Some(install(attachment, id, channel.queue, channel.role, bound))
            }
            &Call::Quiesce { queue } => ground.is_quiet(queue).then(done),
            &Call::OpenGate {
                session_key,
                first_message,
            } => match ground.session_of(id, session_key) {
                Ok((queue, row)) if ground.is_quiet(queue) => {
                    Some(match ground.open_again(queue, row, first_message) {
                        Ok(true) => done(),
                        Ok(false) => Err(no_session(session_key)),
                        Err(error) => Err(error.to_string()),
                    })
                }
                Ok(_) => None,
                Err(what) => Some(Err(what)),
            },
            _ => None,
        }
    }
}

/// What a program has, and its interface, where it has an endpoint.
fn parts<'a>(
    programs: &'a mut BTreeMap<ProgramId, Program>,
    attachments: &'a mut [Option<Attachment>],
    id: ProgramId,
) -> Option<(&'a mut Member, &'a mut Attachment)> {
    let member = programs.get_mut(&id)?.member.as_mut()?;
    let attachment = attachments[member.interface].as_mut()?;
    Some((member, attachment))
}

fn check(channel: &Channel, memory: &OwnedFd) -> Result<(), String> {
    if !(2048..=4096).contains(&channel.chunk_len) {
        return Err("a chunk has 2048 to 4096 bytes".to_owned());
    }
    let is_ring = |len: &u32| len.is_power_of_two() && *len <= RING_LEN_MAX;
    if !channel.ring_lens.iter().all(is_ring) {
        return Err(format!("a ring's length is a power of two, up to {RING_LEN_MAX}"));
    }
    if channel.registered_len == 0 || !channel.registered_len.is_multiple_of(4096) {
        return Err("whole pages are registered, and at least one".to_owned());
    }
    // Asked first: every other question goes to the file system, which may be the program's own and never answer (FUSE).
    let seals = rustix::fs::fcntl_get_seals(memory)
        .map_err(|error| format!("the memory is no memfd and no file of hugetlbfs: {error}"))?;
    let stat = rustix::fs::fstat(memory).map_err(|error| format!("the memory is no file: {error}"))?;
    if (stat.st_size as u64) < channel.registered_len {
        return Err(format!(
            "the memory has {} bytes, and {} are to be registered",
            stat.st_size, channel.registered_len
        ));
    }
    const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
    let is_huge = rustix::fs::fstatfs(memory).is_ok_and(|found| found.f_type as u64 == HUGETLBFS_MAGIC);
    match seals.contains(SealFlags::SHRINK) || is_huge {
        true => Ok(()),
        false => Err("the memory can shrink: seal it (F_SEAL_SHRINK)".to_owned()),
    }
}

/// Registers the memory and binds the XSK: on a thread of its own, because pinning takes its time, and the kernel lets a queue go late.
fn binding(
    channel: Channel,
    interface_index: u32,
    memory: OwnedFd,
) -> impl FnOnce() -> Result<Bound, String> + Send + 'static {
    let Channel {
        queue,
        registered_len,
        chunk_len,
        multi_buffer,
        ring_lens: [fill_len, rx_len, tx_len, completion_len],
        ..
    } = channel;
    let options = XskOptions {
        multi_buffer,
        ..XskOptions::default()
    };
    move || {
        let told = |what: &dyn std::fmt::Display| format!("cannot open a channel on queue {queue}: {what}");
        let mapping = Mapping::of_file(memory.as_fd(), registered_len).map_err(|error| told(&error))?;
        let config = XskConfig {
            interface_index,
            queue: u32::from(queue),
            mapping: &Arc::new(mapping),
            registered_len,
            chunk_len,
            fill_len,
            completion_len,
            rx_len,
            tx_len,
            bind: BindMode::Copy,
        };
        let (fd, zero_copy) = Xsk::bind_for(&config, &options).map_err(|error| told(&error))?;
        Ok(Bound { fd, zero_copy })
    }
}

/// Lets the gate know a channel, and gives it to its program.
fn install(attachment: &mut Attachment, id: ProgramId, queue: u16, role: Role, bound: Bound) -> Answer {
    let ground = &mut attachment.ground;
    let holder = ground.held_by(queue, id)?;
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
