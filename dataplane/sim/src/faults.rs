//! What a test does to the wire and to the kernel's end: packets lost, changed, added.

use std::fmt;
use std::net::SocketAddrV4;

use lm_ebpf::Verdict;

use super::host::HostGuard;
use super::impair::{Impairments, Link, Via, foreign::Ends};
use super::plug::HOSTS_MAX;
use super::{Shared, Wire, lock};

/// Looks at a packet that host number `.0` sends, may change it, and says whether it crosses.
type Filter = Box<dyn FnMut(usize, &mut Vec<u8>) -> bool + Send>;

/// Sees each packet that a host sends, before anything happens to it: the time, the host's number, the receive queue that it is for
/// (`None`: a datagram that arrives put together again) and its bytes.
type Watch = Box<dyn FnMut(u64, usize, Option<u32>, &[u8]) + Send>;

/// What is to go wrong, and who looks on.
pub(super) struct Faults {
    filter: Option<Filter>,
    watch: Option<Watch>,
    drop_next: [u32; HOSTS_MAX],
    /// Fragments to lose behind the gate, for each host that receives: logged, but never on the RX ring.
    pub(super) lose_behind_gate: [u32; HOSTS_MAX],
    /// Channels that cannot be opened, for each host.
    pub(super) refuse_channels: [u32; HOSTS_MAX],
}

impl Default for Faults {
    fn default() -> Self {
        Faults {
            filter: None,
            watch: None,
            drop_next: [0; HOSTS_MAX],
            lose_behind_gate: [0; HOSTS_MAX],
            refuse_channels: [0; HOSTS_MAX],
        }
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults")
            .field("filter", &self.filter.is_some())
            .field("drop_next", &self.drop_next)
            .finish_non_exhaustive()
    }
}

impl Wire {
    /// Loses the next `count` packets that host number `from` sends (in the order given to [`super::wire`]).
    pub fn drop_next(&self, from: usize, count: u32) {
        lock(&self.0).faults.drop_next[from] = count;
    }

    /// Shows every packet to `filter`, with the number of the host that sends it: the filter may change it, and it
    /// crosses when the filter says `true`. Replaces an earlier filter. The filter must not use the wire itself.
    pub fn set_filter(&self, filter: impl FnMut(usize, &mut Vec<u8>) -> bool + Send + 'static) {
        lock(&self.0).faults.filter = Some(Box::new(filter));
    }

    /// Lets every packet cross unseen again.
    pub fn clear_filter(&self) {
        lock(&self.0).faults.filter = None;
    }

    /// Loses the next `count` fragments that the gate of host `to` redirects: logged, not received, not counted.
    pub fn lose_behind_gate(&self, to: usize, count: u32) {
        lock(&self.0).faults.lose_behind_gate[to] = count;
    }

    /// The next `count` attempts of a host to open a channel fail.
    pub fn refuse_channels(&self, host: usize, count: u32) {
        lock(&self.0).faults.refuse_channels[host] = count;
    }

    /// A packet from nowhere arrives at a queue of host number `to`: forged, repeated, foreign. No filter sees it.
    pub fn inject(&self, to: usize, queue: u32, packet: &[u8]) {
        let mut shared = lock(&self.0);
        shared.packet.clear();
        shared.packet.extend_from_slice(packet);
        shared.counters.injected += 1;
        // Between two hosts it comes by the other's link.
        let from = (shared.hosts.len() == 2).then(|| 1 - to);
        shared.arrive(to, from, Via::Queue(queue));
        shared.run_written();
    }
}

impl HostGuard<'_> {
    /// Whether the channel that is being opened is one of those that fail.
    pub(super) fn refuses_channel(&mut self) -> bool {
        let (host, faults) = (self.host, &mut self.shared.faults);
        let refused = faults.refuse_channels[host] > 0;
        faults.refuse_channels[host] -= u32::from(refused);
        refused
    }
}

impl Shared {
    pub(super) fn impair(&mut self, from: usize, impairments: Impairments) {
        if let Some(link) = &mut self.links[from] {
            link.change(impairments);
            return;
        }
        let address = |host: usize| {
            let config = &self.hosts[host].config;
            SocketAddrV4::new(config.ip, config.port)
        };
        let ends = Ends {
            from: address(from),
            // The foreign packets of a switch's other hosts are for the first.
            to: address(usize::from(from == 0)),
            mtu: self.config.mtu,
        };
        self.links[from] = Some(Box::new(Link::new(impairments, ends)));
    }

    /// Whether a packet that the gate redirected is one to be lost there.
    pub(super) fn loses_behind_gate(&mut self, to: usize, verdict: Verdict) -> bool {
        let left = &mut self.faults.lose_behind_gate[to];
        let loses = verdict == Verdict::RedirectLanding && *left > 0;
        *left -= u32::from(loses);
        self.counters.gate_lost += u64::from(loses);
        loses
    }

    /// Shows `self.packet`, which host `from` sends, to whoever looks on.
    pub(super) fn show(&mut self, from: usize, via: Via) {
        if let Some(watch) = &mut self.faults.watch {
            let queue = match via {
                Via::Queue(queue) => Some(queue),
                Via::Reassembled => None,
            };
            watch(self.now_ns, from, queue, &self.packet);
        }
    }

    /// Whether `self.packet` of host `from` crosses the wire; a lost one is counted.
    pub(super) fn crosses(&mut self, from: usize) -> bool {
        let dropped = &mut self.faults.drop_next[from];
        let crosses = if self.hosts.iter().any(|host| host.is_down) {
            false
        } else if *dropped > 0 {
            *dropped -= 1;
            false
        } else {
            match &mut self.faults.filter {
                Some(filter) => filter(from, &mut self.packet),
                None => true,
            }
        };
        match crosses {
            true => self.counters.crossed += 1,
            false => self.counters.lost += 1,
        }
        crosses
    }
}

impl Wire {
    /// Shows every packet that a host sends to `watch`, which must not use the wire itself.
    pub fn set_watch(&self, watch: impl FnMut(u64, usize, Option<u32>, &[u8]) + Send + 'static) {
        lock(&self.0).faults.watch = Some(Box::new(watch));
    }

    /// Puts a descriptor on a channel's RX ring that no packet belongs to.
    pub fn push_descriptor(&self, host: usize, queue: u32, descriptor: lm_dataplane::ring::Descriptor) {
        let mut shared = lock(&self.0);
        let channel = shared.hosts[host].channels[queue as usize].as_mut();
        let rx = &mut channel.expect("an open channel").rx;
        assert!(rx.free(1) > 0);
        rx.write(0, descriptor);
        rx.submit(1);
    }

    /// Puts a completion on a channel's ring that no packet belongs to.
    pub fn push_completion(&self, host: usize, queue: u32, address: u64) {
        let mut shared = lock(&self.0);
        let channel = shared.hosts[host].channels[queue as usize].as_mut();
        let completion = &mut channel.expect("an open channel").completion;
        assert!(completion.free(1) > 0);
        completion.write(0, address);
        completion.submit(1);
    }

    /// The kernel, or the device, of a channel writes one byte where it may. `false`: it may not.
    pub fn rewrite(&self, host: usize, queue: u32, address: u64, byte: u8) -> bool {
        let mut shared = lock(&self.0);
        let frame_len = shared.config.mtu + super::datagram::ETHERNET_LEN as u32;
        let host = &mut shared.hosts[host];
        let channel = host.channels[queue as usize].as_mut().expect("an open channel");
        let config = &host.config;
        channel.rewrite((&config.mapping, config.chunk_len, frame_len), address, byte)
    }

    /// A channel's drop counters, to be changed.
    pub fn with_statistics(
        &self,
        host: usize,
        queue: u32,
        change: impl FnOnce(&mut lm_dataplane::xsk::XdpStatistics),
    ) {
        let mut shared = lock(&self.0);
        let channel = shared.hosts[host].channels[queue as usize].as_mut();
        change(&mut channel.expect("an open channel").statistics);
    }
}
