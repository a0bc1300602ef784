//! What a landing queue's rows hold.

use super::super::program::ProgramId;
use super::ROWS;
use crate::clock;
use lm_dataplane::ipc::{Event, Offer, Role};
use lm_protocol::landing::SessionAdmission;
use lm_protocol::session::Unused;
use std::collections::BTreeMap;
use std::net::SocketAddrV4;

/// What programs are to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// A session was granted: what of it, the node knows.
    Opened {
        session_key: u64,
        row: u16,
    },
    Event(Event),
}

/// A session that is not over, as far as its program has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) delivered: u32,
    pub(super) unused: Option<Unused>,
}

impl Granted {
    /// Nothing was said: it is unused from now on.
    pub(super) fn new() -> Granted {
        let since = clock::now();
        let is_idle = true;
        Granted {
            delivered: 0,
            unused: Some(Unused { since, is_idle }),
        }
    }
}

/// One of the gate's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Row {
    Free,
    Taken {
        /// The sender's data address.
        from: SocketAddrV4,
        /// What the gate is told.
        admission: SessionAdmission,
        /// It has a place: the gate is open to it, or its program may open it.
        has_place: bool,
    },
    Closing {
        session_key: u64,
        /// Its program has done with it.
        released: bool,
    },
}

/// Who has a queue.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub(crate) program: ProgramId,
    pub(crate) data_port: u16,
    /// What the gate redirects; `None` before there is a channel.
    pub(crate) role: Option<Role>,
    pub(crate) offer: Option<Offer>,
    /// Its daemon was restarted, and it has not come back yet.
    pub(crate) away: bool,
    pub(crate) rows: [Row; ROWS],
    /// By their keys.
    pub(crate) sessions: BTreeMap<u64, Granted>,
}

impl Holder {
    pub(crate) fn new(program: ProgramId, data_port: u16) -> Holder {
        Holder {
            program,
            data_port,
            role: None,
            offer: None,
            away: false,
            rows: [Row::Free; ROWS],
            sessions: BTreeMap::new(),
        }
    }

    /// Sessions without a place.
    pub(super) fn aside(&self) -> impl Iterator<Item = u64> {
        self.rows.iter().filter_map(|row| match *row {
            Row::Taken {
                admission,
                has_place: false,
                ..
            } => Some(admission.key),
            _ => None,
        })
    }

    pub(super) fn row_of(&self, session_key: u64) -> Option<usize> {
        self.rows.iter().position(|row| match row {
            Row::Free => false,
            Row::Taken { admission, .. } => admission.key == session_key,
            Row::Closing { session_key: key, .. } => *key == session_key,
        })
    }
}

/// An XSK that a program got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Socket {
    pub(crate) uid: u32,
    /// Its memory.
    pub(crate) len_bytes: u64,
    /// Another thread looks whether it is gone.
    pub(crate) looked_for: bool,
}
