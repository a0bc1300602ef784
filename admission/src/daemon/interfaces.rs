//! Interfaces that come and go.

use std::io;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket as Netlink, SocketAddr};

use lm_cards::Interface;
use lm_protocol::time::Time;

use super::attachment::Attachment;
use super::worker::Stay;
use super::{ATTACH_RETRY, Daemon, PORTS};
use crate::clock;

/// RTMGRP_LINK and RTMGRP_IPV4_IFADDR of linux/rtnetlink.h.
const GROUPS: u32 = 0x1 | 0x10;

/// A socket that has something to read when a link or an address changes.
pub(super) fn watch() -> io::Result<Netlink> {
    let mut socket = Netlink::new(NETLINK_ROUTE)?;
    socket.bind(&SocketAddr::new(0, GROUPS))?;
    socket.set_non_blocking(true)?;
    Ok(socket)
}

impl Daemon {
    /// Serves an interface of the configuration.
    pub(super) fn attach(&mut self, position: usize) -> Result<(), String> {
        self.stays[position] += 1;
        let stay = Stay {
            interface: position,
            number: self.stays[position],
        };
        let name = &self.config.interface[position];
        let attachment = Attachment::new(stay, name, &self.config, &self.key, &self.pins)?;
        for (number, fd) in attachment.ports.raw_fds().enumerate() {
            self.watch(fd, PORTS + 2 * position + number)
                .map_err(|error| format!("cannot watch the control port: {error}"))?;
        }
        self.attachments[position] = Some(attachment);
        self.is_changed = true;
        Ok(())
    }

    /// Something has changed at the interfaces; what, they say themselves.
    pub(super) fn on_links(&mut self) {
        let mut buffer = [0u8; 8192];
        // An overrun (ENOBUFS) is news too.
        while self.links.recv(&mut &mut buffer[..], 0).is_ok() {}
        for position in 0..self.attachments.len() {
            let Some(attachment) = &mut self.attachments[position] else {
                self.absent[position].1 = Time::ZERO;
                continue;
            };
            let name = &self.config.interface[position];
            let found = Interface::by_name(name).ok();
            let found = found.filter(|found| found.index == attachment.index);
            let what = match found {
                None => format!("{name} is gone"),
                Some(found) if found.primary_address() != Some(*attachment.address.ip()) => {
                    format!("{name} has another address")
                }
                Some(found) => {
                    attachment.ground.mtu = found.mtu.min(u16::MAX.into()) as u16;
                    continue;
                }
            };
            self.detach(position, what);
        }
    }

    /// An interface is gone: its programs are told by the end of their connections.
    fn detach(&mut self, position: usize, what: String) {
        tracing::error!("{what}: its programs end; it is served again when it comes back");
        let programs =
            self.programs_that(|program| program.is_on(position) || program.smooths == Some(position));
        self.drop_programs(programs, &what);
        if let Some(attachment) = self.attachments[position].take() {
            for fd in attachment.ports.raw_fds() {
                self.forget(fd);
            }
            attachment.end();
        }
        self.absent[position] = (what, clock::now());
        self.is_changed = true;
    }

    /// Tries the interfaces that are not there.
    pub(super) fn try_absent(&mut self, now: Time) {
        for position in 0..self.attachments.len() {
            if self.attachments[position].is_some() || self.absent[position].1 > now {
                continue;
            }
            if let Err(what) = self.attach(position) {
                if self.absent[position].0 != what {
                    tracing::warn!("{what}");
                }
                self.absent[position] = (what, now + ATTACH_RETRY);
            }
        }
    }
}
