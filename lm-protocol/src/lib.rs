//! LM wire formats, geometry, windows and session state machines; no I/O, no clock.
#![forbid(unsafe_code)]
