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

use caps::{CapSet, Capability, CapsHashSet};
use lm_admission::privileges::{KEPT, close_ways, keep, told};

use crate::cli::Failure;

/// Gives up every capability but what a tool keeps, and the way to others. Where `can_write` says no without it, CAP_DAC_OVERRIDE stays,
/// too: `true` then. No other thread may run yet: the kernel does this by thread.
///
/// # Errors
/// What `capset(2)` or `prctl(2)` reports.
pub fn drop_rest(can_write: impl Fn() -> bool) -> Result<bool, Failure> {
    let told = |error| Failure::new(told(error));
    let has = caps::read(None, CapSet::Permitted).map_err(told)?;
    close_ways();
    let kept = KEPT.into_iter().filter(|capability| has.contains(capability));
    let mut kept: CapsHashSet = kept.collect();
    caps::set(None, CapSet::Effective, &kept).map_err(told)?;
    let overrides = has.contains(&Capability::CAP_DAC_OVERRIDE) && !can_write();
    kept.extend(overrides.then_some(Capability::CAP_DAC_OVERRIDE));
    keep(&kept).map_err(Failure::new)?;
    Ok(overrides)
}
