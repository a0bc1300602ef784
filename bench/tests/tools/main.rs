//! `lm-send`, `lm-recv` and `lm-bench` as processes on two hosts (network namespaces) on a veth pair. Needs root.

mod admission;
mod bad_input;
mod bed;
mod capabilities;
mod disk;
#[path = "../../../admission/tests/attacks/forger.rs"]
#[allow(dead_code)] // the attacks on admission use the rest
mod forger;
mod hosts;
mod impairments;
mod jumbo;
mod links;
mod measuring;
mod overlay;
mod pipelining;
mod quota;
mod receiving;
mod resume;
mod strangers;
mod suite;
mod transfers;
