//! The limit: bare AF_XDP ([`crate::bare`]). On a veth pair the receiving core polls its queue as LM does, else the receiver spins.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::child::Place;
use super::host::LinkEnd;

/// Headers of a packet over IPv4 with UDP.
const HEADERS_LEN: u64 = 28;
/// Shortest payload: the sequence number.
const SHORTEST: u64 = 8;
/// Longest payload that a chunk of 2048 bytes takes.
const LONGEST_OF_ONE: u64 = 1728;
/// Bytes that a chunk of 4096 takes of a received packet; of a sent one it takes them all.
const LONG_CHUNK: u64 = 4096 - 256;
/// Most packets in flight, below veth's 256, and the bytes of long ones: more leave the cache.
const IN_FLIGHT: [u64; 2] = [192, 512 << 10];
/// Packets that LM's receiver allows, in those that may be in flight: 768.
const CREDIT: u64 = 4;
/// Receive chunks beyond those of what is in flight, and where that is as much as LM allows: LM posts as many as it allows once more.
const SPARE_CHUNKS: [u64; 2] = [320, 768];
/// UDP ports of streams and of round trips: what is left of a stream, in whatever keeps packets on the way, is no answer.
const PORTS: [u16; 2] = [7300, 7302];
/// A sender goes on for so long after the receiver has measured, if both begin at once.
const OVERTIME: f64 = 0.3;

/// One end of a bare link.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct End {
    address: Ipv4Addr,
    mac: [u8; 6],
}

impl End {
    fn mac(&self) -> String {
        self.mac.map(|byte| format!("{byte:02x}")).join(":")
    }
}

/// What both bare programs know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct BareSpec {
    /// Else the kernel copies.
    zero_copy: bool,
    /// Whether the receiving core polls its queue itself.
    polls: bool,
    /// `None`: a stream.
    round_trips: Option<u64>,
    payload: u64,
    warm_up: f64,
    seconds: f64,
    queue: u32,
    near: End,
    far: End,
    /// Number of the file by which the receiver paces the sender, where both are on one machine.
    pace: Option<u64>,
}

impl BareSpec {
    /// A run with packets such as messages of `size` bytes make. `count` round trips, or a stream.
    pub(super) fn new(
        zero_copy: bool,
        [near, far]: [&LinkEnd; 2],
        size: u64,
        round_trips: Option<u64>,
        [warm_up, seconds]: [f64; 2],
        same_machine: bool,
    ) -> BareSpec {
        let full = u64::from(near.mtu.min(far.mtu)) - HEADERS_LEN;
        let end = |end: &LinkEnd| End {
            address: end.address,
            mac: end.mac,
        };
        let is_stream = round_trips.is_none();
        let is_paced = is_stream && same_machine && near.is_virtual();
        BareSpec {
            zero_copy,
            polls: is_stream && near.is_virtual(),
            round_trips,
            payload: size.min(full).max(SHORTEST),
            warm_up,
            seconds,
            // Small things on queue 0, bulk on a queue of its own.
            queue: u32::from(is_stream && near.queues.min(far.queues) > 1),
            near: end(near),
            far: end(far),
            pace: is_paced.then(|| u64::from(std::process::id())),
        }
    }

    pub(super) fn far_address(&self) -> Ipv4Addr {
        self.far.address
    }

    pub(super) const fn mode(&self) -> &'static str {
        match self.zero_copy {
            true => "native zero-copy",
            false => "native copy",
        }
    }

    /// Arguments of `lm-bench`.
    pub(super) fn words(&self, place: Place<'_>) -> Vec<String> {
        let (Place::Near(interface) | Place::Far(interface)) = place;
        let port = PORTS[usize::from(self.round_trips.is_some())];
        let mut line = format!(" --interface {interface} --queue {} --port {port}", self.queue);
        if self.polls {
            line.push_str(" --busy-poll udp --busy-budget 128 --keep-napi");
        }
        if let Some(pace) = self.pace {
            line.push_str(&format!(" --pace {}", pace_file(pace).display()));
        }
        if self.zero_copy {
            line.push_str(" --zero-copy");
        }
        let is_long = self.payload > LONGEST_OF_ONE;
        let (in_flight, chunks) = match is_long {
            true => (
                (IN_FLIGHT[1] / self.payload).clamp(8, IN_FLIGHT[0]),
                self.payload.saturating_add(HEADERS_LEN + 14).div_ceil(LONG_CHUNK),
            ),
            false => (IN_FLIGHT[0], 1),
        };
        // Only where the receiver paces is more on the way than in flight.
        let has_credit = self.pace.is_some();
        let credit = in_flight * if has_credit { CREDIT } else { 1 };
        let posted = (credit.saturating_mul(chunks) + SPARE_CHUNKS[usize::from(has_credit)]).min(4096);
        line.push_str(&format!(" --posted {posted}"));
        if is_long {
            line.push_str(" --long");
        }
        let to = format!(
            " --payload {} --to {} --to-mac {} --from {} --from-mac {}",
            self.payload,
            self.far.address,
            self.far.mac(),
            self.near.address,
            self.near.mac()
        );
        let (warm_up, seconds) = (self.warm_up, self.seconds);
        let line = match (place, self.round_trips) {
            (Place::Far(_), None) => format!("bare recv{line} --warmup {warm_up} --seconds {seconds}"),
            (Place::Near(_), None) => {
                let credit = if has_credit {
                    format!(" --credit {credit}")
                } else {
                    String::new()
                };
                let seconds = warm_up + seconds + OVERTIME;
                format!("bare send{line}{to} --seconds {seconds} --in-flight {in_flight}{credit}")
            }
            (Place::Far(_), Some(_)) => format!("bare pong{line}"),
            (Place::Near(_), Some(count)) => format!("bare ping{line}{to} --count {count}"),
        };
        line.split_whitespace().map(str::to_owned).collect()
    }
}

/// Where the files by which receivers pace senders are: no other user can make it.
pub(super) fn pace_folder() -> PathBuf {
    let own = match rustix::process::geteuid() {
        user if user.is_root() => PathBuf::from("/run"),
        user => PathBuf::from(format!("/run/user/{}", user.as_raw())),
    };
    own.join("lm-bench")
}

fn pace_file(number: u64) -> PathBuf {
    pace_folder().join(format!("pace-{number}"))
}

/// Removes the pace file of this process's runs; there may be none.
pub(super) fn remove_pace_file() {
    let _none = std::fs::remove_file(pace_file(u64::from(std::process::id())));
}
