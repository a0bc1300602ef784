//! One question to the kernel over rtnetlink(7), and its answers.
//!
//! A socket sees the network namespace of the thread that opens it, so each question opens its own.

use std::io;

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// A dump that changed while it was read is started again so often.
const DUMP_ATTEMPTS: u32 = 4;

/// `NLM_F_DUMP_INTR` of `linux/netlink.h`.
const DUMP_INTERRUPTED: u16 = 0x10;

/// Every object of the kind asked for.
pub(crate) fn dump(request: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    let mut result = Vec::new();
    for _ in 0..DUMP_ATTEMPTS {
        result.clear();
        if ask(request, NLM_F_DUMP, &mut result)? {
            break;
        }
    }
    Ok(result)
}

/// The one object asked for.
pub(crate) fn one(request: &RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
    let mut result = Vec::new();
    ask(request, 0, &mut result)?;
    result
        .pop()
        .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
}

/// Whether the answers are consistent.
fn ask(request: &RouteNetlinkMessage, flags: u16, result: &mut Vec<RouteNetlinkMessage>) -> io::Result<bool> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut message = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::from(request.clone()));
    message.header.flags = NLM_F_REQUEST | flags;
    message.header.sequence_number = 1;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;

    let mut consistent = true;
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let answer: NetlinkMessage<RouteNetlinkMessage> =
                NetlinkMessage::deserialize(rest).map_err(io::Error::other)?;
            // Messages are padded to 4 bytes; the header's length is at least its own, as deserialize checked.
            rest = rest
                .get((answer.header.length as usize).next_multiple_of(4)..)
                .unwrap_or_default();
            consistent &= answer.header.flags & DUMP_INTERRUPTED == 0;
            match answer.payload {
                NetlinkPayload::Done(_) => return Ok(consistent),
                NetlinkPayload::Error(error) => {
                    return error.code.map_or(Ok(consistent), |_| Err(error.to_io()));
                }
                NetlinkPayload::InnerMessage(inner) => {
                    result.push(inner);
                    if flags & NLM_F_DUMP == 0 {
                        return Ok(consistent);
                    }
                }
                _ => {}
            }
        }
    }
}
