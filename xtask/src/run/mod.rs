//! `cargo xtask run`: the demonstration. A file crosses a real link through LM and is checked; then LM and kernel
//! UDP are shown beside each other.

pub(crate) mod cluster;
mod interoperate;
mod two_hosts;
mod two_machines;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use lm_measure::size::{self, ByteSize};
use serde_json::{Value, json};

use crate::bed::leftovers::{Registered, temporary_folder, watch_signals};
use crate::machine::{self, ResultFile};
use crate::{content, workspace};

/// Send a file through LM, check it, and show LM and kernel UDP beside each other.
///
/// Without --interface: makes two hosts on this machine (network namespaces joined by a veth pair with two queues
/// each), starts lm-recv on one and lm-send on the other, each on a core of its own, compares SHA-256 of what was
/// sent and received, then measures LM and kernel UDP in turns and prints the medians.
///
/// With --interface and --peer: the same to another machine; says what to start there at each step.
///
/// With --hosts N: makes a cluster of N hosts on one switch with an admission daemon each, on which a program of every
/// host sends to every other one at once, without privileges; compares every byte of every message, and prints a table.
///
/// With --wire ipfrag: LM sends plain IP fragments, and an ordinary UDP socket on a host without LM receives them.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Length of the file [default: 256M, with --wire ipfrag 64M]
    #[arg(long)]
    size: Option<ByteSize>,
    /// Packets on the wire: LM's own, or IP fragments as in the paper.
    #[arg(long, value_enum, default_value_t = Wire::Lm)]
    wire: Wire,
    /// Length of the messages that carry the file [default: what lm-send takes], or that the hosts of a cluster send
    /// [default: 64K]
    #[arg(long)]
    message_size: Option<ByteSize>,
    /// How often each figure of the table is measured.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Mode of the tools for the file: auto, zero-copy, copy or generic [default: what the tools take]
    #[arg(long)]
    mode: Option<String>,
    /// Between two real machines: this machine's interface.
    #[arg(long, value_name = "IF", requires = "peer")]
    interface: Option<String>,
    /// Between two real machines: the other machine's name or address.
    #[arg(long, value_name = "HOST", requires = "interface")]
    peer: Option<String>,
    /// All to all on so many hosts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=64))]
    #[arg(conflicts_with_all = ["interface", "peer", "size", "wire", "rounds"])]
    hosts: Option<u32>,
    /// With --hosts: seconds to send.
    #[arg(long, default_value_t = 5.0, requires = "hosts", value_parser = cluster::parse_seconds)]
    seconds: f64,
    /// With --hosts: no daemons; each program embeds the admission, as root.
    #[arg(long, requires = "hosts")]
    embedded: bool,
    /// Also keep the results, with every single sample, in this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Wire {
    Lm,
    Ipfrag,
}

/// No transfer of this demonstration takes longer on a link that works.
const TRANSFER_LIMIT: Duration = Duration::from_secs(120);

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let needed_for = if arguments.interface.is_some() {
        "open AF_XDP sockets"
    } else {
        "make network namespaces"
    };
    crate::bed::require_root(needed_for)?;
    watch_signals()?;
    let result_file = arguments.json.as_deref().map(ResultFile::create).transpose()?;
    let programs = workspace::Programs::build()?;
    if let Some(hosts) = arguments.hosts {
        let result = cluster::run(arguments, hosts, &programs)?;
        return result_file.map_or(Ok(()), |file| file.write(&result));
    }
    let result = match (&arguments.interface, &arguments.peer, arguments.wire) {
        (Some(interface), Some(peer), Wire::Lm) => two_machines::run(arguments, interface, peer, &programs)?,
        (Some(_), Some(_), Wire::Ipfrag) => {
            bail!(
                "--wire ipfrag between two machines needs no demonstration: start any UDP receiver on the peer and \
                    run lm-send --wire ipfrag"
            )
        }
        (_, _, Wire::Ipfrag) => interoperate::run(arguments, &programs)?,
        _ => two_hosts::run(arguments, &programs)?,
    };
    result_file.map_or(Ok(()), |file| file.write(&result))
}

/// The file to send, in a folder of its own that goes with it.
struct Content {
    folder: PathBuf,
    path: PathBuf,
    len: u64,
    sha256: String,
    _folder: Registered,
}

impl Content {
    fn make(arguments: &Arguments) -> Result<Content> {
        let default_len = if arguments.wire == Wire::Ipfrag {
            64 << 20
        } else {
            256 << 20
        };
        let len = arguments.size.map_or(default_len, ByteSize::bytes);
        let (folder, registered) = temporary_folder(&workspace::target_dir()?, "xtask-run")?;
        let path = folder.join("content");
        let sha256 = content::write(&path, len)?;
        println!(
            "file       {}, random bytes, SHA-256 {}…",
            size::exact(len),
            &sha256[..16]
        );
        Ok(Content {
            folder,
            path,
            len,
            sha256,
            _folder: registered,
        })
    }

    /// Fails unless the file at `path` is this one.
    fn compare(&self, path: &Path) -> Result<String> {
        let received = content::sha256(path)?;
        if received != self.sha256 {
            let len = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
            bail!(
                "the file that arrived is not the one that was sent: {len} of {} bytes, SHA-256 {received} instead of \
                    {}",
                self.len,
                self.sha256
            );
        }
        Ok(received)
    }

    fn to_json(&self) -> Value {
        json!({"bytes": self.len, "sha256": self.sha256})
    }
}

/// Arguments of `lm-send` and `lm-recv` that the user chose.
fn tool_options(arguments: &Arguments) -> Vec<String> {
    let mode = arguments
        .mode
        .iter()
        .flat_map(|mode| ["--mode".to_owned(), mode.clone()]);
    mode.collect()
}

fn send_options(arguments: &Arguments) -> Vec<String> {
    let mut options = tool_options(arguments);
    if let Some(len) = arguments.message_size {
        options.extend(["--message-size".to_owned(), len.to_string()]);
    }
    options
}

/// One line about a tool's report: how much, how fast, in which mode, what user space copied.
fn transfer_line(report: &Value) -> String {
    let number = |name: &str| report[name].as_f64().unwrap_or(f64::NAN);
    format!(
        "{} messages in {:.3} s, {:.2} Gbit/s with reading and writing the file, mode {}, {} bytes copied by user \
            space",
        report["messages"],
        number("seconds"),
        number("gbit_per_s"),
        report["mode"].as_str().unwrap_or("unknown"),
        report["user_copied_bytes"],
    )
}

/// The whole of a result file.
fn result(kind: &str, content: &Content, transfer: Value, comparisons: Vec<Value>) -> Value {
    json!({
        "suite": "run",
        "kind": kind,
        "machine": machine::describe(),
        "file": content.to_json(),
        "transfer": transfer,
        "comparisons": comparisons,
    })
}
