//! The receiving host: a queue whose packets take posted entries, memory in which they land, and an engine that looks at one descriptor at a
//! time.

use crate::streaming::{Grain, Landing, Outcome, Released, Showing, Shown};
use crate::window::{TailRule, WindowShape};
use lm_protocol::manifest::{fragment_digest, window_digest};

/// Fragments of a window, windows, bytes of a payload, and of what lies before it.
pub(crate) const WINDOW: u32 = 2;
pub(crate) const WINDOWS: u32 = 3;
pub(crate) const COUNT: u32 = WINDOW * WINDOWS;
const PAYLOAD: usize = 2;
const TAIL: u16 = 1;
const LEN: usize = COUNT as usize * PAYLOAD;

/// What a byte of the zone holds: nothing of the message, a header, or a byte of its (a fragment's, by number) or of what its writer had not
/// written.
const HEADER: u8 = 255;
pub(crate) const STALE: u8 = 254;

pub(crate) fn shape() -> WindowShape {
    WindowShape::new(WINDOW).unwrap()
}

pub(crate) fn grain() -> Grain {
    Grain::new(LEN as u64, PAYLOAD as u16, shape()).unwrap()
}

/// The right bytes of a fragment.
pub(crate) fn payload(fragment: u32) -> [u8; PAYLOAD] {
    [0, 1].map(|at| 1 + (fragment * PAYLOAD as u32 + at) as u8)
}

pub(crate) fn digest_of(window: u32, payloads: &[[u8; PAYLOAD]]) -> u64 {
    let digests: Vec<u64> = payloads
        .iter()
        .map(|payload| fragment_digest(7, payload))
        .collect();
    window_digest(7, 1, window, &digests)
}

/// A packet of which the engine has not heard yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Arrival {
    /// It took the entry of a fragment.
    Landed { entry: u32, fragment: u32 },
    /// It came by the one-copy path.
    Copied { fragment: u32, bytes: [u8; PAYLOAD] },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Receiver {
    pub(crate) is_zero_copy: bool,
    pub(crate) released: Released,
    pub(crate) showing: Showing,
    pub(crate) shown: Shown,
    pub(crate) zone: [u8; LEN],
    /// Posted, first in first out; void since the queue has another socket.
    pub(crate) entries: Vec<u32>,
    pub(crate) is_rebuilt: bool,
    arrivals: Vec<Arrival>,
    /// Positions below were posted.
    pub(crate) posted_to: u32,
    /// Copy mode: the gate lets in what does not go back.
    gate_next: u32,
    tails: TailState,
    /// Fragments that are in their place, as the engine believes, a bit each.
    placed: u8,
    aside: Vec<(u32, [u8; PAYLOAD])>,
    pub(crate) outcome: Option<Outcome>,
    pub(crate) is_read: bool,
}

/// A [`TailRule`] and the saved tails.
#[derive(Clone, Debug)]
struct TailState {
    rule: TailRule,
    saved: [u8; 2],
}

impl TailState {
    fn facts(&self) -> ([(bool, bool, bool); WINDOWS as usize], [u8; 2]) {
        let rule = self.rule;
        let of = |window| {
            (
                rule.may_post_lowest(window),
                rule.is_saved(window),
                rule.is_readable(window),
            )
        };
        ([0, 1, 2].map(of), self.saved)
    }
}

impl PartialEq for TailState {
    fn eq(&self, other: &Self) -> bool {
        self.facts() == other.facts()
    }
}

impl Eq for TailState {}

impl std::hash::Hash for TailState {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.facts().hash(state);
    }
}

impl Receiver {
    pub(crate) fn new(is_zero_copy: bool) -> Receiver {
        let landing = Landing {
            lands: true,
            has_digests: is_zero_copy,
            tail_len: TAIL,
            // A chunk ends behind the packet.
            write_len: u32::from(TAIL) + PAYLOAD as u32 + u32::from(is_zero_copy),
        };
        Receiver {
            is_zero_copy,
            released: Released::new(grain()),
            showing: Showing::new(grain(), landing),
            shown: Shown::new(grain(), TAIL),
            zone: [0; LEN],
            entries: Vec::new(),
            is_rebuilt: false,
            arrivals: Vec::new(),
            posted_to: 0,
            gate_next: 0,
            tails: TailState {
                rule: TailRule::new(shape(), COUNT),
                saved: [0; 2],
            },
            placed: 0,
            aside: Vec::new(),
            outcome: None,
            is_read: true,
        }
    }

    /// A packet comes in. The card, or the gate, decides where it goes.
    pub(crate) fn packet(&mut self, position: u32, bytes: [u8; PAYLOAD]) {
        let fragment = shape().index_at(position, COUNT);
        let lands = !self.entries.is_empty() && (self.is_zero_copy || position >= self.gate_next);
        if !lands {
            self.copy(fragment, bytes);
            return;
        }
        self.gate_next = self.gate_next.max(position + 1);
        let entry = self.entries.remove(0);
        self.land(entry, bytes);
        self.arrivals.push(Arrival::Landed { entry, fragment });
    }

    /// A packet comes in on the other queue.
    pub(crate) fn copy(&mut self, fragment: u32, bytes: [u8; PAYLOAD]) {
        self.arrivals.push(Arrival::Copied { fragment, bytes });
    }

    /// The card writes: headers, and then the payload.
    pub(crate) fn land(&mut self, entry: u32, bytes: [u8; PAYLOAD]) {
        let at = entry as usize * PAYLOAD;
        if let Some(before) = at.checked_sub(1) {
            self.zone[before] = HEADER;
        }
        self.zone[at..at + PAYLOAD].copy_from_slice(&bytes);
    }

    /// The announcement says this.
    pub(crate) fn hear(&mut self, release: crate::streaming::Release) {
        use crate::streaming::Heard;
        match self.released.hear(release) {
            Heard::More => self.post(),
            Heard::Aborted => self.settle(Outcome::Aborted),
            Heard::Nothing | Heard::Contradiction => {}
        }
    }

    pub(crate) fn settle(&mut self, outcome: Outcome) {
        if self.showing.settle(outcome).is_ok() {
            self.outcome = Some(outcome);
        }
    }

    /// Posts what may come, up to the first window below which the tail is not saved.
    fn post(&mut self) {
        while self.posted_to < self.released.fragments() && !self.is_rebuilt {
            let index = shape().index_at(self.posted_to, COUNT);
            let window = shape().window_of(index);
            if shape().is_lowest(index) && !self.tails.rule.may_post_lowest(window)
                || self.showing.post(index).is_err()
            {
                break;
            }
            self.entries.push(index);
            self.posted_to += 1;
        }
    }

    pub(crate) fn has_arrivals(&self) -> bool {
        !self.arrivals.is_empty()
    }

    /// The engine looks at one packet, shows what has become final and posts what may be posted.
    pub(crate) fn poll(&mut self) {
        match self.arrivals.remove(0) {
            Arrival::Landed { entry, fragment } => self.take_landed(entry, fragment),
            Arrival::Copied { fragment, bytes } => self.set_aside(fragment, bytes),
        }
        self.move_in();
        self.show();
        self.post();
    }

    fn take_landed(&mut self, entry: u32, fragment: u32) {
        self.showing.took(entry);
        let window = shape().window_of(entry);
        let bytes = self.bytes_of(entry);
        if self.is_zero_copy || entry == fragment {
            // In zero-copy mode nobody knows better, until digests tell.
            self.placed |= 1 << entry;
        } else {
            self.set_aside(fragment, bytes);
        }
        if shape().is_highest(entry, COUNT) && self.tails.rule.tail_saved(window) {
            self.tails.saved[TailRule::slot(window)] = bytes[PAYLOAD - 1];
        }
        if shape().is_lowest(entry) {
            self.restore_below(window);
        }
    }

    fn restore_below(&mut self, window: u32) {
        if let Some(tail) = self.tails.rule.lowest_arrived(window) {
            self.zone[grain().bytes(tail).end as usize - 1] = self.tails.saved[TailRule::slot(tail)];
        }
    }

    fn set_aside(&mut self, fragment: u32, bytes: [u8; PAYLOAD]) {
        if self.placed & 1 << fragment == 0 && self.aside.iter().all(|(other, _)| *other != fragment) {
            self.aside.push((fragment, bytes));
            self.aside.sort_unstable();
        }
    }

    /// A fragment's bytes, with a saved tail.
    fn bytes_of(&self, fragment: u32) -> [u8; PAYLOAD] {
        let (window, at) = (shape().window_of(fragment), fragment as usize * PAYLOAD);
        let mut bytes = [self.zone[at], self.zone[at + 1]];
        if shape().is_highest(fragment, COUNT) && self.tails.rule.is_saved(window) {
            bytes[PAYLOAD - 1] = self.tails.saved[TailRule::slot(window)];
        }
        bytes
    }

    /// Copies what was held aside to its place, where nothing lands any more.
    fn move_in(&mut self) {
        for (fragment, bytes) in std::mem::take(&mut self.aside) {
            let has_been_posted = shape().position_of(fragment, COUNT) < self.posted_to || self.is_rebuilt;
            if self.placed & 1 << fragment != 0 {
                continue;
            }
            if !has_been_posted || !self.showing.may_copy(fragment) {
                self.aside.push((fragment, bytes));
                continue;
            }
            let window = shape().window_of(fragment);
            let at = fragment as usize * PAYLOAD;
            self.zone[at] = bytes[0];
            if shape().is_highest(fragment, COUNT) && self.tails.rule.is_saved(window) {
                self.tails.saved[TailRule::slot(window)] = bytes[1];
            } else {
                self.zone[at + 1] = bytes[1];
            }
            self.placed |= 1 << fragment;
        }
    }

    /// Whether the engine has seen as many descriptors as there are entries in the log (I3).
    fn counts_are_equal(&self) -> bool {
        let is_landed = |arrival: &Arrival| matches!(arrival, Arrival::Landed { .. });
        !self.arrivals.iter().any(is_landed)
    }

    fn show(&mut self) {
        for window in 0..WINDOWS {
            let mut fragments = shape().range(window, COUNT);
            if self.counts_are_equal() {
                self.showing.paired(window);
            }
            if fragments.all(|fragment| self.placed & 1 << fragment != 0) {
                self.showing.in_place(window);
                if self.is_zero_copy {
                    let _ = self.showing.found(window, self.digest_here(window));
                }
            }
            if let Some(part) = self.showing.show(window, Some(&self.tails.rule)) {
                self.shown.publish(window, part);
            }
        }
    }

    fn digest_here(&self, window: u32) -> u64 {
        let payloads: Vec<_> = (shape().range(window, COUNT))
            .map(|fragment| self.bytes_of(fragment))
            .collect();
        digest_of(window, &payloads)
    }

    /// A WINDOWS packet says the digest of a window.
    pub(crate) fn tell(&mut self, window: u32, digest: u64) {
        let _ = self.showing.tell(window, [digest].into_iter(), &self.released);
        self.show();
    }

    /// The fragment to ask for next when nothing more comes by itself: one that is missing, or, where a window is found to be wrong, one of
    /// its. What was believed of that window is forgotten.
    pub(crate) fn missing(&self) -> Option<u32> {
        (0..COUNT).find(|fragment| {
            let window = shape().window_of(*fragment);
            let is_wrong = self.is_zero_copy && self.bytes_of(*fragment) != payload(*fragment);
            shape().position_of(*fragment, COUNT) < self.released.fragments()
                && self.showing.may_copy(shape().range(window, COUNT).start)
                && (self.placed & 1 << fragment == 0 || is_wrong)
                && self.aside.iter().all(|(other, _)| other != fragment)
        })
    }

    pub(crate) fn forget(&mut self, fragment: u32) {
        self.placed &= !(1 << fragment);
    }

    /// The queue has another socket: entries are void, and what was saved comes back. The rest of the message takes the one-copy path.
    pub(crate) fn rebuild(&mut self) {
        self.entries.clear();
        self.showing.rebuilt();
        self.is_rebuilt = true;
        for window in 0..WINDOWS {
            let highest = shape().range(window, COUNT).end - 1;
            let bytes = self.bytes_of(highest);
            if self.tails.rule.tail_saved(window) {
                self.tails.saved[TailRule::slot(window)] = bytes[PAYLOAD - 1];
            }
            self.restore_below(window + 1);
        }
        self.move_in();
        self.show();
    }

    /// Bytes that posted entries may write to.
    pub(crate) fn posted_over(&self, byte: u64) -> bool {
        let len = u64::from(TAIL) + PAYLOAD as u64 + u64::from(self.is_zero_copy);
        self.entries.iter().any(|entry| {
            let start = u64::from(*entry) * PAYLOAD as u64;
            (start.saturating_sub(u64::from(TAIL))..start + len - u64::from(TAIL)).contains(&byte)
        })
    }

    pub(crate) fn is_right(&self, byte: u64) -> bool {
        self.zone[byte as usize] == byte as u8 + 1
    }
}
