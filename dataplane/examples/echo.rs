//! Sends every message back to whom it came from.
//!
//! ```text
//! cargo run --release -p lm-dataplane --example echo -- eth1
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use lm_dataplane::{ConnectOptions, DEFAULT_PORT, Endpoint, EndpointConfig, LoanError, PeerId};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("echo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let interface = std::env::args().nth(1).ok_or("usage: echo INTERFACE")?;
    let config = EndpointConfig {
        interface,
        port: DEFAULT_PORT,
        ..EndpointConfig::default()
    };
    let mut endpoint = Endpoint::open(&config)?;
    eprintln!(
        "echo: {} on {}, {}",
        endpoint.status().device().name,
        endpoint.local(),
        endpoint.status().mode()
    );
    loop {
        let message = endpoint.recv(None)?;
        if let Err(error) = send_back(&mut endpoint, message.peer(), &message, message.tag()) {
            eprintln!("echo: {error}");
        }
    }
}

/// One fragment goes back at once; more need a session with the peer, which is asked for once.
fn send_back(endpoint: &mut Endpoint, peer: PeerId, payload: &[u8], tag: u64) -> Result<(), Box<dyn Error>> {
    if endpoint.peer(peer).max_message_len() < payload.len() as u64 {
        let options = ConnectOptions {
            max_message_len: payload.len() as u64,
            ..ConnectOptions::default()
        };
        endpoint.peer(peer).open_session(&options)?;
    }
    loop {
        match endpoint.loan(peer, payload.len() as u64) {
            Ok(region) => {
                let mut region = region;
                std::io::Write::write_all(&mut region, payload)?;
                endpoint.send(region, tag)?;
                return Ok(());
            }
            Err(LoanError::WouldBlock) => endpoint.wait(Duration::from_millis(1)),
            Err(error) => return Err(error.into()),
        }
    }
}
