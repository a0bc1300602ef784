//! A file system that finds out only at `close` that it has no room, as network file systems with quotas do: FUSE, served by the test.
//! It keeps names and lengths of files, and their bytes nowhere.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use rustix::mount::{MountFlags, UnmountFlags};

/// What `close` answers.
const EDQUOT: i32 = 122;
const ENOENT: i32 = 2;
const ENOSYS: i32 = 38;

const ROOT: u64 = 1;
const IN_HEADER_LEN: usize = 40;

/// Such a file system; unmounted when dropped.
pub(crate) struct Quota {
    path: PathBuf,
    server: Option<JoinHandle<()>>,
}

impl Quota {
    pub(crate) fn mount(path: &Path) -> Option<Quota> {
        let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/fuse") else {
            assert!(std::env::var_os("CI").is_none(), "needs /dev/fuse");
            println!("SKIPPED: needs /dev/fuse");
            return None;
        };
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = CString::new(options).unwrap();
        rustix::mount::mount("lm-test", path, "fuse", MountFlags::empty(), options.as_c_str()).unwrap();
        let server = thread::spawn(move || serve(device));
        Some(Quota {
            path: path.to_owned(),
            server: Some(server),
        })
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.path, UnmountFlags::DETACH);
        let _ = self.server.take().map(JoinHandle::join);
    }
}

/// A file: its name, none once it is removed, and its length.
type Node = (Option<Vec<u8>>, u64);

/// Answers until the file system is unmounted. Opcodes and structures are those of `linux/fuse.h`, version 7.31.
fn serve(mut device: File) {
    let mut request = vec![0; 2 << 20];
    let mut nodes: Vec<Node> = Vec::new();
    while let Ok(len) = device.read(&mut request) {
        let head = &request[..IN_HEADER_LEN];
        let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap());
        let opcode = u32::from_le_bytes(head[4..8].try_into().unwrap());
        let (unique, node) = (number(8), number(16));
        let answer = answer(opcode, node, &request[IN_HEADER_LEN..len], &mut nodes);
        // FORGET and BATCH_FORGET want none.
        if matches!(opcode, 2 | 42) {
            continue;
        }
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(error) => (-error, Vec::new()),
        };
        let mut out = (16 + body.len() as u32).to_le_bytes().to_vec();
        out.extend(error.to_le_bytes());
        out.extend(unique.to_le_bytes());
        out.extend(body);
        // The caller may have been killed meanwhile.
        let _ = device.write_all(&out);
    }
}

fn answer(opcode: u32, node: u64, body: &[u8], nodes: &mut Vec<Node>) -> Result<Vec<u8>, i32> {
    let find = |nodes: &[Node], name: &[u8]| {
        let found = nodes.iter().position(|(known, _)| known.as_deref() == Some(name));
        found.map(|index| index as u64 + ROOT + 1).ok_or(ENOENT)
    };
    let name = |from: usize| body[from..].split(|byte| *byte == 0).next().unwrap().to_vec();
    let long = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().unwrap());
    let int = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap());
    let opened = || vec![0; 16];
    Ok(match opcode {
        // LOOKUP
        1 => entry(find(nodes, &name(0))?, nodes),
        // GETATTR, SETATTR
        3 | 4 => [vec![0; 16], attributes(node, nodes)].concat(),
        // UNLINK
        10 => {
            let gone = find(nodes, &name(0))?;
            nodes[(gone - ROOT - 1) as usize].0 = None;
            Vec::new()
        }
        // OPEN, OPENDIR
        14 | 27 => opened(),
        // WRITE: offset and length
        16 => {
            let (offset, len) = (long(8), int(16));
            let known = &mut nodes[(node - ROOT - 1) as usize];
            known.1 = known.1.max(offset + u64::from(len));
            [len.to_le_bytes(), [0; 4]].concat()
        }
        // STATFS: it cannot say
        17 => vec![0; 80],
        // FLUSH
        25 => return Err(EDQUOT),
        // INIT: the version, and the longest write
        26 => {
            let numbers = [7u32, 31, 0, 0, 0, 1 << 20, 1];
            let mut out: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            out.resize(64, 0);
            out
        }
        // RELEASE, READDIR, RELEASEDIR, FSYNC
        18 | 20 | 28 | 29 => Vec::new(),
        // CREATE
        35 => {
            nodes.push((Some(name(16)), 0));
            [entry(nodes.len() as u64 + ROOT, nodes), opened()].concat()
        }
        // RENAME2
        45 => {
            let (from, to) = (
                name(16),
                body[16..].split(|byte| *byte == 0).nth(1).unwrap().to_vec(),
            );
            let moved = find(nodes, &from)?;
            nodes[(moved - ROOT - 1) as usize].0 = Some(to);
            Vec::new()
        }
        _ => return Err(ENOSYS),
    })
}

fn entry(node: u64, nodes: &[Node]) -> Vec<u8> {
    [node.to_le_bytes().to_vec(), vec![0; 32], attributes(node, nodes)].concat()
}

fn attributes(node: u64, nodes: &[Node]) -> Vec<u8> {
    let (mode, len) = match node {
        ROOT => (0o40755u32, 0),
        _ => (0o100_644, nodes[(node - ROOT - 1) as usize].1),
    };
    let longs = [node, len, len.div_ceil(512), 0, 0, 0];
    let ints = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
    let longs = longs.iter().flat_map(|number| number.to_le_bytes());
    longs
        .chain(ints.iter().flat_map(|number| number.to_le_bytes()))
        .collect()
}
