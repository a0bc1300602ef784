//! The ring layer against the cases of the kernel's own AF_XDP selftest (`tools/testing/selftests/bpf`, `test_xsk`).
//!
//! Each case runs on a veth pair with our rings at both ends, in native and in generic mode. `docs/conformance.md` lists
//! them, and the module `table` keeps that list true.

#![allow(unreachable_pub)] // a test program has no public interface; `pub` says what other modules of it use

#[path = "../bed/mod.rs"]
mod bed;

/// Makes a test of each function in both XDP modes: `case::native` and `case::generic`.
macro_rules! in_both_modes {
    ($($case:ident),+ $(,)?) => {$(
        mod $case {
            #[test]
            fn native() {
                crate::host::on_veth(crate::bed::Mode::Native, super::$case);
            }

            #[test]
            fn generic() {
                crate::host::on_veth(crate::bed::Mode::Generic, super::$case);
            }
        }
    )+};
}

mod host;
mod programs;
mod traffic;

mod descriptors;
mod multi_buffer;
mod polling;
mod program_cases;
mod send_receive;
mod statistics;
mod table;
