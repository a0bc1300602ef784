//! Memory of all kinds of pages.
#![cfg(test)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;

use super::*;

#[test]
fn a_mapping_is_whole_zeroed_pages() {
    let umem = Umem::new(5000, HugePages::Off).expect("8 KiB of memory");
    assert_eq!((umem.len(), umem.mapping().kind()), (8192, PageKind::Normal));
    assert_eq!(umem.read_header::<16>(8192 - 16), [0; 16]);
    assert!(Mapping::new(0, HugePages::Off).is_err());
    assert!(Mapping::new(u64::MAX, HugePages::Auto).is_err());
}

#[test]
fn shared_memory_is_the_same_memory_and_cannot_shrink() {
    let umem = Umem::shared(5000).expect("8 KiB of memory");
    let file = umem.mapping().file().expect("it has a file");
    umem.copy_to(8190, b"ab");
    let other = Mapping::of_file(file, 8192).expect("a second mapping");
    // SAFETY: no ring knows this memory and nothing is copied while the slice lives.
    assert_eq!(unsafe { other.slice(8190, 2) }, b"ab");
    assert_eq!(rustix::fs::ftruncate(file, 4096), Err(rustix::io::Errno::PERM));
    assert!(Mapping::shared(0).is_err() && Mapping::of_file(file, 0).is_err());
    assert!(
        Mapping::new(4096, HugePages::Off)
            .expect("a page")
            .file()
            .is_none()
    );
}

/// Reserved huge pages that nobody has taken.
fn free_huge_pages() -> u64 {
    let number = |name: &str| -> u64 {
        let text = std::fs::read_to_string(format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"));
        text.map_or(0, |text| text.trim().parse().expect("a number"))
    };
    number("free_hugepages") - number("resv_hugepages")
}

/// The number of the machine's huge pages, which one test at a time looks at or changes. `None`: it may not, or there are no such pages.
fn lock(to_change: bool) -> Option<File> {
    let mut how = OpenOptions::new();
    let number = how
        .read(true)
        .write(to_change)
        .open("/proc/sys/vm/nr_hugepages")
        .ok()?;
    rustix::fs::flock(&number, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    Some(number)
}

/// Huge pages that the machine reserves for a test, and gives back when it ends.
struct Reserved {
    number: File,
    count: u64,
}

impl Reserved {
    /// `None`: skipped.
    fn new(count: u64) -> Option<Reserved> {
        let skip = |why: &str| {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "{why}");
            println!("SKIPPED: {why}");
            None
        };
        let Some(number) = lock(true) else {
            return skip("huge pages are reserved by root, on a kernel that has them");
        };
        let mut reserved = Reserved { number, count: 0 };
        let before = reserved.read();
        reserved.write(before + count);
        reserved.count = reserved.read() - before;
        match reserved.count == count {
            true => Some(reserved),
            false => {
                skip("the memory is too fragmented for huge pages; reserve them at boot (vm.nr_hugepages)")
            }
        }
    }

    fn read(&self) -> u64 {
        let mut text = [0; 32];
        let len = self.number.read_at(&mut text, 0).expect("procfs");
        let text = std::str::from_utf8(&text[..len]).expect("digits");
        text.trim().parse().expect("a number")
    }

    fn write(&self, number: u64) {
        self.number
            .write_at(number.to_string().as_bytes(), 0)
            .expect("procfs");
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.write(self.read() - self.count);
    }
}

#[test]
fn huge_pages_are_promised_had_refused_and_given_back() {
    let Some(_reserved) = Reserved::new(6) else { return };
    let free = free_huge_pages();
    let mapping = Mapping::new(3 * HUGE_PAGE_LEN - 5000, HugePages::On).expect("three of six");
    assert_eq!(
        (mapping.len(), mapping.kind()),
        (3 * HUGE_PAGE_LEN, PageKind::Huge)
    );
    assert_eq!(free_huge_pages(), free - 3, "promised before any is touched");
    drop(mapping);
    assert_eq!(free_huge_pages(), free);

    // Of more addresses than there are pages only the first is had.
    let whole = (free + 10) * HUGE_PAGE_LEN;
    let umem = Umem::reserved(whole, HUGE_PAGE_LEN, HugePages::On).expect("one page");
    let mapping = umem.mapping();
    assert_eq!((mapping.len(), mapping.kind()), (whole, PageKind::Huge));
    assert_eq!(free_huge_pages(), free - 1);
    mapping.populate(0, 0).expect("nothing is wanted");
    mapping
        .populate(HUGE_PAGE_LEN, 3 * HUGE_PAGE_LEN)
        .expect("two more");
    assert_eq!(free_huge_pages(), free - 3);
    umem.copy_to(3 * HUGE_PAGE_LEN - 2, b"ab");
    let error = mapping
        .populate(3 * HUGE_PAGE_LEN, whole)
        .expect_err("no machine has as many");
    assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
    assert_eq!(
        free_huge_pages(),
        free - 3,
        "what there was of them is free again"
    );
    assert_eq!(&umem.read_header::<4>(3 * HUGE_PAGE_LEN - 4), b"\0\0ab");
    drop(umem);
    assert_eq!(free_huge_pages(), free);
}

#[test]
fn auto_falls_back_to_normal_pages() {
    let _lock = lock(false);
    let len = (free_huge_pages() + 1) * HUGE_PAGE_LEN;
    let mapping = Mapping::new(len, HugePages::Auto).expect("memory");
    assert_eq!((mapping.len(), mapping.kind()), (len, PageKind::Normal));
    assert!(Mapping::new(len, HugePages::On).is_err());
}

#[test]
fn copies_arrive_and_stay_inside() {
    let umem = Umem::new(4096, HugePages::Off).expect("a page");
    umem.copy_to(4090, b"abcdef");
    let mut back = [0; 6];
    umem.copy_from(4090, &mut back);
    assert_eq!(&back, b"abcdef");
    umem.copy_within(4090, 4088, 6);
    assert_eq!(&umem.read_header::<8>(4088), b"abcdefef");
    // SAFETY: no ring knows this memory and nothing is copied while the slice lives.
    assert_eq!(unsafe { umem.mapping().slice(4088, 3) }, b"abc");
    assert!(umem.mapping().contains(4096, 0) && !umem.mapping().contains(4096, 1));
    assert!(!umem.mapping().contains(u64::MAX, 2));
}

#[test]
#[should_panic(expected = "leave a mapping")]
fn a_copy_outside_panics() {
    Umem::new(4096, HugePages::Off)
        .expect("a page")
        .copy_to(4091, b"abcdef");
}

#[test]
fn fill_addresses_leave_room_for_a_chunk() {
    assert!(fill_address_is_valid(0, 2048, 2048));
    assert!(!fill_address_is_valid(1, 2048, 2048));
    assert!(!fill_address_is_valid(0, 4096, 2048));
    assert!(!fill_address_is_valid(u64::MAX, 2048, 1 << 30));
    assert!(!fill_address_is_valid(1 << 48, 2048, u64::MAX));
    assert!(!crosses_huge_page(HUGE_PAGE_LEN - 4096, 4096));
    assert!(crosses_huge_page(HUGE_PAGE_LEN - 4095, 4096));
}
