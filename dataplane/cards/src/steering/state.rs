//! What was changed of a card, written down *before* it is changed, so that it can be undone by whoever comes next.
//!
//! One file for each interface, `/run/lm/steering/INDEX-NAMESPACE.json`, replaced as a whole: it names the process that made
//! the changes (by id and start time, since ids are used again) and, for each change, what was there before and what is there now.
//! While that process lives, nobody else touches the card. When it is gone, the next one undoes its changes first.
//!
//! A change is undone only if the card still has what was put there. What somebody else has set since then is theirs.
//!
//! `/run` is lost at a reboot, and so are the changes: nothing has to outlive the kernel, so nothing is synced to a disk.

use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use serde::{Deserialize, Serialize};

use super::card::Card;
use super::rules::FlowRule;
use crate::ethtool::{EthtoolError, Feature};

/// Where the files lie.
pub(super) const FOLDER: &str = "/run/lm/steering";

/// Version of the file's format. Another one is not understood.
const VERSION: u32 = 1;

/// No record is longer, in bytes.
const LEN_MAX: u64 = 1 << 20;

/// A setting of a card, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Change {
    /// The RSS indirection table.
    Table {
        before: Vec<u32>,
        after: Vec<u32>,
        /// Belongs to the card's hash and stays.
        transform: u8,
    },
    /// Which fields of UDP over IPv4 are hashed, bits `RXH_*`.
    HashFields { before: u64, after: u64 },
    /// A feature, switched from `before` to its opposite.
    Feature { feature: Feature, before: bool },
    /// A rule that was not there.
    Rule(FlowRule),
    /// PCI Express relaxed ordering, switched off.
    RelaxedOrderingOff,
}

/// What became of undoing a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Undoing {
    /// It is as before, and perhaps had never been otherwise.
    Undone,
    /// Somebody else has set something else since; left alone.
    Others,
}

impl Change {
    /// A card's table is always as long.
    fn is_possible(&self) -> bool {
        match self {
            Change::Table { before, after, .. } => before.len() == after.len() && !before.is_empty(),
            _ => true,
        }
    }

    /// Makes the change.
    pub(super) fn make(&self, card: &dyn Card) -> Result<(), EthtoolError> {
        match self {
            Change::Table { after, transform, .. } => card.set_rss_table(after, *transform),
            Change::HashFields { after, .. } => card.set_hash_fields(*after),
            Change::Feature { feature, before } => card.set_feature(*feature, !before),
            Change::Rule(rule) => card.insert_rule(rule),
            Change::RelaxedOrderingOff => card.set_relaxed_ordering(false),
        }
    }

    /// Takes it back.
    pub(super) fn undo(&self, card: &dyn Card) -> Result<Undoing, EthtoolError> {
        match self {
            Change::Table { before, after, .. } => {
                let now = card.rss()?;
                if now.table == *before {
                    return Ok(Undoing::Undone);
                }
                if now.table != *after {
                    return Ok(Undoing::Others);
                }
                // A table as the kernel makes it itself is given back to the kernel, which will then go on making it anew
                // when the number of queues changes; one that was written cannot be told from one set by hand.
                let queues = card.spread_queues().unwrap_or(0);
                let is_kernels = queues > 0
                    && before
                        .iter()
                        .zip((0..queues).cycle())
                        .all(|(set, own)| *set == own);
                card.set_rss_table(if is_kernels { &[] } else { before }, now.transform)?;
            }
            Change::HashFields { before, after } => {
                let now = card.hash_fields()?;
                if now != *before && now != *after {
                    return Ok(Undoing::Others);
                }
                if now != *before {
                    card.set_hash_fields(*before)?;
                }
            }
            Change::Feature { feature, before } => {
                if card.feature(*feature)?.on == *before {
                    return Ok(Undoing::Undone);
                }
                // Ours are gone by now. Without the feature the driver would drop the others.
                if *feature == Feature::Ntuple && card.has_rules()? {
                    return Ok(Undoing::Others);
                }
                card.set_feature(*feature, *before)?;
            }
            Change::Rule(rule) => {
                if let Some(location) = card.find_rule(rule)? {
                    card.delete_rule(location)?;
                }
            }
            Change::RelaxedOrderingOff => {
                if card.relaxed_ordering()? == Some(false) {
                    card.set_relaxed_ordering(true)?;
                }
            }
        }
        Ok(Undoing::Undone)
    }
}

/// A process, for as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) pid: u32,
    /// When it started, in clock ticks since the kernel did (proc_pid_stat(5), field 22).
    pub(super) started_ticks: u64,
}

impl Owner {
    /// This process.
    pub(super) fn this() -> io::Result<Owner> {
        let pid = std::process::id();
        let stat = std::fs::read_to_string("/proc/self/stat")?;
        match started(&stat) {
            Some(started_ticks) => Ok(Owner { pid, started_ticks }),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "/proc/self/stat")),
        }
    }

    /// Whether it still runs.
    pub(super) fn is_alive(&self) -> bool {
        std::fs::read_to_string(format!("/proc/{}/stat", self.pid))
            .is_ok_and(|stat| started(&stat) == Some(self.started_ticks))
    }
}

/// When a process started; `None` for one that is dead and only waits for its parent to ask.
fn started(stat: &str) -> Option<u64> {
    // The name, field 2, may contain anything but ends with the last parenthesis.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The file's contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    version: u32,
    pub(super) owner: Owner,
    /// The card, so that its changes are not undone on another one with the same index.
    pub(super) driver: String,
    pub(super) bus: String,
    /// In the order in which they were made.
    pub(super) changes: Vec<Change>,
}

impl Record {
    pub(super) fn new(owner: Owner, driver: String, bus: String) -> Record {
        Record {
            version: VERSION,
            owner,
            driver,
            bus,
            changes: Vec::new(),
        }
    }
}

impl Record {
    /// Makes one change of the last two, if both are of the table and nothing was changed between them; whether it did.
    pub(super) fn join_tables(&mut self) -> bool {
        let [.., Change::Table { before, .. }, Change::Table { after, .. }] = self.changes.as_slice() else {
            return false;
        };
        let is_back = before == after;
        let after = after.clone();
        self.changes.pop();
        match self.changes.last_mut() {
            Some(Change::Table { after: joined, .. }) if !is_back => *joined = after,
            _ => {
                self.changes.pop();
            }
        }
        true
    }
}

/// The folder of the files.
#[derive(Clone, Debug)]
pub(super) struct Store {
    folder: PathBuf,
}

/// Keeps other processes from the files while it exists.
#[derive(Debug)]
pub(super) struct StoreLock {
    folder: File,
}

impl Drop for StoreLock {
    fn drop(&mut self) {
        // Not by closing it: a child of another thread has it, too, until it executes its program, and would keep the lock.
        let _ = flock(&self.folder, FlockOperation::Unlock);
    }
}

impl Store {
    pub(super) fn new(folder: impl Into<PathBuf>) -> Store {
        Store {
            folder: folder.into(),
        }
    }

    /// Waits until nobody else reads or writes here. Makes the folder, which its owner alone may enter.
    pub(super) fn lock(&self) -> io::Result<StoreLock> {
        // The folder above may hold what others must reach.
        if let Some(above) = self.folder.parent() {
            std::fs::create_dir_all(above)?;
        }
        match DirBuilder::new().mode(0o700).create(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = File::from(rustix::fs::open(&self.folder, flags, Mode::empty())?);
        // Where others may write, a file could be theirs, or a link to anything.
        let found = folder.metadata()?;
        if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
            let what = format!("{} is not this user's alone: remove it", self.folder.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        flock(&folder, FlockOperation::LockExclusive)?;
        Ok(StoreLock { folder })
    }

    /// The file of an interface of the calling thread's network namespace.
    pub(super) fn path(&self, interface_index: u32) -> io::Result<PathBuf> {
        let namespace = std::fs::metadata("/proc/thread-self/ns/net")?.ino();
        Ok(self.folder.join(format!("{interface_index}-{namespace}.json")))
    }

    /// What it says; `None` when there is none. `InvalidData` for anything but a record of ours.
    pub(super) fn read(&self, path: &Path, _: &StoreLock) -> io::Result<Option<Record>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let mut text = String::new();
        file.take(LEN_MAX + 1).read_to_string(&mut text)?;
        if text.len() as u64 > LEN_MAX {
            return Err(wrong("it is too long".to_owned()));
        }
        let record: Record = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        if record.version != VERSION {
            let version = record.version;
            return Err(wrong(format!(
                "version {version} of the file's format is not known"
            )));
        }
        if !record.changes.iter().all(Change::is_possible) {
            return Err(wrong("a table cannot change its length".to_owned()));
        }
        Ok(Some(record))
    }

    /// Replaces it: whoever reads finds the old record or the new one, after a crash too.
    pub(super) fn write(&self, path: &Path, record: &Record, _: &StoreLock) -> io::Result<()> {
        let fresh = path.with_extension("json.new");
        std::fs::write(&fresh, serde_json::to_vec(record)?)?;
        std::fs::rename(&fresh, path)
    }

    /// Removes it, if it is there.
    pub(super) fn remove(&self, path: &Path, _: &StoreLock) -> io::Result<()> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::super::rules::FlowPorts;
    use super::super::tests::Folder;
    use super::*;

    fn record() -> Record {
        let mut record = Record::new(
            Owner::this().expect("procfs"),
            "igb".into(),
            "0000:01:00.0".into(),
        );
        record.changes = vec![
            Change::Table {
                before: vec![0, 1, 0, 1],
                after: vec![0, 0, 0, 1],
                transform: 0,
            },
            Change::HashFields {
                before: 0x30,
                after: 0xf0,
            },
            Change::Feature {
                feature: Feature::Ntuple,
                before: false,
            },
            Change::Rule(FlowRule {
                destination: Ipv4Addr::new(10, 0, 0, 2),
                source: None,
                ports: FlowPorts::Udp {
                    destination: 7168,
                    source: Some(50000),
                },
                queue: 1,
            }),
            Change::RelaxedOrderingOff,
        ];
        record
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = Folder::new("record");
        let store = folder.store();
        let lock = store.lock().expect("a folder of our own");
        let path = store.path(3).expect("a namespace");
        assert_eq!(store.read(&path, &lock).expect("nothing yet"), None);
        let record = record();
        store.write(&path, &record, &lock).expect("written");
        assert_eq!(
            store.read(&path, &lock).expect("readable").as_ref(),
            Some(&record)
        );
        let names: Vec<_> = std::fs::read_dir(folder.path()).expect("the folder").collect();
        assert_eq!(names.len(), 1, "{names:?}");
        let inode = std::fs::metadata("/proc/self/ns/net").expect("procfs").ino();
        assert!(path.ends_with(format!("3-{inode}.json")));
        store.remove(&path, &lock).expect("removed");
        store.remove(&path, &lock).expect("nothing to remove");
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let folder = Folder::new("garbage");
        let store = folder.store();
        let lock = store.lock().expect("a folder of our own");
        let path = store.path(3).expect("a namespace");
        let good = serde_json::to_string(&record()).expect("a record");
        let newer = good.replacen("\"version\":1", "\"version\":2", 1);
        assert_ne!(newer, good);
        let longer = good.replacen("[0,1,0,1]", "[0,1,0,1,0]", 1);
        let none = good.replacen("[0,1,0,1]", "[]", 1).replacen("[0,0,0,1]", "[]", 1);
        let endless = good.clone() + &" ".repeat(1 << 20);
        for text in [
            "",
            "{}",
            &good[..good.len() - 1],
            &newer,
            &longer,
            &none,
            &endless,
        ] {
            std::fs::write(&path, text).expect("the file");
            let error = store.read(&path, &lock).expect_err(text);
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{text}");
        }
    }

    #[test]
    fn the_folder_is_locked_and_private() {
        let folder = Folder::new("lock");
        let store = folder.store();
        let lock = store.lock().expect("a folder of our own");
        let mode = std::fs::metadata(folder.path()).expect("the folder").mode();
        assert_eq!(mode & 0o777, 0o700);
        let other = File::open(folder.path()).expect("the folder");
        assert!(flock(&other, FlockOperation::NonBlockingLockExclusive).is_err());
        // As a child has it between its fork and its program.
        let inherited = lock.folder.try_clone().expect("a descriptor");
        drop(lock);
        flock(&other, FlockOperation::NonBlockingLockExclusive).expect("free again");
        drop(inherited);
        // What was put in the folder's place is not followed.
        let link = folder.path().with_extension("link");
        std::os::unix::fs::symlink(folder.path(), &link).expect("a link");
        let refused = Store::new(&link).lock();
        std::fs::remove_file(&link).expect("it is ours");
        assert!(refused.is_err());
        // Nor is one that others may enter, who may have been there before.
        let permissions = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(folder.path(), permissions).expect("it is ours");
        assert!(folder.store().lock().is_err());
    }

    #[test]
    fn an_owner_lives_as_long_as_its_process() {
        let this = Owner::this().expect("procfs");
        assert!(this.is_alive());
        let later = Owner {
            started_ticks: this.started_ticks + 1,
            ..this
        };
        assert!(!later.is_alive(), "the same id, used again");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("procfs");
        let owner = Owner {
            pid: child.id(),
            started_ticks: started(&stat).expect("a start"),
        };
        assert!(owner.is_alive());
        child.kill().expect("our own child");
        child.wait().expect("its end");
        assert!(!owner.is_alive());
    }

    #[test]
    fn a_dead_process_nobody_asked_for_does_not_live() {
        let fields: Vec<String> = (5..=52).map(|field| field.to_string()).collect();
        let stat = |state| format!("17 (a) b) c) {state} 4 {}", fields.join(" "));
        assert_eq!(started(&stat("S")), Some(22));
        assert_eq!(started(&stat("Z")), None);
        assert_eq!(started("17 (x)"), None);
        assert_eq!(started(""), None);
    }
}
