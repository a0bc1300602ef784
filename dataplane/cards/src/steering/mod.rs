//! Steering: which packets a network card puts on a landing queue, for zero-copy mode.
//!
//! In zero-copy mode the card writes a packet into the landing zone before any program sees it, so that a landing queue
//! must carry its sessions alone. [`Steering::apply`] takes landing queues out of the card's general spread (the RSS
//! indirection table) and lets the card hash UDP ports. [`Steering::lead`] brings a session's packets to its queue then:
//!
//! - *By hash*: the queue has one entry of the table while it has a session, and the sender's fragments have a source port whose
//!   hash leads there. Every card with an indirection table can do that; on `igb` and `virtio-net` (in a virtual machine, Linux
//!   7.3) each of 400 packets came to the queue that was computed for it. Of other traffic the queue gets, while the session
//!   lasts, what happens to have such a hash: one flow in as many as the table has entries.
//! - *By rule*, where the hash cannot be computed: a flow rule names the session's addresses and ports. *Untested on hardware.*
//!
//! Whatever is changed is written down in `/run/lm/steering` first and undone when the [`Steering`] is dropped; after a crash,
//! by the next [`Steering::apply`] for the same interface.
//!
//! Steering changes a card for everybody who uses it and takes CAP_NET_ADMIN.

mod card;
pub(crate) mod change;
mod error;
pub(crate) mod rules;
mod spread;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    not(test),
    allow(dead_code, unused_imports, reason = "the fuzzer uses a part of the tests")
)]
pub(crate) mod tests;

use std::collections::BTreeSet;
use std::io;
use std::num::NonZeroU16;

use lm_protocol::rss::{FIRST_SOURCE_PORT, Flow, HashInput, Rss, RssError, RssKey};

use crate::ethtool::{self, Ethtool, EthtoolError, Feature, HashProblem, RssSettings, system_key};
use crate::interface::Interface;
use crate::journal::{Change as _, Journal, JournalError, Store, StoreLock};
use card::Card;
use change::{Change, join_tables};
pub use error::SteeringError;
use rules::{FlowPorts, FlowRule};
use spread::spread;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use tests::journal::recover_from;

/// Where the changes are written down.
const FOLDER: &str = "/run/lm/steering";

/// Length of the key that is assumed where a driver does not show its own, in bytes.
const USUAL_KEY_LEN: usize = 40;

/// A card whose landing queues are kept for LM. Dropping it restores the card.
#[derive(Debug)]
pub struct Steering {
    journal: Journal<Change>,
    rx_queues: u32,
    rss: RssSettings,
    hash_input: Option<HashInput>,
    /// The table without what [`Steering::lead`] put there.
    spread: Vec<u32>,
    /// Entries that [`Steering::keep`] gave to a queue.
    kept: BTreeSet<usize>,
    /// What it did by rule instead.
    led_by: Vec<FlowRule>,
}

/// Packets that have to come to a queue, or only must not come to the landing queue.
#[derive(Clone, Copy, Debug)]
pub struct Neighbouring {
    /// The packets.
    pub flow: Flow,
    /// Their queue; `None`: whichever it is now.
    pub queue: Option<u32>,
}

impl Steering {
    /// Keeps `landing_queues` of an interface of the calling thread's network namespace out of the general spread, and lets
    /// the card hash ports of UDP where it can. What a dead process left is undone first.
    ///
    /// The other queues that the table names share its entries; those that an administrator left out of it stay out.
    ///
    /// # Errors
    ///
    /// See [`SteeringError`]; the card is as before then.
    pub fn apply(interface: &Interface, landing_queues: &[u32]) -> Result<Steering, SteeringError> {
        let card = Ethtool::open(interface.index).map_err(EthtoolError::of_call("socket(2)"))?;
        Steering::apply_to(Box::new(card), Store::new(FOLDER), interface, landing_queues)
    }

    fn apply_to(
        card: Box<dyn Card>,
        store: Store,
        interface: &Interface,
        landing_queues: &[u32],
    ) -> Result<Steering, SteeringError> {
        let name = &interface.name;
        let driver = card.driver()?;
        let unsupported = || SteeringError::Unsupported {
            interface: name.clone(),
            driver: driver.name.clone(),
        };
        let before = card.rss().map_err(|error| match error {
            EthtoolError::Unsupported { .. } => unsupported(),
            error => SteeringError::Card(error),
        })?;
        if before.table.is_empty() {
            return Err(unsupported());
        }
        let rx_queues = interface.rx_queues;
        for &queue in landing_queues {
            if queue == 0 {
                return Err(SteeringError::QueueZero);
            }
            check_queue(name, queue, rx_queues)?;
        }

        let (mut journal, lock) = Journal::<Change>::open(card, interface, store)?;
        let recovered = journal.recover(&lock)?;
        let rss = if recovered { journal.device.rss()? } else { before };
        let table = spread(&rss.table, landing_queues, rx_queues);
        let mut steering = Steering {
            journal,
            rx_queues,
            rss,
            hash_input: None,
            spread: Vec::new(),
            kept: BTreeSet::new(),
            led_by: Vec::new(),
        };
        // Where this fails dropping it restores the card, which needs the lock: that goes first, as the younger one.
        let lock = lock;
        steering.settle(table, &lock)?;
        Ok(steering)
    }

    /// Makes the card ours, and the first changes.
    fn settle(&mut self, table: Vec<u32>, lock: &StoreLock) -> Result<(), SteeringError> {
        self.journal.write(lock)?;
        if table != self.rss.table {
            let change = Change::Table {
                before: std::mem::take(&mut self.rss.table),
                after: table,
                transform: self.rss.transform,
            };
            self.journal.change(change, lock)?;
            self.rss = self.journal.device.rss()?;
        }
        match self.journal.device.hash_fields() {
            Ok(before) if before != ethtool::HASH_ADDRESSES_AND_PORTS => {
                let after = ethtool::HASH_ADDRESSES_AND_PORTS;
                match self.journal.change(Change::HashFields { before, after }, lock) {
                    // Then it goes on hashing what it does.
                    Err(JournalError::Device(
                        EthtoolError::Unsupported { .. } | EthtoolError::System { .. },
                    )) => self.hash_input = ethtool::hash_input(before),
                    other => {
                        other?;
                        self.hash_input = ethtool::hash_input(self.journal.device.hash_fields()?);
                    }
                }
            }
            Ok(fields) => self.hash_input = ethtool::hash_input(fields),
            Err(EthtoolError::Unsupported { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.spread.clone_from(&self.rss.table);
        Ok(())
    }

    /// A source port for fragments that may be led later: see [`Steering::lead`]. Neither `others` nor what is led now meets the entry of
    /// the table that packets of `fragments` with that port meet. Where no entry can be computed, any port: a rule may name it.
    pub fn source_port(&self, fragments: &Flow, others: &[Neighbouring], seed: u32) -> u16 {
        let any = FIRST_SOURCE_PORT | seed as u16;
        let (Ok(key), Some(input)) = (key(&self.rss, system_key), self.hash_input) else {
            return any;
        };
        let Ok(rss) = Rss::new(&key, &self.spread, input) else {
            return any;
        };
        let taken = entries(&rss, self.spread.len(), others);
        let is_led = |at: usize| self.rss.table[at] != self.spread[at];
        let ports = (0..=u16::MAX - FIRST_SOURCE_PORT).map(|step| FIRST_SOURCE_PORT | any.wrapping_add(step));
        let mut free = ports.filter(|&source_port| {
            let flow = Flow {
                source_port,
                ..*fragments
            };
            let at = rss.hash(&flow) as usize % self.spread.len();
            self.is_free(at, &taken) && !is_led(at)
        });
        free.next().unwrap_or(any)
    }

    /// Whether an entry of the table may be a landing queue's. Some cards put packets that they do not hash where entry 0 says.
    fn is_free(&self, at: usize, taken: &[usize]) -> bool {
        at > 0 && !taken.contains(&at) && !self.kept.contains(&at)
    }

    /// Leads one sender's fragments to a landing queue: gives an entry of the table to the queue, and a source port with which
    /// packets of `fragments` (whose own source port does not matter) meet it: `port`, if they have one already. What else comes from the
    /// sender, `others`, does not meet it, and comes to the queue it should. `alone` says that no other
    /// sender is led there any more. `seed` chooses among the entries and ports that will do.
    ///
    /// One landing queue has one entry at a time, unless senders have ports already, so that little of other traffic comes there, and none
    /// before this was called or after [`Steering::unlead`]. Where no port can be computed, a rule names any port. The port is not tried: check where
    /// the first packet arrives.
    ///
    /// # Errors
    ///
    /// [`SteeringError::Hash`], [`SteeringError::Fields`] or [`SteeringError::Rss`] where no port can be computed, or the given one meets what
    /// else comes, and the card takes no rule; [`SteeringError::Card`] or [`SteeringError::Journal`] where the table cannot be written.
    pub fn lead(
        &mut self,
        landing: u32,
        fragments: &Flow,
        port: Option<NonZeroU16>,
        others: &[Neighbouring],
        (alone, seed): (bool, u32),
    ) -> Result<u16, SteeringError> {
        check_queue(&self.journal.interface, landing, self.rx_queues)?;
        match self.lead_by_hash(landing, fragments, port, others, (alone, seed)) {
            Err(error @ (SteeringError::Hash(_) | SteeringError::Fields | SteeringError::Rss(_))) => {
                let source_port = port.map_or(FIRST_SOURCE_PORT | seed as u16, NonZeroU16::get);
                let rule = FlowRule {
                    destination: fragments.destination,
                    source: Some(fragments.source),
                    ports: FlowPorts::Udp {
                        destination: fragments.destination_port,
                        source: Some(source_port),
                    },
                    queue: landing,
                };
                self.add_rule(&rule).map_err(|_| error)?;
                self.led_by.push(rule);
                Ok(source_port)
            }
            led => led,
        }
    }

    fn lead_by_hash(
        &mut self,
        landing: u32,
        fragments: &Flow,
        port: Option<NonZeroU16>,
        others: &[Neighbouring],
        (alone, seed): (bool, u32),
    ) -> Result<u16, SteeringError> {
        let key = key(&self.rss, system_key)?;
        let input = self.hash_input.ok_or(SteeringError::Fields)?;
        let rss = Rss::new(&key, &self.spread, input)?;
        let len = self.spread.len();
        let taken = entries(&rss, len, others);
        // The queue has an entry while it has senders, which go on using it. What of a further sender meets it, too, only a gate
        // that reads packets lets through: copy mode.
        let own = (self.rss.table.iter()).position(|queue| !alone && *queue == landing);
        let none = RssError::QueueNotInTable { queue: landing };
        let before = match own {
            Some(_) => &self.rss.table,
            None => &self.spread,
        };
        let at = match (port, own) {
            (Some(port), _) => {
                let source_port = port.get();
                let meets = rss.hash(&Flow {
                    source_port,
                    ..*fragments
                }) as usize
                    % len;
                Some(meets).filter(|&at| own == Some(at) || self.is_free(at, &taken))
            }
            (None, Some(at)) => Some(at),
            (None, None) => {
                let mut entries = (0..len).map(|step| (seed as usize % len + step) % len);
                entries.find(|&at| self.is_free(at, &taken))
            }
        };
        let at = at.ok_or(none)?;
        let mut table = before.clone();
        for (other, taken) in others.iter().zip(taken) {
            // Another sender's entry stays: what of this one meets it, the gate passes on.
            if let Some(queue) = other.queue.filter(|_| taken != at && table[taken] != landing) {
                table[taken] = queue;
            }
        }
        table[at] = landing;
        let source_port = match port {
            Some(port) => port.get(),
            None => Rss::new(&key, &table, input)?.source_port_for(landing, fragments, seed)?,
        };
        self.set_table(table)?;
        Ok(source_port)
    }

    /// Leads one sender's IP fragments to a landing queue, instead of what [`Steering::lead`] led: gives the queue the entry of
    /// the table that the addresses of `fragments` meet, which every card looks up for fragments. With them comes whatever
    /// else the card hashes by these addresses alone. What else LM sends between the two, `others`, does not meet that entry,
    /// and comes to the queue it should.
    ///
    /// There is no rule for it: one that names ports misses all fragments but the first, one that does not takes `others`, too.
    ///
    /// # Errors
    ///
    /// [`SteeringError::SharedEntry`] where `others` meet the same entry; [`SteeringError::NoSuchQueue`]; [`SteeringError::Hash`],
    /// [`SteeringError::Fields`] or [`SteeringError::Rss`] where it is not known where packets come; [`SteeringError::Card`] or
    /// [`SteeringError::Journal`] where the table cannot be written.
    pub fn lead_addresses(
        &mut self,
        landing: u32,
        fragments: &Flow,
        others: &[Neighbouring],
    ) -> Result<(), SteeringError> {
        check_queue(&self.journal.interface, landing, self.rx_queues)?;
        let key = key(&self.rss, system_key)?;
        let input = self.hash_input.ok_or(SteeringError::Fields)?;
        let (len, mut table) = (self.spread.len(), self.spread.clone());
        let entry = |input, flow: &Flow| -> Result<usize, RssError> {
            Ok(Rss::new(&key, &self.spread, input)?.hash(flow) as usize % len)
        };
        let at = entry(HashInput::Addresses, fragments)?;
        for other in others {
            let taken = entry(input, &other.flow)?;
            if taken == at {
                return Err(SteeringError::SharedEntry {
                    sender: fragments.source,
                });
            }
            if let Some(queue) = other.queue {
                table[taken] = queue;
            }
        }
        table[at] = landing;
        self.set_table(table)
    }

    /// Has packets of `flow` come to `queue`, for as long as this lives, if the card can: for LM's small packets, which any other queue
    /// would bring to the kernel's socket.
    ///
    /// # Errors
    ///
    /// [`SteeringError::NoSuchQueue`]; [`SteeringError::Hash`], [`SteeringError::Fields`] or [`SteeringError::Rss`] where it is not known
    /// where packets come; [`SteeringError::Card`] or [`SteeringError::Journal`] where the table cannot be written.
    pub fn keep(&mut self, flow: &Flow, queue: u32) -> Result<(), SteeringError> {
        check_queue(&self.journal.interface, queue, self.rx_queues)?;
        let key = key(&self.rss, system_key)?;
        let input = self.hash_input.ok_or(SteeringError::Fields)?;
        let at = Rss::new(&key, &self.spread, input)?.hash(flow) as usize % self.spread.len();
        let mut table = self.rss.table.clone();
        if table[at] == self.spread[at] {
            table[at] = queue;
        } else {
            tracing::warn!(
                interface = self.journal.interface,
                "small packets of {} come to the landing queue while its session lasts",
                flow.source
            );
        }
        self.spread[at] = queue;
        self.kept.insert(at);
        self.set_table(table)
    }

    /// Takes back what [`Steering::lead`] did: no packet comes to a landing queue any more.
    ///
    /// # Errors
    ///
    /// [`SteeringError::Card`] or [`SteeringError::Journal`] where the table cannot be written, or a rule not deleted.
    pub fn unlead(&mut self) -> Result<(), SteeringError> {
        while let Some(rule) = self.led_by.pop() {
            self.remove_rule(&rule)?;
        }
        self.set_table(self.spread.clone())
    }

    /// Writes another table. The record says at every moment how to get back from what the card may have.
    fn set_table(&mut self, table: Vec<u32>) -> Result<(), SteeringError> {
        if table == self.rss.table {
            return Ok(());
        }
        let lock = self.journal.lock()?;
        let change = Change::Table {
            before: self.rss.table.clone(),
            after: table.clone(),
            transform: self.rss.transform,
        };
        self.journal.change(change, &lock)?;
        self.rss.table = table;
        if join_tables(self.journal.changes_mut()) {
            self.journal.write(&lock)?;
        }
        Ok(())
    }

    /// Has the card put packets on a queue by a rule, and switches rules on if they are off. A rule that is there already is
    /// somebody else's, and stays when this is dropped.
    ///
    /// # Errors
    ///
    /// [`SteeringError::NoSuchQueue`]; [`SteeringError::Card`] for a driver without rules, or that does not take this one.
    fn add_rule(&mut self, rule: &FlowRule) -> Result<(), SteeringError> {
        check_queue(&self.journal.interface, rule.queue, self.rx_queues)?;
        let lock = self.journal.lock()?;
        if self.journal.device.find_rule(rule)?.is_some() {
            return Ok(());
        }
        let (feature, before) = (Feature::Ntuple, false);
        if !self.journal.device.feature(feature)?.on {
            self.journal.change(Change::Feature { feature, before }, &lock)?;
        }
        Ok(self.journal.change(Change::Rule(*rule), &lock)?)
    }

    /// Takes a rule of [`Steering::add_rule`] away again; nothing for any other.
    ///
    /// # Errors
    ///
    /// [`SteeringError::Card`].
    fn remove_rule(&mut self, rule: &FlowRule) -> Result<(), SteeringError> {
        let change = Change::Rule(*rule);
        let Some(at) = self.journal.changes().iter().position(|made| *made == change) else {
            return Ok(());
        };
        let lock = self.journal.lock()?;
        change.undo(&*self.journal.device)?;
        self.journal.changes_mut().remove(at);
        Ok(self.journal.write(&lock)?)
    }

    /// Forbids the card PCI Express relaxed ordering, with which a later packet's headers might overtake an earlier packet's
    /// payload on the way to memory. Nothing for a device that has it off or is not on PCI Express.
    ///
    /// # Errors
    ///
    /// [`SteeringError::RelaxedOrdering`] where it cannot be read or does not go off; [`SteeringError::Journal`].
    pub fn forbid_relaxed_ordering(&mut self) -> Result<(), SteeringError> {
        let lock = self.journal.lock()?;
        let off = match self.journal.device.relaxed_ordering() {
            Ok(Some(true)) => self.journal.change(Change::RelaxedOrderingOff, &lock),
            told => told.map(|_| ()).map_err(JournalError::Device),
        };
        let bus = self.journal.bus().to_owned();
        off.map_err(|error| match error {
            JournalError::Device(source) => SteeringError::RelaxedOrdering { bus, source },
            error => error.into(),
        })
    }
}

fn check_queue(interface: &str, queue: u32, rx_queues: u32) -> Result<(), SteeringError> {
    if queue < rx_queues {
        return Ok(());
    }
    Err(SteeringError::NoSuchQueue {
        interface: interface.to_owned(),
        queue,
        rx_queues,
    })
}

/// The entries of a table of this length that packets meet.
fn entries(rss: &Rss<'_>, len: usize, packets: &[Neighbouring]) -> Vec<usize> {
    let hashes = packets.iter().map(|packet| rss.hash(&packet.flow) as usize);
    hashes.map(|hash| hash % len).collect()
}

/// The card's key, or what `system` gives where the driver keeps it to itself.
fn key(
    rss: &RssSettings,
    system: impl FnOnce(usize) -> io::Result<Vec<u8>>,
) -> Result<RssKey, SteeringError> {
    match rss.key() {
        Err(HashProblem::Hidden) => match system(USUAL_KEY_LEN) {
            Ok(key) => Ok(RssKey::new(&key)?),
            Err(_) => Err(SteeringError::Hash(HashProblem::Hidden)),
        },
        key => key.map_err(SteeringError::Hash),
    }
}
