//! A plugin of QEMU's (docs/devel/tcg-plugins.rst, version 3 of its interface: QEMU 9.1) that counts the guest's instructions by where they lie, in
//! windows that the guest's programs mark ([`lm_measure::mark`]). The guest sees nothing of it, and its clock does not either.
//!
//! For each window it appends to the file of its option `out` a line `window ROW` and, for each 16 bytes of addresses in which instructions were executed, a line
//! `ADDRESS COUNT`, the address in hexadecimal. (Counters that QEMU's own code adds to, `…_inline_per_vcpu`, damaged the guest's kernel in QEMU 10.0.13 under
//! `-icount`; a call for each block does not.) A block of instructions counts where it begins, and whole: one that a device's register or a fault cuts short is
//! counted up to its end.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use lm_measure::mark;

/// Places that can be told apart; a machine with these tools comes to a third of that. What is beyond is counted at address 0.
const PLACES: usize = 1 << 18;
/// Instructions of two functions do not share so many bytes, which is what compilers align them to.
const PLACE_LEN: u64 = 16;

/// Instructions of each place so far. Both processors take turns in one thread (`-accel tcg,thread=single`).
static COUNTERS: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// What a block's callback is told: the place, above so many bits of length. A block has 512 instructions at most (`TCG_MAX_INSNS`).
const LEN_BITS: u32 = 10;

/// `QEMU_PLUGIN_CB_NO_REGS`.
const NO_REGISTERS: c_int = 0;

// Of include/qemu/qemu-plugin.h; handles of blocks and instructions are good while the block is translated.
unsafe extern "C" {
    fn qemu_plugin_register_vcpu_tb_trans_cb(id: u64, callback: extern "C" fn(u64, *mut c_void));
    fn qemu_plugin_tb_n_insns(block: *const c_void) -> usize;
    fn qemu_plugin_tb_vaddr(block: *const c_void) -> u64;
    fn qemu_plugin_tb_get_insn(block: *const c_void, index: usize) -> *mut c_void;
    fn qemu_plugin_insn_data(instruction: *const c_void, to: *mut u8, len: usize) -> usize;
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut c_void,
        callback: extern "C" fn(c_uint, *mut c_void),
        flags: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_tb_exec_cb(
        block: *mut c_void,
        callback: extern "C" fn(c_uint, *mut c_void),
        flags: c_int,
        data: *mut c_void,
    );
}

/// The version of the interface that is used here, by the name that QEMU looks for.
#[unsafe(no_mangle)]
pub static qemu_plugin_version: c_int = 3;

struct Counts {
    out: File,
    /// Places by their addresses.
    places: HashMap<u64, usize>,
    /// Rows begun, and whether windows are the last one's.
    rows: usize,
    counts: bool,
    /// All counters when the window began.
    begun: Option<Vec<u64>>,
}

static COUNTS: Mutex<Option<Counts>> = Mutex::new(None);

fn counts() -> MutexGuard<'static, Option<Counts>> {
    COUNTS.lock().expect("a panic in a call of QEMU's ends it")
}

/// Begins to count; 1 where there is no file to write to.
///
/// # Safety
///
/// QEMU's promise: the `count` strings of `options` are good during the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn qemu_plugin_install(
    id: u64,
    _: *const c_void,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    let out = (0..count as usize).find_map(|at| {
        // SAFETY: the caller's promise: there are so many, and each is a string.
        let option = unsafe { CStr::from_ptr(*options.add(at)) };
        File::create(option.to_str().ok()?.strip_prefix("out=")?).ok()
    });
    let Some(out) = out else {
        eprintln!("lm-plugin needs a file to write to: out=FILE");
        return 1;
    };
    *counts() = Some(Counts {
        out,
        places: HashMap::from([(0, 0)]),
        rows: 0,
        counts: false,
        begun: None,
    });
    // SAFETY: the callback is there as long as the plugin.
    unsafe { qemu_plugin_register_vcpu_tb_trans_cb(id, translated) };
    0
}

/// A block is translated: it shall count its instructions whenever it is executed, and tell of marks.
extern "C" fn translated(_: u64, block: *mut c_void) {
    let mut counts = counts();
    let Some(counts) = counts.as_mut() else { return };
    // SAFETY: the block is good during this call.
    let (len, address) = unsafe { (qemu_plugin_tb_n_insns(block), qemu_plugin_tb_vaddr(block)) };
    let next = counts.places.len();
    let place = match counts.places.get(&(address & !(PLACE_LEN - 1))) {
        Some(&place) => place,
        None if next < PLACES => *counts.places.entry(address & !(PLACE_LEN - 1)).or_insert(next),
        None => 0,
    };
    let executed = (place << LEN_BITS | len) as *mut c_void;
    // SAFETY: the block is good, and the callback takes its data for a number.
    unsafe { qemu_plugin_register_vcpu_tb_exec_cb(block, passed_through, NO_REGISTERS, executed) };
    for at in 0..len {
        let mut bytes = [0; 8];
        // SAFETY: the block has so many instructions.
        let instruction = unsafe { qemu_plugin_tb_get_insn(block, at) };
        // SAFETY: the instruction is good during this call, and no more bytes are written than there are.
        let copied = unsafe { qemu_plugin_insn_data(instruction, bytes.as_mut_ptr(), bytes.len()) };
        if copied == bytes.len() && bytes.starts_with(&mark::PREFIX) {
            let number = usize::from(bytes[7]) as *mut c_void;
            // SAFETY: the instruction is good, and the callback takes its data for a number.
            unsafe { qemu_plugin_register_vcpu_insn_exec_cb(instruction, passed, NO_REGISTERS, number) };
        }
    }
}

/// A block is executed.
extern "C" fn passed_through(_: c_uint, executed: *mut c_void) {
    let executed = executed as usize;
    let counter = &COUNTERS[executed >> LEN_BITS];
    let len = (executed & ((1 << LEN_BITS) - 1)) as u64;
    // Relaxed, and no addition by the processor: one thread.
    counter.store(counter.load(Ordering::Relaxed) + len, Ordering::Relaxed);
}

/// A mark is passed.
extern "C" fn passed(_: c_uint, number: *mut c_void) {
    let mut counts = counts();
    let Some(counts) = counts.as_mut() else { return };
    match number as usize as u8 {
        mark::ROW => {
            counts.rows += 1;
            (counts.counts, counts.begun) = (true, None);
        }
        mark::BEGIN if counts.counts => counts.begun = Some(all()),
        mark::END => {
            if let Some(begun) = counts.begun.take() {
                counts.write(&begun);
            }
        }
        mark::DONE => (counts.counts, counts.begun) = (false, None),
        _ => {}
    }
}

/// What is counted so far.
fn all() -> Vec<u64> {
    (COUNTERS.iter())
        .map(|counter| counter.load(Ordering::Relaxed))
        .collect()
}

impl Counts {
    fn write(&mut self, begun: &[u64]) {
        let now = all();
        let mut text = format!("window {}\n", self.rows - 1);
        for (address, &place) in &self.places {
            let came = now[place] - begun[place];
            if came > 0 {
                writeln!(text, "{address:x} {came}").expect("memory takes it");
            }
        }
        if let Err(error) = self.out.write_all(text.as_bytes()) {
            eprintln!("lm-plugin cannot write: {error}");
        }
    }
}
