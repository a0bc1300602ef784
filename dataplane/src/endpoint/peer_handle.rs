//! What an endpoint knows of one peer, and the session with it.

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::completion::{Completion, LoanError, PeerId, RecvError};
use crate::connect::{ConnectError, ConnectOptions};
use crate::endpoint::Endpoint;
use crate::incoming::Incoming;
use crate::kernel::KernelNic;
use crate::message::Message;
use crate::port::Port;
use crate::writer::MessageWriter;

/// A peer of an endpoint ([`Endpoint::peer`]), and the session that the endpoint sends to it in.
#[derive(Debug)]
pub struct PeerHandle<'a, P: Port = KernelNic> {
    pub(crate) endpoint: &'a mut Endpoint<P>,
    pub(crate) id: PeerId,
}

impl<P: Port> PeerHandle<'_, P> {
    /// The peer's address and data port.
    pub fn address(&mut self) -> Option<SocketAddrV4> {
        self.endpoint.engine.peers.named(self.id).map(|peer| peer.data)
    }

    /// Whether the peer knows this endpoint, as far as is known: one of the two has proved its address to the other. From strangers an endpoint
    /// takes small messages and requests for sessions alone.
    pub fn knows_us(&mut self) -> bool {
        let peer = self.endpoint.engine.peers.named(self.id);
        peer.is_some_and(|peer| peer.incarnation.is_some() || peer.proved.1 > 0)
    }

    /// What packets of flows to this peer show in the upper 48 bits of their keys, for it takes them for ours by that
    /// ([`Arrived::is_proved`](crate::Arrived::is_proved)): it changes when the peer asks for another proof, or is another. `None`: there is no such
    /// peer.
    pub fn flow_key(&mut self) -> Option<Arc<AtomicU64>> {
        Some(Arc::clone(&self.endpoint.engine.peers.named(self.id)?.shown))
    }

    /// Whether messages to this peer land there, as far as it said; else they take the one-copy path until there is a place for them. `None`
    /// without a session.
    pub fn lands(&mut self) -> Option<bool> {
        let outbound = self.endpoint.engine.peers.named(self.id)?.outbound.as_ref()?;
        Some(outbound.lands)
    }

    /// The UDP source port of the fragments that go to this peer: our data port, or the one that its receiver asked for so that its
    /// network card brings them to the landing queue. `None` without a session.
    pub fn landing_port(&mut self) -> Option<u16> {
        let local = self.endpoint.local().port();
        let outbound = self.endpoint.engine.peers.named(self.id)?.outbound.as_ref()?;
        Some(outbound.terms.landing_port.map_or(local, |port| port.get()))
    }

    /// The longest message that can be sent to this peer now, in bytes; one fragment without a session.
    pub fn max_message_len(&mut self) -> u64 {
        let eager = self.endpoint.engine.eager_max_len();
        let outbound = self
            .endpoint
            .engine
            .peers
            .named(self.id)
            .and_then(|peer| peer.outbound.as_ref());
        outbound.map_or(eager, |outbound| outbound.terms.max_message_len)
    }

    /// Asks a known peer for a landing session, for example one whose message was just received. An existing
    /// session with it ends first.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn open_session(&mut self, options: &ConnectOptions) -> Result<(), ConnectError> {
        self.request_session(options)?;
        loop {
            if let Some(outcome) = self.session_outcome() {
                return outcome;
            }
            let now_ns = self.endpoint.now_ns();
            self.endpoint.engine.drive_admission(now_ns);
            // Nothing is hurried here, and the peer may share our core.
            let _ = self.endpoint.engine.port.wait(Duration::from_millis(1));
        }
    }

    /// As [`open_session`](PeerHandle::open_session), without waiting: [`session_outcome`](PeerHandle::session_outcome) says what came of it.
    ///
    /// # Errors
    /// [`ConnectError::UnknownPeer`].
    pub fn request_session(&mut self, options: &ConnectOptions) -> Result<(), ConnectError> {
        let now_ns = self.endpoint.now_ns();
        self.endpoint
            .engine
            .peers
            .named(self.id)
            .ok_or(ConnectError::UnknownPeer)?;
        options.check(self.endpoint.engine.fixed.checksum)?;
        self.endpoint.engine.end_session(self.id.index, now_ns);
        self.endpoint.engine.apply(self.id.index, options, now_ns);
        Ok(())
    }

    /// Polls once; what came of the session that was requested with a peer. `None`: nothing yet. Said once.
    pub fn session_outcome(&mut self) -> Option<Result<(), ConnectError>> {
        self.endpoint.poll();
        let now_ns = self.endpoint.now_ns();
        self.endpoint.engine.application_outcome(self.id.index, now_ns)
    }

    /// Ends the landing session with a peer. Messages not confirmed end as [`crate::Outcome::SessionEnded`].
    pub fn end_session(&mut self) {
        let now_ns = self.endpoint.now_ns();
        if self.endpoint.engine.peers.named(self.id).is_some() {
            self.endpoint.engine.end_session(self.id.index, now_ns);
        }
    }

    /// Begins a message of `len` bytes to the peer that is sent while it is written ([`MessageWriter`]). Until it is settled the endpoint looks for
    /// what is released, and does not sleep for long.
    ///
    /// # Errors
    /// [`LoanError::WouldBlock`] when no memory is free now, or too many messages are under way: poll and try again. [`LoanError::Empty`] and
    /// [`LoanError::Datagram`]: not such a message.
    pub fn begin(&mut self, len: u64, tag: u64) -> Result<MessageWriter, LoanError> {
        let now_ns = self.endpoint.now_ns();
        match self.endpoint.engine.begin(self.id, len, tag, now_ns) {
            Err(LoanError::WouldBlock) => {
                self.endpoint.poll();
                self.endpoint.engine.begin(self.id, len, tag, now_ns)
            }
            result => result,
        }
    }

    /// From now on messages of many fragments from this peer are told of while they arrive ([`Endpoint::try_incoming`]): their windows may be read
    /// as soon as each is final. They come whole by [`try_recv`](Endpoint::try_recv) all the same. `false`: there is no such peer, or nothing
    /// lands at this endpoint.
    ///
    /// What is shown is never moved, so repairs that would move it build the landing channel anew instead. Each message takes memory for what is
    /// known of its windows, some 100 bytes for each, as long as its [`Incoming`](crate::Incoming) is held.
    pub fn watch(&mut self) -> bool {
        self.endpoint.engine.watch(self.id)
    }

    /// The next message of this peer's that has arrived whole. Does not poll, and leaves the messages of others where they are.
    ///
    /// # Errors
    /// [`RecvError::Incomplete`] reports a message of this peer's that stays incomplete.
    pub fn try_recv(&mut self) -> Result<Option<Message>, RecvError> {
        self.endpoint.engine.told.next_message_of(self.id)
    }

    /// [`Endpoint::try_incoming`] of this peer's messages alone.
    pub fn try_incoming(&mut self) -> Option<Incoming> {
        self.endpoint.engine.next_incoming_of(self.id)
    }

    /// [`Endpoint::try_completion`] of the messages to this peer alone.
    pub fn try_completion(&mut self) -> Option<Completion> {
        self.endpoint.engine.told.next_completion_of(self.id)
    }

    /// Asks again where the peer's message lands for which the source said [`Placement::Later`](crate::Placement::Later). `false`: no
    /// message of that number waits.
    pub fn retry(&mut self, number: u32) -> bool {
        self.endpoint.engine.retry(self.id, number)
    }

    /// Takes the memory of a peer's message back that is under way: nothing more is posted for it, and its sender hears that it was declined
    /// ([`RETRACTED`](crate::RETRACTED)). A source's region comes back by [`ZoneSource::settled`](crate::ZoneSource::settled) when nothing that is posted covers it, and
    /// the messages before it in its session are settled. `false`: no message of that number is under way.
    pub fn retract(&mut self, number: u32) -> bool {
        self.endpoint.engine.retract(self.id, number)
    }
}
