//! A file to send: random bytes. Zeros or a repeated pattern would hide a fragment that landed in the wrong place.

use std::fs::File;
use std::io::{Read as _, copy};
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};

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
    Ok(hex(&digest.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bed::leftovers::temporary_folder;

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
