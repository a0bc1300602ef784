//! What an endpoint is, has, and was told.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use lm_protocol::time::Time;

use crate::completion::PeerId;
use crate::endpoint::Endpoint;
use crate::kernel::KernelNic;
use crate::landing_memory::LandingMemory;
use crate::over::Device;
use crate::port::{EffectiveMode, Port};

/// What an endpoint is and has ([`Endpoint::status`]).
#[derive(Debug)]
pub struct Status<'a, P: Port = KernelNic> {
    pub(crate) endpoint: &'a Endpoint<P>,
}

impl<'a, P: Port> Status<'a, P> {
    /// What time it is, as flows, handlers and shapers are told it.
    pub fn now(&self) -> Time {
        Time::from_nanos(self.endpoint.now_ns())
    }

    /// The network interface.
    pub fn device(&self) -> &'a Device {
        &self.endpoint.device
    }

    /// Where the admission daemon listens, if the endpoint was opened by one.
    pub fn daemon(&self) -> Option<PathBuf> {
        self.endpoint.engine.admission.stewarded.daemon_path()
    }

    /// The mode in effect, as the kernel reports it.
    pub fn mode(&self) -> EffectiveMode {
        self.endpoint.engine.port.effective_mode()
    }

    /// Which peers something waits of: a message that came whole or stays incomplete, one that has begun, the end of one that was sent. Each is
    /// named once, the longest waiting message's first, until [`PeerHandle`](crate::PeerHandle) was asked for all of it. `peers` is emptied first.
    ///
    /// ```no_run
    /// # fn f(endpoint: &mut lm_dataplane::Endpoint, has_room: impl Fn(lm_dataplane::PeerId) -> bool) {
    /// let mut peers = Vec::new();
    /// loop {
    ///     endpoint.poll();
    ///     endpoint.status().waiting(&mut peers);
    ///     for &peer in peers.iter().filter(|peer| has_room(**peer)) {
    ///         while let Ok(Some(message)) = endpoint.peer(peer).try_recv() {
    ///             println!("{} bytes from {peer:?}", message.len());
    ///         }
    ///     }
    /// }
    /// # }
    /// ```
    pub fn waiting(&self, peers: &mut Vec<PeerId>) {
        peers.clear();
        self.endpoint.engine.waiting(peers);
    }

    /// Things the user should know: a fallback that was taken, an MTU that was lowered.
    pub fn warnings(&self) -> &'a [String] {
        &self.endpoint.warnings
    }

    /// What the gate decided so far: name of the verdict and number of packets.
    pub fn gate_counters(&self) -> Vec<(&'static str, u64)> {
        self.endpoint.engine.port.verdicts()
    }

    /// How much landing memory there is, and may be.
    pub fn landing_memory(&self) -> LandingMemory {
        self.endpoint.engine.landing_memory()
    }

    /// Position of the landing arena in the UMEM, in bytes: every message of many fragments lies in it.
    pub fn landing_range(&self) -> Range<u64> {
        let len = self
            .endpoint
            .engine
            .landing
            .as_ref()
            .map_or(0, |landing| landing.arena.len());
        self.endpoint.landing_start..self.endpoint.landing_start + len
    }

    /// The file in which its memory lies, where it is lent to other processes ([`MemoryConfig::lend`](crate::MemoryConfig::lend)): who maps it writes a loaned
    /// region at its [`umem_ranges`](crate::SendRegion::umem_ranges) and reads a message at its [`umem_offset`](crate::Message::umem_offset), which
    /// this process holds meanwhile. Who has it can read and write all that this endpoint sends and receives.
    pub fn memory_file(&self) -> Option<BorrowedFd<'a>> {
        self.endpoint.engine.memory.umem().mapping().file()
    }

    /// Why the capture ended early, if it did.
    pub fn capture_error(&self) -> Option<&'a std::io::Error> {
        self.endpoint.engine.memory.capture_error()
    }
}
