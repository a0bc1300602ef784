//! Where `lm-recv` puts what arrives: a file, numbered files in a directory, standard output, or a device.
//!
//! A file is written under `.NAME.partial-PID` beside its final name and renamed when the transfer is complete, so
//! that nothing half-written ever has the final name. The partial file is removed when the [`Destination`] is
//! dropped without [`Destination::finish`], which covers failures, Ctrl-C and panics (not SIGKILL).

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use crate::size::approximate;
use crate::transfer::wire::Refusal;

/// Bytes written to a file between two rounds of the poll engine, some 50 µs of copying into the page cache.
const FILE_PIECE_LEN: usize = 256 << 10;

/// Bytes written to a pipe at once: what fits without blocking after `poll(2)` said writable (PIPE_BUF, pipe(7)).
const STREAM_PIECE_LEN: usize = 4096;

/// How long one wait for a slow reader lasts before the poll engine gets its next round, in nanoseconds.
const STREAM_WAIT_NS: i64 = 1_000_000;

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
}

impl Output {
    /// Examines `argument`: `-`, a directory, or a file name. `force` allows an existing file to be overwritten.
    ///
    /// # Errors
    /// When no transfer could be written there as things are: the file exists (without `force`), its directory is
    /// missing or read-only, it is a block device or a socket.
    pub fn new(argument: &Path, force: bool) -> Result<Output, OutputError> {
        let target = Self::target(argument)?;
        let output = Output { target, force };
        match &output.target {
            Target::File(path) => {
                output.check_free(path)?;
                check_writable(path, path)?;
            }
            Target::Directory { path, .. } => check_writable(path, &numbered(path, 0))?,
            Target::Stream { .. } => {}
        }
        Ok(output)
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

    /// Opens the destination of a transfer of `total_len` bytes (`None`: not known yet).
    ///
    /// # Errors
    /// When the file exists, cannot be created, or the file system has fewer free bytes.
    pub fn begin(&mut self, total_len: Option<u64>) -> Result<Destination, OutputError> {
        let force = self.force;
        match &mut self.target {
            Target::Stream { file, name } => {
                let file = file
                    .try_clone()
                    .map_err(|error| OutputError::from_io(Path::new(name), &error))?;
                Ok(Destination::stream(file, name.clone()))
            }
            Target::File(path) => {
                let path = path.clone();
                self.check_free(&path)?;
                check_space(parent(&path), total_len)?;
                let partial = partial_name(&path);
                // A file of this name is left over from a killed process with our number: it has no owner.
                let _ = fs::remove_file(&partial);
                let file = create_new(&partial).map_err(|error| OutputError::from_io(&path, &error))?;
                Ok(Destination::file(
                    file,
                    Partial {
                        partial,
                        path,
                        force,
                        numbered: None,
                    },
                ))
            }
            Target::Directory {
                path: directory,
                next,
            } => {
                check_space(directory, total_len)?;
                while *next <= NUMBERS_MAX {
                    let number = *next;
                    let path = numbered(directory, number);
                    let partial = partial_name(&path);
                    *next += 1;
                    if fs::symlink_metadata(&path).is_ok() {
                        continue;
                    }
                    match create_new(&partial) {
                        Ok(file) => {
                            let numbered = Some(number);
                            return Ok(Destination::file(
                                file,
                                Partial {
                                    partial,
                                    path,
                                    force: false,
                                    numbered,
                                },
                            ));
                        }
                        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                        Err(error) => return Err(OutputError::from_io(directory, &error)),
                    }
                }
                Err(OutputError::new(
                    Refusal::Exists,
                    format!(
                        "{} holds transfers up to number {NUMBERS_MAX}; choose another --output",
                        directory.display()
                    ),
                ))
            }
        }
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

/// `.NAME.partial-PID` beside `path`; a long NAME is cut so that the whole fits.
fn partial_name(path: &Path) -> PathBuf {
    let suffix = format!(".partial-{}", std::process::id());
    let name = path.file_name().unwrap_or_default().as_bytes();
    let mut partial = vec![b'.'];
    partial.extend_from_slice(&name[..name.len().min(NAME_LEN_MAX - 1 - suffix.len())]);
    partial.extend_from_slice(suffix.as_bytes());
    path.with_file_name(OsString::from_vec(partial))
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
fn check_space(directory: &Path, total_len: Option<u64>) -> Result<(), OutputError> {
    let Some(total_len) = total_len else { return Ok(()) };
    // A file system that cannot say (FUSE) finds out while writing.
    let Ok(stat) = rustix::fs::statvfs(directory) else {
        return Ok(());
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    // ramfs and some network file systems report no blocks at all.
    if stat.f_blocks == 0 || total_len <= free {
        return Ok(());
    }
    let text = format!(
        "{} are free in {} and {} are needed; free some or choose another --output",
        approximate(free),
        directory.display(),
        approximate(total_len)
    );
    Err(OutputError::new(Refusal::DiskFull, text))
}

/// The names of a file under way; removes the partial one when dropped.
#[derive(Debug)]
struct Partial {
    partial: PathBuf,
    path: PathBuf,
    force: bool,
    /// The number in the name when the receiver chooses names.
    numbered: Option<u32>,
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After the rename there is nothing of this name, and no error to tell anybody.
        let _ = fs::remove_file(&self.partial);
    }
}

/// Where one transfer goes.
#[derive(Debug)]
pub struct Destination {
    file: File,
    kind: Kind,
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
    fn file(file: File, partial: Partial) -> Self {
        Destination {
            file,
            kind: Kind::File(partial),
        }
    }

    fn stream(file: File, name: String) -> Self {
        // `lm-recv --output - > file` cannot block as a pipe can.
        let blocks = !file.metadata().is_ok_and(|metadata| metadata.is_file());
        Destination {
            file,
            kind: Kind::Stream {
                name,
                position: 0,
                blocks,
            },
        }
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
            Kind::File(_) => write_file(&self.file, offset, bytes, between),
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

    /// Gives the file its final name and returns what to call the place where the bytes are now.
    ///
    /// # Errors
    /// When the name was taken meanwhile (without `force`) or the rename fails; the bytes are gone then.
    pub fn finish(self) -> Result<String, OutputError> {
        let Destination { file, kind } = self;
        let mut partial = match kind {
            Kind::Stream { name, .. } => return Ok(name),
            Kind::File(partial) => partial,
        };
        // Delayed errors of network file systems come with close(2), which std does not report: ask for them.
        drop(file);
        loop {
            match rename(&partial.partial, &partial.path, partial.force) {
                Ok(()) => return Ok(partial.path.display().to_string()),
                // Another receiver took the number meanwhile.
                Err(Errno::EXIST) if partial.numbered.is_some_and(|number| number < NUMBERS_MAX) => {
                    let number = partial.numbered.unwrap_or_default() + 1;
                    partial.numbered = Some(number);
                    partial.path = numbered(parent(&partial.path), number);
                }
                Err(error) => return Err(OutputError::from_io(&partial.path, &error.into())),
            }
        }
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

fn write_file(file: &File, offset: u64, bytes: &[u8], between: &mut dyn FnMut() -> bool) -> io::Result<()> {
    for (number, piece) in bytes.chunks(FILE_PIECE_LEN).enumerate() {
        if number > 0 && !between() {
            return Err(stopped());
        }
        file.write_all_at(piece, offset + (number * FILE_PIECE_LEN) as u64)?;
    }
    Ok(())
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
