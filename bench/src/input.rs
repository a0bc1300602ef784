//! What `lm-send` reads: a file, or a stream whose length is not known. The kernel writes straight into the payload
//! ranges of a send region; there is no staging memory.

use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::output::{self, describe};
use crate::transfer::wire::Digest;

/// How many payload ranges one read fills (Linux allows 1024). 64 are some 90 KiB, so that the poll engine has its
/// turn every few ten microseconds.
pub const RANGES_PER_READ: usize = 64;

/// How long one wait for a slow stream lasts before the poll engine gets its next round, in nanoseconds.
const STREAM_WAIT_NS: i64 = 1_000_000;

/// An opened input.
#[derive(Debug)]
pub enum Input {
    /// A regular file of that many bytes (never 0).
    File {
        /// The file, open for reading.
        file: File,
        /// Its length in bytes when it was opened.
        len: u64,
    },
    /// Standard input, a pipe or a device.
    Stream {
        /// The stream, open for reading.
        file: File,
    },
}

impl Input {
    /// Opens `argument`, `-` being standard input.
    ///
    /// # Errors
    /// A line for people when it is missing, unreadable, empty, or a directory.
    pub fn open(argument: &Path) -> Result<Input, String> {
        let name = argument.display();
        if argument == Path::new("-") {
            let file = io::stdin().as_fd().try_clone_to_owned();
            let file: File = file
                .map_err(|error| format!("cannot read standard input: {}", describe(&error)))?
                .into();
            // `lm-send - < file` stays a stream: its position may be anywhere.
            return Ok(Input::Stream { file });
        }
        // Looked at before it is opened: opening a FIFO waits for its writer, and that is what is wanted then.
        let metadata = fs::metadata(argument);
        let metadata = metadata.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("{name} does not exist; check the name"),
            _ => format!("cannot read {name}: {}; check its permissions", describe(&error)),
        })?;
        if metadata.is_dir() {
            return Err(format!(
                "{name} is a directory; pack it first: tar -c {name} | lm-send ... -"
            ));
        }
        let file = File::open(argument)
            .map_err(|error| format!("cannot read {name}: {}; check its permissions", describe(&error)))?;
        if !metadata.is_file() {
            return Ok(Input::Stream { file });
        }
        let len = file.metadata().map_or(metadata.len(), |metadata| metadata.len());
        // Files in /proc say 0 and have content.
        if len == 0 && !has_content(&file) {
            return Err(format!("{name} is empty; there is nothing to send"));
        }
        Ok(if len == 0 {
            Input::Stream { file }
        } else {
            Input::File { file, len }
        })
    }

    /// The length in bytes, when it is known.
    #[must_use]
    pub fn len(&self) -> Option<u64> {
        match self {
            Input::File { len, .. } => Some(*len),
            Input::Stream { .. } => None,
        }
    }

    /// Whether the input has no bytes: never, an empty file is not opened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// The digest of the bytes `from..to` of a file. `between` is called after every read, as in [`fill`](Self::fill).
    ///
    /// # Errors
    /// What the system reports; a stream has no bytes to go back to.
    pub fn digest(&self, from: u64, to: u64, between: &mut dyn FnMut() -> bool) -> io::Result<Digest> {
        match self {
            Input::File { file, .. } => output::digest(file, from, to, between),
            Input::Stream { .. } => Err(io::ErrorKind::NotSeekable.into()),
        }
    }

    /// Fills `ranges` one after the other with the input's bytes from `offset` on (a stream: with its next bytes).
    /// Returns how many were read; fewer than the ranges hold means the end of the input. `between` is called after
    /// every read and while a slow stream is waited for; when it returns false, reading ends with
    /// [`io::ErrorKind::Interrupted`].
    ///
    /// # Errors
    /// What the system reports.
    pub fn fill<'a>(
        &self,
        ranges: impl Iterator<Item = &'a mut [u8]>,
        offset: u64,
        between: &mut dyn FnMut() -> bool,
    ) -> io::Result<u64> {
        let mut ranges = Ranges {
            rest: ranges,
            partly: None,
        };
        let mut filled = 0;
        loop {
            let mut batch: [IoSliceMut<'a>; RANGES_PER_READ] =
                std::array::from_fn(|_| IoSliceMut::new(&mut []));
            let count = ranges.take(&mut batch);
            if count == 0 {
                return Ok(filled);
            }
            let read = match self {
                Input::File { file, .. } => rustix::io::preadv(file, &mut batch[..count], offset + filled),
                Input::Stream { file } => {
                    while !readable(file)? {
                        if !between() {
                            return Err(interrupted());
                        }
                    }
                    rustix::io::readv(file, &mut batch[..count])
                }
            };
            let read = match read {
                Ok(0) => return Ok(filled),
                Ok(read) => read,
                Err(Errno::INTR | Errno::AGAIN) => 0,
                Err(error) => return Err(error.into()),
            };
            filled += read as u64;
            ranges.give_back(batch, count, read);
            if !between() {
                return Err(interrupted());
            }
        }
    }
}

fn interrupted() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "stopped")
}

fn has_content(file: &File) -> bool {
    rustix::io::pread(file, &mut [0u8; 1], 0).is_ok_and(|read| read > 0)
}

/// Waits up to [`STREAM_WAIT_NS`] until a read would not block. The end of the stream counts.
fn readable(file: &File) -> io::Result<bool> {
    let wait = Timespec {
        tv_sec: 0,
        tv_nsec: STREAM_WAIT_NS,
    };
    match rustix::event::poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The ranges still to fill, taken in batches; what a short read left over comes first in the next one.
struct Ranges<'a, I> {
    rest: I,
    partly: Option<Leftover<'a>>,
}

/// A batch of which only the ranges from `next` on are still to fill.
struct Leftover<'a> {
    batch: [IoSliceMut<'a>; RANGES_PER_READ],
    next: usize,
    end: usize,
}

impl<'a, I: Iterator<Item = &'a mut [u8]>> Ranges<'a, I> {
    fn take(&mut self, batch: &mut [IoSliceMut<'a>; RANGES_PER_READ]) -> usize {
        let mut count = 0;
        if let Some(mut left) = self.partly.take() {
            for range in &mut left.batch[left.next..left.end] {
                batch[count] = std::mem::replace(range, IoSliceMut::new(&mut []));
                count += 1;
            }
        }
        while count < RANGES_PER_READ {
            let Some(range) = self.rest.next() else { break };
            if !range.is_empty() {
                batch[count] = IoSliceMut::new(range);
                count += 1;
            }
        }
        count
    }

    fn give_back(&mut self, mut batch: [IoSliceMut<'a>; RANGES_PER_READ], end: usize, read: usize) {
        let mut read = read;
        for next in 0..end {
            if read < batch[next].len() {
                batch[next].advance(read);
                self.partly = Some(Leftover { batch, next, end });
                return;
            }
            read -= batch[next].len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use proptest::prelude::*;
    use std::io::Write;
    use std::os::fd::OwnedFd;
    use std::thread;

    fn content(len: usize) -> Vec<u8> {
        (0..len as u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect()
    }

    #[test]
    fn inputs_that_cannot_be_sent() {
        let scratch = Scratch::new("input");
        let empty = scratch.path().join("empty");
        fs::write(&empty, b"").unwrap();
        for (path, words) in [
            (scratch.path().join("missing"), "does not exist; "),
            (empty, "is empty; "),
            (scratch.path().to_owned(), "is a directory; "),
        ] {
            let error = Input::open(&path).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_file_has_a_length_and_a_device_has_none() {
        let scratch = Scratch::new("input-kinds");
        let path = scratch.path().join("x");
        fs::write(&path, b"abc").unwrap();
        assert_eq!(Input::open(&path).unwrap().len(), Some(3));
        assert_eq!(Input::open(Path::new("/dev/zero")).unwrap().len(), None);
        assert_eq!(Input::open(Path::new("/proc/self/status")).unwrap().len(), None);
    }

    #[test]
    fn a_file_that_shrank_gives_less() {
        let scratch = Scratch::new("input-shrinks");
        let path = scratch.path().join("x");
        fs::write(&path, content(100)).unwrap();
        let input = Input::open(&path).unwrap();
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(40)
            .unwrap();
        let mut bytes = [0; 100];
        assert_eq!(input.fill(bytes.chunks_mut(7), 0, &mut || true).unwrap(), 40);
        assert_eq!(bytes[..40], content(40));
    }

    #[test]
    fn a_slow_stream_lets_the_engine_run_and_can_be_given_up() {
        const PARTS: usize = 7;
        let (reader, mut writer) = io::pipe().unwrap();
        let input = Input::Stream {
            file: OwnedFd::from(reader).into(),
        };
        let data = content(20_000);
        let sent = data.clone();
        let (tell, told) = std::sync::mpsc::channel();
        let slow = thread::spawn(move || {
            let parts = sent.chunks(3000);
            assert_eq!(parts.len(), PARTS);
            for part in parts {
                writer.write_all(part).unwrap();
                // The engine runs when it has come, and again while nothing comes.
                for _ in 0..3 {
                    told.recv_timeout(std::time::Duration::from_secs(20))
                        .expect("a round of the engine");
                }
            }
        });
        let mut got = vec![0; 30_000];
        let mut rounds = 0;
        let filled = input.fill(got.chunks_mut(1448), 0, &mut || {
            rounds += 1;
            // It may have written all of it.
            let _ = tell.send(());
            true
        });
        slow.join().unwrap();
        assert_eq!(filled.unwrap(), 20_000);
        assert_eq!(got[..20_000], data);
        assert!(rounds >= 3 * PARTS, "{rounds}");

        let (reader, _writer) = io::pipe().unwrap();
        let input = Input::Stream {
            file: OwnedFd::from(reader).into(),
        };
        let error = input.fill(got.chunks_mut(1448), 0, &mut || false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Ranges of any lengths are filled in order from files and from pipes that give a little at a time.
        #[test]
        fn ranges_are_filled_in_order(
            lens in proptest::collection::vec(0usize..300, 1..200),
            offset in 0usize..50,
            extra in -200i64..200,
            chunk in 1usize..5000,
        ) {
            let room: usize = lens.iter().sum();
            let len = (room as i64 + extra).max(1) as usize;
            let data = content(offset + len);
            let expected = &data[offset..][..len.min(room)];
            let fill = |input: &Input, offset: usize| {
                let mut memory = vec![0; room];
                let mut rest = &mut memory[..];
                let ranges: Vec<&mut [u8]> =
                    lens.iter().map(|len| rest.split_off_mut(..*len).unwrap()).collect();
                let filled = input.fill(ranges.into_iter(), offset as u64, &mut || true).unwrap() as usize;
                memory.truncate(filled);
                memory
            };

            let scratch = Scratch::new("input-ranges");
            let path = scratch.path().join("x");
            fs::write(&path, &data).unwrap();
            prop_assert_eq!(fill(&Input::open(&path).unwrap(), offset), expected);

            let (reader, mut writer) = io::pipe().unwrap();
            let sent = data[offset..].to_vec();
            let sender = thread::spawn(move || sent.chunks(chunk).try_for_each(|part| writer.write_all(part)));
            let got = fill(&Input::Stream { file: OwnedFd::from(reader).into() }, 0);
            let _ = sender.join().unwrap();
            prop_assert_eq!(got, expected);
        }
    }
}
