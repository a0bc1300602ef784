//! The gate as a pure Rust model: the same verdicts, the same log.
//!
//! A simulated NIC runs it where the kernel would run the BPF program, and tests compare the two on random packets. It
//! is written from the rules, over byte slices, not from the C text, so that a mistake has to be made twice to go
//! unseen.

use std::net::Ipv4Addr;

use lm_protocol::geometry::Wire;
use lm_protocol::landing::{LogEntry, SessionAdmission};
use lm_protocol::wire::lm::VERSION;

use crate::layout::{QUEUES, SESSIONS, SHORT_FRAME, STRAY_ROW};
use crate::log::{Log, LogWriter};
use crate::role::Role;
use crate::verdict::{Counters, Verdict};

const ETHERNET_LEN: usize = 14;
const IPV4_LEN: usize = 20;
const UDP_LEN: usize = 8;
const LM_LEN: usize = 24;

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Serial number arithmetic (RFC 1982): `a` is after `b`.
fn is_after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

#[derive(Debug)]
struct Channel {
    role: Role,
    data_port: u16,
    has_xsk: bool,
    sessions: [Option<Open>; SESSIONS as usize],
    accepted: u64,
    log: Option<LogWriter>,
    counters: Counters,
}

impl Channel {
    /// Zero-copy mode: whatever it is, it goes to the socket.
    fn take_unread(&mut self) -> Verdict {
        let Some(log) = self.log.as_mut().filter(|_| self.has_xsk) else {
            return Verdict::PassNoSocket;
        };
        log.skip(self.accepted);
        self.accepted += 1;
        Verdict::RedirectLanding
    }
}

/// An open session and its last accepted fragment.
#[derive(Clone, Copy, Debug)]
struct Open {
    admission: SessionAdmission,
    last: (u32, u32),
}

/// A gate without a kernel.
#[derive(Debug)]
pub struct ModelGate {
    mac: Option<[u8; 6]>,
    local_ip: Option<Ipv4Addr>,
    control_port: u16,
    several_programs: bool,
    now_ns: u64,
    channels: Vec<Channel>,
}

/// The datagram or fragment inside a frame, as far as IPv4 describes it.
struct Packet<'a> {
    frame_len: usize,
    /// The IPv4 packet, cut to its total length.
    ip: &'a [u8],
}

impl Packet<'_> {
    fn source_ip(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(be32(self.ip, 12))
    }

    fn destination_ip(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(be32(self.ip, 16))
    }

    fn padding_len(&self) -> usize {
        self.frame_len - ETHERNET_LEN - self.ip.len()
    }
}

impl ModelGate {
    /// A gate for packets to `local_ip` (any address if `None`) and to these ports.
    pub fn new(local_ip: Option<Ipv4Addr>, data_port: u16, control_port: u16) -> ModelGate {
        let channel = |_| Channel {
            role: Role::None,
            data_port,
            has_xsk: false,
            sessions: [None; SESSIONS as usize],
            accepted: 0,
            log: None,
            counters: Counters::default(),
        };
        ModelGate {
            mac: None,
            local_ip,
            control_port,
            several_programs: false,
            now_ns: 0,
            channels: (0..=STRAY_ROW).map(channel).collect(),
        }
    }

    /// A gate for several programs ([`crate::GateConfig::several_programs`]).
    pub fn for_several(local_ip: Option<Ipv4Addr>, control_port: u16) -> ModelGate {
        ModelGate {
            several_programs: true,
            ..ModelGate::new(local_ip, 0, control_port)
        }
    }

    /// As [`crate::Gate::set_data_port`].
    ///
    /// # Panics
    ///
    /// If `queue` is not below 64.
    pub fn set_data_port(&mut self, queue: u32, data_port: u16) {
        assert!(queue < QUEUES, "queue {queue}");
        self.channel(queue).data_port = data_port;
    }

    /// The interface's address: packets for another one pass. Without, any is right.
    pub fn set_mac(&mut self, mac: [u8; 6]) {
        self.mac = Some(mac);
    }

    /// What CLOCK_MONOTONIC says.
    pub fn set_now(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// As [`crate::Gate::extend_session`].
    pub fn extend_session(&mut self, queue: u32, row: u32, active_until_ns: u64) {
        if let Some(open) = &mut self.channel(queue).sessions[row as usize] {
            open.admission.active_until_ns = active_until_ns;
        }
    }

    /// Whether a program on another queue has this port; its log counts that.
    fn tell_owner(&self, port: u16) -> bool {
        let owned = |channel: &&Channel| channel.data_port == port && channel.log.is_some();
        let owner = (self.channels.iter()).find(owned);
        let Some(log) = owner.and_then(|channel| channel.log.as_ref()) else {
            return false;
        };
        if self.several_programs {
            log.count_elsewhere();
        }
        self.several_programs
    }

    fn channel(&mut self, queue: u32) -> &mut Channel {
        &mut self.channels[queue.min(STRAY_ROW) as usize]
    }

    /// As [`crate::Gate::set_role`]; the log of a queue is made with its first role and then stays.
    ///
    /// # Panics
    ///
    /// If `queue` is not below 64.
    pub fn set_role(&mut self, queue: u32, role: Role) {
        assert!(queue < QUEUES, "queue {queue}");
        let channel = self.channel(queue);
        if role != Role::None && channel.log.is_none() {
            channel.log = Some(Log::new_in_memory().writer());
        }
        if !role.lands() {
            channel.sessions = [None; SESSIONS as usize];
        }
        channel.role = role;
    }

    /// Says whether the queue has an XSK: redirects succeed only then.
    pub fn set_xsk(&mut self, queue: u32, registered: bool) {
        self.channel(queue).has_xsk = registered;
    }

    /// User space's end of the queue's log; `None` for a queue that never had a role.
    pub fn log(&self, queue: u32) -> Option<Log> {
        let log = &self.channels[queue.min(STRAY_ROW) as usize].log;
        log.as_ref().map(|log| log.log.share())
    }

    /// As [`crate::Gate::open_session`].
    ///
    /// # Panics
    ///
    /// If the queue is not a landing queue or the admission is not legal.
    pub fn open_session(&mut self, queue: u32, session: &SessionAdmission) {
        assert_eq!(session.fault(), None);
        let channel = self.channel(queue);
        assert!(channel.role.lands(), "queue {queue}: {:?}", channel.role);
        let row = session.row();
        if let Some(log) = &mut channel.log {
            log.log
                .set_message_limit(row, session.first_message.wrapping_sub(1));
        }
        channel.sessions[row as usize] = Some(Open {
            admission: *session,
            last: session.place_before_first(),
        });
    }

    /// As [`crate::Gate::close_session`].
    pub fn close_session(&mut self, queue: u32, row: u32) {
        self.channel(queue).sessions[row as usize] = None;
    }

    /// Counters of all queues.
    pub fn counters(&self) -> Counters {
        let counters = self.channels.iter().map(|channel| &channel.counters);
        counters.fold(Counters::default(), |sum, one| sum.plus(one))
    }

    /// Judges a frame that arrived on `queue`, logs it if it may land, and counts it.
    ///
    /// A redirect means that the frame now takes a fill entry of the queue's XSK; anything else goes to the stack.
    pub fn run(&mut self, queue: u32, frame: &[u8]) -> Verdict {
        let verdict = match self.channel(queue).role {
            Role::LandingZeroCopy => self.channel(queue).take_unread(),
            _ => self.judge(queue, frame),
        };
        let channel = self.channel(queue);
        channel.counters.add(verdict, 1);
        if channel.role != Role::None
            && let Some(log) = &channel.log
        {
            log.count(verdict);
        }
        verdict
    }

    fn judge(&mut self, queue: u32, frame: &[u8]) -> Verdict {
        if frame.len() < ETHERNET_LEN {
            return Verdict::PassForeign;
        }
        let is_ours = self.mac.is_none_or(|mac| frame[..6] == mac) && be16(frame, 12) == 0x0800;
        let rest = &frame[ETHERNET_LEN..];
        if !is_ours || rest.len() < IPV4_LEN || rest[0] >> 4 != 4 || rest[9] != 17 {
            return Verdict::PassForeign;
        }
        if self.local_ip.is_some_and(|ip| ip.octets() != rest[16..20]) {
            return Verdict::PassForeign;
        }
        if rest[0] & 15 != 5 {
            return Verdict::PassOptions;
        }
        let ip_len = usize::from(be16(rest, 2));
        if ip_len < IPV4_LEN || ip_len > rest.len() {
            return Verdict::PassMalformed;
        }
        let packet = Packet {
            frame_len: frame.len(),
            ip: &rest[..ip_len],
        };
        if be16(rest, 6) & 0x3fff != 0 {
            let verdict = self.judge_fragment(queue, &packet, rest);
            let is_first = be16(rest, 6) & 0x1fff == 0;
            if verdict == Verdict::PassFragment && is_first && rest.len() >= IPV4_LEN + UDP_LEN {
                self.tell_owner(be16(rest, 22));
            }
            return verdict;
        }
        if rest.len() < IPV4_LEN + UDP_LEN {
            return Verdict::PassMalformed;
        }
        let (data_port, control_port) = (self.channel(queue).data_port, self.control_port);
        match be16(rest, 22) {
            port if port == data_port => self.judge_datagram(queue, &packet, rest),
            port if port == control_port => Verdict::PassControl,
            port if self.tell_owner(port) => Verdict::PassElsewhere,
            _ => Verdict::PassForeign,
        }
    }

    fn judge_datagram(&mut self, queue: u32, packet: &Packet<'_>, rest: &[u8]) -> Verdict {
        let udp_len = usize::from(be16(rest, 24));
        if rest.len() < IPV4_LEN + UDP_LEN + LM_LEN
            || udp_len < UDP_LEN + LM_LEN
            || packet.ip.len() != IPV4_LEN + udp_len
        {
            return Verdict::PassMalformed;
        }
        let lm = &packet.ip[IPV4_LEN + UDP_LEN..];
        if lm[0] >> 4 != VERSION {
            return Verdict::PassVersion;
        }
        if usize::from(be16(lm, 2)) != lm.len() - LM_LEN {
            return Verdict::PassMalformed;
        }
        match lm[0] & 15 {
            1 => self.judge_data(queue, packet, lm),
            2..=13 | 15 => {
                let channel = self.channel(queue);
                let is_limited = channel.role == Role::GeneralZeroCopy;
                let may = match channel.role {
                    Role::General => true,
                    Role::GeneralZeroCopy => {
                        (channel.log.as_ref()).is_some_and(|log| channel.accepted < log.posted())
                    }
                    _ => false,
                };
                let one_frame = |log: &LogWriter| match log.capacity() {
                    0 => true,
                    capacity => packet.frame_len <= capacity as usize,
                };
                let fits = channel.log.as_ref().is_none_or(one_frame);
                if !may || !fits || !channel.has_xsk {
                    return Verdict::PassOneCopy;
                }
                channel.accepted += u64::from(is_limited);
                Verdict::RedirectGeneral
            }
            _ => Verdict::PassType,
        }
    }

    fn session(&mut self, queue: u32, row: u32, wire: Wire) -> Option<Open> {
        let now_ns = self.now_ns;
        let may_land = |session: &SessionAdmission| {
            session.wire == wire && (session.active_until_ns == 0 || now_ns < session.active_until_ns)
        };
        let channel = self.channel(queue);
        channel.sessions[row as usize].filter(|open| may_land(&open.admission))
    }

    fn judge_data(&mut self, queue: u32, packet: &Packet<'_>, lm: &[u8]) -> Verdict {
        let key = be64(lm, 4);
        let found = self.session(queue, SessionAdmission::row_of(key), Wire::Lm);
        let Some(Open {
            admission: session, ..
        }) = found
        else {
            return Verdict::PassNoSession;
        };
        if key != session.key {
            return Verdict::PassKey;
        }
        if packet.source_ip() != session.peer_ip
            || packet.destination_ip() != session.local_ip
            || be16(packet.ip, 20) != session.peer_port
        {
            return Verdict::PassPeer;
        }
        if ETHERNET_LEN + IPV4_LEN + UDP_LEN + LM_LEN != usize::from(session.header_len) {
            return Verdict::PassHeader;
        }
        let (message, index, count) = (be32(lm, 12), be32(lm, 16), be32(lm, 20));
        if index >= count {
            return Verdict::PassIndex;
        }
        let (payload_len, full_len) = (lm.len() - LM_LEN, usize::from(session.payload_len));
        let is_last = index == count - 1;
        if (!is_last && payload_len != full_len) || (is_last && !(1..=full_len).contains(&payload_len)) {
            return Verdict::PassLength;
        }
        self.admit(queue, packet, &session, message, index)
    }

    fn judge_fragment(&mut self, queue: u32, packet: &Packet<'_>, rest: &[u8]) -> Verdict {
        let Some(open) = self.session(queue, 0, Wire::IpFrag) else {
            return Verdict::PassFragment;
        };
        let session = open.admission;
        if packet.source_ip() != session.peer_ip || packet.destination_ip() != session.local_ip {
            return Verdict::PassFragment;
        }
        let offset = usize::from(be16(rest, 6) & 0x1fff) * 8;
        let has_more = be16(rest, 6) & 0x2000 != 0;
        let payload = &packet.ip[IPV4_LEN..];
        if offset == 0 {
            if payload.len() < UDP_LEN {
                return Verdict::PassMalformed;
            }
            if be16(payload, 0) != session.peer_port || be16(payload, 2) != self.channel(queue).data_port {
                return Verdict::PassFragment;
            }
        }
        if ETHERNET_LEN + IPV4_LEN + UDP_LEN != usize::from(session.header_len) {
            return Verdict::PassHeader;
        }
        let full_len = usize::from(session.payload_len);
        if !offset.is_multiple_of(full_len) {
            return Verdict::PassIndex;
        }
        if (has_more && payload.len() != full_len) || (!has_more && !(1..=full_len).contains(&payload.len()))
        {
            return Verdict::PassLength;
        }
        let (last_message, _) = open.last;
        // The number nearest to the last one whose low half is the identification.
        let step = be16(rest, 4).wrapping_sub(last_message as u16) as i16;
        let message = last_message.wrapping_add_signed(i32::from(step));
        self.admit(queue, packet, &session, message, (offset / full_len) as u32)
    }

    fn admit(
        &mut self,
        queue: u32,
        packet: &Packet<'_>,
        session: &SessionAdmission,
        message: u32,
        index: u32,
    ) -> Verdict {
        let channel = self.channel(queue);
        let Some(log) = &mut channel.log else {
            return Verdict::PassNoSession;
        };
        if packet.padding_len() > 0 && packet.frame_len > SHORT_FRAME as usize {
            return Verdict::PassLength;
        }
        let row = session.row();
        if (log.log.message_limit(row).wrapping_sub(message) as i32) < 0 {
            return Verdict::PassLimit;
        }
        let Some(open) = &mut channel.sessions[row as usize] else {
            return Verdict::PassNoSession;
        };
        let (last_message, last_index) = open.last;
        let window = |index: u32| index / session.window_fragments;
        let in_order = is_after(message, last_message)
            || (message == last_message
                && (window(index) > window(last_index)
                    || (window(index) == window(last_index) && index < last_index)));
        if !in_order {
            return Verdict::PassOrder;
        }
        if channel.accepted >= log.posted() {
            return Verdict::PassUnposted;
        }
        let capacity = log.capacity() as usize;
        if capacity > 0 {
            let (frames, longest) = log.slot(channel.accepted);
            let taken = packet.frame_len.div_ceil(capacity);
            if taken != usize::from(frames) || packet.frame_len > usize::from(longest) {
                return Verdict::PassSlot;
            }
        }
        if !channel.has_xsk {
            return Verdict::PassNoSocket;
        }
        let entry = LogEntry {
            sequence: channel.accepted as u16,
            session: row as u8,
            message,
            index,
            frame_len: packet.frame_len as u16,
            padding_len: packet.padding_len() as u8,
            cpu: 0,
        };
        log.append(channel.accepted, entry);
        channel.accepted += 1;
        open.last = (message, index);
        Verdict::RedirectLanding
    }
}
