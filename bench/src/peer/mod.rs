//! What LM is measured against: the kernel's UDP sockets, used as ordinary programs use them.
//!
//! One datagram per `send` and `recv`, blocking unless told to spin, the system's default socket buffers, no segmentation
//! offload. Only payload that arrived counts, by the receiver's clock.

pub mod latency;
mod pingpong;
mod stream;
mod watch;

pub use pingpong::{PingArgs, PongArgs, ping, pong};
pub use stream::{ReceiveArgs, ReceiveReport, SendArgs, SendReport, receive, send};
