//! Files through `lm-send` and `lm-recv`, as users send them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::pair::{LANDING_QUEUE, Pair, launch, steer};
use crate::bed::Output;
use crate::bed::leftovers::{Registered, temporary_folder};
use crate::content;
use crate::vm::devices::Device;
use crate::vm::protocol::{Mode, Plan};

const FILE_LEN: u64 = 1 << 20;

/// A file of random bytes in a folder of its own.
pub(super) struct Source {
    /// The folder; what is received may be put there too.
    pub(super) folder: PathBuf,
    /// The file.
    pub(super) file: PathBuf,
    /// Its digest.
    pub(super) sha256: String,
    _folder: Registered,
}

impl Source {
    /// Writes a file of `len` bytes.
    pub(super) fn new(len: u64) -> Result<Source> {
        let (folder, registered) = temporary_folder(&std::env::temp_dir(), "transfer")?;
        let file = folder.join("sent");
        Ok(Source {
            sha256: content::write(&file, len)?,
            folder,
            file,
            _folder: registered,
        })
    }

    /// Where one file is received.
    pub(super) fn received(&self) -> PathBuf {
        self.folder.join("received")
    }

    /// Whether a received file is the same.
    pub(super) fn ensure_same(&self, received: &Path) -> Result<()> {
        let found = content::sha256(received)?;
        ensure!(
            found == self.sha256,
            "what arrived is not what was sent: SHA-256 {found} instead of {}",
            self.sha256
        );
        Ok(())
    }
}

pub(super) fn transfer(plan: &Plan, device: Device) -> Result<()> {
    let source = Source::new(FILE_LEN)?;
    pass(&Pair::new(plan, device)?, &source, Mode::Copy, "")?;
    source.ensure_same(&source.received())
}

/// Passes a file from one host to another, `options` being the sender's: the sender's report, and what the receiver
/// said.
pub(super) fn pass(pair: &Pair, source: &Source, mode: Mode, options: &str) -> Result<(Value, Output)> {
    let right = pair.bed.right();
    let receiver = launch("lm-recv --json --count 1 --from-anyone", mode).arg("--output");
    // Said when the gate is attached; the control port is bound before.
    let receiver = pair.start_receiver(receiver.arg(source.received()).core(1), "listening on")?;
    // Only now: attaching an XDP program sets virtio-net's number of queues, at which QEMU forgets its table
    // (virtio_net_handle_mq of hw/net/virtio-net.c). In zero-copy mode LM steers, and on veth nothing does.
    if mode == Mode::Copy {
        steer(right, LANDING_QUEUE);
    }
    let sender = launch(&format!("lm-send --json {options}"), mode).core(0);
    let sender = sender.args(["--to", &right.address().to_string()]);
    let sent = pair.start_sender(sender.arg(&source.file))?.finish()?;
    Ok((sent.json().context("lm-send --json")?, receiver.finish()?))
}
