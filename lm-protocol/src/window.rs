//! Windows: forward outside, reverse inside, and the rule that makes it safe (invariant I5).
//!
//! A message of many fragments travels as windows of `W` consecutive fragments. Windows go in forward order; inside a
//! window the last fragment goes first (LM section 3.1), so that each packet's headers are overwritten by the payload
//! that arrives next. One window per message is the paper's mode.
//!
//! ```text
//! W = 4, 10 fragments          window 0        window 1        window 2
//! position (transmit order)    0  1  2  3      4  5  6  7      8  9
//! fragment index               3  2  1  0      7  6  5  4      9  8
//! ```
//!
//! Inside its window a fragment's position is its index mirrored, so index and position are the same function of each
//! other.
//!
//! The one overlap between windows: the header of a window's lowest fragment lies over the last `H` bytes of the window
//! below, which arrived long before. [`TailRule`] says when that frame may be posted and when the bytes come back.

use core::iter::FusedIterator;
use core::ops::Range;

/// How many fragments a window has: a power of two.
///
/// ```
/// use lm_protocol::window::WindowShape;
///
/// let windows = WindowShape::new(4)?;
/// let order: Vec<u32> = windows.transmit_order(10).collect();
/// assert_eq!(order, [3, 2, 1, 0, 7, 6, 5, 4, 9, 8]);
/// assert_eq!(windows.index_at(8, 10), 9);
/// assert_eq!(windows.position_of(9, 10), 8);
/// # Ok::<(), lm_protocol::window::WindowError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowShape {
    /// Fragments per window minus one: all ones below the window number's bits.
    mask: u32,
    /// Logarithm of the fragments per window.
    shift: u32,
}

/// A window that is not a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a window of {} fragments is not a power of two", .fragments)]
pub struct WindowError {
    /// Fragments asked for.
    pub fragments: u32,
}

impl WindowShape {
    /// The window when nothing else was asked for: 256 fragments, 362 KiB at MTU 1500.
    pub const DEFAULT: WindowShape = WindowShape::from_shift(8);

    /// Windows of `fragments` fragments.
    ///
    /// # Errors
    ///
    /// [`WindowError`] unless `fragments` is a power of two.
    pub const fn new(fragments: u32) -> Result<WindowShape, WindowError> {
        if fragments.is_power_of_two() {
            Ok(WindowShape::from_shift(fragments.trailing_zeros()))
        } else {
            Err(WindowError { fragments })
        }
    }

    /// One window for a whole message of `count` fragments (up to 2^31): the paper's order.
    pub const fn whole(count: u32) -> WindowShape {
        match count.checked_next_power_of_two() {
            Some(fragments) => WindowShape::from_shift(fragments.trailing_zeros()),
            None => WindowShape::from_shift(31),
        }
    }

    const fn from_shift(shift: u32) -> WindowShape {
        WindowShape {
            mask: (1 << shift) - 1,
            shift,
        }
    }

    /// Fragments per window.
    #[inline]
    pub const fn fragments(&self) -> u32 {
        self.mask + 1
    }

    /// Logarithm of the fragments per window.
    #[inline]
    pub const fn shift(&self) -> u8 {
        self.shift as u8
    }

    /// The window that fragment `index` belongs to.
    #[inline]
    pub const fn window_of(&self, index: u32) -> u32 {
        index >> self.shift
    }

    /// Windows of a message of `count` fragments.
    #[inline]
    pub const fn count_of_windows(&self, count: u32) -> u32 {
        count.div_ceil(self.fragments())
    }

    /// Indices of window `window` in a message of `count` fragments; empty behind the last window.
    #[inline]
    pub const fn range(&self, window: u32, count: u32) -> Range<u32> {
        let start = window as u64 * self.fragments() as u64;
        let end = start + self.fragments() as u64;
        let count = count as u64;
        (if start < count { start } else { count }) as u32..(if end < count { end } else { count }) as u32
    }

    /// The fragment that travels at `position` (from 0) of a message of `count` fragments. `position < count`.
    #[inline]
    pub const fn index_at(&self, position: u32, count: u32) -> u32 {
        let first = position & !self.mask;
        let full_last = position | self.mask;
        let message_last = count.wrapping_sub(1);
        let last = if full_last < message_last {
            full_last
        } else {
            message_last
        };
        // Mirrored inside the window; wrapping only where position >= count, which has no meaning.
        first.wrapping_add(last).wrapping_sub(position)
    }

    /// The position at which fragment `index` of a message of `count` fragments travels. `index < count`.
    #[inline]
    pub const fn position_of(&self, index: u32, count: u32) -> u32 {
        self.index_at(index, count)
    }

    /// Fragment `index` is the first of its window to travel.
    #[inline]
    pub const fn is_highest(&self, index: u32, count: u32) -> bool {
        index & self.mask == self.mask || index == count.wrapping_sub(1)
    }

    /// Fragment `index` is the last of its window to travel; its header lies over the window below.
    #[inline]
    pub const fn is_lowest(&self, index: u32) -> bool {
        index & self.mask == 0
    }

    /// All indices of a message of `count` fragments in the order in which they travel and are posted.
    pub fn transmit_order(&self, count: u32) -> TransmitOrder {
        TransmitOrder {
            shape: *self,
            position: 0,
            count,
        }
    }
}

/// Indices in the order in which they travel; see [`WindowShape::transmit_order`].
#[derive(Clone, Debug)]
pub struct TransmitOrder {
    shape: WindowShape,
    position: u32,
    count: u32,
}

impl Iterator for TransmitOrder {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        if self.position >= self.count {
            return None;
        }
        let index = self.shape.index_at(self.position, self.count);
        self.position += 1;
        Some(index)
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.count - self.position) as usize;
        (left, Some(left))
    }

    #[inline]
    fn nth(&mut self, n: usize) -> Option<u32> {
        let skipped = u32::try_from(n).unwrap_or(u32::MAX);
        self.position = self.position.saturating_add(skipped).min(self.count);
        self.next()
    }
}

impl ExactSizeIterator for TransmitOrder {}
impl FusedIterator for TransmitOrder {}

/// Invariant I5 for one message: when a window's lowest frame may be posted, and which bytes it covers meanwhile.
///
/// The *tail* of window `w` is its last `H + prefix` bytes, inside its highest fragment's payload: the place where the
/// header of window `w + 1`'s lowest frame will be written. For each tail, in this order:
///
/// ```text
///  highest fragment of w arrived     save the tail     lowest frame of w+1     its RX descriptor     restore the tail
///  (and its bytes are final)         └ tail_saved(w)   may be posted           └ lowest_arrived(w+1) └ readable again
/// ```
///
/// * The lowest frame of window `w + 1` is posted only when tail `w` is saved ([`TailRule::may_post_lowest`]). Entries
///   are used in the order of posting, so everything behind it waits as well.
/// * While tail `w` is saved and not restored, writes that fall into it go to the saved copy, and it is not readable
///   ([`TailRule::is_readable`]).
/// * The restore follows that entry's own RX descriptor, whatever packet filled it.
///
/// At most two tails are saved at once, since the lowest frame of window `w + 1` arrives before anything of window
/// `w + 2`: two saved copies suffice, and [`TailRule::slot`] says which one a tail uses.
///
/// ```
/// use lm_protocol::window::{TailRule, WindowShape};
///
/// let mut rule = TailRule::new(WindowShape::new(4)?, 8); // fragments 0..=3 and 4..=7
/// assert!(rule.may_post_lowest(0) && !rule.may_post_lowest(1));
/// assert!(rule.tail_saved(0)); // fragment 3 arrived, its last bytes were copied
/// assert!(rule.may_post_lowest(1) && !rule.is_readable(0));
/// assert_eq!(rule.lowest_arrived(1), Some(0)); // fragment 4's descriptor: copy tail 0 back
/// assert!(rule.is_readable(0) && rule.is_finished());
/// # Ok::<(), lm_protocol::window::WindowError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailRule {
    /// Windows of the message; its tails are those of all windows but the last.
    windows: u32,
    /// Tails below this number were saved.
    saved: u32,
    /// Tails below this number were restored.
    restored: u32,
}

impl TailRule {
    /// The rule's state before anything of a message of `count` fragments was posted.
    pub const fn new(shape: WindowShape, count: u32) -> TailRule {
        TailRule {
            windows: shape.count_of_windows(count),
            saved: 0,
            restored: 0,
        }
    }

    /// The lowest frame of `window` may be posted: no window lies below it, or that window's tail is saved.
    #[inline]
    pub const fn may_post_lowest(&self, window: u32) -> bool {
        window <= self.saved
    }

    /// The tail that has to be saved when fragment `index` has arrived and is final, if any.
    #[inline]
    pub const fn tail_to_save(&self, shape: WindowShape, index: u32, count: u32) -> Option<u32> {
        let window = shape.window_of(index);
        if shape.is_highest(index, count) && self.has_tail(window) && window == self.saved {
            Some(window)
        } else {
            None
        }
    }

    /// The tail of `window` was copied away. `false`, and nothing changes, when it is not this tail's turn: tails are
    /// saved in order, once, and only where a window follows.
    #[inline]
    #[must_use = "false means that the tail was saved out of turn"]
    pub const fn tail_saved(&mut self, window: u32) -> bool {
        let turn = window == self.saved && self.has_tail(window);
        if turn {
            self.saved += 1;
        }
        turn
    }

    /// The RX descriptor of `window`'s lowest entry is there: gives the tail to restore, once.
    ///
    /// `None` for window 0, which lies over the front margin, and when it is not this tail's turn.
    #[inline]
    #[must_use = "the tail has to be restored"]
    pub const fn lowest_arrived(&mut self, window: u32) -> Option<u32> {
        // window - 1 is the tail below; window 0 wraps to a number that is never next.
        let tail = window.wrapping_sub(1);
        if tail == self.restored && tail < self.saved {
            self.restored += 1;
            Some(tail)
        } else {
            None
        }
    }

    /// The tail of `window` is saved and not yet restored: its bytes live in the saved copy.
    #[inline]
    pub const fn is_saved(&self, window: u32) -> bool {
        self.restored <= window && window < self.saved
    }

    /// The rule does not stand against reading the tail of `window` (whether its bytes arrived is another question):
    /// it was restored, or no window follows it.
    #[inline]
    pub const fn is_readable(&self, window: u32) -> bool {
        window < self.restored || !self.has_tail(window)
    }

    /// Every tail was saved and restored.
    #[inline]
    pub const fn is_finished(&self) -> bool {
        self.restored == self.windows.saturating_sub(1)
    }

    /// Which of two saved copies the tail of `window` uses: 0 or 1.
    #[inline]
    pub const fn slot(window: u32) -> usize {
        (window & 1) as usize
    }

    /// A window follows `window`, so that its tail will be overwritten.
    #[inline]
    const fn has_tail(&self, window: u32) -> bool {
        window < self.windows.saturating_sub(1)
    }
}
