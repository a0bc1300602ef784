//! What a device writes beside packets is found out before anything lands in zero-copy mode.

use lm_cards::{Obstacle, Probe};

use crate::completion::PeerId;
use crate::engine::Engine;
use crate::port::{ModeRequest, Port};

impl<P: Port> Engine<P> {
    /// Nothing may land on this device in zero-copy mode.
    pub(crate) fn refuse_device(&mut self, obstacle: &Obstacle) {
        self.footprint = None;
        let may_copy = self.config.mode == ModeRequest::Auto;
        match may_copy && self.land_in_copy_mode().is_ok() {
            true => tracing::warn!("long messages are received in copy mode: {obstacle}"),
            false => {
                tracing::warn!("no session in zero-copy mode: {obstacle}");
                self.unfit = true;
            }
        }
    }

    /// While it is not known what the device writes: makes a peer send a packet that shows it.
    #[cold]
    pub(crate) fn ask_for_footprint(&mut self, peer: PeerId) {
        let Some(probe) = &mut self.footprint else { return };
        if let Err(obstacle) = probe.ask(peer) {
            self.refuse_device(&obstacle);
        } else if self.peers.named(peer).is_some() {
            let now_ns = self.now_ns;
            self.ask_where(peer.index, now_ns);
        }
    }

    /// While it is not known what the device writes: looks at a packet that has just come.
    #[cold]
    pub(crate) fn look_at_footprint(&mut self, frame: u64, packet: (u64, u32)) {
        let found = (self.footprint.as_mut())
            .and_then(|probe| probe.look(frame, packet, |chunk| self.umem.copy_from(frame, chunk)));
        match found {
            // Some hundred have to come before a device is known to pad, and its sender waits for seconds only.
            None => {
                if let Some(peer) = self.footprint.as_ref().and_then(Probe::peer) {
                    self.ask_for_footprint(peer);
                }
            }
            Some(Ok(prefix)) => {
                self.fixed.caps.prefix_len = prefix;
                self.footprint = None;
            }
            Some(Err(obstacle)) => self.refuse_device(&obstacle),
        }
    }
}
