//! The XDP program of the bare AF_XDP programs (`src/redirect.c`), with its socket map.

use std::os::fd::RawFd;

use aya::maps::{MapData, XskMap};
use aya::programs::{ProgramError, Xdp, XdpMode};
use aya::{Ebpf, EbpfError, EbpfLoader};
use lm_cards::Interface;

use super::socket::{Socket, patiently};
use crate::cli::{Failure, Mode};
use crate::suite::await_link;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../redirect.o");

/// An attached redirect program. Dropping it detaches: the link is the only reference to the attachment, so a killed
/// process leaves nothing behind either.
pub(super) struct Redirect {
    _sockets: XskMap<MapData>,
    _ebpf: Ebpf,
}

impl Redirect {
    /// Attaches to an interface a program that redirects each IPv4 UDP datagram to this port and queue to
    /// `socket`, and passes everything else to the stack. Returns when the card, which may begin anew with that, has its link again: what was
    /// sent before would be lost.
    pub(super) fn to(
        socket: &Socket,
        queue: u32,
        port: u16,
        card: &Interface,
        mode: Mode,
    ) -> Result<Redirect, Failure> {
        let mode = match mode {
            Mode::Generic => XdpMode::Skb,
            _ => XdpMode::Driver,
        };
        let attach = || Redirect::attach(card.index, mode, port, (queue, socket.raw_fd()));
        let attached = patiently(attach)?;
        await_link(&card.name)?;
        Ok(attached)
    }

    fn attach(
        ifindex: u32,
        mode: XdpMode,
        port: u16,
        (queue, socket): (u32, RawFd),
    ) -> Result<Redirect, EbpfError> {
        let port = port.to_be();
        let mut ebpf = EbpfLoader::new()
            .override_global("lm_bare_port", &port, true)
            .load(OBJECT)?;
        let sockets = ebpf.take_map("lm_bare_sockets").expect("it is in the object");
        let mut sockets = XskMap::try_from(sockets)?;
        let program: &mut Xdp = (ebpf.program_mut("lm_bare"))
            .ok_or(ProgramError::NotLoaded)?
            .try_into()?;
        program.load()?;
        sockets.set(queue, socket, 0)?;
        program.attach_to_if_index(ifindex, mode)?;
        Ok(Redirect {
            _sockets: sockets,
            _ebpf: ebpf,
        })
    }
}
