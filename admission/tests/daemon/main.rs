//! `lm-admissiond` as it runs: real namespaces, the real gate, and programs that speak to it by hand.

mod bed;
mod program;

mod granting;
mod hostile;
mod restarting;
mod starting;
mod strangers;
