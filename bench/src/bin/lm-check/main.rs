//! `lm-check`: what `cargo xtask` starts in beds and guests to see that LM keeps its promises, one subcommand each.
//! Each prints one JSON object on standard output when it ends; receiving programs say `ready` on standard error once a
//! sender may start. It is not shipped.
#![deny(unsafe_code)]

mod hold;
mod messages;
mod overlay;
mod plan;
mod reading;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use lm_bench::cli::{self, Failure, end_after, print, ready};

/// Checks LM on beds and in guests; cargo xtask starts it
#[derive(Parser)]
#[command(name = "lm-check", version)]
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
    /// Send messages whose every byte is known from a seed, receive them and compare, or both; tell of each what became of
    /// it
    Messages(messages::MessagesArgs),
    /// Send one message from one interface to another, packet by packet, and tell what each byte of the receiving
    /// memory is
    Overlay(overlay::OverlayArgs),
}

fn main() -> ExitCode {
    let verbose = |arguments: &Arguments| arguments.verbose;
    cli::main("lm-check", std::env::args_os(), verbose, |arguments| {
        end_after("lm-check", arguments.time_limit);
        match &arguments.program {
            Program::Messages(args) => print(&messages::messages(args, ready)?),
            Program::Overlay(args) => print(&overlay::overlay(args)?),
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn failed(error: impl std::error::Error) -> Failure {
    Failure::new(cli::chain(&error))
}
