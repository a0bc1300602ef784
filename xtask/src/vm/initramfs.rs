//! The guest's files: collected by their place in the guest, written as a cpio archive (newc) that the kernel unpacks.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cpio::newc;

const FOLDER: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

#[derive(Debug)]
enum Content {
    Folder,
    Bytes(Vec<u8>),
    File(PathBuf),
    Link(String),
    CharacterDevice(u32, u32),
}

/// Files by their path in the guest, without the leading `/`. Folders above a file are made.
#[derive(Debug, Default)]
pub struct Tree {
    entries: BTreeMap<String, Content>,
}

impl Tree {
    /// An empty tree.
    pub fn new() -> Tree {
        Tree::default()
    }

    /// An empty folder.
    pub fn folder(&mut self, path: &str) {
        self.put(path, Content::Folder);
    }

    /// A file with these bytes.
    pub fn bytes(&mut self, path: &str, bytes: Vec<u8>) {
        self.put(path, Content::Bytes(bytes));
    }

    /// A copy of a file of this machine, executable.
    pub fn file(&mut self, path: &str, from: impl Into<PathBuf>) {
        self.put(path, Content::File(from.into()));
    }

    /// A symbolic link.
    pub fn link(&mut self, path: &str, to: &str) {
        self.put(path, Content::Link(to.to_owned()));
    }

    /// A character device.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.put(path, Content::CharacterDevice(major, minor));
    }

    fn put(&mut self, path: &str, content: Content) {
        let path = path.trim_matches('/');
        for (at, _) in path.match_indices('/') {
            // What is there already may be a link to a folder.
            self.entries
                .entry(path[..at].to_owned())
                .or_insert(Content::Folder);
        }
        self.entries.insert(path.to_owned(), content);
    }

    /// Writes the archive; its length in bytes.
    pub fn write(&self, path: &Path) -> Result<u64> {
        let unwritable = || format!("cannot write {}; is the disk full?", path.display());
        let file = std::fs::File::create(path).with_context(unwritable)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        // Sorted by path, so each folder comes before what is in it, as the kernel wants it.
        for (number, (name, content)) in (1..).zip(&self.entries) {
            let read;
            let (mode, bytes): (u32, &[u8]) = match content {
                Content::Folder => (FOLDER, &[]),
                Content::Bytes(bytes) => (EXECUTABLE, bytes),
                Content::File(from) => {
                    read = std::fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
                    (EXECUTABLE, &read)
                }
                Content::Link(to) => (LINK, to.as_bytes()),
                Content::CharacterDevice(..) => (CHARACTER_DEVICE, &[]),
            };
            let mut builder = newc::Builder::new(name).ino(number).nlink(1).mode(mode);
            if let Content::CharacterDevice(major, minor) = content {
                builder = builder.rdev_major(*major).rdev_minor(*minor);
            }
            let len = u32::try_from(bytes.len()).with_context(|| format!("{name} is longer than 4 GiB"))?;
            let mut entry = builder.write(&mut out, len);
            entry.write_all(bytes).with_context(unwritable)?;
            entry.finish().with_context(unwritable)?;
        }
        newc::trailer(&mut out).with_context(unwritable)?;
        out.flush().with_context(unwritable)?;
        let written = out.get_ref().metadata().with_context(unwritable)?;
        Ok(written.len())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn the_archive_has_folders_before_files_and_every_byte() {
        let folder = std::env::temp_dir().join(format!("xtask-initramfs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let source = folder.join("source");
        std::fs::write(&source, [7; 5001]).unwrap();
        let mut tree = Tree::new();
        tree.file("/usr/bin/tool", &source);
        tree.link("bin", "usr/bin");
        tree.link("init", "/bin/tool");
        tree.bytes("lm/plan.json", b"{}".to_vec());
        tree.character_device("dev/console", 5, 1);
        tree.folder("proc");
        let path = folder.join("archive");
        let len = tree.write(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), len);

        let mut rest = std::fs::File::open(&path).unwrap();
        let mut found = Vec::new();
        loop {
            let mut reader = newc::Reader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).unwrap();
            found.push((name, mode, bytes));
            rest = reader.finish().unwrap();
        }
        let expected: [(&str, u32, &[u8]); 10] = [
            ("bin", LINK, b"usr/bin"),
            ("dev", FOLDER, b""),
            ("dev/console", CHARACTER_DEVICE, b""),
            ("init", LINK, b"/bin/tool"),
            ("lm", FOLDER, b""),
            ("lm/plan.json", EXECUTABLE, b"{}"),
            ("proc", FOLDER, b""),
            ("usr", FOLDER, b""),
            ("usr/bin", FOLDER, b""),
            ("usr/bin/tool", EXECUTABLE, &[7; 5001]),
        ];
        let expected = expected.map(|(name, mode, bytes)| (name.to_owned(), mode, bytes.to_vec()));
        assert_eq!(found, expected);

        tree.file("gone", folder.join("none"));
        let error = format!("{:#}", tree.write(&path).unwrap_err());
        assert!(error.contains("cannot read") && error.contains("none"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
