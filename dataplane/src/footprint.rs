//! What a device writes beside packets is found out before anything lands in zero-copy mode.

use lm_cards::{Obstacle, Probe};

use crate::bounds::PREFIX_LEN_MAX;
use crate::completion::PeerId;
use crate::engine::Engine;
use crate::port::Port;

/// What is known of what a device writes beside packets.
#[derive(Debug)]
pub(crate) enum Footprint {
    /// What matters. In copy mode that is nothing.
    Known,
    /// It is being found out.
    Sought(Box<Probe<PeerId>>),
    /// Nothing may land in zero-copy mode, which was demanded.
    Unfit,
}

impl Footprint {
    /// To be found out on this interface.
    pub(crate) fn unknown(interface: &str, chunk_len: u32, kept_frames: u32) -> Footprint {
        let probe = Probe::new(interface, chunk_len, kept_frames, PREFIX_LEN_MAX);
        Footprint::Sought(Box::new(probe))
    }

    pub(crate) fn is_sought(&self) -> bool {
        matches!(self, Footprint::Sought(_))
    }

    pub(crate) fn is_unfit(&self) -> bool {
        matches!(self, Footprint::Unfit)
    }

    /// What finds it out, while it is not known.
    pub(crate) fn sought(&mut self) -> Option<&mut Probe<PeerId>> {
        match self {
            Footprint::Sought(probe) => Some(probe),
            Footprint::Known | Footprint::Unfit => None,
        }
    }
}

impl<P: Port> Engine<P> {
    /// What finds out what the device writes, while it is not known.
    fn footprint_probe(&mut self) -> Option<&mut Probe<PeerId>> {
        self.landing.as_mut()?.footprint.sought()
    }

    fn footprint_is(&mut self, footprint: Footprint) {
        if let Some(landing) = &mut self.landing {
            landing.footprint = footprint;
        }
    }

    /// Nothing may land on this device in zero-copy mode.
    pub(crate) fn refuse_device(&mut self, obstacle: &Obstacle) {
        self.footprint_is(Footprint::Known);
        let may_copy = self.fixed.receives.may_copy;
        match may_copy && self.land_in_copy_mode().is_ok() {
            true => tracing::warn!("long messages are received in copy mode: {obstacle}"),
            false => {
                tracing::warn!("no session in zero-copy mode: {obstacle}");
                self.footprint_is(Footprint::Unfit);
            }
        }
    }

    /// While it is not known what the device writes: makes a peer send a packet that shows it.
    #[cold]
    pub(crate) fn ask_for_footprint(&mut self, peer: PeerId) {
        let Some(probe) = self.footprint_probe() else {
            return;
        };
        if let Err(obstacle) = probe.ask(peer) {
            self.refuse_device(&obstacle);
        } else if self.peers.named(peer).is_some() {
            let now_ns = self.looks.now_ns();
            self.ask_where(peer.index, now_ns);
        }
    }

    /// While it is not known what the device writes: looks at a packet that has just come.
    #[cold]
    pub(crate) fn look_at_footprint(&mut self, frame: u64, packet: (u64, u32)) {
        let umem = self.memory.umem();
        let probe = (self.landing.as_mut()).and_then(|landing| landing.footprint.sought());
        let found = probe.and_then(|probe| probe.look(frame, packet, |chunk| umem.copy_from(frame, chunk)));
        match found {
            // Some hundred have to come before a device is known to pad, and its sender waits for seconds only.
            None => {
                if let Some(peer) = self.footprint_probe().and_then(|probe| probe.peer()) {
                    self.ask_for_footprint(peer);
                }
            }
            Some(Ok(prefix)) => {
                self.fixed.caps.prefix_len = prefix;
                self.footprint_is(Footprint::Known);
            }
            Some(Err(obstacle)) => self.refuse_device(&obstacle),
        }
    }
}
