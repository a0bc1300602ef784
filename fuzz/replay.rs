//! Compiled into the tests of each crate that has fuzz targets: what is committed is what a fuzzer found interesting,
//! and what failed once.

/// Gives a target every committed input.
pub(crate) fn replay(target: &str, mut work: impl FnMut(&[u8])) {
    let above = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut corpora = above.map(|folder| folder.join("fuzz/corpus").join(target));
    let corpus = corpora
        .find(|corpus| corpus.is_dir())
        .expect("the committed corpus");
    let mut inputs = 0;
    for file in std::fs::read_dir(&corpus).expect("the corpus") {
        let path = file.expect("a file").path();
        println!("{}", path.display()); // shown when it fails
        work(&std::fs::read(&path).expect("an input"));
        inputs += 1;
    }
    assert!(inputs > 0, "{} is empty", corpus.display());
}
