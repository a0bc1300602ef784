//! The admission daemon (`lm-admissiond`), as a program without privileges sees it.

pub mod ipc;
