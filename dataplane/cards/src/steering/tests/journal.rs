//! Any bytes as the journal of a process that died: they are refused and left alone, or undone as far as the card still has what they say
//! was put there.

use std::fs;
use std::io::ErrorKind;

use super::super::change::Change;
use super::super::{Steering, SteeringError};
use super::model::{Model, Settings};
use super::{Folder, recover_model};
use crate::ethtool::Feature;
use crate::journal::{JournalError, Record};

/// The one thing that differs between two settings must be what one of the record's changes gives back.
fn is_given_back(record: &Record<Change>, from: &Settings, to: &Settings, queues: u32) -> bool {
    let len = from.table.len();
    record.changes.iter().any(|change| {
        let mut given = from.clone();
        match change {
            Change::Table { before, after, .. } if *after == from.table => {
                let kernels: Vec<u32> = (0..queues).cycle().take(len).collect();
                given.by_hand = *before != kernels;
                given.table.clone_from(before);
            }
            Change::HashFields { before, after } if *after == from.fields => given.fields = *before,
            Change::Feature { feature, before } => match feature {
                Feature::Ntuple if from.rules.is_empty() => given.ntuple = *before,
                Feature::RxVlan => given.vlan = *before,
                _ => return false,
            },
            Change::Rule(rule) => {
                let at = from.rules.iter().position(|(_, own)| own == rule);
                at.map(|at| given.rules.remove(at));
            }
            Change::RelaxedOrderingOff => given.relaxed = true,
            _ => return false,
        }
        given == *to
    })
}

/// Nothing but the journal lies in the folder.
fn names(folder: &Folder) -> Vec<std::ffi::OsString> {
    let files = fs::read_dir(folder.path()).expect("the folder");
    files.map(|file| file.expect("a file").file_name()).collect()
}

/// Input: what the card can do, a bit each; then the file. The card has the settings of one that is steered.
pub(crate) fn recover_from(bytes: &[u8]) {
    let Some((&shape, text)) = bytes.split_first() else {
        return;
    };
    let (folder, card) = (Folder::new("fuzz"), Model::new());
    // As a process leaves it that dies now.
    let mut steering: Steering = card.apply(&folder).expect("it can be steered");
    super::change_all(&mut steering);
    steering.journal.is_kept = false;
    drop(steering);
    {
        let mut state = card.state();
        state.takes_rules = shape & 1 == 0;
        state.can_set_fields = shape & 2 == 0;
        state.broken = (shape & 4 != 0).then_some(libc::EIO);
        state.history.clear();
    }
    let (store, path, lock) = folder.find();
    fs::write(&path, text).expect("the journal");
    let record = store.read::<Change>(&path, &lock);
    drop(lock);

    let left = card.settings();
    let recovered = recover_model(&card, &folder);
    let mut steps = card.state().history.clone();
    steps.push(card.settings());
    let left_alone = || assert!(steps.len() == 1 && steps[0] == left, "the card was changed");
    match (&record, recovered) {
        (Ok(Some(_)), Ok(false)) => {
            left_alone();
            assert!(names(&folder).is_empty(), "of another card");
        }
        (Ok(Some(_)), Err(SteeringError::Journal(JournalError::InUse { .. }))) => left_alone(),
        (Ok(Some(record)), result) => {
            let queues = card.state().queues;
            for step in steps.windows(2) {
                assert!(is_given_back(record, &step[0], &step[1], queues), "{step:?}");
            }
            if let Err(error) = result {
                // What is left is undone when the card does what it is told.
                assert!(
                    matches!(error, SteeringError::Journal(JournalError::Undo { .. })),
                    "{error}"
                );
                assert_eq!(names(&folder), [path.file_name().expect("a name")]);
                let mut state = card.state();
                (state.takes_rules, state.can_set_fields, state.broken) = (true, true, None);
                drop(state);
                let again = recover_model(&card, &folder);
                assert!(matches!(again, Ok(true)), "{again:?}");
            }
            assert!(names(&folder).is_empty());
            let settings = card.settings();
            assert!(matches!(recover_model(&card, &folder), Ok(false)));
            assert_eq!(card.settings(), settings);
        }
        (Err(refused), Err(SteeringError::Journal(JournalError::State { source, .. }))) => {
            assert_eq!(
                (refused.kind(), source.kind()),
                (ErrorKind::InvalidData, ErrorKind::InvalidData)
            );
            left_alone();
            assert_eq!(fs::read(&path).expect("the journal"), text);
        }
        (read, done) => panic!("read: {read:?}, done: {done:?}"),
    }
}
