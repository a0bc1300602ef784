//! Files through `lm-send` and `lm-recv`, as users send them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::pair::{LANDING_QUEUE, Pair, await_link, hosts, steer};
use crate::bed::leftovers::{Registered, temporary_folder};
use crate::bed::{INTERFACE, Launch, Output};
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

pub(super) fn transfer(_plan: &Plan, device: Device) -> Result<Value> {
    let source = Source::new(FILE_LEN)?;
    let (steered, sent, received) = pass(device, &source, Mode::Copy, &[])?;
    source.ensure_same(&source.received())?;
    let report = received.json().context("lm-recv --json")?;
    Ok(
        json!({"bytes": FILE_LEN, "sha256": source.sha256, "steered_to_queue_1": steered,
            "send": sent, "receive": report}),
    )
}

/// Passes a file from one host to another on a bed of its own, `options` being the sender's: whether it was steered to
/// the landing queue by the check, the sender's report, and what the receiver said.
pub(super) fn pass(
    device: Device,
    source: &Source,
    mode: Mode,
    options: &[&str],
) -> Result<(bool, Value, Output)> {
    let bed = hosts(device, false)?;
    let (left, right) = (bed.left(), bed.right());
    let tool = |name: &str, core| {
        Launch::new(Path::new("/bin").join(name))
            .args(["--interface", INTERFACE, "--mode", mode.option(), "--json"])
            .core(core)
            .time_limit(Duration::from_secs(50))
    };
    let receiver = tool("lm-recv", 1).args(["--count", "1", "--from-anyone", "--output"]);
    let mut receiver = right.spawn(receiver.arg(source.received()))?;
    // Said when the gate is attached; the control port is bound before.
    receiver.await_text("listening on")?;
    // The gate made the card begin anew.
    await_link(&bed)?;
    // Only now: attaching an XDP program sets virtio-net's number of queues, at which QEMU forgets its table
    // (virtio_net_handle_mq of hw/net/virtio-net.c). In zero-copy mode LM steers.
    let steered = mode == Mode::Copy && device != Device::Veth && steer(right, LANDING_QUEUE)?;
    let sender = tool("lm-send", 0)
        .args(["--to", &right.address().to_string()])
        .args(options)
        .arg(&source.file);
    let sent = left.spawn(sender)?.finish().context("lm-send")?;
    let sent = sent.json().context("lm-send --json")?;
    Ok((steered, sent, receiver.finish()?))
}

/// Sends the file once; the sender's report.
pub(super) fn send_file(pair: &Pair, source: &Source) -> Result<Value> {
    let sender = pair.sending("lm-send --json").arg(&source.file);
    let sent = pair.start_sender(sender)?.finish()?;
    sent.json().context("lm-send --json")
}
