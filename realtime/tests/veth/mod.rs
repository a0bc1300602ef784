//! Endpoints on a veth pair that nothing lands at.

use std::net::SocketAddrV4;

use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig, IdleStrategy, MemoryConfig, PeerId, Session};

pub(crate) fn open(interface: &str, idle: IdleStrategy) -> Endpoint {
    let config = EndpointConfig {
        interface: interface.into(),
        idle,
        memory: MemoryConfig {
            landing_len: 0,
            ..MemoryConfig::default()
        },
        ..EndpointConfig::default()
    };
    Endpoint::open(&config).expect("a veth device")
}

/// A peer without a session.
pub(crate) fn peer(endpoint: &mut Endpoint, to: SocketAddrV4) -> PeerId {
    let options = ConnectOptions {
        session: Session::Later,
        ..ConnectOptions::default()
    };
    endpoint.connect(to, &options).expect("a route")
}
