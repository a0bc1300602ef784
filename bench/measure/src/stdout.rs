//! What becomes of a program whose standard output takes nothing more.

use std::any::Any;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use rustix::io::Errno;

/// Exit code of a program that ended because nobody reads what it prints: what a shell makes of SIGPIPE.
const EXIT_UNREAD: u8 = 141;

/// What a program's `main` returns, where `run` prints with `println!`. Whoever reads that may go, as `| head -1` does:
/// then the program ends and says nothing. It unwinds, as SIGPIPE would leave behind what it has to clear up. Why else
/// nothing can be printed is said in one line.
pub fn main(program: &str, run: impl FnOnce() -> ExitCode) -> ExitCode {
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if unprinted(panic.payload()).is_none() {
            others(panic);
        }
    }));
    panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| match unprinted(&*payload) {
        None => panic::resume_unwind(payload),
        Some(error) if error == io::Error::from(Errno::PIPE).to_string() => ExitCode::from(EXIT_UNREAD),
        Some(error) => {
            eprintln!("{program}: cannot print: {error}; check standard output");
            ExitCode::FAILURE
        }
    })
}

/// Why `println!` panicked, if that is what did: std has no type for it.
fn unprinted(payload: &(dyn Any + Send)) -> Option<&str> {
    let text = payload.downcast_ref::<String>()?;
    text.strip_prefix("failed printing to stdout: ")
}
