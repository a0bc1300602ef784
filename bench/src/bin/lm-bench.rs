//! `lm-bench`; see [`lm_bench::measuring`].
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    lm_bench::measuring::main(std::env::args_os())
}
