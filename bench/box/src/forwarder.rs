//! The impairment box's forwarder, loaded: packets from one interface go out of another, or fare as on a bad link
//! (`impair.c`). One [`Forwarder`] for each direction.
//!
//! Every decision is a function of the seed and the packet's number in its direction: [`Impairments::fate`] is that
//! function in Rust, so that a test can tell beforehand which packets will come through.

use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use aya::maps::{Array, MapData, MapError, RingBuf};
use aya::programs::{SchedClassifier, TcAttachType, tc::TcAttachOptions};
use aya::{Ebpf, EbpfError, EbpfLoader, programs::LinkOrder, programs::ProgramError};
use serde::Serialize;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../impair.o");
const PROGRAM: &str = "lm_impair_forward";

/// Longest packet, with its Ethernet header, that can be held back or handed to user space.
pub(crate) const HELD_PACKET_LEN_MAX: u32 = 2032;
/// Most packets that may overtake a reordered one.
const REORDER_BY_MAX: u32 = SLOTS - 1;
const SLOTS: u32 = 64;
const QUEUES: usize = 8;
/// Room for packets on their way to user space.
const RING_LEN: u32 = 1 << 24;
const PER_MILLION: u64 = 1_000_000;

/// What happens to the packets of one direction: `struct lm_impair_config`. Probabilities are per million packets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Impairments {
    /// Decides everything that is random.
    pub seed: u64,
    /// Where packets leave.
    pub to_ifindex: u32,
    /// Packets that are lost.
    pub loss: u32,
    /// So many packets in succession share one fate; at least 1. `loss` stays the share of lost packets.
    pub loss_burst: u32,
    /// Packets that are sent twice.
    pub duplicate: u32,
    /// Packets in which one byte is changed.
    pub corrupt: u32,
    /// Packets that are held back.
    pub reorder: u32,
    /// Packets of the same queue that overtake a held one: 1 to 63.
    pub reorder_by: u32,
    /// 1: packets go to user space instead of the other interface.
    pub divert: u32,
}

// SAFETY: integers without padding (8 + 8 · 4 bytes); any bytes are a value.
unsafe impl aya::Pod for Impairments {}

/// What is decided about a packet before anything is known but its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// It is lost; then nothing else matters.
    pub lost: bool,
    /// One byte of it is changed.
    pub corrupted: bool,
    /// It is held back (if it is short enough); then it is not sent twice.
    pub reordered: bool,
    /// It is sent twice.
    pub duplicated: bool,
}

/// What a number is drawn for; the order is that of `enum purpose`.
#[derive(Clone, Copy)]
enum Purpose {
    Loss,
    Duplicate,
    Corrupt,
    Reorder = 4,
}

const PURPOSES: u64 = 8;

impl Impairments {
    /// What becomes of the packet with this number; the direction's first has number 0.
    #[must_use]
    pub fn fate(&self, number: u64) -> Fate {
        let lost = self.happens(
            number / u64::from(self.loss_burst.max(1)),
            Purpose::Loss,
            self.loss,
        );
        let reordered = !lost && self.happens(number, Purpose::Reorder, self.reorder);
        Fate {
            lost,
            corrupted: !lost && self.happens(number, Purpose::Corrupt, self.corrupt),
            reordered,
            duplicated: !lost && !reordered && self.happens(number, Purpose::Duplicate, self.duplicate),
        }
    }

    fn happens(&self, number: u64, purpose: Purpose, per_million: u32) -> bool {
        let place = number.wrapping_mul(PURPOSES).wrapping_add(purpose as u64);
        ((split_mix(self.seed, place) >> 32) * PER_MILLION) >> 32 < u64::from(per_million)
    }

    fn fault(&self) -> Option<&'static str> {
        if self.loss_burst == 0 {
            return Some("a burst has at least one packet");
        }
        if !(1..=REORDER_BY_MAX).contains(&self.reorder_by) {
            return Some("1 to 63 packets may overtake one");
        }
        None
    }
}

/// The number at `place` of the sequence that starts at `seed`: SplitMix64 (Steele, Lea, Flood 2014).
#[must_use]
pub fn split_mix(seed: u64, place: u64) -> u64 {
    let x = seed.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What a forwarder has done; the fields of `struct lm_impair_counters`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct ForwarderCounters {
    /// Packets that came in.
    pub received: u64,
    /// Lost on purpose.
    pub lost: u64,
    /// Sent a second time.
    pub duplicated: u64,
    /// Changed in one byte.
    pub corrupted: u64,
    /// Held back.
    pub reordered: u64,
    /// Of those, gone on; the others are still held.
    #[serde(skip)]
    pub released: u64,
    /// Handed to user space, copies counted separately.
    #[serde(skip)]
    pub diverted: u64,
    /// Dropped because user space was behind.
    #[serde(skip)]
    pub ring_full: u64,
    /// Dropped because the kernel had no memory for them or they were too long to be kept.
    pub refused: u64,
    #[serde(skip)]
    sequence: [u64; QUEUES],
}

// SAFETY: integers without padding; any bytes are a value.
unsafe impl aya::Pod for ForwarderCounters {}

const _: () = assert!(size_of::<Impairments>() == 40 && size_of::<ForwarderCounters>() == 8 * (9 + QUEUES));

/// Why a forwarder does not run. One line, with what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImpairError {
    /// The impairments contradict themselves.
    #[error("illegal impairments: {0}")]
    Illegal(&'static str),
    /// The process may not do this.
    #[error("forwarding packets needs CAP_BPF and CAP_NET_ADMIN: run as root, or grant them to the program")]
    NotPrivileged,
    /// The object did not load, or lacks what it should have.
    #[error("the kernel refused the forwarder: {0}")]
    Load(#[source] Box<EbpfError>),
    /// It could not be attached.
    #[error("cannot forward from {interface} ({source}); Linux 6.6 or later is needed")]
    Attach {
        /// Interface name.
        interface: String,
        /// What the kernel said.
        source: ProgramError,
    },
    /// A map could not be read.
    #[error("cannot read the forwarder's maps: {0}")]
    Map(#[from] MapError),
}

/// An attached forwarder. Dropping it, or the death of the process, ends it.
pub(crate) struct Forwarder {
    counts: Array<MapData, ForwarderCounters>,
    // Holds program and link.
    _ebpf: Ebpf,
}

/// Packets that a forwarder with [`Impairments::divert`] hands over.
pub(crate) struct Diverted(RingBuf<MapData>);

impl Forwarder {
    /// Forwards from one interface of this thread's network namespace to another from now on.
    ///
    /// # Errors
    ///
    /// See [`ImpairError`].
    pub(crate) fn attach(
        from: &str,
        impairments: &Impairments,
    ) -> Result<(Forwarder, Option<Diverted>), ImpairError> {
        if let Some(fault) = impairments.fault() {
            return Err(ImpairError::Illegal(fault));
        }
        let mut loader = EbpfLoader::new();
        loader.override_global("lm_impair", impairments, true);
        // Memory for what is not asked for is not taken.
        let diverts = impairments.divert != 0;
        loader.map_max_entries("lm_impair_ring", if diverts { RING_LEN } else { 4096 });
        if impairments.reorder == 0 {
            loader.map_max_entries("lm_impair_slots", 1);
        }
        let mut ebpf = loader.load(OBJECT).map_err(load_error)?;
        let counts = take(&mut ebpf, "lm_impair_counts")?;
        // Not taken where it is not used: a map that is closed before the program is loaded cannot be loaded.
        let diverted = match diverts {
            true => Some(Diverted(take(&mut ebpf, "lm_impair_ring")?)),
            false => None,
        };
        classifier(&mut ebpf)
            .and_then(|program| Ok(program.load()?))
            .map_err(load_error)?;
        // As a link: closing it detaches. The older attachment by netlink would outlive a killed process.
        let tcx = TcAttachOptions::TcxOrder(LinkOrder::default());
        classifier(&mut ebpf)
            .map_err(load_error)?
            .attach_with_options(from, TcAttachType::Ingress, tcx)
            .map_err(|source| match is_caused_by(&source, libc::EPERM) {
                true => ImpairError::NotPrivileged,
                false => ImpairError::Attach {
                    interface: from.to_owned(),
                    source,
                },
            })?;
        Ok((Forwarder { counts, _ebpf: ebpf }, diverted))
    }

    /// What it has done so far.
    ///
    /// # Errors
    ///
    /// When the kernel does not let the map be read.
    pub(crate) fn counters(&self) -> Result<ForwarderCounters, ImpairError> {
        Ok(self.counts.get(&0, 0)?)
    }
}

impl Diverted {
    /// Calls `each` with the oldest packet: when it came in, by CLOCK_MONOTONIC in nanoseconds, the queue that it came in on and shall leave on, and
    /// its bytes from the Ethernet header on. `false`: there is none.
    pub(crate) fn take(&mut self, each: impl FnOnce(u64, u32, &[u8])) -> bool {
        let Some(record) = self.0.next() else { return false };
        let (head, packet) = record.split_at(16);
        let word = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        let arrival_ns = u64::from_ne_bytes(head[..8].try_into().expect("8 bytes"));
        // The forwarder keeps no longer packet; its length is the kernel's, and checked by the slice all the same.
        each(arrival_ns, word(8), &packet[..word(12) as usize]);
        true
    }
}

impl AsFd for Diverted {
    /// Readable when a packet waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn classifier(ebpf: &mut Ebpf) -> Result<&mut SchedClassifier, EbpfError> {
    let program = ebpf.program_mut(PROGRAM).ok_or(ProgramError::NotLoaded)?;
    Ok(program.try_into()?)
}

fn take<M: TryFrom<aya::maps::Map, Error = MapError>>(ebpf: &mut Ebpf, name: &str) -> Result<M, ImpairError> {
    let map = ebpf.take_map(name).ok_or_else(|| MapError::InvalidName {
        name: name.to_owned(),
    })?;
    Ok(M::try_from(map)?)
}

fn load_error(error: EbpfError) -> ImpairError {
    match is_caused_by(&error, libc::EPERM) {
        true => ImpairError::NotPrivileged,
        false => ImpairError::Load(Box::new(error)),
    }
}

/// Whether the system's error within an error is this one.
pub fn is_caused_by(error: &(dyn Error + 'static), errno: i32) -> bool {
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    causes.any(|cause| {
        let system = cause.downcast_ref::<io::Error>();
        system.is_some_and(|error| error.raw_os_error() == Some(errno))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_those_asked_for() {
        let impairments = Impairments {
            seed: 7,
            loss: 10_000,
            duplicate: 500_000,
            corrupt: 1,
            reorder: 1_000_000,
            ..Impairments::default()
        };
        let fates: Vec<Fate> = (0..100_000).map(|number| impairments.fate(number)).collect();
        let share = |is: fn(&Fate) -> bool| fates.iter().filter(|fate| is(fate)).count();
        // Binomial, n = 100,000, p = 0.01: standard deviation 31.
        assert!((850..1150).contains(&share(|fate| fate.lost)));
        assert!(share(|fate| fate.corrupted) <= 3);
        assert_eq!(
            share(|fate| fate.reordered),
            fates.len() - share(|fate| fate.lost)
        );
        assert_eq!(
            share(|fate| fate.duplicated),
            0,
            "a held packet is not sent twice"
        );
    }

    #[test]
    fn bursts_have_their_length_and_the_share_stays() {
        let impairments = Impairments {
            seed: 1,
            loss: 20_000,
            loss_burst: 10,
            ..Impairments::default()
        };
        let lost: Vec<bool> = (0..200_000).map(|number| impairments.fate(number).lost).collect();
        assert!(
            lost.chunks(10)
                .all(|burst| burst.iter().all(|&lost| lost == burst[0]))
        );
        let share = lost.iter().filter(|&&lost| lost).count();
        assert!((3400..4600).contains(&share), "{share} of 4000");
    }

    #[test]
    fn another_seed_decides_otherwise() {
        let fates = |seed| {
            let impairments = Impairments {
                seed,
                loss: 100_000,
                ..Impairments::default()
            };
            (0..1000)
                .map(|number| impairments.fate(number).lost)
                .collect::<Vec<_>>()
        };
        assert_eq!(fates(1), fates(1));
        assert_ne!(fates(1), fates(2));
    }
}
