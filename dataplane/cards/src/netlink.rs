//! One question to the kernel over netlink(7), and its answers.
//!
//! A socket sees the network namespace of the thread that opens it, so each question over rtnetlink opens its own.

use std::io;

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NLMSG_ERROR, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Readings of a dump that changed while it was read (`NLM_F_DUMP_INTR`), the first one among them.
const DUMP_ATTEMPTS: u32 = 4;

/// `NLM_F_DUMP_INTR` of `linux/netlink.h`.
const DUMP_INTERRUPTED: u16 = 0x10;

/// Every object of the kind asked for, over rtnetlink.
///
/// # Errors
///
/// What the kernel answers, or the socket.
pub fn dump(request: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    ask(&open(NETLINK_ROUTE)?, request, NLM_F_DUMP)
}

/// The one object asked for, by a socket for rtnetlink.
///
/// # Errors
///
/// What the kernel answers, or the socket; `NotFound` where it answers nothing.
pub fn one_by(socket: &Socket, request: &RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
    let answer = ask(socket, request, 0)?.pop();
    answer.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// A socket to the kernel, for one of the `NETLINK_` protocols.
///
/// # Errors
///
/// What socket(2) and bind(2) say.
pub fn open(protocol: isize) -> io::Result<Socket> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// Asks, and takes the answers.
///
/// # Errors
///
/// What the kernel answers, or the socket; or that a list changed each time while it was read.
pub fn ask<M>(socket: &Socket, request: &M, flags: u16) -> io::Result<Vec<M>>
where
    M: NetlinkSerializable + NetlinkDeserializable + Clone,
    M::Error: std::error::Error + Send + Sync + 'static,
    NetlinkPayload<M>: From<M>,
{
    let is_dump = flags & NLM_F_DUMP != 0;
    for _ in 0..DUMP_ATTEMPTS {
        let mut result = Vec::new();
        socket.send(&serialized(request, flags), 0)?;
        let mut consistent = true;
        while !read(&socket.recv_from_full()?.0, is_dump, &mut consistent, &mut result)? {}
        if consistent || !is_dump {
            return Ok(result);
        }
    }
    Err(io::Error::other("a list changes as it is told: try again"))
}

/// A request as the kernel takes it.
pub fn serialized<M>(request: &M, flags: u16) -> Vec<u8>
where
    M: NetlinkSerializable + Clone,
    NetlinkPayload<M>: From<M>,
{
    let mut message = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::from(request.clone()));
    message.header.flags = NLM_F_REQUEST | flags;
    message.header.sequence_number = 1;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Sends a request that asks for an acknowledgement, and takes it. Allocates nothing.
///
/// # Errors
///
/// What the kernel answers, or the socket.
pub fn order(socket: &Socket, request: &[u8]) -> io::Result<()> {
    socket.send(request, 0)?;
    let mut answer = [0; 512];
    let len = socket.recv(&mut &mut answer[..], 0)?;
    // `struct nlmsghdr` and the code of `struct nlmsgerr`.
    match (&answer[4..6], answer[16..20].try_into().map(i32::from_ne_bytes)) {
        (kind, Ok(code)) if len >= 20 && kind == NLMSG_ERROR.to_ne_bytes() => match code {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        },
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Takes one datagram of answers; tells whether it was the last one.
pub(crate) fn read<M>(
    bytes: &[u8],
    is_dump: bool,
    consistent: &mut bool,
    result: &mut Vec<M>,
) -> io::Result<bool>
where
    M: NetlinkDeserializable,
    M::Error: std::error::Error + Send + Sync + 'static,
{
    let mut rest = bytes;
    while !rest.is_empty() {
        let answer: NetlinkMessage<M> = NetlinkMessage::deserialize(rest).map_err(io::Error::other)?;
        // Messages are padded to 4 bytes; the header's length is at least its own, as deserialize checked.
        rest = rest
            .get((answer.header.length as usize).next_multiple_of(4)..)
            .unwrap_or_default();
        *consistent &= answer.header.flags & DUMP_INTERRUPTED == 0;
        match answer.payload {
            NetlinkPayload::Done(_) => return Ok(true),
            NetlinkPayload::Error(error) => {
                // Not `ErrorMessage::to_io`, which negates i32::MIN.
                return error.code.map_or(Ok(true), |code| {
                    Err(io::Error::from_raw_os_error(code.get().saturating_neg()))
                });
            }
            NetlinkPayload::InnerMessage(inner) => {
                result.push(inner);
                if !is_dump {
                    return Ok(true);
                }
            }
            _ => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer of type `NLMSG_ERROR`.
    fn error(code: i32) -> Vec<u8> {
        let mut bytes = vec![0; 36];
        bytes[..4].copy_from_slice(&36u32.to_ne_bytes());
        bytes[4..6].copy_from_slice(&2u16.to_ne_bytes());
        bytes[16..20].copy_from_slice(&code.to_ne_bytes());
        bytes
    }

    #[test]
    fn errors_of_the_kernel_are_errors_whatever_their_number() {
        for (code, number) in [(-2, 2), (i32::MIN, i32::MAX), (i32::MAX, -i32::MAX)] {
            let answer = read(
                &error(code),
                true,
                &mut true,
                &mut Vec::<RouteNetlinkMessage>::new(),
            );
            assert_eq!(answer.expect_err("an error").raw_os_error(), Some(number));
        }
        let answer = read(
            &error(0),
            false,
            &mut true,
            &mut Vec::<RouteNetlinkMessage>::new(),
        );
        assert!(answer.expect("an acknowledgement"));
    }
}
