//! The endpoint's own admission, where no daemon grants its sessions: the [`Node`] that a daemon runs for a whole host.
//!
//! ```text
//!  control socket ──▶ node ─┬─▶ Landing::open, open_aside, land, set_aside, close ──▶ granting.rs, aside.rs
//!                           └─▶ Action::Send, Action::Tell ────────────────────────▶ control.rs
//! ```

use std::net::SocketAddrV4;
use std::time::Duration;

use lm_protocol::admission::{Action, ClusterKey, Config, Limits, Local, Node, Policy};
use lm_protocol::landing::PLACES;
use lm_protocol::session::{Admit, Landing};
use lm_protocol::time::Time;

/// Places that are not used any more, and sessions and requests that wait for one, are looked at this often.
const LOOK_AGAIN_NS: u64 = 50_000_000;

/// Requests of one source address that wait in turn: anybody may ask, and others are to have their turn.
const WAITING_OF_ADDRESS: usize = 4;

/// The node, with what it decides by and what it has to say.
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
    /// `lands`: whether a session may have a place at all.
    pub(crate) fn new(
        data: SocketAddrV4,
        key: Option<ClusterKey>,
        patience: Duration,
        admit: Box<dyn Admit + Send>,
        boot_id: u64,
        lands: bool,
    ) -> OwnNode {
        let config = OwnNode::config(data, key, patience, boot_id, lands);
        OwnNode {
            node: Node::new(config, Time::ZERO),
            admit,
            due: None,
            looked_ns: 0,
            alone: Vec::new(),
            actions: Vec::new(),
        }
    }

    fn config(
        data: SocketAddrV4,
        key: Option<ClusterKey>,
        patience: Duration,
        boot_id: u64,
        lands: bool,
    ) -> Config {
        Config {
            address: SocketAddrV4::new(*data.ip(), data.port().wrapping_add(1)),
            boot_id,
            key,
            policy: Policy::Concurrent,
            limits: Limits {
                patience,
                // Others are to find a place, whatever one host asks for.
                sessions_of_address: if lands { PLACES as usize / 2 } else { 0 },
                waiting_of_address: WAITING_OF_ADDRESS,
                ..Limits::default()
            },
        }
    }

    /// Something was heard of a session that the node granted.
    pub(crate) fn touched(&mut self, session_key: u64, now: Time) {
        self.node.touched(now, session_key);
    }

    /// Has the node do something. It acts on `landing` at once; what it has to say is taken with [`OwnNode::take_actions`].
    pub(crate) fn work<R>(
        &mut self,
        now_ns: u64,
        landing: &mut dyn Landing,
        work: impl FnOnce(&mut Node, Time, &mut Local<'_>, &mut Vec<Action>) -> R,
    ) -> R {
        let policy = self.admit.as_mut();
        let mut local = Local { policy, landing };
        let now = Time::from_nanos(now_ns);
        let result = work(&mut self.node, now, &mut local, &mut self.actions);
        self.due = self.node.next_deadline();
        self.looked_ns = now_ns;
        result
    }

    pub(crate) fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Keeps the room of actions that were carried out.
    pub(crate) fn keep_room(&mut self, carried_out: Vec<Action>) {
        self.actions = carried_out;
    }

    /// Whether it has something to do, or places may be free meanwhile.
    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        let may_change = self.due.is_some() && now_ns.saturating_sub(self.looked_ns) >= LOOK_AGAIN_NS;
        may_change || self.due.is_some_and(|due| due <= Time::from_nanos(now_ns))
    }

    /// Whether ends of sessions are on their way that nobody has confirmed.
    pub(crate) fn is_leaving(&self) -> bool {
        self.node.is_leaving()
    }

    /// The places of landing queues, each queue as often as it has some. Where nobody can tell whose packet came (`alone`) a queue has one.
    pub(crate) fn places(&mut self, queues: &[u16], alone: bool) -> Vec<u16> {
        if !alone {
            return places_of(queues, PLACES as usize);
        }
        self.alone = queues.to_vec();
        places_of(queues, 1)
    }

    /// More places of queues that had one: packets can be told apart there now.
    pub(crate) fn more_places(&mut self) -> Vec<u16> {
        places_of(&std::mem::take(&mut self.alone), PLACES as usize - 1)
    }

    /// As it begins, with so many sessions without a place at most.
    #[cfg(test)]
    pub(crate) fn limited(
        self,
        data: SocketAddrV4,
        patience: Duration,
        boot_id: u64,
        aside: usize,
    ) -> OwnNode {
        let config = OwnNode::config(data, None, patience, boot_id, true);
        let limits = Limits {
            aside,
            ..config.limits
        };
        let node = Node::new(Config { limits, ..config }, Time::ZERO);
        OwnNode { node, ..self }
    }
}

/// Each landing queue as often as it has places for sessions.
fn places_of(queues: &[u16], places: usize) -> Vec<u16> {
    let places = |&queue: &u16| std::iter::repeat_n(queue, places);
    queues.iter().flat_map(places).collect()
}
