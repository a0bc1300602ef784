//! Names the interface of liblm_rt: a program that was linked with it is started with no other one.

/// Counts up with each change of `lm_rt.h` that programs which were built before do not stand.
const INTERFACE: u32 = 0;

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,liblm_rt.so.{INTERFACE}");
    println!("cargo:rerun-if-changed=build.rs");
}
