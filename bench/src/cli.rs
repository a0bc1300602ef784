//! What both tools take on their command line and how they end: options, one-line errors, exit codes.

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::net::Ipv4Addr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::{Args, Parser, ValueEnum};
use lm_dataplane::{Admission, Checksum, Delivery, Depth, Integrity, ModeRequest};
use lm_measure::rate::BitRate;
use lm_measure::stdout;
use lm_protocol::window::WindowShape;
use serde::{Deserialize, Serialize};

use crate::report::Report;

/// Exit code of a run that did what it was asked.
pub const EXIT_OK: u8 = 0;
/// Exit code of a run that failed.
pub const EXIT_FAILURE: u8 = 1;
/// Exit code for a command line that makes no sense.
pub const EXIT_USAGE: u8 = 2;
/// Exit code of a run that was ended by Ctrl-C (SIGINT) or SIGTERM.
pub const EXIT_INTERRUPTED: u8 = 130;

/// The part of the manual that both tools share, shown at the end of `--help`.
pub const MANUAL_END: &str = "\
REPORT
  At the end a report goes to standard output, with --json as one JSON object
  and nothing else there; everything else goes to standard error.
    bytes, messages    payload confirmed (lm-send) or written out (lm-recv)
    transfers          complete transfers
    failed_transfers   transfers that broke under way
    resumed_bytes      bytes that lm-recv had of an earlier transfer, verified
                       and not sent again (lm-send --resume)
    seconds            from the first transfer's request to the last one's end
    gbit_per_s         payload bits in that time
    device             the interface, or the DPDK device
    mode               what the kernel reports: copy-native, zero-copy, ...;
                       of a DPDK device zero-copy or copy-port
    wire               lm or ipfrag; lm-recv: mixed for both, null for none
    user_copied_bytes  payload bytes that user space copied
    messages_one_copy  lm-send: messages that did not land, since there was no
                       place at first, or --one-copy was given
    fragments_one_copy lm-recv: fragments that did not land, for these reasons
                       or others
    page_end_fragments fragments copied because their places cross the end of a
                       huge page (zero-copy mode)
    messages_ahead, messages_ahead_copied, open_refused
                       lm-recv: messages of 2 to 64 fragments that came
                       unannounced; those that were copied (a region of slots
                       ended, or a packet was lost); how often memory was short
    restored_bytes     bytes put back at window edges
    latency_us         p50, p90, p99, p999, max of the completion time of
                       messages, in microseconds, null when not measured.
                       lm-send: until the receiver's confirmation;
                       lm-recv: from the announcement until delivery
    missing_bytes      payload bytes lost in messages that were delivered
                       without them (--delivery partial)
    manifests_requested
                       how often lm-recv asked which bytes of a message are
                       corrupt (lm-send --integrity manifest)
    drops              what was dropped: {reason: count}
    error              why the run failed; absent when it did not

EXIT CODES
  0    done
  1    failed
  2    wrong command line
  130  ended by Ctrl-C or SIGTERM
  141  what it prints was not read

NOTES
  Needs CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and CAP_IPC_LOCK, or root; with
  --dpdk only what the driver needs. Data is
  neither encrypted nor authenticated. Packets are taken before the host's
  firewall and out of tcpdump's sight: use --pcap to see them. Sizes take the
  binary suffixes K, M, G and T.";

/// Options of `lm-send` and `lm-recv` alike.
#[derive(Clone, Debug, Args)]
pub struct LinkOptions {
    /// Network interface to use [default: the route's]
    ///
    /// A physical port or a veth device; of a bond, bridge or VLAN device name the port below it. Attaching to the
    /// interface of the default route can make its link blink on some drivers.
    #[arg(long, short = 'i', value_name = "IF")]
    pub interface: Option<String>,

    /// Instead of an interface: a DPDK device, as DRIVER and a number, with its arguments
    ///
    /// net_vhost0,iface=FILE listens on a socket and net_virtio_user0,path=FILE connects there, both without privileges;
    /// net_af_packet0,iface=IF is an interface. Only programs built with the feature `dpdk` have it.
    #[arg(long, value_name = "DEVICE")]
    pub dpdk: Option<String>,

    /// The address to have on that device, and the length of its network's prefix
    #[arg(long, value_name = "ADDRESS/LEN")]
    pub dpdk_address: Option<String>,

    /// The way from that device to other networks
    #[arg(long, value_name = "ADDRESS")]
    pub dpdk_gateway: Option<Ipv4Addr>,

    /// How packets pass between driver and program
    ///
    /// auto takes the best that the driver offers. Demanding zero-copy, copy or generic and not getting it is an
    /// error.
    #[arg(long, value_enum, default_value_t = Mode::Auto, value_name = "MODE")]
    pub mode: Mode,

    /// Receive queue that large messages arrive on [default: 1, or 0 where there is only one]
    #[arg(long, short = 'q', value_name = "N")]
    pub queue: Option<u32>,

    /// Largest IP packet to send and accept, in bytes [default: the interface's MTU]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(576..))]
    pub mtu: Option<u16>,

    /// What is in the UDP checksum of packets that leave
    ///
    /// LM's receivers verify digests, whatever this is. It is for what looks at checksums on the way, and for hosts without LM. offload
    /// needs Linux 6.11, in zero-copy mode a driver that has it, and neither --wire ipfrag nor an admission daemon; demanding it and
    /// not getting it is an error.
    #[arg(long, value_enum, default_value_t = ChecksumOption::None, value_name = "WHICH")]
    pub checksum: ChecksumOption,

    /// Who may use the interface for this program: auto, embedded, or the path of an admission daemon's socket
    ///
    /// auto asks the admission daemon of this host (lm-admissiond) where it runs, which needs no privileges, and else does without;
    /// embedded does without, which needs CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and CAP_IPC_LOCK. The other end must do the same.
    #[arg(long, value_name = "WHO", value_parser = parse_admission, default_value = "auto")]
    pub admission: Admission,

    /// The cluster's key, from `lm-admissiond keygen`, for a program that admits without a daemon
    ///
    /// It has sessions only with programs and admission daemons that have the same key, and hears nobody else.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,

    /// How many seconds the other end may be silent, or the interface down, before a transfer is given up
    ///
    /// A path that is cut, a cable that is out or an interface that is set down for less than that only delays what is under way. A
    /// sender waits for 5 seconds at least. Programs that have gone, on hosts that are there, are noticed after 5 seconds. Under an
    /// admission daemon no session outlasts a minute of silence.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "60")]
    pub patience: Duration,

    /// Whether a message longer than 1 MiB is sent while it is read, and written while it arrives: on, or off for one after the other
    ///
    /// Shorter ones overlap as they are, several at once. What has no known length is read whole before it is sent, and so it is
    /// with --wire ipfrag.
    #[arg(long, value_enum, default_value_t = Pipeline::On, value_name = "WHETHER")]
    pub pipeline: Pipeline,

    /// Print a line of statistics to standard error every so many seconds: how far each station is, the rate, and drops
    ///
    /// lm-send: read from the file, released to leave, sent (repetitions count), confirmed. lm-recv: landed (by the one-copy path, too),
    /// shown (final), written, and written of whole messages.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub stats: Option<Duration>,

    /// Write every packet of this program to a pcap file
    ///
    /// tcpdump cannot see packets that are redirected to a program. Slows the transfer down.
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,

    /// Write the latency histogram to a file, in HdrHistogram's percentile text format (.hgrm), in microseconds
    #[arg(long, value_name = "FILE")]
    pub histogram: Option<PathBuf>,

    /// Replace files that exist: those of --pcap, --histogram and lm-recv --output
    #[arg(long)]
    pub force: bool,

    /// Print the report as one JSON object on standard output
    #[arg(long)]
    pub json: bool,

    /// Say more on standard error; -vv still more. RUST_LOG goes before
    #[arg(long, short = 'v', action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// `--delivery`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeliveryOption {
    /// A message that loses a fragment is given up.
    Unreliable,
    /// Lost fragments are sent again.
    #[default]
    Reliable,
    /// What came is delivered; lost parts are zeros.
    Partial,
}

impl From<DeliveryOption> for Delivery {
    fn from(option: DeliveryOption) -> Self {
        match option {
            DeliveryOption::Unreliable => Delivery::Unreliable,
            DeliveryOption::Reliable => Delivery::Reliable,
            DeliveryOption::Partial => Delivery::Partial,
        }
    }
}

/// `--integrity`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IntegrityOption {
    /// Each hop's checksums must do.
    None,
    /// Digests end to end; nothing is delivered that they do not verify.
    #[default]
    Manifest,
}

impl From<IntegrityOption> for Integrity {
    fn from(option: IntegrityOption) -> Self {
        match option {
            IntegrityOption::None => Integrity::None,
            IntegrityOption::Manifest => Integrity::Manifest,
        }
    }
}

/// `--checksum`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ChecksumOption {
    /// Zero, which is no checksum.
    #[default]
    None,
    /// The network card sums packets up, or, in copy mode, where it cannot, the kernel.
    Offload,
    /// This program sums each packet up when it leaves, while its bytes are in the cache.
    Integrated,
}

impl From<ChecksumOption> for Checksum {
    fn from(option: ChecksumOption) -> Self {
        match option {
            ChecksumOption::None => Checksum::None,
            ChecksumOption::Offload => Checksum::Offload,
            ChecksumOption::Integrated => Checksum::Integrated,
        }
    }
}

/// `--pipeline`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pipeline {
    /// Reading, sending, receiving and writing of one message overlap.
    On,
    /// A message is sent when it is read, and written when it has come.
    Off,
}

/// `--mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Zero-copy where the driver has it, else native copy mode, else generic.
    #[default]
    Auto,
    /// The NIC writes into the message's memory.
    ZeroCopy,
    /// The driver runs the gate and the kernel copies once.
    Copy,
    /// The network stack runs the gate: any device, slower.
    Generic,
}

impl From<Mode> for ModeRequest {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Auto => ModeRequest::Auto,
            Mode::ZeroCopy => ModeRequest::ZeroCopy,
            Mode::Copy => ModeRequest::Copy,
            Mode::Generic => ModeRequest::Generic,
        }
    }
}

/// Reads `--rate`, in bits per second. Below 100 kbit/s a full packet comes so seldom that receivers take the sender for dead.
///
/// # Errors
/// How to write it.
pub fn parse_rate(text: &str) -> Result<NonZeroU64, String> {
    let rate = text.parse::<BitRate>().ok().filter(|rate| rate.0 >= 100_000);
    rate.and_then(|rate| NonZeroU64::new(rate.0))
        .ok_or_else(|| "write a rate from 100kbit to 1000Gbit, like 2.5Gbit or 500M".to_owned())
}

/// `auto`, `embedded`, or a path.
///
/// # Errors
/// A word that is neither and has no slash: probably a slip.
pub fn parse_admission(text: &str) -> Result<Admission, String> {
    match text {
        "auto" => Ok(Admission::Auto),
        "embedded" => Ok(Admission::Embedded),
        path if path.contains('/') => Ok(Admission::Daemon(path.into())),
        _ => Err("write auto, embedded, or the path of a socket with a / in it".to_owned()),
    }
}

/// Reads how many packets are in the device and on the way at once.
///
/// # Errors
/// A word that is no such thing.
pub fn parse_depth(text: &str) -> Result<Depth, String> {
    match text {
        "full" => Ok(Depth::Full),
        "auto" => Ok(Depth::Auto),
        _ => Err("write full or auto".to_owned()),
    }
}

/// Reads a window's length in fragments.
///
/// # Errors
/// Not a power of two.
pub fn parse_window(text: &str) -> Result<WindowShape, String> {
    let fragments = text.parse();
    window(fragments.map_err(|_| "write a number of fragments".to_owned())?)
}

/// A window of so many fragments.
///
/// # Errors
/// Not a power of two.
pub(crate) fn window(fragments: u32) -> Result<WindowShape, String> {
    WindowShape::new(fragments).map_err(|error| format!("{error}; choose a power of two, for example 256"))
}

pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.01..=86_400.0).contains(seconds));
    let seconds = seconds.map(Duration::from_secs_f64);
    seconds.ok_or_else(|| "write a number of seconds from 0.01 to 86400".to_owned())
}

/// Why a tool ends without success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What and what to do about it, in one line.
    pub text: String,
    /// The exit code.
    pub code: u8,
}

impl Failure {
    /// A failure of the run. `text` says what, and after a semicolon what to do.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Failure {
            text: one_line(&text.into()),
            code: EXIT_FAILURE,
        }
    }

    /// A command line that makes no sense.
    #[must_use]
    pub fn usage(text: impl Into<String>) -> Self {
        Failure {
            code: EXIT_USAGE,
            ..Failure::new(text)
        }
    }

    /// Ctrl-C.
    #[must_use]
    pub fn interrupted() -> Self {
        Failure {
            code: EXIT_INTERRUPTED,
            ..Failure::new("interrupted; start again, lm-send with --resume to go on")
        }
    }
}

/// An error, and those behind it.
impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::new(chain(&error))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// An error and the errors behind it as one line, for errors that say more in their `source`.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let inner = error.to_string();
        if !text.contains(&inner) {
            text = format!("{text}: {inner}");
        }
        source = error.source();
    }
    one_line(&text)
}

/// Says on standard error that the other side may start.
pub fn ready() {
    eprintln!("ready");
}

/// Prints a program's report on standard output, as one line of JSON.
pub fn print(report: &impl Serialize) {
    println!(
        "{}",
        serde_json::to_string(report).expect("a report is numbers and names")
    );
}

/// Ends this process with an error after so many seconds. A blocking `recv` has no time limit of its own, and giving it one would change
/// what is measured.
pub fn end_after(program: &'static str, seconds: f64) {
    let limit = Duration::from_secs_f64(seconds.clamp(0.0, 86_400.0));
    thread::spawn(move || {
        thread::sleep(limit);
        eprintln!(
            "{program}: not finished after {} s (is the other side running?)",
            limit.as_secs_f64()
        );
        std::process::exit(1);
    });
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What a program's `main` returns: reads the command line, starts the log, which `verbose` says how much of, and runs the program. Help and
/// version are printed, and the reason of a failure is said in one line.
pub fn main<P: Parser>(
    tool: &str,
    arguments: impl IntoIterator<Item = OsString>,
    verbose: impl FnOnce(&P) -> u8,
    run: impl FnOnce(P) -> Result<ExitCode, Failure>,
) -> ExitCode {
    let run = || {
        let options = match P::try_parse_from(arguments) {
            Ok(options) => options,
            Err(error) if error.use_stderr() => {
                return Err(Failure::usage(usage_line(&error.to_string())));
            }
            Err(error) => {
                print!("{error}");
                return Ok(ExitCode::SUCCESS);
            }
        };
        crate::log::start(verbose(&options));
        run(options)
    };
    stdout::main(tool, || {
        run().unwrap_or_else(|failure| {
            complain(tool, &failure.text);
            ExitCode::from(failure.code)
        })
    })
}

/// clap's first paragraph says what is wrong (the values that would be right included), the others how to call the
/// tool: this is made one line.
fn usage_line(text: &str) -> String {
    let what = usage_fault(text);
    if what.contains("; ") {
        what
    } else {
        format!("{}; see --help", what.trim_end_matches('.'))
    }
}

/// clap's first paragraph as one line.
pub(crate) fn usage_fault(text: &str) -> String {
    let what = text.split("\n\n").next().unwrap_or(text);
    one_line(what.strip_prefix("error: ").unwrap_or(what))
}

/// Says how a run ended: the report on standard output (on standard error when that carries data), the reason of a
/// failure on standard error. Gives the exit code.
pub fn conclude(
    tool: &str,
    mut report: Report,
    result: Result<(), Failure>,
    json: bool,
    stdout_is_data: bool,
) -> ExitCode {
    let code = result.as_ref().map_or_else(|failure| failure.code, |()| EXIT_OK);
    if let Err(failure) = result {
        complain(tool, &failure.text);
        report.error = Some(failure.text);
    }
    let text = match json {
        true => report.to_json(),
        false => report.to_string(),
    };
    match stdout_is_data {
        true => eprint_line(&text),
        false => println!("{text}"),
    }
    ExitCode::from(code)
}

/// One line on standard error in the name of the tool.
pub fn complain(tool: &str, text: &str) {
    eprint_line(&format!("{tool}: {text}"));
}

fn eprint_line(line: &str) {
    // Nobody is left to tell when standard error is gone.
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    struct Options {
        #[command(flatten)]
        link: LinkOptions,
        #[arg(long)]
        size: crate::size::ByteSize,
    }

    #[test]
    fn windows_are_powers_of_two() {
        assert_eq!(parse_window("32").unwrap().fragments(), 32);
        for (wrong, words) in [
            ("3", "choose a power of two"),
            ("0", "choose a power of two"),
            ("x", "a number of fragments"),
        ] {
            let error = parse_window(wrong).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    fn options(arguments: &[&str]) -> Result<Options, String> {
        let arguments = [&["tool"], arguments].concat();
        Options::try_parse_from(arguments).map_err(|error| usage_line(&error.to_string()))
    }

    #[test]
    fn defaults() {
        let options = options(&["--size", "1M"]).unwrap();
        assert_eq!(options.size.bytes(), 1 << 20);
        assert_eq!(options.link.mode, Mode::Auto);
        assert!(options.link.interface.is_none() && options.link.queue.is_none() && !options.link.json);
    }

    #[test]
    fn usage_errors_are_one_line_with_a_remedy() {
        for (arguments, words) in [
            (
                &["--size", "1M", "--mode", "fast"][..],
                "possible values: auto, zero-copy, copy, generic",
            ),
            (&[], "--size"),
            (&["--size", "1X"], "write a whole number"),
            (&["--size", "1", "--mtu", "100"], "--mtu"),
            (&["--size", "1", "--stats", "0"], "number of seconds"),
            (&["--size", "1", "--stats", "nan"], "number of seconds"),
            (&["--size", "1", "--what"], "--what"),
        ] {
            let line = options(arguments).unwrap_err();
            assert!(line.contains(words), "{line}");
            assert!(
                line.contains("; ") && !line.contains('\n') && !line.starts_with("error"),
                "{line}"
            );
        }
    }

    #[test]
    fn rates() {
        assert_eq!(parse_rate("2.5G").map(NonZeroU64::get), Ok(2_500_000_000));
        assert_eq!(parse_rate("100kbit").map(NonZeroU64::get), Ok(100_000));
        for wrong in ["", "0", "99kbit", "1", "1001Gbit", "-1G", "nanG"] {
            assert!(parse_rate(wrong).unwrap_err().contains("like 2.5Gbit"), "{wrong}");
        }
    }

    #[test]
    fn failures_have_one_line() {
        assert_eq!(Failure::new("a\n  b; c").to_string(), "a b; c");
        assert_eq!(Failure::interrupted().code, EXIT_INTERRUPTED);
        assert_eq!(Failure::usage("x; y").code, EXIT_USAGE);
    }

    #[test]
    fn a_chain_of_errors_is_one_line() {
        #[derive(Debug)]
        struct Outer(std::io::Error);
        impl fmt::Display for Outer {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("cannot open")
            }
        }
        impl std::error::Error for Outer {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                Some(&self.0)
            }
        }
        assert_eq!(
            chain(&Outer(std::io::Error::other("no\nway"))),
            "cannot open: no way"
        );
    }
}
