//! The demonstration by DPDK: two programs on the two ends of a socket, with no privilege that the command has not.

use anyhow::Result;
use serde_json::{Value, json};

use super::{Arguments, TRANSFER_LIMIT, exchange, make_content};
use crate::bed::Launch;
use crate::bed::leftovers::temporary_folder;
use crate::machine::two_cores;
use crate::workspace::Programs;

/// Addresses of the receiver and the sender.
const RECEIVER: &str = "10.9.0.1";
const SENDER: &str = "10.9.0.2";

pub(super) fn run(arguments: &Arguments, programs: &Programs) -> Result<Value> {
    let content = make_content(arguments.size)?;
    // The path of a socket has 107 bytes at most.
    let (folder, _registered) = temporary_folder(&std::env::temp_dir(), "dpdk")?;
    let socket = folder.join("lm.sock").display().to_string();
    let launch = |tool: &str, device: String, address: &str, core| {
        Launch::new(programs.path(tool))
            .args([
                "--dpdk",
                &device,
                "--dpdk-address",
                &format!("{address}/24"),
                "--json",
            ])
            .core(core)
            .time_limit(TRANSFER_LIMIT)
    };
    let [sending, receiving] = two_cores();
    let receiver = launch(
        "lm-recv",
        format!("net_vhost0,iface={socket}"),
        RECEIVER,
        receiving,
    )
    .args(["--allow", SENDER, "--count", "1", "--output"])
    .arg(content.received());
    let device = format!("net_virtio_user0,path={socket}");
    let sender = launch("lm-send", device, SENDER, sending)
        .args(["--to", RECEIVER])
        .arg(&content.file);
    let transfer = exchange(&content, (receiver, Launch::spawn), (sender, Launch::spawn))?;
    Ok(json!({
        "kind": "two programs by DPDK",
        "file": {"bytes": content.len, "sha256": content.sha256},
        "transfer": transfer,
    }))
}
