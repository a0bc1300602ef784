//! Channels: a program's memory, the XSK over it, and the gate in front of it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use lm_dataplane::ipc::{Reply, Role};
use lm_dataplane::memory::Mapping;
use lm_dataplane::xsk::{BindMode, Xsk, XskConfig, XskOptions};
use rustix::fs::SealFlags;

use super::Daemon;
use super::attachment::Attachment;
use super::calls::{Answer, done, no_session, not_yours};
use super::ground::{ROWS, Row, Socket};
use super::program::{Pending, ProgramId};
use super::worker::{Bound, Done};

/// Longest ring, in entries.
const RING_LEN_MAX: u32 = 1 << 16;

impl Daemon {
    pub(super) fn open_channel(
        &mut self,
        id: ProgramId,
        number: u32,
        channel: &Channel,
        mut beside: Vec<OwnedFd>,
    ) -> Answer {
        let memory_max = self.config.memory_max_bytes;
        let Some(program) = self.programs.get(&id) else {
            return Ok(None);
        };
        let uid = program.credentials.uid;
        let Some(interface) = program.member.as_ref().map(|member| member.interface) else {
            return Ok(None);
        };
        let left = self.queues_left(uid, interface);
        let memory_left = self.check_memory(uid, interface, channel.queue, channel.registered_len);
        let Some(program) = self.programs.get_mut(&id) else {
            return Ok(None);
        };
        let Some(member) = program.member.as_mut() else {
            return Ok(None);
        };
        let Some(attachment) = self.attachments[member.interface].as_mut() else {
            return Ok(None);
        };
        let &Channel { queue, role, .. } = channel;
        let is_right = match role {
            Role::General => member.general_queue == Some(queue),
            Role::Landing => member.landing_queue == Some(queue),
            Role::Transmit => {
                attachment.ground.is_free(queue) || attachment.ground.held_by(queue, id).is_some()
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
        channel.check(&memory)?;
        let ground = &mut attachment.ground;
        if ground.is_free(queue) {
            ground.take(queue, id, member.data_port);
        }
        // What the program has there goes first; its sessions go on, behind a closed gate.
        if let Some(holder) = ground.held_by(queue, id) {
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
        let pending = Pending::Channel {
            queue,
            role,
            xsk: None,
        };
        program.pending = Some((number, pending));
        let bind = channel.binding(attachment.index, memory);
        if let Err(error) = self.workers.bind(attachment.stay, id, queue, bind) {
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
                self.all_go_on();
            }
            Done::Looked {
                stay,
                queue,
                is_there,
            } => {
                let attachment = self.attachments[stay.interface].as_mut();
                if let Some(attachment) = attachment.filter(|attachment| attachment.stay == stay) {
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
                let Some((number, Pending::Channel { xsk: slot, .. })) = &mut program.pending else {
                    return;
                };
                match xsk {
                    Ok(bound) => {
                        *slot = Some(bound);
                        // Whatever was bound there before is gone.
                        if let Some(member) = &program.member
                            && let Some(attachment) = self.attachments[member.interface].as_mut()
                        {
                            attachment.ground.sockets[usize::from(queue)] = Some(Socket {
                                uid: program.credentials.uid,
                                len_bytes: member.memory.get(&queue).copied().unwrap_or(0),
                                looked_for: false,
                            });
                        }
                        self.go_on(id);
                    }
                    Err(what) => {
                        let number = *number;
                        program.pending = None;
                        program.readable = true;
                        if let Some(member) = &mut program.member {
                            member.memory.remove(&queue);
                            let is_assigned =
                                [member.general_queue, member.landing_queue].contains(&Some(queue));
                            if let Some(attachment) = self.attachments[member.interface].as_mut()
                                && !is_assigned
                                && attachment.ground.held_by(queue, id).is_some()
                            {
                                attachment.ground.vacate(queue);
                            }
                        }
                        self.answer(id, number, Err(what));
                    }
                }
            }
        }
    }

    /// Goes on with every call that could not be answered yet.
    fn all_go_on(&mut self) {
        let waiting = self
            .programs
            .iter()
            .filter(|(_, program)| program.pending.is_some());
        for id in waiting.map(|(&id, _)| id).collect::<Vec<ProgramId>>() {
            self.go_on(id);
        }
    }

    /// Goes on with the call of a program that could not be answered yet.
    pub(super) fn go_on(&mut self, id: ProgramId) {
        let uid = self.programs.get(&id).map(|program| program.credentials.uid);
        let is_looking = uid.is_some_and(|uid| self.is_looking_for(uid));
        let Some(program) = self.programs.get_mut(&id) else {
            return;
        };
        let Some((number, pending)) = program.pending.take() else {
            return;
        };
        let pending = match pending {
            Pending::Join {
                interface,
                landing,
                mode,
                beside,
            } if !is_looking => {
                program.readable = true;
                let answer = self.join(id, &interface, landing, mode, &beside);
                // A program that is refused may bind the port anew at once.
                drop(beside);
                return self.answer(id, number, answer);
            }
            Pending::Join { .. } => {
                program.pending = Some((number, pending));
                return;
            }
            pending => pending,
        };
        let attachment =
            (program.member.as_ref()).and_then(|member| self.attachments[member.interface].as_mut());
        let Some(attachment) = attachment else { return };
        let ground = &mut attachment.ground;
        let is_ready = match &pending {
            Pending::Channel { xsk: None, .. } => false,
            Pending::Channel { queue, role, .. } => {
                *role == Role::Transmit || ground.gate.is_ready((*queue).into())
            }
            Pending::Quiesce { queue } | Pending::OpenGate { queue, .. } => ground.is_quiet(*queue),
            Pending::Join { .. } => true,
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
            Pending::Channel { .. } | Pending::Quiesce { .. } | Pending::Join { .. } => done(),
            Pending::OpenGate {
                queue,
                session_key,
                first_message,
            } => open_gate(attachment, id, queue, session_key, first_message),
        };
        self.answer(id, number, answer);
    }
}

/// What [`Call::OpenChannel`] asks for.
pub(super) struct Channel {
    pub(super) queue: u16,
    pub(super) role: Role,
    pub(super) registered_len: u64,
    pub(super) chunk_len: u32,
    pub(super) multi_buffer: bool,
    pub(super) ring_lens: [u32; 4],
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
        // Asked first: every other question goes to the file system, which may be the program's own and never answer (FUSE).
        let seals = rustix::fs::fcntl_get_seals(memory)
            .map_err(|error| format!("the memory is no memfd and no file of hugetlbfs: {error}"))?;
        let stat = rustix::fs::fstat(memory).map_err(|error| format!("the memory is no file: {error}"))?;
        if (stat.st_size as u64) < self.registered_len {
            return Err(format!(
                "the memory has {} bytes, and {} are to be registered",
                stat.st_size, self.registered_len
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
        &self,
        interface_index: u32,
        memory: OwnedFd,
    ) -> impl FnOnce() -> Result<Bound, String> + Send + 'static + use<> {
        let [fill_len, rx_len, tx_len, completion_len] = self.ring_lens;
        let (queue, registered_len, chunk_len) = (self.queue, self.registered_len, self.chunk_len);
        let options = XskOptions {
            multi_buffer: self.multi_buffer,
            ..XskOptions::default()
        };
        move || {
            let told =
                |what: &dyn std::fmt::Display| format!("cannot open a channel on queue {queue}: {what}");
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
                need_wakeup: true,
            };
            let (fd, zero_copy) = Xsk::bind_for(&config, &options).map_err(|error| told(&error))?;
            Ok(Bound { fd, zero_copy })
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
    let Some((_, row)) = ground.session_of(id, session_key) else {
        return Err(no_session(session_key));
    };
    let opened = ground.open_again(queue, row, first_message);
    match opened.map_err(|error| error.to_string())? {
        true => done(),
        false => Err(no_session(session_key)),
    }
}
