//! One message to and fro between two endpoints.

use std::time::{Duration, Instant};

use clap::Args;
use lm_dataplane::{ConnectOptions, Endpoint, RecvError, SendError, Start};

use super::{EndpointArgs, connect};
use crate::cli::{Failure, IntegrityOption, chain};
use crate::link;
use crate::peer::latency::{RoundTripReport, RoundTrips};
use crate::size::ByteSize;

/// Arguments of `lm-ping`.
#[derive(Debug, Clone, Args)]
pub struct PingArgs {
    /// The answering endpoint
    #[arg(long, value_name = "HOST[:PORT]")]
    pub to: String,
    /// Options of the endpoint
    #[command(flatten)]
    pub endpoint: EndpointArgs,
    /// Length of the message
    #[arg(long, default_value = "64")]
    pub message_size: ByteSize,
    /// Round trips that count (a tenth of it again goes before as a warm-up)
    #[arg(long, default_value_t = 20_000)]
    pub count: u64,
    /// Whether digests go with what is sent
    #[arg(long, value_enum, default_value_t = IntegrityOption::Manifest)]
    pub integrity: IntegrityOption,
}

/// Arguments of `lm-pong`.
#[derive(Debug, Clone, Args)]
pub struct PongArgs {
    /// UDP port for data; control has the next one
    #[arg(long, default_value_t = lm_dataplane::DEFAULT_PORT)]
    pub port: u16,
    /// Options of the endpoint
    #[command(flatten)]
    pub endpoint: EndpointArgs,
    /// Longest message to expect
    #[arg(long, default_value = "1M")]
    pub message_size: ByteSize,
    /// Whether digests go with what is sent
    #[arg(long, value_enum, default_value_t = IntegrityOption::Manifest)]
    pub integrity: IntegrityOption,
}

/// Runs `lm-ping`.
///
/// # Errors
///
/// A one-line reason when the endpoint cannot be opened, the other not be reached, or an answer is late or wrong.
pub fn ping(args: &PingArgs) -> Result<RoundTripReport, Failure> {
    let len = args.message_size.bytes();
    if len < 8 {
        return Err(Failure::usage(
            "--message-size must be 8 bytes at least".to_owned(),
        ));
    }
    let to = link::resolve(&args.to)?;
    let mut endpoint = args.endpoint.open(Some(*to.ip()), 0, len, 4, args.integrity)?;
    let options = ConnectOptions {
        max_message_len: len,
        messages_in_flight: 2,
        start: Start::WhenGranted,
        ..ConnectOptions::default()
    };
    let peer = connect(&mut endpoint, to, &options)?;
    let mut payload = vec![0x5a_u8; len as usize];
    let mut round_trips = RoundTrips::new();
    let warm_up = args.count / 10;
    for number in 0..args.count + warm_up {
        payload[..8].copy_from_slice(&number.to_be_bytes());
        let sent = Instant::now();
        endpoint
            .send_copy(peer, &payload, number)
            .map_err(|error| Failure::new(chain(&error)))?;
        let answer = endpoint
            .recv(Some(Duration::from_secs(1)))
            .map_err(|error| Failure::new(chain(&error)))?;
        let elapsed = sent.elapsed();
        if *answer != *payload || answer.tag() != number {
            return Err(Failure::new(format!(
                "the answer to message {number} is another message"
            )));
        }
        while endpoint.try_completion().is_some() {}
        if number >= warm_up {
            round_trips.record(elapsed);
        }
    }
    Ok(round_trips.report("lm-ping"))
}

/// Runs `lm-pong` until the process is ended.
///
/// # Errors
///
/// A one-line reason when the endpoint cannot be opened or the interface goes away.
pub fn pong(args: &PongArgs, ready: impl FnOnce()) -> Result<(), Failure> {
    let len = args.message_size.bytes();
    let mut endpoint = args.endpoint.open(None, args.port, len, 4, args.integrity)?;
    ready();
    loop {
        match endpoint.recv(None) {
            Ok(message) => answer(&mut endpoint, &message),
            Err(RecvError::Incomplete { .. }) => {}
            Err(error) => return Err(Failure::new(chain(&error))),
        }
        while endpoint.try_completion().is_some() {}
    }
}

/// Sends a message back where it came from. A peer that has gone needs no answer; one that wants long answers and has
/// no session yet gets one.
fn answer(endpoint: &mut Endpoint, message: &lm_dataplane::Message) {
    let peer = message.peer();
    if let Err(SendError::Loan(_)) = endpoint.send_copy(peer, message, message.tag()) {
        let options = ConnectOptions {
            max_message_len: message.len() as u64,
            start: Start::WhenGranted,
            ..ConnectOptions::default()
        };
        if endpoint.open_session(peer, &options).is_ok() {
            let _gone = endpoint.send_copy(peer, message, message.tag());
        }
    }
}
