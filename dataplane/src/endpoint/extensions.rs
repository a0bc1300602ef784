//! What extensions register at an endpoint: shapers, flows, handlers of packet types, a source of landing memory.

use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use crate::completion::{LoanError, PeerId};
use crate::endpoint::Endpoint;
use crate::handlers::{Handler, HandlerError, HandlerId};
use crate::kernel::KernelNic;
use crate::message::LandingRegion;
use crate::placing::ZoneSource;
use crate::port::Port;
use crate::scheduler::{Flow, FlowError, FlowId, FlowSpec, Scope, Shaper};
use crate::waker::Waker;

/// The extension points of an endpoint ([`Endpoint::extensions`]).
#[derive(Debug)]
pub struct Extensions<'a, P: Port = KernelNic> {
    pub(crate) endpoint: &'a mut Endpoint<P>,
}

impl<P: Port> Extensions<'_, P> {
    /// Sets what decides how much of a class of packets, or of all, may leave, or takes it away: with [`RateLimit`](crate::RateLimit) so many
    /// bits per second of all sessions together. Control packets are never held back; the port's shaper counts them.
    pub fn shape(&mut self, scope: Scope, shaper: Option<Box<dyn Shaper>>) {
        self.endpoint.engine.sending.shape(scope, shaper);
    }

    /// Registers packets that others make and that leave before messages, control packets aside. Its frames and descriptors are its own.
    ///
    /// # Errors
    /// See [`FlowError`].
    pub fn add_flow(&mut self, spec: &FlowSpec, flow: Box<dyn Flow>) -> Result<FlowId, FlowError> {
        self.endpoint.engine.add_flow(spec, flow)
    }

    /// Has a flow's packets go to another peer, or to the first one. Those that are on their way arrive where they were sent.
    ///
    /// # Errors
    /// [`FlowError::UnknownPeer`], [`FlowError::UnknownFlow`].
    pub fn aim_flow(&mut self, id: FlowId, to: PeerId) -> Result<(), FlowError> {
        self.endpoint.engine.aim_flow(id, to)
    }

    /// What ends this endpoint's waits from another thread: by then a flow has something to send perhaps.
    ///
    /// # Errors
    /// eventfd(2)'s, the first time.
    pub fn waker(&mut self) -> io::Result<Arc<Waker>> {
        if let Some(waker) = &self.endpoint.waker {
            return Ok(Arc::clone(waker));
        }
        let waker = Arc::new(Waker::new()?);
        self.endpoint.engine.port.wake_by(Arc::clone(&waker));
        self.endpoint.waker = Some(Arc::clone(&waker));
        Ok(waker)
    }

    /// Takes a flow out: it is not asked again and hears nothing of what is under way. `None`: there is none of that name.
    pub fn remove_flow(&mut self, id: FlowId) -> Option<Box<dyn Flow>> {
        self.endpoint.engine.remove_flow(id)
    }

    /// Registers who takes packets of these types, of [`EXTENSION_TYPES`](lm_protocol::wire::lm::EXTENSION_TYPES). Without, they are counted
    /// and not answered.
    ///
    /// # Errors
    /// See [`HandlerError`].
    pub fn add_handler(
        &mut self,
        types: RangeInclusive<u8>,
        handler: Box<dyn Handler>,
    ) -> Result<HandlerId, HandlerError> {
        self.endpoint.engine.small.handlers.add(types, handler)
    }

    /// Reserves so many of the frames that small packets come into for what a handler keeps ([`Arrived::keep`](crate::Arrived::keep)), instead of those before: messages
    /// leave them, however many the application holds. The handler keeps no more than these of itself.
    ///
    /// # Errors
    /// [`HandlerError::NoFrames`]: half of them, at most, are reserved. [`HandlerError::Unknown`].
    pub fn reserve_frames(&mut self, id: HandlerId, frames: u32) -> Result<(), HandlerError> {
        self.endpoint.engine.small.reserve(id, frames)
    }

    /// Takes a handler out. `None`: there is none of that name.
    pub fn remove_handler(&mut self, id: HandlerId) -> Option<Box<dyn Handler>> {
        self.endpoint.engine.small.remove_handler(id)
    }

    /// Registers who decides where messages of many fragments land, instead of who did before, or takes that away. Without, they land in the
    /// arena. Of messages that are announced already and have no memory yet it is asked at once.
    pub fn place_by(&mut self, source: Option<Box<dyn ZoneSource>>) {
        self.endpoint.engine.place_by(source);
    }

    /// A region for a message of up to `len` bytes, taken before the message comes, for [`Placement::Land`](crate::Placement::Land). Landing memory must have
    /// been taken at the start ([`MemoryConfig::landing_len`](crate::MemoryConfig::landing_len)).
    ///
    /// # Errors
    /// [`LoanError::WouldBlock`] when no memory is free now.
    pub fn landing_region(&mut self, len: u64) -> Result<LandingRegion, LoanError> {
        self.endpoint.engine.landing_region(len)
    }

    /// How long until a flow's packet or a handler is due, or a rate limit ([`ConnectOptions::rate`](crate::ConnectOptions::rate)) or another shaper lets the next packet go, where one holds a packet back:
    /// [`wait`](Endpoint::wait) waits no longer, and neither should an application that waits on the descriptor.
    pub fn until_departure(&mut self) -> Option<Duration> {
        let departure_ns = self.endpoint.engine.next_departure_ns()?;
        Some(Duration::from_nanos(
            departure_ns.saturating_sub(self.endpoint.now_ns()),
        ))
    }
}
