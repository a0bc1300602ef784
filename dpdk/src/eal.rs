//! DPDK's beginning, once in a process, and the reasons for what it refuses.

use std::ffi::CString;
use std::sync::OnceLock;

use lm_dataplane::EndpointConfig;

use crate::shim::{self, Fault};

/// Memory for the packets of all ports of a process, in MiB, beside what is LM's: a port takes eight, and pages are taken as they are written.
const MEMORY_MIB: u64 = 256;

static BEGUN: OnceLock<Result<(), String>> = OnceLock::new();

/// Begins DPDK, unless this program has, with memory for an aimed endpoint of such a configuration.
///
/// Its memory is ordinary pages (`--no-huge`), it leaves no file and hears no other process (`--no-shconf`, `--no-telemetry`), and touches no
/// card (`--no-pci`): so it needs no privilege, and any number of processes have theirs.
///
/// # Errors
///
/// Why not, in one line.
pub(crate) fn begin(config: &EndpointConfig) -> Result<(), String> {
    let own = config.receive.max_message_len + config.memory.landing_len + config.memory.send_len;
    let memory = MEMORY_MIB + (own >> 20);
    let begin = move || {
        // It binds the thread that it begins on to one core. That thread ends.
        let thread = std::thread::spawn(move || {
            // The first one that this program may run on.
            let cores = rustix::thread::sched_getaffinity(None).unwrap_or_default();
            let core = (0..rustix::thread::CpuSet::MAX_CPU).find(|&core| cores.is_set(core));
            let core = core.unwrap_or_default();
            let arguments = format!(
                "lm --no-huge --no-shconf --no-telemetry --no-pci --iova-mode=va --log-level=error -m {memory} \
                 --lcores 0@{core}"
            );
            let arguments = arguments
                .split(' ')
                .map(|argument| CString::new(argument).expect("no zero in it"));
            let arguments: Vec<_> = arguments.collect();
            shim::begin(&arguments)
        });
        let begun = thread.join().expect("nothing there panics");
        begun.map_err(|fault| {
            let told = told(fault);
            format!("DPDK {told}; one program may begin it once, and needs 256 MiB of memory")
        })
    };
    BEGUN.get_or_init(begin).clone()
}

/// What could not be done, and why: the first error that DPDK logged, since what called the part that failed logs behind it.
pub(crate) fn told((fault, said): Fault) -> String {
    let reason = said.lines().map(str::trim).find(|line| !line.is_empty());
    format!("{fault}: {}", reason.unwrap_or("DPDK gives no reason"))
}
