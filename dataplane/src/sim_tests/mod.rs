//! The poll engine on the simulated NIC: two engines, one wire, the real rings; no root, no threads, no clock.

mod acknowledgements;
mod allocations;
mod astray;
mod bed;
mod beside;
mod copies;
mod delivery;
mod failures;
mod flood;
mod guard;
mod hostile;
mod instructions;
mod integrity;
mod jumbo;
mod one_copy;
mod pending;
mod rate;
mod resilience;
mod restart;
mod scenarios;
mod sharing;
mod soak;
mod starved;
mod transfer;
mod violations;
mod zero_copy;
mod zero_copy_ipfrag;

#[cfg(fuzzing)]
pub(crate) use hostile::besiege;
