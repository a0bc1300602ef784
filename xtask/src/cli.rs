//! The command line: what `cargo xtask --help` shows, and the one place where errors become lines and exit codes.

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};
use lm_measure::stdout;

use crate::{bench, dist, fuzz, gate, hold, models, run as demonstration, soak, verify, vm};

/// Builds, tests, demonstrates and measures this repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version, max_term_width = 110)]
#[command(
    after_help = "Commands that make network namespaces need root and iproute2. Everything they make is removed\n\
                        again at the end, after an error, and on Ctrl-C."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(demonstration::Arguments),
    Test(verify::TestArguments),
    Soak(soak::Arguments),
    /// Check every formula of the models in models/ with Spin, and that every mistake that is put into them breaks one.
    ///
    /// Says how many states each search saw and how deep it went; one that was cut short is an error. Without `spin` or
    /// a C compiler they are skipped; with CI=true in the environment that is an error.
    Models,
    Fuzz(fuzz::FuzzArguments),
    Bench(bench::Arguments),
    Bed(hold::Arguments),
    Vm(vm::Arguments),
    /// Rebuild the committed objects of the gate, the impairment box and bare AF_XDP from their C sources.
    ///
    /// Needs clang. The objects are committed, so this runs after a change of a kernel program alone; the tests say
    /// whether an object is stale.
    Gate,
    /// Everything that a change must pass: format, clippy, the gate's object, tests, documentation.
    ///
    /// Runs every step even if one fails, then says which did and what to do.
    Ci,
    /// Make a tarball of the tools that runs where no Rust is, in dist/ of cargo's target folder.
    ///
    /// The programs are linked statically, glibc included; the tarball is unpacked and each program started before
    /// the command says where it lies.
    Dist,
    #[command(hide = true)]
    VmTask(vm::checks::TaskArguments),
}

/// The command line as it is declared.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Parses the command line and runs the command. Exit code 0: done; 1: failed, with one line on standard error;
/// 2: wrong usage.
pub fn main() -> ExitCode {
    if vm::guest::is_init() {
        return vm::guest::init();
    }
    let arguments = Arguments::parse();
    stdout::main("error", || match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    })
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Run(arguments) => demonstration::run(&arguments),
        Command::Test(arguments) => verify::test(&arguments),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::Models => models::run(),
        Command::Fuzz(arguments) => fuzz::fuzz(&arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::Bed(arguments) => hold::run(&arguments),
        Command::Vm(arguments) => vm::command(&arguments),
        Command::Gate => gate::build(),
        Command::Ci => verify::ci(),
        Command::Dist => dist::dist(),
        Command::VmTask(arguments) => vm::checks::run(&arguments),
    }
}
