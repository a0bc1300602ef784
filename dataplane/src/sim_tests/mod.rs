//! The poll engine on the simulated NIC: two engines, one wire, the real rings; no root, no threads, no clock.

mod acknowledgements;
mod ahead;
mod allocations;
mod aside;
mod astray;
mod audience;
mod bed;
mod believed;
mod beside;
mod checksum;
mod copies;
mod crossing;
mod delivery;
mod depth;
mod failures;
mod fairness;
mod flood;
mod foreign;
mod growing;
mod guard;
mod handlers;
mod hostile;
mod incoming;
mod integrity;
mod jumbo;
mod keyed;
mod one_copy;
mod other_version;
mod placing;
mod rate;
mod real_time;
mod resilience;
mod restart;
mod rewriting;
mod scenarios;
mod shaping;
mod sharing;
mod shown;
mod soak;
mod source;
mod starved;
mod streams;
mod trace;
mod transfer;
mod untrue;
mod violations;
mod words;
mod writers;
mod zero_copy;
mod zero_copy_ipfrag;
mod zero_copy_losses;

/// Makes the long loops run in full: `cargo xtask soak --long` sets it. docs/testing.md lists them.
const LONG_VARIABLE: &str = "LM_LONG";

/// How often a long loop runs: in ordinary runs of the tests, or in full.
fn times(ordinary: u64, full: u64) -> u64 {
    match std::env::var_os(LONG_VARIABLE) {
        None => ordinary,
        Some(_) => full,
    }
}

#[cfg(test)]
pub(crate) use flood::grant;
pub(crate) use hostile::besiege;
