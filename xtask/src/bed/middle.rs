//! The impairment box between the hosts of a bed: a third namespace, where `lm-bench impair` forwards.
//!
//! ```text
//!   namespace …-left           namespace …-box             namespace …-right
//!  ┌──────────────────┐     ┌───────────────────┐       ┌──────────────────┐
//!  │ lm0  198.18.0.1  │─────│ left  ⇄ box ⇄ right │─────│ lm0  198.18.0.2  │
//!  └──────────────────┘     └───────────────────┘       └──────────────────┘
//! ```

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::{Bed, Launch, Program};

/// The box's interface towards the left host.
pub const LEFT: &str = "left";
/// The box's interface towards the right host.
pub const RIGHT: &str = "right";

/// No bed is kept longer.
const LIMIT: Duration = Duration::from_secs(7 * 24 * 3600);

/// What the box does to packets. Each value is for both directions, or `X,Y`: left to right, right to left.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Impairments (with --box)")]
pub struct Impairments {
    /// Packets to lose: 1%, 200ppm.
    #[arg(long, requires = "box", value_name = "SHARE[,…]")]
    pub loss: Option<String>,
    /// Packets to lose in succession; --loss stays the share of all.
    #[arg(long, requires = "box", value_name = "PACKETS[,…]")]
    pub loss_burst: Option<String>,
    /// Packets to send twice.
    #[arg(long, requires = "box", value_name = "SHARE[,…]")]
    pub duplicate: Option<String>,
    /// Packets to change one byte of.
    #[arg(long, requires = "box", value_name = "SHARE[,…]")]
    pub corrupt: Option<String>,
    /// Packets to hold back until others have overtaken them.
    #[arg(long, requires = "box", value_name = "SHARE[,…]")]
    pub reorder: Option<String>,
    /// How many packets overtake one that is held back.
    #[arg(long, requires = "box", value_name = "PACKETS[,…]")]
    pub reorder_by: Option<String>,
    /// Time that each packet takes: 50us, 2ms.
    #[arg(long, requires = "box", value_name = "TIME[,…]")]
    pub delay: Option<String>,
    /// Most bits per second: 500Mbit, 1Gbit.
    #[arg(long, requires = "box", value_name = "RATE[,…]")]
    pub rate: Option<String>,
    /// Decides everything that is random.
    #[arg(long, requires = "box", value_name = "NUMBER")]
    pub seed: Option<u64>,
}

impl Impairments {
    /// Random loss of `share` (as `--loss` takes it) in both directions.
    pub fn loss(share: &str, seed: u64) -> Impairments {
        Impairments {
            loss: Some(share.to_owned()),
            seed: Some(seed),
            ..Impairments::default()
        }
    }

    /// Whether the box changes, keeps or copies packets. Then their checksums must be right when they reach it: where the
    /// interface is to compute them, veth leaves them unfinished for ever.
    pub fn needs_checksums(&self) -> bool {
        [&self.corrupt, &self.reorder, &self.delay, &self.rate]
            .iter()
            .any(|option| option.is_some())
    }

    fn arguments(&self) -> Vec<String> {
        let seed = self.seed.map(|seed| seed.to_string());
        let options = [
            ("--loss", &self.loss),
            ("--loss-burst", &self.loss_burst),
            ("--duplicate", &self.duplicate),
            ("--corrupt", &self.corrupt),
            ("--reorder", &self.reorder),
            ("--reorder-by", &self.reorder_by),
            ("--delay", &self.delay),
            ("--rate", &self.rate),
            ("--seed", &seed),
        ];
        let given = options
            .into_iter()
            .filter_map(|(name, value)| Some([name.to_owned(), value.clone()?]));
        given.flatten().collect()
    }
}

/// A box that forwards. Dropped, it stops, and no packet passes any more.
#[derive(Debug)]
pub struct RunningBox(Program);

impl RunningBox {
    /// Stops it; its counters, as `lm-bench impair` prints them.
    pub fn stop(self) -> Result<Value> {
        self.0.stop()?.json().context("the box reported nothing")
    }
}

impl Bed {
    /// Starts the box of a bed that has one ([`BedConfig::with_box`](super::BedConfig::with_box)), and waits until it
    /// forwards. `lm_bench` is the program.
    pub fn start_box(&self, lm_bench: &Path, impairments: &Impairments) -> Result<RunningBox> {
        let middle = self.middle.as_ref().context("this bed has no box")?;
        let launch = Launch::new(lm_bench)
            .args(["impair", "--left", LEFT, "--right", RIGHT])
            .args(impairments.arguments())
            .time_limit(LIMIT);
        let mut program = middle.spawn(launch)?;
        program.await_text("ready")?;
        Ok(RunningBox(program))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_given_is_passed_on() {
        assert_eq!(Impairments::default().arguments(), Vec::<String>::new());
        let loss = Impairments::loss("1%", 7);
        assert_eq!(loss.arguments(), ["--loss", "1%", "--seed", "7"]);
        assert!(!loss.needs_checksums());
        let delay = Impairments {
            delay: Some("1ms".to_owned()),
            ..Impairments::default()
        };
        assert!(delay.needs_checksums());
    }
}
