//! Admission policy of LM receivers.
