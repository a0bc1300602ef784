//! The model's errors, of `bench pipeline --only model`.

use anyhow::{Context, Result};
use lm_measure::statistics::Summary;
use serde_json::Value;

use super::{Figure, Measured, Run, Verdict, list, number};
use crate::bench::model;

impl Measured {
    pub(super) fn of_model(file: &Value) -> Result<Measured> {
        let run = Run::of_machine(&file["machine"]).check()?;
        let (mut figures, mut verdicts) = (Vec::<Figure>::new(), Vec::new());
        for judged in model::judged(list(&file["runs"])).context("the file has runs that say too little")? {
            let percents = |errors: &[f64]| errors.iter().map(|error| 100.0 * error).collect::<Vec<_>>();
            for (how, (lens, errors)) in judged.rows {
                let sizes = percents(&errors).into_iter().map(f64::abs).collect::<Vec<_>>();
                figures.push(Figure {
                    what: format!("{}, {how}: error", judged.what),
                    who: lens.join(" "),
                    unit: "%".to_owned(),
                    figure: Summary::of(&sizes).context("no errors")?.median,
                    rounds: percents(&errors),
                    cores: Vec::new(),
                });
            }
            for (of, reached, most) in judged.asked {
                let (reached, bound) = (100.0 * reached, 100.0 * most);
                let what = format!("{}: {of} error", judged.what);
                verdicts.push(Verdict {
                    key: format!("model/{what}"),
                    what,
                    asked: format!("≤ {} %", number(bound)),
                    bound,
                    at_least: false,
                    reached: format!("{} %", number(reached)),
                    near: "–".to_owned(),
                    verdict: if reached <= bound { "met" } else { "**missed**" },
                });
            }
        }
        Ok(Measured {
            run,
            suite: "model".to_owned(),
            figures,
            verdicts,
        })
    }
}
