//! What the next daemon needs to go on: a file that is replaced as a whole.
//!
//! The gate itself lies in bpffs. Here is what it does not know: whose its queues are, who may come back for them, and the sessions'
//! terms. Nothing depends on the file being up to date: an open row of the gate that it does not have is closed, and a session that
//! it has and the gate does not is over.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddrV4;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use lm_dataplane::ipc::{Control, Offer, Role};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::socket::Credentials;

/// Version of the file. Another one's is not read.
const VERSION: u32 = 1;

/// All of it.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    version: u32,
    pub(crate) interfaces: Vec<InterfaceState>,
}

/// One interface.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct InterfaceState {
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) namespace: u64,
    pub(crate) address: SocketAddrV4,
    pub(crate) programs: Vec<ProgramState>,
}

/// One program on it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProgramState {
    pub(crate) token: u64,
    #[serde(flatten)]
    pub(crate) credentials: Credentials,
    pub(crate) data_port: u16,
    pub(crate) general_queue: Option<u16>,
    pub(crate) landing_queue: Option<u16>,
    pub(crate) channels: BTreeMap<u16, (Option<Role>, u64)>,
    pub(crate) offer: Option<Offer>,
    pub(crate) received: Vec<ReceivedState>,
    pub(crate) sent: Vec<SentState>,
}

/// A session that the program has as receiver.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ReceivedState {
    /// The sender's control address.
    pub(crate) peer: SocketAddrV4,
    pub(crate) request: Control,
    pub(crate) grant: Control,
    /// It goes on without its place.
    #[serde(default)]
    pub(crate) aside: bool,
}

/// A session that the program has as sender.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SentState {
    pub(crate) ticket: u32,
    pub(crate) to: SocketAddrV4,
    pub(crate) request: Control,
    pub(crate) grant: Control,
}

impl State {
    pub(crate) fn new(interfaces: Vec<InterfaceState>) -> State {
        State {
            version: VERSION,
            interfaces,
        }
    }

    fn path(dir: &Path) -> PathBuf {
        dir.join("state.json")
    }

    fn new_path(dir: &Path) -> PathBuf {
        dir.join("state.new")
    }

    /// What it writes in a directory.
    pub(crate) fn files(dir: &Path) -> [PathBuf; 2] {
        [State::path(dir), State::new_path(dir)]
    }

    /// Reads what the last daemon left; nothing where there is none, or none that can be read.
    pub(crate) fn read(dir: &Path) -> State {
        let path = State::path(dir);
        let read = || -> io::Result<Vec<u8>> {
            let mut text = Vec::new();
            let mut options = fs::OpenOptions::new();
            let no_link = options.read(true).custom_flags(OFlags::NOFOLLOW.bits() as i32);
            io::Read::read_to_end(&mut no_link.open(&path)?, &mut text)?;
            Ok(text)
        };
        let text = match read() {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return State::default(),
            Err(error) => {
                tracing::warn!("cannot read {}: {error}", path.display());
                return State::default();
            }
        };
        match serde_json::from_slice::<State>(&text) {
            Ok(state) if state.version == VERSION => state,
            Ok(state) => {
                tracing::warn!("{} is of version {}: not used", path.display(), state.version);
                State::default()
            }
            Err(error) => {
                tracing::warn!("{} cannot be used: {error}", path.display());
                State::default()
            }
        }
    }

    /// What the file is to hold.
    pub(crate) fn text(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("all of its keys are numbers or strings")
    }

    /// Replaces the file by one with this text. Where it cannot be, the next daemon goes on with what the old one says.
    pub(crate) fn write(text: &[u8], dir: &Path) {
        let path = State::path(dir);
        let new = State::new_path(dir);
        let write = || -> io::Result<()> {
            // What a daemon that died left there, or a link that somebody put there: only what is made here is written.
            match fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            // Tokens are in it: whoever knows one, and is the same user, can go on in a program's place.
            let mut options = fs::OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&new)?;
            io::Write::write_all(&mut file, text)?;
            // No fsync: it matters only while the machine runs.
            fs::rename(&new, &path)
        };
        if let Err(error) = write() {
            tracing::error!("cannot write the state to {}: {error}", path.display());
        }
    }

    pub(crate) fn remove(dir: &Path) {
        let _ = fs::remove_file(State::path(dir));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_what_is_damaged_is_not() {
        let dir = std::env::temp_dir().join(format!("lm-admissiond-state-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        assert_eq!(State::read(&dir), State::default());
        let interface = InterfaceState {
            name: "lm0".to_owned(),
            index: 3,
            namespace: 4,
            address: "198.18.0.2:7169".parse().unwrap(),
            programs: vec![ProgramState {
                token: u64::MAX,
                credentials: Credentials {
                    pid: 1,
                    uid: 2,
                    gid: 3,
                },
                data_port: 7168,
                general_queue: Some(0),
                landing_queue: None,
                channels: [(0, (Some(Role::General), 4096))].into(),
                offer: None,
                received: Vec::new(),
                sent: Vec::new(),
            }],
        };
        let state = State::new(vec![interface]);
        State::write(&state.text(), &dir);
        assert_eq!(State::read(&dir), state);
        let text = fs::read_to_string(State::path(&dir)).unwrap();
        fs::write(State::path(&dir), &text[..text.len() / 2]).unwrap();
        assert_eq!(State::read(&dir), State::default());
        fs::write(
            State::path(&dir),
            text.replacen("\"version\":1", "\"version\":2", 1),
        )
        .unwrap();
        assert_eq!(State::read(&dir), State::default());
        fs::remove_dir_all(&dir).unwrap();
    }
}
