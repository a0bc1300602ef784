//! What must hold in the simulated cluster at any moment, and at its end; and somebody who tries to change that.

use crate::gate::*;
use crate::world::*;
use lm_protocol::admission::*;
use std::time::Duration;

impl World {
    /// Somebody without the key: nothing of what he sends may change anything.
    pub(crate) fn strike(&mut self) {
        if self.recorded.is_empty() {
            return;
        }
        let number = self.random.below(self.recorded.len() as u64) as usize;
        let (to, from, datagram) = self.recorded[number];
        let mut bytes = datagram.as_bytes().to_vec();
        let (mut victim, mut name) = (to, self.hosts[from].address);
        let is_for_all = bytes[1] & 1 != 0;
        match self.random.below(5) {
            // As it was.
            0 => {}
            1 => {
                let bit = self.random.below(8 * bytes.len() as u64) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            2 => bytes.truncate(self.random.below(bytes.len() as u64) as usize),
            // To somebody else; a broadcast may be news to him.
            3 if !is_for_all => {
                let other = self.random.below(self.hosts.len() as u64) as usize;
                victim = other;
            }
            _ => {
                let other = self.random.below(self.hosts.len() as u64) as usize;
                if other != from {
                    name = self.hosts[other].address;
                }
            }
        }
        let Some(before) = self.hosts[victim].node.as_ref().map(fingerprint) else {
            return;
        };
        self.with(victim, |node, now, local, out| {
            node.on_datagram(now, name, &bytes, local, out);
        });
        let after = self.hosts[victim].node.as_ref().map(fingerprint).unwrap();
        assert!(
            before == after,
            "changed by {bytes:02x?} from {name}:\n{before}\n{after}"
        );
        self.attacks += 1;
    }

    /// Leases and memory.
    pub(crate) fn look(&mut self) {
        let now = self.now;
        let slack = self.setup.weather.delay_max + Duration::from_millis(10);
        let eighth = |lease: Duration| lease + lease / 8 + slack;
        for host in &self.hosts {
            let Some(node) = &host.node else { continue };
            let local_now = host.local(now);
            let usage = node.usage(local_now);
            let limits = self.setup.limits;
            assert!(
                usage.hosts <= limits.hosts && usage.listed <= limits.hosts,
                "{usage:?}"
            );
            assert!(
                usage.outgoing <= limits.outgoing && usage.waiting <= limits.waiting,
                "{usage:?}"
            );
            assert_eq!(
                usage.sessions,
                host.gate.open.len() + host.gate.aside.len(),
                "the gate and the table differ"
            );
            for (_, session) in node.sessions() {
                assert!(session.expires.since(local_now) <= LEASE, "{session:?}");
            }
            for open in host.gate.open.values() {
                let job = &self.jobs[open.job as usize];
                let gone = job.gone.map(|gone| now.since(gone.max(host.began)));
                assert!(
                    gone.is_none_or(|gone| gone <= eighth(LEASE + SILENCE_BOUND)),
                    "a session outlives its sender by {gone:?}: {job:?}"
                );
            }
            for entry in node.recv_addrs(local_now) {
                assert!(entry.expires.since(local_now) <= LIST_LEASE_MAX);
                let listed = (u32::from(entry.address) - 0x0a00_0001) as usize;
                let idle = self.hosts[listed].last_active.map(|active| now.since(active));
                assert!(
                    self.hosts[listed].is_active(now) || idle.is_some_and(|idle| idle <= eighth(LIST_LEASE)),
                    "listed, and idle for {idle:?}: {entry:?}"
                );
            }
        }
    }

    /// Nothing may be left when nobody wants anything any more.
    pub(crate) fn check_quiet(&self) {
        assert!(self.events.is_empty());
        for host in &self.hosts {
            assert!(
                host.gate.open.is_empty() && host.gate.aside.is_empty(),
                "{:?} at {}",
                host.gate,
                host.address
            );
            let node = host.node.as_ref().expect("every host came back");
            assert_eq!(node.next_deadline(), None, "{}", host.address);
            let usage = node.usage(host.local(self.now) + PROMISE);
            let rest = (
                usage.outgoing,
                usage.sessions,
                usage.waiting,
                usage.listed,
                usage.promised,
            );
            assert_eq!(rest, (0, 0, 0, 0, false), "{}", host.address);
        }
    }
}
