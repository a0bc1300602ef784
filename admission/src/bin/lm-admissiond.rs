//! `lm-admissiond`; see [`lm_admission::cli`].
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    lm_admission::cli::main(std::env::args_os())
}
