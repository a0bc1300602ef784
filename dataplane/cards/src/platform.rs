//! What forbids zero-copy mode on a machine, and what to do about it.
//!
//! In zero-copy mode a network card writes into landing zones by itself, at addresses that overlap, and nobody looks at
//! a packet before it is written. That is right only on a machine where writes arrive in order, whole, and nowhere else. [`Facts`]
//! are what the kernel tells of a machine and an interface, [`judge`] names every [`Obstacle`] in them, and
//! [`crate::footprint`] finds out what a driver writes beside a packet, which nobody tells.

#[cfg(test)]
mod tests;

use std::io;
use std::path::Path;

use lm_protocol::zone::XDP_PACKET_HEADROOM;

use crate::ethtool::{Ethtool, EthtoolError, Feature};
use crate::interface::Interface;
use crate::netdev::XdpFeatures;
use crate::pci::PciDevice;

/// Length of a huge page in bytes.
const HUGE_PAGE_LEN: u64 = 2 << 20;
/// Descriptors that most drivers' rings have.
const USUAL_RING_LEN: u32 = 1024;
/// Longest receive ring in descriptors: so many frames are kept for it, twice over.
const RING_LEN_MAX: u32 = 1024;
/// Bytes of a received frame that do not count for the MTU: Ethernet header and a VLAN tag.
const LINK_OVERHEAD: u32 = 14 + 4;

/// What the kernel tells of a machine and one of its interfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Name of the interface.
    pub interface: String,
    /// Name of its driver, where it tells.
    pub driver: Option<String>,
    /// Longest IP packet in bytes.
    pub mtu: u32,
    /// Receive queues.
    pub rx_queues: u32,
    /// Length of each receive queue's own ring in descriptors; the usual one where the driver does not tell.
    pub rx_ring_len: u32,
    /// What the driver offers AF_XDP; `None` before Linux 6.3.
    pub xdp: Option<XdpFeatures>,
    /// Memory in reserved huge pages of 2 MiB that nobody has taken, in bytes.
    pub free_huge_bytes: u64,
    /// Whether the kernel's command line sends all DMA through bounce buffers (`swiotlb=force`).
    pub bounce_forced: bool,
    /// Whether the machine is a guest whose memory is encrypted, so that devices reach bounce buffers only (SEV, TDX).
    pub confidential_guest: bool,
    /// Width of the addresses that the device can reach, in bits.
    pub dma_mask_bits: Option<u32>,
    /// Whether an IOMMU translates the device's addresses, so that it reaches all memory.
    pub iommu_translates: bool,
    /// End of the machine's memory: the highest physical address and one, as far as it is known.
    pub memory_end: u64,
    /// Whether received packets keep their frame check sequence.
    pub rx_fcs: bool,
    /// Where the device sits on PCI Express, if it does, and may mark its writes as free to overtake others.
    pub relaxed_ordering_at: Option<String>,
    /// The kernel's release, such as "6.18.1-generic".
    pub kernel_release: String,
}

/// What is wanted of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Length of a chunk in bytes.
    pub chunk_len: u32,
    /// Length of the memory that is still to be mapped in huge pages, in bytes; 0 when it is mapped.
    pub memory_len: u64,
}

/// Why a device's writes would go through bounce buffers, which are copied a whole frame at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bounce {
    /// The kernel was told so.
    #[error(
        "the kernel's command line says so; remove swiotlb=force from the kernel's command line, or use copy mode \
         (--mode copy)"
    )]
    Forced,
    /// The guest's memory is encrypted.
    #[error("this guest's memory is encrypted; use copy mode (--mode copy)")]
    Confidential,
    /// The device cannot reach all memory.
    #[error(
        "the device reaches addresses of {bits} bits, and there is memory beyond; switch the IOMMU on (intel_iommu=on, \
         iommu.passthrough=0), or use copy mode (--mode copy)"
    )]
    Narrow {
        /// Width of its addresses in bits.
        bits: u32,
    },
}

/// Why zero-copy mode may not be used (or, for [`Obstacle::KernelPanic`], copy mode): one line each, with what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// The driver has no zero-copy mode.
    #[error(
        "{interface}'s driver ({driver}) has no zero-copy mode; use copy mode (--mode copy), or a card whose driver \
         has zero-copy"
    )]
    NoZeroCopy {
        /// Name of the interface.
        interface: String,
        /// Name of the driver.
        driver: String,
    },
    /// The receive rings are so long that general frames would not suffice to keep them full.
    #[error(
        "{interface}'s receive rings have {len} descriptors, and {RING_LEN_MAX} can be kept full; shorten them \
         (ethtool -G {interface} rx {RING_LEN_MAX}), or use copy mode (--mode copy)"
    )]
    LongRing {
        /// Name of the interface.
        interface: String,
        /// Their length in descriptors.
        len: u32,
    },
    /// All traffic comes to one queue, which would have to be the landing queue.
    #[error(
        "{interface} has one receive queue, which other traffic needs; make more queues (ethtool -L {interface} \
         combined 2), or use copy mode (--mode copy)"
    )]
    OneQueue {
        /// Name of the interface.
        interface: String,
    },
    /// Chunks that cross pages need pages in a row.
    #[error(
        "{} MiB of huge pages are wanted and {} free; reserve {} more huge pages of 2 MiB (raise \
         /proc/sys/vm/nr_hugepages), or use copy mode (--mode copy)",
        .wanted.div_ceil(1 << 20), .free.div_ceil(1 << 20),
        .wanted.div_ceil(HUGE_PAGE_LEN).saturating_sub(.free / HUGE_PAGE_LEN)
    )]
    NoHugePages {
        /// Memory in free huge pages, in bytes.
        free: u64,
        /// Memory wanted, in bytes.
        wanted: u64,
    },
    /// Packets would be copied from bounce buffers a whole frame at a time, stale bytes over fresh payload.
    #[error("received packets go through bounce buffers: {0}")]
    BounceBuffers(Bounce),
    /// Four bytes behind each packet would overwrite payload.
    #[error(
        "{interface} leaves the frame check sequence behind each packet; switch that off (ethtool -K {interface} \
         rx-fcs off), or use copy mode (--mode copy)"
    )]
    FcsKept {
        /// Name of the interface.
        interface: String,
    },
    /// Bytes behind each packet would overwrite payload.
    #[error("{interface} writes {len} bytes behind each packet; use copy mode (--mode copy)")]
    Padding {
        /// Name of the interface.
        interface: String,
        /// How many, in bytes.
        len: usize,
    },
    /// More is written before each packet than landing zones leave room for.
    #[error("{interface} writes {len} bytes before each packet; use copy mode (--mode copy)")]
    LongPrefix {
        /// Name of the interface.
        interface: String,
        /// How much, in bytes.
        len: usize,
    },
    /// The packets that were to show what the driver writes did not come to the general queue.
    #[error(
        "{interface} brings small packets to other queues than computed, so that it is not known what it writes; use \
         copy mode (--mode copy)"
    )]
    Unseen {
        /// Name of the interface.
        interface: String,
    },
    /// A later packet's headers may overtake an earlier packet's payload on the way to memory.
    #[error(
        "the device at {bus} may write to memory out of order (relaxed ordering); forbid it (setpci -s {bus} \
         CAP_EXP+8.w=0000:0010), or use copy mode (--mode copy)"
    )]
    RelaxedOrdering {
        /// Where the device sits.
        bus: String,
    },
    /// Packets longer than a frame would be split or lost.
    #[error(
        "{interface} has MTU {mtu}, and frames hold {max_mtu}; lower it (ip link set {interface} mtu {max_mtu}), or \
         use copy mode (--mode copy)"
    )]
    FrameTooLong {
        /// Name of the interface.
        interface: String,
        /// Its MTU in bytes.
        mtu: u32,
        /// Longest MTU for this chunk length, in bytes.
        max_mtu: u32,
    },
    /// The kernel can panic when AF_XDP sends in copy mode; no obstacle to zero-copy mode.
    #[error(
        "kernel {release} can panic when AF_XDP sends in copy mode; update the kernel, or use zero-copy mode"
    )]
    KernelPanic {
        /// The kernel's release.
        release: String,
    },
}

impl Obstacle {
    /// Whether it forbids zero-copy mode; otherwise it is a warning for copy mode.
    pub fn forbids_zero_copy(&self) -> bool {
        !matches!(self, Obstacle::KernelPanic { .. })
    }
}

/// Everything in the facts that forbids zero-copy mode, and what to be warned of; in the order of [`Obstacle`]'s variants.
///
/// What is not known is no obstacle: binding a socket then tells, or the first packet.
pub fn judge(facts: &Facts, demand: &Demand) -> Vec<Obstacle> {
    let interface = || facts.interface.clone();
    let mut obstacles = Vec::new();
    if facts.xdp.is_some_and(|features| !features.zero_copy()) {
        obstacles.push(Obstacle::NoZeroCopy {
            interface: interface(),
            driver: facts.driver.clone().unwrap_or_else(|| "unknown".into()),
        });
    }
    if facts.rx_ring_len > RING_LEN_MAX {
        obstacles.push(Obstacle::LongRing {
            interface: interface(),
            len: facts.rx_ring_len,
        });
    }
    if facts.rx_queues < 2 {
        obstacles.push(Obstacle::OneQueue {
            interface: interface(),
        });
    }
    if facts.free_huge_bytes / HUGE_PAGE_LEN < demand.memory_len.div_ceil(HUGE_PAGE_LEN) {
        obstacles.push(Obstacle::NoHugePages {
            free: facts.free_huge_bytes,
            wanted: demand.memory_len,
        });
    }
    obstacles.extend(bounce(facts).map(Obstacle::BounceBuffers));
    if facts.rx_fcs {
        obstacles.push(Obstacle::FcsKept {
            interface: interface(),
        });
    }
    if let Some(bus) = &facts.relaxed_ordering_at {
        obstacles.push(Obstacle::RelaxedOrdering { bus: bus.clone() });
    }
    let max_mtu = max_mtu(facts.driver.as_deref(), demand.chunk_len);
    if facts.mtu > max_mtu {
        obstacles.push(Obstacle::FrameTooLong {
            interface: interface(),
            mtu: facts.mtu,
            max_mtu,
        });
    }
    if can_panic(&facts.kernel_release) {
        obstacles.push(Obstacle::KernelPanic {
            release: facts.kernel_release.clone(),
        });
    }
    obstacles
}

fn bounce(facts: &Facts) -> Option<Bounce> {
    if facts.bounce_forced {
        return Some(Bounce::Forced);
    }
    if facts.confidential_guest {
        return Some(Bounce::Confidential);
    }
    let bits = facts.dma_mask_bits?;
    let reaches_all = facts.iommu_translates || bits >= 64 || facts.memory_end <= 1 << bits;
    (!reaches_all).then_some(Bounce::Narrow { bits })
}

/// Descriptors in each receive ring of an interface of the calling thread's network namespace; the usual number where its driver
/// does not tell.
pub fn rx_ring_len(interface: &Interface) -> u32 {
    let ethtool = Ethtool::open(interface.index).ok();
    let len = ethtool.and_then(|ethtool| ethtool.rx_ring_len().ok());
    len.filter(|len| *len > 0).unwrap_or(USUAL_RING_LEN)
}

/// The shortest usual chunk, in bytes, that holds a packet of this MTU, VLAN-tagged, as the driver uses it. The less of it lies behind a packet, the
/// fewer of the next ones have to come before the packet is final.
pub fn chunk_len_for(driver: Option<&str>, mtu: u32) -> u32 {
    let holds = |len: &u32| mtu <= max_mtu(driver, *len);
    [2048, 2048 + XDP_PACKET_HEADROOM]
        .into_iter()
        .find(holds)
        .unwrap_or(4096)
}

/// Longest MTU whose frames, VLAN-tagged ones too, fit a chunk as the driver uses it.
fn max_mtu(driver: Option<&str>, chunk_len: u32) -> u32 {
    let mut room = chunk_len.saturating_sub(XDP_PACKET_HEADROOM);
    if driver == Some("igb") {
        // The card counts in units of 1 KiB (SRRCTL.BSIZEPACKET), which the driver rounds down to.
        room &= !1023;
    }
    room.saturating_sub(LINK_OVERHEAD)
}

/// The first patch of Linux 6.17 in which `xsk_destruct_skb` (net/xdp/xsk.c) does not take a packet's own bytes for its list of
/// completions ("xsk: avoid data corruption on cq descriptor number", in 6.18 from the start; 6.16 never had it).
const FIRST_SOUND_6_17: u32 = 11;

/// Whether sending in copy mode can panic.
fn can_panic(release: &str) -> bool {
    match parse_release(release) {
        Some((6, 16, _)) => true,
        Some((6, 17, patch)) => patch < FIRST_SOUND_6_17,
        _ => false,
    }
}

/// "6.17.3-generic" as numbers.
fn parse_release(release: &str) -> Option<(u32, u32, u32)> {
    let numbers = release.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
    let mut numbers = numbers.split('.').map(str::parse);
    let major = numbers.next()?.ok()?;
    let minor = numbers.next()?.ok()?;
    let patch = numbers.next().and_then(Result::ok).unwrap_or(0);
    Some((major, minor, patch))
}

impl Facts {
    /// Landing entries that must be submitted together, so that a card never sees a used one for a new one.
    pub fn landing_lap(&self) -> u32 {
        match self.driver.as_deref() {
            Some("igb") => self.rx_ring_len,
            _ => 1,
        }
    }

    /// What the kernel tells of this machine and an interface of the calling thread's network namespace.
    ///
    /// Some of it is told to root alone: without CAP_SYS_ADMIN relaxed ordering counts as off, and the memory's end is
    /// estimated by its length.
    ///
    /// # Errors
    ///
    /// What the kernel says to a question that every kernel answers.
    pub fn read(interface: &Interface) -> io::Result<Facts> {
        let ethtool = Ethtool::open(interface.index)?;
        let driver = match ethtool.driver() {
            Ok(driver) => Some(driver),
            Err(EthtoolError::System { source, .. }) => return Err(source),
            Err(EthtoolError::Gone) => return Err(io::Error::from_raw_os_error(libc::ENODEV)),
            Err(_) => None,
        };
        let device = driver.as_ref().and_then(|driver| PciDevice::at(&driver.bus));
        let relaxed = device
            .as_ref()
            .and_then(|device| device.relaxed_ordering().ok().flatten());
        let bus = driver.as_ref().map(|driver| driver.bus.clone());
        let command_line = std::fs::read_to_string("/proc/cmdline")?;
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
        Ok(Facts {
            interface: interface.name.clone(),
            driver: driver.map(|driver| driver.name),
            mtu: interface.mtu,
            rx_queues: interface.rx_queues,
            rx_ring_len: rx_ring_len(interface),
            xdp: XdpFeatures::read(interface.index)?,
            free_huge_bytes: free_huge_pages(Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB"))
                * HUGE_PAGE_LEN,
            bounce_forced: forces_bounce(&command_line),
            confidential_guest: ["/dev/sev-guest", "/dev/tdx_guest"]
                .iter()
                .any(|path| Path::new(path).exists()),
            dma_mask_bits: device.as_ref().and_then(PciDevice::dma_mask_bits),
            iommu_translates: device
                .and_then(|device| device.iommu())
                .is_some_and(|kind| kind.starts_with("DMA")),
            memory_end: memory_end()?,
            rx_fcs: ethtool.feature(Feature::RxFcs).is_ok_and(|state| state.on),
            relaxed_ordering_at: bus.filter(|_| relaxed == Some(true)),
            kernel_release: release.trim().to_owned(),
        })
    }
}

/// Huge pages that nobody has taken or been promised; 0 where the kernel has none.
fn free_huge_pages(folder: &Path) -> u64 {
    let number = |name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(folder.join(name)).ok()?;
        text.trim().parse().ok()
    };
    let free = number("free_hugepages").unwrap_or(0);
    let promised = number("resv_hugepages").unwrap_or(0);
    // The kernel takes a promise back before the page, when a socket outlives its process by a moment: the number is below 0 then
    // and looks very large.
    let promised = match promised > number("nr_hugepages").unwrap_or(0) {
        true => 0,
        false => promised,
    };
    free.saturating_sub(promised)
}

/// Whether `swiotlb=` has the word `force` among its own.
fn forces_bounce(command_line: &str) -> bool {
    command_line
        .split_ascii_whitespace()
        .filter_map(|option| option.strip_prefix("swiotlb="))
        .any(|value| value.split(',').any(|word| word == "force"))
}

/// The end of the highest range of memory, or, for those who may not know, the memory's length.
fn memory_end() -> io::Result<u64> {
    let end = last_ram(&std::fs::read_to_string("/proc/iomem")?);
    if end > 0 {
        return Ok(end);
    }
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let total = text.lines().find_map(|line| {
        let kib = line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?;
        kib.parse::<u64>().ok()
    });
    total
        .map(|kib| kib << 10)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// The end of the last range of `/proc/iomem` that is memory; 0 when addresses are hidden.
fn last_ram(text: &str) -> u64 {
    text.lines()
        .filter_map(|line| {
            let (range, kind) = line.trim().split_once(" : ")?;
            let (_, last) = range.split_once('-')?;
            let last = u64::from_str_radix(last, 16).ok()?;
            (kind == "System RAM" && last > 0).then(|| last.saturating_add(1))
        })
        .max()
        .unwrap_or(0)
}
