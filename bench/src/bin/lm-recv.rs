//! `lm-recv`; see [`lm_bench::recv`].
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    lm_bench::recv::main(std::env::args_os())
}
