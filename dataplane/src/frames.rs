//! Frames: equal UMEM slots for small packets, and who owns each.
//!
//! ```text
//!              take                 post / transmit
//!   [pool] ───────────▶ [engine] ───────────────────▶ [kernel]
//!     ▲                    ▲                             │ RX descriptor / completion
//!     │ put                └─────────────────────────────┘
//!     │                    │ shown to the application (`Message`, `SendRegion`)
//!     └──── release queue ◀┘
//! ```
//! A frame outside the pool is a [`Frame`], a token that can be moved but not copied, so it cannot be posted
//! twice. While the kernel or the application owns a frame the token is dissolved into its UMEM address
//! ([`Frame::into_address`]) and is made anew from that address when it comes back.

/// A UMEM slot taken from a [`FramePool`]. Not `Clone`, not `Copy`.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a frame that is dropped is lost to its pool"]
pub(crate) struct Frame {
    address: u64,
}

impl Frame {
    /// UMEM address of the slot's first byte.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Dissolves the token: somebody else owns the slot now.
    pub(crate) fn into_address(self) -> u64 {
        self.address
    }
}

/// A stack of free slots: the most recently used one comes first, while its lines are still in the cache.
#[derive(Debug)]
pub(crate) struct FramePool {
    start: u64,
    /// log2 of a frame's length: positions are asked for several times for every packet, and a division is felt.
    frame_shift: u32,
    count: u32,
    free: Vec<u32>,
}

impl FramePool {
    /// `count` frames of `frame_len` bytes each, a power of two, one after the other from UMEM address `start`.
    pub(crate) fn new(start: u64, frame_len: u32, count: u32) -> FramePool {
        assert!(frame_len.is_power_of_two(), "frames of {frame_len} bytes");
        FramePool {
            start,
            frame_shift: frame_len.ilog2(),
            count,
            free: (0..count).rev().collect(),
        }
    }

    #[inline]
    fn at(&self, index: u64) -> u64 {
        self.start + (index << self.frame_shift)
    }

    /// Takes a free frame.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Frame> {
        let index = self.free.pop()?;
        Some(Frame {
            address: self.at(u64::from(index)),
        })
    }

    /// Gives a frame back.
    #[inline]
    pub(crate) fn put(&mut self, frame: Frame) {
        assert!(
            self.free.len() < self.count as usize,
            "more frames came back than there are"
        );
        self.free.push(self.index(&frame) as u32);
    }

    /// The token of the frame in which the UMEM address `address` lies; the caller knows that nobody owns
    /// that frame any more. `None` when the address belongs to no frame of this pool.
    #[inline]
    pub(crate) fn reclaim(&self, address: u64) -> Option<Frame> {
        let offset = address.checked_sub(self.start)?;
        let index = offset >> self.frame_shift;
        (index < u64::from(self.count)).then(|| Frame {
            address: self.at(index),
        })
    }

    /// The token of frame number `index`, as [`reclaim`](FramePool::reclaim).
    #[inline]
    pub(crate) fn reclaim_index(&self, index: usize) -> Frame {
        debug_assert!(index < self.count as usize);
        Frame {
            address: self.at(index as u64),
        }
    }

    /// Position of the frame in which `address` lies.
    #[inline]
    pub(crate) fn index_of(&self, address: u64) -> Option<usize> {
        let index = address.checked_sub(self.start)? >> self.frame_shift;
        (index < u64::from(self.count)).then_some(index as usize)
    }

    /// The same, where `len` bytes from `address` on lie in that frame.
    #[inline]
    pub(crate) fn index_within(&self, address: u64, len: u32) -> Option<usize> {
        let within = (address.wrapping_sub(self.start) & ((1 << self.frame_shift) - 1)) + u64::from(len);
        self.index_of(address).filter(|_| within <= 1 << self.frame_shift)
    }

    /// Position of a frame.
    #[inline]
    pub(crate) fn index(&self, frame: &Frame) -> usize {
        ((frame.address - self.start) >> self.frame_shift) as usize
    }

    /// Frames that are free now.
    #[inline]
    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    /// First byte behind the last frame.
    #[cfg(test)]
    pub(crate) fn end(&self) -> u64 {
        self.at(u64::from(self.count))
    }

    /// Number of frames, free or not.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_distinct_and_come_back() {
        let mut pool = FramePool::new(4096, 2048, 3);
        let (a, b, c) = (pool.take().unwrap(), pool.take().unwrap(), pool.take().unwrap());
        assert_eq!((a.address(), b.address(), c.address()), (4096, 6144, 8192));
        assert!(pool.take().is_none());
        let address = b.into_address() + 256;
        let frame = pool.reclaim(address).unwrap();
        assert_eq!(frame.address(), 6144);
        assert_eq!(pool.index_of(address), Some(1));
        pool.put(frame);
        assert_eq!(pool.available(), 1);
        assert!(pool.reclaim(pool.end()).is_none());
        assert!(pool.reclaim(0).is_none());
        pool.put(a);
        pool.put(c);
        assert_eq!(pool.available(), 3);
    }
}
