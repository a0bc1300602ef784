//! `cargo xtask bench`: beds and guests for `lm-bench compare`, and instructions.

pub(crate) mod card;
pub mod compare;
pub(crate) mod instructions;

use anyhow::Result;

/// Measure LM beside kernel UDP, kernel TCP and bare AF_XDP.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    suite: Suite,
}

#[derive(Debug, clap::Subcommand)]
enum Suite {
    Card(card::Arguments),
    Compare(compare::Arguments),
    Instructions(instructions::Arguments),
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    if !matches!(arguments.suite, Suite::Instructions(_)) {
        crate::bed::require_root("make network namespaces")?;
    }
    match arguments.suite {
        Suite::Card(arguments) => card::run(&arguments),
        Suite::Compare(arguments) => compare::run(&arguments),
        Suite::Instructions(arguments) => instructions::run(&arguments),
    }
}
