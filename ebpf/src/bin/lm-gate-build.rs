//! Rebuilds the gate's object, or says whether it is stale. `cargo xtask gate` calls it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lm_ebpf::recipe::{self, Freshness};

const USAGE: &str = "lm-gate-build [--check]
  rebuilds ebpf/gate.o and ebpf/gate.sum from ebpf/src/gate.c and gate.h (needs clang and llvm-strip)
  --check  changes nothing; fails if the object is stale";

fn main() -> ExitCode {
    // Cargo says where the crate lies when it runs us; otherwise it is where it was built.
    let root = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [] => recipe::build(&root).map(|compiler| format!("gate.o built by {compiler}")),
        ["--check"] => check(&root),
        ["--help" | "-h"] => Ok(USAGE.to_owned()),
        _ => Err(format!("unknown arguments\n{USAGE}")),
    };
    match outcome {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            eprintln!("lm-gate-build: {text}");
            ExitCode::FAILURE
        }
    }
}

fn check(root: &Path) -> Result<String, String> {
    recipe::check(root).map(|freshness| match freshness {
        Freshness::Rebuilt => "gate.o is fresh: rebuilt to the same bytes".to_owned(),
        Freshness::HashesOnly { compiler } => {
            format!("gate.o matches its sources by hash (not rebuilt: {compiler} is not installed)")
        }
    })
}
