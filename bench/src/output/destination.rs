//! Where one transfer goes, until it is complete or given up.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;

use super::space::Room;
use super::{
    FILE_PIECE_LEN, NUMBERS_MAX, OutputError, STREAM_PIECE_LEN, STREAM_WAIT, full, lacks, numbered, parent,
};
use crate::transfer::wire::Refusal;

/// The names of a file under way; removes the partial one when dropped, unless it is to be kept.
#[derive(Debug)]
pub(super) struct Partial {
    pub(super) partial: PathBuf,
    pub(super) path: PathBuf,
    pub(super) force: bool,
    /// The next number of the directory when the receiver chooses names.
    pub(super) numbered: Option<Arc<AtomicU32>>,
    /// Whether it can be kept, and whether it is.
    pub(super) is_part: bool,
    pub(super) keep: bool,
    pub(super) room: Room,
}

impl Partial {
    fn write(
        &mut self,
        file: &File,
        offset: u64,
        bytes: &[u8],
        between: &mut dyn FnMut() -> bool,
    ) -> Result<(), OutputError> {
        let told = |error: io::Error| OutputError::from_io(&self.path, &error);
        for (number, piece) in bytes.chunks(FILE_PIECE_LEN).enumerate() {
            if number > 0 && !between() {
                return Err(told(stopped()));
            }
            let len = piece.len() as u64;
            let room = self.room.take(file, len);
            room.map_err(|space| lacks(&space, parent(&self.path), len))?;
            let at = offset + (number * FILE_PIECE_LEN) as u64;
            file.write_all_at(piece, at).map_err(told)?;
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
    pub(super) kind: Kind,
    pub(super) file: File,
    /// Bytes that were there.
    pub(super) held: u64,
    pub(super) fsync: bool,
}

#[derive(Debug)]
pub(super) enum Kind {
    File(Partial),
    Stream {
        name: String,
        position: u64,
        blocks: bool,
    },
}

impl Destination {
    pub(super) fn stream(file: File, name: String, fsync: bool) -> Self {
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

    /// The file, for reading what is there.
    ///
    /// # Errors
    /// What the kernel reports.
    pub(crate) fn reader(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Leaves of what is there the first `len` bytes.
    ///
    /// # Errors
    /// What the file system reports, with a line that says what to do.
    pub fn cut(&mut self, len: u64) -> Result<(), OutputError> {
        self.file.set_len(len).map_err(|error| self.explain(&error))
    }

    /// What another transfer can go on with, if anything is there.
    pub(super) fn part(&self) -> Option<&Path> {
        let is_something = self.file.metadata().is_ok_and(|found| found.len() > 0);
        match &self.kind {
            Kind::File(partial) if partial.is_part && is_something => Some(&partial.partial),
            _ => None,
        }
    }

    /// The transfer broke. Returns whether what was written of it is kept, as far as it can be and shall be.
    pub fn abandon(mut self, keep: bool) -> bool {
        let Kind::File(partial) = &mut self.kind else {
            return false;
        };
        partial.keep = keep && partial.is_part;
        // A reader may still have the file open, and no lock shall outlive the transfer.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
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
        let told = |partial: &Partial, error: io::Error| OutputError::from_io(&partial.path, &error);
        let synced = if fsync { file.sync_all() } else { Ok(()) };
        // Delayed errors of network file systems come with close(2), which std does not report.
        let closed = synced.and_then(|()| nix::unistd::close(file).map_err(io::Error::from));
        closed.map_err(|error| told(&partial, error))?;
        loop {
            if let Some(next) = &partial.numbered {
                // Relaxed: only uniqueness matters.
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number > NUMBERS_MAX {
                    next.store(number, Ordering::Relaxed);
                    return Err(full(parent(&partial.path)));
                }
                partial.path = numbered(parent(&partial.path), number);
            }
            match rename(&partial.partial, &partial.path, partial.force) {
                Ok(()) => break,
                // The number is taken.
                Err(Errno::EXIST) if partial.numbered.is_some() => {}
                Err(error) => return Err(told(&partial, error.into())),
            }
        }
        partial.keep = true;
        if fsync {
            // The name is in the directory.
            let synced = File::open(parent(&partial.path)).and_then(|directory| directory.sync_all());
            synced.map_err(|error| told(&partial, error))?;
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

pub(crate) fn stopped() -> io::Error {
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
        while blocks && !is_ready(file, PollFlags::OUT)? {
            if !between() {
                return Err(stopped());
            }
        }
        file.write_all(piece)?;
    }
    if between() { Ok(()) } else { Err(stopped()) }
}

/// Waits up to [`STREAM_WAIT`] until a read or a write would not block. The end of what is read counts, and so does a
/// closed reader: what is done then says so.
pub(crate) fn is_ready(file: &File, what: PollFlags) -> io::Result<bool> {
    match rustix::event::poll(&mut [PollFd::new(file, what)], Some(&STREAM_WAIT)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Renames, replacing an existing file only when `force` is set.
pub(super) fn rename(from: &Path, to: &Path, force: bool) -> Result<(), Errno> {
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
