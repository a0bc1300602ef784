//! The gate: LM's XDP program, its loader and its maps.
