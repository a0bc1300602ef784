//! Admission between hosts: its bytes, its rules, and what becomes of it on a bad network.

mod bad_input;
mod cases;
mod checks;
mod cluster;
mod gate;
mod golden;
mod keyless;
mod race;
mod rates;
mod seeds;
mod soak;
mod world;
