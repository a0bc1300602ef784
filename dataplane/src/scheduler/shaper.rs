//! Shapers: how many packets of a flow, of a class or of all that leave a port may leave now. Between steps 3 and 4 of the data's path.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use lm_protocol::rate::TokenBucket;
use lm_protocol::time::Time;

use super::{CLASSES, Class};

/// What a [`Shaper`] hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Signal {
    /// Packets left, or not: what [`Shaper::take`] had allowed and did not leave is given back.
    Left {
        /// Their class.
        class: Class,
        /// How many had been allowed: none of control packets, which are not asked for and are a debt.
        allowed: u32,
        /// How many left.
        packets: u32,
        /// Length of their Ethernet frames together.
        bytes: u64,
    },
    /// Packets were lost on their way: their receiver asks for them again.
    Lost {
        /// Their class.
        class: Class,
        /// How many.
        packets: u32,
    },
}

/// Says how many packets may leave now: of a flow, of a class, or of all that leave a port.
///
/// ```
/// use std::num::NonZeroU64;
/// use lm_dataplane::{Class, RateLimit, Shaper, Signal};
/// use lm_protocol::time::Time;
///
/// // 12 Mbit/s in packets of 1500 bytes: one each millisecond, four at once.
/// let mut limit = RateLimit::new(NonZeroU64::new(12_000_000).unwrap(), 1500, Time::ZERO);
/// assert_eq!(limit.take(Class::Bulk, 9, Time::ZERO), 4);
/// limit.signal(Signal::Left { class: Class::Bulk, allowed: 4, packets: 4, bytes: 6000 });
/// assert_eq!(limit.take(Class::Bulk, 9, Time::ZERO), 0);
/// assert_eq!(limit.next(Class::Bulk), Some(Time::from_millis(1)));
/// ```
pub trait Shaper: fmt::Debug + Send {
    /// Of `packets` full packets of a class that would leave now, how many may; small messages are of any length.
    /// [`Signal::Left`] says how many did.
    fn take(&mut self, class: Class, packets: u32, now: Time) -> u32;

    /// What has happened.
    fn signal(&mut self, signal: Signal);

    /// When the next packet of a class may leave; `None` if it might have at the last look.
    fn next(&self, class: Class) -> Option<Time>;
}

/// Fewest and most packets of a burst. The most is what a window has, and no more than what veth's ring takes.
const RATE_BURST_PACKETS: (u32, u32) = (4, 256);

/// A burst under a rate limit: full packets of so much time, so that neither the sleep of an endpoint that waits nor a short
/// pause of its thread costs throughput.
const RATE_BURST: Duration = Duration::from_millis(1);

/// So many bits of Ethernet frames per second, with bursts of a millisecond: what [`ConnectOptions::rate`](crate::ConnectOptions::rate)
/// asks for, and a [`Shaper`] of classes and ports.
#[derive(Clone, Debug)]
pub struct RateLimit {
    bucket: TokenBucket,
    full_len_bytes: u32,
    /// When it was last asked.
    looked: Time,
}

impl RateLimit {
    /// `full_len_bytes`: length of the longest packet, from its Ethernet header on.
    pub fn new(rate_bits_per_second: NonZeroU64, full_len_bytes: u16, now: Time) -> RateLimit {
        let full_len_bytes = u32::from(full_len_bytes);
        let burst = burst_packets(rate_bits_per_second, full_len_bytes);
        RateLimit {
            bucket: TokenBucket::new(rate_bits_per_second, burst, full_len_bytes, now),
            full_len_bytes,
            looked: now,
        }
    }

    /// Length in bytes of what has to be paid before a packet leaves. Fragments wait for what a full packet costs, and would starve what
    /// comes before them if that did the same: it may leave on the last token, and the next fragment waits for longer.
    fn price(&self, class: Class) -> u32 {
        match class {
            Class::RealTime | Class::Small => 1,
            Class::Control | Class::Bulk => self.full_len_bytes,
        }
    }
}

impl Shaper for RateLimit {
    #[inline]
    fn take(&mut self, class: Class, packets: u32, now: Time) -> u32 {
        self.looked = now;
        self.bucket.packets(self.price(class), now).min(packets)
    }

    #[inline]
    fn signal(&mut self, signal: Signal) {
        if let Signal::Left { bytes, .. } = signal {
            self.bucket.spend(bytes);
        }
    }

    fn next(&self, class: Class) -> Option<Time> {
        let next = self.bucket.next(self.price(class));
        (next > self.looked).then_some(next)
    }
}

/// How many full packets may leave at once at this rate.
fn burst_packets(rate: NonZeroU64, full_len_bytes: u32) -> u32 {
    let bits = u128::from(rate.get()) * RATE_BURST.as_nanos() / 1_000_000_000;
    let packets = bits / (u128::from(full_len_bytes.max(1)) * 8);
    let (least, most) = RATE_BURST_PACKETS;
    u32::try_from(packets).unwrap_or(u32::MAX).clamp(least, most)
}

/// What a [`Shaper`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All packets of a class.
    Class(Class),
    /// All packets.
    Port,
}

/// A class that waits for so long, with nothing of it leaving, has no share.
const STARVED_AFTER: Duration = Duration::from_millis(10);

/// The shapers of classes and of the port, as far as there are some.
#[derive(Debug, Default)]
pub(crate) struct Shaping(Option<Box<Shapers>>);

#[derive(Debug, Default)]
struct Shapers {
    classes: [Option<Box<dyn Shaper>>; CLASSES],
    port: Option<Box<dyn Shaper>>,
    /// What the class's shaper allowed of the packets that are leaving.
    allowed: u32,
    looked: Time,
    /// Since when each class waits, and when it last had something leave.
    waits_since: [Option<Time>; CLASSES],
    left_at: [Option<Time>; CLASSES],
    starved: u64,
}

impl Shaping {
    /// Sets a shaper, or takes it away.
    pub(super) fn set(&mut self, scope: Scope, shaper: Option<Box<dyn Shaper>>) {
        let shapers = self.0.get_or_insert_default();
        match scope {
            Scope::Class(class) => shapers.classes[class as usize] = shaper,
            Scope::Port => shapers.port = shaper,
        }
    }

    /// Whether there are any.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        self.0.is_some()
    }

    /// Of `packets` of a class that would leave now, how many may. What did has to be [told](Shaping::left) then.
    #[inline]
    pub(crate) fn take(&mut self, class: Class, packets: u32, now: Time) -> u32 {
        match &mut self.0 {
            None => packets,
            Some(shapers) => shapers.take(class, packets, now),
        }
    }

    /// Of the packets that were allowed so many left.
    #[inline]
    pub(crate) fn left(&mut self, class: Class, allowed: u32, packets: u32, bytes: u64) {
        if let Some(shapers) = &mut self.0 {
            shapers.left(class, allowed, packets, bytes);
        }
    }

    /// Packets of a class were lost on their way.
    pub(crate) fn lost(&mut self, class: Class, packets: u32) {
        let Some(shapers) = &mut self.0 else { return };
        let Shapers { classes, port, .. } = &mut **shapers;
        for shaper in classes[class as usize].iter_mut().chain(port) {
            shaper.signal(Signal::Lost { class, packets });
        }
    }

    /// When the next packet of a class may leave; `None` if it might have at the last look.
    pub(crate) fn next(&self, class: Class) -> Option<Time> {
        let shapers = self.0.as_ref()?;
        shapers.next(class)
    }

    /// How often a class had no share since this was last asked.
    #[inline]
    pub(crate) fn take_starved(&mut self) -> u64 {
        self.0
            .as_mut()
            .map_or(0, |shapers| std::mem::take(&mut shapers.starved))
    }
}

impl Shapers {
    fn take(&mut self, class: Class, packets: u32, now: Time) -> u32 {
        self.looked = now;
        let of_class = self.classes[class as usize].as_mut();
        self.allowed = of_class.map_or(packets, |shaper| shaper.take(class, packets, now));
        let of_port = self.port.as_mut();
        let allowed = match self.allowed {
            0 => 0,
            most => of_port.map_or(most, |shaper| shaper.take(class, most, now)),
        };
        if allowed == 0 {
            self.give_back(class);
            self.refused(class);
        }
        allowed
    }

    /// The port does not allow what the class's shaper did.
    fn give_back(&mut self, class: Class) {
        if let Some(shaper) = self.classes[class as usize].as_mut().filter(|_| self.allowed > 0) {
            shaper.signal(Signal::Left {
                class,
                allowed: self.allowed,
                packets: 0,
                bytes: 0,
            });
        }
    }

    fn left(&mut self, class: Class, allowed: u32, packets: u32, bytes: u64) {
        let told = |allowed| Signal::Left {
            class,
            allowed,
            packets,
            bytes,
        };
        if let Some(shaper) = &mut self.classes[class as usize] {
            shaper.signal(told(if allowed == 0 { 0 } else { self.allowed }));
        }
        if let Some(shaper) = &mut self.port {
            shaper.signal(told(allowed));
        }
        if packets > 0 {
            self.waits_since[class as usize] = None;
            self.left_at[class as usize] = Some(self.looked);
        }
    }

    /// A class waits. If classes before it had all there was since it began to, it has no share: that is counted, and told once.
    fn refused(&mut self, class: Class) {
        let first = self.waits_since[class as usize].is_none();
        let since = *self.waits_since[class as usize].get_or_insert(self.looked);
        if first || self.looked.since(since) < STARVED_AFTER {
            return;
        }
        let before = Class::ALL.into_iter().filter(|&other| other < class);
        let mut had_all = before.filter(|&other| {
            let has_limit = self.classes[other as usize].is_some();
            !has_limit && self.left_at[other as usize].is_some_and(|at| at >= since)
        });
        let Some(other) = had_all.find(|other| *other != Class::Control) else {
            return;
        };
        self.starved += 1;
        self.waits_since[class as usize] = Some(self.looked);
        tracing::warn!(
            "nothing of the class {class:?} has left for {STARVED_AFTER:?}: {other:?} takes all that the port may \
             send; give that class a shaper of its own"
        );
    }

    fn next(&self, class: Class) -> Option<Time> {
        let of_class = self.classes[class as usize].as_ref();
        let of_port = self.port.as_ref();
        let nexts = [of_class, of_port].map(|shaper| shaper.and_then(|shaper| shaper.next(class)));
        nexts.into_iter().flatten().max()
    }
}
