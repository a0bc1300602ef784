//! A session's rate limit: never more leaves, hardly less, and whoever sleeps wakes in time.
#![cfg(test)]

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lm_protocol::geometry::Wire as WireMode;

use super::bed::{Bed, BedConfig, ROUND_NS, noise};
use super::transfer::Dice;
use super::zero_copy;
use crate::completion::{LoanError, RecvError, SendError};
use crate::connect::ConnectOptions;
use crate::outbound::Outbound;
use crate::simnic::ZeroCopy;

/// A full packet at an MTU of 1500, in bytes.
const FULL: u64 = 1514;

/// What leaves host 0, apart from control packets.
struct Meter {
    bytes: Arc<AtomicU64>,
    seen: u64,
    rate: u64,
    burst_bytes: u64,
    /// What left beyond `rate · t`, in billionths of a bit, for the `t` since it was last zero: the most of all `t`.
    ahead: u128,
    at_ns: u64,
}

impl Meter {
    /// `loss` packets of a million are lost on their way to host 1.
    fn new(bed: &Bed, rate: u64, loss: u64) -> Meter {
        let bytes = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&bytes);
        let mut dice = Dice(7);
        bed.wire.set_filter(move |from, packet| {
            // UDP to the data port, DATA or EAGER; or a fragment of a datagram.
            // All but the flag "don't fragment".
            let is_fragment = packet.len() > 34 && (packet[20] & 0x3f, packet[21]) != (0, 0);
            let is_data = packet.len() > 66
                && packet[23] == 17
                && packet[36..38] == [0x1c, 0x00]
                && matches!(packet[42], 0x21 | 0x22);
            if from != 0 || !(is_fragment || is_data) {
                return true;
            }
            // Relaxed: one thread.
            counted.fetch_add(packet.len() as u64, Ordering::Relaxed);
            dice.roll(1_000_000) >= loss
        });
        Meter {
            bytes,
            seen: 0,
            rate,
            burst_bytes: (rate / 1000 / 8 / FULL).clamp(4, 256) * FULL,
            ahead: 0,
            at_ns: bed.now_ns,
        }
    }

    /// Over no time that ends now has more left than rate and burst allow.
    fn look(&mut self, now_ns: u64) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        let brought = u128::from(self.rate) * u128::from(now_ns - self.at_ns);
        self.ahead = self.ahead.saturating_sub(brought) + u128::from(bytes - self.seen) * 8_000_000_000;
        (self.seen, self.at_ns) = (bytes, now_ns);
        // A small message is counted when it is handed over, and leaves in the round after.
        let most = u128::from(self.burst_bytes + FULL) * 8_000_000_000
            + u128::from(self.rate) * u128::from(ROUND_NS);
        assert!(self.ahead <= most, "{} bits ahead", self.ahead / 1_000_000_000);
    }
}

/// Sends for `time_ns` and gives the part of the rate that was used. A `sleeper` does nothing until the next departure once a
/// round found no work, as an endpoint that sleeps.
fn stream(rate: u64, wire: WireMode, loss: u64, lens: &[usize], sleeper: bool, time_ns: u64) -> f64 {
    let bed = Bed::new(&BedConfig::default());
    stream_on(bed, rate, wire, loss, lens, sleeper, time_ns)
}

fn stream_on(
    mut bed: Bed,
    rate: u64,
    wire: WireMode,
    loss: u64,
    lens: &[usize],
    sleeper: bool,
    time_ns: u64,
) -> f64 {
    let options = ConnectOptions {
        wire,
        max_message_len: 60_000,
        rate: NonZeroU64::new(rate),
        ..ConnectOptions::default()
    };
    let peer = bed.connect(0, &options).expect("a session");
    let mut meter = Meter::new(&bed, rate, loss);
    let (start_ns, mut sent, mut slept) = (bed.now_ns, 0, 0);
    let payloads: Vec<Vec<u8>> = (0..).zip(lens).map(|(seed, &len)| noise(seed, len)).collect();
    while bed.now_ns - start_ns < time_ns {
        // A region that is loaned in vain and given back would be work.
        while bed.hosts[0]
            .peers
            .at(peer.index)
            .outbound
            .as_ref()
            .is_some_and(Outbound::has_room)
        {
            match bed.try_send(0, peer, &payloads[sent % payloads.len()], 0) {
                Ok(_) => sent += 1,
                Err(SendError::WouldBlock | SendError::Loan(LoanError::WouldBlock)) => break,
                Err(error) => panic!("{error}"),
            }
        }
        // As `Bed::round`, but only the sender's own work keeps it awake.
        bed.now_ns += ROUND_NS;
        bed.wire.advance(bed.now_ns);
        let work = bed.poll(0);
        bed.poll(1);
        // What has just left crosses now, and not when somebody wakes.
        bed.wire.advance(bed.now_ns);
        meter.look(bed.now_ns);
        loop {
            match bed.hosts[1].take_message() {
                Ok(None) => break,
                Ok(Some(_)) | Err(RecvError::Incomplete { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        bed.hosts[0].told.completions().clear();
        if sleeper && work == 0 {
            let next_ns = bed.hosts[0].next_departure_ns();
            slept += u64::from(next_ns.is_some());
            // 10 ms is the longest sleep of an endpoint.
            let wake_ns = next_ns.unwrap_or(bed.now_ns + 10_000_000);
            bed.now_ns = bed.now_ns.max(wake_ns.saturating_sub(ROUND_NS));
        }
    }
    assert!(!sleeper || slept > 10, "slept {slept} times");
    meter.seen as f64 * 8.0 * 1e9 / ((bed.now_ns - start_ns) as f64 * rate as f64)
}

#[test]
fn a_stream_keeps_to_its_rate_and_uses_it() {
    for (rate, time_ns) in [
        (20_000_000, 600_000_000),
        (1_000_000_000, 40_000_000),
        (2_500_000_000, 40_000_000),
    ] {
        for loss in [0, 20_000] {
            let used = stream(rate, WireMode::Lm, loss, &[60_000, 3000, 50_000], false, time_ns);
            assert!(used >= 0.95, "{used} of {rate} at a loss of {loss} ppm");
        }
    }
}

/// At these rates a packet leaves once in many rounds.
#[test]
fn a_sleeper_wakes_for_its_next_packet() {
    for rate in [20_000_000, 100_000_000] {
        let used = stream(rate, WireMode::Lm, 0, &[60_000, 3000, 50_000], true, 600_000_000);
        assert!(used >= 0.95, "{used} of {rate}");
    }
}

/// Small messages share the limit with fragments, and neither starves the other.
#[test]
fn small_messages_count() {
    for lens in [&[1000][..], &[1448], &[60_000, 1448, 1448]] {
        let used = stream(500_000_000, WireMode::Lm, 0, lens, false, 40_000_000);
        assert!(used >= 0.95, "{used} with messages of {lens:?}");
    }
}

/// To a device in zero-copy mode repetitions go the way of small messages. Where a fifth is lost, the sender waits for requests.
#[test]
fn repetitions_that_go_apart_count() {
    for (loss, least) in [(20_000, 0.95), (200_000, 0.6)] {
        let bed = Bed::new(&zero_copy::config(ZeroCopy::default()));
        let used = stream_on(
            bed,
            100_000_000,
            WireMode::Lm,
            loss,
            &[60_000],
            false,
            200_000_000,
        );
        assert!(used >= least, "{used} at a loss of {loss} ppm");
    }
}

#[test]
fn ip_fragments_keep_to_the_rate() {
    let used = stream(100_000_000, WireMode::IpFrag, 0, &[60_000], true, 300_000_000);
    assert!(used >= 0.95, "{used}");
}

#[test]
fn no_limit_has_no_departure() {
    let mut bed = Bed::new(&BedConfig::default());
    let peer = bed.session(0, WireMode::Lm, 60_000);
    bed.try_send(0, peer, &noise(1, 60_000), 0).expect("room");
    assert_eq!(bed.hosts[0].next_departure_ns(), None);
    drop(bed.recv(1));
}
