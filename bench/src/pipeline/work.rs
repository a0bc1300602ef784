//! What producer and consumer do with the bytes of a message.

use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit as _, StreamCipher as _, StreamCipherSeek as _};
use lm_box::split_mix;
use sha2::{Digest as _, Sha256};

use crate::cli::Failure;

/// What is done with a message's bytes at either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Work {
    /// Each window has its time, as of a disk or a device, and the core is free meanwhile
    Timetable,
    /// As fast as a core does it: the keystream of ChaCha20 is produced, SHA-256 consumes
    Keystream,
}

impl Work {
    /// How often an end gives its core away before it sleeps.
    pub(super) fn yields(self) -> u32 {
        match self {
            Work::Timetable => 0,
            Work::Keystream => 1 << 20,
        }
    }

    /// When work is due that has its time; the other is due at once.
    fn due_ns(self, timetable_ns: u64) -> u64 {
        match self {
            Work::Timetable => timetable_ns,
            Work::Keystream => 0,
        }
    }
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
    /// Keystream: how often it is made.
    times: u32,
}

impl Producer {
    pub(super) fn new(work: Work, message: u32, times: u32) -> Producer {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&message.to_le_bytes());
        Producer {
            work,
            message,
            keystream: ChaCha20::new(&key.into(), &[0; 12].into()),
            times,
        }
    }

    /// The message's tag.
    pub(super) fn tag(&self) -> u64 {
        self.message.into()
    }

    /// Makes the bytes from a place on, a multiple of eight.
    pub(super) fn fill(&mut self, from: u64, bytes: &mut [u8]) {
        match self.work {
            Work::Timetable => words(self.message, from, bytes),
            Work::Keystream => {
                for _ in 0..self.times {
                    if self.keystream.current_pos::<u64>() != from {
                        self.keystream.seek(from);
                    }
                    self.keystream.write_keystream(bytes);
                }
            }
        }
    }

    /// When what is made is due, by a timetable at that time.
    pub(super) fn due_ns(&self, timetable_ns: u64) -> u64 {
        self.work.due_ns(timetable_ns)
    }
}

/// Takes the bytes of a message.
#[derive(Debug)]
pub(super) struct Consumer {
    work: Work,
    message: u32,
    expected: Vec<u8>,
    hash: Sha256,
}

impl Consumer {
    pub(super) fn new(work: Work, message: u32) -> Consumer {
        Consumer {
            work,
            message,
            expected: Vec::new(),
            hash: Sha256::new(),
        }
    }

    /// When what is taken next is due, by a timetable at that time.
    pub(super) fn due_ns(&self, timetable_ns: u64) -> u64 {
        self.work.due_ns(timetable_ns)
    }

    /// Takes the bytes from a place on.
    ///
    /// # Errors
    ///
    /// They are others than were produced.
    pub(super) fn take(&mut self, from: u64, bytes: &[u8]) -> Result<(), Failure> {
        match self.work {
            Work::Keystream => self.hash.update(bytes),
            Work::Timetable => {
                self.expected.resize(bytes.len(), 0);
                words(self.message, from, &mut self.expected);
                if *bytes != *self.expected {
                    let text = format!("other bytes from {from} on of message {}", self.message);
                    return Err(Failure::new(text));
                }
            }
        }
        Ok(())
    }

    /// Compares what it took with the whole message, whose hash this is.
    ///
    /// # Errors
    ///
    /// It took others.
    pub(super) fn check(self, sha256: &str) -> Result<(), Failure> {
        let (work, message) = (self.work, self.message);
        match work == Work::Keystream && self.sha256() != sha256 {
            true => Err(Failure::new(format!(
                "other bytes were read of message {message} than it has"
            ))),
            false => Ok(()),
        }
    }

    /// Of what it took, where that is its work.
    pub(super) fn sha256(self) -> String {
        hex(self.hash)
    }
}

/// A hash, as it is printed.
pub(super) fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_do_not_depend_on_where_windows_end() {
        for work in [Work::Timetable, Work::Keystream] {
            let mut whole = [0; 200];
            Producer::new(work, 3, 1).fill(0, &mut whole);
            for cut in [8, 16, 64, 96, 128] {
                let mut parts = [0; 200];
                let (first, second) = parts.split_at_mut(cut);
                let mut producer = Producer::new(work, 3, 1);
                producer.fill(0, first);
                producer.fill(cut as u64, second);
                assert_eq!(parts, whole);
                Producer::new(work, 3, 1).fill(cut as u64, &mut parts[cut..]);
                assert_eq!(parts, whole);
            }
            let mut other = [0; 200];
            Producer::new(work, 4, 1).fill(0, &mut other);
            assert_ne!(other, whole);
        }
    }

    #[test]
    fn other_bytes_are_told() {
        for work in [Work::Timetable, Work::Keystream] {
            let mut bytes = [0; 64];
            Producer::new(work, 1, 1).fill(0, &mut bytes);
            let of_whole = |bytes: &[u8]| {
                let mut hash = Sha256::new();
                hash.update(bytes);
                hex(hash)
            };
            let taken = |bytes: &[u8]| {
                let mut consumer = Consumer::new(work, 1);
                consumer.take(0, bytes)?;
                consumer.check(&of_whole(&[&bytes[..32], &bytes[32..]].concat()))
            };
            taken(&bytes).unwrap();
            let sha256 = of_whole(&bytes);
            bytes[9] ^= 1;
            let mut consumer = Consumer::new(work, 1);
            let told = consumer.take(0, &bytes).and_then(|()| consumer.check(&sha256));
            assert!(told.is_err());
        }
    }
}
