//! Packets, who sends them and who checks that they arrive: each once, in order, byte for byte, where they should.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use lm_dataplane::memory::{Umem, fill_address_is_valid};
use lm_dataplane::ring::{CompletionRing, Descriptor, FillRing, RxRing, TxRing};
use lm_dataplane::xsk::Xsk;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::host::Layout;

/// Packets of a usual case, and the shortest packet.
pub const PACKETS: u32 = 4096;
pub const SHORT: u32 = 64;
pub const JUMBO: u32 = 9000;
/// Descriptors taken by the kernel and not completed: veth's ring holds 256 packets.
const UNDER_WAY: u32 = 128;
const PATIENCE: Duration = Duration::from_secs(30);

/// The first `len` bytes of packet `number` to socket `socket`.
pub fn packet(number: u32, len: u32, socket: u8) -> Vec<u8> {
    let mut packet = vec![2, 0, 0, 0, 0, 2 * socket + 1, 2, 0, 0, 0, 0, 2 * socket];
    packet.extend([0x88, 0xb5, 0, 0]); // an EtherType for local experiments, and padding
    for word in 0..len.saturating_sub(16).div_ceil(4) {
        packet.extend((number.wrapping_mul(0x9e37_79b1) ^ word.wrapping_mul(0x85eb_ca6b)).to_be_bytes());
    }
    packet.truncate(len as usize);
    packet
}

/// What goes onto the TX ring.
#[derive(Clone, Debug)]
pub enum Item {
    /// A packet in pieces, each in a frame of its own: offset from the frame's start, and length.
    Packet { number: u32, pieces: Vec<(i64, u32)> },
    /// A descriptor as it is, which the kernel is to refuse.
    Refused(Descriptor),
}

impl Item {
    pub fn packet(number: u32, len: u32) -> Item {
        Item::at(number, 0, len)
    }

    pub fn at(number: u32, offset: i64, len: u32) -> Item {
        Item::Packet {
            number,
            pieces: vec![(offset, len)],
        }
    }

    /// In pieces of at most `piece_len` bytes.
    pub fn cut(number: u32, len: u32, piece_len: u32) -> Item {
        let piece = |at| (0, piece_len.min(len - at));
        Item::Packet {
            number,
            pieces: (0..len).step_by(piece_len as usize).map(piece).collect(),
        }
    }

    pub fn len(&self) -> u32 {
        match self {
            Item::Packet { pieces, .. } => pieces.iter().map(|(_, len)| len).sum(),
            Item::Refused(descriptor) => descriptor.len,
        }
    }

    fn descriptors(&self) -> u32 {
        match self {
            Item::Packet { pieces, .. } => pieces.len() as u32,
            Item::Refused(_) => 1,
        }
    }
}

/// A packet that is to arrive: packet `number` as sent with `sent_len` bytes, cut or filled with zeros to `len`, or, if it
/// may, as it was sent.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub number: u32,
    pub sent_len: u32,
    pub len: u32,
    pub may_stay: bool,
}

impl Wanted {
    pub fn whole(number: u32, len: u32) -> Wanted {
        Wanted {
            number,
            sent_len: len,
            len,
            may_stay: false,
        }
    }
}

/// `count` packets of `len` bytes, and the same to be received.
pub fn stream(count: u32, len: u32) -> (Vec<Item>, Vec<Wanted>) {
    (
        (0..count).map(|number| Item::packet(number, len)).collect(),
        (0..count).map(|number| Wanted::whole(number, len)).collect(),
    )
}

/// One side of an exchange.
pub trait Party {
    fn step(&mut self);
    fn done(&self) -> bool;
    fn state(&self) -> String;
}

/// Lets everybody work until all are done.
pub fn exchange(parties: &mut [&mut dyn Party]) {
    let deadline = Instant::now() + PATIENCE;
    while !parties.iter().all(|party| party.done()) {
        let states = || parties.iter().map(|party| party.state()).collect::<Vec<_>>();
        assert!(Instant::now() < deadline, "{}", states().join("; "));
        parties.iter_mut().for_each(|party| party.step());
    }
}

/// How the kernel is made to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive {
    Wake,
    Poll,
}

/// What the sockets of one queue send from: frames, and the ring that says when they were sent.
pub struct Outgoing {
    completion: CompletionRing,
    /// Addresses whose completion is due, in the order they were posted in.
    due: VecDeque<u64>,
    /// Addresses of descriptors that the kernel refuses: newer kernels complete these too.
    refused: Vec<u64>,
    pub refused_completed: u32,
    next_frame: u32,
    /// Descriptors that the kernel has not taken yet, by socket.
    waiting: [u32; 2],
    /// Several sockets post: their order is unknown.
    shared: bool,
}

impl Outgoing {
    /// Takes what the kernel completed: addresses that were posted, each once.
    fn reap(&mut self) {
        let count = self.completion.available(64);
        for offset in 0..count {
            let addr = self.completion.read(offset);
            // Without bit 0, which kernel 6.18 clears (chunks of 4001 bytes begin at odd addresses too).
            let is_it = |known: &u64| known | 1 == addr | 1;
            if let Some(at) = self.due.iter().position(is_it) {
                assert!(at == 0 || self.shared, "completions in order");
                self.due.remove(at);
            } else {
                let at = self.refused.iter().position(is_it);
                self.refused
                    .remove(at.unwrap_or_else(|| panic!("a completion of {addr}, which is not due")));
                self.refused_completed += 1;
            }
        }
        self.completion.release(count);
    }

    /// Start of the next frame to send from.
    fn frame(&self, layout: &Layout) -> u64 {
        let frame = layout.rx_frames + self.next_frame % layout.sent_from();
        u64::from(frame) * u64::from(layout.chunk_len)
    }

    /// Whether the next `count` frames carry nothing that is not sent. Of several sockets one may lag: there they send
    /// packets of one frame, and its address tells.
    fn has_free(&self, layout: &Layout, count: u32) -> bool {
        self.due.len() as u32 + count <= layout.sent_from()
            && !(self.shared && self.due.contains(&self.frame(layout)))
    }

    /// Completions that nobody has taken yet, at most `max`.
    pub fn completed(&mut self, max: u32) -> u32 {
        self.completion.available(max)
    }
}

pub struct Sender {
    pub xsk: Rc<Xsk>,
    pub tx: TxRing,
    pub outgoing: Rc<RefCell<Outgoing>>,
    /// Which of the sockets on the other side is meant.
    pub socket: u8,
    pub drive: Drive,
    /// Most descriptors that are posted at once.
    pub batch: u32,
    umem: Rc<Umem>,
    layout: Layout,
    items: Vec<Item>,
    next_item: usize,
    /// Whether the kernel has taken everything that was posted.
    taken: bool,
}

impl Sender {
    pub fn new(
        xsk: &Rc<Xsk>,
        umem: &Rc<Umem>,
        layout: Layout,
        tx: TxRing,
        completion: CompletionRing,
    ) -> Sender {
        Sender {
            xsk: xsk.clone(),
            tx,
            outgoing: Rc::new(RefCell::new(Outgoing {
                completion,
                due: VecDeque::new(),
                refused: Vec::new(),
                refused_completed: 0,
                next_frame: 0,
                waiting: [0; 2],
                shared: false,
            })),
            socket: 0,
            drive: Drive::Wake,
            batch: 64,
            umem: umem.clone(),
            layout,
            items: Vec::new(),
            next_item: 0,
            taken: true,
        }
    }

    /// Another socket on this one's queue, which sends to socket `socket`.
    pub fn share(&self, xsk: Xsk, tx: TxRing, socket: u8) -> Sender {
        self.outgoing.borrow_mut().shared = true;
        Sender {
            xsk: Rc::new(xsk),
            tx,
            outgoing: self.outgoing.clone(),
            umem: self.umem.clone(),
            items: Vec::new(),
            next_item: 0,
            taken: true,
            socket,
            ..*self
        }
    }

    pub fn send(&mut self, items: Vec<Item>) {
        assert!(self.done());
        self.items = items;
        self.next_item = 0;
        self.taken = false;
    }

    /// Writes as many items as the ring, the frames and the batch have room for, and publishes them together.
    pub fn post(&mut self) -> u32 {
        let outgoing = &mut *self.outgoing.borrow_mut();
        let mut posted = 0;
        while let Some(item) = self.items.get(self.next_item) {
            let count = item.descriptors();
            if posted + count > self.batch
                || self.tx.free(posted + count) < posted + count
                || !outgoing.has_free(&self.layout, count)
            {
                break;
            }
            match item {
                Item::Packet { number, pieces } => {
                    let bytes = packet(*number, item.len(), self.socket);
                    let mut at = 0;
                    for (index, (offset, len)) in pieces.iter().enumerate() {
                        let addr = outgoing.frame(&self.layout).wrapping_add_signed(*offset);
                        outgoing.next_frame += 1;
                        self.umem.copy_to(addr, &bytes[at..at + *len as usize]);
                        at += *len as usize;
                        let mut descriptor = Descriptor::new(addr, *len);
                        if index + 1 < pieces.len() {
                            descriptor = descriptor.continued();
                        }
                        self.tx.write(posted, descriptor);
                        outgoing.due.push_back(addr);
                        posted += 1;
                    }
                }
                Item::Refused(descriptor) => {
                    self.tx.write(posted, *descriptor);
                    outgoing.refused.push(descriptor.addr);
                    posted += 1;
                }
            }
            self.next_item += 1;
        }
        self.tx.submit(posted);
        posted
    }

    /// Descriptors that the kernel has not taken yet.
    pub fn waiting(&mut self) -> u32 {
        self.tx.produced().wrapping_sub(self.tx.consumed())
    }

    fn due(&self) -> u32 {
        self.outgoing.borrow().due.len() as u32
    }
}

impl Party for Sender {
    fn step(&mut self) {
        self.outgoing.borrow_mut().reap();
        self.post();
        let waiting = self.waiting();
        self.taken = waiting == 0;
        let under_way = {
            let outgoing = &mut *self.outgoing.borrow_mut();
            outgoing.waiting[usize::from(self.socket)] = waiting;
            (outgoing.due.len() as u32).saturating_sub(outgoing.waiting.iter().sum())
        };
        if waiting == 0 || under_way > UNDER_WAY.min(self.layout.ring_len / 2) {
            return;
        }
        match self.drive {
            Drive::Wake => {
                assert!(self.tx.needs_wakeup(), "in copy mode the wake-up sends");
                self.xsk.wake_tx().expect("wake-up");
            }
            // In copy mode poll(2) sends as well. Room to send is more than half of the ring.
            Drive::Poll => {
                let ready = poll_for(&self.xsk.as_fd(), PollFlags::OUT, 1000);
                assert!(ready || self.waiting() > self.tx.ring_len() / 2, "room to send");
            }
        }
    }

    fn done(&self) -> bool {
        self.next_item == self.items.len() && self.taken && self.due() == 0
    }

    fn state(&self) -> String {
        format!(
            "sender: {} of {} posted, {} completions due, {:?}, {:?}",
            self.next_item,
            self.items.len(),
            self.due(),
            self.tx,
            self.xsk.statistics()
        )
    }
}

/// Whether poll(2) reports `events` within `timeout_ms`.
pub fn poll_for(xsk: &BorrowedFd<'_>, events: PollFlags, timeout_ms: i64) -> bool {
    let mut entries = [PollFd::from_borrowed_fd(*xsk, events)];
    let timeout = Timespec {
        tv_sec: timeout_ms / 1000,
        tv_nsec: timeout_ms % 1000 * 1_000_000,
    };
    poll(&mut entries, Some(&timeout)).expect("poll");
    entries[0].revents().contains(events)
}

/// What the sockets of one queue receive into.
pub struct Incoming {
    fill: FillRing,
    /// Frames that the kernel has, in the order they were posted in.
    posted: VecDeque<u64>,
    /// Several sockets receive: the order among them is unknown.
    shared: bool,
}

pub struct Receiver {
    pub xsk: Rc<Xsk>,
    pub rx: RxRing,
    pub incoming: Rc<RefCell<Incoming>>,
    pub umem: Rc<Umem>,
    pub layout: Layout,
    /// Most descriptors that are taken at once.
    pub batch: u32,
    pub drive: Drive,
    /// Post each frame again when its packet was read.
    pub refill: bool,
    /// Give RX entries back.
    pub release: bool,
    /// Expect the packet's place in the order as metadata before it.
    pub metadata: bool,
    pub received: u32,
    /// Packets that might have been changed and were not.
    pub stayed: u32,
    socket: u8,
    wanted: VecDeque<Wanted>,
    partial: Vec<u8>,
    /// Entries read and not given back.
    kept: u32,
}

impl Receiver {
    pub fn new(xsk: &Rc<Xsk>, umem: &Rc<Umem>, layout: Layout, fill: FillRing, rx: RxRing) -> Receiver {
        Receiver {
            xsk: xsk.clone(),
            rx,
            incoming: Rc::new(RefCell::new(Incoming {
                fill,
                posted: VecDeque::new(),
                shared: false,
            })),
            umem: umem.clone(),
            layout,
            batch: 64,
            drive: Drive::Wake,
            refill: true,
            release: true,
            metadata: false,
            received: 0,
            stayed: 0,
            socket: 0,
            wanted: VecDeque::new(),
            partial: Vec::new(),
            kept: 0,
        }
    }

    /// Another socket on this one's queue: socket `socket`.
    pub fn share(&self, xsk: Xsk, rx: RxRing, socket: u8) -> Receiver {
        self.incoming.borrow_mut().shared = true;
        Receiver {
            xsk: Rc::new(xsk),
            rx,
            incoming: self.incoming.clone(),
            umem: self.umem.clone(),
            socket,
            wanted: VecDeque::new(),
            partial: Vec::new(),
            ..*self
        }
    }

    /// Posts all receive frames.
    pub fn post_all(&self) {
        let frames = 0..u64::from(self.layout.rx_frames);
        let frames: Vec<u64> = frames
            .map(|frame| frame * u64::from(self.layout.chunk_len))
            .collect();
        self.post(&frames);
    }

    pub fn post(&self, frames: &[u64]) {
        let incoming = &mut *self.incoming.borrow_mut();
        let count = frames.len() as u32;
        assert!(incoming.fill.free(count) >= count);
        for (offset, frame) in frames.iter().enumerate() {
            let (chunk_len, umem_len) = (self.layout.chunk_len, self.layout.umem_len());
            assert!(fill_address_is_valid(*frame, chunk_len, umem_len));
            incoming.fill.write(offset as u32, *frame);
            incoming.posted.push_back(*frame);
        }
        incoming.fill.submit(count);
        if incoming.fill.needs_wakeup() {
            self.xsk.wake_rx().expect("wake-up");
        }
    }

    pub fn want(&mut self, wanted: Vec<Wanted>) {
        assert!(self.done());
        self.wanted = wanted.into();
    }

    /// Nothing more came than was wanted.
    pub fn assert_drained(&mut self) {
        let seen = self.rx.available(self.kept + 1);
        assert_eq!(seen, self.kept, "nothing more than wanted");
        assert!(self.partial.is_empty(), "whole packets only");
    }

    /// The frame that the packet lies in, after a look at its place.
    fn frame_of(&self, descriptor: Descriptor) -> u64 {
        let frame = if self.layout.options.aligned_chunks {
            descriptor.start() & !u64::from(self.layout.chunk_len - 1)
        } else {
            descriptor.base()
        };
        let incoming = &mut *self.incoming.borrow_mut();
        let at = incoming.posted.iter().position(|posted| *posted == frame);
        let at = at.unwrap_or_else(|| panic!("a packet in frame {frame}, which is not posted"));
        assert!(at == 0 || incoming.shared, "frames are used first in, first out");
        incoming.posted.remove(at);
        assert_eq!(descriptor.start() - frame, self.layout.packet_offset());
        frame
    }

    fn take(&mut self, descriptor: Descriptor) {
        let start = descriptor.start();
        if self.metadata && self.partial.is_empty() {
            let count = u64::from_ne_bytes(self.umem.read_header(start - 32));
            assert_eq!(count, u64::from(self.received), "metadata");
        }
        assert!(descriptor.len <= self.layout.capacity());
        let at = self.partial.len();
        self.partial.resize(at + descriptor.len as usize, 0);
        self.umem.copy_from(start, &mut self.partial[at..]);
        if descriptor.continues() {
            let capacity = self.layout.capacity();
            assert_eq!(descriptor.len, capacity, "pieces but the last are full");
            return;
        }
        assert_eq!(descriptor.options, 0);
        let wanted = self.wanted.pop_front().expect("no more packets than wanted");
        let mut expected = packet(wanted.number, wanted.sent_len, self.socket);
        if wanted.may_stay && self.partial.len() == expected.len() {
            self.stayed += 1;
        } else {
            expected.resize(wanted.len as usize, 0);
        }
        assert_eq!(self.partial.len(), expected.len(), "{wanted:?}");
        assert!(self.partial == expected, "the bytes of {wanted:?}");
        self.partial.clear();
        self.received += 1;
    }
}

impl Party for Receiver {
    fn step(&mut self) {
        if self.drive == Drive::Poll {
            let waits = self.rx.available(1) > 0;
            let ready = poll_for(&self.xsk.as_fd(), PollFlags::IN, 1);
            assert!(ready || !waits, "poll sees what waits");
            if !ready {
                return;
            }
        }
        let seen = self.rx.available(self.kept + self.batch);
        let mut frames = Vec::new();
        for offset in self.kept..seen {
            let descriptor = self.rx.read(offset);
            frames.push(self.frame_of(descriptor));
            self.take(descriptor);
        }
        if self.release {
            self.rx.release(seen);
        } else {
            self.kept = seen;
        }
        if self.refill && !frames.is_empty() {
            self.post(&frames);
        }
    }

    fn done(&self) -> bool {
        self.wanted.is_empty()
    }

    fn state(&self) -> String {
        format!(
            "receiver: {} received, {} missing, {:?}, {:?}",
            self.received,
            self.wanted.len(),
            self.rx,
            self.xsk.statistics()
        )
    }
}

/// Sends the items and waits until everything wanted has come, and nothing else.
pub fn run(sender: &mut Sender, receiver: &mut Receiver, (items, wanted): (Vec<Item>, Vec<Wanted>)) {
    sender.send(items);
    receiver.want(wanted);
    exchange(&mut [sender, receiver]);
    receiver.assert_drained();
}
