//! What is asked of the first contender of a comparison.

use serde_json::Value;

use super::Unit;

/// What the first contender has to reach.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    /// First contender / named contender, median of the rounds' ratios, at least this.
    RatioAtLeast(&'static str, f64),
    /// The same, at most this.
    RatioAtMost(&'static str, f64),
    /// The same, the upper end of the median's 95 % interval at most this.
    RatioSurelyAtMost(&'static str, f64),
    /// Of these two contenders, median of the rounds' ratios, at most this.
    RatioOfAtMost([&'static str; 2], f64),
    /// The first contender less these, median of the rounds' differences, at most this.
    ExcessAtMost(&'static [&'static str], f64),
    /// The first contender's own median, at most this.
    AtMost(f64),
    /// What the function finds in the first contender's reports, median of the rounds, at least this. The text says
    /// what it is: "≥ 0.5 of its share has each".
    ReportAtLeast(&'static str, fn(&Value) -> Option<f64>, f64),
}

impl Target {
    /// The number in it.
    pub(crate) const fn bound(&self) -> f64 {
        match *self {
            Target::RatioAtLeast(_, bound)
            | Target::RatioAtMost(_, bound)
            | Target::RatioSurelyAtMost(_, bound)
            | Target::RatioOfAtMost(_, bound)
            | Target::ExcessAtMost(_, bound)
            | Target::AtMost(bound)
            | Target::ReportAtLeast(_, _, bound) => bound,
        }
    }

    /// Whether more is asked by a larger number.
    pub(crate) const fn is_at_least(&self) -> bool {
        matches!(self, Target::RatioAtLeast(..) | Target::ReportAtLeast(..))
    }

    /// What it is about, without its number.
    pub(crate) fn of(&self, first: &str) -> String {
        match *self {
            Target::RatioAtLeast(name, _)
            | Target::RatioAtMost(name, _)
            | Target::RatioSurelyAtMost(name, _) => {
                format!("{first} / {name}")
            }
            Target::RatioOfAtMost([one, other], _) => format!("{one} / {other}"),
            Target::ExcessAtMost(names, _) => format!("{first} less {}", names.join(" and ")),
            Target::AtMost(_) => first.to_owned(),
            Target::ReportAtLeast(what, ..) => format!("{first}: {what}"),
        }
    }

    pub(super) fn asked(&self, unit: Unit) -> String {
        match *self {
            Target::RatioAtLeast(name, least) => format!("≥ {least} × {name}"),
            Target::RatioAtMost(name, most) => format!("≤ {most} × {name}"),
            Target::RatioSurelyAtMost(name, most) => format!("95 % interval ≤ {most} × {name}"),
            Target::RatioOfAtMost([one, other], most) => format!("{one} ≤ {most} × {other}"),
            Target::ExcessAtMost(names, most) => {
                format!("≤ {} + {most:.0} {}", names.join(" + "), unit.name())
            }
            Target::AtMost(most) => format!("≤ {most} {}", unit.name()),
            Target::ReportAtLeast(what, _, least) => format!("≥ {least} {what}"),
        }
    }

    pub(super) fn is_met(&self, reached: f64) -> bool {
        match self.is_at_least() {
            true => reached >= self.bound(),
            false => reached <= self.bound(),
        }
    }
}
