//! Sessions that share a port on veth: each has its part of what leaves.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};

use lm_dataplane::{EndpointConfig, LoanError, MemoryConfig, Outcome, PeerId};

use crate::harness::{Bed, completions, config_a, open, plain};

const RECEIVERS: usize = 8;
const PORT: u16 = 9999;
/// Fragments: 14 in each message.
const LEN: u64 = 20_000;
/// Messages in all, of which an equal share is 500.
const COUNT: usize = 4000;

/// *House rule of the scheduler*: eight backlogged sessions of one port each get 0.8 to 1.25 of an equal share.
///
/// Their receivers are sockets, which give no credit: only the sender's turns decide, and no thread of a receiver competes for its
/// processor. Messages are counted that have left, whatever time that takes.
#[test]
fn eight_backlogged_sessions_have_equal_shares() {
    let Some(bed) = Bed::new(2) else { return };
    let addresses: [Ipv4Addr; RECEIVERS] = std::array::from_fn(|n| Ipv4Addr::new(10, 77, 0, 11 + n as u8));
    for address in addresses {
        bed.pair.b.ip(&format!("address add {address}/24 dev vb"));
    }
    // Nobody reads: what the socket has no room for is dropped there.
    let any = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, PORT);
    let socket = bed.pair.b.run(|| UdpSocket::bind(any)).expect("a socket");
    let left = bed.pair.a.run(|| {
        let mut a = open(&EndpointConfig {
            memory: MemoryConfig {
                landing_len: 0,
                ..config_a().memory
            },
            ..config_a()
        });
        let peers = addresses.map(|address| {
            let to = SocketAddrV4::new(address, PORT);
            a.connect(to, &plain()).expect("a way")
        });
        let mut left = [0; RECEIVERS];
        while left.iter().sum::<usize>() < COUNT {
            for peer in peers {
                loop {
                    let region = match a.loan(peer, LEN) {
                        Ok(region) => region,
                        Err(LoanError::WouldBlock) => break,
                        Err(error) => panic!("{error}"),
                    };
                    if a.try_send(region, 0).is_err() {
                        break;
                    }
                }
            }
            a.poll();
            for completion in completions(&mut a) {
                assert_eq!(completion.outcome, Outcome::Sent);
                let is_it = |peer: &PeerId| *peer == completion.peer;
                left[peers.iter().position(is_it).expect("one of them")] += 1;
            }
        }
        left
    });
    drop(socket);
    let share = left.iter().sum::<usize>() as f64 / RECEIVERS as f64;
    let shares = left.map(|left| left as f64 / share);
    assert!(
        shares.iter().all(|share| (0.8..=1.25).contains(share)),
        "{shares:.2?}"
    );
}
