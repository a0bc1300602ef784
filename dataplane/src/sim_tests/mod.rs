//! The poll engine on the simulated NIC: two engines, one wire, the real rings; no root, no threads, no clock.

mod allocations;
mod bed;
mod copies;
mod delivery;
mod failures;
mod hostile;
mod integrity;
mod resilience;
mod scenarios;
mod soak;
mod transfer;
mod violations;

#[cfg(fuzzing)]
pub(crate) use hostile::besiege;
