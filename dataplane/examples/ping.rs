//! Measures round trips to an `echo` on another host.
//!
//! ```text
//! cargo run --release -p lm-dataplane --example ping -- eth1 192.0.2.7 [BYTES] [COUNT]
//! ```

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use lm_dataplane::{ConnectOptions, DEFAULT_PORT, Endpoint, EndpointConfig, Session};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ping: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let usage = "usage: ping INTERFACE ADDRESS [BYTES] [COUNT]";
    let mut arguments = std::env::args().skip(1);
    let interface = arguments.next().ok_or(usage)?;
    let address: Ipv4Addr = arguments.next().ok_or(usage)?.parse()?;
    let len: usize = arguments.next().map_or(Ok(64), |text| text.parse())?;
    let count: usize = arguments.next().map_or(Ok(10_000), |text| text.parse())?;

    let mut endpoint = Endpoint::open(&EndpointConfig {
        interface,
        ..EndpointConfig::default()
    })?;
    let mut options = ConnectOptions {
        max_message_len: len as u64,
        session: Session::Later,
        ..ConnectOptions::default()
    };
    let to = SocketAddrV4::new(address, DEFAULT_PORT);
    let mut peer = endpoint.connect(to, &options)?;
    if endpoint.peer(peer).max_message_len() < len as u64 {
        options.session = Session::Now;
        peer = endpoint.connect(to, &options)?;
    }

    let payload = vec![0x5a; len];
    let mut round_trips = Vec::with_capacity(count);
    for tag in 0..count as u64 {
        let start = Instant::now();
        endpoint.send_copy(peer, &payload, tag)?;
        let reply = endpoint.recv(Some(Duration::from_secs(3)))?;
        round_trips.push(start.elapsed());
        if reply.tag() != tag || *reply != *payload {
            return Err(format!("message {tag} came back changed").into());
        }
    }
    if round_trips.is_empty() {
        return Err("COUNT must be at least 1".into());
    }
    round_trips.sort_unstable();
    let at = |fraction: f64| round_trips[((count - 1) as f64 * fraction) as usize];
    println!("{count} round trips of {len} bytes, {}", endpoint.status().mode());
    println!(
        "min {:?}  p50 {:?}  p99 {:?}  max {:?}",
        at(0.0),
        at(0.5),
        at(0.99),
        at(1.0)
    );
    Ok(())
}
