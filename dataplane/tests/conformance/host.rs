//! Two hosts on a link and the sockets on them.

use std::os::fd::AsFd;
use std::rc::Rc;

use lm_cards::Interface;
use lm_dataplane::memory::{HugePages, PACKET_HEADROOM, Umem};
use lm_dataplane::xsk::{BindMode, Rings, SharedRings, XdpStatistics, Xsk, XskConfig, XskOptions};

use crate::bed::{self, Mode, Namespace, Pair};
use crate::programs::{Kind, Program};
use crate::traffic::{Receiver, Sender};

/// Frames of a socket and entries of its rings, as in the kernel's test.
pub const FRAMES: u32 = 1024;
pub const RING_LEN: u32 = 2048;

/// Runs a case on a pair of its own, if the machine lets it.
pub fn on_veth(mode: Mode, case: fn(&Bed)) {
    if bed::root() {
        case(&Bed::new(mode));
    }
}

#[derive(Clone, Copy, Debug)]
pub enum End {
    A,
    B,
}

/// A veth pair of one queue, and the XDP mode of the programs on it.
pub struct Bed {
    pub mode: Mode,
    pair: Pair,
}

impl Bed {
    fn new(mode: Mode) -> Bed {
        Bed {
            mode,
            pair: Pair::new(1),
        }
    }

    /// Packets of up to 9000 bytes.
    pub fn jumbo(&self) {
        self.pair.a.ip("link set va mtu 9000");
        self.pair.b.ip("link set vb mtu 9000");
    }

    pub fn namespace(&self, end: End) -> (&Namespace, &'static str) {
        match end {
            End::A => (&self.pair.a, "va"),
            End::B => (&self.pair.b, "vb"),
        }
    }

    fn interface_index(&self, end: End) -> u32 {
        let (namespace, device) = self.namespace(end);
        let interface = namespace.run(|| Interface::by_name(device));
        interface.expect("the device").index
    }

    pub fn attach(&self, end: End, kind: Kind) -> Program {
        let (namespace, index) = (self.namespace(end).0, self.interface_index(end));
        namespace.run(|| Program::attach(index, self.mode, kind))
    }

    pub fn open(&self, end: End, layout: Layout) -> Host {
        let registered_len = layout.umem_len();
        let umem = Umem::new(registered_len, HugePages::Off).expect("memory");
        let index = self.interface_index(end);
        let config = XskConfig {
            interface_index: index,
            queue: 0,
            mapping: umem.mapping(),
            registered_len,
            chunk_len: layout.chunk_len,
            fill_len: layout.ring_len,
            completion_len: layout.ring_len,
            rx_len: layout.rx_ring_len,
            tx_len: layout.ring_len,
            bind: BindMode::Copy,
        };
        let (xsk, rings) = self
            .namespace(end)
            .0
            .run(|| Xsk::open_with(&config, &layout.options))
            .expect("an AF_XDP socket");
        assert!(!xsk.zero_copy(), "veth has none");
        Host {
            xsk: Rc::new(xsk),
            umem: Rc::new(umem),
            layout,
            rings,
        }
    }

    /// What most cases use: a sender on `a`, and on `b` a receiver that the program serves.
    pub fn one_way(&self, layout: Layout, kind: Kind) -> (Sender, Receiver, Program) {
        let (sender, _) = self.open(End::A, layout.sender()).split();
        let (_, receiver) = self.open(End::B, layout.receiver()).split();
        let program = self.attach(End::B, kind);
        program.register(0, &receiver.xsk.as_fd());
        (sender, receiver, program)
    }
}

impl Bed {
    /// A second sender and a second receiver, socket 1, on the same queues and memory.
    pub fn share(&self, sender: &Sender, receiver: &Receiver) -> (Sender, Receiver) {
        let open = |end, xsk: &Xsk| {
            let opened = self.namespace(end).0.run(|| xsk.share(RING_LEN, RING_LEN));
            opened.expect("a socket that shares")
        };
        let (sending, SharedRings { tx, .. }) = open(End::A, &sender.xsk);
        let (receiving, SharedRings { rx, .. }) = open(End::B, &receiver.xsk);
        (sender.share(sending, tx, 1), receiver.share(receiving, rx, 1))
    }
}

/// Memory and rings of a socket.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub chunk_len: u32,
    /// Frames at the UMEM's start, to receive into.
    pub rx_frames: u32,
    /// Frames behind them, to send from.
    pub tx_frames: u32,
    pub ring_len: u32,
    pub rx_ring_len: u32,
    pub options: XskOptions,
}

impl Default for Layout {
    /// Aligned chunks of 4 KiB, as in the kernel's test; frames for both directions.
    fn default() -> Layout {
        Layout {
            chunk_len: 4096,
            rx_frames: FRAMES,
            tx_frames: FRAMES,
            ring_len: RING_LEN,
            rx_ring_len: RING_LEN,
            options: XskOptions {
                aligned_chunks: true,
                ..XskOptions::default()
            },
        }
    }
}

impl Layout {
    pub fn unaligned(mut self) -> Layout {
        self.options.aligned_chunks = false;
        self
    }

    pub fn multi_buffer(mut self) -> Layout {
        self.options.multi_buffer = true;
        self
    }

    pub fn chunk_len(mut self, chunk_len: u32) -> Layout {
        self.chunk_len = chunk_len;
        self
    }

    pub fn headroom_len(mut self, headroom_len: u32) -> Layout {
        self.options.headroom_len = headroom_len;
        self
    }

    pub fn sender(mut self) -> Layout {
        self.rx_frames = 0;
        self
    }

    fn receiver(mut self) -> Layout {
        self.tx_frames = 0;
        self
    }

    /// Frames that packets are sent from; the last one stays free for descriptors that point to no packet.
    pub fn sent_from(&self) -> u32 {
        self.tx_frames - 1
    }

    pub fn spare_frame(&self) -> u64 {
        self.umem_len() - u64::from(self.chunk_len)
    }

    pub fn umem_len(&self) -> u64 {
        u64::from(self.rx_frames + self.tx_frames) * u64::from(self.chunk_len)
    }

    /// From a frame's start to its packet.
    pub fn packet_offset(&self) -> u64 {
        PACKET_HEADROOM + u64::from(self.options.headroom_len)
    }

    pub fn capacity(&self) -> u32 {
        self.options.frame_capacity(self.chunk_len)
    }
}

/// A socket with its memory.
pub struct Host {
    pub xsk: Rc<Xsk>,
    pub umem: Rc<Umem>,
    pub layout: Layout,
    rings: Rings,
}

impl Host {
    pub fn split(self) -> (Sender, Receiver) {
        let Rings {
            fill,
            rx,
            tx,
            completion,
        } = self.rings;
        (
            Sender::new(&self.xsk, &self.umem, self.layout, tx, completion),
            Receiver::new(&self.xsk, &self.umem, self.layout, fill, rx),
        )
    }
}

/// The statistics but for the count that grows whenever the kernel finds nothing to send.
pub fn losses(xsk: &Xsk) -> XdpStatistics {
    XdpStatistics {
        tx_ring_empty: 0,
        ..xsk.statistics().expect("statistics")
    }
}
