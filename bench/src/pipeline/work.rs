//! What producer and consumer do with the bytes of a message.

use std::fs::File;
use std::io::{self, IoSliceMut, Write as _};
use std::os::unix::fs::FileExt as _;

use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit as _, StreamCipher as _, StreamCipherSeek as _};
use lm_box::split_mix;
use rustix::fs::MemfdFlags;
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::failed;
use crate::cli::Failure;

/// Ranges that one `preadv(2)` takes: `UIO_MAXIOV` of `include/uapi/linux/uio.h`.
const RANGES_PER_READ: usize = 1024;
/// What a file is written with at once.
const CHUNK: usize = 1 << 20;

/// What is done with a message's bytes at either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Work {
    /// Each window has its time, as of a disk or a device, and the core is free meanwhile
    Timetable,
    /// As fast as a core does it: the keystream of ChaCha20 is produced, SHA-256 consumes
    Keystream,
    /// The same with the keystream in a file in the page cache, which XXH3 consumes
    FileHash,
    /// The same with that file, which becomes another one on tmpfs
    FileCopy,
}

impl Work {
    /// How often an end gives its core away before it sleeps.
    pub(super) fn yields(self) -> u32 {
        match self {
            Work::Timetable => 0,
            Work::Keystream | Work::FileHash | Work::FileCopy => 1 << 20,
        }
    }

    /// When work is due that has its time; the other is due at once.
    fn due_ns(self, timetable_ns: u64) -> u64 {
        match self {
            Work::Timetable => timetable_ns,
            Work::Keystream | Work::FileHash | Work::FileCopy => 0,
        }
    }

    fn reads_file(self) -> bool {
        matches!(self, Work::FileHash | Work::FileCopy)
    }
}

/// A file without a name, in memory.
fn file() -> io::Result<File> {
    Ok(rustix::fs::memfd_create("lm-bench", MemfdFlags::CLOEXEC)?.into())
}

/// The first bytes of a keystream, as a file.
fn file_of(keystream: &mut ChaCha20, len: u64) -> io::Result<File> {
    let mut file = file()?;
    let mut chunk = vec![0; CHUNK];
    let mut left = len;
    while left > 0 {
        let chunk = &mut chunk[..left.min(CHUNK as u64) as usize];
        keystream.write_keystream(chunk);
        file.write_all(chunk)?;
        left -= chunk.len() as u64;
    }
    Ok(file)
}

/// Reads a file from a place on until these ranges are full.
fn read_exact_at(file: &File, mut from: u64, ranges: &mut [IoSliceMut<'_>]) -> io::Result<()> {
    for mut left in ranges.chunks_mut(RANGES_PER_READ) {
        while !left.is_empty() {
            let count = rustix::io::preadv(file, left, from)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            from += count as u64;
            IoSliceMut::advance_slices(&mut left, count);
        }
    }
    Ok(())
}

/// The bytes of a message from a place on, which is a multiple of eight: no two of its words are alike.
fn words(message: u32, from: u64, bytes: &mut [u8]) {
    for (at, eight) in bytes.chunks_mut(8).enumerate() {
        let word = split_mix(u64::from(message), from / 8 + at as u64).to_le_bytes();
        eight.copy_from_slice(&word[..eight.len()]);
    }
}

/// Makes the bytes of a message.
#[derive(Debug)]
pub(super) struct Producer {
    work: Work,
    message: u32,
    keystream: ChaCha20,
    /// What is read, where that is its work.
    file: Option<File>,
    /// Keystream: how often it is made.
    times: u32,
}

impl Producer {
    /// Of a message of `len` bytes. A file that is read later is written here.
    ///
    /// # Errors
    ///
    /// No memory for it.
    pub(super) fn new(work: Work, message: u32, len: u64, times: u32) -> Result<Producer, Failure> {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&message.to_le_bytes());
        let mut keystream = ChaCha20::new(&key.into(), &[0; 12].into());
        let file = work
            .reads_file()
            .then(|| file_of(&mut keystream, len))
            .transpose();
        Ok(Producer {
            work,
            message,
            keystream,
            file: file.map_err(|error| failed(&error))?,
            times,
        })
    }

    /// The message's tag.
    pub(super) fn tag(&self) -> u64 {
        self.message.into()
    }

    /// Makes the bytes from a place on, a multiple of eight.
    ///
    /// # Errors
    ///
    /// The file is not read.
    pub(super) fn fill(&mut self, mut from: u64, ranges: &mut [IoSliceMut<'_>]) -> Result<(), Failure> {
        if let Some(file) = &self.file {
            return read_exact_at(file, from, ranges).map_err(|error| failed(&error));
        }
        for range in ranges {
            match self.work {
                Work::Timetable => words(self.message, from, range),
                _ => {
                    for _ in 0..self.times {
                        if self.keystream.current_pos::<u64>() != from {
                            self.keystream.seek(from);
                        }
                        self.keystream.write_keystream(range);
                    }
                }
            }
            from += range.len() as u64;
        }
        Ok(())
    }

    /// When what is made is due, by a timetable at that time.
    pub(super) fn due_ns(&self, timetable_ns: u64) -> u64 {
        self.work.due_ns(timetable_ns)
    }
}

/// Takes the bytes of a message.
pub(super) struct Consumer {
    work: Work,
    message: u32,
    taken: Taken,
}

/// What is left of them.
enum Taken {
    /// Nothing but memory to compare them in.
    Compared(Vec<u8>),
    Sha256(Sha256),
    Xxh3(Box<Xxh3>),
    File(File),
}

impl Consumer {
    /// # Errors
    ///
    /// No memory for a file.
    pub(super) fn new(work: Work, message: u32) -> Result<Consumer, Failure> {
        let taken = match work {
            Work::Timetable => Taken::Compared(Vec::new()),
            Work::Keystream => Taken::Sha256(Sha256::new()),
            Work::FileHash => Taken::Xxh3(Box::default()),
            Work::FileCopy => Taken::File(file().map_err(|error| failed(&error))?),
        };
        Ok(Consumer { work, message, taken })
    }

    /// When what is taken next is due, by a timetable at that time.
    pub(super) fn due_ns(&self, timetable_ns: u64) -> u64 {
        self.work.due_ns(timetable_ns)
    }

    /// Takes the bytes from a place on.
    ///
    /// # Errors
    ///
    /// They are others than were produced, or the file takes no more.
    pub(super) fn take(&mut self, from: u64, bytes: &[u8]) -> Result<(), Failure> {
        match &mut self.taken {
            Taken::Sha256(hash) => hash.update(bytes),
            Taken::Xxh3(hash) => hash.update(bytes),
            Taken::File(file) => file.write_all(bytes).map_err(|error| failed(&error))?,
            Taken::Compared(expected) => {
                expected.resize(bytes.len(), 0);
                words(self.message, from, expected);
                if *bytes != **expected {
                    let text = format!("other bytes from {from} on of message {}", self.message);
                    return Err(Failure::new(text));
                }
            }
        }
        Ok(())
    }

    /// Compares what it took with the whole message.
    ///
    /// # Errors
    ///
    /// It took others.
    pub(super) fn check(self, whole: &[u8]) -> Result<(), Failure> {
        let is_same = match self.taken {
            Taken::Compared(_) => true,
            Taken::Sha256(hash) => hash.finalize() == Sha256::digest(whole),
            Taken::Xxh3(hash) => hash.digest() == xxh3_64(whole),
            Taken::File(file) => {
                let mut written = vec![0; whole.len()];
                let read = file.read_exact_at(&mut written, 0);
                read.map_err(|error| failed(&error))?;
                written == whole
            }
        };
        match is_same {
            true => Ok(()),
            false => Err(Failure::new(format!(
                "other bytes were read of message {} than it has",
                self.message
            ))),
        }
    }

    /// Of what it took, where that is its work.
    pub(super) fn sha256(self) -> Option<String> {
        match self.taken {
            Taken::Sha256(hash) => Some(hex(hash)),
            Taken::Compared(_) | Taken::Xxh3(_) | Taken::File(_) => None,
        }
    }
}

/// A hash, as it is printed.
pub(super) fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Work; 4] = [Work::Timetable, Work::Keystream, Work::FileHash, Work::FileCopy];

    /// Made from a place on.
    fn fill(producer: &mut Producer, from: u64, bytes: &mut [u8]) {
        producer.fill(from, &mut [IoSliceMut::new(bytes)]).unwrap();
    }

    #[test]
    fn bytes_do_not_depend_on_where_windows_end() {
        for work in ALL {
            let producer = |message| Producer::new(work, message, 200, 1).unwrap();
            let mut whole = [0; 200];
            fill(&mut producer(3), 0, &mut whole);
            for cut in [8, 16, 64, 96, 128] {
                let mut parts = [0; 200];
                let (first, second) = parts.split_at_mut(cut);
                let mut in_turn = producer(3);
                fill(&mut in_turn, 0, first);
                fill(&mut in_turn, cut as u64, second);
                assert_eq!(parts, whole);
                fill(&mut producer(3), cut as u64, &mut parts[cut..]);
                assert_eq!(parts, whole);
                let (first, second) = parts.split_at_mut(cut);
                first.fill(0);
                second.fill(0);
                let mut both = [IoSliceMut::new(first), IoSliceMut::new(second)];
                producer(3).fill(0, &mut both).unwrap();
                assert_eq!(parts, whole);
            }
            let mut other = [0; 200];
            fill(&mut producer(4), 0, &mut other);
            assert_ne!(other, whole);
        }
    }

    #[test]
    fn a_file_is_read_into_more_ranges_than_one_call_takes() {
        let len = 3 * RANGES_PER_READ;
        let mut expected = vec![0; len];
        fill(
            &mut Producer::new(Work::Keystream, 1, len as u64, 1).unwrap(),
            0,
            &mut expected,
        );
        let mut producer = Producer::new(Work::FileHash, 1, len as u64, 1).unwrap();
        let mut bytes = vec![0; len];
        let mut ranges: Vec<_> = bytes.chunks_mut(2).map(IoSliceMut::new).collect();
        producer.fill(0, &mut ranges).unwrap();
        assert_eq!(bytes, expected);
        let beyond = producer.fill(len as u64 - 1, &mut [IoSliceMut::new(&mut [0; 2])]);
        assert!(beyond.is_err());
    }

    #[test]
    fn other_bytes_are_told() {
        for work in ALL {
            let mut bytes = [0; 64];
            fill(&mut Producer::new(work, 1, 64, 1).unwrap(), 0, &mut bytes);
            let whole = bytes;
            let taken = |bytes: &[u8]| {
                let mut consumer = Consumer::new(work, 1).unwrap();
                consumer.take(0, &bytes[..32])?;
                consumer.take(32, &bytes[32..])?;
                consumer.check(&whole)
            };
            taken(&bytes).unwrap();
            bytes[9] ^= 1;
            assert!(taken(&bytes).is_err());
        }
    }
}
