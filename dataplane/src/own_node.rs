//! The endpoint's own admission, where no daemon grants its sessions: the [`Node`] that a daemon runs for a whole host.
//!
//! ```text
//!  control socket ──▶ node ─┬─▶ Landing::open, open_aside, land, set_aside, close ──▶ granting.rs, aside.rs
//!                           └─▶ Action::Tell ──────────────────────────────────────▶ control.rs
//! ```

use std::net::SocketAddrV4;
use std::time::Duration;

use lm_protocol::admission::{Action, ClusterKey, Config, Limits, Local, Node, Policy};
use lm_protocol::landing::PLACES;
use lm_protocol::session::Admit;
use lm_protocol::time::Time;

use crate::engine::Engine;
use crate::port::{Port, Socket};

/// Places that are not used any more, and sessions and requests that wait for one, are looked at this often.
const LOOK_AGAIN_NS: u64 = 50_000_000;

/// Requests of one source address that wait in turn: anybody may ask, and others are to have their turn.
const WAITING_OF_ADDRESS: usize = 4;

/// The node: taken out of the engine while it acts on it.
pub(crate) struct OwnNode {
    node: Node,
    admit: Box<dyn Admit + Send>,
    /// When the node has something to do.
    due: Option<Time>,
    looked_ns: u64,
    /// Landing queues with fewer places than there can be.
    alone: Vec<u16>,
    actions: Vec<Action>,
}

impl OwnNode {
    pub(crate) fn new(
        data: SocketAddrV4,
        key: Option<ClusterKey>,
        patience: Duration,
        admit: Box<dyn Admit + Send>,
        boot_id: u64,
    ) -> OwnNode {
        OwnNode {
            node: Node::new(OwnNode::config(data, key, patience, boot_id), Time::ZERO),
            admit,
            due: None,
            looked_ns: 0,
            alone: Vec::new(),
            actions: Vec::new(),
        }
    }

    fn config(data: SocketAddrV4, key: Option<ClusterKey>, patience: Duration, boot_id: u64) -> Config {
        Config {
            address: SocketAddrV4::new(*data.ip(), data.port().wrapping_add(1)),
            boot_id,
            key,
            policy: Policy::Concurrent,
            limits: Limits {
                patience,
                // Others are to find a place, whatever one host asks for.
                sessions_of_address: PLACES as usize / 2,
                waiting_of_address: WAITING_OF_ADDRESS,
                ..Limits::default()
            },
        }
    }

    /// Something was heard of a session that the node granted.
    pub(crate) fn touched(&mut self, session_key: u64, now: Time) {
        self.node.touched(now, session_key);
    }
}

impl<P: Port> Engine<P> {
    /// Has the node do something, and does what it says. `None`: there is none, or it is at work.
    pub(crate) fn with_node<R>(
        &mut self,
        now_ns: u64,
        work: impl FnOnce(&mut Node, Time, &mut Local<'_>, &mut Vec<Action>) -> R,
    ) -> Option<R> {
        let mut own = self.node.take()?;
        let mut actions = std::mem::take(&mut own.actions);
        let mut local = Local {
            policy: own.admit.as_mut(),
            landing: self,
        };
        let result = work(&mut own.node, Time::from_nanos(now_ns), &mut local, &mut actions);
        own.due = own.node.next_deadline();
        own.looked_ns = now_ns;
        self.node = Some(own);
        for action in actions.drain(..) {
            match action {
                Action::Send { to, datagram } => self.send_datagram(Socket::Control, to, datagram.as_bytes()),
                Action::Tell { ticket, outcome } => self.told(ticket.0, outcome, now_ns),
                // To hosts that are known to daemons alone.
                _ => {}
            }
        }
        if let Some(own) = &mut self.node {
            own.actions = actions;
        }
        Some(result)
    }

    /// Does what is due, and looks at places that may be free meanwhile.
    pub(crate) fn run_node(&mut self, now_ns: u64) {
        self.fill_places(now_ns);
        let is_due = self.node.as_ref().is_some_and(|own| {
            let may_change = own.due.is_some() && now_ns.saturating_sub(own.looked_ns) >= LOOK_AGAIN_NS;
            may_change || own.due.is_some_and(|due| due <= Time::from_nanos(now_ns))
        });
        if is_due {
            self.with_node(now_ns, |node, now, local, out| node.on_timer(now, local, out));
        }
    }

    /// What was to land in zero-copy mode lands in copy mode: there is room for more sessions.
    fn fill_places(&mut self, now_ns: u64) {
        let alone = match &mut self.node {
            Some(own) if self.fixed.caps.witness => std::mem::take(&mut own.alone),
            _ => return,
        };
        if !alone.is_empty() {
            let port = self.fixed.local.port();
            let more = places_of(&alone, PLACES as usize - 1);
            self.with_node(now_ns, |node, _, _, _| node.add_places(port, &more));
        }
    }

    /// Whether ends of sessions are on their way that nobody has confirmed.
    pub(crate) fn is_leaving(&self) -> bool {
        self.node.as_ref().is_some_and(|own| own.node.is_leaving())
    }

    /// From now on others may ask for sessions here.
    pub(crate) fn open_to_requests(&mut self, landing_queues: &[u16]) {
        let port = self.fixed.local.port();
        let places = match !self.fixed.caps.witness {
            // Whose packet came nobody can tell there.
            true => 1,
            false => PLACES as usize,
        };
        let queues = places_of(landing_queues, places);
        if let Some(own) = self.node.as_mut().filter(|_| places == 1) {
            own.alone = landing_queues.to_vec();
        }
        self.with_node(0, |node, now, local, out| {
            node.add_receiver(now, port, &queues, local, out);
        });
    }

    /// So many sessions may be without a place.
    #[cfg(test)]
    pub(crate) fn limit_aside(&mut self, aside: usize) {
        let (data, queue) = (
            self.fixed.local,
            self.landing.as_ref().map(|landing| landing.queue as u16),
        );
        let boot_id = self.entropy.draw();
        let own = self.node.take().expect("a node of its own");
        let config = OwnNode::config(data, None, self.config.patience, boot_id);
        let limits = Limits {
            aside,
            ..config.limits
        };
        let node = Node::new(Config { limits, ..config }, Time::ZERO);
        self.node = Some(OwnNode { node, ..own });
        self.open_to_requests(&[queue.expect("a landing queue")]);
    }

    /// The endpoint goes: ends the sessions that it granted. Their senders need not wait for the lease to know.
    pub(crate) fn close_to_requests(&mut self, now_ns: u64) {
        let port = self.fixed.local.port();
        self.with_node(now_ns, |node, now, local, out| {
            node.remove_receiver(now, port, local, out);
        });
    }
}

/// Each landing queue as often as it has places for sessions.
fn places_of(queues: &[u16], places: usize) -> Vec<u16> {
    let places = |&queue: &u16| std::iter::repeat_n(queue, places);
    queues.iter().flat_map(places).collect()
}
