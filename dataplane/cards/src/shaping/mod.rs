//! Shaping: at what rate the kernel's traffic leaves an interface.
//!
//! AF_XDP passes no qdisc in copy mode, so that a root qdisc holds back the kernel's packets alone:
//!
//! ```text
//! root: HTB 4c4d:    ─┬─ marked EF (DSCP 46): unshaped, before all others
//!                     └─ class 4c4d:2: the rate of Shaping::set_rate, two frames at once; waits in a TBF of 50 ms
//! ```
//!
//! HTB and not TBF keeps the rate: a change leaves its tokens alone, and a change of TBF's fills its bucket. It passes a TCP packet of many
//! segments whole, so these are bounded to two (`gso_max_segs`), and a card does not cut them itself (TSO). A connection that was there before
//! knows nothing of that: its packets are cut by the TBF in which they wait, which is as fast as a TBF can be and holds nothing back.
//!
//! Whatever is changed is written down in `/run/lm/shaping` first and undone when the [`Shaping`] is dropped; after a crash, by the next
//! [`Shaping::apply`] or [`Shaping::recover`] for the same interface. A root qdisc that somebody set is left alone, or, if asked, replaced and
//! put back.
//!
//! Shaping changes an interface for everybody who uses it and takes CAP_NET_ADMIN.

mod change;
mod error;
mod follower;
mod link;

use crate::interface::Interface;
use crate::journal::{Journal, Store, StoreLock};
use change::Change;
pub use error::ShapingError;
pub use follower::{Followed, Follower};
use link::Link;
pub use link::Traffic;

/// Segments of a packet that leaves the qdisc at once.
const GSO_MAX_SEGS: u32 = 2;
const ETHERNET_HEADER_LEN: u32 = 14;

/// What is to become of a root qdisc that somebody set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Foreign {
    /// It stays, and nothing is shaped.
    #[default]
    Keep,
    /// It gives way meanwhile, unless it has classes: those could not be restored.
    Replace,
}

/// An interface whose kernel traffic is shaped. Dropping it restores the interface.
#[derive(Debug)]
pub struct Shaping {
    journal: Journal<Change>,
    frame_len: u32,
}

impl Shaping {
    /// Where the changes are written down: a folder that its owner alone may write in.
    pub const FOLDER: &str = "/run/lm/shaping";

    /// Shapes what the kernel sends on an interface of the calling thread's network namespace to a rate in bytes a second, 24 of each frame on
    /// the wire included. What a dead process left is undone first.
    ///
    /// # Errors
    ///
    /// See [`ShapingError`]; the interface is as before then.
    pub fn apply(
        interface: &Interface,
        bytes_per_second: u64,
        foreign: Foreign,
    ) -> Result<Shaping, ShapingError> {
        let link = Box::new(Link::open(interface.index)?);
        let (mut journal, lock) = Journal::<Change>::open(link, interface, Store::new(Shaping::FOLDER))?;
        journal.recover(&lock)?;
        let before = journal.device.root()?;
        if let Some(root) = &before
            && (foreign == Foreign::Keep || !root.is_restorable())
        {
            return Err(ShapingError::Foreign {
                interface: interface.name.clone(),
                kind: root.kind.clone(),
                major: (root.handle >> 16) as u16,
                is_restorable: root.is_restorable(),
            });
        }
        let mut shaping = Shaping {
            journal,
            frame_len: interface.mtu + ETHERNET_HEADER_LEN,
        };
        // Where this fails dropping it restores the interface, which needs the lock: that goes first, as the younger one.
        let lock = lock;
        shaping.settle(Change::Root { before }, bytes_per_second, &lock)?;
        Ok(shaping)
    }

    fn settle(&mut self, root: Change, bytes_per_second: u64, lock: &StoreLock) -> Result<(), ShapingError> {
        self.journal.change(root, lock)?;
        self.journal.device.let_ef_pass()?;
        self.set_rate(bytes_per_second)?;
        let before = self.journal.device.gso_max_segs()?;
        if before > GSO_MAX_SEGS {
            let after = GSO_MAX_SEGS;
            self.journal.change(Change::GsoMaxSegs { before, after }, lock)?;
        }
        let tso = self.journal.device.tso(true)?;
        if !tso.is_empty() {
            self.journal.change(Change::TsoOff(tso), lock)?;
        }
        Ok(())
    }

    /// Another rate. What waits stays, and so do the tokens.
    ///
    /// # Errors
    ///
    /// [`ShapingError::Device`].
    pub fn set_rate(&mut self, bytes_per_second: u64) -> Result<(), ShapingError> {
        Ok((self.journal.device).set_class(bytes_per_second, self.frame_len)?)
    }

    /// What of the shaped packets has left and what waits.
    ///
    /// # Errors
    ///
    /// [`ShapingError::Device`].
    pub fn traffic(&self) -> Result<Traffic, ShapingError> {
        Ok(self.journal.device.traffic()?)
    }

    /// Longest frame in bytes, from its Ethernet header on.
    pub fn frame_len(&self) -> u32 {
        self.frame_len
    }

    /// Undoes what a dead process left on an interface of the calling thread's network namespace; tells whether there was anything.
    ///
    /// # Errors
    ///
    /// See [`ShapingError`]: [`JournalError::InUse`](crate::JournalError::InUse) while the process lives.
    pub fn recover(interface: &Interface) -> Result<bool, ShapingError> {
        let store = Store::new(Shaping::FOLDER);
        if store.path(interface.index).is_ok_and(|path| !path.exists()) {
            return Ok(false);
        }
        let link = Box::new(Link::open(interface.index)?);
        let (mut journal, lock) = Journal::<Change>::open(link, interface, store)?;
        Ok(journal.recover(&lock)?)
    }
}

/// A journal that a process left when it died: what is believed of it can be undone, and is the same again when it is written.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn recover_from(text: &str) {
    use crate::journal::{Change as _, parse};
    let Ok(record) = parse::<Change>(text) else { return };
    let again = serde_json::to_string(&record).expect("a record");
    assert_eq!(parse(&again).as_ref(), Ok(&record));
    for change in &record.changes {
        assert!(change.is_possible());
        if let Change::Root { before: Some(before) } = change {
            let message =
                netlink_packet_route::tc::TcMessage::from_parts(Default::default(), before.attributes());
            let message = netlink_packet_route::RouteNetlinkMessage::NewQueueDiscipline(message);
            crate::netlink::serialized(&message, 0);
        }
    }
}
