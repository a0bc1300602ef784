//! Any bytes as what a client says to `serve`. Nothing is started here: what would be is looked at.

use std::io::BufReader;

use super::child::{Launch, Place};
use super::serve::{LIMIT, Request, limit_of, read_line};
use super::tools::Tool;

/// Bytes that the words of one program may take.
const WORDS_LEN_MAX: usize = 4096;

/// Reads requests as `serve` does, until something is none.
pub(crate) fn hear(bytes: &[u8]) {
    let mut reader = BufReader::new(bytes);
    while let Ok(Some(request)) = read_line::<Request>(&mut reader) {
        let line = serde_json::to_string(&request).expect("what was read can be written");
        serde_json::from_str::<Request>(&line).expect("what was written can be read");
        match request {
            Request::Start(launch, limit_s) => would_start(&launch, limit_s, Place::Far("lm0")),
            Request::Send(launch, limit_s) => would_start(&launch, limit_s, Place::Near("lm0")),
            Request::Hello | Request::Link(_) | Request::Finish | Request::Stop => {}
        }
    }
}

/// Whatever a client says: one of the programs, by its name, and words whose place says what they mean.
fn would_start(launch: &Launch, limit_s: f64, place: Place<'_>) {
    let limit = limit_of(limit_s);
    assert!((1.0..=LIMIT.as_secs_f64()).contains(&limit.as_secs_f64()));
    let found = launch.words(place, limit);
    let (program, words) = found.expect("it can be found");
    assert!(
        words.iter().map(String::len).sum::<usize>() <= WORDS_LEN_MAX,
        "{words:?}"
    );
    let ours = std::env::current_exe().expect("this program");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match (launch, &words[..]) {
        (
            Launch::End(_),
            [
                first @ ..,
                "--time-limit",
                _,
                "end",
                "far" | "near",
                spec,
                "--interface",
                "lm0",
            ],
        ) => {
            let chrt = ["--fifo", "1", ours.to_str().expect("a name")];
            if *first == chrt && program.to_str() == Some("chrt") {
                return;
            }
            assert!(first.is_empty(), "{words:?}");
            assert!(spec.starts_with('{') && spec.ends_with('}'), "{spec}");
        }
        (Launch::Tool(_), ["-k", "1", _, name, ..]) => {
            let is_one = |tool: Tool| tool.program() == *name;
            assert!(Tool::ALL.into_iter().any(is_one), "{words:?}");
            assert_eq!(program.to_str(), Some("timeout"));
            return;
        }
        _ => panic!("{words:?}"),
    }
    assert_eq!(program, ours);
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
