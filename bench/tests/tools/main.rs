//! `lm-send`, `lm-recv` and `lm-bench` as processes on two hosts (network namespaces) on a veth pair. Needs root.

mod admission;
mod bad_input;
mod bed;
mod impairments;
mod jumbo;
mod landing;
mod measuring;
mod overlay;
mod suite;
mod transfers;
