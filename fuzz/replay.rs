//! Compiled into the tests of each crate that has fuzz targets: what is committed is what a fuzzer found interesting, and what failed once.

/// Gives a target every committed input.
pub(crate) fn replay(target: &str, mut work: impl FnMut(&[u8])) {
    let corpus = format!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/{}"), target);
    let mut inputs = 0;
    for file in std::fs::read_dir(&corpus).expect("the committed corpus") {
        let path = file.expect("a file").path();
        println!("{}", path.display()); // shown when it fails
        work(&std::fs::read(&path).expect("an input"));
        inputs += 1;
    }
    assert!(inputs > 0, "{corpus} is empty");
}
