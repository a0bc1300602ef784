//! The command line of `lm-admissiond`.

mod client;
mod show;

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use lm_protocol::admission::ClusterKey;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{self, Config, Settings};
use crate::daemon::{self, Daemon, SetLog};
use crate::key;

/// Admits senders to this host's receivers, and gives programs without privileges their AF_XDP sockets.
///
/// Serves programs over a Unix socket and the daemons of other hosts over UDP. Programs need to be allowed: whoever has an
/// AF_XDP socket can send any frame from this host.
#[derive(Debug, Parser)]
#[command(
    name = "lm-admissiond",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = MANUAL_END
)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    run: Run,
}

#[derive(Debug, clap::Args)]
struct Run {
    #[command(flatten)]
    settings: Settings,

    /// TOML file with the same settings, under the same names; the command line goes before it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Look whether the daemon could start, and change nothing
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a key for the cluster: a new file that its owner alone may read
    Keygen {
        /// The file; copy it to all hosts of the cluster
        file: PathBuf,
    },
    /// Show interfaces, queues, sessions, the LM_RECV_ADDR list and counters of the running daemon
    Status {
        /// Socket of the daemon
        #[arg(long, value_name = "PATH", default_value = lm_dataplane::daemon::ipc::SOCKET_PATH)]
        socket: PathBuf,

        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
}

const MANUAL_END: &str = "\
SIGNALS
  SIGTERM, SIGINT  sessions end, their hosts are told, nothing is left
  SIGUSR1          ends, and leaves everything for the next daemon: sessions
                   go on meanwhile, as after a crash
  SIGHUP           reads allow lists, limits, peers, key and log level again

EXIT CODES
  0  done
  1  failed
  2  wrong command line

NOTES
  Needs CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and CAP_IPC_LOCK, which it keeps,
  and root or CAP_SYS_ADMIN for a moment where bpffs is not mounted. Admission
  is authenticated by the cluster's key; data is neither encrypted nor
  authenticated.";

/// Does what a command line says.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let line = match CommandLine::try_parse_from(arguments) {
        Ok(line) => line,
        Err(error) => {
            // Closed standard output is no reason to say anything.
            let _ = error.print();
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    let done = match line.command {
        Some(Command::Keygen { file }) => key::generate(&file),
        Some(Command::Status { socket, json }) => {
            client::status(&socket).and_then(|status| show::print(&status, json))
        }
        None => run(line.run),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("lm-admissiond: {what}");
            ExitCode::FAILURE
        }
    }
}

fn run(run: Run) -> Result<(), String> {
    let (settings, file) = (run.settings, run.config);
    let load = move || -> Result<(Config, ClusterKey), String> {
        let config = configuration(settings.clone(), file.as_ref())?;
        let key = key::read(&config.key_file)?;
        Ok((config, key))
    };
    let (config, key) = load()?;
    if run.check {
        daemon::check(&config)?;
        println!("the configuration is right");
        return Ok(());
    }
    let set_log = start_log(&config.log)?;
    Daemon::start(config, key, Box::new(load), set_log)?.run()
}

/// What command line and file say together.
fn configuration(settings: Settings, file: Option<&PathBuf>) -> Result<Config, String> {
    let Some(path) = file else {
        return Config::new(settings).map_err(|error| error.to_string());
    };
    let (from_file, text) = config::load(path)?;
    Config::new(settings.over(from_file)).map_err(|error| match config::line_of(&text, error.key) {
        Some(line) => format!("{}:{line}: {error}", path.display()),
        None => format!("{}: {error}", path.display()),
    })
}

/// Logs to standard error from now on; gives what changes the level.
fn start_log(filter: &str) -> Result<SetLog, String> {
    let parse = |filter: &str| filter.parse::<Targets>().map_err(|error| format!("log: {error}"));
    let (filter, handle) = reload::Layer::new(parse(filter)?);
    let is_terminal = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(is_terminal);
    let subscriber = tracing_subscriber::registry().with(filter);
    // Not on a terminal, whoever keeps the lines knows the time.
    let started = match is_terminal {
        true => subscriber.with(lines).try_init(),
        false => subscriber.with(lines.without_time()).try_init(),
    };
    started.map_err(|error| format!("cannot log: {error}"))?;
    Ok(Box::new(move |filter: &str| {
        if let Ok(targets) = parse(filter) {
            // Fails only when the subscriber is gone.
            let _ = handle.reload(targets);
        }
    }))
}
