//! What became of packets on the wire.

use super::impair::ImpairmentCounters;

/// What became of packets, over both directions: on the wire, in the drivers, and in the hosts' stacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireCounters {
    /// Packets of TX rings and datagrams of sockets that hosts sent to each other.
    pub sent: u64,
    /// Packets that crossed the wire, or were given to its [`Impairments`](super::Impairments).
    pub crossed: u64,
    /// Packets that a test lost on purpose.
    pub lost: u64,
    /// Packets longer than the MTU: lost.
    pub too_long: u64,
    /// Packets from nowhere ([`Wire::inject`](super::Wire::inject)).
    pub injected: u64,
    /// Packets that reached a host.
    pub arrived: u64,
    /// Of these: packets put on RX rings.
    pub received: u64,
    /// Redirected packets that met no frame, a full RX ring, or were too long, as `XDP_STATISTICS` counts them.
    pub ring_lost: u64,
    /// Zero-copy mode: packets for which the device had no frame, or none that was long enough. No gate sees them.
    pub device_lost: u64,
    /// Redirected packets that a test lost on purpose, or whose channel went before they were on its ring.
    pub gate_lost: u64,
    /// Passed packets that no stack here takes: not UDP to the host's address, IP fragments, malformed, a wrong checksum.
    pub stack_ignored: u64,
    /// Datagrams that reached a socket.
    pub in_sockets: u64,
    /// Datagrams that met a full socket.
    pub socket_full: u64,
    /// Datagrams to a port where nobody listens.
    pub refused: u64,
}

impl WireCounters {
    /// Whether every packet sent is accounted for, with what the impairments of both directions say. True whenever nothing is
    /// between a gate and its RX ring: after [`Wire::advance`](super::Wire::advance).
    pub fn are_balanced(&self, impaired: &[ImpairmentCounters]) -> bool {
        let offered: u64 = impaired.iter().map(|counters| counters.offered).sum();
        let delivered: u64 = impaired.iter().map(|counters| counters.delivered).sum();
        impaired.iter().all(ImpairmentCounters::are_balanced)
            && self.sent == self.crossed + self.lost + self.too_long
            && self.arrived == self.crossed - offered + delivered + self.injected
            && self.arrived
                == self.received
                    + self.ring_lost
                    + self.device_lost
                    + self.gate_lost
                    + self.stack_ignored
                    + self.in_sockets
                    + self.socket_full
                    + self.refused
    }
}
