//! Programs that come, and those that come back after a restart.

use std::io;
use std::os::fd::OwnedFd;

use lm_dataplane::ipc::{Joined, Mode, Reply};
use lm_dataplane::socket::{bound_interface, netns_cookie};
use lm_ebpf::EffectiveMode;
use rustix::net::sockopt::{socket_protocol, socket_type};
use rustix::net::{SocketType, ipproto};

use super::attachment::Attachment;
use super::calls::Answer;
use super::program::{Member, ProgramId};
use super::{Daemon, random_u64};

impl Daemon {
    pub(super) fn join(
        &mut self,
        (id, uid): (ProgramId, u32),
        name: &str,
        landing: bool,
        mode: Mode,
        beside: &[OwnedFd],
    ) -> Answer {
        let Some(position) = self.config.interface.iter().position(|known| known == name) else {
            return Err(format!(
                "this daemon does not serve {name}: it serves {}; start it with --interface {name}",
                self.config.interface.join(", ")
            ));
        };
        let left = self.queues_left(uid, position);
        let Some(attachment) = self.attachments[position].as_mut() else {
            return Err(format!("{name} is gone: wait for it to come back"));
        };
        let generic = attachment.ground.gate.mode() == EffectiveMode::Generic;
        match (mode, generic) {
            (Mode::ZeroCopy, _) => {
                return Err(
                    "zero-copy mode is not for programs without privileges, whose ring entries some drivers believe: \
                     run it with privileges and --admission embedded, or without --mode zero-copy"
                        .to_owned(),
                );
            }
            (Mode::Copy, true) => {
                return Err(format!(
                    "the gate of {name} is in the network stack: start the daemon with --mode copy, or use --mode \
                     generic"
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
        if self
            .programs
            .values()
            .any(|other| other.is_at(position, data_port))
        {
            return Err(format!(
                "port {data_port} of {name} is another program's: bind another one"
            ));
        }
        let ground = &mut attachment.ground;
        let free = ground.free_queues();
        if free.is_empty() {
            return Err(format!(
                "all {} queues of {name} are taken (`lm-admissiond status` shows by whom): end a program, or give the \
                 interface more queues (ethtool -L)",
                ground.queues.len()
            ));
        }
        let left = left?;
        // The highest of those that are as free as any.
        let is_clean = |queue: &&u16| ground.sockets[usize::from(**queue)].is_none();
        let highest = free.iter().rfind(is_clean).or(free.last());
        let landing_queue = highest.copied().filter(|_| landing);
        let others = free.iter().copied().filter(|&queue| Some(queue) != landing_queue);
        let general_queue = others.min_by_key(|&queue| (ground.sockets[usize::from(queue)].is_some(), queue));
        let general_queue = general_queue.filter(|_| left > usize::from(landing));
        for queue in landing_queue.into_iter().chain(general_queue) {
            ground.take(queue, id, data_port);
        }
        let member = Member {
            token: random_u64(),
            interface: position,
            data_port,
            general_queue,
            landing_queue,
            memory: Default::default(),
            sent: Default::default(),
        };
        let joined = member.joined(attachment);
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
            program.member = Some(member);
        }
        self.is_changed = true;
        Ok(Some((Reply::Joined(joined), Vec::new())))
    }

    /// A program of an earlier daemon comes back.
    pub(super) fn rejoin(&mut self, id: ProgramId, token: u64, beside: &[OwnedFd]) -> Answer {
        let uid = self.programs.get(&id).map(|program| program.credentials.uid);
        let found = self.programs.iter().find_map(|(&old, program)| {
            let is_its_users = program.connection.is_none() && Some(program.credentials.uid) == uid;
            let member = program
                .member
                .as_ref()
                .filter(|member| is_its_users && member.token == token)?;
            Some((old, member.clone()))
        });
        let Some((old, member)) = found else {
            return Err("nothing is left of what an earlier daemon gave: join anew".to_owned());
        };
        let Some(attachment) = self.attachments[member.interface].as_mut() else {
            return Err("the interface is gone".to_owned());
        };
        if data_port(attachment, beside)? != member.data_port {
            return Err(format!(
                "the socket is not bound to the program's port {}",
                member.data_port
            ));
        }
        attachment.ground.renumber(old, id);
        attachment.ground.tell_aside(id);
        let joined = member.joined(attachment);
        self.programs.remove(&old);
        if let Some(program) = self.programs.get_mut(&id) {
            tracing::info!(
                pid = program.credentials.pid,
                data_port = member.data_port,
                "came back"
            );
            program.member = Some(member);
        }
        self.is_changed = true;
        Ok(Some((Reply::Joined(joined), Vec::new())))
    }
}

impl Member {
    /// What the program is told of what it has.
    fn joined(&self, attachment: &Attachment) -> Joined {
        let sessions = attachment
            .node
            .sessions()
            .filter(|(port, _)| *port == self.data_port);
        Joined {
            token: self.token,
            interface_index: attachment.index,
            general_queue: self.general_queue,
            landing_queue: self.landing_queue,
            generic: attachment.ground.gate.mode() == EffectiveMode::Generic,
            control_port: attachment.address.port(),
            received: sessions.map(|(_, session)| session.grant.session_key).collect(),
            sent: self.sent.keys().copied().collect(),
        }
    }
}

/// The port of the socket beside a call, if it shows that the port is the program's.
fn data_port(attachment: &Attachment, beside: &[OwnedFd]) -> Result<u16, String> {
    let (own, name) = (attachment.address.ip(), &attachment.name);
    let wanted = || {
        format!(
            "beside the call must be a UDP socket that is bound to {own} in the daemon's network namespace, and to no \
             device but {name}"
        )
    };
    let [socket] = beside else { return Err(wanted()) };
    // UDP-Lite and ICMP have ports of their own.
    if socket_type(socket) != Ok(SocketType::DGRAM) || socket_protocol(socket) != Ok(Some(ipproto::UDP)) {
        return Err(wanted());
    }
    let bound = rustix::net::getsockname(socket).ok();
    let bound = bound.and_then(|address| std::net::SocketAddrV4::try_from(address).ok());
    let bound = bound.ok_or_else(wanted)?;
    if bound.ip() != own || bound.port() == 0 {
        return Err(format!("the socket is bound to {bound}, not to {own} of {name}"));
    }
    // The address may be another host's there, and other sockets may have the port on other devices.
    let is_here = || -> io::Result<bool> {
        let is_near = netns_cookie(socket)? == netns_cookie(&attachment.ports)?;
        Ok(is_near && [0, attachment.index].contains(&bound_interface(socket)?))
    };
    if !is_here().unwrap_or(false) {
        return Err(wanted());
    }
    match bound.port() == attachment.address.port() {
        true => Err("that is the control port: bind another one".to_owned()),
        false => Ok(bound.port()),
    }
}
