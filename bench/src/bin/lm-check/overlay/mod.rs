//! How a message comes to lie in one piece: what the memory of a landing zone holds before, after each packet, and at
//! the end.
//!
//! Two interfaces of this machine that are connected with each other, by a cable or inside the machine: one sends, the
//! other one's landing queue receives through the real gate into a real landing zone. Everything is as the data plane
//! does it: geometry, windows in reverse order, headers in holes, the tail that is saved and put back (invariant I5).
//! But one packet at a time: the next one is sent when the memory has been looked at. So each byte of the memory is
//! compared with what geometry says (`picture::Picture`). A byte anywhere in the registered memory that is not what it
//! should be is an error.
//!
//! First packets of every length are received one by one, to find out what the driver writes beside a packet (its
//! *footprint*, [`lm_cards::footprint`]): virtio-net's prefix is part of the picture.

mod ends;
mod picture;
mod probe;

use clap::Args;
use lm_cards::Interface;
use lm_dataplane::memory::PACKET_HEADROOM;
use lm_protocol::geometry::{Geometry, Layout, LinkShape, Wire};
use lm_protocol::window::{TailRule, WindowShape};
use lm_protocol::zone::ZoneShape;
use serde::Serialize;

use lm_bench::cli::{Failure, Mode, chain};
use lm_bench::size::ByteSize;

use crate::failed;
use ends::{CHUNK_LEN, Link, MEMORY_LEN};
use picture::{MAX_FRAGMENTS, Picture, payload};
pub(crate) use probe::FootprintReport;

/// Where the landing zone begins in the registered memory.
const ZONE: u64 = 64 << 10;

/// `lm-check overlay`.
#[derive(Debug, Clone, Args)]
pub(crate) struct OverlayArgs {
    /// Interface that receives
    #[arg(long, short)]
    pub(crate) interface: String,
    /// Interface that sends, connected with the other one
    #[arg(long)]
    pub(crate) from: String,
    /// Landing queue [default: the last one]
    #[arg(long)]
    pub(crate) queue: Option<u32>,
    /// What to demand of the kernel
    #[arg(long, value_enum, default_value_t = Mode::ZeroCopy)]
    pub(crate) mode: Mode,
    /// Bytes of the message: at most 8 fragments
    #[arg(long, default_value = "11036")]
    pub(crate) message_size: ByteSize,
    /// Fragments of a window, a power of two
    #[arg(long, default_value_t = 4)]
    pub(crate) window: u32,
}

/// What `lm-check overlay` prints.
#[derive(Debug, Serialize)]
pub(crate) struct OverlayReport {
    /// Driver of the receiving interface, where it tells.
    pub(crate) driver: Option<String>,
    /// Whether the sending socket is in zero-copy mode (`XDP_OPTIONS`).
    pub(crate) zero_copy_send: bool,
    /// Whether the receiving socket is.
    pub(crate) zero_copy_receive: bool,
    /// Packets received in all, the probe's too.
    pub(crate) packets: u64,
    /// What the driver writes beside a packet.
    pub(crate) footprint: FootprintReport,
    /// Fragments of the message, in the order in which they came. After each every byte of the memory was what geometry
    /// says.
    pub(crate) order: Vec<u32>,
    /// Windows whose end was put back over the headers of the fragment behind it (I5).
    pub(crate) tails_restored: u32,
}

/// Sends a message, one packet at a time, and tells what the memory holds after each.
///
/// # Errors
///
/// When an interface, the gate, a socket or memory cannot be had; a packet that does not come, or one of somebody else;
/// a byte that is not what geometry says, and at the end one that is not the message's.
pub(crate) fn overlay(args: &OverlayArgs) -> Result<OverlayReport, Failure> {
    let geometry = geometry(args)?;
    let windows = WindowShape::new(args.window).map_err(|error| Failure::usage(format!("{error}; try 4")))?;
    let mut link = Link::open(args)?;
    let footprint = probe::probe(&mut link)?;
    let prefix_len = u8::try_from(footprint.prefix_len)
        .map_err(|_| Failure::new(format!("a prefix of {} bytes", footprint.prefix_len)))?;
    let message_start = ZONE + ZoneShape::new(&geometry, CHUNK_LEN, prefix_len).message_start();
    let count = geometry.fragment_count();
    let mut trace = Trace {
        windows,
        order: windows.transmit_order(count).collect(),
        posted: 0,
        rule: TailRule::new(windows, count),
        tails_restored: 0,
        picture: Picture::painted(geometry, &link.addressing, message_start, MEMORY_LEN, footprint),
        link: &mut link,
    };
    trace.run()?;
    let (order, tails_restored) = (trace.order, trace.tails_restored);
    Ok(OverlayReport {
        driver: Interface::by_name(&args.interface).map_err(failed)?.driver,
        zero_copy_send: link.sender.xsk.zero_copy(),
        zero_copy_receive: link.receiver.xsk.zero_copy(),
        packets: link.received,
        footprint,
        order,
        tails_restored,
    })
}

fn geometry(args: &OverlayArgs) -> Result<Geometry, Failure> {
    let layout = Layout::new(Wire::Lm, 1500, LinkShape::IPV4).map_err(|error| Failure::new(chain(&error)))?;
    let geometry = layout
        .message(args.message_size.bytes())
        .map_err(|error| Failure::usage(chain(&error)))?;
    if geometry.fragment_count() > MAX_FRAGMENTS {
        return Err(Failure::usage(format!(
            "a message of {} fragments cannot be shown; --message-size {} is the longest",
            geometry.fragment_count(),
            u64::from(MAX_FRAGMENTS) * u64::from(layout.payload_len())
        )));
    }
    Ok(geometry)
}

/// One message on its way.
struct Trace<'a> {
    link: &'a mut Link,
    windows: WindowShape,
    picture: Picture,
    order: Vec<u32>,
    /// Entries posted.
    posted: usize,
    rule: TailRule,
    tails_restored: u32,
}

impl Trace<'_> {
    fn run(&mut self) -> Result<(), Failure> {
        let (geometry, windows) = (self.picture.geometry, self.windows);
        self.link.receiver.umem.copy_to(0, &self.picture.memory());
        self.link.sender.umem.copy_to(0, &self.picture.region);
        self.post();
        self.look("painting")?;
        let prefix_len = self.picture.footprint.prefix_len as u64;
        let tail_len = u64::from(geometry.layout().header_len()) + prefix_len;
        let mut saved = [Vec::new(), Vec::new()];
        for at in 0..self.order.len() {
            let index = self.order[at];
            let len = u32::from(geometry.fragment(index).frame_len());
            let start = self.picture.start(index);
            self.link.pass((geometry.tx_frame_offset(index), len), start)?;
            self.picture.packet(index);
            if let Some(window) = (self.rule).tail_to_save(windows, index, geometry.fragment_count()) {
                let tail = &mut saved[TailRule::slot(window)];
                tail.resize(tail_len as usize, 0);
                let end = start + u64::from(len);
                self.link.receiver.umem.copy_from(end - tail_len, tail);
                if !self.rule.tail_saved(window) {
                    return Err(Failure::new("a window's tail was saved out of turn (I5)"));
                }
            }
            self.look(&format!("the packet of fragment {index}"))?;
            if windows.is_lowest(index)
                && let Some(window) = self.rule.lowest_arrived(windows.window_of(index))
            {
                let tail = &saved[TailRule::slot(window)];
                self.link.receiver.umem.copy_to(start - prefix_len, tail);
                self.picture.tail_restored(index);
                self.look(&format!("the tail of window {window}"))?;
                self.tails_restored += 1;
            }
            self.post();
        }
        let memory = self.look("the last packet")?;
        let found = &memory[self.picture.message_start as usize..];
        let expected = payload(&geometry, 0..geometry.message_len());
        match (0..expected.len()).find(|&at| found[at] != expected[at]) {
            Some(at) => Err(Failure::new(format!("byte {at} of the message is wrong"))),
            None => Ok(()),
        }
    }

    /// Posts entries in the order in which packets come, up to a window's lowest one whose place is still another's
    /// (I5).
    fn post(&mut self) {
        while let Some(&index) = self.order.get(self.posted) {
            if self.windows.is_lowest(index) && !self.rule.may_post_lowest(self.windows.window_of(index)) {
                return;
            }
            self.link.post(self.picture.start(index) - PACKET_HEADROOM);
            self.posted += 1;
        }
    }

    /// Looks at all of the registered memory, and gives it.
    fn look(&self, what: &str) -> Result<Vec<u8>, Failure> {
        let mut memory = vec![0; self.link.receiver.umem.len() as usize];
        self.link.receiver.umem.copy_from(0, &mut memory);
        let Some(at) = self.picture.difference(&memory) else {
            return Ok(memory);
        };
        let from_message = at as i64 - self.picture.message_start as i64;
        let found = memory[at];
        Err(Failure::new(format!(
            "after {what}, byte {from_message} from the message's start is not what geometry says: {found:#04x}"
        )))
    }
}

const _: () = assert!(MEMORY_LEN >= ZONE + (32 << 10));
