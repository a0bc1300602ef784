//! A node and what it hears: bytes of anybody, and messages of hosts that have the key and no sense.
//!
//! Input: steps of `[length, host, kind, …bytes]`. Even kinds: the bytes as they are, from that host. Odd kinds: the bytes as a body in a
//! seal of that host, with the next sequence number and the echo that it was asked for, so that they come as far as possible.

use crate::admission::message::{MAX_BODY_LEN, Message};
use crate::admission::seal::SealHeader;
use crate::admission::*;
use crate::control::RejectReason;
use crate::geometry::LinkShape;
use crate::session::*;
use crate::time::Time;
use core::time::Duration;
use std::net::{Ipv4Addr, SocketAddrV4};

const HOSTS: usize = 5;
const PORT: u16 = 7168;

#[derive(Default)]
struct Gate {
    open: Vec<u64>,
    next_key: u64,
}

impl Landing for Gate {
    fn open(&mut self, _: u16, application: &Application<'_>, permit: &Permit) -> Result<Terms, Refusal> {
        let layout = application
            .request
            .layout_at(1500, LinkShape::IPV4)
            .map_err(|_| RejectReason::Unsupported)?;
        self.next_key += 1;
        self.open.push(self.next_key);
        assert!(self.open.len() <= 2);
        Ok(Terms {
            session_key: self.next_key,
            data_port: PORT,
            layout,
            tx_queue: None,
            prefix: 0,
            frames_per_packet: 1,
            fillers: 0,
            repeats_apart: false,
            goes_ahead: true,
            landing_port: None,
            max_message_len: permit.max_message_len,
            window: application.request.window,
            packet_limit: 1,
            first_message: 0,
        })
    }

    fn close(&mut self, session: &Session, _: CloseReason) -> u32 {
        let place = self.open.iter().position(|&key| key == session.grant.session_key);
        self.open.swap_remove(place.expect("an open session"));
        0
    }
}

fn address(host: usize) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1 + host as u8), 7169)
}

/// Steps of a fuzzer, as above.
pub fn admission(bytes: &[u8]) {
    let key = ClusterKey::new(&[7; 32]).expect("long enough");
    let Some((&first, mut rest)) = bytes.split_first() else {
        return;
    };
    let policy = match first % 2 {
        0 => Policy::Concurrent,
        _ => Policy::Exclusive {
            voters: (0..3).map(address).collect(),
        },
    };
    let limits = Limits {
        hosts: 1 + usize::from(first / 2) % HOSTS,
        outgoing: 4,
        waiting: 3,
        ..Limits::default()
    };
    let mut now = Time::from_millis(10_000);
    let config = Config {
        address: address(0),
        boot_id: 1,
        key: Some(key.clone()),
        policy,
        limits,
    };
    let mut node = Node::new(config, Time::ZERO);
    let mut permit = Permit {
        max_message_len: 1 << 40,
        lease: Duration::from_secs(5),
    };
    let mut gate = Gate::default();
    let mut local = Local {
        policy: &mut permit,
        landing: &mut gate,
    };
    let mut out = Vec::new();
    node.add_receiver(now, PORT, &[1, 2], &mut local, &mut out);
    let mut sequences = [0u64; HOSTS];
    let mut challenges = [0u64; HOSTS];
    while let [len, host, kind, tail @ ..] = rest {
        let (body, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = tail;
        let host = usize::from(*host) % HOSTS;
        now += Duration::from_millis(u64::from(*kind / 4) * 10);
        match kind % 4 {
            0 => {
                node.on_datagram(now, address(host), body, &mut local, &mut out);
            }
            // A program of this host asks for a session with that one.
            2 if body.len() >= 24 => {
                if let Ok(Message::Session { message, .. }) = Message::parse(body)
                    && let crate::control::ControlMessage::Request(request) = message
                {
                    let patience = Duration::from_secs(1);
                    let _ = node.request(now, address(host), PORT, request, patience, &mut local, &mut out);
                }
            }
            _ => {
                let body = &body[..body.len().min(MAX_BODY_LEN)];
                sequences[host] += 1;
                let header = SealHeader {
                    port: PORT,
                    boot_id: 100 + host as u64,
                    sequence: sequences[host],
                    challenge: 0,
                    echo: challenges[host],
                };
                let datagram = key.seal(address(host), Some(address(0)), &header, body);
                node.on_datagram(now, address(host), datagram.as_bytes(), &mut local, &mut out);
            }
        }
        for action in out.drain(..) {
            if let Action::Send { to, datagram } = action
                && let Some(host) = (0..HOSTS).find(|&host| address(host) == to)
            {
                let opened = key.open(address(0), to, datagram.as_bytes());
                let (header, body) = opened.expect("what it says can be opened");
                assert!(Message::parse(body).is_ok());
                if header.challenge != 0 {
                    challenges[host] = header.challenge;
                }
            }
        }
        let usage = node.usage(now);
        assert!(usage.hosts <= limits.hosts && usage.listed <= limits.hosts);
        assert!(usage.outgoing <= 4 && usage.waiting <= 3 && usage.sessions <= 2);
    }
    // Left alone, it comes to rest.
    for _ in 0..10_000 {
        let Some(deadline) = node.next_deadline() else {
            assert_eq!(node.usage(now).sessions, 0);
            assert!(gate.open.is_empty());
            return;
        };
        now = now.max(deadline);
        node.on_timer(now, &mut local, &mut out);
        out.clear();
    }
    panic!("no rest");
}
