//! Messages of a real-time socket by a timetable, beside whatever else the hosts send: LM's side of SS-RTUDP's table 4 and figure 9.
//!
//! Both ends sleep between packets: several of them share the machine's cores.

use std::io;
use std::net::SocketAddrV4;
use std::num::NonZeroU64;
use std::time::Duration;

use lm_dataplane::{
    ConnectOptions, Endpoint, EndpointConfig, IdleStrategy, LinkConfig, MemoryConfig, PeerId,
};
use lm_protocol::smoother::{Law, Parameters};
use lm_realtime::{Blocks, Foreign, RealTime, RtSocket, SendOptions, SocketConfig, monotonic};
use serde::{Deserialize, Serialize};

use super::timetable::{Offered, STAMP_LEN, Timetable, now_ns, stamp_of};
use super::{EndArgs, Outcome, SILENCE, Spec};
use crate::cli::{Failure, Mode, chain};
use crate::histogram::LatencyHistogram;

/// Number of the socket at the far end.
pub(super) const PORT: u16 = 1;
/// Messages that wait at most: those of a stall of this machine.
const KEEP: usize = 1024;
/// What the kernel's packets that wait in this host have to leave it in.
const DRAIN_NS: u64 = 2_000_000_000;
/// How long the far end may take to answer.
const HELLO: Duration = Duration::from_secs(1);
/// Longest sleep.
const STEP: Duration = Duration::from_millis(10);
/// Length of an Ethernet header.
const ETHERNET_LEN: u32 = 14;

/// Messages of full packets by a timetable, and what holds others back meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sending {
    /// When they are due.
    pub(crate) timetable: Timetable,
    /// Near: the smoother of this host; `None`: nothing is held back.
    pub(crate) smoother: Option<Smoothing>,
}

/// A smoother with table 3's parameters for a link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Smoothing {
    law: LawName,
    /// The link's rate.
    bits_per_second: NonZeroU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum LawName {
    Paper,
    Paced,
}

/// What became of a host's others, and at what rate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Smoothed {
    /// λ when a message left: mean and least.
    pub(crate) credits_mean: f64,
    pub(crate) credits_least: u32,
    /// Packets of the kernel that were dropped in this host.
    pub(crate) dropped: u32,
    /// That still wait.
    pub(crate) waiting: u32,
}

/// No turn of a round is made without need.
pub(super) const ASLEEP: IdleStrategy = IdleStrategy {
    spin: Duration::ZERO,
    yields: 0,
    sleep: Some(STEP),
};

/// An endpoint where nothing lands: what comes, comes by the general channel, and on a card's only queue.
pub(super) fn open(interface: &str, mode: Mode, port: u16, idle: IdleStrategy) -> Result<Endpoint, Failure> {
    let config = EndpointConfig {
        interface: interface.to_owned(),
        port,
        link: LinkConfig {
            mode: mode.into(),
            ..LinkConfig::default()
        },
        memory: MemoryConfig {
            landing_len: 0,
            ..MemoryConfig::default()
        },
        idle,
        ..EndpointConfig::default()
    };
    Endpoint::open(&config).map_err(|error| Failure::new(chain(&error)))
}

/// A socket for messages of one packet, or of several where they are to be longer than that.
fn socket(endpoint: &mut Endpoint, real_time: &RealTime, spec: &Spec) -> Result<RtSocket, Failure> {
    let is_long = spec.size > spec.mtu.into();
    let config = SocketConfig {
        keep: KEEP,
        frames: 32,
        drops_late: false,
        same_host: true,
        blocks: Blocks {
            of_4: if is_long { KEEP as u32 + 2 } else { 0 },
            ..Blocks::default()
        },
        ..SocketConfig::default()
    };
    real_time
        .socket(endpoint, PORT, &config)
        .map_err(|error| failed(&error))
}

fn failed(error: &dyn std::error::Error) -> Failure {
    Failure::new(chain(error))
}

/// Sends what is due when it is due.
pub(super) fn send(args: &EndArgs, spec: &Spec, sending: &Sending) -> Result<Outcome, Failure> {
    let timetable = sending.timetable;
    let system = |error: io::Error| failed(&error);
    timetable.check().map_err(system)?;
    let mut endpoint = open(&args.interface, spec.mode, 0, ASLEEP)?;
    let parameters = sending.smoother.map(|smoothing| {
        let frame_len = (endpoint.status().device().mtu + ETHERNET_LEN) as u16;
        Parameters {
            law: match smoothing.law {
                LawName::Paper => Law::Paper,
                LawName::Paced => Law::Paced,
            },
            ..Parameters::of_link(smoothing.bits_per_second, frame_len)
        }
    });
    let real_time = RealTime::new(&mut endpoint, parameters, monotonic).map_err(|error| failed(&error))?;
    real_time.hold_kernel(&args.interface, Foreign::Keep);
    let mut socket = socket(&mut endpoint, &real_time, spec)?;
    if sending.smoother.is_some() && real_time.kernel_traffic().is_none() {
        return Err(Failure::new(
            "the kernel's traffic does not follow the smoother; see the warning above",
        ));
    }
    introduce(&mut endpoint, &mut socket, spec.address)?;
    let mut payload = vec![0x5a; (spec.size as usize).clamp(STAMP_LEN, socket.payload_max())];
    let mut round_trips = LatencyHistogram::new();
    let mut credits = Vec::with_capacity((timetable.seconds * timetable.rate) as usize);
    // The endpoint sends what was handed over before it waits.
    let wait = |time_ns| Ok(wait_until(&mut endpoint, time_ns));
    let offered = timetable.follow(wait, || {
        credits.extend(real_time.credits_per_second());
        take_answers(&mut socket, &mut round_trips);
        payload[..STAMP_LEN].copy_from_slice(&now_ns().to_le_bytes());
        // What does not leave is counted below.
        let _ = socket.send(&payload, SendOptions::default());
        Ok(true)
    });
    let offered = offered.map_err(system)?;
    let drained_ns = now_ns() + DRAIN_NS;
    wait_until(&mut endpoint, now_ns() + SILENCE.as_nanos() as u64);
    while real_time
        .kernel_traffic()
        .is_some_and(|kernel| kernel.waiting > 0)
        && now_ns() < drained_ns
    {
        wait_until(&mut endpoint, now_ns() + STEP.as_nanos() as u64);
    }
    take_answers(&mut socket, &mut round_trips);
    let statistics = socket.statistics();
    Ok(Outcome {
        messages: statistics.sent,
        round_trips: round_trips.counts().collect(),
        seconds: timetable.seconds,
        offered: Some(Offered {
            refused: offered.due - offered.late - statistics.sent,
            ..offered
        }),
        smoothed: real_time.kernel_traffic().map(|kernel| Smoothed {
            credits_mean: credits.iter().copied().map(f64::from).sum::<f64>() / credits.len().max(1) as f64,
            credits_least: credits.iter().copied().min().unwrap_or(0),
            dropped: kernel.dropped,
            waiting: kernel.waiting,
        }),
        ..Outcome::default()
    })
}

/// Answers that came since the last time; when each came is in it.
fn take_answers(socket: &mut RtSocket, round_trips: &mut LatencyHistogram) {
    while let Some(answer) = socket.recv() {
        let came_ns = answer.info().received_at.as_nanos();
        round_trips.record_ns(came_ns.saturating_sub(stamp_of(&answer)));
    }
}

/// Has a socket send to the one at the far end, which knows this one from then on.
pub(super) fn introduce(
    endpoint: &mut Endpoint,
    socket: &mut RtSocket,
    to: SocketAddrV4,
) -> Result<PeerId, Failure> {
    let options = ConnectOptions {
        session: lm_dataplane::Session::Later,
        ..ConnectOptions::default()
    };
    let peer = endpoint.connect(to, &options).map_err(|error| failed(&error))?;
    socket
        .connect(endpoint, peer, PORT)
        .map_err(|error| failed(&error))?;
    // From strangers the far end takes nothing but the greeting.
    endpoint.flush(HELLO).map_err(|error| failed(&error))?;
    Ok(peer)
}

/// Drives the endpoint until a time; how late it is then.
fn wait_until(endpoint: &mut Endpoint, time_ns: u64) -> u64 {
    loop {
        while endpoint.try_completion().is_some() {}
        let worked = endpoint.poll() > 0;
        let now_ns = now_ns();
        if now_ns >= time_ns {
            return now_ns - time_ns;
        }
        if !worked {
            endpoint.wait(Duration::from_nanos(time_ns - now_ns));
        }
    }
}

/// Receives what comes, from whomever, until the timetable is over and nothing comes any more.
pub(super) fn receive(
    args: &EndArgs,
    spec: &Spec,
    sending: &Sending,
    ready: impl FnOnce(),
) -> Result<Outcome, Failure> {
    let timetable = sending.timetable;
    timetable.check().map_err(|error| failed(&error))?;
    let mut endpoint = open(&args.interface, spec.mode, spec.address.port(), ASLEEP)?;
    let real_time = RealTime::new(&mut endpoint, None, monotonic).map_err(|error| failed(&error))?;
    let mut socket = socket(&mut endpoint, &real_time, spec)?;
    ready();
    let mut ends_ns = timetable.ends_ns();
    let mut answered = None;
    let (mut messages, mut bytes) = (0, 0);
    while now_ns() < ends_ns.saturating_add(2 * SILENCE.as_nanos() as u64) {
        if endpoint.poll() == 0 {
            endpoint.wait(STEP);
        }
        // Who greets is known from then on.
        while let Ok(Some(_)) = endpoint.try_recv() {}
        while let Some(message) = socket.recv() {
            let info = message.info();
            messages += 1;
            bytes += message.len() as u64;
            ends_ns = ends_ns.max(now_ns());
            if timetable.is_answered {
                if answered != Some(info.from) {
                    (socket.connect(&mut endpoint, info.from, PORT)).map_err(|error| failed(&error))?;
                    answered = Some(info.from);
                }
                // It leaves in the next round; what does not is lost like any other.
                let _ = socket.send(&message, SendOptions::default());
            }
        }
    }
    Ok(Outcome {
        bytes,
        messages,
        lost_messages: socket.statistics().superseded_here,
        seconds: timetable.seconds,
        delays: socket.histograms().latency.counts().collect(),
        ..Outcome::default()
    })
}
