//! What takes time: a delay line behind a token bucket, for one direction. No clock and no I/O: times are arguments.

use std::collections::VecDeque;
use std::time::Duration;

use lm_measure::rate::BitRate;

/// Packets on their way, in the order in which they came.
#[derive(Debug)]
pub(super) struct Line<P> {
    /// When each is due, in nanoseconds.
    waiting: VecDeque<(u64, P)>,
    capacity: usize,
    delay_ns: u64,
    bucket: Option<Bucket>,
    /// Packets that found the line full.
    pub(super) full: u64,
}

/// A token bucket, kept as the time at which it would be full again (the *generic cell rate algorithm*).
#[derive(Debug)]
struct Bucket {
    bits_per_s: u64,
    /// How long the line may send at full speed, as the time that a full bucket pays for.
    depth_ns: u64,
    full_at_ns: u64,
}

impl Bucket {
    /// When a packet of this length, there at `arrival_ns`, may leave.
    fn departure_ns(&mut self, arrival_ns: u64, packet_len: usize) -> u64 {
        let cost_ns = packet_len as u64 * 8 * 1_000_000_000 / self.bits_per_s;
        self.full_at_ns = self.full_at_ns.max(arrival_ns) + cost_ns;
        arrival_ns.max(self.full_at_ns.saturating_sub(self.depth_ns))
    }
}

impl<P> Line<P> {
    /// A line with room for `capacity` packets. Where there is a rate, `burst_len` bytes may pass at once.
    pub(super) fn new(capacity: usize, delay: Duration, rate: Option<BitRate>, burst_len: u64) -> Line<P> {
        Line {
            waiting: VecDeque::with_capacity(capacity),
            capacity,
            delay_ns: delay.as_nanos() as u64,
            bucket: rate.map(|BitRate(bits_per_s)| Bucket {
                bits_per_s,
                depth_ns: burst_len * 8 * 1_000_000_000 / bits_per_s,
                full_at_ns: 0,
            }),
            full: 0,
        }
    }

    /// Puts a packet on the line, if there is room and `store` takes it.
    pub(super) fn enter(&mut self, arrival_ns: u64, packet_len: usize, store: impl FnOnce() -> Option<P>) {
        let has_room = self.waiting.len() < self.capacity;
        let Some(packet) = has_room.then(store).flatten() else {
            self.full += 1;
            return;
        };
        let bucket = self.bucket.as_mut();
        let departure_ns = bucket.map_or(arrival_ns, |bucket| bucket.departure_ns(arrival_ns, packet_len));
        self.waiting.push_back((departure_ns + self.delay_ns, packet));
    }

    /// The oldest packet, when its time has come.
    pub(super) fn due(&self, now_ns: u64) -> Option<&P> {
        let oldest = self.waiting.front();
        oldest
            .filter(|(due_ns, _)| *due_ns <= now_ns)
            .map(|(_, packet)| packet)
    }

    /// Takes the oldest packet off the line.
    pub(super) fn leave(&mut self) {
        self.waiting.pop_front();
    }

    /// When the oldest packet is due.
    pub(super) fn next_ns(&self) -> Option<u64> {
        self.waiting.front().map(|(due_ns, _)| *due_ns)
    }

    /// Packets on the line.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn departures(line: &mut Line<u32>) -> Vec<(u32, u64)> {
        let mut left = Vec::new();
        while let Some(due_ns) = line.next_ns() {
            assert!(line.due(due_ns - 1).is_none(), "too early");
            left.push((*line.due(due_ns).unwrap(), due_ns));
            line.leave();
        }
        left
    }

    #[test]
    fn a_delay_is_added_to_each_arrival() {
        let mut line = Line::new(10, Duration::from_micros(5), None, 0);
        line.enter(100, 1000, || Some(1));
        line.enter(150, 1000, || Some(2));
        assert_eq!(departures(&mut line), [(1, 5100), (2, 5150)]);
    }

    #[test]
    fn a_rate_spaces_packets_and_a_pause_fills_the_bucket() {
        // 1000 bytes at 8 Gbit/s take 1000 ns; the bucket holds one such packet.
        let mut line = Line::new(10, Duration::ZERO, Some(BitRate(8_000_000_000)), 1000);
        for packet in 0..3 {
            line.enter(10_000, 1000, || Some(packet));
        }
        line.enter(20_000, 1000, || Some(3));
        assert_eq!(
            departures(&mut line),
            [(0, 10_000), (1, 11_000), (2, 12_000), (3, 20_000)]
        );
    }

    #[test]
    fn a_full_line_drops_and_counts() {
        let mut line = Line::new(2, Duration::from_micros(5), None, 0);
        for packet in 0..4 {
            line.enter(1, 100, || Some(packet));
        }
        line.enter(1, 100, || None);
        assert_eq!((line.len(), line.full), (2, 3));
        assert_eq!(departures(&mut line), [(0, 5001), (1, 5001)]);
    }
}
