//! A file to send: random bytes. Zeros or a repeated pattern would hide a fragment that landed in the wrong place.

use std::fs::File;
use std::io::{Read as _, copy};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sha2::{Digest as _, Sha256};

use crate::bed::leftovers::{Registered, temporary_folder};

/// A file of random bytes in a folder of its own, which goes with it.
pub struct Content {
    /// The folder; what is received may be put there too.
    pub folder: PathBuf,
    /// The file.
    pub file: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// Its digest.
    pub sha256: String,
    _folder: Registered,
}

impl Content {
    /// Writes a file of `len` bytes in a folder below `parent`.
    pub fn new(parent: &Path, len: u64) -> Result<Content> {
        let (folder, registered) = temporary_folder(parent, "transfer")?;
        let file = folder.join("sent");
        Ok(Content {
            sha256: write(&file, len)?,
            folder,
            file,
            len,
            _folder: registered,
        })
    }

    /// Where one file is received.
    pub fn received(&self) -> PathBuf {
        self.folder.join("received")
    }

    /// Whether a received file is the same.
    pub fn ensure_same(&self, received: &Path) -> Result<()> {
        let found = sha256(received)?;
        ensure!(
            found == self.sha256,
            "what arrived is not what was sent: {} of {} bytes, SHA-256 {found} instead of {}",
            std::fs::metadata(received).map_or(0, |metadata| metadata.len()),
            self.len,
            self.sha256
        );
        Ok(())
    }
}

/// Writes exactly `len` bytes to `path`; returns their SHA-256 in hexadecimal.
pub fn write(path: &Path, len: u64) -> Result<String> {
    let random = File::open("/dev/urandom").context("cannot read /dev/urandom")?;
    let unwritable = || format!("cannot write {}; is the disk full?", path.display());
    let mut out = File::create(path).with_context(unwritable)?;
    copy(&mut random.take(len), &mut out).with_context(unwritable)?;
    sha256(path)
}

/// The SHA-256 of a file in hexadecimal.
pub fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut digest = Sha256::new();
    copy(&mut file, &mut digest).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_as_long_as_asked_for_and_does_not_repeat() {
        let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "content").unwrap();
        let path = folder.join("content");
        const PART_LEN: u64 = 1 << 20;
        for len in [0, 1, PART_LEN - 1, 2 * PART_LEN + 7] {
            let written = write(&path, len).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().len(), len);
            assert_eq!(sha256(&path).unwrap(), written);
        }
        let bytes = std::fs::read(&path).unwrap();
        let (first, second) = bytes.split_at(PART_LEN as usize);
        assert_ne!(first[..4096], second[..4096]);
    }
}
