//! The two ends of the link: sockets, gates, and one packet at a time from one to the other.

use std::cell::Cell;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lm_cards::{Interface, Steering, SteeringError};
use lm_dataplane::memory::{HugePages, Umem};
use lm_dataplane::ring::Descriptor;
use lm_dataplane::xsk::{BindMode, Rings, Xsk, XskConfig};
use lm_ebpf::{AttachMode, Gate, GateConfig, Role};
use lm_protocol::rss::Flow;
use lm_protocol::wire::Addressing;
use lm_protocol::wire::ethernet::MacAddr;

use super::OverlayArgs;
use crate::failed;
use lm_bench::cli::{Failure, Mode, chain};

/// Length of a chunk in bytes: the one that every driver takes, igb too.
pub(crate) const CHUNK_LEN: u32 = 4096;
/// Memory that each socket registers, in bytes: one huge page, so that no chunk crosses a page's end.
pub(crate) const MEMORY_LEN: u64 = 2 << 20;
/// Entries of each ring.
const RING_LEN: u32 = 512;
/// A card negotiates its link anew when a program is attached.
const LINK_PATIENCE: Duration = Duration::from_secs(20);
/// How long a packet may be on its way.
const PACKET_PATIENCE: Duration = Duration::from_secs(5);
/// Addresses set aside for measurements between networks (RFC 2544). Nobody asks for them here.
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];
const PORT: u16 = 7168;

/// Looks until it is so; fails with `why` when it is not in time.
fn until(
    patience: Duration,
    why: impl FnOnce() -> String,
    mut is_so: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let deadline = Instant::now() + patience;
    while !is_so()? {
        if Instant::now() >= deadline {
            return Err(Failure::new(why()));
        }
        sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// A socket in its memory.
pub(crate) struct End {
    // Before the memory: the kernel lets go of it first.
    pub(crate) xsk: Xsk,
    rings: Rings,
    pub(crate) umem: Umem,
    gate: Gate,
}

impl End {
    fn open(interface: &Interface, queue: u32, mode: Mode, gate: Gate) -> Result<End, Failure> {
        let (bind, pages) = match mode {
            Mode::ZeroCopy => (BindMode::ZeroCopy, HugePages::On),
            _ => (BindMode::Copy, HugePages::Auto),
        };
        let umem = Umem::new(MEMORY_LEN, pages).map_err(|error| {
            Failure::new(format!(
                "no memory in huge pages: {error}; reserve some (sysctl vm.nr_hugepages=8)"
            ))
        })?;
        let (xsk, rings) = Xsk::open(&XskConfig {
            interface_index: interface.index,
            queue,
            mapping: umem.mapping(),
            registered_len: umem.len(),
            chunk_len: CHUNK_LEN,
            fill_len: RING_LEN,
            completion_len: RING_LEN,
            rx_len: RING_LEN,
            tx_len: RING_LEN,
            bind,
        })
        .map_err(|error| Failure::new(format!("{} queue {queue}: {}", interface.name, chain(&error))))?;
        Ok(End {
            xsk,
            rings,
            umem,
            gate,
        })
    }

    fn driver_looks(
        &self,
        what_not: &str,
        is_so: impl FnMut() -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let seconds = PACKET_PATIENCE.as_secs();
        let why = || format!("the driver {what_not} within {seconds} s");
        until(PACKET_PATIENCE, why, is_so)
    }
}

/// Both ends.
pub(crate) struct Link {
    pub(crate) sender: End,
    pub(crate) receiver: End,
    pub(crate) addressing: Addressing,
    queue: u32,
    /// Entries were posted, perhaps not yet taken by the driver.
    untaken: bool,
    /// Packets received so far.
    pub(crate) received: u64,
    _steering: Option<Steering>,
}

impl Link {
    pub(crate) fn open(args: &OverlayArgs) -> Result<Link, Failure> {
        let from = Interface::by_name(&args.from).map_err(failed)?;
        let to = Interface::by_name(&args.interface).map_err(failed)?;
        let queue = args.queue.unwrap_or_else(|| to.rx_queues.saturating_sub(1));
        // Both first: a card is set up anew for its program.
        let [sending_gate, receiving_gate] = [&from, &to].map(gate);
        let (sending_gate, receiving_gate) = (sending_gate?, receiving_gate?);
        await_link(&from)?;
        await_link(&to)?;
        let sending_queue = queue.min(from.tx_queues.saturating_sub(1));
        let sender = End::open(&from, sending_queue, args.mode, sending_gate)?;
        let mut receiver = End::open(&to, queue, args.mode, receiving_gate)?;
        let gate = &mut receiver.gate;
        (gate.register_xsk(queue, receiver.xsk.as_fd()))
            .and_then(|()| gate.set_role(queue, Role::LandingZeroCopy))
            .map_err(failed)?;
        // Last: attaching a program may change the number of queues, and the table with it.
        let steering = steering(&to, queue)?;
        if receiver.xsk.zero_copy() {
            // From here on the flag tells what became of entries.
            let has_looked = || Ok(receiver.rings.fill.needs_wakeup());
            receiver.driver_looks("does not look for entries", has_looked)?;
        }
        Ok(Link {
            sender,
            receiver,
            addressing: Addressing {
                src_mac: MacAddr(from.mac),
                dst_mac: MacAddr(to.mac),
                vlan: None,
                src_ip: ADDRESSES[0],
                dst_ip: ADDRESSES[1],
                src_port: PORT,
                dst_port: PORT,
            },
            queue,
            untaken: false,
            received: 0,
            _steering: steering,
        })
    }

    /// Posts one entry at the receiver.
    pub(crate) fn post(&mut self, entry: u64) {
        let fill = &mut self.receiver.rings.fill;
        assert!(fill.free(1) > 0, "the fill ring holds more than is ever posted");
        fill.write(0, entry);
        fill.submit(1);
        self.untaken = true;
    }

    /// Waits until the driver has taken what is posted: in zero-copy mode a packet that comes before is lost.
    ///
    /// The fill ring's consumer index does not tell, it moves with the next packet (`xsk_flush` of net/xdp/xsk.c). Some
    /// drivers say that they need no wake-up any more (virtio-net); others always want to fill their whole ring (igb),
    /// and that they looked for more and found nothing is counted: once perhaps by a look that began before the entry
    /// was there, so twice is enough.
    fn await_taken(&mut self) -> Result<(), Failure> {
        let untaken = std::mem::take(&mut self.untaken);
        if !untaken || !self.receiver.xsk.zero_copy() {
            return Ok(());
        }
        let receiver = &self.receiver;
        let statistics = || receiver.xsk.statistics().map_err(failed);
        let before = statistics()?.rx_fill_ring_empty;
        receiver.driver_looks("takes no entries", || {
            receiver.xsk.wake_rx().map_err(failed)?;
            Ok(!receiver.rings.fill.needs_wakeup() || statistics()?.rx_fill_ring_empty >= before + 2)
        })
    }

    /// Sends one packet, the sender's bytes at `packet.0`, and waits until it lies at `start` in the receiver's memory.
    pub(crate) fn pass(&mut self, packet: (u64, u32), start: u64) -> Result<(), Failure> {
        self.await_taken()?;
        let (address, len) = packet;
        let (sender, receiver) = (&mut self.sender, &mut self.receiver);
        assert!(sender.rings.tx.free(1) > 0, "one packet at a time");
        sender.rings.tx.write(0, Descriptor::new(address, len));
        sender.rings.tx.submit(1);
        let sent = Cell::new(false);
        let (queue, xsk, seconds) = (self.queue, &receiver.xsk, PACKET_PATIENCE.as_secs());
        let why = || {
            let what = if sent.get() {
                "did not come"
            } else {
                "was not sent"
            };
            format!(
                "a packet of {len} bytes {what} within {seconds} s; are the interfaces connected, and does \
                    queue {queue} receive? {:?}",
                xsk.statistics()
            )
        };
        until(PACKET_PATIENCE, why, || {
            if sender.rings.tx.needs_wakeup() {
                sender.xsk.wake_tx().map_err(failed)?;
            }
            if receiver.rings.fill.needs_wakeup() {
                xsk.wake_rx().map_err(failed)?;
            }
            if sender.rings.completion.available(1) > 0 {
                sender.rings.completion.release(1);
                sent.set(true);
            }
            Ok(sent.get() && receiver.rings.rx.available(1) > 0)
        })?;
        let descriptor = receiver.rings.rx.read(0);
        receiver.rings.rx.release(1);
        self.received += 1;
        if (descriptor.start(), descriptor.len) != (start, len) {
            return Err(Failure::new(format!(
                "{} bytes came to {} instead of {len} to {start}; nothing else may use the link meanwhile",
                descriptor.len,
                descriptor.start(),
            )));
        }
        Ok(())
    }
}

fn gate(interface: &Interface) -> Result<Gate, Failure> {
    Gate::attach(interface.index, &GateConfig::default(), AttachMode::Native).map_err(failed)
}

fn await_link(Interface { index, name, .. }: &Interface) -> Result<(), Failure> {
    let why = || format!("{name} has no link; set it up (ip link set {name} up) and connect it");
    until(LINK_PATIENCE, why, || {
        Ok(Interface::by_index(*index).map_err(failed)?.up)
    })
}

/// Has a card bring the packets to one queue, until this is dropped. `None` where the driver has no table: on veth the
/// sender's queue decides.
fn steering(interface: &Interface, queue: u32) -> Result<Option<Steering>, Failure> {
    if interface.rx_queues < 2 {
        return Ok(None);
    }
    let mut steering = match Steering::apply(interface, &[]) {
        Err(SteeringError::Unsupported { .. }) => return Ok(None),
        steering => steering.map_err(failed)?,
    };
    let [source, destination] = ADDRESSES;
    let flow = Flow {
        source,
        destination,
        source_port: PORT,
        destination_port: PORT,
    };
    steering.keep(&flow, queue).map_err(failed)?;
    Ok(Some(steering))
}
