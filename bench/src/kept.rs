//! A NAPI instance that is left to whoever polls it: its interrupts are deferred as LM defers those of a queue on which a stream lands, so
//! that what LM is compared with has it, too.

use std::io;

use lm_cards::Interface;
use lm_dataplane::{Deferral, Instance, Napi};

/// An instance whose interrupts are deferred until this is dropped.
pub(crate) struct Kept(Instance);

impl Kept {
    /// The instance with this id (`SO_INCOMING_NAPI_ID`). Needs Linux 6.14 and `CAP_NET_ADMIN`.
    pub(crate) fn new(id: u32) -> io::Result<Kept> {
        let instance = Instance::new(id)?;
        instance.set(true)?;
        Ok(Kept(instance))
    }
}

/// Gives back what a program that has ended left deferred on an interface.
pub(crate) fn give_back(interface: &str) {
    // A kernel that knows no instances has deferred none.
    let ids = Interface::by_name(interface).map(|interface| Napi::ids_of(interface.index));
    for id in ids.into_iter().flatten().flatten() {
        // An instance may go with an XDP program meanwhile.
        let Ok(napi) = Napi::new(id) else { continue };
        if napi.deferral().is_ok_and(|deferral| deferral == Deferral::KEPT) {
            let _gone = napi.set(&napi.setting(Deferral::default()));
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // The instance may have gone with the XDP program for which it was made.
        let _gone = self.0.set(false);
    }
}
