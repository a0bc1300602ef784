//! What the command line asks for: the options of `lm-send`, and the transfer's shape that follows from them.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use lm_protocol::geometry::Wire;

use super::TOOL;
use crate::cli::{DeliveryOption, Failure, IntegrityOption, LinkOptions, MANUAL_END, parse_rate};
use crate::size::ByteSize;
use crate::transfer::wire::Plan;

/// Largest message under `--wire ipfrag`: what one UDP datagram carries (RFC 768 with RFC 791).
const DATAGRAM_MAX: u64 = 65_507;

/// Send memory, as long as one message does not need more: beyond this, waiting for a message's confirmation costs less
/// than its memory.
pub(crate) const SEND_MEMORY_MAX: u64 = 256 << 20;

/// Smallest piece of send memory; every region is rounded up to pages, and the arena may be fragmented.
const SEND_MEMORY_MIN: u64 = 1 << 20;

const ABOUT: &str = "Sends a file to a host where lm-recv runs, over AF_XDP";

const LONG_ABOUT: &str = "\
Sends a file to a host where lm-recv runs, over AF_XDP: the kernel reads the file straight into the memory that \
packets are sent from.

A file is one transfer of one or more messages of --message-size (one message if the file is smaller). Success is \
reported only when the receiver has written every byte. With - standard input is sent until its end.

With --wire ipfrag messages travel as the IP fragments of UDP datagrams. To a host where no LM listens the file's \
content then goes out as plain UDP datagrams to that port, as any UDP program would send it: no transfer messages, \
and nobody confirms anything.

Examples:
  lm-send --to 10.0.0.2 big.img
  tar -c dir | lm-send --to 10.0.0.2 -
  until lm-send --to 10.0.0.2 --resume big.img; do sleep 9; done
  lm-send --to 10.0.0.2:9000 --wire ipfrag --message-size 7168 data.bin";

/// The command line of `lm-send`.
#[derive(Clone, Debug, Parser)]
#[command(name = TOOL, version, about = ABOUT, long_about = LONG_ABOUT, after_long_help = MANUAL_END)]
pub struct Options {
    /// Host to send to, and its data port [default port: 7168]
    #[arg(long, short = 't', value_name = "HOST[:PORT]")]
    pub(super) to: String,

    #[command(flatten)]
    pub(super) link: LinkOptions,

    /// Length of a message [default: 1M; with --wire ipfrag 65507, which is also the most]
    #[arg(long, short = 'm', value_name = "SIZE")]
    pub(super) message_size: Option<ByteSize>,

    /// Send the file so many times, as so many transfers
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) repeat: u64,

    /// Go on where an earlier transfer of this file to this receiver ended, whatever ended it
    ///
    /// The receiver knows the file by its place on this host. What it has of it is compared by digests first, from the beginning on, and
    /// what comes begins at the first message that differs: a file that has changed meanwhile arrives as it is now.
    #[arg(long)]
    pub(super) resume: bool,

    /// Messages on their way at once, as far as the send memory goes (256M, or one message if that is longer)
    #[arg(long, short = 'w', value_name = "N", default_value_t = 8)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(super) window: u32,

    /// How fragments travel: with LM headers, or as IP fragments of UDP datagrams
    #[arg(long, value_enum, default_value_t = WireOption::Lm, value_name = "WIRE")]
    pub(super) wire: WireOption,

    /// What becomes of messages that lose fragments: given up, repaired, or delivered with zeros in their place
    ///
    /// --wire ipfrag is always unreliable.
    #[arg(long, value_enum, default_value_t = DeliveryOption::Reliable, value_name = "KIND")]
    pub(super) delivery: DeliveryOption,

    /// Most to send, in bits per second of Ethernet frames: 500Mbit, 2.5G [default: no limit]
    ///
    /// Repetitions count, acknowledgements do not. Up to a millisecond's packets (4 at least, 256 at most) may leave at
    /// once.
    #[arg(long, value_name = "BITS", value_parser = parse_rate)]
    pub(super) rate: Option<NonZeroU64>,

    /// Send by the one-copy path: without a place of the receiver's landing queue
    ///
    /// The receiving host copies each fragment once more. Without it a sender begins so where there is no place, and its messages land as
    /// soon as it has one (messages_one_copy in the report tells how many did not). Not with --wire ipfrag.
    #[arg(long)]
    pub(super) one_copy: bool,

    /// Whether digests go with the messages, so that nothing corrupt is delivered [default: manifest]
    ///
    /// --wire ipfrag is without, unless the receiver lands in zero-copy mode.
    #[arg(long, value_enum, value_name = "KIND")]
    pub(super) integrity: Option<IntegrityOption>,

    /// File to send, or - for standard input
    #[arg(value_name = "FILE|-")]
    pub(super) file: PathBuf,
}

/// `--wire`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum WireOption {
    /// Each fragment is a UDP datagram with an LM header.
    Lm,
    /// Each message is a UDP datagram in IP fragments.
    Ipfrag,
}

/// What the options say about the transfer; checked before anything is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) plan: Plan,
    pub(super) wire: Wire,
    pub(super) repeat: u64,
    pub(super) window: u32,
}

impl Shape {
    pub(super) fn new(options: &Options, input_len: Option<u64>) -> Result<Self, Failure> {
        let (wire, default_len) = match options.wire {
            WireOption::Lm => (Wire::Lm, 1 << 20),
            WireOption::Ipfrag => (Wire::IpFrag, DATAGRAM_MAX),
        };
        let message_len = options.message_size.map_or(default_len, ByteSize::bytes);
        if wire == Wire::IpFrag && message_len > DATAGRAM_MAX {
            return Err(Failure::usage(format!(
                "--message-size {message_len} does not fit a UDP datagram; with --wire ipfrag take at most \
                 {DATAGRAM_MAX}"
            )));
        }
        if wire == Wire::IpFrag && options.integrity == Some(IntegrityOption::Manifest) {
            return Err(Failure::usage(
                "--integrity manifest cannot be demanded with --wire ipfrag, whose receiver decides; leave it out, or \
                 take --wire lm",
            ));
        }
        if wire == Wire::IpFrag && options.one_copy {
            return Err(Failure::usage(
                "--one-copy does not go with --wire ipfrag, whose datagrams any receiver's kernel copies; leave one \
                 of them out",
            ));
        }
        if input_len.is_none() && options.repeat > 1 {
            return Err(Failure::usage(
                "a stream can be read once only; leave out --repeat or send a file",
            ));
        }
        if options.resume && (input_len.is_none() || options.repeat > 1) {
            return Err(Failure::usage(
                "--resume goes on with one transfer of one file; leave out --repeat, and write a stream to a file \
                 first",
            ));
        }
        let plan = Plan::new(input_len, message_len).ok_or_else(|| {
            Failure::usage(
                "--message-size must be above 0 and not need more than 2^32 messages; take another",
            )
        })?;
        Ok(Shape {
            plan,
            wire,
            repeat: options.repeat,
            window: options.window,
        })
    }

    /// Length of the longest message that will be sent, in bytes.
    pub(super) fn longest_message(&self) -> u64 {
        self.plan.longest_message()
    }

    /// Send memory to ask for, in bytes: the window's messages, within reason.
    pub(super) fn send_memory(&self) -> u64 {
        // Holes and page rounding: at the smallest MTU (576: 520 bytes of payload a packet) a hole of 80 bytes is 15 %.
        let region = self.longest_message() + self.longest_message() / 6 + 8192;
        let messages = self
            .plan
            .message_count()
            .unwrap_or(u64::MAX)
            .min(u64::from(self.window));
        region
            .saturating_mul(messages)
            .min(SEND_MEMORY_MAX.max(region))
            .max(SEND_MEMORY_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli;

    fn options(arguments: &[&str]) -> Options {
        Options::parse_from([&[TOOL, "--to", "192.0.2.1"], arguments].concat())
    }

    fn shape(arguments: &[&str], len: Option<u64>) -> Result<Shape, Failure> {
        Shape::new(&options(arguments), len)
    }

    #[test]
    fn defaults_depend_on_the_wire() {
        let lm = shape(&["x"], Some(5 << 20)).unwrap();
        assert_eq!(
            (lm.plan.message_len, lm.plan.message_count(), lm.wire),
            (1 << 20, Some(5), Wire::Lm)
        );
        let ipfrag = shape(&["--wire", "ipfrag", "x"], Some(70_000)).unwrap();
        assert_eq!(
            (ipfrag.plan.message_len, ipfrag.plan.message_count()),
            (65_507, Some(2))
        );
        assert_eq!(shape(&["x"], Some(10)).unwrap().longest_message(), 10);
        assert!(shape(&["--wire", "ipfrag", "--integrity", "none", "x"], Some(1)).is_ok());
    }

    #[test]
    fn shapes_that_make_no_sense() {
        for (arguments, len) in [
            (&["--wire", "ipfrag", "--message-size", "64K", "x"][..], Some(1)),
            (&["--message-size", "0", "x"], Some(1)),
            (&["--message-size", "1", "x"], Some(1 << 33)),
            (&["--repeat", "2", "-"], None),
            (&["--resume", "-"], None),
            (&["--resume", "--repeat", "2", "x"], Some(1)),
            (&["--wire", "ipfrag", "--integrity", "manifest", "x"], Some(1)),
        ] {
            let failure = shape(arguments, len).unwrap_err();
            assert_eq!(failure.code, cli::EXIT_USAGE);
            assert!(failure.text.contains("; "), "{failure}");
        }
    }

    #[test]
    pub(super) fn send_memory_is_bounded_but_holds_a_message() {
        let memory = |arguments: &[&str], len| shape(arguments, len).unwrap().send_memory();
        assert_eq!(memory(&["x"], Some(1)), SEND_MEMORY_MIN);
        assert!((9 << 20..12 << 20).contains(&memory(&["x"], Some(1 << 30))));
        assert!((2 << 20..3 << 20).contains(&memory(&["x"], Some(2 << 20))));
        assert_eq!(
            memory(&["--message-size", "100M", "x"], Some(1 << 30)),
            SEND_MEMORY_MAX
        );
        assert!((1 << 30..5 << 28).contains(&memory(&["--message-size", "1G", "x"], Some(1 << 40))));
        assert!((1 << 30..5 << 28).contains(&memory(&["--message-size", "1G", "-"], None)));
    }

    #[test]
    fn manuals_name_every_json_field() {
        let manual = <Options as clap::CommandFactory>::command()
            .render_long_help()
            .to_string();
        for name in [
            "user_copied_bytes",
            "resumed_bytes",
            "page_end_fragments",
            "restored_bytes",
            "latency_us",
            "manifests_requested",
            "gbit_per_s",
            "--json",
            "EXIT CODES",
        ] {
            assert!(manual.contains(name), "{name} is missing");
        }
    }
}
