//! lm-send, lm-recv and the benchmark programs.
