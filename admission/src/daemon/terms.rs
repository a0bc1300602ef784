//! On which terms a session is granted.
