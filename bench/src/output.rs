//! Where `lm-recv` puts what arrives: a file, numbered files in a directory, standard output, or a device.
//!
//! A file is written under another name beside its final one and renamed when the transfer is complete, so that nothing
//! half-written ever has the final name: `.NAME-ADDRESS-KEY.part` for what a sender can go on with (`part.rs`), which is kept when the way to it
//! breaks; `.NAME.partial-PID` for everything else, removed when the [`Destination`] is dropped without
//! [`Destination::finish`], which covers failures, Ctrl-C and panics (not SIGKILL).

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::Timespec;
use rustix::io::Errno;

pub use self::destination::Destination;
use self::destination::{Kind, Partial};
pub(crate) use self::destination::{is_ready, stopped};
use self::part::Kept;
pub use self::part::{Source, digest};
use self::space::{Room, Space};
use crate::transfer::wire::Refusal;

mod destination;
mod part;
mod space;

/// Bytes written to a file between two rounds of the poll engine, some 50 µs of copying into the page cache.
pub const FILE_PIECE_LEN: usize = 256 << 10;

/// Bytes written to a pipe at once: what fits without blocking after `poll(2)` said writable (PIPE_BUF, pipe(7)).
const STREAM_PIECE_LEN: usize = 4096;

/// How long one wait for a slow stream lasts before the poll engine gets its next round.
const STREAM_WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};

/// What `st_blocks` counts in, in bytes (stat(2)).
const BLOCK_LEN: u64 = 512;

/// Longest file name that every common file system takes, in bytes (NAME_MAX).
const NAME_LEN_MAX: usize = 255;

/// Files that a directory numbers before it counts as full.
const NUMBERS_MAX: u32 = 999_999;

/// Transfers that a directory takes at once; every other output takes one.
const CONCURRENT_MAX: usize = 16;

/// Why an output cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputError {
    /// The kind, as a sender is told.
    pub refusal: Refusal,
    /// What and what to do about it, in one line.
    pub text: String,
}

impl OutputError {
    pub(crate) fn new(refusal: Refusal, text: impl Into<String>) -> Self {
        OutputError {
            refusal,
            text: text.into(),
        }
    }

    fn from_io(path: &Path, error: &io::Error) -> Self {
        let path = path.display();
        match Errno::from_io_error(error) {
            Some(Errno::NOSPC | Errno::DQUOT) => {
                let text = format!("no space left for {path}; free some or choose another --output");
                Self::new(Refusal::DiskFull, text)
            }
            Some(Errno::EXIST) => Self::exists(path),
            _ => {
                let why = describe(error);
                let text = format!("cannot write {path}: {why}; choose another --output");
                Self::new(Refusal::NotWritable, text)
            }
        }
    }

    fn exists(path: std::path::Display<'_>) -> Self {
        let text = format!("{path} exists; choose another --output or add --force to overwrite it");
        Self::new(Refusal::Exists, text)
    }
}

/// The system's words for an error without `(os error N)`, in lower case as they stand inside a sentence.
#[must_use]
pub fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    let first = letters.next().into_iter().flat_map(char::to_lowercase);
    first.chain(letters).collect()
}

/// What the argument of `--output` names.
#[derive(Debug)]
enum Target {
    /// Standard output, a character device or a FIFO: written in order, nothing to rename.
    Stream { file: File, name: String },
    /// One file of that name.
    File(PathBuf),
    /// `transfer-000001` and so on in that directory.
    Directory { path: PathBuf, next: Arc<AtomicU32> },
}

/// The output of a receiver, good for any number of transfers.
#[derive(Debug)]
pub struct Output {
    target: Target,
    parts: Kept,
    /// Transfers that began: what none can go on with has a name of this number.
    begun: u32,
    force: bool,
    /// Bytes of the file system that stay free; `None`: a twentieth of it, at most 1 GiB.
    pub keep_free: Option<u64>,
    /// Whether a transfer is complete only when the disk has it, and its name.
    pub fsync: bool,
}

impl Output {
    /// Examines `argument`: `-`, a directory, or a file name. `force` allows an existing file to be overwritten.
    ///
    /// # Errors
    /// When no transfer could be written there as things are: the file exists (without `force`), its directory is
    /// missing or read-only, it is a block device or a socket.
    pub fn new(argument: &Path, force: bool) -> Result<Output, OutputError> {
        let target = Self::target(argument)?;
        let parts = match &target {
            Target::Directory { path, .. } => Kept::of(path, "."),
            Target::File(path) => Kept::of(parent(path), &beside(path, "-").to_string_lossy()),
            Target::Stream { .. } => Kept::default(),
        };
        let output = Output {
            target,
            parts,
            begun: 0,
            force,
            keep_free: None,
            fsync: false,
        };
        output.check()?;
        Ok(output)
    }

    /// Whether a transfer could be written as things are.
    ///
    /// # Errors
    /// As [`Output::new`].
    pub fn check(&self) -> Result<(), OutputError> {
        match &self.target {
            Target::File(path) => {
                self.check_free(path)?;
                check_writable(path, path)
            }
            Target::Directory { path, .. } => check_writable(path, &numbered(path, 0)),
            Target::Stream { .. } => Ok(()),
        }
    }

    fn target(argument: &Path) -> Result<Target, OutputError> {
        let told = |error: io::Error| OutputError::from_io(argument, &error);
        if argument == Path::new("-") {
            let file = io::stdout().as_fd().try_clone_to_owned();
            let file = file.map_err(|error| OutputError::from_io(Path::new("standard output"), &error))?;
            return Ok(Target::Stream {
                file: file.into(),
                name: "standard output".into(),
            });
        }
        let unusable = |text| Err(OutputError::new(Refusal::NotWritable, text));
        let kind = match fs::metadata(argument) {
            Ok(metadata) => metadata.file_type(),
            // A link to nowhere is left to the rename, which replaces it only when forced.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let is_folder = argument.as_os_str().as_bytes().ends_with(b"/");
                if argument.file_name().is_some() && !is_folder {
                    return Ok(Target::File(argument.to_owned()));
                }
                let name = argument.display();
                return unusable(format!("directory {name} does not exist; create it first"));
            }
            Err(error) => return Err(told(error)),
        };
        if kind.is_dir() {
            let path = argument.to_owned();
            let taken =
                (1..=NUMBERS_MAX).take_while(|number| fs::symlink_metadata(numbered(&path, *number)).is_ok());
            let next = Arc::new(AtomicU32::new(taken.count() as u32 + 1));
            return Ok(Target::Directory { path, next });
        }
        if kind.is_file() {
            // Through a symbolic link the file is replaced, not the link, as `cp` does.
            return Ok(Target::File(fs::canonicalize(argument).map_err(told)?));
        }
        // Renaming over a device node would replace /dev/null by a file: write into it instead.
        let name = argument.display().to_string();
        if kind.is_char_device() || kind.is_fifo() {
            let file = OpenOptions::new().write(true).open(argument).map_err(told)?;
            return Ok(Target::Stream { file, name });
        }
        unusable(format!(
            "{name} is a block device or socket; name a file, a directory or -"
        ))
    }

    fn check_free(&self, path: &Path) -> Result<(), OutputError> {
        if !self.force && fs::symlink_metadata(path).is_ok() {
            return Err(OutputError::exists(path.display()));
        }
        Ok(())
    }

    /// How many transfers can be written at the same time.
    #[must_use]
    pub fn concurrent_max(&self) -> usize {
        match self.target {
            Target::Directory { .. } => CONCURRENT_MAX,
            _ => 1,
        }
    }

    /// Opens the destination of a transfer of `total_len` bytes (`None`: not known yet). What is written of a `source` is kept
    /// when the transfer breaks, and is there again the next time if `resume` is set.
    ///
    /// # Errors
    /// When the file exists, cannot be created, or the file system cannot spare so many bytes.
    pub fn begin(
        &mut self,
        total_len: Option<u64>,
        source: Option<Source>,
        resume: bool,
    ) -> Result<Destination, OutputError> {
        let (fsync, keep_free) = (self.fsync, self.keep_free);
        let (path, part, numbered) = match &self.target {
            Target::Stream { file, name } => {
                let file = file.try_clone();
                let file = file.map_err(|error| OutputError::from_io(Path::new(name), &error))?;
                return Ok(Destination::stream(file, name.clone(), fsync));
            }
            Target::File(path) => {
                self.check_free(path)?;
                let part = source.map(|source| beside(path, &format!("-{source}")));
                (path.clone(), part, None)
            }
            Target::Directory { path, next } => {
                // Relaxed: numbers that are taken are passed over when a file gets its own.
                if next.load(Ordering::Relaxed) > NUMBERS_MAX {
                    return Err(full(path));
                }
                self.begun = self.begun.wrapping_add(1);
                let part = source.map(|source| path.join(format!(".{source}")));
                (numbered(path, self.begun), part, Some(Arc::clone(next)))
            }
        };
        let told = |error: io::Error| OutputError::from_io(&path, &error);
        let there = part.as_deref().filter(|_| resume);
        let there = there.and_then(|part| fs::symlink_metadata(part).ok());
        let there = there.map_or(0, |found| found.blocks() * BLOCK_LEN);
        let needed = total_len.map(|len| len.saturating_sub(there));
        check_space(parent(&path), needed, keep_free)?;
        let part =
            part.filter(|part| source.is_some_and(|source| self.parts.take(part, source.from, resume)));
        let (file, partial, is_part) = open_partial(&path, part, resume).map_err(told)?;
        let held = file.metadata().map_err(told)?.len();
        Ok(Destination {
            kind: Kind::File(Partial {
                partial,
                path,
                force: self.force && numbered.is_none(),
                numbered,
                is_part,
                keep: held > 0,
                room: Room::new(keep_free),
            }),
            file,
            held,
            fsync,
        })
    }

    /// A transfer from this address broke, of which these bytes are counted. Whether what was written of it can be kept: one
    /// address has half of what is kept at most, and its own oldest goes first.
    pub fn keep(&mut self, destination: &Destination, from: Ipv4Addr, counted: u64) -> bool {
        let part = destination.part();
        part.is_some_and(|part| self.parts.add(part, from, counted))
    }

    /// Bytes that were counted for parts which are gone since this was asked last.
    pub fn take_freed(&mut self) -> u64 {
        std::mem::take(&mut self.parts.freed)
    }
}

fn full(directory: &Path) -> OutputError {
    let directory = directory.display();
    let text = format!("{directory} holds transfers up to number {NUMBERS_MAX}; choose another --output");
    OutputError::new(Refusal::Exists, text)
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn numbered(directory: &Path, number: u32) -> PathBuf {
    directory.join(format!("transfer-{number:06}"))
}

/// `.NAME.partial-PID` beside `path`.
fn partial_name(path: &Path) -> PathBuf {
    beside(path, &format!(".partial-{}", std::process::id()))
}

/// `.NAME` and the suffix beside `path`; a long NAME is cut so that the whole fits.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().as_bytes();
    let mut partial = vec![b'.'];
    partial.extend_from_slice(&name[..name.len().min(NAME_LEN_MAX - 1 - suffix.len())]);
    partial.extend_from_slice(suffix.as_bytes());
    path.with_file_name(OsString::from_vec(partial))
}

/// Opens what is written until the file is complete: the part, or where there is none, or another transfer writes it, a file that
/// nobody goes on with. `true`: the part.
fn open_partial(path: &Path, part: Option<PathBuf>, resume: bool) -> io::Result<(File, PathBuf, bool)> {
    if let Some(part) = part
        && let Some(file) = part::open(&part, resume)?
    {
        return Ok((file, part, true));
    }
    let partial = partial_name(path);
    Ok((create_new(&partial)?, partial, false))
}

fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Makes a file's partial file and removes it: permissions alone do not tell of /proc or a full inode table. `output` is
/// what the user named.
fn check_writable(output: &Path, file: &Path) -> Result<(), OutputError> {
    let partial = partial_name(file);
    // Nobody else's: it has our process number.
    let _ = fs::remove_file(&partial);
    create_new(&partial).map_err(|error| OutputError::from_io(output, &error))?;
    let _ = fs::remove_file(&partial);
    Ok(())
}

/// Compares with the free bytes instead of reserving them: a reservation made for a stranger's mere announcement
/// would let anybody fill the disk.
fn check_space(directory: &Path, total_len: Option<u64>, keep_free: Option<u64>) -> Result<(), OutputError> {
    let needed = total_len.unwrap_or_default();
    match Space::of(rustix::fs::statvfs(directory), keep_free) {
        Some(space) if space.spare() < needed => Err(lacks(&space, directory, needed)),
        _ => Ok(()),
    }
}

fn lacks(space: &Space, directory: &Path, needed: u64) -> OutputError {
    let text = space.lacks(&directory.display().to_string(), needed);
    OutputError::new(Refusal::DiskFull, text)
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
