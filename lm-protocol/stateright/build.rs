//! Writes `streaming.rs` with every mistake of `mutants.rs` beside the rule that it breaks, so that one build has all of them.

use std::path::Path;
use std::{env, fs};

#[allow(dead_code, unreachable_pub, missing_docs, reason = "the tests read its names")]
#[path = "mutants.rs"]
mod mutants;

fn main() {
    let sources = ["../src/streaming.rs", "../src/streaming/showing.rs"];
    for path in ["mutants.rs"].iter().chain(&sources) {
        println!("cargo::rerun-if-changed={path}");
    }
    let [streaming, showing] = sources.map(|path| {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
        // Comments of a file are none of a module in braces.
        let lines = text.lines().filter(|line| !line.starts_with("//!"));
        lines.flat_map(|line| [line, "\n"]).collect::<String>()
    });
    let mut text = replace(
        &streaming,
        "mod showing;",
        &format!("mod showing {{\n{showing}}}"),
    );
    // The words that threads share are over a memory of the model's, and part of its states.
    text = replace(&text, "core::sync::atomic", "crate::weak");
    text = text
        .replace("#[derive(Debug)]", "#[derive(Clone, Debug, PartialEq, Eq, Hash)]")
        .replace(
            "#[derive(Debug, Default)]",
            "#[derive(Clone, Debug, PartialEq, Eq, Hash)]",
        )
        .replace("const fn", "fn");
    for (number, mutant) in mutants::MUTANTS.iter().enumerate() {
        let (rule, mistake) = (mutant.rule, mutant.mistake);
        let either = format!("(if crate::mistakes::is_made({number}) {{ {mistake} }} else {{ {rule} }})");
        text = replace(&text, rule, &either);
    }
    let out = Path::new(&env::var_os("OUT_DIR").expect("cargo sets it")).join("streaming.rs");
    fs::write(&out, text).unwrap_or_else(|error| panic!("cannot write {}: {error}", out.display()));
}

fn replace(text: &str, what: &str, with: &str) -> String {
    let times = text.matches(what).count();
    assert_eq!(
        times, 1,
        "`{what}` must stand in streaming.rs once, and does {times} times: change mutants.rs with it"
    );
    text.replace(what, with)
}
