//! What the fuzz targets in `fuzz/` do with a fuzzer's bytes, and the tests with every input that is committed there. Each panics where
//! something is wrong.

mod admission;
mod control;
mod frames;
mod manifest;

pub use admission::admission;
pub use control::control;
pub use frames::frames;
pub use manifest::manifest;

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_of_admission_is_survived() {
        replay("admission", super::admission);
    }

    #[test]
    fn the_corpus_of_control_is_survived() {
        replay("control", super::control);
    }

    #[test]
    fn the_corpus_of_frames_is_survived() {
        replay("frames", super::frames);
    }

    #[test]
    fn the_corpus_of_manifest_is_survived() {
        replay("manifest", super::manifest);
    }
}
