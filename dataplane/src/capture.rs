//! Capture: our own packets as a pcap file, since tcpdump cannot see what XDP redirects or AF_XDP sends past the
//! taps.
//!
//! Sent packets and packets of the general channel are written as they are. A landed fragment's headers may be
//! overwritten by the next one before anybody looks, so its record holds what the gate's log says of it, with
//! headers built anew from the session: the same bytes, unless the sender set fields that the gate ignores.
//! Capturing allocates and writes files: it is for looking, not for measuring.

use std::fs::File;
use std::io::{self, BufWriter};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, Endianness, TsResolution};

use lm_protocol::wire::{Addressing, DataTemplate, IpFragTemplate};

use crate::landing::{InboundTerms, Landed};
use crate::memory::Umem;

/// Longest packet recorded, in bytes: longer than any.
const SNAP_LEN: u32 = 65_535;

/// A pcap file being written. Errors end the capture and are kept for the end.
pub(crate) struct Capture {
    writer: Option<PcapWriter<BufWriter<Arc<File>>>>,
    error: Option<io::Error>,
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capture")
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl Capture {
    /// Begins to write (nanosecond time stamps, Ethernet frames).
    pub(crate) fn new(file: Arc<File>) -> Capture {
        let header = PcapHeader {
            snaplen: SNAP_LEN,
            datalink: DataLink::ETHERNET,
            ts_resolution: TsResolution::NanoSecond,
            endianness: Endianness::native(),
            ..PcapHeader::default()
        };
        let file = BufWriter::with_capacity(1 << 20, file);
        let (writer, error) = match PcapWriter::with_header(file, header) {
            Ok(writer) => (Some(writer), None),
            Err(error) => (None, Some(io::Error::other(error))),
        };
        Capture { writer, error }
    }

    /// A packet that goes to the TX ring.
    pub(crate) fn sent(&mut self, umem: &Umem, address: u64, len: u32) {
        let mut packet = vec![0; len as usize];
        umem.copy_from(address, &mut packet);
        self.received(&packet);
    }

    /// A packet as it was received.
    pub(crate) fn received(&mut self, packet: &[u8]) {
        let Some(writer) = &mut self.writer else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let record = PcapPacket::new(now, packet.len() as u32, packet);
        if let Err(error) = writer.write_packet(&record) {
            self.error = Some(io::Error::other(error));
            self.writer = None;
        }
    }

    /// A message that landed: one record a fragment, in the order in which they came.
    pub(crate) fn landed(
        &mut self,
        umem: &Umem,
        addressing: &Addressing,
        terms: &InboundTerms,
        landed: &Landed,
    ) {
        let Ok(geometry) = terms.layout.session_message(landed.len) else {
            return;
        };
        let count = geometry.fragment_count();
        let lm = DataTemplate::new(
            addressing,
            terms.key,
            landed.number,
            count,
            terms.layout.payload_len(),
        );
        let ipfrag = IpFragTemplate::new(addressing, &geometry, landed.number, 0);
        let mut packet = vec![0; usize::from(terms.layout.max_frame_len())];
        for index in terms.window.transmit_order(count) {
            let fragment = geometry.fragment(index);
            let header_len = match &ipfrag {
                Some(template) => template.write(&mut packet, index, fragment.len),
                None => lm.write(&mut packet, index, fragment.len),
            };
            let len = header_len + usize::from(fragment.len);
            umem.copy_from(landed.address + fragment.offset, &mut packet[header_len..len]);
            self.received(&packet[..len]);
        }
    }

    /// Why the capture ended early, if it did.
    pub(crate) fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }
}
