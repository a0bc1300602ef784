//! Any bytes as what a client says to `serve`. Nothing is started here: what would be is looked at.

use std::io::BufReader;

use super::child::command;
use super::end::{Side, Spec};
use super::serve::{LIMIT, Request, limit_of, read_line};

/// Bytes that the words of one program may take.
const WORDS_LEN_MAX: usize = 4096;

/// Reads requests as `serve` does, until something is none.
pub(crate) fn hear(bytes: &[u8]) {
    let mut reader = BufReader::new(bytes);
    while let Ok(Some(request)) = read_line::<Request>(&mut reader) {
        let line = serde_json::to_string(&request).expect("what was read can be written");
        serde_json::from_str::<Request>(&line).expect("what was written can be read");
        match request {
            Request::Start(side, spec, limit_s) => would_start(&spec, side, limit_s),
            Request::Hello | Request::Link(_) | Request::Finish | Request::Stop => {}
        }
    }
}

/// Whatever a client says: one of the programs, by its name, and words whose place says what they mean.
fn would_start(spec: &Spec, side: Side, limit_s: f64) {
    let limit = limit_of(limit_s);
    assert!((1.0..=LIMIT.as_secs_f64()).contains(&limit.as_secs_f64()));
    let command = command(spec, side, "lm0", limit).expect("it can be found");
    let words: Vec<&str> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_str().expect("it was text"))
        .collect();
    assert!(
        words.iter().map(|word| word.len()).sum::<usize>() <= WORDS_LEN_MAX,
        "{words:?}"
    );
    let ours = std::env::current_exe().expect("this program");
    let ours = ours.to_str().expect("a name");
    match &words[..] {
        ["timeout", "-k", "1", _, "iperf3" | "sockperf", ..] if spec.system.how.tool().is_some() => {}
        [
            first @ ..,
            "--time-limit",
            _,
            "end",
            "far" | "near",
            text,
            "--interface",
            "lm0",
        ] if spec.system.how.tool().is_none() => {
            assert!(
                *first == [ours] || *first == ["chrt", "--fifo", "1", ours],
                "{words:?}"
            );
            assert!(text.starts_with('{') && text.ends_with('}'), "{text}");
        }
        _ => panic!("{words:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a fuzzer begins with is what clients say.
    #[test]
    fn the_corpus_has_requests_of_each_kind() {
        for text in [
            include_str!("../../../fuzz/corpus/serve/end-stream"),
            include_str!("../../../fuzz/corpus/serve/end-trips"),
            include_str!("../../../fuzz/corpus/serve/end-load"),
            include_str!("../../../fuzz/corpus/serve/end-bare"),
            include_str!("../../../fuzz/corpus/serve/tool-0"),
        ] {
            let line = text.lines().next().unwrap();
            let request: Request = serde_json::from_str(line).unwrap();
            assert!(matches!(request, Request::Start(..)), "{line}");
        }
    }
}
