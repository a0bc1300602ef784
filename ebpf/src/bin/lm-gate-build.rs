//! Rebuilds the committed objects (the gate and the impairment box's forwarder), or says whether one is stale. `cargo xtask gate` calls it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lm_ebpf::recipe::{ALL, Freshness, Recipe};

const USAGE: &str = "lm-gate-build [--check]
  rebuilds ebpf/gate.o and ebpf/impair.o, and their sums, from their sources in ebpf/src (needs clang and llvm-strip)
  --check  changes nothing; fails if an object is stale";

fn main() -> ExitCode {
    // Cargo says where the crate lies when it runs us; otherwise it is where it was built.
    let root = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [] => each(|recipe| {
            let compiler = recipe.build(&root)?;
            Ok(format!("{}.o built by {compiler}", recipe.name))
        }),
        ["--check"] => each(|recipe| check(recipe, &root)),
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

/// Does the same with every object; the first failure ends it.
fn each(work: impl Fn(&Recipe) -> Result<String, String>) -> Result<String, String> {
    let lines: Result<Vec<String>, String> = ALL.iter().map(work).collect();
    lines.map(|lines| lines.join("\n"))
}

fn check(recipe: &Recipe, root: &Path) -> Result<String, String> {
    let name = recipe.name;
    recipe.check(root).map(|freshness| match freshness {
        Freshness::Rebuilt => format!("{name}.o is fresh: rebuilt to the same bytes"),
        Freshness::HashesOnly { compiler } => {
            format!("{name}.o matches its sources by hash (not rebuilt: {compiler} is not installed)")
        }
    })
}
