//! `lm-send`: reads a file straight into send regions and sends it to another host.

mod drive;
mod shape;

use std::ffi::OsString;
use std::net::SocketAddrV4;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use lm_dataplane::port::Port;
use lm_dataplane::{ConnectError, ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, PeerId, Session};
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire;

pub use self::shape::Options;
pub(crate) use self::shape::SEND_MEMORY_MAX;
use self::shape::Shape;
use crate::cli::{self, Failure};
use crate::input::Input;
use crate::link;
use crate::meter::Meter;
use crate::privileges;
use crate::report::Report;
use crate::signals::Interrupt;
use crate::transfer::wire::{Digest, TransferId};

const TOOL: &str = "lm-send";

/// How long to sleep when nothing comes, before timers and signals are looked at again.
const IDLE_MAX: Duration = Duration::from_millis(10);

/// How long the word that the transfer is given up may take to be confirmed.
const FAREWELL_MAX: Duration = Duration::from_millis(300);

/// How long to try to reach the receiver, and to wait for a queue that another sender uses: longer than the lease of a
/// sender that was killed.
const CONNECT_MAX: Duration = Duration::from_secs(6);

/// Runs the tool; what `main` returns.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let verbose = |options: &Options| options.link.verbose;
    cli::main(TOOL, arguments, verbose, |options: Options| {
        #[cfg(feature = "dpdk")]
        if options.link.dpdk.is_some() {
            return Ok(Tool::open(options, link::open_dpdk)?.run());
        }
        Ok(Tool::open(options, link::open)?.run())
    })
}

struct Tool<P: Port> {
    endpoint: Endpoint<P>,
    peer: PeerId,
    /// No LM at the other end: plain datagrams.
    plain: bool,
    input: Rc<Input>,
    /// What the receiver knows the file by, if it has a name.
    key: Option<u64>,
    /// Blocks of the file (first offset, length of each, end) and their digests: those that were asked for last.
    digests: ((u64, u64, u64), Vec<Digest>),
    shape: Shape,
    meter: Meter,
    interrupt: Interrupt,
    in_flight: u32,
    /// Payload bytes that are read of the input, and those that have left, or may.
    read: u64,
    released: u64,
    /// Of complete transfers, so far.
    report: Report,
    first_start: Instant,
    last_end: Instant,
    options: Options,
}

impl<P: Port> Tool<P> {
    fn open(options: Options, open: link::Open<P>) -> Result<Self, Failure> {
        let interrupt = Interrupt::install().map_err(|error| Failure::new(format!("{error}; try again")))?;
        let to = link::resolve(&options.to)?;
        let input = Input::open(&options.file).map_err(Failure::new)?;
        let shape = Shape::new(&options, input.len())?;
        let meter = Meter::new(TOOL, &options.link, Instant::now())?;
        let base = link::endpoint_config(&options.link, || link::interface_towards(*to.ip()))?;
        let config = EndpointConfig {
            integrity: options.integrity.unwrap_or_default().into(),
            memory: MemoryConfig {
                // A sender gets answers only, and they are small.
                landing_len: 0,
                send_len: shape.send_memory(),
                ..base.memory
            },
            ..base
        };
        let nobody = |_: &lm_protocol::session::Application<'_>| Err(RejectReason::NotAllowed.into());
        if options.link.dpdk.is_some() {
            // DPDK's own threads have what this one has when they begin.
            privileges::drop_rest(|| true)?;
        }
        let mut endpoint = open(&options.link, &config, Box::new(nobody))?;
        privileges::drop_rest(|| true)?;
        for warning in endpoint.status().warnings() {
            cli::complain(TOOL, &format!("warning: {warning}"));
        }
        let (peer, plain) = connect(&mut endpoint, to, &shape, &options)?;
        if plain {
            let text = format!("no LM at {to}: sending plain UDP datagrams, which nobody confirms");
            cli::complain(TOOL, &text);
        }
        meter.expect(input.len().map(|len| len.saturating_mul(shape.repeat)));
        let now = Instant::now();
        Ok(Tool {
            endpoint,
            peer,
            plain,
            key: input.len().and_then(|_| key(&options.file)),
            digests: ((0, 0, 0), Vec::new()),
            input: Rc::new(input),
            shape,
            meter,
            interrupt,
            in_flight: 0,
            read: 0,
            released: 0,
            report: Report::default(),
            first_start: now,
            last_end: now,
            options,
        })
    }

    fn run(mut self) -> ExitCode {
        let mut transfer = TransferId::from_random(random());
        let mut result = Ok(());
        for _ in 0..self.shape.repeat {
            let sent = match self.plain {
                true => self.send_plain(),
                false => self.send_transfer(transfer),
            };
            match sent {
                Ok(()) => self.report.transfers += 1,
                Err(failure) => {
                    self.last_end = Instant::now();
                    self.report.failed_transfers += 1;
                    result = Err(failure);
                    break;
                }
            }
            transfer = transfer.next();
        }
        let result = result.and(self.meter.finish());
        self.report(result)
    }

    /// The report, the reason of a failure, and the exit code.
    fn report(mut self, result: Result<(), Failure>) -> ExitCode {
        self.report.wire = Some(match self.shape.wire {
            Wire::Lm => "lm",
            Wire::IpFrag => "ipfrag",
        });
        let mut report = link::report(TOOL, &mut self.endpoint, self.report);
        let seconds = self.last_end.duration_since(self.first_start).as_secs_f64();
        report.set_measured(
            self.meter.bytes,
            self.meter.messages,
            seconds,
            &self.meter.latency,
        );
        // Detach before the last word: whoever reads it may start the next program at once.
        drop(self.endpoint);
        cli::conclude(TOOL, report, result, self.options.link.json, false)
    }
}

/// Reaches the receiver; `true`: there is none, and plain datagrams will do.
fn connect<P: Port>(
    endpoint: &mut Endpoint<P>,
    to: SocketAddrV4,
    shape: &Shape,
    wanted: &Options,
) -> Result<(PeerId, bool), Failure> {
    let options = ConnectOptions {
        wire: shape.wire,
        max_message_len: shape.longest_message(),
        messages_in_flight: shape.window,
        delivery: wanted.delivery.into(),
        timeout: CONNECT_MAX,
        one_copy: wanted.one_copy,
        session: Session::Now,
        rate: wanted.rate,
        ..ConnectOptions::default()
    };
    match endpoint.connect(to, &options) {
        Ok(peer) => Ok((peer, false)),
        Err(ConnectError::NotListening { .. } | ConnectError::Unreachable { .. })
            if shape.wire == Wire::IpFrag =>
        {
            let plain = ConnectOptions {
                session: Session::Never,
                ..options
            };
            Ok((endpoint.connect(to, &plain)?, true))
        }
        Err(error) => Err(error.into()),
    }
}

/// A number that stays the same for a file of this host, whatever is in it.
fn key(file: &Path) -> Option<u64> {
    let path = file.canonicalize().ok()?;
    let hash = xxhash_rust::xxh3::xxh3_64(path.as_os_str().as_bytes());
    // The last number means that there is none.
    Some(hash.min(u64::MAX - 1))
}

/// A number that differs from run to run, so that a receiver never takes a new sender's transfer for an old one.
fn random() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish() as u32
}
