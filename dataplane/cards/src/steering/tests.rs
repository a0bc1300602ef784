//! Steering on a model of a card: every change is undone, after a crash at any point too.

pub(crate) mod journal;
mod model;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::rules::FlowPorts;
use super::*;
use crate::journal::{JournalError, Owner, Record};
use model::{Model, Settings};

/// A folder of a test's own, removed at its end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Nothing is ordered by it: each number once is all.
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lm-steering-{}-{name}-{count}", std::process::id());
        Folder(std::env::temp_dir().join(name))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn store(&self) -> Store {
        Store::new(&self.0)
    }

    /// The file of the model's interface, and the lock on it.
    fn find(&self) -> (Store, PathBuf, StoreLock) {
        let store = self.store();
        let path = store.path(interface().index).expect("a namespace");
        let lock = store.lock().expect("a folder");
        (store, path, lock)
    }

    fn files(&self) -> usize {
        std::fs::read_dir(&self.0).map_or(0, Iterator::count)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.0.exists() {
            std::fs::remove_dir_all(&self.0).expect("it is ours");
        }
    }
}

fn rule(port: u16, queue: u32) -> FlowRule {
    FlowRule {
        destination: Ipv4Addr::new(10, 0, 0, 2),
        source: None,
        ports: FlowPorts::Udp {
            destination: port,
            source: None,
        },
        queue,
    }
}

fn interface() -> Interface {
    let mut interface = Interface::by_name("lo").expect("every namespace has a loopback");
    (interface.name, interface.rx_queues) = ("model".into(), 2);
    interface
}

/// Everything that can be changed.
fn change_all(steering: &mut Steering) {
    steering.add_rule(&rule(7168, 1)).expect("a rule");
    steering.add_rule(&rule(7170, 1)).expect("a rule");
    let lock = steering.journal.lock().expect("a folder");
    let (feature, before) = (Feature::RxVlan, true);
    let switched = steering
        .journal
        .change(Change::Feature { feature, before }, &lock);
    switched.expect("a feature");
    drop(lock);
    steering.forbid_relaxed_ordering().expect("a PCI device");
}

/// Makes the record on disk that of a process that is gone.
fn bury(folder: &Folder) {
    let (store, path, lock) = folder.find();
    let mut record = store
        .read::<Change>(&path, &lock)
        .expect("readable")
        .expect("a record");
    record.owner.started_ticks += 1;
    store.write(&path, &record, &lock).expect("written");
}

fn recover_model(card: &Model, folder: &Folder) -> Result<bool, SteeringError> {
    let card = Box::new(card.clone());
    let (mut journal, lock) = Journal::<Change>::open(card, &interface(), folder.store())?;
    Ok(journal.recover(&lock)?)
}

#[test]
fn a_landing_queue_has_no_entry_and_dropping_restores() {
    let (folder, card) = (Folder::new("spread"), Model::new());
    let before = card.settings();
    let mut steering = card.apply(&folder).expect("it can be steered");
    let now = card.settings();
    assert!(!now.table.contains(&1));
    assert_eq!(steering.rss.table, now.table);
    assert_eq!(now.fields, 0xf0);
    assert_eq!(steering.hash_input, Some(HashInput::AddressesAndPorts));
    change_all(&mut steering);
    let now = card.settings();
    assert_eq!(now.rules.len(), 2);
    assert!(now.ntuple && !now.vlan && !now.relaxed);
    assert_eq!(folder.files(), 1);
    drop(steering);
    let after = card.settings();
    // A table that the kernel would not make itself can only be written back.
    assert_eq!(
        after,
        Settings {
            by_hand: true,
            ..before
        }
    );
    assert_eq!(folder.files(), 0);
}

#[test]
fn the_kernels_own_table_is_given_back_to_the_kernel() {
    let (folder, card) = (Folder::new("kernels"), Model::new());
    card.state().settings.table = [0, 1].repeat(64);
    let before = card.settings();
    let mut steering = card.apply(&folder).expect("it can be steered");
    assert!(card.settings().by_hand);
    steering.journal.restore().expect("restored");
    assert_eq!(card.settings(), before);
}

/// A sender's fragments, and what else comes from it, which queue 0 should get.
fn flows(host: u8) -> (Flow, [Neighbouring; 2]) {
    let flow = |source_port, destination_port| Flow {
        source: Ipv4Addr::new(10, 0, 0, host),
        destination: Ipv4Addr::new(10, 0, 0, 2),
        source_port,
        destination_port,
    };
    let other = |port, queue| Neighbouring {
        flow: flow(port, port),
        queue,
    };
    (flow(0, 7168), [other(7168, Some(0)), other(7169, None)])
}

/// Where the card puts a packet now.
fn queue_of(card: &Model, flow: &Flow) -> u32 {
    let key = RssKey::new(&card.state().key).expect("a key");
    let table = card.settings().table;
    let rss = Rss::new(&key, &table, HashInput::AddressesAndPorts).expect("a table");
    rss.queue(flow)
}

#[test]
fn fragments_alone_are_led_to_the_landing_queue() {
    let (folder, card) = (Folder::new("lead"), Model::new());
    let before = card.settings();
    let mut steering = card.apply(&folder).expect("it can be steered");
    let spread_out = card.settings().table;
    for seed in 0..300 {
        let (mut fragments, others) = flows(seed as u8);
        let port = steering.lead(1, &fragments, None, &others, (true, seed * 999));
        fragments.source_port = port.expect("one of 128 entries");
        assert_eq!(queue_of(&card, &fragments), 1);
        assert!(others.iter().all(|other| queue_of(&card, &other.flow) == 0));
        let entries = card.settings().table.iter().filter(|queue| **queue == 1).count();
        assert_eq!(entries, 1, "the last sender's entry is not kept");
        // A second one shares the entry, and the first one keeps its own.
        let (mut more, others) = flows((seed as u8).wrapping_add(1));
        let port = steering.lead(1, &more, None, &others, (false, seed));
        more.source_port = port.expect("the same entry");
        assert_eq!((queue_of(&card, &fragments), queue_of(&card, &more)), (1, 1));
        if seed % 3 == 0 {
            steering.unlead().expect("the table is writable");
            assert_eq!(card.settings().table, spread_out);
        }
    }
    assert_eq!(steering.journal.changes().len(), 3, "table, fields, table");
    drop(steering);
    assert_eq!(card.settings().table, before.table);
    assert_eq!(folder.files(), 0);
}

/// A sender that has had a port since before it was led is led by that one, or not at all; others' entries stay.
#[test]
fn a_port_that_is_given_is_led_or_refused() {
    let (folder, card) = (Folder::new("given"), Model::new());
    card.state().takes_rules = false;
    let mut steering = card.apply(&folder).expect("it can be steered");
    let (mut led, mut refused) = (0, 0);
    for seed in 0..300u32 {
        let (mut first, others) = flows(seed as u8);
        let port = steering.lead(1, &first, None, &others, (true, seed * 999));
        first.source_port = port.expect("one of 128 entries");
        let (mut second, others) = flows((seed as u8).wrapping_add(1));
        second.source_port = FIRST_SOURCE_PORT | (seed * 77) as u16;
        let before = card.settings().table;
        let given = std::num::NonZeroU16::new(second.source_port);
        match steering.lead(1, &second, given, &others, (false, seed)) {
            Ok(port) => {
                assert_eq!(port, second.source_port);
                assert_eq!((queue_of(&card, &first), queue_of(&card, &second)), (1, 1));
                led += 1;
            }
            Err(_) => {
                assert_eq!(card.settings().table, before);
                refused += 1;
            }
        }
        steering.unlead().expect("the table is writable");
    }
    assert!(led > 250 && refused > 0, "{led} {refused}");
}

/// A port that is chosen before its sender is led meets nothing that comes meanwhile, and is led when its turn comes.
#[test]
fn a_port_for_later_is_led_then() {
    let (folder, card) = (Folder::new("later"), Model::new());
    card.state().takes_rules = false;
    let mut steering = card.apply(&folder).expect("it can be steered");
    for seed in 0..300u32 {
        let (mut first, of_first) = flows(seed as u8);
        let port = steering.lead(1, &first, None, &of_first, (true, seed * 999));
        first.source_port = port.expect("one of 128 entries");
        let (mut second, of_second) = flows((seed as u8).wrapping_add(1));
        let aside = Neighbouring {
            flow: first,
            queue: None,
        };
        let others: Vec<Neighbouring> = (of_first.iter().chain(&of_second).copied())
            .chain([aside])
            .collect();
        second.source_port = steering.source_port(&second, &others, seed * 77);
        assert_ne!(queue_of(&card, &second), 1, "not yet");
        steering.unlead().expect("the table is writable");
        let given = std::num::NonZeroU16::new(second.source_port);
        let led = steering.lead(1, &second, given, &others, (true, seed));
        assert_eq!(led.expect("a free entry"), second.source_port);
        assert_eq!(queue_of(&card, &second), 1);
        assert!(others.iter().all(|other| queue_of(&card, &other.flow) == 0));
    }
}

/// Cards hash fragments by addresses, whatever they do with whole packets.
#[test]
fn ip_fragments_are_led_by_their_addresses() {
    let (folder, card) = (Folder::new("addresses"), Model::new());
    let before = card.settings();
    let mut steering = card.apply(&folder).expect("it can be steered");
    let spread_out = card.settings().table;
    let key = RssKey::new(&card.state().key).expect("a key");
    let (mut led, mut shared) = (0, 0);
    for host in 0..=255 {
        let (fragments, others) = flows(host);
        let held = card.settings().table;
        match steering.lead_addresses(1, &fragments, &others) {
            Ok(()) => {
                let table = card.settings().table;
                let rss = Rss::new(&key, &table, HashInput::Addresses).expect("a table");
                assert_eq!(rss.queue(&fragments), 1);
                assert_eq!(table.iter().filter(|queue| **queue == 1).count(), 1);
                assert!(others.iter().all(|other| queue_of(&card, &other.flow) == 0));
                led += 1;
            }
            Err(SteeringError::SharedEntry { sender }) => {
                assert_eq!((sender, card.settings().table), (fragments.source, held));
                shared += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    // Two other flows for one of 128 entries.
    assert!(led >= 240 && led + shared == 256, "{led} led, {shared} shared");
    steering.unlead().expect("the table is writable");
    assert_eq!(card.settings().table, spread_out);
    drop(steering);
    assert_eq!(card.settings().table, before.table);

    // A card that hashes no ports cannot tell them from anything else.
    let (folder, card) = (Folder::new("no-ports"), Model::new());
    card.state().can_set_fields = false;
    card.state().settings.fields = 0x30;
    let mut steering = card.apply(&folder).expect("it can be steered");
    let (fragments, others) = flows(1);
    let error = steering.lead_addresses(1, &fragments, &others);
    assert!(
        matches!(error, Err(SteeringError::SharedEntry { .. })),
        "{error:?}"
    );
}

#[test]
fn what_is_kept_on_a_queue_stays_there_while_sessions_come_and_go() {
    let (folder, card) = (Folder::new("keep"), Model::new());
    let before = card.settings();
    let mut steering = card.apply(&folder).expect("it can be steered");
    let (fragments, others) = flows(9);
    let kept: Vec<Flow> = (10..40).map(|host| flows(host).1[0].flow).collect();
    for (number, flow) in kept.iter().enumerate() {
        if number == 15 {
            steering
                .lead(1, &fragments, None, &others, (true, 5))
                .expect("an entry");
        }
        steering.keep(flow, 0).expect("an entry");
    }
    let led = card.settings().table.iter().filter(|queue| **queue == 1).count();
    assert_eq!(led, 1, "the landing queue's entry is not taken");
    steering.unlead().expect("the table is writable");
    assert!(kept.iter().all(|flow| queue_of(&card, flow) == 0));
    assert!(matches!(
        steering.keep(&kept[0], 2),
        Err(SteeringError::NoSuchQueue { queue: 2, .. })
    ));
    drop(steering);
    assert_eq!(card.settings().table, before.table);
}

#[test]
fn where_the_hash_is_not_known_a_rule_leads() {
    let (folder, card) = (Folder::new("rule"), Model::new());
    card.state().can_set_fields = false;
    card.state().settings.fields = 0x10;
    let mut steering = card.apply(&folder).expect("it can be steered");
    let (fragments, others) = flows(1);
    let port = steering
        .lead(1, &fragments, None, &others, (true, 77))
        .expect("a rule");
    let (_, rule) = card.settings().rules[0];
    let ports = FlowPorts::Udp {
        destination: 7168,
        source: Some(port),
    };
    assert_eq!(
        (rule.source, rule.ports, rule.queue),
        (Some(fragments.source), ports, 1)
    );
    steering.unlead().expect("the rule goes");
    assert!(card.settings().rules.is_empty());
    card.state().takes_rules = false;
    let error = steering
        .lead(1, &fragments, None, &others, (true, 77))
        .expect_err("no way");
    assert!(matches!(error, SteeringError::Fields), "{error}");
}

#[test]
fn a_key_that_is_not_shown_is_the_systems() {
    let mut rss = Model::new().rss().expect("a table");
    let never = |_| -> io::Result<Vec<u8>> { panic!("the card has a key") };
    assert_eq!(key(&rss, never).expect("the card's").as_bytes(), rss.key);
    rss.key.clear();
    let system = key(&rss, |len| Ok(vec![7; len])).expect("the system's");
    assert_eq!(system.as_bytes(), [7; 40]);
    let none = key(&rss, |_| Err(io::Error::from(io::ErrorKind::NotFound)));
    assert!(matches!(none, Err(SteeringError::Hash(HashProblem::Hidden))));
    rss.transform = 1;
    let symmetric = key(&rss, never);
    assert!(matches!(
        symmetric,
        Err(SteeringError::Hash(HashProblem::Transform))
    ));
}

#[test]
fn a_crash_at_any_point_is_undone_by_the_next_start() {
    // The points between two changes, as the card saw them.
    let (folder, card) = (Folder::new("whole"), Model::new());
    let before = card.settings();
    let mut steering = card.apply(&folder).expect("it can be steered");
    change_all(&mut steering);
    let changes = steering.journal.changes().to_vec();
    drop(steering);
    let mut points = card.state().history.clone();
    points.truncate(changes.len() + 1);
    assert_eq!(points.len(), 8, "each change is one");
    for written in 0..=changes.len() {
        // Written down and not made, or made as well.
        for made in [written.saturating_sub(1), written] {
            let (folder, card) = (Folder::new("crash"), Model::new());
            card.state().settings = points[made].clone();
            let (store, path, lock) = folder.find();
            let mut record = Record::new(
                Owner {
                    pid: u32::MAX,
                    started_ticks: 1,
                },
                card.driver().expect("a driver"),
            );
            record.changes = changes[..written].to_vec();
            store.write(&path, &record, &lock).expect("written");
            drop(lock);
            assert!(recover_model(&card, &folder).expect("recovered"));
            let after = card.settings();
            let by_hand = after.by_hand;
            assert_eq!(
                after,
                Settings {
                    by_hand,
                    ..before.clone()
                },
                "{written} written, {made} made"
            );
            assert_eq!(folder.files(), 0);
            assert!(!recover_model(&card, &folder).expect("nothing left"));
        }
    }
}

#[test]
fn a_start_after_a_crash_begins_from_what_was_before() {
    let (folder, card) = (Folder::new("again"), Model::new());
    let before = card.settings();
    let mut steering = card.apply(&folder).expect("it can be steered");
    change_all(&mut steering);
    // A crash: nothing is dropped.
    std::mem::forget(steering);
    bury(&folder);
    let steering = card.apply(&folder).expect("recovered and applied");
    let now = card.settings();
    assert!(!now.table.contains(&1));
    assert_eq!(now.rules, before.rules);
    assert!(now.relaxed && now.vlan && !now.ntuple);
    drop(steering);
    assert_eq!(
        card.settings(),
        Settings {
            by_hand: true,
            ..before
        }
    );
}

#[test]
fn a_living_owner_is_left_alone() {
    let (folder, card) = (Folder::new("in-use"), Model::new());
    let steering = card.apply(&folder).expect("it can be steered");
    let applied = card.settings();
    let error = card.apply(&folder).expect_err("in use");
    assert!(
        matches!(error, SteeringError::Journal(JournalError::InUse { pid }) if pid == std::process::id()),
        "{error}"
    );
    assert!(matches!(
        recover_model(&card, &folder),
        Err(SteeringError::Journal(JournalError::InUse { .. }))
    ));
    assert_eq!(card.settings(), applied);
    drop(steering);
    drop(card.apply(&folder).expect("free again"));
}

#[test]
fn what_others_have_set_since_stays() {
    let (folder, card) = (Folder::new("others"), Model::new());
    let mut steering = card.apply(&folder).expect("it can be steered");
    steering.add_rule(&rule(7168, 1)).expect("a rule");
    let theirs = vec![1; 128];
    {
        let mut state = card.state();
        state.settings.table.clone_from(&theirs);
        state.settings.fields = 0x10;
        // They took our rule away, and put another in its place.
        state.settings.rules[0].1 = rule(80, 0);
    }
    (steering.journal.restore()).expect("nothing of ours is left to restore");
    let after = card.settings();
    assert_eq!((after.table, after.fields), (theirs, 0x10));
    assert_eq!(
        (after.rules, after.ntuple),
        (vec![(0, rule(80, 0))], true),
        "rules need it"
    );
    assert_eq!(folder.files(), 0);
}

#[test]
fn another_card_with_the_same_index_is_not_touched() {
    let (folder, card) = (Folder::new("other-card"), Model::new());
    std::mem::forget(card.apply(&folder).expect("it can be steered"));
    bury(&folder);
    card.state().bus = "0000:02:00.0".into();
    let now = card.settings();
    assert!(!recover_model(&card, &folder).expect("nothing to do"));
    assert_eq!(card.settings(), now);
    assert_eq!(folder.files(), 0);
}

#[test]
fn somebody_elses_rule_stays() {
    let (folder, card) = (Folder::new("their-rule"), Model::new());
    let theirs = rule(22, 0);
    {
        let mut state = card.state();
        state.settings.ntuple = true;
        state.settings.rules.push((0, theirs));
    }
    let mut steering = card.apply(&folder).expect("it can be steered");
    steering.add_rule(&theirs).expect("it is there");
    steering.remove_rule(&theirs).expect("not ours");
    assert_eq!(card.settings().rules, [(0, theirs)]);
    steering.add_rule(&rule(7168, 1)).expect("a rule");
    steering.remove_rule(&rule(7168, 1)).expect("ours");
    assert_eq!(card.settings().rules, [(0, theirs)]);
    drop(steering);
    let after = card.settings();
    assert!(after.vlan && after.ntuple);
    assert_eq!(after.rules, [(0, theirs)]);
}

#[test]
fn a_card_that_refuses_is_as_before() {
    // Refused at the first change, and at the last.
    let (folder, card) = (Folder::new("refused"), Model::new());
    card.state().broken = Some(libc::EPERM);
    let before = card.settings();
    let error = card.apply(&folder).expect_err("refused");
    assert!(
        matches!(error, SteeringError::Card(EthtoolError::NotPermitted { .. })),
        "{error}"
    );
    assert_eq!((card.settings(), folder.files()), (before.clone(), 0));

    card.state().broken = None;
    card.state().takes_rules = false;
    let mut steering = card.apply(&folder).expect("it can be steered");
    let applied = card.settings();
    let error = steering.add_rule(&rule(7168, 1)).expect_err("no rules");
    assert!(
        matches!(error, SteeringError::Card(EthtoolError::Unsupported { .. })),
        "{error}"
    );
    let error = steering.add_rule(&rule(7168, 2)).expect_err("no queue");
    assert!(
        matches!(error, SteeringError::NoSuchQueue { queue: 2, .. }),
        "{error}"
    );
    assert_eq!(card.settings(), applied);
    card.state().broken = Some(libc::EPERM);
    let error = steering.forbid_relaxed_ordering().expect_err("it stays on");
    assert!(
        error.to_string().contains("setpci -s ") && matches!(error, SteeringError::RelaxedOrdering { .. }),
        "{error}"
    );
    card.state().broken = None;
    assert_eq!(card.settings(), applied);
    drop(steering);
    assert_eq!(
        card.settings(),
        Settings {
            by_hand: true,
            ..before
        }
    );
}

#[test]
fn what_cannot_be_restored_is_left_to_the_next_start() {
    let (folder, card) = (Folder::new("stuck"), Model::new());
    let before = card.settings();
    let mut steering = card.apply(&folder).expect("it can be steered");
    change_all(&mut steering);
    card.state().broken = Some(libc::EBUSY);
    let error = steering.journal.restore().expect_err("busy");
    assert!(matches!(error, JournalError::Undo { .. }), "{error}");
    assert_eq!(folder.files(), 1);
    bury(&folder);
    assert!(matches!(
        recover_model(&card, &folder),
        Err(SteeringError::Journal(JournalError::Undo { .. }))
    ));
    card.state().broken = None;
    assert!(recover_model(&card, &folder).expect("now it works"));
    assert_eq!(
        card.settings(),
        Settings {
            by_hand: true,
            ..before
        }
    );
    assert_eq!(folder.files(), 0);
    // A device that went away has taken its settings with it.
    let mut steering = card.apply(&folder).expect("it can be steered");
    card.state().broken = Some(libc::ENODEV);
    steering.journal.restore().expect("nothing to restore");
    assert_eq!(folder.files(), 0);
}

#[test]
fn what_cannot_be_steered_says_what_to_do() {
    let (folder, card) = (Folder::new("refusals"), Model::new());
    let before = card.settings();
    let apply = |queues: &[u32]| {
        let error = Steering::apply_to(Box::new(card.clone()), folder.store(), &interface(), queues);
        error.expect_err("refused").to_string()
    };
    assert_eq!(
        apply(&[0]),
        "queue 0 receives ARP and other unsteered traffic and cannot be a landing queue; choose another"
    );
    assert_eq!(
        apply(&[1, 2]),
        "model has 2 receive queues, numbered from 0, and no queue 2; choose another, or make more (ethtool -L model \
         combined 3)"
    );
    // As virtio-net has it without RSS.
    card.state().settings.table.clear();
    let text = apply(&[1]);
    assert!(text.contains("RSS indirection table; use copy mode"), "{text}");
    card.state().settings = before.clone();
    card.state().has_table = false;
    assert_eq!(apply(&[1]), text);
    assert_eq!((card.settings(), folder.files()), (before, 0));
}
