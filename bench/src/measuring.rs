//! `lm-bench`: the measuring programs, one subcommand each. Each prints one JSON object on standard output when it ends;
//! receiving programs say `ready` on standard error once a sender may start.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::cli::{self, Failure, end_after, print, ready};
use crate::signals::Interrupt;
use crate::{bare, doctor, page, suite};

/// Measures LM and what it is compared with
///
/// Start `lm-bench serve` on one host, then `lm-bench compare` on the other. Throughput is payload that arrived, by the receiver's clock;
/// round trips are whole ones. `cargo xtask bench compare` does it all on this machine.
#[derive(Parser)]
#[command(name = "lm-bench", version)]
struct Arguments {
    /// Seconds after which a program that has not ended ends with an error
    #[arg(long, global = true, default_value_t = 60.0)]
    time_limit: f64,
    /// Say more on standard error; -vv still more. RUST_LOG goes before
    #[arg(long, short = 'v', global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    program: Program,
}

#[derive(Subcommand)]
enum Program {
    /// Wait for another host's measurements, and run their far ends
    Serve(suite::ServeArgs),
    /// Measure LM beside kernel UDP and TCP, bare AF_XDP and standard tools, in turns, and compare
    Compare(suite::CompareArgs),
    /// Make one HTML page of what compare kept with --json: two charts, ratios, configurations
    Report(page::ReportArgs),
    /// Real time: what of this host spoils it, how late messages are, what the smoother does
    #[command(subcommand)]
    Rt(RealTime),
    /// One end of a measurement; compare and serve start it
    #[command(hide = true)]
    End(suite::EndArgs),
    /// Impairment box: forward packets between two interfaces with seeded loss, duplication, reordering, corruption, delay
    /// and rate limit
    Impair(lm_box::ImpairArgs),
}

#[derive(Subcommand)]
enum RealTime {
    /// Say what of this host spoils real time, each with its remedy; 1: something does
    Doctor(doctor::DoctorArgs),
}

/// The command line as it is declared.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs `lm-bench`.
pub fn main(words: impl Iterator<Item = OsString>) -> ExitCode {
    let verbose = |arguments: &Arguments| arguments.verbose;
    cli::main("lm-bench", words, verbose, |arguments| {
        if !arguments.program.has_bounds_of_its_own() {
            end_after("lm-bench", arguments.time_limit);
        }
        run(arguments.program)
    })
}

impl Program {
    /// A box lives as long as the hosts it joins, a server until it is ended, and a command as long as its rounds, each of which is bounded.
    fn has_bounds_of_its_own(&self) -> bool {
        matches!(self, Program::Impair(_) | Program::Serve(_) | Program::Compare(_))
    }
}

fn run(program: Program) -> Result<ExitCode, Failure> {
    match program {
        Program::Serve(args) => suite::serve(&args, ready)?,
        Program::Compare(args) => suite::compare(&args)?,
        Program::End(args) => suite::run(&args, ready, print)?,
        Program::Report(args) => page::report(&args)?,
        Program::Rt(RealTime::Doctor(args)) => return Ok(doctor::doctor(&args)),
        Program::Impair(args) => {
            let interrupt =
                Interrupt::install().map_err(|error| Failure::new(format!("no signals: {error}")))?;
            let report = lm_box::impair::<bare::Injector>(&args, ready, || interrupt.is_set());
            print(&report.map_err(|error| Failure::new(cli::chain(&*error)))?);
        }
    }
    Ok(ExitCode::SUCCESS)
}
