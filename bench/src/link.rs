//! From a tool's options to an endpoint, and from an endpoint's counters to a report.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;

use lm_dataplane::port::Port;
use lm_dataplane::{AdmissionConfig, DEFAULT_PORT, Endpoint, EndpointConfig, LinkConfig, PeerId, SendError};

use lm_protocol::session::Admit;

use crate::cli::{Failure, LinkOptions, complain};
use crate::files;
use crate::output::describe;
use crate::report::Report;
use crate::transfer::wire::{CONTROL_TAG, Control};

/// The part of an endpoint's configuration that both tools take from their options; where they name no interface it is the `default` one.
///
/// # Errors
/// When the file of `--pcap` cannot be created, or that of `--key` is no key, or there is no default interface.
pub fn endpoint_config(
    options: &LinkOptions,
    default: impl FnOnce() -> Result<String, Failure>,
) -> Result<EndpointConfig, Failure> {
    let create = |path: &PathBuf| files::create(path, options.force).map(Arc::new);
    let read = |path: &PathBuf| {
        lm_admission::key::read(path, None).and_then(|bytes| lm_admission::key::of_bytes(path, &bytes))
    };
    Ok(EndpointConfig {
        patience: options.patience,
        link: LinkConfig {
            mode: options.mode.into(),
            mtu: options.mtu,
            queue: options.queue,
            checksum: options.checksum.into(),
            capture: options.pcap.as_ref().map(create).transpose()?,
            ..LinkConfig::default()
        },
        admission: AdmissionConfig {
            by: options.admission.clone(),
            key: options.key.as_ref().map(read).transpose().map_err(Failure::new)?,
            ..AdmissionConfig::default()
        },
        interface: match (&options.dpdk, &options.interface) {
            (Some(_), Some(_)) => {
                return Err(Failure::new(
                    "--dpdk and --interface are two links; name one of them",
                ));
            }
            (Some(device), None) => device.split(',').next().unwrap_or_default().to_owned(),
            (None, named) => named.clone().map_or_else(default, Ok)?,
        },
        ..EndpointConfig::default()
    })
}

/// How an endpoint is opened, by the kind of its port.
pub type Open<P> = fn(&LinkOptions, &EndpointConfig, Box<dyn Admit + Send>) -> Result<Endpoint<P>, Failure>;

/// Opens an endpoint on the interface.
///
/// # Errors
/// Why that cannot be; and that this program has no DPDK, where a device of it is asked for.
pub fn open(
    options: &LinkOptions,
    config: &EndpointConfig,
    admit: Box<dyn Admit + Send>,
) -> Result<Endpoint, Failure> {
    match options.dpdk {
        Some(_) => Err(Failure::new(
            "this program was built without DPDK; build it with the feature (cargo build --release -p lm-bench \
             --features dpdk)",
        )),
        None => Ok(Endpoint::open_with(config, admit)?),
    }
}

/// Opens an endpoint on the DPDK device that `--dpdk` names.
///
/// # Errors
/// Why that cannot be.
#[cfg(feature = "dpdk")]
pub fn open_dpdk(
    options: &LinkOptions,
    config: &EndpointConfig,
    admit: Box<dyn Admit + Send>,
) -> Result<Endpoint<lm_dpdk::DpdkNic>, Failure> {
    let Some(address) = options.dpdk_address.as_ref().and_then(|text| text.parse().ok()) else {
        return Err(Failure::new(
            "--dpdk needs an address of its own; give one with its network's prefix (--dpdk-address 10.9.0.1/24)",
        ));
    };
    let dpdk = lm_dpdk::DpdkConfig {
        device: options.dpdk.clone().unwrap_or_default(),
        address,
        gateway: options.dpdk_gateway,
    };
    Ok(lm_dpdk::open(&dpdk, config, admit)?)
}

/// The interface of the default route.
///
/// # Errors
/// When there is none.
pub fn default_interface() -> Result<String, Failure> {
    Ok(lm_dataplane::route::default_interface()?.name)
}

/// The interface that packets to `to` leave through.
///
/// # Errors
/// When there is no route.
pub fn interface_towards(to: Ipv4Addr) -> Result<String, Failure> {
    let hop = lm_dataplane::route::resolve(to, None)?;
    Ok(lm_cards::Interface::by_index(hop.interface_index)?.name)
}

/// Resolves `HOST[:PORT]` to an IPv4 address.
///
/// # Errors
/// When the port is no port, the name is unknown, or has IPv6 addresses only.
pub fn resolve(to: &str) -> Result<SocketAddrV4, Failure> {
    let (host, port) = split(to)?;
    let addresses = (host, port).to_socket_addrs();
    let unknown = |_| format!("host {host} is unknown; check the name or give its address");
    let mut addresses = addresses
        .map_err(|error| Failure::new(unknown(error)))?
        .peekable();
    let what = match addresses.peek() {
        Some(_) => "has IPv6 addresses only",
        None => "has no address",
    };
    let ipv4 = addresses.find_map(|address| match address {
        SocketAddr::V4(address) => Some(address),
        SocketAddr::V6(_) => None,
    });
    ipv4.ok_or_else(|| Failure::new(format!("host {host} {what}; give an IPv4 address")))
}

fn split(to: &str) -> Result<(&str, u16), Failure> {
    let (host, port) = match to.rsplit_once(':') {
        // More than one colon: an IPv6 address, which the resolver then refuses with its own words.
        Some((host, _)) if host.contains(':') => (to, None),
        Some((host, port)) => (host, Some(port)),
        None => (to, None),
    };
    let wrong = |what| {
        Err(Failure::usage(format!(
            "--to {to} {what}; write HOST or HOST:PORT"
        )))
    };
    if host.is_empty() {
        return wrong("names no host");
    }
    match port.map_or(Ok(DEFAULT_PORT), str::parse) {
        // The next port is the control port.
        Ok(number @ 1..=65_534) => Ok((host, number)),
        _ => wrong("has no port from 1 to 65534"),
    }
}

/// Sends a control message of a transfer, written straight into the packet's memory.
///
/// # Errors
/// [`SendError::WouldBlock`] when there is no room now; otherwise the peer or the link is gone.
pub fn try_send_control<P: Port>(
    endpoint: &mut Endpoint<P>,
    peer: PeerId,
    control: &Control,
) -> Result<(), SendError> {
    let bytes = control.encode();
    let mut region = endpoint.loan(peer, bytes.len() as u64)?;
    // Cannot fail: the region is as long as the message.
    let _ = region.write_all(&bytes);
    let sent = endpoint.try_send(region, CONTROL_TAG);
    sent.map(drop).map_err(|error| error.reason)
}

/// What is known, with everything that the endpoint itself knows. A capture that could not be written to its end is told on
/// standard error: the transfer is none the worse for it.
#[must_use]
pub fn report<P: Port>(tool: &str, endpoint: &mut Endpoint<P>, known: Report) -> Report {
    if let Some(error) = endpoint.status().capture_error() {
        let why = describe(error);
        complain(
            tool,
            &format!("the capture ended early: {why}; choose another --pcap"),
        );
    }
    let counters = endpoint.counters();
    let landing = endpoint.status().landing_memory();
    Report {
        landing_memory: landing.len,
        landing_memory_max: landing.len_max,
        landing_memory_address_max: landing.address_max,
        device: endpoint.status().device().name.clone(),
        mode: endpoint.status().mode().as_str().to_owned(),
        user_copied_bytes: counters.user_copied_bytes,
        messages_one_copy: counters.messages_one_copy,
        fragments_one_copy: counters.fragments_one_copy,
        page_end_fragments: counters.page_end_fragments,
        messages_ahead: counters.messages_ahead,
        messages_ahead_copied: counters.messages_ahead_copied,
        open_refused: counters.open_refused,
        missing_bytes: counters.missing_bytes,
        manifests_requested: counters.manifests_requested,
        restored_bytes: counters.restored_bytes,
        drops: counters
            .drops()
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| (reason.to_owned(), count))
            .collect(),
        ..known
    }
}

/// Everything dropped so far.
#[must_use]
pub fn drop_count<P: Port>(endpoint: &Endpoint<P>) -> u64 {
    endpoint.counters().drops().map(|(_, count)| count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{EXIT_FAILURE, EXIT_USAGE};

    #[test]
    fn hosts_and_ports() {
        assert_eq!(resolve("192.0.2.1").unwrap(), "192.0.2.1:7168".parse().unwrap());
        assert_eq!(resolve("192.0.2.1:99").unwrap(), "192.0.2.1:99".parse().unwrap());
        for (to, code) in [
            ("", EXIT_USAGE),
            (":7168", EXIT_USAGE),
            ("192.0.2.1:", EXIT_USAGE),
            ("192.0.2.1:0", EXIT_USAGE),
            ("192.0.2.1:65535", EXIT_USAGE),
            ("192.0.2.1:x", EXIT_USAGE),
            ("::1", EXIT_FAILURE),
            ("host.invalid", EXIT_FAILURE),
        ] {
            let failure = resolve(to).unwrap_err();
            assert_eq!(failure.code, code, "{to}: {failure}");
            assert!(failure.text.contains("; "), "{failure}");
        }
    }
}
