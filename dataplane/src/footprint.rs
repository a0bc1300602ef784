//! What a device writes beside packets is found out before anything lands in zero-copy mode.

use lm_cards::Probe;

use crate::bounds::PREFIX_LEN_MAX;
use crate::completion::PeerId;

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
