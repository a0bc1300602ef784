//! What can go wrong with an AF_XDP socket.

use std::io;

impl XskError {
    pub(super) fn system(call: &'static str, error: impl Into<io::Error>) -> XskError {
        XskError::System {
            call,
            source: error.into(),
        }
    }
}

fn refused(queue: u32, zero_copy: bool) -> String {
    match zero_copy {
        false => {
            format!("the kernel refuses queue {queue}: the interface has fewer queues; see ethtool -l IF")
        }
        true => format!(
            "the kernel refuses zero-copy on queue {queue}: the interface has fewer queues, or its driver wants other \
             settings (ethtool -l IF, MTU, offloads); copy mode works meanwhile"
        ),
    }
}

/// Why a socket could not be opened; one line each, with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XskError {
    /// A value that the kernel would refuse.
    #[error("{what}, not {value}")]
    Invalid {
        /// The rule.
        what: &'static str,
        /// The value given.
        value: u64,
    },
    /// The process lacks CAP_NET_RAW.
    #[error("no privilege to open an AF_XDP socket: CAP_NET_RAW is missing; run as root")]
    Privilege,
    /// The kernel has no AF_XDP.
    #[error("this kernel has no AF_XDP; use one built with CONFIG_XDP_SOCKETS (5.11 or newer)")]
    Unsupported,
    /// The registration exceeds RLIMIT_MEMLOCK.
    #[error(
        "registering {len} bytes exceeds the locked-memory limit; raise it (ulimit -l unlimited) or grant \
         CAP_IPC_LOCK"
    )]
    LockedMemory {
        /// Bytes asked for.
        len: u64,
    },
    /// The kernel has no transmit metadata.
    #[error(
        "this kernel takes no metadata with packets to send, so that nobody sums them up; use one from Linux 6.11 on, \
         or --checksum integrated"
    )]
    NoMetadata,
    /// Not enough memory to pin.
    #[error("not enough memory to pin {len} bytes; ask for a shorter region")]
    Memory {
        /// Bytes asked for.
        len: u64,
    },
    /// A ring could not be made.
    #[error("cannot make a {ring} ring of {len} entries: {source}")]
    Ring {
        /// Which.
        ring: &'static str,
        /// Its length in entries.
        len: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another socket has the queue.
    #[error("queue {queue} is taken by another AF_XDP socket; stop its program or choose another queue")]
    Busy {
        /// The queue.
        queue: u32,
    },
    /// The driver has no zero-copy.
    #[error("the driver has no zero-copy for AF_XDP; use copy mode")]
    ZeroCopyUnsupported,
    /// The interface is gone.
    #[error("no interface with index {index}; was it removed, or is it in another namespace?")]
    NoDevice {
        /// Its index.
        index: u32,
    },
    /// The interface is down.
    #[error("the interface is down; set it up (ip link set IF up)")]
    Down,
    /// bind(2) said EINVAL: no such queue, or the driver wants another set-up.
    #[error("{}", refused(*.queue, *.zero_copy))]
    Refused {
        /// The queue.
        queue: u32,
        /// Whether zero-copy was demanded.
        zero_copy: bool,
    },
    /// Anything else.
    #[error("{call}: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}
