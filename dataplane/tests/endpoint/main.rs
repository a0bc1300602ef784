//! The public endpoint on the real kernel: veth pairs between namespaces, everything as an application sees it.

#[path = "../bed/mod.rs"]
mod bed;
mod harness;

mod checksums;
mod growth;
mod life;
mod messages;
mod modes;
mod polling;
mod reading;
mod sessions;
mod sharing;
mod wires;
