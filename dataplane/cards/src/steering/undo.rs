//! What an endpoint changed at a card is taken back, also after a crash.

use super::SteeringError;
use super::card::Card;
use super::state::{FOLDER, Record, Store, StoreLock, Undoing};
use crate::ethtool::EthtoolError;
use std::path::{Path, PathBuf};

/// The file of an interface, and the lock on all of them.
pub(super) fn find(store: &Store, interface_index: u32) -> Result<(PathBuf, StoreLock), SteeringError> {
    let failed = |source| SteeringError::State {
        path: PathBuf::from(FOLDER),
        source,
    };
    let path = store.path(interface_index).map_err(failed)?;
    let lock = store.lock().map_err(failed)?;
    Ok((path, lock))
}

/// Undoes what a dead process left; tells whether there was anything.
pub(super) fn recover(
    card: &dyn Card,
    store: &Store,
    path: &Path,
    lock: &StoreLock,
) -> Result<bool, SteeringError> {
    let state = |source| SteeringError::State {
        path: path.to_owned(),
        source,
    };
    let Some(mut record) = store.read(path, lock).map_err(state)? else {
        return Ok(false);
    };
    if record.owner.is_alive() {
        return Err(SteeringError::InUse {
            pid: record.owner.pid,
        });
    }
    let driver = card.driver()?;
    if (&driver.name, &driver.bus) != (&record.driver, &record.bus) {
        // The card that it speaks of is gone, with its settings.
        store.remove(path, lock).map_err(state)?;
        return Ok(false);
    }
    undo_all(card, store, path, &mut record, lock)?;
    Ok(true)
}

/// Undoes a record's changes, the last one first, and removes the file. What fails stays in it.
pub(super) fn undo_all(
    card: &dyn Card,
    store: &Store,
    path: &Path,
    record: &mut Record,
    lock: &StoreLock,
) -> Result<(), SteeringError> {
    let state = |source| SteeringError::State {
        path: path.to_owned(),
        source,
    };
    let mut failed = None;
    let mut rest = Vec::new();
    while let Some(change) = record.changes.pop() {
        match change.undo(card) {
            Ok(Undoing::Undone) => {}
            // What looks like others' may be what failed just now (a rule that needs the feature): it is asked again.
            Ok(Undoing::Others) if failed.is_some() => rest.push(change),
            Ok(Undoing::Others) => {
                tracing::warn!(
                    ?change,
                    "somebody else has changed this setting since; it is left as it is"
                );
            }
            // With the device its settings are gone.
            Err(EthtoolError::Gone) => {}
            Err(error) => {
                failed = Some(error);
                rest.push(change);
            }
        }
    }
    let Some(source) = failed else {
        return store.remove(path, lock).map_err(state);
    };
    rest.reverse();
    record.changes = rest;
    store.write(path, record, lock).map_err(state)?;
    Err(SteeringError::Undo {
        path: path.to_owned(),
        source,
    })
}
