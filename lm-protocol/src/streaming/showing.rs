//! What is shown of a message that is arriving, and what keeps it as it is.

use super::*;

/// Where a message's packets go, as far as that decides what may be shown of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Landing {
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

/// How a message ended that somebody reads while it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Ending {
    /// It is whole, and the application has it, or will have it when it receives the next time.
    Whole = 1,
    /// It stays incomplete: what is shown is all that will be.
    Incomplete,
    /// Its session ended first.
    SessionEnded,
    /// Its sender gave it up while it was being written: what is shown is all that will be.
    Aborted,
}

/// Why no more of a window is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaits {
    /// Fragments, or packets that use what is posted there. Or the message has ended.
    Packets,
    /// A digest that agrees.
    Digest,
    /// A header behind what landed of it that says that pairing was right (I3).
    Header,
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
    /// What landed of it did so up to this packet of the channel.
    landed: Option<u64>,
    /// Its digest, as the sender has it, and as it was found here.
    told: Option<u64>,
    found: Option<u64>,
    /// Posted entries that may write into its body, and into its tail.
    over_body: u32,
    over_tail: u32,
    shown: Part,
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
    ending: Option<Ending>,
    /// The reader, or the message that it became.
    is_held: bool,
}

impl Showing {
    /// Nothing has come. Takes some 64 bytes for each window; nothing is taken later.
    pub fn new(grain: Grain, landing: Landing) -> Showing {
        Showing {
            grain,
            landing,
            windows: vec![Window::default(); grain.windows() as usize].into_boxed_slice(),
            ending: None,
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
        if self.ending.is_some() || index >= self.grain.count {
            return Err(PostError::Nothing);
        }
        for (window, body, tail) in self.covered(index) {
            let shown = self.windows[window as usize].shown;
            if self.is_held && (body && shown >= Part::Body || tail && shown == Part::Whole) {
                return Err(PostError::Shown(window));
            }
        }
        self.count_entry(index, 1);
        Ok(())
    }

    /// The RX descriptor of the posted entry of fragment `index` is here, whatever packet filled it; or the entry is void: the queue has
    /// another socket.
    pub fn took(&mut self, index: u32) {
        self.count_entry(index, -1);
    }

    fn count_entry(&mut self, index: u32, change: i32) {
        for (window, body, tail) in self.covered(index) {
            let window = &mut self.windows[window as usize];
            window.over_body = window.over_body.wrapping_add_signed(i32::from(body) * change);
            window.over_tail = window.over_tail.wrapping_add_signed(i32::from(tail) * change);
        }
    }

    /// Whether something of these windows is shown to who holds it: they stay where they are, and what they are (S3).
    pub fn keeps(&self, windows: Range<u32>) -> bool {
        let mut windows = self.windows[windows.start as usize..windows.end as usize].iter();
        self.is_held && windows.any(|window| window.shown > Part::Nothing)
    }

    /// A fragment of the window landed in another's slot, or the header in its lowest slot was checked: what landed of it did so up to the
    /// channel's packet `received`.
    pub fn landed(&mut self, window: u32, received: u64) {
        self.windows[window as usize].landed = Some(received);
    }

    /// Every fragment of the window is in its place, none held aside; `received` packets of the channel have landed.
    pub fn in_place(&mut self, window: u32, received: u64) {
        let window = &mut self.windows[window as usize];
        window.is_in_place = true;
        window.landed.get_or_insert(received);
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

    /// The digest of the window's bytes as they are in their place ([`window_digest`](crate::manifest::window_digest)). One that differs
    /// from the sender's is repaired, and found again.
    pub fn found(&mut self, window: u32, digest: u64) {
        self.windows[window as usize].found = Some(digest);
    }

    /// Shows what may be shown of the window: it is in place, verified and paired, and no posted entry may write there. Pairing was last
    /// checked at the channel's packet `checked`, and the statistics have not moved since (I3). Returns how much of it is shown.
    ///
    /// # Errors
    ///
    /// [`Awaits`]: no more of it than before.
    pub fn show(&mut self, window: u32, checked: u64, tails: &TailRule) -> Result<Part, Awaits> {
        let has_digests = self.landing.has_digests;
        let at = &mut self.windows[window as usize];
        if self.ending.is_some() || !at.is_in_place {
            return Err(Awaits::Packets);
        }
        if has_digests && (at.told.is_none() || at.told != at.found) {
            return Err(Awaits::Digest);
        }
        if at.landed > Some(checked) {
            return Err(Awaits::Header);
        }
        let part = match at.over_tail == 0 && tails.is_readable(window) {
            true => Part::Whole,
            false => Part::Body,
        };
        if at.over_body > 0 || part <= at.shown {
            return Err(Awaits::Packets);
        }
        at.shown = part;
        Ok(part)
    }

    /// The message ends. All of a whole one is `shown` (S5): its own digest, or pairing to its end (I3), says of each window what
    /// [`show`](Showing::show) would have asked. `false`: it had ended before.
    pub fn settle(&mut self, ending: Ending, shown: &Shown) -> bool {
        if self.ending.is_some() {
            return false;
        }
        self.ending = Some(ending);
        if ending == Ending::Whole {
            (0..self.grain.windows()).for_each(|window| shown.publish(window, Part::Whole));
        }
        true
    }

    /// The reader was dropped, and so was the message if it became one. What comes of it is received and thrown away.
    pub const fn let_go(&mut self) {
        self.is_held = false;
    }

    /// Somebody reads it.
    pub const fn is_held(&self) -> bool {
        self.is_held
    }
}

/// Memory of a message that ended while entries were posted there: nobody may use it before so many packets of the channel as were posted
/// by then have come (S6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quarantine {
    /// Entries of the channel.
    pub posted: u64,
}

impl Quarantine {
    /// So many packets of the channel have come: nothing that was posted may write there.
    pub const fn is_over(&self, received: u64) -> bool {
        self.posted <= received
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message is valid to byte {} from there on: wait for more", .valid_to)]
pub struct NotValid {
    /// The first byte of what was asked for that is not.
    pub valid_to: u64,
}

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
