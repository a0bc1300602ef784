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

use super::host::cpu_mask;
use super::{Bed, BedConfig, Host, Launch, Program};

/// The side of the namespace between the hosts.
pub(super) const BOX: &str = "box";

/// The box's interface towards the left host.
pub const LEFT: &str = "left";
/// The box's interface towards the right host.
pub const RIGHT: &str = "right";

/// No bed is kept longer.
const LIMIT: Duration = Duration::from_secs(7 * 24 * 3600);

/// What the box does to packets: options of `lm-bench impair`. Each value is for both directions, or `X,Y`: left to
/// right, right to left.
#[derive(Clone, Debug, Default)]
pub struct Impairments(pub String);

impl Impairments {
    /// Whether the box changes, keeps or copies packets. Then their checksums must be right when they reach it: where
    /// the interface is to compute them, veth leaves them unfinished for ever.
    pub fn needs_checksums(&self) -> bool {
        let mut words = self.0.split_whitespace();
        words.any(|word| ["--corrupt", "--reorder", "--delay", "--rate"].contains(&word))
    }
}

/// Sets the box's interfaces up, and the cores that do its work.
pub(super) fn configure(middle: &Host, config: &BedConfig) -> Result<()> {
    // A card takes only what is for itself, and the box's packets are for the left host.
    let promiscuous = if config.cards.is_some() { " promisc on" } else { "" };
    let up = [
        format!("link set {LEFT} up"),
        format!("link set {RIGHT} up{promiscuous}"),
    ];
    middle.ip(&up).context("cannot set up the box")?;
    for (interface, core) in config
        .box_cores
        .into_iter()
        .flat_map(|[left, right]| [(LEFT, right), (RIGHT, left)])
    {
        for queue in 0..config.queues {
            let file = format!("/sys/class/net/{interface}/queues/rx-{queue}/rps_cpus");
            middle.write_file(&file, &cpu_mask(1 << core))?;
        }
    }
    Ok(())
}

impl Bed {
    /// Starts the box of a bed that has one ([`BedConfig::with_box`](super::BedConfig::with_box)), and waits until it
    /// forwards. `lm_bench` is the program, whose report has its counters. Stopped or dropped, no packet passes any more.
    pub fn start_box(&self, lm_bench: &Path, impairments: &Impairments) -> Result<Program> {
        let middle = self.middle().context("this bed has no box")?;
        let launch = Launch::new(lm_bench)
            .args(["impair", "--left", LEFT, "--right", RIGHT])
            .args(impairments.0.split_whitespace())
            .time_limit(LIMIT);
        middle.spawn_until(launch, "ready")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_packets_needs_their_checksums() {
        assert!(
            !Impairments::default().needs_checksums()
                && !Impairments("--loss 1%".to_owned()).needs_checksums()
        );
        assert!(Impairments("--loss 1% --delay 1ms".to_owned()).needs_checksums());
    }
}
