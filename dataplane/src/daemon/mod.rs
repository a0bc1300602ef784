//! The admission daemon (`lm-admissiond`), as a program without privileges sees it.

mod client;
mod error;
pub mod ipc;
#[cfg(test)]
mod tests;

pub(crate) use client::Client;
pub(crate) use client::News;
pub use error::DaemonError;
