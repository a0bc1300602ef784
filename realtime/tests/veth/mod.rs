//! Endpoints on a veth pair, and sockets at both.
#![allow(dead_code)] // each test program has its own copy and uses a part

use std::net::SocketAddrV4;

use lm_dataplane::{ConnectOptions, Endpoint, EndpointConfig, IdleStrategy, MemoryConfig, PeerId, Session};
use lm_realtime::{RealTime, RtSocket, SocketConfig, monotonic};

use crate::bed::Pair;

/// One that nothing lands at.
pub(crate) fn open(interface: &str, idle: IdleStrategy) -> Endpoint {
    let memory = MemoryConfig {
        landing_len: 0,
        ..MemoryConfig::default()
    };
    open_with(interface, idle, memory)
}

pub(crate) fn open_with(interface: &str, idle: IdleStrategy, memory: MemoryConfig) -> Endpoint {
    let config = EndpointConfig {
        interface: interface.into(),
        idle,
        memory,
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

/// Has a socket send to the other end, which knows it by its greeting then.
pub(crate) fn connect(socket: &mut RtSocket, near: &mut Endpoint, far: &mut Endpoint) {
    let peer = peer(near, far.local());
    socket.connect(near, peer, 1).expect("frames");
    while far.try_recv().expect("a message").is_none() {
        near.poll();
    }
}

/// Two hosts with socket 1 each, the first of which sends to the second.
pub(crate) fn connected(pair: &Pair, config: &SocketConfig) -> ([Endpoint; 2], [RtSocket; 2]) {
    let open = |interface| open(interface, IdleStrategy::default());
    let mut ends = [pair.a.run(|| open("va")), pair.b.run(|| open("vb"))];
    let mut sockets = ends.each_mut().map(|end| {
        let real_time = RealTime::new(end, None, monotonic).expect("no other handler");
        real_time.socket(end, 1, config).expect("memory")
    });
    let [near, far] = &mut ends;
    pair.a.run(|| connect(&mut sockets[0], near, far));
    (ends, sockets)
}
