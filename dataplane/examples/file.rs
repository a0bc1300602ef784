//! Sends a file as one message, read straight into the send region, or receives one and writes it from the
//! message's memory. The tools `lm-send` and `lm-recv` do the same with everything around it.
//!
//! ```text
//! cargo run --release -p lm-dataplane --example file -- receive eth1 OUTPUT
//! cargo run --release -p lm-dataplane --example file -- send eth1 192.0.2.7 INPUT
//! ```

use std::error::Error;
use std::fs::File;
use std::net::SocketAddrV4;
use std::process::ExitCode;
use std::time::Duration;

use lm_dataplane::{ConnectOptions, DEFAULT_PORT, Endpoint, EndpointConfig, MemoryConfig};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("file: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["receive", interface, output] => receive(interface, output),
        ["send", interface, address, input] => send(interface, address, input),
        _ => Err("usage: file receive INTERFACE OUTPUT | file send INTERFACE ADDRESS INPUT".into()),
    }
}

fn receive(interface: &str, output: &str) -> Result<(), Box<dyn Error>> {
    let config = EndpointConfig {
        interface: interface.into(),
        port: DEFAULT_PORT,
        memory: MemoryConfig {
            send_len: 0,
            ..MemoryConfig::default()
        },
        ..EndpointConfig::default()
    };
    let mut endpoint = Endpoint::open(&config)?;
    let message = endpoint.recv(None)?;
    std::fs::write(output, &message)?;
    println!(
        "{} bytes in one piece at UMEM offset {}",
        message.len(),
        message.umem_offset()
    );
    drop(message);
    // Stay until the sender has its confirmation.
    let _ = endpoint.recv(Some(Duration::from_millis(200)));
    Ok(())
}

fn send(interface: &str, address: &str, input: &str) -> Result<(), Box<dyn Error>> {
    let file = File::open(input)?;
    let len = file.metadata()?.len();
    let config = EndpointConfig {
        interface: interface.into(),
        memory: MemoryConfig {
            // The holes for the headers take 5 % more than the message.
            send_len: len + len / 16 + (1 << 20),
            landing_len: 0,
            ..MemoryConfig::default()
        },
        ..EndpointConfig::default()
    };
    let mut endpoint = Endpoint::open(&config)?;
    let to = SocketAddrV4::new(address.parse()?, DEFAULT_PORT);
    let options = ConnectOptions {
        max_message_len: len,
        ..ConnectOptions::default()
    };
    let peer = endpoint.connect(to, &options)?;
    let mut region = endpoint.loan(peer, len)?;
    region.read_from(&file, 0)?;
    endpoint.send(region, 0)?;
    endpoint.flush(Duration::from_secs(30))?;
    println!("{len} bytes confirmed");
    Ok(())
}
