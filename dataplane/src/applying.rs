//! Requests for sessions, from the first asking to the answer, and the sessions that came of them, as they are known to whoever asked for us:
//! our own node or the daemon.

use std::net::SocketAddrV4;

use lm_protocol::admission::{Decision, Outcome};
use lm_protocol::control::{Grant, RejectReason, Request};

use crate::connect::{ConnectError, ConnectOptions};
use crate::daemon::DaemonError;

/// A request that cannot be made now is made again after this time.
const ASK_AGAIN_NS: u64 = 50_000_000;
/// The daemon may say so much later than the deadline that a request is over.
const DAEMON_PATIENCE_NS: u64 = 2_000_000_000;

/// A request for a session, on its way.
#[derive(Debug)]
struct Applying {
    peer: u16,
    /// The address that is asked.
    to: SocketAddrV4,
    options: ConnectOptions,
    request: Request,
    deadline_ns: u64,
    /// Its number, while our own node or the daemon asks for us.
    ticket: Option<u32>,
    /// When it is asked for again, while nobody does.
    again_ns: u64,
    outcome: Option<Outcome>,
    error: Option<ConnectError>,
}

/// A session that we have as sender.
#[derive(Clone, Copy, Debug)]
struct Held {
    ticket: u32,
    key: u64,
    peer: u16,
}

/// A request that is to be made now.
pub(crate) struct Due {
    pub(crate) peer: u16,
    pub(crate) to: SocketAddrV4,
    pub(crate) request: Request,
    pub(crate) patience_ms: u64,
}

/// A request that is over.
pub(crate) struct Withdrawn {
    pub(crate) options: ConnectOptions,
    /// Whoever asks for us has to hear that it is not wanted any more.
    pub(crate) ticket: Option<u32>,
    /// What was granted and not taken.
    pub(crate) granted: Option<u64>,
}

/// What follows from what became of a request or a session.
pub(crate) enum Consequence {
    /// Nobody waits for what was granted.
    Unwanted,
    /// The session with this key is over.
    Over { key: u64, peer: u16 },
}

/// Requests on their way, and sessions that we have as sender.
#[derive(Debug)]
pub(crate) struct Requests {
    applying: Vec<Applying>,
    held: Vec<Held>,
}

impl Requests {
    pub(crate) fn new(sessions_max: usize) -> Requests {
        Requests {
            applying: Vec::with_capacity(8),
            held: Vec::with_capacity(sessions_max),
        }
    }

    /// A session with a peer is wanted, to be asked for at `to`.
    pub(crate) fn begin(
        &mut self,
        peer: u16,
        to: SocketAddrV4,
        (options, request): (&ConnectOptions, Request),
        now_ns: u64,
    ) {
        self.applying.push(Applying {
            peer,
            to,
            options: *options,
            request,
            deadline_ns: now_ns.saturating_add(options.timeout.as_nanos() as u64),
            ticket: None,
            again_ns: now_ns,
            outcome: None,
            error: None,
        });
    }

    /// How many requests are on their way.
    pub(crate) fn len(&self) -> usize {
        self.applying.len()
    }

    /// The peers with whom sessions are wanted.
    pub(crate) fn peers(&self) -> impl Iterator<Item = u16> {
        self.applying.iter().map(|applying| applying.peer)
    }

    /// The peer that our own node asks for a session at this address of a control port.
    pub(crate) fn asked_at(&self, to: SocketAddrV4) -> Option<u16> {
        let is_it = |applying: &&Applying| applying.to == to && applying.ticket.is_some();
        self.applying.iter().find(is_it).map(|applying| applying.peer)
    }

    /// The request at a position, where nobody makes it and it is time to.
    pub(crate) fn due(&mut self, position: usize, by_daemon: bool, now_ns: u64) -> Option<Due> {
        let applying = &mut self.applying[position];
        if applying.error.is_some() || applying.outcome.is_some() {
            return None;
        }
        if applying.ticket.is_some() {
            if by_daemon && now_ns > applying.deadline_ns.saturating_add(DAEMON_PATIENCE_NS) {
                // It was to say something by then.
                applying.error = Some(DaemonError::Gone.into());
            }
            return None;
        }
        if now_ns < applying.again_ns {
            return None;
        }
        let patience_ms = applying.deadline_ns.saturating_sub(now_ns) / 1_000_000;
        if patience_ms == 0 {
            // Others receive, and went on doing so.
            applying.error = Some(ConnectError::Rejected {
                peer: applying.to,
                reason: RejectReason::Busy,
                limit: 0,
                version: lm_protocol::wire::lm::VERSION,
            });
            return None;
        }
        Some(Due {
            peer: applying.peer,
            to: applying.to,
            request: applying.request,
            patience_ms,
        })
    }

    /// The request at a position was made, or not now.
    pub(crate) fn asked(&mut self, position: usize, decision: Result<Decision, ConnectError>, now_ns: u64) {
        let applying = &mut self.applying[position];
        match decision {
            // LM §3.3, under exclusive admission: where others receive, and the receiver does not, it begins by the one-copy path.
            Ok(Decision::Requested(ticket) | Decision::OneCopy(ticket)) => applying.ticket = Some(ticket.0),
            // It receives from others: not to be disturbed until it is done.
            Ok(Decision::Cancel) => applying.again_ns = now_ns + ASK_AGAIN_NS,
            Err(error) => applying.error = Some(error),
        }
    }

    /// What became of a request or a session.
    pub(crate) fn told(&mut self, ticket: u32, outcome: Outcome) -> Option<Consequence> {
        if let Some(applying) = self.with_ticket(ticket) {
            applying.outcome = Some(outcome);
            return None;
        }
        if let Outcome::Granted(_) = outcome {
            return Some(Consequence::Unwanted);
        }
        let position = self.held.iter().position(|held| held.ticket == ticket)?;
        let Held { key, peer, .. } = self.held.swap_remove(position);
        Some(Consequence::Over { key, peer })
    }

    /// What the daemon says of a request makes no sense.
    pub(crate) fn fail(&mut self, ticket: u32, error: DaemonError) {
        if let Some(applying) = self.with_ticket(ticket) {
            applying.error = Some(error.into());
        }
    }

    fn with_ticket(&mut self, ticket: u32) -> Option<&mut Applying> {
        let is_it = |applying: &&mut Applying| applying.ticket == Some(ticket);
        self.applying.iter_mut().find(is_it)
    }

    /// The grant of the request for a session with a peer, or why there is none; `None` while it is pending. `data`: the peer's data address, where
    /// a daemon asks for us. `is_over` hears of its number.
    pub(crate) fn outcome(
        &mut self,
        peer: u16,
        data: Option<SocketAddrV4>,
        now_ns: u64,
        is_over: impl FnOnce(u32),
    ) -> Option<Result<Grant, ConnectError>> {
        let applying = (self.applying.iter_mut()).find(|applying| applying.peer == peer)?;
        if let Some(error) = applying.error.take() {
            return Some(Err(error));
        }
        let outcome = applying.outcome.take()?;
        let ticket = applying.ticket.take()?;
        is_over(ticket);
        let by_daemon = data.is_some();
        let asked = data.unwrap_or(applying.to);
        Some(match outcome {
            Outcome::Granted(grant) => {
                self.held.push(Held {
                    ticket,
                    key: grant.session_key,
                    peer,
                });
                Ok(grant)
            }
            Outcome::Rejected(reject)
                if reject.reason == RejectReason::Busy && now_ns + ASK_AGAIN_NS < applying.deadline_ns =>
            {
                applying.again_ns = now_ns + ASK_AGAIN_NS;
                return None;
            }
            Outcome::Rejected(reject) => Err(ConnectError::Rejected {
                peer: asked,
                reason: reject.reason,
                limit: reject.limit,
                version: reject.version,
            }),
            Outcome::Incompatible => Err(ConnectError::Incompatible { peer: asked }),
            Outcome::Unreachable if by_daemon => Err(ConnectError::NoDaemon { peer: asked }),
            Outcome::NotListening => Err(ConnectError::NotListening { peer: asked }),
            _ if by_daemon => Err(DaemonError::Gone.into()),
            _ => Err(ConnectError::Unreachable { peer: asked }),
        })
    }

    /// The session with a peer is not asked for any more.
    pub(crate) fn withdraw(&mut self, peer: u16) -> Option<Withdrawn> {
        let position = (self.applying.iter()).position(|applying| applying.peer == peer)?;
        let applying = self.applying.swap_remove(position);
        Some(Withdrawn {
            options: applying.options,
            ticket: applying.ticket,
            granted: match applying.outcome {
                Some(Outcome::Granted(grant)) => Some(grant.session_key),
                _ => None,
            },
        })
    }

    /// The number of the session with this key, which is over, if it was held.
    pub(crate) fn release(&mut self, key: u64) -> Option<u32> {
        let position = self.held.iter().position(|held| held.key == key)?;
        Some(self.held.swap_remove(position).ticket)
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.applying.is_empty()
    }

    /// The number of the first request.
    #[cfg(test)]
    pub(crate) fn first_ticket(&self) -> Option<u32> {
        self.applying.first()?.ticket
    }

    /// Sessions end without a word, as those of a program that was killed.
    #[cfg(test)]
    pub(crate) fn forget_held(&mut self) {
        self.held.clear();
    }
}
