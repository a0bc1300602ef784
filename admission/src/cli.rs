//! The command line of `lm-admissiond`.

mod client;
mod show;

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgMatches, Parser, Subcommand};
use lm_protocol::admission::ClusterKey;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{self, Config};
use crate::daemon::{self, Daemon, Reload, SetLog};
use crate::lines::Bounded;
use crate::reader::{self, Files, Reader};
use crate::{key, privileges};

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
    _config: Config,

    /// TOML file with the same settings, under the same names; the command line goes before it
    #[arg(long = "config", value_name = "FILE")]
    file: Option<PathBuf>,

    /// Look whether the daemon could start, and change nothing
    #[arg(long)]
    check: bool,

    /// Be the process that reads the files again for a daemon that is another user
    #[arg(long, hide = true)]
    reads_for_the_daemon: bool,
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
        #[arg(long, value_name = "PATH", default_value = lm_dataplane::ipc::SOCKET_PATH)]
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
  SIGHUP           reads allow lists, limits, peers, key, link rate and log
                   level again

EXIT CODES
  0  done
  1  failed
  2  wrong command line

NOTES
  Needs CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and CAP_IPC_LOCK, which it keeps,
  and root or CAP_SYS_ADMIN for a moment where bpffs is not mounted. Who is not
  root names folders and a bpffs of its own (--socket, --state-dir, --bpffs).
  Admission is authenticated by the cluster's key; data is neither encrypted
  nor authenticated. docs/security.md has the threats.";

/// Does what a command line says.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.collect();
    let line = match CommandLine::try_parse_from(&arguments) {
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
        None => run(line.run, &arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("lm-admissiond: {what}");
            ExitCode::FAILURE
        }
    }
}

fn run(run: Run, arguments: &[OsString]) -> Result<(), String> {
    let (said, file) = (config::said::<CommandLine>(arguments), run.file);
    let (own, path) = (said.clone(), file.clone());
    let read = move || read_files(&own, path.as_deref());
    if run.reads_for_the_daemon {
        return reader::serve(read);
    }
    let meaning = move |files: Files| -> Result<(Config, ClusterKey), String> {
        let config = configuration(&said, file.as_deref().zip(files.config.as_deref()))?;
        let key = key::of_bytes(&config.key_file, &files.key)?;
        Ok((config, key))
    };
    let (config, key) = meaning(read()?)?;
    if run.check {
        daemon::check(&config)?;
        return show::say("the configuration is right\n");
    }
    let set_log = start_log(&config.log)?;
    let reload: Reload = match config.user {
        None => Box::new(move || meaning(read()?)),
        Some(_) => {
            let mut reader = Reader::start(&arguments[1..])?;
            Box::new(move || meaning(reader.read()?))
        }
    };
    Daemon::start(config, key, reload, set_log)?.run()
}

/// Reads the files that the configuration is in, or names.
fn read_files(said: &ArgMatches, file: Option<&Path>) -> Result<Files, String> {
    let text = file.map(config::read).transpose()?;
    let config = configuration(said, file.zip(text.as_deref()))?;
    let user = config.user.as_deref().map(privileges::find_user).transpose()?;
    let key = key::read(&config.key_file, user.map(|(uid, _)| uid.as_raw()))?;
    Ok(Files { config: text, key })
}

/// What command line and file, its name and text, say together.
fn configuration(said: &ArgMatches, file: Option<(&Path, &str)>) -> Result<Config, String> {
    let Some((path, text)) = file else {
        return Config::default().but(said).map_err(|error| error.to_string());
    };
    config::parse(path, text)?
        .but(said)
        .map_err(|error| match config::line_of(text, error.key) {
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
        true => subscriber.with(lines.map_event_format(Bounded::new)).try_init(),
        false => {
            let lines = lines.without_time().map_event_format(Bounded::new);
            subscriber.with(lines).try_init()
        }
    };
    started.map_err(|error| format!("cannot log: {error}"))?;
    Ok(Box::new(move |filter: &str| {
        if let Ok(targets) = parse(filter) {
            // Fails only when the subscriber is gone.
            let _ = handle.reload(targets);
        }
    }))
}
