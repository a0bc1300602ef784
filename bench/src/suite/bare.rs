//! The limit: bare AF_XDP ([`crate::bare`]), by several recipes, of which the best counts.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::child::Place;
use super::end::Counted;
use super::host::LinkEnd;
use super::measure::per_message;
use super::schema::{Round, TransferRound};
use crate::bare;
use crate::cli::Failure;

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

/// How packets get from one side to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Recipe {
    /// XDP in the driver; the receiving core polls the queue through a UDP socket.
    NativePolled,
    /// The same with polls of 128 packets, and 768 packets that the receiver may not have taken.
    NativePolledLong,
    /// The same, the queue's interrupts deferred: LM's own.
    NativeKept,
    /// XDP in the driver, the kernel works where it likes, the receiver spins.
    NativeSpinning,
    /// The same; the receiver sleeps in `poll`.
    NativeSleeping,
    /// XDP in the network stack, the receiver spins.
    GenericSpinning,
}

impl Recipe {
    pub(super) const ALL: [Recipe; 6] = [
        Recipe::NativePolled,
        Recipe::NativePolledLong,
        Recipe::NativeKept,
        Recipe::NativeSpinning,
        Recipe::NativeSleeping,
        Recipe::GenericSpinning,
    ];

    /// In words.
    pub(super) const fn title(self) -> &'static str {
        match self {
            Recipe::NativePolled => "native mode, the receiving core polls the queue through a UDP socket",
            Recipe::NativePolledLong => {
                "native mode, the receiving core polls the queue through a UDP socket, 128 packets a poll, 768 of them by credit"
            }
            Recipe::NativeKept => {
                "native mode, the receiving core polls the queue through a UDP socket, 128 packets a poll, 768 of them by credit, its \
                 interrupts deferred"
            }
            Recipe::NativeSpinning => "native mode, the receiver spins",
            Recipe::NativeSleeping => "native mode, the receiver sleeps in poll",
            Recipe::GenericSpinning => "generic mode, the receiver spins",
        }
    }

    const fn switches(self) -> &'static str {
        match self {
            Recipe::NativePolled => "--mode native --busy-poll udp",
            Recipe::NativePolledLong => "--mode native --busy-poll udp --busy-budget 128",
            Recipe::NativeKept => "--mode native --busy-poll udp --busy-budget 128 --keep-napi",
            Recipe::NativeSpinning => "--mode native",
            Recipe::NativeSleeping => "--mode native --idle poll",
            Recipe::GenericSpinning => "--mode generic",
        }
    }

    /// Whether more may be on the way to the receiver than to the kernel.
    const fn has_credit(self) -> bool {
        matches!(self, Recipe::NativePolledLong | Recipe::NativeKept)
    }
}

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

/// How bare sockets are driven.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Way {
    pub(super) recipe: Recipe,
    /// Else the kernel copies.
    pub(super) zero_copy: bool,
}

/// What both bare programs know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct BareSpec {
    way: Way,
    /// `None`: a stream.
    round_trips: Option<u64>,
    payload: u64,
    warm_up: f64,
    seconds: f64,
    queue: u32,
    near: End,
    far: End,
    /// What is counted.
    #[serde(default)]
    pub(super) counted: Counted,
    /// Number of the file by which the receiver paces the sender, where both are on one machine.
    pace: Option<u64>,
}

impl BareSpec {
    /// A run with packets such as messages of `size` bytes make. `count` round trips, or a stream.
    pub(super) fn new(
        way: Way,
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
        // Small things on queue 0, bulk on a queue of its own; generic mode on veth counts them otherwise.
        let bulk = round_trips.is_none() && way.recipe != Recipe::GenericSpinning;
        BareSpec {
            way,
            round_trips,
            payload: size.min(full).max(SHORTEST),
            warm_up,
            seconds,
            queue: u32::from(bulk && near.queues.min(far.queues) > 1),
            near: end(near),
            far: end(far),
            counted: Counted::default(),
            pace: (same_machine && round_trips.is_none()).then(|| u64::from(std::process::id())),
        }
    }

    pub(super) fn far_address(&self) -> Ipv4Addr {
        self.far.address
    }

    /// Arguments of `lm-bench`.
    pub(super) fn words(&self, place: Place<'_>) -> Vec<String> {
        let (Place::Near(interface, _) | Place::Far(interface)) = place;
        let mut line = format!(
            " --interface {interface} --queue {} --port {} {}",
            self.queue,
            PORTS[usize::from(self.round_trips.is_some())],
            self.way.recipe.switches()
        );
        if let Some(pace) = self.pace {
            let file = pace_file(pace);
            line.push_str(&format!(" --pace {}", file.display()));
        }
        if self.way.zero_copy {
            line.push_str(" --zero-copy");
        }
        line.push_str(&self.counted.words());
        let is_long = self.payload > LONGEST_OF_ONE;
        let in_flight = match is_long {
            true => (IN_FLIGHT[1] / self.payload).clamp(8, IN_FLIGHT[0]),
            false => IN_FLIGHT[0],
        };
        // Only where the receiver paces is more on the way than in flight.
        let has_credit = self.way.recipe.has_credit() && self.pace.is_some();
        let credit = in_flight * if has_credit { CREDIT } else { 1 };
        let chunks = match is_long {
            true => self.payload.saturating_add(HEADERS_LEN + 14).div_ceil(LONG_CHUNK),
            false => 1,
        };
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
        let line = match (place, self.round_trips) {
            (Place::Far(_), None) => format!(
                "bare recv{line} --warmup {} --seconds {}",
                self.warm_up, self.seconds
            ),
            (Place::Near(..), None) => {
                let credit = match has_credit {
                    true => format!(" --credit {credit}"),
                    false => String::new(),
                };
                format!(
                    "bare send{line}{to} --seconds {} --in-flight {in_flight}{credit}",
                    self.warm_up + self.seconds + OVERTIME
                )
            }
            (Place::Far(_), Some(_)) => format!("bare pong{line}"),
            (Place::Near(..), Some(count)) => format!("bare ping{line}{to} --count {count}"),
        };
        line.split_whitespace().map(str::to_owned).collect()
    }

    /// The two reports of a stream as a round.
    pub(super) fn round(&self, at: u32, near: &str, far: &str) -> Result<Round, Failure> {
        let unread = |error: serde_json::Error| Failure::new(format!("a bare program's report: {error}"));
        let send: bare::SendReport = serde_json::from_str(near).map_err(unread)?;
        let receive: bare::ReceiveReport = serde_json::from_str(far).map_err(unread)?;
        Ok(Round::Transfer(TransferRound {
            at,
            bytes: receive.bytes,
            messages: receive.packets,
            lost_messages: receive.lost_packets,
            seconds: receive.seconds,
            // It does the same all the time.
            cpu_seconds_send: send.cost.process_s * receive.seconds / send.seconds,
            cpu_seconds_receive: receive.cost.process_s,
            cpu_seconds_machine: match self.pace {
                Some(_) => receive.cost.machine_s,
                None => receive.cost.machine_s + send.cost.machine_s * receive.seconds / send.seconds,
            },
            spare_fraction: Vec::new(),
            counts: per_message([(&send.cost, send.packets), (&receive.cost, receive.packets)]),
        }))
    }
}

/// Where the files by which receivers pace senders are: nobody but this user can make it.
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
