//! A switch as slow as a real one: the port towards the receiver has a rate and a buffer, and a cable comes from each
//! host.
//!
//! ```text
//!   lm0 ── veth ── portN │ cableN: TBF on an IFB ─▶ bridge ─▶ port2: TBF │ ── veth ── lm0 of the receiver
//! ```
//!
//! All of it stands behind the hosts' interfaces: what AF_XDP sends passes no queueing discipline of its own one. A
//! token bucket (TBF) keeps a fixed rate. The port's buffer is a FIFO that drops its tail and knows no classes. A cable
//! takes its time for each frame, and keeps so many that it loses none of a burst. What the port passes is measured
//! ([`Bed::capacity`]): it is a little less than its rate says.

use std::net::UdpSocket;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lm_measure::rate::BitRate;
use lm_measure::statistics::Summary;
use rustix::process::setpriority_process;
use serde_json::Value;

use super::{Bed, BedConfig, Host, ip, switch, until};

/// Preamble, checksum and gap of a frame on the wire; `tc` counts none of them.
const ON_WIRE_LEN: u64 = 24;
/// What a bucket holds beside its tokens. With 1600 bytes in it, it passes 4 % less than its rate, with four frames 0.7
/// %.
const BURST_FRAMES: u64 = 4;
/// Frames that a cable keeps.
const CABLE_FRAMES: u32 = 1000;
/// Part of its rate that a port has to pass.
const PASSED_LEAST: f64 = 0.98;
/// The flood that fills a port, of its rate.
const FLOOD: f64 = 1.5;
/// Looks at what passes in a flood, and how far apart they are.
const LOOKS: u32 = 8;
const LOOK: Duration = Duration::from_millis(100);
/// How long what a flood left in the buffers may take.
const DRAIN: Duration = Duration::from_secs(5);
/// Of a datagram over IPv4.
const HEADERS_LEN: u16 = 28;
/// Discard (RFC 863).
const DISCARD: u16 = 9;

/// The switch's port towards the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// What it sends at most, everything that is on the wire counted.
    pub rate: BitRate,
    /// Frames of full length that wait in it at most.
    pub frames: u32,
}

impl FromStr for Port {
    type Err = String;

    fn from_str(text: &str) -> Result<Port, String> {
        let words = text.split_once('/');
        let (rate, frames) = words.ok_or("write a rate and a buffer in frames, like 100Mbit/32")?;
        let frames = frames
            .parse()
            .ok()
            .filter(|frames| (1..=100_000).contains(frames));
        Ok(Port {
            rate: rate.parse()?,
            frames: frames.ok_or("a port's buffer has 1 to 100000 frames, as in 100Mbit/32")?,
        })
    }
}

/// The longest frame of a link as `tc` counts it.
fn frame_len(mtu: u16) -> u64 {
    u64::from(mtu) + 14
}

/// Frames of that length that a rate brings in a second.
fn frames_per_s(BitRate(rate): BitRate, mtu: u16) -> f64 {
    rate as f64 / (8 * (frame_len(mtu) + ON_WIRE_LEN)) as f64
}

/// Makes links slow whose ports are there.
pub(super) fn configure(switch: &Host, hosts: &[Host], config: &BedConfig) -> Result<()> {
    let frame = frame_len(config.mtu);
    let bucket = |device: &str, BitRate(rate), frames: u32| {
        let burst = BURST_FRAMES * (frame + ON_WIRE_LEN + 12);
        format!(
            "qdisc add dev {device} root tbf rate {rate} burst {burst} limit {} overhead {ON_WIRE_LEN}",
            u64::from(frames) * frame
        )
    };
    let mut lines = Vec::new();
    if let Some(Port { rate, frames }) = config.port {
        lines.push(bucket(&switch::port_of(&hosts[1], 0), rate, frames));
    }
    if let Some(rate) = config.cable {
        let mut devices = Vec::new();
        for host in hosts {
            let port = switch::port_of(host, 0);
            let cable = port.replace("port", "cable");
            devices.push(format!("link add {cable} type ifb"));
            devices.push(format!("link set {cable} up"));
            lines.push(bucket(&cable, rate, CABLE_FRAMES));
            lines.push(format!("qdisc add dev {port} ingress"));
            lines.push(format!(
                "filter add dev {port} parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev \
                    {cable}"
            ));
        }
        switch
            .ip(&devices)
            .context("no cables; they need a kernel with IFB (modprobe ifb)")?;
    }
    if lines.is_empty() {
        return Ok(());
    }
    ip::batch_of("tc", Some(switch.name()), &lines).context(
        "links cannot be made slow; that needs a kernel with TBF and redirection \
         (modprobe -a sch_tbf sch_ingress cls_u32 act_mirred)",
    )
}

impl Bed {
    /// Frames of full length that the port ([`BedConfig::port`]) passes in a second: what went out of it while all
    /// senders together offered half as much again. Waits until the buffers are empty.
    ///
    /// # Errors
    /// No port, or less than it should pass: what is measured there says more about this machine than about a port.
    pub fn capacity(&self) -> Result<f64> {
        let port = self.switch().zip(self.config.port);
        let (switch, port) = port.context("this bed's switch has no slow port")?;
        let ideal = frames_per_s(port.rate, self.config.mtu);
        let until = Instant::now() + LOOK * (LOOKS + 1);
        let sink = self
            .right()
            .enter(|| Ok(UdpSocket::bind((self.right().address(), DISCARD))?))?;
        let senders = self.senders();
        let each = ideal * FLOOD / senders.len() as f64;
        let passed = std::thread::scope(|scope| {
            let floods: Vec<_> = (senders.iter())
                .map(|host| scope.spawn(|| self.flood(host, each, until)))
                .collect();
            let passed = switch.enter(|| rates(&switch::port_of(self.right(), 0)));
            for flood in floods {
                flood.join().expect("a flood does not panic")?;
            }
            passed
        })?;
        drop(sink);
        self.drained()?;
        let passed = Summary::of(&passed).context("nothing was measured")?.median;
        ensure!(
            passed >= PASSED_LEAST * ideal,
            "the port passes {passed:.0} of {ideal:.0} frames a second: leave this machine alone, or take a lower rate"
        );
        Ok(passed)
    }

    /// Sends so many datagrams a second, as long as a packet; those that were due while this host had no processor at
    /// once.
    fn flood(&self, host: &Host, rate: f64, until: Instant) -> Result<()> {
        // Of this thread alone: like a host of its own, it waits for no other program.
        setpriority_process(None, -20)?;
        let socket = host.enter(|| Ok(UdpSocket::bind((host.address(), 0))?))?;
        socket.connect((self.right().address(), DISCARD))?;
        let datagram = vec![0; usize::from(self.config.mtu - HEADERS_LEN)];
        let (begun, mut sent) = (Instant::now(), 0);
        while Instant::now() < until {
            let due = (begun.elapsed().as_secs_f64() * rate) as u64;
            while sent < due {
                // What is refused is a flood's own.
                let _refused = socket.send(&datagram);
                sent += 1;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits until nothing is left in port and cables.
    ///
    /// # Errors
    /// No switch, or frames still come into it.
    pub fn drained(&self) -> Result<()> {
        until("no frame waits in the switch", DRAIN, || {
            Ok(self.disciplines()?.iter().all(|one| one["qlen"] == 0))
        })
    }

    /// The buckets of port and cables as `tc -s -j` shows them.
    pub fn disciplines(&self) -> Result<Vec<Value>> {
        let switch = self.switch().context("this bed has no switch")?;
        let mut tc = ip::iproute2("tc");
        tc.args(["-n", switch.name(), "-s", "-j", "qdisc", "show"]);
        let output = tc.output().context("cannot start `tc`; install iproute2")?;
        let all: Vec<Value> = serde_json::from_slice(&output.stdout).context("tc -s -j shows nothing")?;
        Ok(all.into_iter().filter(|one| one["kind"] == "tbf").collect())
    }
}

/// What a port sends in a second, look by look; before the first one it fills.
fn rates(port: &str) -> Result<Vec<f64>> {
    let file = format!("/sys/class/net/{port}/statistics/tx_packets");
    let look = |_| -> Result<(Instant, f64)> {
        std::thread::sleep(LOOK);
        let count = std::fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        Ok((Instant::now(), count.trim().parse()?))
    };
    let looks = (0..=LOOKS).map(look).collect::<Result<Vec<_>>>()?;
    let rate = |pair: &[(Instant, f64)]| (pair[1].1 - pair[0].1) / (pair[1].0 - pair[0].0).as_secs_f64();
    Ok(looks.windows(2).map(rate).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_a_rate_and_a_buffer() {
        let port = "100Mbit/32".parse::<Port>().unwrap();
        assert_eq!((port.rate, port.frames), (BitRate(100_000_000), 32));
        for (wrong, why) in [
            ("100Mbit", "like 100Mbit/32"),
            ("100/32", "like 500Mbit"),
            ("0Mbit/32", "like 500Mbit"),
            ("100Mbit/0", "1 to 100000 frames"),
            ("100Mbit/-1", "1 to 100000 frames"),
            ("100Mbit/32K", "1 to 100000 frames"),
            ("100Mbit/", "1 to 100000 frames"),
        ] {
            let error = wrong.parse::<Port>().unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }

    /// SS-RTUDP, table 4: 1516 bytes are 1538 on the wire, of which 8127 a second are 100 Mbit/s.
    #[test]
    fn a_frame_takes_more_than_its_length() {
        assert_eq!(frames_per_s(BitRate(100_000_000), 1500).floor(), 8127.0);
    }
}
