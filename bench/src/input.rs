//! What `lm-send` reads: a file, or a stream whose length is not known. The kernel writes straight into the payload
//! ranges of a send region; there is no staging memory.

use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::output::{self, describe};
use crate::transfer::wire::Digest;

/// How many payload ranges one read fills (Linux allows 1024). 64 are some 90 KiB, so that the poll engine has its
/// turn every few ten microseconds.
pub const RANGES_PER_READ: usize = 64;

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
            let file = file.map_err(|error| format!("cannot read standard input: {}", describe(&error)))?;
            // `lm-send - < file` stays a stream: its position may be anywhere.
            return Ok(Input::Stream { file: file.into() });
        }
        // Looked at before it is opened: opening a FIFO waits for its writer, and that is what is wanted then.
        let unreadable = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => format!("{name} does not exist; check the name"),
            _ => format!("cannot read {name}: {}; check its permissions", describe(&error)),
        };
        let metadata = fs::metadata(argument).map_err(unreadable)?;
        if metadata.is_dir() {
            return Err(format!(
                "{name} is a directory; pack it first: tar -c {name} | lm-send ... -"
            ));
        }
        let file = File::open(argument).map_err(unreadable)?;
        if !metadata.is_file() {
            return Ok(Input::Stream { file });
        }
        match file.metadata().map_or(metadata.len(), |metadata| metadata.len()) {
            // Files in /proc say 0 and have content.
            0 if has_content(&file) => Ok(Input::Stream { file }),
            0 => Err(format!("{name} is empty; there is nothing to send")),
            len => Ok(Input::File { file, len }),
        }
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
        let mut ranges = ranges.filter(|range| !range.is_empty()).map(IoSliceMut::new);
        let mut batch = Vec::with_capacity(RANGES_PER_READ);
        let mut filled = 0;
        loop {
            // What a short read left over comes first.
            batch.extend(ranges.by_ref().take(RANGES_PER_READ - batch.len()));
            if batch.is_empty() {
                return Ok(filled);
            }
            let read = match self {
                Input::File { file, .. } => rustix::io::preadv(file, &mut batch, offset + filled),
                Input::Stream { file } => {
                    while !output::is_ready(file, PollFlags::IN)? {
                        if !between() {
                            return Err(output::stopped());
                        }
                    }
                    rustix::io::readv(file, &mut batch)
                }
            };
            let read = match read {
                Ok(0) => return Ok(filled),
                Ok(read) => read,
                Err(Errno::INTR | Errno::AGAIN) => 0,
                Err(error) => return Err(error.into()),
            };
            filled += read as u64;
            let mut rest = &mut batch[..];
            IoSliceMut::advance_slices(&mut rest, read);
            let left = rest.len();
            batch.drain(..batch.len() - left);
            if !between() {
                return Err(output::stopped());
            }
        }
    }
}

fn has_content(file: &File) -> bool {
    rustix::io::pread(file, &mut [0u8; 1], 0).is_ok_and(|read| read > 0)
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
