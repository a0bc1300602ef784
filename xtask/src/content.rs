//! A file of real content to send: an archive of this workspace's sources and the Rust toolchain.
//!
//! Text, machine code and compressed data in one file, the same for the same sources and toolchain. Zeros or a
//! repeated pattern would hide a fragment that landed in the wrong place.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sha2::{Digest as _, Sha256};

use crate::workspace;

/// Bytes per record of a tar archive (POSIX ustar).
const RECORD_LEN: usize = 512;

/// Writes exactly `len` bytes of an archive to `path`; returns their SHA-256 in hexadecimal. If the sources run
/// out they follow again; the last one ends where the file is full.
pub fn write(path: &Path, len: u64) -> Result<String> {
    let sources = sources()?;
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut archive = Archive {
        out: BufWriter::with_capacity(1 << 20, file),
        digest: Sha256::new(),
        left: len,
    };
    for round in 1_u32.. {
        for source in &sources {
            if archive.left == 0 {
                archive
                    .out
                    .flush()
                    .with_context(|| format!("cannot write {}", path.display()))?;
                return Ok(hex(&archive.digest.finalize()));
            }
            archive.add(source, round).with_context(|| {
                format!(
                    "cannot copy {} to {}; is the disk full?",
                    source.display(),
                    path.display()
                )
            })?;
        }
    }
    unreachable!("the loop above ends when the file is full");
}

/// The SHA-256 of a file in hexadecimal.
pub fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut digest = Sha256::new();
    std::io::copy(&mut file, &mut digest).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(hex(&digest.finalize()))
}

/// In hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Every non-empty file of the workspace (without what was built) and of the toolchain's libraries, sorted.
fn sources() -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    walk(workspace::root(), &mut files);
    let rustc = std::process::Command::new("rustc")
        .args(["--print", "sysroot"])
        .output();
    if let Ok(output) = rustc {
        walk(
            &Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("lib"),
            &mut files,
        );
    }
    ensure!(
        !files.is_empty(),
        "found no file to build an archive from in {}",
        workspace::root().display()
    );
    Ok(files)
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let Ok(kind) = path.symlink_metadata() else {
            continue;
        };
        let built = path
            .file_name()
            .is_some_and(|name| name == "target" || name == ".git");
        if kind.is_dir() && !built {
            walk(&path, files);
        } else if kind.is_file() && kind.len() > 0 {
            files.push(path);
        }
    }
}

struct Archive<W> {
    out: W,
    digest: Sha256,
    left: u64,
}

impl<W: Write> Archive<W> {
    fn add(&mut self, source: &Path, round: u32) -> std::io::Result<()> {
        let file = File::open(source)?;
        let len = file.metadata()?.len();
        self.put(&header(&format!("{round}{}", source.display()), len))?;
        let mut file = file.take(len);
        let mut part = vec![0; 1 << 18];
        while self.left > 0 {
            let read = file.read(&mut part)?;
            if read == 0 {
                break;
            }
            self.put(&part[..read])?;
        }
        let padding = len.next_multiple_of(RECORD_LEN as u64) - len;
        self.put(&[0; RECORD_LEN][..padding as usize])
    }

    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let len = bytes.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        self.digest.update(&bytes[..len]);
        self.left -= len as u64;
        self.out.write_all(&bytes[..len])
    }
}

/// A ustar header: name, mode, owner, length, time, checksum, type, magic, each at its fixed place.
fn header(name: &str, len: u64) -> [u8; RECORD_LEN] {
    let mut header = [0; RECORD_LEN];
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    // The name field has 100 bytes; a longer path keeps its end, which tells files apart.
    let start = (name.len().saturating_sub(100)..=name.len()).find(|&start| name.is_char_boundary(start));
    put(0, &name[start.unwrap_or(0)..]);
    put(100, "0000644\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{len:011o} "));
    put(136, "00000000000 ");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    let checksum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..156].copy_from_slice(format!("{checksum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_an_archive_of_the_length_asked_for() {
        let folder = std::env::temp_dir().join(format!("xtask-content-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("content.tar");
        for len in [0, 1, 511, 512, 100_000, 3_000_001] {
            let digest = write(&path, len).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().len(), len);
            assert_eq!(sha256(&path).unwrap(), digest);
        }
        let listing = std::process::Command::new("tar")
            .arg("tf")
            .arg(&path)
            .output()
            .unwrap();
        let listing = String::from_utf8_lossy(&listing.stdout).into_owned();
        assert!(
            listing.lines().any(|line| line.ends_with("Cargo.toml")),
            "{listing}"
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn long_names_keep_their_end() {
        let header = header(&format!("{}/end", "é".repeat(80)), 1);
        let name = std::str::from_utf8(&header[..100])
            .unwrap()
            .trim_end_matches('\0');
        assert!(name.ends_with("/end") && name.starts_with('é'));
    }
}
