//! Files through `lm-send` and `lm-recv`, as users send them.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::pair::{LANDING_QUEUE, Pair, await_link, hosts, steer};
use crate::bed::leftovers::{Registered, temporary_folder};
use crate::bed::{INTERFACE, Launch};
use crate::content;
use crate::vm::devices::Device;
use crate::vm::protocol::Plan;

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
        write_random(&file, len)?;
        Ok(Source {
            sha256: content::sha256(&file)?,
            folder,
            file,
            _folder: registered,
        })
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

pub(super) fn transfer(_plan: &Plan, device: Option<Device>) -> Result<Value> {
    let bed = hosts(device.context("this check is of a device")?, false)?;
    let (left, right) = (bed.left(), bed.right());
    let source = Source::new(FILE_LEN)?;
    let received = source.folder.join("received");
    let tool = |name: &str| {
        Launch::new(Path::new("/bin").join(name)).args(["--interface", INTERFACE, "--mode", "copy", "--json"])
    };
    let mut receiver = right.spawn(
        tool("lm-recv")
            .args(["--count", "1", "--from-anyone", "--output"])
            .arg(&received)
            .core(1)
            .time_limit(Duration::from_secs(40)),
    )?;
    // Said when the gate is attached; the control port is bound before.
    receiver.await_text("listening on")?;
    // The gate made the card begin anew.
    await_link(&bed)?;
    // Only now: attaching an XDP program sets virtio-net's number of queues, at which QEMU forgets its table (virtio_net_handle_mq
    // of hw/net/virtio-net.c).
    let steered = device != Some(Device::Veth) && steer(right, LANDING_QUEUE)?;
    let sender = tool("lm-send")
        .args(["--to", &right.address().to_string()])
        .arg(&source.file)
        .core(0)
        .time_limit(Duration::from_secs(40));
    let sent = left.spawn(sender)?.finish()?.json().context("lm-send --json")?;
    let report = receiver.finish()?.json().context("lm-recv --json")?;
    source.ensure_same(&received)?;
    Ok(
        json!({"bytes": FILE_LEN, "sha256": source.sha256, "steered_to_queue_1": steered, "send": sent, "receive": report}),
    )
}

/// Sends the file once; the sender's report.
pub(super) fn send_file(pair: &Pair, source: &Source) -> Result<Value> {
    let sender = pair.sending("lm-send --json").arg(&source.file);
    let sent = pair.start_sender(sender)?.finish()?;
    sent.json().context("lm-send --json")
}

fn write_random(path: &Path, len: u64) -> Result<()> {
    let source = std::fs::File::open("/dev/urandom").context("cannot open /dev/urandom")?;
    let mut file = std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let written = std::io::copy(&mut source.take(len), &mut file);
    ensure!(
        written.with_context(|| format!("cannot write {}", path.display()))? == len,
        "/dev/urandom ended early"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_files_have_their_length() {
        let path = std::env::temp_dir().join(format!("xtask-random-{}", std::process::id()));
        write_random(&path, 100_001).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.len() == 100_001 && bytes.iter().any(|&byte| byte != bytes[0]));
        std::fs::remove_file(&path).unwrap();
    }
}
