//! Every branch of the gate, by `BPF_PROG_TEST_RUN`: each case runs through the gate and through the model, which must
//! agree (`bed::pair`), and the verdict must be the one written here.

#[path = "../bed/mod.rs"]
mod bed;
mod landing;
mod passing;
mod zero_copy;

use std::net::Ipv4Addr;

use bed::packet::{CONTROL, CONTROL_PORT, EAGER, LAST_SMALL, LOCAL, MAC, PEER, Packet, VERSION};
use bed::pair::{GENERAL, LANDING, PLAIN, Pair, ipfrag_session, lm_session};
use lm_ebpf::Verdict::{self, *};
use lm_ebpf::{GateError, Role};
use lm_protocol::geometry::Wire;
use lm_protocol::landing::SessionAdmission;

const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 9);

fn expect(pair: &mut Pair, queue: u32, packet: &Packet, verdict: Verdict) {
    assert_eq!(pair.run(queue, &packet.bytes()), verdict, "{packet:?}");
}

/// Fragment 2 of 3 of the session's first message: legal, and never accepted in a test that expects refusals.
fn legal() -> Packet {
    Packet::data(10, 2, 3, 1000)
}
