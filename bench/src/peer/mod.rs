//! What LM is measured against: the kernel's UDP and TCP sockets, used as ordinary programs use them.
//!
//! UDP: one datagram per `send` and `recv`, blocking unless told to spin, the system's default socket buffers, no segmentation
//! offload. Only payload that arrived counts, by the receiver's clock.

pub mod latency;
mod pingpong;
mod stream;
pub mod tcp;
pub(crate) mod watch;

pub use pingpong::{PingArgs, PongArgs, ping, pong};
pub(crate) use stream::train;
pub use stream::{ReceiveArgs, ReceiveReport, SendArgs, SendReport, receive, send};
