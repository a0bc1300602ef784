//! Endpoints as a program has them, on the simulated NIC: what needs nothing of the engine but what is public.

mod instructions;
mod shaping;
mod waiting;
mod world;
