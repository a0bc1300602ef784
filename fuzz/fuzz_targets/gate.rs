//! Random packets, sessions and posted frames through the loaded gate (`BPF_PROG_TEST_RUN`) and through its model: a
//! difference is a crash. Needs root. The steps are those of `ebpf/tests/differential.rs`, which replays the committed
//! corpus.

#![no_main]

use std::cell::RefCell;

#[path = "../../ebpf/tests/bed/mod.rs"]
mod bed;

thread_local! {
    static PAIR: RefCell<Option<bed::pair::Pair>> = const { RefCell::new(None) };
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    PAIR.with_borrow_mut(|pair| {
        let pair = pair.get_or_insert_with(|| {
            // SAFETY: gives this thread a network namespace of its own; no memory is passed.
            let unshared = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(unshared, 0, "needs root: {}", std::io::Error::last_os_error());
            bed::pair::Pair::new(Some(bed::packet::LOCAL))
        });
        bed::random::run(pair, bytes);
    });
});
