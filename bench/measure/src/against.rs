//! Two results of `lm-bench compare`, row by row.

use std::fmt;

use serde_json::Value;

use crate::statistics::Summary;

/// What became of a row's figure: payload over time of a stream, else the median round trip.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// System, task and length.
    pub row: String,
    /// By what part it is better than it was; `None`: it has no figure now, or had none.
    pub better: Option<f64>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.better {
            Some(better) => write!(f, "{} {:+.2} %", self.row, better * 100.0),
            None => write!(f, "{} has no figure", self.row),
        }
    }
}

/// What became of each row of an earlier result.
pub fn changes(now: &Value, earlier: &Value) -> Vec<Change> {
    let is_same = |one: &Value, other: &Value| KEY.iter().all(|name| one[*name] == other[*name]);
    let change = |row: &Value| {
        let same = rows(now).iter().find(|one| is_same(one, row));
        let better = same
            .and_then(figure)
            .zip(figure(row))
            .map(|(now, before)| now / before - 1.0);
        Change {
            row: KEY.map(|name| row[name].to_string().replace('"', "")).join(" "),
            better,
        }
    };
    rows(earlier).iter().map(change).collect()
}

/// What tells rows apart.
const KEY: [&str; 3] = ["system", "what", "size"];

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().map_or(&[], Vec::as_slice)
}

/// Median of the rounds; more is better.
fn figure(row: &Value) -> Option<f64> {
    let figure = |round: &Value| match row["what"] == "stream" {
        true => Some(round["bytes"].as_f64()? / round["seconds"].as_f64()?),
        false => Some(1.0 / round["p50_ns"].as_f64()?),
    };
    let rounds = row["rounds"].as_array()?;
    Summary::of_finite(rounds.iter().filter_map(figure)).map(|found| found.median)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(what: &str, figures: &[f64]) -> Value {
        let round = |figure: &f64| json!({"bytes": figure, "seconds": 1.0, "p50_ns": figure});
        let rounds: Vec<Value> = figures.iter().map(round).collect();
        json!({"rows": [{"what": what, "system": "lm", "size": 64, "rounds": rounds}]})
    }

    #[test]
    fn more_of_a_stream_and_less_of_a_round_trip_is_better() {
        let change =
            |what, now: &[f64]| changes(&report(what, now), &report(what, &[90.0, 100.0, 110.0]))[0].clone();
        let better = |what, now: &[f64]| change(what, now).better.unwrap();
        assert!((better("stream", &[125.0]) - 0.25).abs() < 1e-9);
        assert!((better("round-trips", &[125.0]) + 0.2).abs() < 1e-9);
        assert_eq!(change("stream", &[125.0]).to_string(), "lm stream 64 +25.00 %");
        assert_eq!(change("stream", &[]).to_string(), "lm stream 64 has no figure");
        assert_eq!(changes(&Value::Null, &report("stream", &[1.0]))[0].better, None);
        assert!(changes(&report("stream", &[1.0]), &Value::Null).is_empty());
    }
}
