//! Places: which sessions have them, and to whom they go when they are not used.

use crate::control::Ended;
use crate::time::Time;
use alloc::vec::Vec;
use core::net::{Ipv4Addr, SocketAddrV4};
use core::time::Duration;

use super::Grantor;
use crate::session::landing::{Application, Aside, CloseReason, Landing, Session, Unused};

/// A place in which nothing lands for so long goes to a session that waits for one and was used a second later, at least.
pub const UNUSED_MAX: Duration = Duration::from_secs(5);

/// Sessions that are as idle as each other do not take places from each other.
const LATER: Duration = Duration::from_secs(1);

/// A session without a place that had nothing under way for so long waits for none. One that never had a place counts as used for so long.
const WANTED_MAX: Duration = Duration::from_secs(10);

impl Grantor {
    /// When to call [`Grantor::make_way`] for whoever waits; `None` while a place is free.
    pub fn next_way(&self) -> Option<Time> {
        let is_full = self.free_places() == 0;
        (self.placed().map(|session| session.expires).min()).filter(|_| is_full)
    }

    /// Somebody wants a place that there is not: sessions whose lease has run out give theirs up; gives their number. Those of which a
    /// message is under way go on without, where they can: a path may be cut.
    pub fn make_way(&mut self, now: Time, landing: &mut dyn Landing) -> usize {
        let mut freed = 0;
        for at in 0..self.queues.len() {
            let Some(session) = self.slots[at].filter(|session| session.expires <= now) else {
                continue;
            };
            let is_idle = landing.unused(&session).is_some_and(|unused| unused.is_idle);
            let aside = match is_idle {
                true => Aside::Never,
                false => self.put_aside(&session, now, landing),
            };
            let session_key = session.grant.session_key;
            match aside {
                Aside::Done => freed += 1,
                Aside::Later => {}
                Aside::Never => {
                    let is_it = |session: &Session| session.grant.session_key == session_key;
                    freed += self.close_where(landing, CloseReason::Expired, is_it);
                }
            }
        }
        freed
    }

    /// Takes a place for a session or a request of `host` that waits for one and had something under way at `used`.
    ///
    /// The session that has not used its place for longest gives it up, if that is [`UNUSED_MAX`] or longer and since before `used`; where
    /// the host has as many places as it may, one of its own. It goes on without. Where none can go on without, the first of them ends:
    /// gives whom to tell, the number of its request, and what. It asks again when it has something to send.
    pub fn displace(
        &mut self,
        (host, used): (Ipv4Addr, Time),
        now: Time,
        landing: &mut dyn Landing,
    ) -> Option<(SocketAddrV4, u32, Ended)> {
        let its_own = self.has_enough_places(host);
        let may_go = |session: &&Session| !its_own || *session.peer.ip() == host;
        let unused = |session: &Session| {
            let unused = landing.unused(session)?;
            let may_go = now.since(unused.since) >= UNUSED_MAX && unused.since + LATER <= used;
            may_go.then_some((unused, *session))
        };
        let mut unused: Vec<(Unused, Session)> = self.placed().filter(may_go).filter_map(unused).collect();
        unused.sort_by_key(|(unused, session)| (*unused, session.grant.session_key));
        let mut ending = None;
        for (_, session) in unused {
            match self.put_aside(&session, now, landing) {
                Aside::Done | Aside::Later => return None,
                Aside::Never => ending = ending.or(Some(session)),
            }
        }
        self.end(&ending?, landing)
    }

    /// Whether a host has as many places as it may: others are to find one, whatever it asks for.
    pub fn has_enough_places(&self, host: Ipv4Addr) -> bool {
        let is_its = |session: &&Session| *session.peer.ip() == host;
        self.placed().filter(is_its).count() >= self.address_max
    }

    /// Whether a host has half of all sessions that may be without a place.
    pub(super) fn has_enough_aside(&self, host: Ipv4Addr) -> bool {
        let is_its = |session: &&Session| *session.peer.ip() == host;
        2 * self.aside().filter(is_its).count() >= self.slots_of(false).len()
    }

    /// The sessions that wait for a place, since they have something to send or had it lately; and when.
    pub fn waiting(&self, now: Time, landing: &dyn Landing) -> Vec<(Session, Time)> {
        let waits = |session: &Session| {
            let is_new = session.aside == Some(session.begun) && now.since(session.begun) < WANTED_MAX;
            let unused = landing.unused(session).filter(|_| !is_new);
            let is_over = |unused: Unused| unused.is_idle && now.since(unused.since) >= WANTED_MAX;
            let used = unused.map_or(now, |unused| unused.since);
            (session.request.lands && !unused.is_some_and(is_over)).then_some((*session, used))
        };
        self.aside().filter_map(waits).collect()
    }

    /// Whether a place is free for a new session of that sender.
    pub fn has_place_for(&self, application: &Application<'_>) -> bool {
        application.request.lands && self.free_places() > 0 && !self.has_enough_places(*application.from.ip())
    }

    /// The session that a request began.
    pub fn session_of(&self, application: &Application<'_>) -> Option<&Session> {
        self.sessions().find(|session| session.is_of(application))
    }

    fn aside(&self) -> impl Iterator<Item = &Session> {
        self.slots[self.slots_of(false)].iter().flatten()
    }

    /// Gives a session that is aside a place, if there is one that it can have now.
    pub fn land(&mut self, session_key: u64, landing: &mut dyn Landing) -> bool {
        let is_it = |session: &Session| session.grant.session_key == session_key;
        let from = self
            .slots_of(false)
            .find(|&at| self.slots[at].as_ref().is_some_and(is_it));
        let (Some(from), Some(to)) = (from, self.free_slot(true)) else {
            return false;
        };
        let Some(session) = self.slots[from].filter(|session| !self.has_enough_places(*session.peer.ip()))
        else {
            return false;
        };
        let is_landing = landing.land(&session);
        if is_landing {
            self.slots[from] = None;
            self.slots[to] = Some(session.in_place(self.queues[to]));
        }
        is_landing
    }

    /// A session goes on without its place, if one more may.
    fn put_aside(&mut self, session: &Session, now: Time, landing: &mut dyn Landing) -> Aside {
        let Some(free) = self.free_slot(false) else {
            return Aside::Never;
        };
        let aside = landing.set_aside(session);
        if aside == Aside::Done {
            let is_it = |placed: &mut Session| placed.grant.session_key == session.grant.session_key;
            let moved = self.slots.iter_mut().find_map(|slot| slot.take_if(is_it));
            let aside = Some(now);
            self.slots[free] = moved.map(|session| Session { aside, ..session });
        }
        aside
    }
}
