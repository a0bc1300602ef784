//! What was changed of a device, written down *before* it is changed, so that it can be undone by whoever comes next.
//!
//! One file for each interface and kind of change, `/run/lm/KIND/INDEX-NAMESPACE.json`, replaced as a whole: it names
//! the process that made the changes (by id and start time, since ids are used again), the namespace (whose number is
//! used again as well), and for each change what was there before and what is there now. While that process lives, no
//! other makes changes of that kind. When it is gone, the next one undoes its changes first.
//!
//! A change is undone only if the device still has what was put there. What somebody else has set since then is theirs.
//!
//! `/run` is lost at a reboot, and so are the changes: nothing has to outlive the kernel, so nothing is synced to a disk.

use std::fmt;
use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ethtool::{Driver, EthtoolError};
use crate::interface::Interface;

/// Version of the files' format. Another one is not understood.
const VERSION: u32 = 1;

/// No record is longer, in bytes.
const LEN_MAX: u64 = 1 << 20;

/// What became of undoing a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Undoing {
    /// It is as before, and perhaps had never been otherwise.
    Undone,
    /// Somebody else has set something else since; left alone.
    Others,
}

/// A setting of a device, before and after.
pub(crate) trait Change: Clone + fmt::Debug + Serialize + DeserializeOwned {
    /// What has the setting.
    type Device: ?Sized;

    fn driver(device: &Self::Device) -> Result<Driver, EthtoolError>;
    /// Whether there can be such a change: not all that a file says can.
    fn is_possible(&self) -> bool;
    /// Makes the change, or fails and has made none.
    fn make(&self, device: &Self::Device) -> Result<(), EthtoolError>;
    /// Takes it back.
    fn undo(&self, device: &Self::Device) -> Result<Undoing, EthtoolError>;
}

/// A journal that cannot be read, or not written.
fn unusable(path: &Path, source: &io::Error) -> String {
    let path = path.display();
    match source.kind() {
        io::ErrorKind::InvalidData => format!(
            "cannot understand {path} ({source}), which says how the interface was set before; set it right \
             (ethtool -X DEVICE default; tc qdisc del dev DEVICE root) and delete the file"
        ),
        _ => format!(
            "cannot write down how the interface is set, in {path} ({source}); run as root, or make the folder writable"
        ),
    }
}

/// Why nothing is changed, or not changed back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// Another process makes such changes of this interface.
    #[error("process {pid} keeps settings of this interface already; stop it, or use another interface")]
    InUse {
        /// Its id.
        pid: u32,
    },
    /// The file that remembers what was changed.
    #[error("{}", unusable(.path, .source))]
    State {
        /// Its path.
        path: PathBuf,
        /// What the file system said; `InvalidData` for a file that is not understood.
        source: io::Error,
    },
    /// Not everything could be restored.
    #[error(
        "the interface's settings could not all be restored ({source}); the next start tries again, or set them right \
         by hand as {} says and delete it",
        .path.display()
    )]
    Undo {
        /// The file that remembers the rest.
        path: PathBuf,
        /// What the device said.
        source: EthtoolError,
    },
    /// The device.
    #[error(transparent)]
    Device(#[from] EthtoolError),
}

/// A process, for as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    pub(crate) pid: u32,
    /// When it started, in clock ticks since the kernel did (proc_pid_stat(5), field 22).
    pub(crate) started_ticks: u64,
}

impl Owner {
    /// This process.
    pub(crate) fn this() -> io::Result<Owner> {
        let pid = std::process::id();
        let stat = std::fs::read_to_string("/proc/self/stat")?;
        match started(&stat) {
            Some(started_ticks) => Ok(Owner { pid, started_ticks }),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "/proc/self/stat")),
        }
    }

    /// Whether it still runs.
    pub(crate) fn is_alive(&self) -> bool {
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

/// The calling thread's network namespace, by a number that no other gets before the next boot: that of its inode, in the file's name, is the
/// next one's as soon as it is gone.
#[expect(unsafe_code, reason = "an option that no crate has")]
fn namespace() -> io::Result<u64> {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let socket = std::os::unix::net::UnixDatagram::unbound()?;
    let (mut cookie, mut len) = (0_u64, size_of::<u64>() as libc::socklen_t);
    let (to, to_len) = ((&raw mut cookie).cast(), &raw mut len);
    // SAFETY: both are live, and writable for their length.
    match unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, to, to_len) } {
        0 => Ok(cookie),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The file's contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record<C> {
    version: u32,
    pub(crate) owner: Owner,
    /// The card, so that its changes are not undone on another one with the same index.
    pub(crate) driver: String,
    pub(crate) bus: String,
    /// Where the interface is; `None` in files of earlier versions, which are believed.
    #[serde(default)]
    namespace: Option<u64>,
    /// In the order in which they were made.
    pub(crate) changes: Vec<C>,
}

impl<C> Record<C> {
    pub(crate) fn new(owner: Owner, driver: Driver) -> Record<C> {
        Record {
            version: VERSION,
            owner,
            driver: driver.name,
            bus: driver.bus,
            namespace: None,
            changes: Vec::new(),
        }
    }
}

/// The folder of the files.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    folder: PathBuf,
}

/// Keeps other processes from the files while it exists.
#[derive(Debug)]
pub(crate) struct StoreLock {
    folder: File,
}

impl Drop for StoreLock {
    fn drop(&mut self) {
        // Not by closing it: a child of another thread has it, too, until it executes its program, and would keep the lock.
        let _ = flock(&self.folder, FlockOperation::Unlock);
    }
}

impl Store {
    pub(crate) fn new(folder: impl Into<PathBuf>) -> Store {
        Store {
            folder: folder.into(),
        }
    }

    /// Waits until nobody else reads or writes here. Makes the folder, in which its owner alone may write.
    pub(crate) fn lock(&self) -> io::Result<StoreLock> {
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
        if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o022 != 0 {
            let what = format!("{} is not this user's alone: remove it", self.folder.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        flock(&folder, FlockOperation::LockExclusive)?;
        Ok(StoreLock { folder })
    }

    /// The file of an interface of the calling thread's network namespace.
    pub(crate) fn path(&self, interface_index: u32) -> io::Result<PathBuf> {
        let namespace = std::fs::metadata("/proc/thread-self/ns/net")?.ino();
        Ok(self.folder.join(format!("{interface_index}-{namespace}.json")))
    }

    /// What it says; `None` when there is none. `InvalidData` for anything but a record of ours.
    pub(crate) fn read<C: Change>(&self, path: &Path, _: &StoreLock) -> io::Result<Option<Record<C>>> {
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
        parse(&text).map(Some).map_err(wrong)
    }

    /// Replaces it: whoever reads finds the old record or the new one, after a crash too.
    pub(crate) fn write<C: Change>(&self, path: &Path, record: &Record<C>, _: &StoreLock) -> io::Result<()> {
        let fresh = path.with_extension("json.new");
        std::fs::write(&fresh, serde_json::to_vec(record)?)?;
        std::fs::rename(&fresh, path)
    }

    /// Removes it, if it is there.
    pub(crate) fn remove(&self, path: &Path, _: &StoreLock) -> io::Result<()> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// What the text of a file says.
pub(crate) fn parse<C: Change>(text: &str) -> Result<Record<C>, String> {
    let record: Record<C> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if record.version != VERSION {
        let version = record.version;
        return Err(format!("version {version} of the file's format is not known"));
    }
    match record.changes.iter().all(C::is_possible) {
        true => Ok(record),
        false => Err("one of its changes cannot be".to_owned()),
    }
}

/// A process's changes of a device. Dropping it takes them back.
pub(crate) struct Journal<C: Change> {
    pub(crate) device: Box<C::Device>,
    pub(crate) interface: String,
    store: Store,
    path: PathBuf,
    record: Record<C>,
    /// The file is this process's.
    pub(crate) is_kept: bool,
}

impl<C: Change> fmt::Debug for Journal<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("interface", &self.interface)
            .field("changes", &self.record.changes)
            .finish_non_exhaustive()
    }
}

impl<C: Change> Journal<C> {
    /// This process's, of an interface of the calling thread's network namespace, and the lock on all of them. Writes nothing yet.
    pub(crate) fn open(
        device: Box<C::Device>,
        interface: &Interface,
        store: Store,
    ) -> Result<(Journal<C>, StoreLock), JournalError> {
        let driver = C::driver(&device)?;
        let failed = |source| JournalError::State {
            path: store.folder.clone(),
            source,
        };
        let path = store.path(interface.index).map_err(failed)?;
        let lock = store.lock().map_err(failed)?;
        let failed = EthtoolError::of_call("start time of this process");
        let (owner, namespace) = (Owner::this().map_err(failed)?, namespace().map_err(failed)?);
        let journal = Journal {
            device,
            interface: interface.name.clone(),
            store,
            path,
            record: Record {
                namespace: Some(namespace),
                ..Record::new(owner, driver)
            },
            is_kept: false,
        };
        Ok((journal, lock))
    }

    /// Undoes what a dead process left on the device; tells whether there was anything.
    pub(crate) fn recover(&mut self, lock: &StoreLock) -> Result<bool, JournalError> {
        let found = self.store.read::<C>(&self.path, lock);
        let Some(found) = found.map_err(|source| self.state(source))? else {
            return Ok(false);
        };
        let own = &self.record;
        let is_here = found.namespace.is_none() || found.namespace == own.namespace;
        if is_here && found.owner.is_alive() {
            return Err(JournalError::InUse { pid: found.owner.pid });
        }
        if !is_here || (&own.driver, &own.bus) != (&found.driver, &found.bus) {
            // The namespace or the card that it speaks of is gone, with its settings.
            self.remove(lock)?;
            return Ok(false);
        }
        let own = std::mem::replace(&mut self.record, found);
        let undone = self.undo_all(lock);
        self.record = own;
        undone.map(|()| true)
    }

    /// What was changed, in the order in which it was.
    pub(crate) fn changes(&self) -> &[C] {
        &self.record.changes
    }

    /// The same, to be changed along with the device; [`Journal::write`] has to follow.
    pub(crate) fn changes_mut(&mut self) -> &mut Vec<C> {
        &mut self.record.changes
    }

    /// Where the device sits.
    pub(crate) fn bus(&self) -> &str {
        &self.record.bus
    }

    pub(crate) fn lock(&self) -> Result<StoreLock, JournalError> {
        self.store.lock().map_err(|source| self.state(source))
    }

    pub(crate) fn write(&mut self, lock: &StoreLock) -> Result<(), JournalError> {
        self.is_kept = true;
        let written = self.store.write(&self.path, &self.record, lock);
        written.map_err(|source| self.state(source))
    }

    fn remove(&self, lock: &StoreLock) -> Result<(), JournalError> {
        let removed = self.store.remove(&self.path, lock);
        removed.map_err(|source| self.state(source))
    }

    fn state(&self, source: io::Error) -> JournalError {
        JournalError::State {
            path: self.path.clone(),
            source,
        }
    }

    /// Writes a change down, then makes it. One that fails is not written down any more.
    pub(crate) fn change(&mut self, change: C, lock: &StoreLock) -> Result<(), JournalError> {
        self.record.changes.push(change.clone());
        let made = match self.write(lock) {
            Ok(()) => change.make(&self.device).map_err(JournalError::Device),
            Err(error) => Err(error),
        };
        if made.is_err() {
            self.record.changes.pop();
            self.write(lock)?;
        }
        made
    }

    /// Undoes all changes, the last one first, and removes the file. What fails stays in it, for the next process.
    fn undo_all(&mut self, lock: &StoreLock) -> Result<(), JournalError> {
        self.is_kept = false;
        let mut failed = None;
        let mut rest = Vec::new();
        while let Some(change) = self.record.changes.pop() {
            match change.undo(&self.device) {
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
            return self.remove(lock);
        };
        rest.reverse();
        self.record.changes = rest;
        let written = self.store.write(&self.path, &self.record, lock);
        written.map_err(|source| self.state(source))?;
        Err(JournalError::Undo {
            path: self.path.clone(),
            source,
        })
    }

    /// Takes all changes back.
    pub(crate) fn restore(&mut self) -> Result<(), JournalError> {
        let lock = self.lock()?;
        self.undo_all(&lock)
    }
}

impl<C: Change> Drop for Journal<C> {
    fn drop(&mut self) {
        if self.is_kept
            && let Err(error) = self.restore()
        {
            tracing::warn!(interface = self.interface, "{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;
    use crate::ethtool::Feature;
    use crate::steering::change::Change;
    use crate::steering::rules::{FlowPorts, FlowRule};
    use crate::steering::tests::Folder;

    fn record() -> Record<Change> {
        let driver = Driver {
            name: "igb".into(),
            bus: "0000:01:00.0".into(),
        };
        let mut record = Record::new(Owner::this().expect("procfs"), driver);
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
        assert_eq!(store.read::<Change>(&path, &lock).expect("nothing yet"), None);
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
            let error = store.read::<Change>(&path, &lock).expect_err(text);
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
