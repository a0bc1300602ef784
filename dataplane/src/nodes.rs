//! The endpoint's own admission: one [`Node`] behind each of its sockets, the state machine that the daemon runs for a whole host.
//!
//! ```text
//!  control socket ──▶ node of sessions that land (unless a daemon grants them) ─┐   Landing::open, close ──▶ granting.rs
//!  data socket ─────▶ node of sessions by the one-copy path ────────────────────┴─▶ Action::Tell ─────────▶ control.rs
//! ```

use std::time::Duration;

use lm_protocol::admission::{Action, ClusterKey, Config, Limits, Local, Node, Policy, Ticket};
use lm_protocol::landing::PLACES;
use lm_protocol::session::Admit;
use lm_protocol::time::Time;

use crate::engine::Engine;
use crate::one_copy::ONE_COPY_QUEUE;
use crate::port::{Port, Socket};

/// Places that are not used any more, and requests that could not be met, are looked at this often.
const LOOK_AGAIN_NS: u64 = 50_000_000;

/// Requests of one source address that wait in turn: anybody may ask, and others are to have their turn.
const WAITING_OF_ADDRESS: usize = 4;

struct Own {
    node: Node,
    /// When the node has something to do.
    due: Option<Time>,
    looked_ns: u64,
    /// Landing queues with fewer places than there can be.
    alone: Vec<u16>,
}

/// Both nodes: taken out of the engine while one of them acts on it.
pub(crate) struct Nodes {
    /// Of sessions that land, unless a daemon grants them.
    landing: Option<Own>,
    /// Of sessions by the one-copy path.
    one_copy: Own,
    pub(crate) admit: Box<dyn Admit + Send>,
    actions: Vec<Action>,
}

impl Nodes {
    pub(crate) fn new(
        data: std::net::SocketAddrV4,
        has_daemon: bool,
        key: Option<ClusterKey>,
        patience: Duration,
        admit: Box<dyn Admit + Send>,
        boot_ids: [u64; 2],
    ) -> Nodes {
        let own = |port: u16, boot_id: u64, key: Option<ClusterKey>, sessions_of_address: usize| Own {
            node: Node::new(
                Config {
                    address: std::net::SocketAddrV4::new(*data.ip(), port),
                    boot_id,
                    key,
                    policy: Policy::Concurrent,
                    limits: Limits {
                        patience,
                        sessions_of_address,
                        waiting_of_address: WAITING_OF_ADDRESS,
                        ..Limits::default()
                    },
                },
                Time::ZERO,
            ),
            due: None,
            looked_ns: 0,
            alone: Vec::new(),
        };
        Nodes {
            // Others are to find a place, whatever one host asks for.
            landing: (!has_daemon)
                .then(|| own(data.port().wrapping_add(1), boot_ids[0], key, PLACES as usize / 2)),
            // Between endpoints that know each other already.
            one_copy: own(data.port(), boot_ids[1], None, usize::MAX),
            admit,
            actions: Vec::new(),
        }
    }

    fn of(&self, socket: Socket) -> Option<&Own> {
        match socket {
            Socket::Control => self.landing.as_ref(),
            Socket::Data => Some(&self.one_copy),
        }
    }

    fn of_mut(&mut self, socket: Socket) -> Option<&mut Own> {
        match socket {
            Socket::Control => self.landing.as_mut(),
            Socket::Data => Some(&mut self.one_copy),
        }
    }

    /// Something was heard of a session that was granted by this socket. `false`: a daemon grants such sessions.
    pub(crate) fn touched(&mut self, socket: Socket, session_key: u64, now: Time) -> bool {
        let own = self.of_mut(socket);
        own.map(|own| own.node.touched(now, session_key)).is_some()
    }

    /// For how long the receiver asks to wait, where it had no place when it was asked last.
    pub(crate) fn busy(&self, socket: Socket, ticket: u32) -> Option<Duration> {
        self.of(socket)?.node.busy(Ticket(ticket))
    }

    fn is_leaving(&self) -> bool {
        let own = self.landing.iter().chain([&self.one_copy]);
        own.map(|own| &own.node).any(Node::is_leaving)
    }
}

impl<P: Port> Engine<P> {
    /// Has a node do something, and does what it says. `None`: there is none, or it is at work.
    pub(crate) fn with_node<R>(
        &mut self,
        socket: Socket,
        now_ns: u64,
        work: impl FnOnce(&mut Node, Time, &mut Local<'_>, &mut Vec<Action>) -> R,
    ) -> Option<R> {
        let mut nodes = self.nodes.take()?;
        let mut actions = std::mem::take(&mut nodes.actions);
        let Nodes {
            landing,
            one_copy,
            admit,
            ..
        } = &mut nodes;
        let own = match socket {
            Socket::Control => landing.as_mut(),
            Socket::Data => Some(one_copy),
        };
        let result = own.map(|own| {
            let mut local = Local {
                policy: admit.as_mut(),
                landing: self,
            };
            let result = work(&mut own.node, Time::from_nanos(now_ns), &mut local, &mut actions);
            own.due = own.node.next_deadline();
            own.looked_ns = now_ns;
            result
        });
        self.nodes = Some(nodes);
        for action in actions.drain(..) {
            match action {
                Action::Send { to, datagram } => self.send_datagram(socket, to, datagram.as_bytes()),
                Action::Tell {
                    ticket,
                    outcome,
                    fallback,
                } => self.told(socket, ticket.0, outcome, fallback, now_ns),
                // To hosts that are known to daemons alone.
                _ => {}
            }
        }
        if let Some(nodes) = &mut self.nodes {
            nodes.actions = actions;
        }
        if let Some((data, sender_id)) = self.introductions.restarted.take()
            && let Some(index) = self.peers.find(data)
        {
            self.introduce(index, sender_id, now_ns);
        }
        result
    }

    /// Does what is due, and looks at places that may be free meanwhile.
    pub(crate) fn run_nodes(&mut self, now_ns: u64) {
        self.fill_places(now_ns);
        for socket in [Socket::Control, Socket::Data] {
            let own = self.nodes.as_ref().and_then(|nodes| nodes.of(socket));
            let is_due = own.is_some_and(|own| {
                let may_change = own.due.is_some() && now_ns.saturating_sub(own.looked_ns) >= LOOK_AGAIN_NS;
                may_change || own.due.is_some_and(|due| due <= Time::from_nanos(now_ns))
            });
            if is_due {
                self.with_node(socket, now_ns, |node, now, local, out| {
                    node.on_timer(now, local, out)
                });
            }
        }
    }

    /// What was to land in zero-copy mode lands in copy mode: there is room for more sessions.
    fn fill_places(&mut self, now_ns: u64) {
        let landing = self.nodes.as_mut().and_then(|nodes| nodes.landing.as_mut());
        let alone = match landing {
            Some(own) if self.fixed.caps.witness => std::mem::take(&mut own.alone),
            _ => return,
        };
        if !alone.is_empty() {
            let port = self.port.local().port();
            let more = places_of(&alone, PLACES as usize - 1);
            self.with_node(Socket::Control, now_ns, |node, _, _, _| {
                node.add_places(port, &more)
            });
        }
    }

    /// Whether ends of sessions are on their way that nobody has confirmed.
    pub(crate) fn is_leaving(&self) -> bool {
        self.nodes.as_ref().is_some_and(Nodes::is_leaving)
    }

    /// From now on others may ask for sessions here.
    pub(crate) fn open_to_requests(&mut self, landing_queues: &[u16]) {
        let port = self.port.local().port();
        let places = match !self.fixed.caps.witness {
            // Whose packet came nobody can tell there.
            true => 1,
            false => PLACES as usize,
        };
        let landing = places_of(landing_queues, places);
        if let Some(own) = self.nodes.as_mut().and_then(|nodes| nodes.landing.as_mut())
            && places == 1
        {
            own.alone = landing_queues.to_vec();
        }
        for (socket, queues) in [
            (Socket::Control, &landing[..]),
            (Socket::Data, &[ONE_COPY_QUEUE; PLACES as usize]),
        ] {
            self.with_node(socket, 0, |node, now, local, out| {
                node.add_receiver(now, port, queues, local, out);
            });
        }
    }

    /// The endpoint goes: ends the sessions that it granted. Their senders need not wait for the lease to know.
    pub(crate) fn close_to_requests(&mut self, now_ns: u64) {
        let port = self.port.local().port();
        for socket in [Socket::Control, Socket::Data] {
            self.with_node(socket, now_ns, |node, now, local, out| {
                node.remove_receiver(now, port, local, out);
            });
        }
    }
}

/// Each landing queue as often as it has places for sessions.
fn places_of(queues: &[u16], places: usize) -> Vec<u16> {
    let places = |&queue: &u16| std::iter::repeat_n(queue, places);
    queues.iter().flat_map(places).collect()
}
