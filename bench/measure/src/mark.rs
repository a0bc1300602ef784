//! Instructions that do nothing but say where a measurement is, for whoever counts a virtual machine's instructions (`xtask/plugin`): `nop`s of eight
//! bytes, of which the last four no other program has.

/// The next row begins: windows are its own.
pub const ROW: u8 = 0;
/// A window begins: what counts comes now.
pub const BEGIN: u8 = 1;
/// It ends.
pub const END: u8 = 2;
/// What this row still does is not counted.
pub const DONE: u8 = 3;

/// What all marks begin with: `nopl 0x??214d4c(%rax,%rax)`. The last byte says which one it is.
pub const PREFIX: [u8; 7] = [0x0f, 0x1f, 0x84, 0, b'L', b'M', b'!'];

/// Passes a mark. On other processors than x86-64 there are none.
#[inline(always)]
pub fn pass<const MARK: u8>() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a `nop` changes no register, no flag and no memory. It is taken for one that might, so that it stays where it is written.
    unsafe {
        std::arch::asm!(".byte 0x0f, 0x1f, 0x84, 0, 0x4c, 0x4d, 0x21, {}", const MARK, options(nostack, preserves_flags));
    }
}
