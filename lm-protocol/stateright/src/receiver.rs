//! The receiving host: a queue whose packets take posted entries, memory in which they land, and an engine that looks at one descriptor at a
//! time.

use crate::streaming::{Awaits, Ending, Grain, Landing, Quarantine, Released, Showing, Shown};
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
    /// It took the entry of a fragment. The gate's log says which it is.
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
    /// The same as the engine has seen them used, with those that it left out among them (`false`).
    aims: Vec<(u32, bool)>,
    pub(crate) is_rebuilt: bool,
    arrivals: Vec<Arrival>,
    /// Fragments that the gate let land and the engine has not looked at: one more than there are arrivals for each that `was_dropped`
    /// behind the gate.
    log: Vec<u32>,
    pub(crate) was_dropped: bool,
    /// Packets that landed, as the engine has seen them, and up to which one it found the log to be right.
    received: u64,
    checked: u64,
    /// A window waits for another header that is checked.
    pub(crate) lacks_header: bool,
    /// Positions below were seen, or overtaken.
    accepted: u32,
    /// Positions below were posted, or left out.
    pub(crate) posted_to: u32,
    /// Copy mode: the gate lets in what does not go back.
    gate_next: u32,
    tails: TailState,
    /// Fragments that are in their place, as the engine believes, a bit each.
    placed: u8,
    aside: Vec<(u32, [u8; PAYLOAD])>,
    pub(crate) ending: Option<Ending>,
    quarantine: Quarantine,
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
            aims: Vec::new(),
            is_rebuilt: false,
            arrivals: Vec::new(),
            log: Vec::new(),
            was_dropped: false,
            received: 0,
            checked: 0,
            lacks_header: false,
            accepted: 0,
            posted_to: 0,
            gate_next: 0,
            tails: TailState {
                rule: TailRule::new(shape(), COUNT),
                saved: [0; 2],
            },
            placed: 0,
            aside: Vec::new(),
            ending: None,
            quarantine: Quarantine { posted: 0 },
            is_read: true,
        }
    }

    /// A packet comes in. The card, or the gate, decides where it goes.
    pub(crate) fn packet(&mut self, position: u32, bytes: [u8; PAYLOAD]) {
        let fragment = shape().index_at(position, COUNT);
        if !self.may_land(position) {
            self.copy(fragment, bytes);
            return;
        }
        self.pass_gate(position);
        let entry = self.entries.remove(0);
        self.land(entry, bytes);
        self.arrivals.push(Arrival::Landed { entry, fragment });
    }

    pub(crate) fn may_land(&self, position: u32) -> bool {
        !self.entries.is_empty() && (self.is_zero_copy || position >= self.gate_next)
    }

    /// The gate lets a packet land, and logs it.
    pub(crate) fn pass_gate(&mut self, position: u32) {
        self.gate_next = self.gate_next.max(position + 1);
        self.log.push(shape().index_at(position, COUNT));
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
            Heard::More => self.look(),
            Heard::Aborted => self.settle(Ending::Aborted),
            Heard::Nothing | Heard::Contradiction => {}
        }
    }

    pub(crate) fn settle(&mut self, ending: Ending) {
        if self.showing.settle(ending, &self.shown) {
            self.ending = Some(ending);
            self.quarantine.posted = self.received_by_all() + self.entries.len() as u64;
        }
    }

    /// Packets that landed, whether the engine has seen them or not.
    fn received_by_all(&self) -> u64 {
        let is_landed = |arrival: &&Arrival| matches!(arrival, Arrival::Landed { .. });
        self.received + self.arrivals.iter().filter(is_landed).count() as u64
    }

    /// The whole message is here, nothing is posted for it, and it has its digest, or the statistics have not moved (I1, I3).
    pub(crate) fn is_final(&self) -> bool {
        let is_proved = match self.is_zero_copy {
            true => (0..COUNT).all(|fragment| self.bytes_of(fragment) == payload(fragment)),
            false => !self.was_dropped,
        };
        self.placed == (1 << COUNT) - 1 && self.aims.is_empty() && self.aside.is_empty() && is_proved
    }

    /// Its memory may be another message's: a whole one's when it is dropped, another's when its quarantine is over, too.
    pub(crate) fn is_free(&self) -> bool {
        let is_left = match self.ending {
            None => false,
            Some(Ending::Whole) => true,
            Some(_) => self.is_rebuilt || self.quarantine.is_over(self.received),
        };
        is_left && !self.is_read
    }

    /// Posts what may come, up to the first window below which the tail is not saved. Behind a loss places are left out whose packets will
    /// use earlier entries.
    fn post(&mut self) {
        while self.posted_to < self.released.fragments() && !self.is_rebuilt {
            let index = shape().index_at(self.posted_to, COUNT);
            let window = shape().window_of(index);
            let unused = self.aims.iter().filter(|(_, is_posted)| *is_posted).count() as u32;
            let is_posted = self.is_zero_copy || self.posted_to >= self.accepted + unused;
            if is_posted {
                if shape().is_lowest(index) && !self.tails.rule.may_post_lowest(window)
                    || self.post_entry(index).is_none()
                {
                    break;
                }
            } else {
                self.aims.push((index, false));
            }
            self.posted_to += 1;
            self.pass_left_out();
        }
    }

    /// Posts the entry of a fragment, if it may be.
    pub(crate) fn post_entry(&mut self, index: u32) -> Option<()> {
        self.showing.post(index).ok()?;
        self.entries.push(index);
        self.aims.push((index, true));
        Some(())
    }

    /// Places that were left out come up.
    fn pass_left_out(&mut self) {
        while let Some(&(index, false)) = self.aims.first() {
            self.aims.remove(0);
            self.passed(index);
        }
    }

    /// The entry of a fragment was used, or never will be.
    fn passed(&mut self, index: u32) {
        let (window, bytes) = (shape().window_of(index), self.bytes_of(index));
        if shape().is_highest(index, COUNT) && self.tails.rule.tail_saved(window) {
            self.tails.saved[TailRule::slot(window)] = bytes[PAYLOAD - 1];
        }
        if shape().is_lowest(index) {
            self.restore_below(window);
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
        self.look();
    }

    /// Shows what is final, before and behind what is posted.
    fn look(&mut self) {
        self.move_in();
        self.show();
        self.post();
        self.move_in();
        self.show();
    }

    fn take_landed(&mut self, entry: u32, fragment: u32) {
        self.showing.took(entry);
        self.aims.remove(0);
        let window = shape().window_of(entry);
        let bytes = self.bytes_of(entry);
        let logged = self.log.remove(0);
        self.received += 1;
        self.accepted = self.accepted.max(shape().position_of(logged, COUNT) + 1);
        if shape().is_lowest(entry) && !self.is_zero_copy {
            // No later packet overwrites this one's header.
            if logged != fragment {
                self.settle(Ending::SessionEnded);
                return;
            }
            self.checked = self.received;
            self.showing.landed(window, self.received);
        }
        if self.is_zero_copy || entry == logged {
            // In zero-copy mode nobody knows better, until digests tell.
            self.placed |= 1 << entry;
        } else {
            self.showing.landed(shape().window_of(logged), self.received);
            self.set_aside(logged, bytes);
        }
        self.passed(entry);
        self.pass_left_out();
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
            let is_awaited = self.aims.iter().any(|(index, _)| *index == fragment);
            if !has_been_posted || is_awaited {
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

    fn show(&mut self) {
        let checked = if self.is_zero_copy { u64::MAX } else { self.checked };
        self.lacks_header = false;
        for window in 0..WINDOWS {
            let mut fragments = shape().range(window, COUNT);
            if fragments.all(|fragment| self.placed & 1 << fragment != 0) {
                self.showing.in_place(window, self.received);
                if self.is_zero_copy {
                    self.showing.found(window, self.digest_here(window));
                }
            }
            match self.showing.show(window, checked, &self.tails.rule) {
                Ok(part) => self.shown.publish(window, part),
                Err(awaits) => self.lacks_header |= awaits == Awaits::Header,
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
                && !self.showing.keeps(window..window + 1)
                && (self.placed & 1 << fragment == 0 || is_wrong)
                && self.aside.iter().all(|(other, _)| other != fragment)
        })
    }

    pub(crate) fn is_placed(&self, fragment: u32) -> bool {
        self.placed & 1 << fragment != 0
    }

    pub(crate) fn forget(&mut self, fragment: u32) {
        self.placed &= !(1 << fragment);
    }

    /// The queue has another socket: entries are void, and what was saved comes back. The rest of the message takes the one-copy path.
    pub(crate) fn rebuild(&mut self) {
        if self.was_dropped && self.ending.is_none() {
            // The old socket's statistics say so.
            self.settle(Ending::SessionEnded);
            return;
        }
        for entry in self.entries.drain(..) {
            self.showing.took(entry);
        }
        (self.aims, self.log) = (Vec::new(), Vec::new());
        self.is_rebuilt = true;
        self.checked = self.received;
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
