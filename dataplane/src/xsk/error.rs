//! What can go wrong with an AF_XDP socket.

use std::fmt;
use std::io;

/// Why a socket could not be opened; one line each, with what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum XskError {
    /// A value that the kernel would refuse.
    Invalid {
        /// The rule.
        what: &'static str,
        /// The value given.
        value: u64,
    },
    /// The process lacks CAP_NET_RAW.
    Privilege,
    /// The kernel has no AF_XDP.
    Unsupported,
    /// The registration exceeds RLIMIT_MEMLOCK.
    LockedMemory {
        /// Bytes asked for.
        len: u64,
    },
    /// The kernel has no transmit metadata.
    NoMetadata,
    /// Not enough memory to pin.
    Memory {
        /// Bytes asked for.
        len: u64,
    },
    /// A ring could not be made.
    Ring {
        /// Which.
        ring: &'static str,
        /// Its length in entries.
        len: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another socket has the queue.
    Busy {
        /// The queue.
        queue: u32,
    },
    /// The driver has no zero-copy.
    ZeroCopyUnsupported,
    /// The interface is gone.
    NoDevice {
        /// Its index.
        index: u32,
    },
    /// The interface is down.
    Down,
    /// bind(2) said EINVAL: no such queue, or the driver wants another set-up.
    Refused {
        /// The queue.
        queue: u32,
        /// Whether zero-copy was demanded.
        zero_copy: bool,
    },
    /// Anything else.
    System {
        /// The call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

impl fmt::Display for XskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            XskError::Invalid { what, value } => write!(f, "{what}, not {value}"),
            XskError::Privilege => {
                f.write_str("no privilege to open an AF_XDP socket: CAP_NET_RAW is missing; run as root")
            }
            XskError::Unsupported => f.write_str(
                "this kernel has no AF_XDP; use one built with CONFIG_XDP_SOCKETS (5.11 or newer)",
            ),
            XskError::LockedMemory { len } => write!(
                f,
                "registering {len} bytes exceeds the locked-memory limit; raise it (ulimit -l unlimited) or grant CAP_IPC_LOCK"
            ),
            XskError::NoMetadata => f.write_str(
                "this kernel takes no metadata with packets to send, so that nobody sums them up; use one from Linux 6.11 on, or \
                 --checksum integrated",
            ),
            XskError::Memory { len } => {
                write!(
                    f,
                    "not enough memory to pin {len} bytes; ask for a shorter region"
                )
            }
            XskError::Ring { ring, len, source } => {
                write!(f, "cannot make a {ring} ring of {len} entries: {source}")
            }
            XskError::Busy { queue } => write!(
                f,
                "queue {queue} is taken by another AF_XDP socket; stop its program or choose another queue"
            ),
            XskError::ZeroCopyUnsupported => {
                f.write_str("the driver has no zero-copy for AF_XDP; use copy mode")
            }
            XskError::NoDevice { index } => {
                write!(
                    f,
                    "no interface with index {index}; was it removed, or is it in another namespace?"
                )
            }
            XskError::Down => f.write_str("the interface is down; set it up (ip link set IF up)"),
            XskError::Refused {
                queue,
                zero_copy: false,
            } => {
                write!(
                    f,
                    "the kernel refuses queue {queue}: the interface has fewer queues; see ethtool -l IF"
                )
            }
            XskError::Refused {
                queue,
                zero_copy: true,
            } => write!(
                f,
                "the kernel refuses zero-copy on queue {queue}: the interface has fewer queues, or its driver wants other \
                 settings (ethtool -l IF, MTU, offloads); copy mode works meanwhile"
            ),
            XskError::System { call, source } => write!(f, "{call}: {source}"),
        }
    }
}

impl std::error::Error for XskError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            XskError::Ring { source, .. } | XskError::System { source, .. } => Some(source),
            _ => None,
        }
    }
}
