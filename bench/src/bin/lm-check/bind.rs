//! What a card's driver lets AF_XDP do: a socket with landing memory bound to each queue at once, and what the kernel says of it.

use std::sync::Arc;

use clap::{Args, ValueEnum};
use lm_cards::Interface;
use lm_dataplane::memory::{HugePages, Mapping, PageKind};
use lm_dataplane::xsk::{BindMode, Xsk, XskConfig};
use serde::Serialize;

use lm_bench::cli::{Failure, chain};
use lm_bench::size::ByteSize;

/// Entries of each ring: a landing queue's.
const RING_LEN: u32 = 1 << 15;
/// Length of a chunk in bytes: the one that every driver takes, igb too.
const CHUNK_LEN: u32 = 4096;

/// `lm-check bind`.
#[derive(Debug, Clone, Args)]
pub(crate) struct BindArgs {
    /// Interface
    #[arg(long, short)]
    pub(crate) interface: String,
    /// What to demand of the kernel
    #[arg(long, value_enum, default_value_t = Demand::Auto)]
    pub(crate) mode: Demand,
    /// Memory that each socket registers, in bytes
    #[arg(long, default_value = "32M")]
    pub(crate) memory: ByteSize,
}

/// `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Demand {
    /// Zero-copy where the driver can, else copy.
    Auto,
    /// Copy mode.
    Copy,
    /// Zero-copy or an error; takes huge pages.
    ZeroCopy,
}

impl From<Demand> for BindMode {
    fn from(demand: Demand) -> BindMode {
        match demand {
            Demand::Auto => BindMode::Auto,
            Demand::Copy => BindMode::Copy,
            Demand::ZeroCopy => BindMode::ZeroCopy,
        }
    }
}

/// What became of it.
#[derive(Debug, Serialize)]
pub(crate) struct BindReport {
    /// The interface.
    pub(crate) interface: String,
    /// Its driver, where it tells.
    pub(crate) driver: Option<String>,
    /// Bytes that each socket registered.
    pub(crate) memory_bytes: u64,
    /// Whether they lie on huge pages.
    pub(crate) huge_pages: bool,
    /// Each queue, in order.
    pub(crate) queues: Vec<QueueReport>,
}

/// One queue's socket.
#[derive(Debug, Serialize)]
pub(crate) struct QueueReport {
    /// The queue.
    pub(crate) queue: u32,
    /// What `XDP_OPTIONS` says; absent when the socket could not be bound.
    pub(crate) zero_copy: Option<bool>,
    /// Why it could not be bound.
    pub(crate) error: Option<String>,
}

/// Binds a socket to every queue; all are open at the same time, over the same memory.
///
/// # Errors
///
/// When the interface is unknown or the memory cannot be had. A queue that cannot be bound is part of the report.
pub(crate) fn bind(args: &BindArgs) -> Result<BindReport, Failure> {
    let interface = Interface::by_name(&args.interface).map_err(|error| Failure::new(chain(&error)))?;
    let pages = if args.mode == Demand::ZeroCopy {
        HugePages::On
    } else {
        HugePages::Auto
    };
    let mapping = Mapping::new(args.memory.bytes(), pages).map_err(|error| {
        let kind = if pages == HugePages::On {
            "on huge pages"
        } else {
            "of memory"
        };
        Failure::new(format!(
            "no {} bytes {kind}: {error}; reserve huge pages (sysctl vm.nr_hugepages=64) or ask for less (--memory)",
            args.memory.bytes()
        ))
    })?;
    let mapping = Arc::new(mapping);
    let mut open = Vec::new();
    let mut queues = Vec::new();
    for queue in 0..interface.rx_queues {
        let config = XskConfig {
            interface_index: interface.index,
            queue,
            mapping: &mapping,
            registered_len: mapping.len(),
            chunk_len: CHUNK_LEN,
            fill_len: RING_LEN,
            completion_len: RING_LEN,
            rx_len: RING_LEN,
            tx_len: RING_LEN,
            bind: args.mode.into(),
            need_wakeup: true,
        };
        queues.push(match Xsk::open(&config) {
            Ok(socket) => {
                let zero_copy = Some(socket.0.zero_copy());
                open.push(socket);
                QueueReport {
                    queue,
                    zero_copy,
                    error: None,
                }
            }
            Err(error) => QueueReport {
                queue,
                zero_copy: None,
                error: Some(chain(&error)),
            },
        });
    }
    Ok(BindReport {
        interface: interface.name,
        driver: interface.driver,
        memory_bytes: mapping.len(),
        huge_pages: mapping.kind() == PageKind::Huge,
        queues,
    })
}
