//! Where `lm-recv` puts what arrives: a file, numbered files in a directory, standard output, or a device.
//!
//! A file is written under another name beside its final one and renamed when the transfer is complete, so that nothing
//! half-written ever has the final name: `.NAME.part` for what a sender can go on with (`part.rs`), which is kept when the way to it
//! breaks; `.NAME.partial-PID` for everything else, removed when the [`Destination`] is dropped without
//! [`Destination::finish`], which covers failures, Ctrl-C and panics (not SIGKILL).

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

pub use self::part::{Source, digest};
use self::space::{Room, Space};
use crate::transfer::wire::{Digest, Refusal};

mod part;
mod space;

/// Bytes written to a file between two rounds of the poll engine, some 50 µs of copying into the page cache.
const FILE_PIECE_LEN: usize = 256 << 10;

/// Bytes written to a pipe at once: what fits without blocking after `poll(2)` said writable (PIPE_BUF, pipe(7)).
const STREAM_PIECE_LEN: usize = 4096;

/// How long one wait for a slow reader lasts before the poll engine gets its next round, in nanoseconds.
const STREAM_WAIT_NS: i64 = 1_000_000;

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
    fn new(refusal: Refusal, text: impl Into<String>) -> Self {
        OutputError {
            refusal,
            text: text.into(),
        }
    }

    fn from_io(path: &Path, error: &io::Error) -> Self {
        let path = path.display();
        match Errno::from_io_error(error) {
            Some(Errno::NOSPC | Errno::DQUOT) => Self::new(
                Refusal::DiskFull,
                format!("no space left for {path}; free some or choose another --output"),
            ),
            Some(Errno::EXIST) => Self::exists(format!("{path}")),
            _ => Self::new(
                Refusal::NotWritable,
                format!(
                    "cannot write {path}: {}; choose another --output",
                    describe(error)
                ),
            ),
        }
    }

    fn exists(path: String) -> Self {
        Self::new(
            Refusal::Exists,
            format!("{path} exists; choose another --output or add --force to overwrite it"),
        )
    }
}

/// The system's words for an error without `(os error N)`, in lower case as they stand inside a sentence.
#[must_use]
pub fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

/// What the argument of `--output` names.
#[derive(Debug)]
enum Target {
    /// Standard output, a character device or a FIFO: written in order, nothing to rename.
    Stream { file: File, name: String },
    /// One file of that name.
    File(PathBuf),
    /// `transfer-000001` and so on in that directory.
    Directory { path: PathBuf, next: u32 },
}

/// The output of a receiver, good for any number of transfers.
#[derive(Debug)]
pub struct Output {
    target: Target,
    force: bool,
    keep_free: Option<u64>,
    fsync: bool,
}

impl Output {
    /// Examines `argument`: `-`, a directory, or a file name. `force` allows an existing file to be overwritten.
    ///
    /// # Errors
    /// When no transfer could be written there as things are: the file exists (without `force`), its directory is
    /// missing or read-only, it is a block device or a socket.
    pub fn new(argument: &Path, force: bool) -> Result<Output, OutputError> {
        let output = Output {
            target: Self::target(argument)?,
            force,
            keep_free: None,
            fsync: false,
        };
        output.check()?;
        Ok(output)
    }

    /// So many bytes of the file system stay free; `None`: a twentieth of it, at most 1 GiB.
    #[must_use]
    pub fn keep_free(mut self, bytes: Option<u64>) -> Self {
        self.keep_free = bytes;
        self
    }

    /// Whether a transfer is complete only when the disk has it, and its name.
    #[must_use]
    pub fn fsync(mut self, fsync: bool) -> Self {
        self.fsync = fsync;
        self
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
        if argument == Path::new("-") {
            let file = io::stdout().as_fd().try_clone_to_owned();
            let file = file.map_err(|error| OutputError::from_io(Path::new("standard output"), &error))?;
            return Ok(Target::Stream {
                file: file.into(),
                name: "standard output".into(),
            });
        }
        let kind = match fs::metadata(argument) {
            Ok(metadata) => metadata.file_type(),
            // A link to nowhere is left to the rename, which replaces it only when forced.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return match argument.file_name() {
                    Some(_) if !argument.as_os_str().as_bytes().ends_with(b"/") => {
                        Ok(Target::File(argument.to_owned()))
                    }
                    _ => Err(OutputError::new(
                        Refusal::NotWritable,
                        format!("directory {} does not exist; create it first", argument.display()),
                    )),
                };
            }
            Err(error) => return Err(OutputError::from_io(argument, &error)),
        };
        if kind.is_dir() {
            return Ok(Target::Directory {
                path: argument.to_owned(),
                next: 1,
            });
        }
        if kind.is_file() {
            // Through a symbolic link the file is replaced, not the link, as `cp` does.
            let path = fs::canonicalize(argument).map_err(|error| OutputError::from_io(argument, &error))?;
            return Ok(Target::File(path));
        }
        // Renaming over a device node would replace /dev/null by a file: write into it instead.
        if kind.is_char_device() || kind.is_fifo() {
            let file = OpenOptions::new().write(true).open(argument);
            let file = file.map_err(|error| OutputError::from_io(argument, &error))?;
            return Ok(Target::Stream {
                file,
                name: argument.display().to_string(),
            });
        }
        Err(OutputError::new(
            Refusal::NotWritable,
            format!(
                "{} is a block device or socket; name a file, a directory or -",
                argument.display()
            ),
        ))
    }

    fn check_free(&self, path: &Path) -> Result<(), OutputError> {
        if !self.force && fs::symlink_metadata(path).is_ok() {
            return Err(OutputError::exists(path.display().to_string()));
        }
        Ok(())
    }

    /// Whether transfers go to standard output or a device, one behind the other.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        matches!(self.target, Target::Stream { .. })
    }

    /// How many transfers can be written at the same time.
    #[must_use]
    pub fn concurrent_max(&self) -> usize {
        if matches!(self.target, Target::Directory { .. }) {
            CONCURRENT_MAX
        } else {
            1
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
        let number = self.next_number()?;
        let (path, part, numbered) = match &self.target {
            Target::Stream { file, name } => {
                let file = file
                    .try_clone()
                    .map_err(|error| OutputError::from_io(Path::new(name), &error))?;
                return Ok(Destination::stream(file, name.clone(), fsync));
            }
            Target::File(path) => {
                self.check_free(path)?;
                (path.clone(), source.map(|_| part::of_file(path)), None)
            }
            Target::Directory { path, .. } => {
                let part = source.map(|source| source.part(path));
                (numbered(path, number), part, Some(number))
            }
        };
        let told = |error: &io::Error| OutputError::from_io(&path, error);
        let there = part.as_deref().filter(|_| resume).map(fs::symlink_metadata);
        let there = there
            .and_then(Result::ok)
            .map_or(0, |found| found.blocks() * BLOCK_LEN);
        let needed = total_len.map(|len| len.saturating_sub(there));
        check_space(parent(&path), needed, keep_free)?;
        let (file, partial, is_part) = open_partial(&path, part, resume).map_err(|error| told(&error))?;
        let held = file.metadata().map_err(|error| told(&error))?.len();
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

    /// The first number of a directory that is free; other outputs have none.
    fn next_number(&mut self) -> Result<u32, OutputError> {
        let Target::Directory { path, next } = &mut self.target else {
            return Ok(0);
        };
        while *next <= NUMBERS_MAX {
            let (number, path) = (*next, numbered(path, *next));
            *next += 1;
            let is_taken = |path: &Path| fs::symlink_metadata(path).is_ok();
            if !is_taken(&path) && !is_taken(&partial_name(&path)) {
                return Ok(number);
            }
        }
        Err(OutputError::new(
            Refusal::Exists,
            format!(
                "{} holds transfers up to number {NUMBERS_MAX}; choose another --output",
                path.display()
            ),
        ))
    }

    /// Tells the output that a transfer failed, so that a directory's number can be used again.
    pub fn failed(&mut self) {
        if let Target::Directory { next, .. } = &mut self.target {
            *next = 1;
        }
    }
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
    if let Some(part) = part {
        if fs::symlink_metadata(&part).is_err() {
            part::make_room(parent(path))?;
        }
        if let Some(file) = part::open(&part, resume)? {
            return Ok((file, part, true));
        }
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

/// The names of a file under way; removes the partial one when dropped, unless it is to be kept.
#[derive(Debug)]
struct Partial {
    partial: PathBuf,
    path: PathBuf,
    force: bool,
    /// The number in the name when the receiver chooses names.
    numbered: Option<u32>,
    /// Whether it can be kept, and whether it is.
    is_part: bool,
    keep: bool,
    room: Room,
}

impl Partial {
    fn write(
        &mut self,
        file: &File,
        offset: u64,
        bytes: &[u8],
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), OutputError> {
        let told = |error: &io::Error| OutputError::from_io(&self.path, error);
        for (number, piece) in bytes.chunks(FILE_PIECE_LEN).enumerate() {
            if number > 0 && !between() {
                return Err(told(&stopped()));
            }
            let len = piece.len() as u64;
            self.room
                .take(file, len)
                .map_err(|space| lacks(&space, parent(&self.path), len))?;
            file.write_all_at(piece, offset + (number * FILE_PIECE_LEN) as u64)
                .map_err(|error| told(&error))?;
        }
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Where one transfer goes.
#[derive(Debug)]
pub struct Destination {
    // Before the file, whose end unlocks the part.
    kind: Kind,
    file: File,
    /// Bytes that were there.
    held: u64,
    fsync: bool,
}

#[derive(Debug)]
enum Kind {
    File(Partial),
    Stream {
        name: String,
        position: u64,
        blocks: bool,
    },
}

impl Destination {
    fn stream(file: File, name: String, fsync: bool) -> Self {
        // `lm-recv --output - > file` cannot block as a pipe can.
        let blocks = !file.metadata().is_ok_and(|metadata| metadata.is_file());
        Destination {
            file,
            kind: Kind::Stream {
                name,
                position: 0,
                blocks,
            },
            held: 0,
            fsync,
        }
    }

    /// How many bytes of an earlier transfer are there, whatever they are.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// The digest of the bytes `from..to` of what is there; see [`digest`].
    ///
    /// # Errors
    /// What the file system reports.
    pub fn digest(&self, from: u64, to: u64, between: &mut dyn FnMut() -> bool) -> io::Result<Digest> {
        digest(&self.file, from, to.min(self.held), between)
    }

    /// Leaves of what is there the first `len` bytes.
    ///
    /// # Errors
    /// What the file system reports, with a line that says what to do.
    pub fn cut(&mut self, len: u64) -> Result<(), OutputError> {
        self.file.set_len(len).map_err(|error| self.explain(&error))
    }

    /// The transfer broke. Returns whether what was written of it is kept, as far as it can be and shall be.
    pub fn abandon(mut self, keep: bool) -> bool {
        let Kind::File(partial) = &mut self.kind else {
            return false;
        };
        let is_something = self.file.metadata().is_ok_and(|found| found.len() > 0);
        partial.keep = keep && partial.is_part && is_something;
        partial.keep
    }

    /// Whether bytes must be written from the first to the last.
    #[must_use]
    pub fn in_order(&self) -> bool {
        matches!(self.kind, Kind::Stream { .. })
    }

    /// Writes `bytes` at `offset` of the transfer, in pieces; `between` is called after each piece and while a slow
    /// reader is waited for, and ends the work by returning false.
    ///
    /// # Errors
    /// With a line that says what to do. A stream fails also when `offset` is not its position.
    pub fn write_at(
        &mut self,
        offset: u64,
        bytes: &[u8],
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), OutputError> {
        let result = match &mut self.kind {
            Kind::File(partial) => return partial.write(&self.file, offset, bytes, between),
            Kind::Stream { position, .. } if *position != offset => {
                Err(io::Error::new(io::ErrorKind::InvalidInput, "out of order"))
            }
            Kind::Stream { position, blocks, .. } => {
                *position += bytes.len() as u64;
                write_stream(&mut self.file, *blocks, bytes, between)
            }
        };
        result.map_err(|error| self.explain(&error))
    }

    /// Whether [`finish`](Destination::finish) waits for the disk.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.fsync
    }

    /// Gives the file its final name and returns what to call the place where the bytes are now.
    ///
    /// # Errors
    /// When the disk reports what it did not report while it was written, the name was taken meanwhile (without `force`) or
    /// the rename fails; the bytes are gone then.
    pub fn finish(self) -> Result<String, OutputError> {
        let Destination {
            file, kind, fsync, ..
        } = self;
        let mut partial = match kind {
            Kind::Stream { name, blocks, .. } => {
                // What cannot be synced is a pipe or a terminal.
                let synced = if fsync && !blocks { file.sync_all() } else { Ok(()) };
                let told = |error| OutputError::from_io(Path::new(&name), &error);
                return synced.map_err(told).map(|()| name);
            }
            Kind::File(partial) => partial,
        };
        // Until the file has its name nobody else shall take the part for one.
        partial.keep = false;
        let _locked = file.try_clone();
        let synced = if fsync { file.sync_all() } else { Ok(()) };
        // Delayed errors of network file systems come with close(2), which std does not report.
        synced
            .and_then(|()| nix::unistd::close(file).map_err(io::Error::from))
            .map_err(|error| OutputError::from_io(&partial.path, &error))?;
        loop {
            match rename(&partial.partial, &partial.path, partial.force) {
                Ok(()) => {
                    partial.keep = true;
                    break;
                }
                // Another receiver took the number meanwhile.
                Err(Errno::EXIST) if partial.numbered.is_some_and(|number| number < NUMBERS_MAX) => {
                    let number = partial.numbered.unwrap_or_default() + 1;
                    partial.numbered = Some(number);
                    partial.path = numbered(parent(&partial.path), number);
                }
                Err(error) => return Err(OutputError::from_io(&partial.path, &error.into())),
            }
        }
        if fsync {
            // The name is in the directory.
            File::open(parent(&partial.path))
                .and_then(|directory| directory.sync_all())
                .map_err(|error| OutputError::from_io(&partial.path, &error))?;
        }
        Ok(partial.path.display().to_string())
    }

    fn explain(&self, error: &io::Error) -> OutputError {
        match &self.kind {
            Kind::File(partial) => OutputError::from_io(&partial.path, error),
            Kind::Stream { name, .. } if error.kind() == io::ErrorKind::BrokenPipe => {
                let text =
                    format!("nobody reads {name} any more; keep its reader running until the transfer ends");
                OutputError::new(Refusal::NotWritable, text)
            }
            Kind::Stream { name, .. } => OutputError::from_io(Path::new(name), error),
        }
    }
}

fn stopped() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "stopped")
}

fn write_stream(
    file: &mut File,
    blocks: bool,
    bytes: &[u8],
    between: &mut dyn FnMut() -> bool,
) -> io::Result<()> {
    let piece_len = if blocks { STREAM_PIECE_LEN } else { FILE_PIECE_LEN };
    for piece in bytes.chunks(piece_len) {
        while blocks && !writable(file)? {
            if !between() {
                return Err(stopped());
            }
        }
        file.write_all(piece)?;
    }
    if between() { Ok(()) } else { Err(stopped()) }
}

/// Waits up to [`STREAM_WAIT_NS`] until a write would not block. A closed reader counts: the write says so.
fn writable(file: &File) -> io::Result<bool> {
    let wait = Timespec {
        tv_sec: 0,
        tv_nsec: STREAM_WAIT_NS,
    };
    match rustix::event::poll(&mut [PollFd::new(file, PollFlags::OUT)], Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Renames, replacing an existing file only when `force` is set.
fn rename(from: &Path, to: &Path, force: bool) -> Result<(), Errno> {
    if force {
        return rustix::fs::rename(from, to);
    }
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Not every file system knows the flag; link(2) never replaces either.
        Err(Errno::INVAL | Errno::NOSYS) => {
            rustix::fs::link(from, to)?;
            rustix::fs::unlink(from)
        }
        result => result,
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
