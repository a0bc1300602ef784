//! Flows that arrive: a bound in all and for each address, and an end by silence. No round looks at a flow whose time has not come.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use lm_dataplane::PeerId;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{RealTimePacket, RtReport};

use crate::incoming::Incoming;

/// Flows that are known at once. One more takes the place of one of the address that has most.
const FLOWS_MAX: usize = 1024;
/// Flows of one address, whatever ports it sends from. One more takes the place of that which was silent for longest.
const FLOWS_OF_ADDRESS_MAX: usize = 64;
/// A flow of which nothing came for this time is forgotten.
const SILENCE: Duration = Duration::from_secs(30);

/// A flow: where it is from, and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FlowKey {
    pub(crate) address: Ipv4Addr,
    pub(crate) peer: PeerId,
    pub(crate) key: u64,
}

/// A flow, when it was heard of last, and when it is looked at next.
#[derive(Debug)]
struct Known {
    incoming: Incoming,
    heard: Time,
    next: Time,
}

/// The flows of an endpoint's sockets.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    all: BTreeMap<FlowKey, Known>,
    next: BTreeSet<(Time, FlowKey)>,
    /// How many each address has.
    shares: BTreeSet<(usize, Ipv4Addr)>,
}

impl Flows {
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    fn of(&self, address: Ipv4Addr) -> impl Iterator<Item = (&FlowKey, &Known)> {
        let first = FlowKey {
            address,
            peer: PeerId::default(),
            key: 0,
        };
        self.all
            .range(first..)
            .take_while(move |(id, _)| id.address == address)
    }

    /// Notes how many flows an address has now.
    fn share(&mut self, address: Ipv4Addr, before: usize, now: usize) {
        self.shares.remove(&(before, address));
        if now > 0 {
            self.shares.insert((now, address));
        }
    }

    /// A packet of a flow came, which is new perhaps; whether a newer message has come.
    pub(crate) fn hear(&mut self, id: FlowKey, packet: &RealTimePacket<'_>, now: Time) -> bool {
        if let Some(known) = self.all.get_mut(&id) {
            known.heard = now;
            return known.incoming.has_overtaken(packet.message);
        }
        self.make_room(id.address);
        let others = self.of(id.address).count();
        self.share(id.address, others, others + 1);
        self.next.insert((now + SILENCE, id));
        let known = Known {
            incoming: Incoming::new(packet, now),
            heard: now,
            next: now + SILENCE,
        };
        self.all.insert(id, known);
        false
    }

    fn make_room(&mut self, address: Ipv4Addr) {
        let crowded = match self.shares.last() {
            _ if self.of(address).count() >= FLOWS_OF_ADDRESS_MAX => address,
            Some(&(_, most)) if self.all.len() >= FLOWS_MAX => most,
            _ => return,
        };
        if let Some((&oldest, _)) = self.of(crowded).min_by_key(|(_, known)| known.heard) {
            self.forget(oldest);
        }
    }

    fn forget(&mut self, id: FlowKey) {
        if let Some(known) = self.all.remove(&id) {
            self.next.remove(&(known.next, id));
            let others = self.of(id.address).count();
            self.share(id.address, others + 1, others);
        }
    }

    /// Does something with a flow, if it is known.
    pub(crate) fn with<R>(&mut self, id: FlowKey, work: impl FnOnce(&mut Incoming) -> R) -> Option<R> {
        let known = self.all.get_mut(&id)?;
        let result = work(&mut known.incoming);
        if let Some(due) = known.incoming.due().filter(|due| *due < known.next) {
            self.next.remove(&(known.next, id));
            self.next.insert((due, id));
            known.next = due;
        }
        Some(result)
    }

    /// When one is looked at.
    pub(crate) fn due(&self) -> Option<Time> {
        self.next.first().map(|(next, _)| *next)
    }

    /// Looks at the flow whose time came first, and takes the report that is due. `None`: no time has come.
    pub(crate) fn look(&mut self, now: Time) -> Option<Option<(FlowKey, RtReport)>> {
        let (next, id) = *self.next.first().filter(|(next, _)| *next <= now)?;
        let known = self.all.get_mut(&id)?;
        if known.heard + SILENCE <= now {
            self.forget(id);
            return Some(None);
        }
        let report = known.incoming.report(now).map(|report| (id, report));
        let silent = known.heard + SILENCE;
        known.next = known.incoming.due().map_or(silent, |due| due.min(silent));
        self.next.remove(&(next, id));
        self.next.insert((known.next, id));
        Some(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(address: u32, key: u64) -> FlowKey {
        FlowKey {
            address: Ipv4Addr::from_bits(address),
            peer: PeerId::default(),
            key,
        }
    }

    /// Beside a flow that is heard of once come thousands, of one address and of hundreds: it is known afterwards, and so is the newest of each
    /// address; it goes when it is silent, and so do all.
    #[test]
    fn flows_of_many_push_no_other_addresss_out_and_go_when_they_are_silent() {
        let (mut flows, packet) = (Flows::default(), RealTimePacket::default());
        let (honest, mut now) = (flow(1, 7), Time::ZERO);
        flows.hear(honest, &packet, now);
        for number in 0..20_000 {
            now += Duration::from_micros(1);
            let address = if number < 2000 { 2 } else { 2 + number as u32 % 300 };
            let new = flow(address, number);
            flows.hear(new, &packet, now);
            let most = [FLOWS_MAX, 1 + FLOWS_OF_ADDRESS_MAX][usize::from(address == 2 && number < 2000)];
            assert!(flows.len() <= most && flows.with(new, |_| ()).is_some());
            assert!(flows.with(honest, |_| ()).is_some(), "{number}");
            let shares: usize = flows.shares.iter().map(|(count, _)| count).sum();
            assert_eq!((flows.next.len(), shares), (flows.len(), flows.len()));
        }
        assert_eq!(flows.len(), FLOWS_MAX);
        // One is heard of meanwhile: the others go alone.
        flows.hear(honest, &packet, now + SILENCE / 2);
        assert!(flows.look(now + SILENCE / 2).is_none(), "no time has come");
        let looks = std::iter::from_fn(|| flows.look(now + SILENCE)).count();
        assert_eq!((looks, flows.len(), flows.shares.len()), (FLOWS_MAX, 1, 1));
        assert_eq!(flows.due(), Some(now + SILENCE / 2 + SILENCE));
        assert!(flows.look(now + SILENCE * 2).is_some() && flows.due().is_none());
        assert_eq!(flows.shares.len() + flows.len(), 0);
    }
}
