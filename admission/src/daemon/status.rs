//! What `lm-admissiond status` and the metrics show.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use lm_dataplane::ipc::Role;
use lm_protocol::admission::Counters;
use serde::{Deserialize, Serialize};

use super::connections::is_operator;
use super::ground::Row;
use super::state::{InterfaceState, ProgramState, ReceivedState, SentState, State};
use super::{Attachment, Daemon, attachment};
use crate::clock;
use crate::config::PolicyName;
use lm_dataplane::ipc::Control;
use lm_protocol::control::ControlMessage;

/// A daemon at one moment. Times are seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// `concurrent` or `exclusive`.
    pub policy: String,
    /// The interfaces that it serves.
    pub interfaces: Vec<InterfaceStatus>,
    /// Programs that have an endpoint here, or are awaited after a restart.
    pub programs: Vec<ProgramStatus>,
    /// Calls of programs.
    pub calls: u64,
    /// Calls that were refused.
    pub refusals: u64,
}

/// One interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InterfaceStatus {
    /// Its name.
    pub name: String,
    /// Why it is not there, where it is not: everything else is empty then.
    pub absent: Option<String>,
    /// Address and control port.
    pub address: Option<SocketAddrV4>,
    /// `native` or `generic`: where the gate is.
    pub gate: String,
    /// Its queues.
    pub queues: Vec<QueueStatus>,
    /// Sessions of its receivers: all for the daemon's user and root, for others those of their own programs.
    pub sessions: Vec<SessionStatus>,
    /// The LM_RECV_ADDR list.
    pub recv_addrs: Vec<RecvAddrStatus>,
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Sessions of its senders, and their requests.
    pub outgoing: usize,
    /// Other hosts that are known.
    pub hosts: usize,
    /// The smoother, while programs send real-time messages.
    pub smoother: Option<SmootherStatus>,
    /// Datagrams on the control port, by what became of them.
    pub datagrams: BTreeMap<String, u64>,
    /// Packets at the gate, by verdict. Those of a queue that a program has are counted in memory that the program writes (I6): its word.
    pub packets: BTreeMap<String, u64>,
}

/// What holds other traffic back behind real-time messages (SS-RTUDP §3.2.2). Counts of packets that left are in memory that programs write:
/// their word.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SmootherStatus {
    /// Programs that have it.
    pub programs: usize,
    /// PAR: packets that may leave in a second.
    pub packets_per_second: u32,
    /// RP.
    pub refresh_period_s: f64,
    /// Credits that there are; negative: real time used up more.
    pub credits: i64,
    /// Debt that was forgiven, in credits.
    pub forgiven: u64,
    /// Losses and delays that counted.
    pub signals: u64,
    /// Real-time and control packets that left.
    pub first: u64,
    /// Others of LM that left.
    pub others: u64,
    /// Whether the kernel's traffic follows it.
    pub holds_kernel: bool,
    /// The kernel's packets that left, that its class dropped, and that wait there.
    pub kernel_packets: u64,
    /// See there.
    pub kernel_dropped: u64,
    /// See there.
    pub kernel_waiting: u64,
}

/// One queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueueStatus {
    /// Its number.
    pub queue: u16,
    /// `free`, `resting` (the gate is not quiet yet), `taken` (no channel yet), `general`, `landing`, `transmit`.
    pub role: String,
    /// The process of the program that has it.
    pub pid: Option<i32>,
    /// Places of the gate that have a session, and those that had one and are not free yet.
    pub open_places: usize,
    /// See there.
    pub closing_places: usize,
}

/// One session as receiver. Its key is for the two programs alone: whoever has it, and an AF_XDP socket, can speak for either.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// User of the receiver.
    pub uid: u32,
    /// The sender's data address.
    pub from: SocketAddrV4,
    /// The receiver's data port.
    pub data_port: u16,
    /// Landing queue.
    pub queue: u16,
    /// Longest message, in bytes.
    pub max_message_len: u64,
    /// Messages that were delivered, as far as the program has said.
    pub delivered: u32,
    /// Whether its messages land; else it goes on without its place.
    pub lands: bool,
    /// When its lease ends.
    pub expires_in_s: f64,
}

/// One entry of the LM_RECV_ADDR list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecvAddrStatus {
    /// The host whose DLD is active.
    pub address: Ipv4Addr,
    /// The paper's flag: 00, 01 or 10.
    pub flag: String,
    /// When the entry goes.
    pub expires_in_s: f64,
}

/// One program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramStatus {
    /// Its process, when it connected.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// Its primary group.
    pub gid: u32,
    /// Whether it is connected; else it is awaited after a restart.
    pub connected: bool,
    /// Its interface.
    pub interface: String,
    /// Its data port.
    pub data_port: u16,
    /// Memory that it has registered, in bytes.
    pub memory_bytes: u64,
    /// Sessions and requests as sender.
    pub sent: usize,
}

impl Daemon {
    pub(super) fn status(&self) -> Status {
        let interfaces = (self.config.interface.iter().zip(&self.attachments))
            .zip(&self.absent)
            .map(|((name, attachment), (why, _))| match attachment {
                Some(attachment) => self.interface_status(attachment),
                None => InterfaceStatus {
                    name: name.clone(),
                    absent: Some(why.clone()),
                    ..InterfaceStatus::default()
                },
            });
        let programs = self.programs.values().filter_map(|program| {
            let member = program.member.as_ref()?;
            Some(ProgramStatus {
                pid: program.credentials.pid,
                uid: program.credentials.uid,
                gid: program.credentials.gid,
                connected: program.connection.is_some(),
                interface: self.config.interface[member.interface].clone(),
                data_port: member.data_port,
                memory_bytes: member.memory_bytes(),
                sent: member.sent.len(),
            })
        });
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            policy: match self.config.policy {
                PolicyName::Concurrent => "concurrent",
                PolicyName::Exclusive => "exclusive",
            }
            .to_owned(),
            interfaces: interfaces.collect(),
            programs: programs.collect(),
            calls: self.calls,
            refusals: self.refusals,
        }
    }

    fn interface_status(&self, attachment: &Attachment) -> InterfaceStatus {
        let now = clock::now();
        let ground = &attachment.ground;
        let queues = (0u16..).zip(&ground.queues).map(|(queue, holder)| {
            let count = |wanted: fn(&Row) -> bool| {
                let rows = holder.iter().flat_map(|holder| &holder.rows);
                rows.filter(|row| wanted(row)).count()
            };
            QueueStatus {
                queue,
                role: match holder {
                    None if ground.is_quiet(queue) => "free",
                    None => "resting",
                    Some(holder) => match holder.role {
                        None => "taken",
                        Some(Role::General) => "general",
                        Some(Role::Landing) => "landing",
                        Some(Role::Transmit) => "transmit",
                    },
                }
                .to_owned(),
                pid: holder
                    .as_ref()
                    .and_then(|holder| self.programs.get(&holder.program))
                    .map(|program| program.credentials.pid),
                open_places: count(|row| matches!(row, Row::Taken { has_place: true, .. })),
                closing_places: count(|row| matches!(row, Row::Closing { .. })),
            }
        });
        let sessions = attachment.node.sessions().map(|(data_port, session)| {
            let key = session.grant.session_key;
            let mut holders = ground.queues.iter().flatten();
            let granted = holders.find_map(|holder| holder.sessions.get(&key));
            SessionStatus {
                uid: self.uid_at(attachment, data_port),
                from: session.data_peer(),
                data_port,
                queue: session.grant.landing_queue,
                max_message_len: session.grant.max_message_len,
                delivered: granted.map_or(0, |granted| granted.delivered),
                lands: session.has_place(),
                expires_in_s: session.expires.since(now).as_secs_f64(),
            }
        });
        let recv_addrs = attachment.node.recv_addrs(now);
        let recv_addrs = recv_addrs.iter().map(|entry| RecvAddrStatus {
            address: entry.address,
            flag: entry.flag.to_string(),
            expires_in_s: entry.expires.since(now).as_secs_f64(),
        });
        let usage = attachment.node.usage(now);
        let counters = ground.gate.counters();
        let packets = counters
            .iter()
            .map(|(verdict, count)| (verdict.name().to_owned(), count));
        let datagrams = datagrams(&attachment.node.counters(), attachment.ports.send_errors);
        InterfaceStatus {
            name: attachment.name.clone(),
            absent: None,
            address: Some(attachment.address),
            gate: match ground.gate.mode() {
                lm_ebpf::EffectiveMode::Native => "native",
                lm_ebpf::EffectiveMode::Generic => "generic",
            }
            .to_owned(),
            queues: queues.collect(),
            sessions: sessions.collect(),
            recv_addrs: recv_addrs.collect(),
            waiting: usage.waiting,
            outgoing: usage.outgoing,
            hosts: usage.hosts,
            smoother: (attachment.smoothing.as_ref())
                .map(|smoothing| smoothing.status(self.smoothing_programs(attachment.stay.interface))),
            datagrams,
            packets: packets.collect(),
        }
    }

    /// The user of the program that receives on a data port.
    fn uid_at(&self, attachment: &Attachment, data_port: u16) -> u32 {
        let mut programs = self.programs.values();
        let receiver = programs.find(|program| program.is_at(attachment.stay.interface, data_port));
        receiver.map_or(u32::MAX, |program| program.credentials.uid)
    }

    /// The status as JSON, in a file that is nowhere: what this user may know.
    pub(super) fn status_file(&self, uid: u32) -> Result<OwnedFd, String> {
        let told = |error: &dyn std::fmt::Display| format!("cannot show the status: {error}");
        let mut status = self.status();
        if !is_operator(uid) {
            for interface in &mut status.interfaces {
                interface.sessions.retain(|session| session.uid == uid);
            }
        }
        let json = serde_json::to_vec(&status).map_err(|error| told(&error))?;
        let fd = rustix::fs::memfd_create("lm-status", rustix::fs::MemfdFlags::CLOEXEC);
        let mut file = std::fs::File::from(fd.map_err(|error| told(&error))?);
        file.write_all(&json).map_err(|error| told(&error))?;
        std::io::Seek::rewind(&mut file).map_err(|error| told(&error))?;
        Ok(file.into())
    }

    /// What the next daemon needs.
    pub(super) fn state(&self) -> State {
        let namespace = attachment::namespace();
        let interfaces = (0..).zip(&self.attachments).filter_map(|(position, attachment)| {
            let attachment = attachment.as_ref()?;
            let programs = self.programs.values().filter_map(|program| {
                let member = program
                    .member
                    .as_ref()
                    .filter(|member| member.interface == position)?;
                let queues = (0u16..).zip(&attachment.ground.queues);
                let own = queues.filter_map(|(queue, holder)| Some((queue, holder.as_ref()?)));
                let own = own.filter(|(_, holder)| holder.data_port == member.data_port);
                let channels = own.clone().map(|(queue, holder)| {
                    let memory = member.memory.get(&queue).copied().unwrap_or(0);
                    (queue, (holder.role, memory))
                });
                let sessions = attachment
                    .node
                    .sessions()
                    .filter(|(port, _)| *port == member.data_port);
                let received = sessions.map(|(_, session)| ReceivedState {
                    peer: session.peer,
                    request: Control::new(session.request_id, &ControlMessage::Request(session.request)),
                    grant: Control::new(session.request_id, &ControlMessage::Grant(session.grant)),
                    aside: !session.has_place(),
                });
                let sent = member.sent.iter().filter_map(|(&ticket, sent)| {
                    Some(SentState {
                        ticket,
                        to: sent.to,
                        request: Control::new(ticket, &ControlMessage::Request(sent.request)),
                        grant: Control::new(ticket, &ControlMessage::Grant(sent.grant?)),
                    })
                });
                Some(ProgramState {
                    token: member.token,
                    credentials: program.credentials,
                    data_port: member.data_port,
                    general_queue: member.general_queue,
                    landing_queue: member.landing_queue,
                    channels: channels.collect(),
                    offer: own.filter_map(|(_, holder)| holder.offer.clone()).next(),
                    received: received.collect(),
                    sent: sent.collect(),
                })
            });
            Some(InterfaceState {
                name: attachment.name.clone(),
                index: attachment.index,
                namespace,
                address: attachment.address,
                programs: programs.collect(),
            })
        });
        State::new(interfaces.collect())
    }
}

fn datagrams(counters: &Counters, not_sent: u64) -> BTreeMap<String, u64> {
    let counts = [
        ("not_sent", not_sent),
        ("accepted", counters.accepted),
        ("malformed", counters.malformed),
        ("not_sealed", counters.not_sealed),
        ("other_version", counters.other_version),
        ("unauthenticated", counters.unauthenticated),
        ("replayed", counters.replayed),
        ("strangers", counters.strangers),
        ("impossible", counters.impossible),
        ("own", counters.own),
    ];
    counts.map(|(name, count)| (name.to_owned(), count)).into()
}

#[cfg(test)]
impl Status {
    /// Of a daemon whose programs have a smoother.
    pub(crate) fn smoothed() -> Status {
        let smoother = SmootherStatus {
            programs: 2,
            packets_per_second: 3600,
            refresh_period_s: 0.011_111,
            credits: -3,
            forgiven: 5,
            signals: 7,
            first: 100,
            others: 900,
            holds_kernel: true,
            kernel_packets: 50,
            kernel_dropped: 11,
            kernel_waiting: 13,
        };
        let interface = InterfaceStatus {
            name: "lm0".to_owned(),
            smoother: Some(smoother),
            ..InterfaceStatus::default()
        };
        Status {
            version: String::new(),
            pid: 1,
            policy: "concurrent".to_owned(),
            interfaces: vec![interface],
            programs: Vec::new(),
            calls: 0,
            refusals: 0,
        }
    }
}
