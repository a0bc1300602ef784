//! `lm-send`; see [`lm_bench::send`].
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    lm_bench::send::main(std::env::args_os())
}
