//! What a tool keeps of its privileges once everything is open: what comes from the network from then on meets a program that
//! may use its interface, and nothing else that root may.
//!
//! | capability | for |
//! |---|---|
//! | CAP_BPF | the gate's maps, when a channel is built anew and sessions come and go |
//! | CAP_NET_ADMIN | sockets in the gate's map; steering; interrupts held back |
//! | CAP_NET_RAW | AF_XDP sockets of a channel that is built anew |
//! | CAP_IPC_LOCK | pinning their memory |
//!
//! The user stays the same: notes on steering in `/run/lm` are root's.

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};

use crate::cli::Failure;

const KEPT: [Capability; 4] = [
    Capability::CAP_BPF,
    Capability::CAP_NET_ADMIN,
    Capability::CAP_NET_RAW,
    Capability::CAP_IPC_LOCK,
];

/// Gives up every capability but what a tool keeps, and the way to others. Where `can_write` says no without it, CAP_DAC_OVERRIDE stays,
/// too: `true` then. No other thread may run yet: the kernel does this by thread.
///
/// # Errors
/// What `capset(2)` or `prctl(2)` reports.
pub fn drop_rest(can_write: impl Fn() -> bool) -> Result<bool, Failure> {
    let told = |error: CapsError| {
        Failure::new(format!(
            "cannot give up capabilities: {error}; run without the sandbox that forbids it"
        ))
    };
    let has = caps::read(None, CapSet::Permitted).map_err(told)?;
    // The bounding set needs CAP_SETPCAP, which root has.
    if has.contains(&Capability::CAP_SETPCAP) {
        for capability in caps::all() {
            // EINVAL for what this kernel does not have.
            let _ = caps::drop(None, CapSet::Bounding, capability);
        }
    }
    let _ = caps::clear(None, CapSet::Ambient);
    let mut kept: CapsHashSet = KEPT
        .into_iter()
        .filter(|capability| has.contains(capability))
        .collect();
    caps::set(None, CapSet::Effective, &kept).map_err(told)?;
    let overrides = has.contains(&Capability::CAP_DAC_OVERRIDE) && !can_write();
    if overrides {
        kept.insert(Capability::CAP_DAC_OVERRIDE);
        caps::set(None, CapSet::Effective, &kept).map_err(told)?;
    }
    caps::set(None, CapSet::Permitted, &kept).map_err(told)?;
    caps::clear(None, CapSet::Inheritable).map_err(told)?;
    rustix::thread::set_no_new_privs(true)
        .map_err(|error| Failure::new(format!("cannot forbid new privileges: {error}; use Linux 6.x")))?;
    Ok(overrides)
}
