//! Policy `exclusive`: one host with active DLD at an instant. Why that holds is in [`super::claim`].

use super::Local;
use super::claim::{Claim, Release, Standing};
use super::incoming::refusal;
use super::message::{Answer, Append, Message, Remove, Stage, Verdict};
use super::node::Node;
use super::voter::{PROMISE, TENURE, Voter};
use crate::control::{ControlMessage, RejectReason, Request};
use crate::session::{Application, Refusal, Session};
use crate::time::Time;
use alloc::vec::Vec;
use core::net::{Ipv4Addr, SocketAddrV4};
use core::time::Duration;

/// How long before promises are asked for anew.
const RENEW_AFTER: Duration = Duration::from_millis(500);
/// And again, after an attempt that failed.
const RENEW_AGAIN: Duration = Duration::from_millis(100);
/// When whoever was rejected may try again.
const RETRY: Duration = Duration::from_millis(100);

/// The request that a claim is made for.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    from: SocketAddrV4,
    port: u16,
    request_id: u32,
    request: Request,
}

impl Wanted {
    fn application(&self) -> Application<'_> {
        Application::new(self.from, self.request_id, &self.request)
    }
}

#[derive(Clone, Debug)]
enum State {
    Idle,
    Claiming {
        claim: Claim,
        wanted: Wanted,
    },
    /// DLD is active here.
    Active {
        until: Time,
        next_renewal: Time,
        renewal: Option<Claim>,
    },
}

/// This host as a claimant and, if it is one, as a voter.
#[derive(Clone, Debug)]
pub(super) struct Exclusive {
    voters: Vec<SocketAddrV4>,
    voter: Option<Voter>,
    state: State,
    release: Option<Release>,
}

impl Exclusive {
    pub(super) fn new(voters: Vec<SocketAddrV4>, us: SocketAddrV4, now: Time) -> Exclusive {
        Exclusive {
            voter: voters.contains(&us).then(|| Voter::new(now)),
            voters,
            state: State::Idle,
            release: None,
        }
    }

    /// Whom this host, as a voter, has promised.
    pub(super) fn promised_to(&self, now: Time) -> Option<SocketAddrV4> {
        self.voter.and_then(|voter| voter.holder(now))
    }

    /// Goes on with a session that an earlier life granted. How long its gate is open, it says itself: the end of the last tenure that was
    /// won. That is as good in this life, since voters promise to an address; so all there is to do is to ask for the next one in time.
    /// Until one is won nothing is extended, and where none is, for as long as a tenure lasts, the session ends.
    pub(super) fn resume(&mut self, now: Time) {
        self.state = State::Active {
            until: now + TENURE,
            next_renewal: now,
            renewal: None,
        };
    }

    /// How long this host may have active DLD, if it has.
    pub(super) fn active_until(&self) -> Option<Time> {
        match self.state {
            State::Active { until, .. } => Some(until),
            State::Idle | State::Claiming { .. } => None,
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        let state = match &self.state {
            State::Idle => None,
            State::Claiming { claim, .. } => Some(claim.timeout()),
            State::Active {
                until,
                next_renewal,
                renewal,
            } => {
                let renewal = renewal.as_ref().map_or(*next_renewal, Claim::timeout);
                Some(renewal.min(*until))
            }
        };
        let release = self.release.as_ref().map(Release::timeout);
        [state, release].into_iter().flatten().min()
    }

    /// A voter can be asked now that could not before.
    pub(super) fn hurry(&mut self, now: Time, host: SocketAddrV4) {
        if !self.voters.contains(&host) {
            return;
        }
        match &mut self.state {
            State::Claiming { claim, .. }
            | State::Active {
                renewal: Some(claim), ..
            } => claim.hurry(now),
            _ => {}
        }
    }

    fn handle_answer(&mut self, now: Time, from: SocketAddrV4, answer: &Answer) -> bool {
        let Some(voter) = self.voters.iter().position(|&voter| voter == from) else {
            return false;
        };
        match (&mut self.state, answer.verdict) {
            (_, Verdict::Released) => {
                if let Some(release) = self
                    .release
                    .as_mut()
                    .filter(|release| release.number == answer.number)
                {
                    release.answer(voter);
                }
            }
            (State::Claiming { claim, .. }, verdict)
            | (
                State::Active {
                    renewal: Some(claim), ..
                },
                verdict,
            ) if claim.number == answer.number => claim.answer(voter, verdict, now),
            _ => {}
        }
        true
    }
}

impl Node {
    /// LM_REQ under `exclusive`: the paper's "if list is null", then the claim.
    pub(super) fn request_exclusively(
        &mut self,
        now: Time,
        port: u16,
        application: &Application<'_>,
        local: &mut Local<'_>,
    ) {
        let Some(receiver) = self.receivers.get_mut(&port) else {
            return;
        };
        let Some(exclusive) = &mut self.exclusive else {
            return;
        };
        receiver.grantor.expire(now, local.landing);
        let &Application {
            from,
            request_id,
            request,
        } = application;
        let session = receiver.grantor.session_of(application);
        let needs_place = request.lands && session.is_none_or(|session| !session.has_place());
        let is_late = session.is_none() && receiver.grantor.is_decided(application);
        let wanted = Wanted {
            from,
            port,
            request_id,
            request: *request,
        };
        let refused = match &exclusive.state {
            _ if is_late || !needs_place => {
                let is_active = matches!(exclusive.state, State::Active { .. });
                if session.is_none() && is_active {
                    return self.refuse(now, &wanted, Refusal::busy(RETRY), local);
                }
                receiver.request(now, application, local);
                return self.reply();
            }
            // The same request again: its answer comes with the claim's.
            State::Claiming { wanted, .. } if wanted.from == from && wanted.request_id == request_id => {
                return;
            }
            State::Claiming { .. } | State::Active { .. } => Err(Refusal::busy(RETRY)),
            State::Idle if !self.list.is_empty() => Err(Refusal::busy(RETRY)),
            State::Idle => refusal(application, local),
        };
        if let Err(refusal) = refused {
            return self.refuse(now, &wanted, refusal, local);
        }
        self.last_number += 1;
        exclusive.release = None;
        exclusive.state = State::Claiming {
            claim: Claim::new(self.last_number, exclusive.voters.len(), now, false),
            wanted,
        };
    }

    /// There is no place for a request: the session that it has already goes on without.
    fn refuse(&mut self, now: Time, wanted: &Wanted, refusal: Refusal, local: &mut Local<'_>) {
        let application = wanted.application();
        let receiver = self.receivers.get_mut(&wanted.port);
        let receiver = receiver.filter(|receiver| receiver.grantor.session_of(&application).is_some());
        let message = receiver.and_then(|receiver| receiver.decide(now, &application, local));
        self.answer(wanted, message.unwrap_or_else(|| refusal.to_message()));
    }

    fn voter(&mut self) -> Option<&mut Voter> {
        self.exclusive.as_mut()?.voter.as_mut()
    }

    fn answer(&mut self, wanted: &Wanted, message: ControlMessage) {
        let request_id = wanted.request_id;
        self.transmit(
            wanted.from,
            wanted.port,
            &Message::Session { request_id, message },
        );
    }

    /// LM_APPEND_ADDR as a question.
    pub(super) fn handle_claim(
        &mut self,
        now: Time,
        from: SocketAddrV4,
        boot_id: u64,
        append: &Append,
    ) -> bool {
        if self.peers.is_removed(from, append.number) {
            return true;
        }
        let Some(voter) = self.voter() else {
            return false;
        };
        if let Some((verdict, holder)) = voter.ask(now, from, boot_id, append.number) {
            let answer = Answer {
                address: append.address,
                number: append.number,
                verdict,
                holder: holder.map_or(Ipv4Addr::UNSPECIFIED, |holder| *holder.ip()),
            };
            self.transmit(from, 0, &Message::Answer(answer));
        }
        true
    }

    /// LM_REMOVE_ADDR, as far as it concerns a voter.
    pub(super) fn handle_release(&mut self, from: SocketAddrV4, boot_id: u64, remove: &Remove) {
        if let Some(voter) = self.voter() {
            voter.release(from, boot_id, remove.number);
            let answer = Answer {
                address: remove.address,
                number: remove.number,
                verdict: Verdict::Released,
                holder: Ipv4Addr::UNSPECIFIED,
            };
            self.transmit(from, 0, &Message::Answer(answer));
        }
    }

    /// LM_ADDR_OK.
    pub(super) fn handle_answer(&mut self, now: Time, from: SocketAddrV4, answer: &Answer) -> bool {
        answer.address == *self.config.address.ip()
            && self
                .exclusive
                .as_mut()
                .is_some_and(|exclusive| exclusive.handle_answer(now, from, answer))
    }

    /// Whatever is due.
    pub(super) fn poll_exclusive(&mut self, now: Time, local: &mut Local<'_>) {
        let Some(mut exclusive) = self.exclusive.take() else {
            return;
        };
        exclusive.state = match core::mem::replace(&mut exclusive.state, State::Idle) {
            State::Idle => State::Idle,
            State::Claiming { mut claim, wanted } => {
                self.ask_voters(&mut exclusive, &mut claim, now);
                match claim.standing(now) {
                    Standing::Open => State::Claiming { claim, wanted },
                    Standing::Lost { held } => {
                        let reason = match held {
                            true => RejectReason::Busy,
                            false => RejectReason::NoQuorum,
                        };
                        let refusal = Refusal {
                            reason,
                            ..Refusal::busy(RETRY)
                        };
                        self.refuse(now, &wanted, refusal, local);
                        exclusive.release = Some(Release::new(self.last_number, exclusive.voters.len(), now));
                        State::Idle
                    }
                    Standing::Won { until } => self.activate(&mut exclusive, now, until, wanted, local),
                }
            }
            State::Active {
                until,
                next_renewal,
                renewal,
            } => self.stay_active(&mut exclusive, now, (until, next_renewal, renewal), local),
        };
        self.tell_voters(&mut exclusive, now);
        self.exclusive = Some(exclusive);
    }

    fn ask_voters(&mut self, exclusive: &mut Exclusive, claim: &mut Claim, now: Time) {
        let us = self.config.address;
        loop {
            let asked = claim.poll(now);
            if asked.is_empty() {
                return;
            }
            for index in asked {
                let voter = exclusive.voters[index];
                match exclusive.voter.as_mut().filter(|_| voter == us) {
                    Some(own) => {
                        if let Some((verdict, _)) = own.ask(now, us, self.config.boot_id, claim.number) {
                            claim.answer(index, verdict, now);
                        }
                    }
                    None => {
                        let append = Append {
                            address: *us.ip(),
                            stage: Stage::Claim,
                            number: claim.number,
                            lease_ms: PROMISE.as_millis() as u32,
                        };
                        self.transmit(voter, 0, &Message::Append(append));
                    }
                }
            }
        }
    }

    /// A majority has promised: "broadcast LM_APPEND_ADDR; activate the DLD scheme; send LM_ACQ_OK".
    fn activate(
        &mut self,
        exclusive: &mut Exclusive,
        now: Time,
        until: Time,
        wanted: Wanted,
        local: &mut Local<'_>,
    ) -> State {
        let application = wanted.application();
        local.landing.active_until(until);
        let reply = self.receivers.get_mut(&wanted.port).and_then(|receiver| {
            if let Some(session) = receiver.grantor.session_of(&application) {
                let session_key = session.grant.session_key;
                receiver.grantor.land(session_key, local.landing);
            }
            receiver.decide(now, &application, local)
        });
        let reply = reply.unwrap_or_else(|| Refusal::from(RejectReason::NoReceiver).to_message());
        let is_granted = matches!(reply, ControlMessage::Grant(grant) if grant.lands);
        if is_granted {
            self.say_active(now, until);
        }
        self.answer(&wanted, reply);
        match is_granted {
            true => State::Active {
                until,
                next_renewal: now + RENEW_AFTER,
                renewal: None,
            },
            false => {
                exclusive.release = Some(Release::new(self.last_number, exclusive.voters.len(), now));
                State::Idle
            }
        }
    }

    fn stay_active(
        &mut self,
        exclusive: &mut Exclusive,
        now: Time,
        (mut until, mut next_renewal, mut renewal): (Time, Time, Option<Claim>),
        local: &mut Local<'_>,
    ) -> State {
        if renewal.is_none() && now >= next_renewal {
            self.last_number += 1;
            renewal = Some(Claim::new(self.last_number, exclusive.voters.len(), now, true));
        }
        if let Some(claim) = &mut renewal {
            self.ask_voters(exclusive, claim, now);
            match claim.standing(now) {
                Standing::Open => {}
                Standing::Won { until: renewed } => {
                    until = until.max(renewed);
                    next_renewal = now + RENEW_AFTER;
                    renewal = None;
                    if self.is_receiving() && now < until {
                        local.landing.active_until(until);
                        self.say_active(now, until);
                    }
                }
                Standing::Lost { .. } => {
                    next_renewal = now + RENEW_AGAIN;
                    renewal = None;
                }
            }
        }
        if now >= until {
            // Nobody may rely on the promises any more.
            self.close_sessions(Session::has_place, local);
        }
        if self.is_receiving() {
            return State::Active {
                until,
                next_renewal,
                renewal,
            };
        }
        let remove = Remove {
            address: *self.config.address.ip(),
            number: self.last_number,
        };
        self.transmit_to_all(&Message::Remove(remove));
        exclusive.release = Some(Release::new(self.last_number, exclusive.voters.len(), now));
        State::Idle
    }

    fn say_active(&mut self, now: Time, until: Time) {
        self.transmit_to_all(&self.active_for(until.since(now)));
    }

    fn tell_voters(&mut self, exclusive: &mut Exclusive, now: Time) {
        let us = self.config.address;
        let Some(release) = &mut exclusive.release else {
            return;
        };
        for index in release.poll(now) {
            let voter = exclusive.voters[index];
            match exclusive.voter.as_mut().filter(|_| voter == us) {
                Some(own) => {
                    own.release(us, self.config.boot_id, release.number);
                    release.answer(index);
                }
                None => {
                    let remove = Remove {
                        address: *us.ip(),
                        number: release.number,
                    };
                    self.transmit(voter, 0, &Message::Remove(remove));
                }
            }
        }
        if release.is_over(now) {
            exclusive.release = None;
        }
    }
}
