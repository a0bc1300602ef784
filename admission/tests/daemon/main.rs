//! `lm-admissiond` as it runs: real namespaces, the real gate, and programs that speak to it by hand.

mod bed;
mod forging;
mod program;

mod granting;
mod handed;
mod neighbours;
mod restarting;
mod smoothing;
mod starting;
mod strangers;
mod unit;
mod unused;
