//! Pools of blocks (SS-RTUDP §3.2.1): memory for messages that is there from a socket's opening on, and stays there.
//!
//! A block has 1, 4, 8 or 16 pages. It takes a message of 100 bytes less: in front and behind, a sender that adds headers in place needs
//! these (figure 3). The pages are written and locked when the pool is made, so that no message waits for one.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};

use lm_dataplane::HugePages;
use lm_dataplane::memory::{HUGE_PAGE_LEN, Mapping, PAGE_LEN, PageKind};

/// Pages of a block, the shortest first.
pub(crate) const PAGES: [u64; 4] = [1, 4, 8, 16];
/// Bytes of a block that no message takes: 68 in front, 32 behind.
const MARGINS_LEN: u64 = 68 + 32;
/// Blocks of packets begin on lines of the cache.
const LINE_LEN: u64 = 64;

/// How many blocks a socket has for messages of several packets, in each direction. Messages are put into the shortest that there are for
/// their length: of 1 page up to 3996 bytes, of 4 up to 16,284, of 8 up to 32,668, of 16 up to 65,436.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Blocks of 1 page.
    pub of_1: u32,
    /// Blocks of 4 pages.
    pub of_4: u32,
    /// Blocks of 8 pages.
    pub of_8: u32,
    /// Blocks of 16 pages.
    pub of_16: u32,
}

impl Blocks {
    /// Pages of each kind of block that there is, and how many there are.
    pub(crate) fn counts(self) -> impl Iterator<Item = (u64, u32)> {
        let counts = [self.of_1, self.of_4, self.of_8, self.of_16];
        PAGES.into_iter().zip(counts).filter(|(_, count)| *count > 0)
    }

    /// The longest message that there is a block for.
    pub(crate) fn longest(self) -> Option<usize> {
        self.counts().last().map(|(pages, _)| message_max(pages))
    }
}

/// The longest message in a block of so many pages.
fn message_max(pages: u64) -> usize {
    (pages * PAGE_LEN - MARGINS_LEN) as usize
}

/// Blocks of one length.
#[derive(Debug)]
struct Kind {
    message_max: usize,
    /// Where the first one begins, and how far on the next.
    first: u64,
    stride: u64,
    /// A bit for each that nobody has. Taking one and giving it back is one step each, so that no thread waits for another that was
    /// interrupted in between.
    free: Box<[AtomicU64]>,
}

impl Kind {
    fn new(message_max: usize, (first, stride): (u64, u64), count: usize) -> Kind {
        let word = |begin: usize| match count - begin {
            more if more < 64 => (1 << more) - 1,
            _ => u64::MAX,
        };
        Kind {
            message_max,
            first,
            stride,
            free: (0..count)
                .step_by(64)
                .map(|begin| AtomicU64::new(word(begin)))
                .collect(),
        }
    }

    /// Where a block begins that is the caller's now.
    fn take(&self) -> Option<u64> {
        for (at, word) in self.free.iter().enumerate() {
            let mut free = word.load(Ordering::Relaxed);
            while free != 0 {
                let bit = free.trailing_zeros();
                // Acquire: pairs with `give_back`, behind which nobody touches the block.
                free = word.fetch_and(!(1 << bit), Ordering::Acquire);
                if free & 1 << bit != 0 {
                    return Some(self.first + (at as u64 * 64 + u64::from(bit)) * self.stride);
                }
            }
        }
        None
    }

    fn give_back(&self, start: u64) {
        let number = (start - self.first) / self.stride;
        let (at, bit) = (number as usize / 64, number % 64);
        self.free[at].fetch_or(1 << bit, Ordering::Release);
    }
}

/// The blocks of a socket, in one direction.
#[derive(Debug)]
pub(crate) struct Pool {
    /// `None`: there are no blocks.
    memory: Option<Mapping>,
    /// The shortest first.
    kinds: Vec<Kind>,
}

impl Pool {
    /// Blocks, and before them so many for messages of one packet, if these are any.
    ///
    /// # Errors
    /// What mmap(2) and mlock(2) say; `OutOfMemory` where the machine has not as much.
    pub(crate) fn new(packets: Option<(usize, usize)>, blocks: Blocks) -> io::Result<Arc<Pool>> {
        let of_packets = packets.map(|(payload_max, count)| {
            (
                payload_max,
                (payload_max as u64).next_multiple_of(LINE_LEN),
                count,
            )
        });
        let of_pages =
            (blocks.counts()).map(|(pages, count)| (message_max(pages), pages * PAGE_LEN, count as usize));
        let mut len = 0;
        let mut kinds = Vec::new();
        for (message_max, block_len, count) in of_packets.into_iter().chain(of_pages) {
            // What goes beyond 64 bits of addresses was refused before it is counted out.
            let end = (count as u64)
                .checked_mul(block_len)
                .and_then(|all| all.checked_add(len));
            let end = end
                .filter(|end| is_there(*end))
                .ok_or(io::ErrorKind::OutOfMemory)?;
            kinds.push(Kind::new(message_max, (len, block_len), count));
            len = end.next_multiple_of(PAGE_LEN);
        }
        let memory = (len > 0).then(|| populated(len)).transpose()?;
        Ok(Arc::new(Pool { memory, kinds }))
    }

    /// Which kind a message of `len` bytes has. `None`: none is as long.
    pub(crate) fn kind(&self, len: usize) -> Option<usize> {
        self.kinds.iter().position(|kind| len <= kind.message_max)
    }

    /// A block for a message of `len` bytes. `None`: all of its kind have owners, or none is as long.
    pub(crate) fn take(self: &Arc<Pool>, len: usize) -> Option<Block> {
        let kind = self.kind(len)?;
        let start = self.kinds[kind].take()?;
        let pool = Arc::clone(self);
        Some(Block {
            pool,
            kind,
            start,
            len,
        })
    }

    /// A block that is lent: for a message of `len` bytes, and as much longer ones as it takes.
    pub(crate) fn lend(self: &Arc<Pool>, len: usize) -> Option<RtBuffer> {
        self.take(len).map(RtBuffer::whole)
    }
}

/// Whether the machine has so many bytes left. Where it does not say so, mmap(2) has the last word.
fn is_there(len: u64) -> bool {
    let Ok(all) = std::fs::read_to_string("/proc/meminfo") else {
        return true;
    };
    let available = all.lines().find_map(|line| {
        let kib = line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?;
        kib.parse::<u64>().ok()
    });
    available.is_none_or(|kib| len / 1024 <= kib)
}

/// Memory that is there: written, and locked.
fn populated(len: u64) -> io::Result<Mapping> {
    static IS_SAID: Once = Once::new();
    let memory = Mapping::new(len, HugePages::Auto)?;
    if len >= HUGE_PAGE_LEN && memory.kind() == PageKind::Normal {
        IS_SAID.call_once(|| {
            tracing::info!(
                "real-time blocks are on ordinary pages: too few huge ones are free; reserve some (sysctl \
                 vm.nr_hugepages)"
            );
        });
    }
    // SAFETY: the range is the mapping that was just made; mlock(2) changes no byte of it. It is unlocked when it is unmapped.
    let locked = unsafe { libc::mlock(memory.base().as_ptr().cast(), memory.len() as usize) };
    if locked != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: nobody else has the mapping yet.
    unsafe { memory.slice_mut(0, memory.len()) }.fill(0);
    Ok(memory)
}

/// A message's memory. It goes back to its pool when it is dropped, on whatever thread.
#[derive(Debug)]
pub(crate) struct Block {
    pool: Arc<Pool>,
    pub(crate) kind: usize,
    start: u64,
    len: usize,
}

impl Block {
    fn memory(&self) -> &Mapping {
        self.pool.memory.as_ref().expect("there are blocks")
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the range is this block's alone: its start was taken from the pool's free ones and goes back on drop, and blocks of a pool
        // do not overlap. Who has the block mutably is the only one who writes it.
        unsafe { self.memory().slice(self.start, self.len as u64) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the block is borrowed mutably.
        unsafe { self.memory().slice_mut(self.start, self.len as u64) }
    }

    fn room(&self) -> usize {
        self.pool.kinds[self.kind].message_max
    }
}

/// Memory of a socket for one message, which the application writes where it leaves from ([`RtSocket::buffer`](crate::RtSocket::buffer)): as
/// many bytes as the longest message that it takes. Sent, it is locked until the last packet's completion (figure 3).
#[derive(Debug)]
pub struct RtBuffer(Block);

impl RtBuffer {
    /// Where it begins. For those who write it without borrowing it: while it is not sent, and is not dropped.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        let start = self.0.start as usize;
        // SAFETY: the block lies in its pool's mapping. No reference to its bytes is made: what was handed out before stays valid.
        unsafe { self.0.memory().base().as_ptr().add(start) }
    }

    /// The message in its first `len` bytes.
    pub(crate) fn cut(mut self, len: usize) -> Block {
        self.0.len = len;
        self.0
    }

    /// All of a block.
    pub(crate) fn whole(mut block: Block) -> RtBuffer {
        block.len = block.room();
        RtBuffer(block)
    }

    pub(crate) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.0.pool, pool)
    }
}

impl Deref for RtBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for RtBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.kinds[self.kind].give_back(self.start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_apart_and_come_back() {
        let blocks = Blocks {
            of_1: 2,
            of_16: 1,
            ..Blocks::default()
        };
        let pool = Pool::new(Some((1416, 3)), blocks).unwrap();
        let lens = [1416, 0, 7, 1417, 3996, 3997];
        let mut taken: Vec<Block> = lens.map(|len| pool.take(len).unwrap()).into();
        for (block, byte) in taken.iter_mut().zip(1..) {
            block.bytes_mut().fill(byte);
        }
        for (len, (block, byte)) in lens.into_iter().zip(taken.iter().zip(1..)) {
            assert_eq!(block.bytes().len(), len);
            assert!(block.bytes().iter().all(|found| *found == byte));
        }
        assert!(
            pool.take(1).is_none() && pool.take(3996).is_none(),
            "another kind is no remedy"
        );
        assert!(pool.take(65_436).is_none() && pool.take(65_437).is_none());
        taken.pop();
        assert!(pool.take(65_436).is_some());
        drop(taken);
        assert_eq!([(); 3].map(|()| pool.take(1)).iter().flatten().count(), 3);
        assert!(Pool::new(None, Blocks::default()).unwrap().take(0).is_none());
    }

    /// What the kernel says of a pool's memory: a line of `/proc/self/smaps`, without its name.
    fn said_of(pool: &Pool, name: &str) -> String {
        let start = pool
            .memory
            .as_ref()
            .expect("there are blocks")
            .base()
            .as_ptr()
            .addr();
        let all = std::fs::read_to_string("/proc/self/smaps").expect("procfs");
        let contains = |line: &str| {
            let (from, to) = line.split_once(' ')?.0.split_once('-')?;
            let [from, to] = [from, to].map(|word| usize::from_str_radix(word, 16).ok());
            Some((from?..to?).contains(&start))
        };
        let mut lines = all.lines().skip_while(|line| !contains(line).unwrap_or(false));
        let line = lines.find_map(|line| line.strip_prefix(name));
        line.expect(name).trim().to_owned()
    }

    /// The pages are there and locked, and huge ones where the kernel has such: reserved ones, or those that it makes itself.
    #[test]
    fn memory_is_there_and_locked_and_on_huge_pages_where_there_are_some() {
        let blocks = Blocks {
            of_16: 64,
            ..Blocks::default()
        };
        let pool = Pool::new(None, blocks).expect("4 MiB");
        let flags = said_of(&pool, "VmFlags:");
        let has = |flag: &str| flags.split(' ').any(|one| one == flag);
        assert!(has("lo"), "{flags}");
        let (is_reserved, makes) = (
            has("ht"),
            std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists(),
        );
        assert!(is_reserved || has("hg") || !makes, "{flags}");
        if !is_reserved {
            assert_eq!(said_of(&pool, "Rss:"), said_of(&pool, "Size:"));
            assert_eq!(said_of(&pool, "Locked:"), said_of(&pool, "Size:"));
        }
    }

    #[test]
    fn a_block_has_a_message_of_100_bytes_less() {
        let longest = |blocks: Blocks| blocks.longest();
        let none = Blocks::default();
        assert_eq!(longest(none), None);
        assert_eq!(longest(Blocks { of_1: 1, ..none }), Some(3996));
        assert_eq!(
            longest(Blocks {
                of_4: 1,
                of_1: 1,
                ..none
            }),
            Some(16_284)
        );
        assert_eq!(longest(Blocks { of_8: 1, ..none }), Some(32_668));
        assert_eq!(longest(Blocks { of_16: 1, ..none }), Some(65_436));
    }

    #[test]
    fn more_than_there_is_cannot_be_had() {
        for of_16 in [1 << 28, u32::MAX] {
            let error = Pool::new(
                None,
                Blocks {
                    of_16,
                    ..Blocks::default()
                },
            )
            .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        }
    }
}
