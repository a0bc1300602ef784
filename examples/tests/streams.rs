//! The example of several processes, as a program.

use std::process::Command;

#[test]
fn streams_between_processes_over_lent_memory() {
    let output = Command::new(env!("CARGO_BIN_EXE_streams"))
        .arg(format!("0..{}", lm_examples::SEEDS))
        .output()
        .expect("the example starts");
    let (out, error) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}{error}");
    assert_eq!(out.lines().count() as u64, 2 * lm_examples::SEEDS, "{out}{error}");
}
