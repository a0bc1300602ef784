//! Receiving: step 7. The channel's packets are taken in their order, each for the oldest unused entry.
//!
//! ```text
//!  RX ring ──▶ receive ─┬─▶ receive_run   fragments that lie where they belong, one after the other        (run.rs)
//!                       ├─▶ pair          any other, with the log's entry of the same position          (pairing.rs)
//!                       └─▶ take_unread   where there is no log ([`Caps::witness`](crate::port::Caps))   (zero_copy.rs)
//! ```

use super::aims::Aim;
use super::entries::Entries;
use super::inbound::Inbound;
use super::sessions::Sessions;
use super::violation::Violation;
use super::zones::Memory;
use crate::memory::Umem;
use crate::port::RxQueue;

/// What a burst of descriptors brought.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Burst {
    pub(crate) packets: u32,
    pub(crate) window_ended: bool,
}

/// A packet of the RX ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) start: u64,
    pub(super) len: u32,
    /// Descriptors.
    pub(super) frames: u32,
}

impl Packet {
    /// The one that begins `at` places behind the released descriptors, of which there are `available`. `None`: there are more of it.
    #[inline]
    fn at(queue: &impl RxQueue, at: u32, available: u32) -> Option<Packet> {
        let descriptor = queue.packet(at);
        let mut packet = Packet {
            start: descriptor.start(),
            len: descriptor.len,
            frames: 1,
        };
        (!descriptor.continues() || packet.join(queue, at, available)).then_some(packet)
    }

    /// It goes on: adds the descriptors behind the first, which is `at` places behind the released ones, as far as each begins where
    /// the one before it ends. What lies elsewhere does not count, so that the length is not what the log says. `false`: not all of them
    /// are among the `available` ones.
    #[cold]
    fn join(&mut self, queue: &impl RxQueue, at: u32, available: u32) -> bool {
        while at + self.frames < available {
            let piece = queue.packet(at + self.frames);
            self.frames += 1;
            if piece.start() == self.start + u64::from(self.len) {
                self.len += piece.len;
            }
            if !piece.continues() {
                return true;
            }
        }
        false
    }
}

impl Entries {
    /// What the next packet's entry is for. One that is not the next one's stays: what it was posted for is posted again.
    #[inline]
    fn aim_of(&mut self, packet: &Packet) -> Result<Aim, Violation> {
        let front = self.aims.front().ok_or(Violation::Unposted)?;
        if packet.start != front.start || packet.frames != u32::from(front.frames) {
            return Err(Violation::Address);
        }
        self.next_aim().ok_or(Violation::Unposted)
    }
}

impl Sessions {
    /// Takes the packets of up to `max` descriptors and places each.
    ///
    /// # Errors
    /// Something contradicts I3: nothing of what the log vouches for may be shown after that. Without a log: descriptors do not come in the
    /// order of the entries, and which packet is in which entry is not known from here on.
    pub(crate) fn receive(
        &mut self,
        queue: &mut impl RxQueue,
        (umem, memory): (&Umem, &mut Memory<'_>),
        max: u32,
        now_ns: u64,
    ) -> Result<Burst, Violation> {
        let available = queue.available(max);
        let mut burst = Burst::default();
        if available == 0 {
            return Ok(burst);
        }
        let has_witness = self.entries.caps.witness;
        let mut result = Ok(());
        let mut taken = 0;
        while taken < available {
            if has_witness {
                let run = self.receive_run(queue, umem, taken..available, now_ns);
                taken += run;
                burst.packets += run;
                if taken == available {
                    break;
                }
            }
            let Some(packet) = Packet::at(queue, taken, available) else {
                // The rest of it is beyond `max`.
                break;
            };
            taken += packet.frames;
            result = self.receive_one(queue, &packet, (umem, memory), &mut burst, now_ns);
            if result.is_err() {
                // Those behind it are not looked at; the channel will be built anew.
                self.arrivals.discarded += 1;
                taken = available;
                break;
            }
            burst.packets += 1;
        }
        self.settle_displaced(umem);
        queue.release(taken);
        self.entries.landed_ns = now_ns;
        // What the log vouched for is not shown after an error. What digests prove is.
        if result.is_ok() || !has_witness {
            for row in self.taken() {
                let inbound = self.at_mut(row);
                if let Some(inbound) = inbound.filter(|inbound| inbound.places.is_troubled()) {
                    inbound.care().settle_trouble(umem);
                }
            }
        }
        self.arrivals.landed += u64::from(burst.packets);
        result.map(|()| burst)
    }

    #[inline]
    fn receive_one(
        &mut self,
        queue: &impl RxQueue,
        packet: &Packet,
        (umem, memory): (&Umem, &mut Memory<'_>),
        burst: &mut Burst,
        now_ns: u64,
    ) -> Result<(), Violation> {
        let position = self.entries.received;
        self.entries.received += 1;
        self.entries.frames_out = self.entries.frames_out.saturating_sub(packet.frames);
        let aim = self.entries.aim_of(packet)?;
        if self.entries.caps.witness {
            let entry = queue.entry(position);
            if entry.sequence != position as u16 {
                return Err(Violation::Sequence);
            }
            let paired = self.pair(&aim, packet, &entry, (umem, memory), burst, now_ns);
            self.free_spare(&aim);
            return paired;
        }
        self.entries.note_foreign(packet.start, packet.len);
        self.take_unread(&aim, packet, (umem, memory), now_ns);
        self.free_spare(&aim);
        Ok(())
    }

    /// The entry was used: what came there is copied before the next ones are posted.
    #[inline]
    fn free_spare(&mut self, aim: &Aim) {
        if aim.spare {
            self.entries.put_spare(aim.start);
        }
    }

    /// The session that an entry was posted for, and where its message is there; `None`: settled.
    #[inline]
    pub(super) fn owner(&mut self, aim: &Aim) -> Option<(&mut Inbound, usize)> {
        let inbound = self.rows[usize::from(aim.owner.row)].as_deref_mut()?;
        let at = (inbound.order.position_of(aim.number)).filter(|_| inbound.serial == aim.owner.serial)?;
        Some((inbound, at))
    }

    /// Positions that were left out come up.
    #[inline]
    pub(super) fn pass_skipped(&mut self, umem: &Umem) {
        while let Some(&aim) = self.entries.aims.front()
            && aim.start == Aim::SKIPPED
        {
            self.entries.aims.pop_front();
            if let Some((owner, at)) = self.owner(&aim) {
                for position in aim.position..aim.until {
                    owner.care().passed(at, position, None, umem);
                }
            }
        }
    }
}
