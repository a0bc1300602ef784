//! A link that is not perfect: loss, duplication, reordering, corruption, foreign packets and delay, all from one seed.
//!
//! [`Impairments`] says what is to happen to the packets of one direction, `Link` does it. Each kind of impairment draws
//! from a random stream of its own, so that switching one off leaves what the others do as it was. There is no clock
//! and no order of a hash table in it: the same packets at the same virtual times have the same fate.
//!
//! ```text
//!  offered ─┬─ lost: at random, in a burst, by the pattern
//!           ├─ held: delayed, or until later packets have overtaken it ──┐
//!           ├─ duplicated: the copy at once, or held ────────────────────┤
//!           └────────────────────────────────────────────────────────────┴─▶ delivered
//!  injected ───────────────────────────────────────────────────────────────▶ delivered
//! ```
//! Corruption changes what is delivered, not how much. What happens behind the wire, in the receiver's kernel (no fill entry,
//! a full RX ring), is drawn here too, for each packet delivered, and done by the simulated NIC.

pub mod foreign;

use std::collections::{BTreeMap, VecDeque};

use lm_protocol::wire::lm::{TYPE_DATA, VERSION};

use super::datagram::{ETHERNET_LEN, HEADERS_LEN};
use foreign::Ends;

/// Parts per million: a certainty.
pub const ALWAYS_PPM: u32 = 1_000_000;

/// Packets that one direction holds back at most; beyond that a packet is delivered at once.
const HELD_MAX: usize = 4096;

/// Ethernet, IPv4, UDP and LM headers.
const LM_HEADERS_LEN: usize = HEADERS_LEN + lm_protocol::wire::lm::HEADER_LEN;

/// What is to happen to the packets of one direction. Probabilities are in parts per million and count for each packet;
/// the default is a perfect link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Impairments {
    /// What all random choices come from.
    pub seed: u64,
    /// Loss of single packets, independent of each other.
    pub loss_ppm: u32,
    /// Loss in bursts.
    pub bursts: Bursts,
    /// Loss by a fixed pattern.
    pub pattern: Pattern,
    /// A packet arrives twice.
    pub duplicate_ppm: u32,
    /// The second of them comes up to so many nanoseconds later; 0: right behind the first.
    pub duplicate_delay_max_ns: u64,
    /// A packet is held back while others overtake it.
    pub reorder_ppm: u32,
    /// So many overtake it, at least 1; 0: only time releases it.
    pub reorder_packets_max: u32,
    /// It is released after so many nanoseconds at the latest (drawn between 0 and this), also when nothing overtook it.
    pub reorder_hold_max_ns: u64,
    /// What every packet takes to cross, in nanoseconds.
    pub delay_ns: u64,
    /// So many nanoseconds more, at random; packets overtake each other then.
    pub jitter_ns: u64,
    /// Some of a packet's bytes are changed.
    pub corrupt_ppm: u32,
    /// Which bytes.
    pub corrupt: Corrupt,
    /// A packet that nobody here sent arrives before an honest one: noise, ARP, other ports, forged LM packets.
    pub inject_ppm: u32,
    /// A packet for an XSK finds no fill entry, although there are some.
    pub fill_empty_ppm: u32,
    /// A packet for an XSK finds its RX ring full, although it is not.
    pub rx_full_ppm: u32,
}

/// Loss in bursts: the model of Gilbert and Elliott, a link with a good and a bad state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bursts {
    /// From good to bad.
    pub begin_ppm: u32,
    /// From bad to good: a burst lasts 1,000,000 / `end_ppm` packets on average.
    pub end_ppm: u32,
    /// Loss while the link is bad; in the good state nothing is lost this way.
    pub loss_ppm: u32,
}

/// Which packets are lost by rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pattern {
    /// None.
    #[default]
    None,
    /// Of each `count` consecutive packets the one at `at`, from 0.
    Every {
        /// At least 1.
        count: u64,
        /// Below `count`.
        at: u64,
    },
    /// The first packet of a run: of several that one wake-up sends. With this probability, so that repetitions get through.
    FirstOfRun {
        /// For each run.
        ppm: u32,
    },
    /// The last packet of a run, as above.
    LastOfRun {
        /// For each run.
        ppm: u32,
    },
}

/// Which bytes corruption may change: one to four of them, each in one bit or altogether.
///
/// A NIC drops frames whose FCS is wrong, so on a real link all of this is rare. It is what memory on the way does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Corrupt {
    /// Any byte of the frame, from the Ethernet header on.
    #[default]
    Anything,
    /// Headers of fragments, from Ethernet to the session's key or, where these are IP fragments, to IP's length: all that
    /// can be noticed without a digest. What follows says which fragment it is, and another one is as plausible.
    FragmentHeaders,
}

/// What became of the packets of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImpairmentCounters {
    /// Packets given to the link.
    pub offered: u64,
    /// Copies made of them.
    pub duplicated: u64,
    /// Foreign packets added.
    pub injected: u64,
    /// Packets that came out.
    pub delivered: u64,
    /// Lost singly.
    pub lost_random: u64,
    /// Lost in a burst.
    pub lost_burst: u64,
    /// Lost by the pattern.
    pub lost_pattern: u64,
    /// In the link now.
    pub held: u64,
    /// Changed.
    pub corrupted: u64,
    /// Held back to be overtaken.
    pub reordered: u64,
    /// Delayed.
    pub delayed: u64,
    /// Packets delivered for which the fill ring was to look empty. (They count here also when they needed no entry.)
    pub fill_empty: u64,
    /// The same for a full RX ring.
    pub rx_full: u64,
}

impl ImpairmentCounters {
    /// All losses.
    pub fn lost(&self) -> u64 {
        self.lost_random + self.lost_burst + self.lost_pattern
    }

    /// Whether every packet is accounted for: offered + duplicated + injected = delivered + lost + held.
    pub fn are_balanced(&self) -> bool {
        self.offered + self.duplicated + self.injected == self.delivered + self.lost() + self.held
    }
}

/// Random numbers, repeatable from a seed (splitmix64).
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64, stream: u64) -> Dice {
        let mut mixed = Dice(seed);
        Dice(mixed.number() ^ stream.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    pub(super) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `sides`, which is not 0.
    pub(super) fn below(&mut self, sides: u64) -> u64 {
        ((u128::from(self.number()) * u128::from(sides)) >> 64) as u64
    }

    /// Whether something of that probability happens. What never happens draws nothing.
    fn hits(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.below(u64::from(ALWAYS_PPM)) < u64::from(ppm)
    }
}

/// The random streams, one for each kind.
#[derive(Clone, Debug)]
struct Streams {
    loss: Dice,
    burst: Dice,
    pattern: Dice,
    duplicate: Dice,
    reorder: Dice,
    jitter: Dice,
    corrupt: Dice,
    inject: Dice,
    arrival: Dice,
}

impl Streams {
    fn new(seed: u64) -> Streams {
        let mut number = 0;
        let mut stream = || {
            number += 1;
            Dice::new(seed, number)
        };
        Streams {
            loss: stream(),
            burst: stream(),
            pattern: stream(),
            duplicate: stream(),
            reorder: stream(),
            jitter: stream(),
            corrupt: stream(),
            inject: stream(),
            arrival: stream(),
        }
    }
}

/// How a packet reaches the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// On a receive queue.
    Queue(u32),
    /// As a datagram longer than the MTU, put together again.
    Reassembled,
}

/// Where a packet stands among those that one wake-up sends; alone it is neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Nothing was sent before it.
    pub first: bool,
    /// Nothing is sent after it.
    pub last: bool,
}

/// A packet that comes out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handed {
    /// From its Ethernet header on.
    pub packet: Vec<u8>,
    /// Where it arrives.
    pub via: Via,
}

/// What is to happen to a delivered packet in the receiver's kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrival {
    /// No fill entry is found.
    pub fill_empty: bool,
    /// The RX ring has no room.
    pub rx_full: bool,
}

/// Releases a held packet: virtual time first, then the order in which they were held.
type Key = (u64, u64);

/// One direction of the wire.
#[derive(Debug)]
pub struct Link {
    what: Impairments,
    streams: Streams,
    ends: Ends,
    is_bad: bool,
    held: BTreeMap<Key, Handed>,
    /// Held packets that others overtake: when so many were offered they are released, whatever the time.
    overtaken: Vec<(u64, Key)>,
    holds: u64,
    /// Memory of packets delivered, to be used again.
    spare: Vec<Vec<u8>>,
    counters: ImpairmentCounters,
}

impl Link {
    /// A direction with nothing under way.
    pub fn new(what: Impairments, ends: Ends) -> Link {
        Link {
            streams: Streams::new(what.seed),
            what,
            ends,
            is_bad: false,
            held: BTreeMap::new(),
            overtaken: Vec::new(),
            holds: 0,
            spare: Vec::new(),
            counters: ImpairmentCounters::default(),
        }
    }

    /// Other impairments from now on; what is held stays held.
    pub fn change(&mut self, what: Impairments) {
        self.what = what;
        self.streams = Streams::new(what.seed);
        self.is_bad = false;
    }

    /// What happened to its packets so far.
    pub fn counters(&self) -> ImpairmentCounters {
        ImpairmentCounters {
            held: self.held.len() as u64,
            ..self.counters
        }
    }

    /// When the next held packet is due, if nothing overtakes it before.
    pub fn next_due_ns(&self) -> Option<u64> {
        self.held.keys().next().map(|&(due_ns, _)| due_ns)
    }

    /// Takes a packet, and puts what comes out now at the end of `out`.
    pub fn offer(&mut self, packet: &[u8], via: Via, place: Place, now_ns: u64, out: &mut VecDeque<Handed>) {
        let position = self.counters.offered;
        self.counters.offered += 1;
        if let Via::Queue(_) = via
            && self.streams.inject.hits(self.what.inject_ppm)
        {
            let mut packet = self.spare.pop().unwrap_or_default();
            foreign::write(&mut packet, &self.ends, &mut self.streams.inject);
            self.counters.injected += 1;
            self.hand(Handed { packet, via }, out);
        }
        if !self.loses(position, place) {
            self.carry(packet, via, now_ns, out);
        }
        let offered = self.counters.offered;
        let mut at = 0;
        while at < self.overtaken.len() {
            let (release_at, key) = self.overtaken[at];
            if release_at <= offered {
                self.overtaken.remove(at);
                if let Some(handed) = self.held.remove(&key) {
                    self.hand(handed, out);
                }
            } else {
                at += 1;
            }
        }
    }

    /// Puts every held packet that is due at the end of `out`.
    pub fn release(&mut self, now_ns: u64, out: &mut VecDeque<Handed>) {
        while let Some(entry) = self.held.first_entry()
            && entry.key().0 <= now_ns
        {
            let (key, handed) = entry.remove_entry();
            self.overtaken.retain(|&(_, overtaken)| overtaken != key);
            self.hand(handed, out);
        }
    }

    /// Draws what happens to a delivered packet in the receiver's kernel.
    pub fn arrival(&mut self) -> Arrival {
        let what = self.what;
        let dice = &mut self.streams.arrival;
        let arrival = Arrival {
            fill_empty: dice.hits(what.fill_empty_ppm),
            rx_full: dice.hits(what.rx_full_ppm),
        };
        self.counters.fill_empty += u64::from(arrival.fill_empty);
        self.counters.rx_full += u64::from(arrival.rx_full);
        arrival
    }

    /// Takes back the memory of a packet that was handed over.
    pub fn recycle(&mut self, packet: Vec<u8>) {
        if self.spare.len() < 64 {
            self.spare.push(packet);
        }
    }

    fn hand(&mut self, handed: Handed, out: &mut VecDeque<Handed>) {
        self.counters.delivered += 1;
        out.push_back(handed);
    }

    /// Whether the packet is lost. All kinds draw for every packet; the first that says so has it.
    fn loses(&mut self, position: u64, place: Place) -> bool {
        let Bursts {
            begin_ppm,
            end_ppm,
            loss_ppm,
        } = self.what.bursts;
        let turn_ppm = if self.is_bad { end_ppm } else { begin_ppm };
        self.is_bad ^= self.streams.burst.hits(turn_ppm);
        let in_burst = self.is_bad && self.streams.burst.hits(loss_ppm);
        let alone = self.streams.loss.hits(self.what.loss_ppm);
        let by_rule = match self.what.pattern {
            Pattern::None => false,
            Pattern::Every { count, at } => position % count.max(1) == at,
            Pattern::FirstOfRun { ppm } => place.first && !place.last && self.streams.pattern.hits(ppm),
            Pattern::LastOfRun { ppm } => place.last && !place.first && self.streams.pattern.hits(ppm),
        };
        self.counters.lost_pattern += u64::from(by_rule);
        self.counters.lost_burst += u64::from(in_burst && !by_rule);
        self.counters.lost_random += u64::from(alone && !in_burst && !by_rule);
        by_rule || in_burst || alone
    }

    /// What is not lost: delivered or held, changed, and perhaps twice.
    fn carry(&mut self, packet: &[u8], via: Via, now_ns: u64, out: &mut VecDeque<Handed>) {
        let what = self.what;
        let mut first = self.spare.pop().unwrap_or_default();
        first.clear();
        first.extend_from_slice(packet);
        let is_twice = self.streams.duplicate.hits(what.duplicate_ppm);
        let second = is_twice.then(|| {
            let mut second = self.spare.pop().unwrap_or_default();
            second.clear();
            second.extend_from_slice(packet);
            second
        });
        if self.streams.corrupt.hits(what.corrupt_ppm)
            && corrupt(&mut first, what.corrupt, &mut self.streams.corrupt)
        {
            self.counters.corrupted += 1;
        }
        let mut due_ns = now_ns;
        if what.delay_ns > 0 || what.jitter_ns > 0 {
            due_ns += what.delay_ns + self.streams.jitter.below(what.jitter_ns + 1);
            self.counters.delayed += 1;
        }
        let first = Handed { packet: first, via };
        if self.streams.reorder.hits(what.reorder_ppm) && self.held.len() < HELD_MAX {
            self.counters.reordered += 1;
            due_ns += self.streams.reorder.below(what.reorder_hold_max_ns + 1);
            let key = self.hold(first, due_ns);
            if what.reorder_packets_max > 0 {
                let later = 1 + self.streams.reorder.below(u64::from(what.reorder_packets_max));
                self.overtaken.push((self.counters.offered + later, key));
            }
        } else {
            self.hold_or_hand(first, due_ns, now_ns, out);
        }
        if let Some(packet) = second {
            self.counters.duplicated += 1;
            let later_ns = self.streams.duplicate.below(what.duplicate_delay_max_ns + 1);
            self.hold_or_hand(Handed { packet, via }, due_ns + later_ns, now_ns, out);
        }
    }

    fn hold_or_hand(&mut self, handed: Handed, due_ns: u64, now_ns: u64, out: &mut VecDeque<Handed>) {
        if due_ns > now_ns && self.held.len() < HELD_MAX {
            self.hold(handed, due_ns);
        } else {
            self.hand(handed, out);
        }
    }

    fn hold(&mut self, handed: Handed, due_ns: u64) -> Key {
        self.holds += 1;
        let key = (due_ns, self.holds);
        self.held.insert(key, handed);
        key
    }
}

/// How long the headers of a fragment are, of either wire; 0 for any other packet.
fn fragment_headers_len(packet: &[u8]) -> usize {
    if packet.len() <= LM_HEADERS_LEN || packet[12..14] != [0x08, 0x00] {
        return 0;
    }
    let is_ip_fragment = u16::from_be_bytes([packet[20], packet[21]]) & 0x3fff != 0;
    match packet[HEADERS_LEN] == VERSION << 4 | TYPE_DATA {
        // What stands where a UDP header would be is payload but in the first.
        _ if is_ip_fragment => ETHERNET_LEN + 4,
        true => HEADERS_LEN + 12,
        false => 0,
    }
}

/// Changes one to four bytes; whether the packet has any that may be changed.
fn corrupt(packet: &mut [u8], what: Corrupt, dice: &mut Dice) -> bool {
    let end = match what {
        Corrupt::Anything => packet.len(),
        Corrupt::FragmentHeaders => fragment_headers_len(packet),
    };
    if end == 0 {
        return false;
    }
    // No place twice: a second change could undo the first.
    let mut places = [usize::MAX; 4];
    for nth in 0..=dice.below(4) as usize {
        let at = dice.below(end as u64) as usize;
        let change = match dice.below(2) {
            0 => 1 << dice.below(8),
            _ => 1 + dice.below(255) as u8,
        };
        if !places.contains(&at) {
            places[nth] = at;
            packet[at] ^= change;
        }
    }
    true
}
