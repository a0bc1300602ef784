//! What is shown of a message that is arriving, and what keeps it as it is.

use super::*;

/// Where a message's packets go, as far as that decides what may be shown of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Landing {
    /// Packets land by fill entries, whose pairing with descriptors has to be checked (I3); `false`: they are copied (one-copy path).
    pub lands: bool,
    /// A window is verified by its digest (WINDOWS packets). Always in zero-copy mode, where nothing else says which packet came.
    pub has_digests: bool,
    /// Bytes that a packet writes before its payload: `H + prefix`. Shorter than a payload.
    pub tail_len: u16,
    /// Bytes from there on that it may write: in copy mode `H + P`, in zero-copy mode to its chunk's end.
    pub write_len: u32,
}

/// How much of a window is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Part {
    /// None of it.
    #[default]
    Nothing,
    /// All but its last `H + prefix` bytes, where the headers of the next window's lowest packet go.
    Body,
    /// All of it.
    Whole,
}

/// How a message ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It is whole, and its digest agrees where there is one.
    Whole,
    /// It will not become whole.
    Incomplete,
    /// Its writer gave up.
    Aborted,
}

/// A fill entry that must not be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// Its packet could write into what is shown of this window.
    Shown(u32),
    /// The message is settled, or has no such fragment.
    Nothing,
}

/// Digests of windows that were refused. Nothing of the packet was taken, unless it says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TellError {
    /// Of windows that the message has not, or that are not released.
    Foreign,
    /// So many differ from those that came before. Those of windows that are not shown are to be asked for again; the others were taken.
    Conflict(u32),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Window {
    is_in_place: bool,
    is_paired: bool,
    /// Its digest, as the sender has it, and as it was found here.
    told: Option<u64>,
    found: Option<u64>,
    /// Posted entries that may write into its body, and into its tail.
    over_body: u32,
    over_tail: u32,
    shown: Part,
}

impl Window {
    /// A posted entry may write into its body.
    const fn is_posted_over(&self) -> bool {
        self.over_body > 0
    }
}

/// A message that is arriving and has a reader: which windows are final.
///
/// The engine tells what happens. It calls [`show`](Showing::show) when a window may have become final, and hands on what that returns
/// ([`Shown::publish`]).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Showing {
    grain: Grain,
    landing: Landing,
    windows: Box<[Window]>,
    posted: u32,
    outcome: Option<Outcome>,
    /// The reader, or the message that it became.
    is_held: bool,
}

impl Showing {
    /// Nothing has come. Takes some 48 bytes for each window; nothing is taken later.
    pub fn new(grain: Grain, landing: Landing) -> Showing {
        Showing {
            grain,
            landing,
            windows: vec![Window::default(); grain.windows() as usize].into_boxed_slice(),
            posted: 0,
            outcome: None,
            is_held: true,
        }
    }

    /// The windows into whose body, and into whose tail, the packet may write that takes the entry of fragment `index`.
    fn covered(&self, index: u32) -> impl Iterator<Item = (u32, bool, bool)> + use<> {
        let (grain, tail_len) = (self.grain, u64::from(self.landing.tail_len));
        let payload = u64::from(index) * u64::from(grain.payload_len);
        let start = payload.saturating_sub(tail_len);
        let end = (payload + u64::from(self.landing.write_len) - tail_len).min(grain.len);
        (grain.windows_before(start)..grain.windows()).map_while(move |window| {
            let body = grain.shown(window, Part::Body, tail_len);
            let tail = body.end..grain.bytes(window).end;
            let meets = |range: Range<u64>| start < range.end && range.start < end;
            (body.start < end).then(|| (window, meets(body), meets(tail)))
        })
    }

    /// The entry of fragment `index` is about to be posted.
    ///
    /// # Errors
    ///
    /// [`PostError`]: it must not be. A packet that needs a place goes another way, or waits for another socket; what is shown stays.
    pub fn post(&mut self, index: u32) -> Result<(), PostError> {
        if self.outcome.is_some() || index >= self.grain.count {
            return Err(PostError::Nothing);
        }
        for (window, body, tail) in self.covered(index) {
            let shown = self.windows[window as usize].shown;
            if self.is_held && (body && shown >= Part::Body || tail && shown == Part::Whole) {
                return Err(PostError::Shown(window));
            }
        }
        self.posted += 1;
        self.count_entry(index, 1);
        Ok(())
    }

    /// The RX descriptor of the posted entry of fragment `index` is here, whatever packet filled it.
    pub fn took(&mut self, index: u32) {
        self.posted -= 1;
        self.count_entry(index, -1);
    }

    fn count_entry(&mut self, index: u32, change: i32) {
        for (window, body, tail) in self.covered(index) {
            let window = &mut self.windows[window as usize];
            window.over_body = window.over_body.wrapping_add_signed(i32::from(body) * change);
            window.over_tail = window.over_tail.wrapping_add_signed(i32::from(tail) * change);
        }
    }

    /// The queue has another socket: what was posted is void. The remedy where leftovers of a loss lie over the message, which is never
    /// moved.
    pub fn rebuilt(&mut self) {
        self.posted = 0;
        for window in &mut self.windows {
            (window.over_body, window.over_tail) = (0, 0);
        }
    }

    /// Whether fragment `index` may be copied to its place: that is not shown, and no posted entry may write there.
    pub fn may_copy(&self, index: u32) -> bool {
        let window = &self.windows[self.grain.shape.window_of(index) as usize];
        let has_tail = self.grain.shape.is_highest(index, self.grain.count);
        window.shown == Part::Nothing && !window.is_posted_over() && (window.over_tail == 0 || !has_tail)
    }

    /// Every fragment of the window is in its place, none held aside. Its [pairing](Showing::paired) is looked at apart.
    pub fn in_place(&mut self, window: u32) {
        self.windows[window as usize].is_in_place = true;
    }

    /// Pairing was checked to the window's end, and the statistics have not moved (I3).
    pub fn paired(&mut self, window: u32) {
        self.windows[window as usize].is_paired = true;
    }

    /// Digests from a WINDOWS packet, of window `first` and those behind it. Returns how many are new.
    ///
    /// # Errors
    ///
    /// [`TellError`]; the message goes on.
    pub fn tell(
        &mut self,
        first: u32,
        digests: impl ExactSizeIterator<Item = u64>,
        released: &Released,
    ) -> Result<u32, TellError> {
        if u64::from(first) + digests.len() as u64 > u64::from(released.windows) {
            return Err(TellError::Foreign);
        }
        let (mut new, mut differ) = (0, 0);
        for (window, digest) in self.windows[first as usize..].iter_mut().zip(digests) {
            match window.told {
                None => (window.told, new) = (Some(digest), new + 1),
                Some(told) if told == digest => {}
                Some(_) => {
                    differ += 1;
                    // Nobody can tell which of the two is right.
                    if window.shown == Part::Nothing {
                        window.told = None;
                    }
                }
            }
        }
        if differ > 0 {
            Err(TellError::Conflict(differ))
        } else {
            Ok(new)
        }
    }

    /// The digest of the window's bytes as they are in their place ([`window_digest`](crate::manifest::window_digest)). Whether it agrees
    /// with the sender's; `None` while that is not here. One that differs is repaired, and found again.
    pub fn found(&mut self, window: u32, digest: u64) -> Option<bool> {
        let window = &mut self.windows[window as usize];
        window.found = Some(digest);
        window.told.map(|told| told == digest)
    }

    /// Shows what may be shown of the window: it is in place, paired and verified, and no posted entry may write there. `tails` are the
    /// message's where it lands. Returns how much of it is shown when that has become more.
    pub fn show(&mut self, window: u32, tails: Option<&TailRule>) -> Option<Part> {
        let Landing {
            lands, has_digests, ..
        } = self.landing;
        let at = &mut self.windows[window as usize];
        let is_verified = !has_digests || at.told.is_some() && at.told == at.found;
        let is_proved = at.is_in_place && is_verified && (at.is_paired || !lands);
        if self.outcome.is_some() || !is_proved || at.is_posted_over() {
            return None;
        }
        let tail_is_final = at.over_tail == 0 && tails.is_none_or(|tails| tails.is_readable(window));
        let part = if tail_is_final { Part::Whole } else { Part::Body };
        let has_grown = part > at.shown;
        at.shown = at.shown.max(part);
        has_grown.then_some(part)
    }

    /// The message ends. `Err` with the outcome: it had ended before, or is to be whole and is not shown altogether (S5).
    pub fn settle(&mut self, outcome: Outcome) -> Result<(), Option<Outcome>> {
        let is_shown = || self.windows.iter().all(|window| window.shown == Part::Whole);
        if self.outcome.is_some() || outcome == Outcome::Whole && !is_shown() {
            return Err(self.outcome);
        }
        self.outcome = Some(outcome);
        Ok(())
    }

    /// The reader was dropped, and so was the message if it became one. What comes of it is received and thrown away.
    pub const fn let_go(&mut self) {
        self.is_held = false;
    }

    /// Its memory may be used again: it is settled, nobody reads it, and nothing that was posted may write there (S6).
    pub const fn is_free(&self) -> bool {
        self.outcome.is_some() && !self.is_held && self.posted == 0
    }
}

impl Grain {
    fn shown(&self, window: u32, part: Part, tail_len: u64) -> Range<u64> {
        let bytes = self.bytes(window);
        let is_last = window + 1 == self.windows();
        match part {
            Part::Nothing => bytes.start..bytes.start,
            Part::Body if !is_last => bytes.start..bytes.end - tail_len,
            Part::Body | Part::Whole => bytes,
        }
    }
}

/// Bytes that are not valid yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotValid {
    /// The first byte of what was asked for that is not.
    pub valid_to: u64,
}

impl fmt::Display for NotValid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the message is valid to byte {} from there on: wait for more",
            self.valid_to
        )
    }
}

impl core::error::Error for NotValid {}

/// What the engine's thread shows of a message, for the thread that reads it.
///
/// ```
/// use lm_protocol::streaming::{Grain, NotValid, Part, Shown};
/// use lm_protocol::window::WindowShape;
///
/// let shown = Shown::new(Grain::new(100, 10, WindowShape::new(4)?).unwrap(), 3);
/// shown.publish(1, Part::Body);
/// shown.publish(2, Part::Whole);
/// assert_eq!(shown.valid().collect::<Vec<_>>(), [40..77, 80..100]);
/// assert_eq!(shown.check(50..80), Err(NotValid { valid_to: 77 }));
/// shown.publish(1, Part::Whole);
/// assert_eq!(shown.check(50..100), Ok(()));
/// # Ok::<(), lm_protocol::window::WindowError>(())
/// ```
#[derive(Debug)]
pub struct Shown {
    grain: Grain,
    tail_len: u16,
    parts: Box<[AtomicU8]>,
}

impl Shown {
    /// Nothing is valid. `tail_len` is [`Landing::tail_len`].
    pub fn new(grain: Grain, tail_len: u16) -> Shown {
        Shown {
            grain,
            tail_len,
            parts: (0..grain.windows())
                .map(|_| AtomicU8::new(Part::Nothing as u8))
                .collect(),
        }
    }

    /// The engine shows so much of a window. The store releases its bytes: it pairs with the loads of [`Shown::valid`] and
    /// [`Shown::check`].
    pub fn publish(&self, window: u32, part: Part) {
        self.parts[window as usize].store(part as u8, Ordering::Release);
    }

    /// What is valid of a window. The load acquires the bytes that [`Shown::publish`] released.
    fn of(&self, window: u32) -> Range<u64> {
        let part = match self.parts[window as usize].load(Ordering::Acquire) {
            part if part == Part::Whole as u8 => Part::Whole,
            part if part == Part::Body as u8 => Part::Body,
            _ => Part::Nothing,
        };
        self.grain.shown(window, part, u64::from(self.tail_len))
    }

    /// The valid bytes: ranges, ascending, that neither touch nor are empty.
    pub fn valid(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut windows = (0..self.grain.windows())
            .map(|window| self.of(window))
            .filter(|range| !range.is_empty())
            .peekable();
        core::iter::from_fn(move || {
            let mut range = windows.next()?;
            while let Some(next) = windows.next_if(|next| next.start == range.end) {
                range.end = next.end;
            }
            Some(range)
        })
    }

    /// The first byte from `from` on that is not valid.
    pub fn valid_to(&self, from: u64) -> u64 {
        let mut to = from;
        for window in self.grain.windows_before(from)..self.grain.windows() {
            let range = self.of(window);
            if !range.contains(&to) {
                break;
            }
            to = range.end;
        }
        to
    }

    /// Whether all of these bytes are valid.
    ///
    /// # Errors
    ///
    /// [`NotValid`] says how far they are.
    pub fn check(&self, bytes: Range<u64>) -> Result<(), NotValid> {
        let valid_to = self.valid_to(bytes.start);
        if valid_to < bytes.end {
            Err(NotValid { valid_to })
        } else {
            Ok(())
        }
    }
}
