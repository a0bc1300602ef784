//! Two hosts, a message between them and a network that loses, doubles and reorders: states and steps.

use stateright::Model;

use crate::receiver::{COUNT, Receiver, STALE, WINDOWS, digest_of, grain, payload, shape};
use crate::streaming::{Ending, Part, Release, Released, Watermark, Writer};
use crate::weak;

/// What may happen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World {
    pub(crate) is_zero_copy: bool,
    pub(crate) losses: u8,
    pub(crate) duplicates: u8,
    /// Packets that the gate lets land and the kernel drops all the same.
    pub(crate) drops: u8,
    /// Entries that are posted for what is in its place.
    pub(crate) reposts: u8,
    /// The writer may give up, or never go on; the reader may be dropped before the end.
    pub(crate) may_abort: bool,
    /// The session may end before the message.
    pub(crate) may_expire: bool,
}

/// A rule that was broken in a step, for those of which no state tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Broken {
    S1,
    S2,
    S3,
    S4,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) writer: Writer,
    pub(crate) has_stopped: bool,
    /// Windows whose bytes the writer's thread wrote, and of which the sender's thread knows that.
    pub(crate) written: u32,
    pub(crate) seen: u32,
    pub(crate) watermark: Watermark,
    /// The last word of the writer.
    pub(crate) told: Release,
    pub(crate) outgoing: Released,
    pub(crate) sent: u32,
    /// Positions on the way.
    pub(crate) flight: Vec<(u32, bool)>,
    pub(crate) losses: u8,
    pub(crate) duplicates: u8,
    pub(crate) drops: u8,
    reposts: u8,
    pub(crate) receiver: Receiver,
    /// Windows of which digests came.
    digests: u32,
    pub(crate) broken: Option<Broken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Write,
    Overwrite(u32),
    Release(u32),
    Finish,
    Abort,
    Stop,
    Look,
    Announce,
    Send,
    Lose(usize),
    Double(usize),
    DropBehindGate(usize),
    Deliver(usize),
    Poll,
    Digest(u32),
    Repost(u32),
    Rewrite(u32),
    PostAgain(u32),
    Rebuild,
    Repair,
    Read,
    Drop,
    Settle,
    Expire,
}

impl State {
    fn new(world: &World) -> State {
        State {
            writer: Writer::new(grain()),
            has_stopped: false,
            written: 0,
            seen: 0,
            watermark: Watermark::new(),
            told: Release::Windows(0),
            outgoing: Released::new(grain()),
            sent: 0,
            flight: Vec::new(),
            losses: world.losses,
            duplicates: world.duplicates,
            drops: world.drops,
            reposts: world.reposts,
            receiver: Receiver::new(world.is_zero_copy),
            digests: 0,
            broken: None,
        }
    }

    fn tell(&mut self, release: Release) {
        self.told = release;
        self.watermark.publish(release);
    }

    /// What the sender reads of a fragment. `None`: it must not.
    fn read(&mut self, position: u32) -> [u8; 2] {
        let fragment = shape().index_at(position, COUNT);
        if shape().window_of(fragment) >= self.seen {
            self.broken = Some(Broken::S1);
            return [STALE; 2];
        }
        payload(fragment)
    }

    /// Nothing moves by itself: no packet is on the way, none may be sent, and the engine has seen all.
    fn is_quiet(&self) -> bool {
        self.flight.is_empty() && !self.receiver.has_arrivals() && !self.may_send()
    }

    fn may_send(&self) -> bool {
        let credit = match self.receiver.is_rebuilt {
            true => self.receiver.released.fragments(),
            false => self.receiver.posted_to,
        };
        let may = self.sent < self.outgoing.fragments().min(credit);
        may && self.outgoing.release() != Release::Aborted && self.receiver.ending.is_none()
    }

    fn writer_has_ended(&self) -> bool {
        self.has_stopped || !matches!(self.told, Release::Windows(_))
    }

    /// What is right of this step; `None` where it cannot be taken or changes nothing.
    fn take(&mut self, step: Step) -> Option<()> {
        match step {
            Step::Write => {
                self.writer.wrote(grain().bytes(self.written)).ok()?;
                self.written += 1;
            }
            Step::Overwrite(window) => {
                // Into what the sender may be reading.
                self.writer.wrote(grain().bytes(window)).ok()?;
                self.broken = Some(Broken::S2);
            }
            Step::Release(windows) => {
                let release = self.writer.release(grain().bytes(windows).start).ok()?;
                (release != self.told).then(|| self.tell(release))?;
            }
            Step::Finish => {
                let release = self.writer.finish().ok()?;
                self.tell(release);
            }
            Step::Abort => {
                let release = self.writer.abort()?;
                self.tell(release);
            }
            Step::Stop => self.has_stopped = true,
            Step::Look => {
                let _ = weak::synchronised();
                let release = self.watermark.seen();
                if weak::synchronised() {
                    self.seen = self.written;
                }
                self.outgoing.hear(release);
            }
            Step::Announce => self.receiver.hear(self.outgoing.release()),
            Step::Send => {
                let bytes = self.read(self.sent);
                self.flight.push((self.sent, bytes[0] == STALE));
                self.sent += 1;
            }
            Step::Lose(at) => {
                self.losses -= 1;
                self.flight.remove(at);
            }
            Step::Double(at) => {
                self.duplicates -= 1;
                self.flight.push(self.flight[at]);
            }
            Step::DropBehindGate(at) => {
                self.drops -= 1;
                let (position, _) = self.flight.remove(at);
                self.receiver.pass_gate(position);
                self.receiver.was_dropped = true;
            }
            Step::Deliver(at) => {
                let (position, is_stale) = self.flight.remove(at);
                let fragment = shape().index_at(position, COUNT);
                let bytes = if is_stale { [STALE; 2] } else { payload(fragment) };
                self.receiver.packet(position, bytes);
            }
            Step::Poll => self.receiver.poll(),
            Step::Digest(window) => {
                self.digests |= 1 << window;
                let payloads: Vec<_> = shape().range(window, COUNT).map(payload).collect();
                self.receiver.tell(window, digest_of(window, &payloads));
            }
            Step::Repost(index) => self.receiver.post_entry(index)?,
            Step::Rewrite(index) => {
                let window = shape().window_of(index);
                (!self.receiver.showing.keeps(window..window + 1)).then_some(())?;
                self.receiver.zone[index as usize * 2] = STALE;
            }
            Step::PostAgain(index) => {
                self.reposts -= 1;
                self.receiver.post_entry(index)?;
            }
            Step::Rebuild => self.receiver.rebuild(),
            Step::Repair => {
                let fragment = self.receiver.missing()?;
                let bytes = self.read(shape().position_of(fragment, COUNT));
                self.receiver.forget(fragment);
                self.receiver.copy(fragment, bytes);
            }
            Step::Read => {
                let _ = weak::synchronised();
                let _ = self.receiver.shown.valid().count();
                if weak::synchronised() {
                    return None;
                }
                self.broken = Some(Broken::S3);
            }
            Step::Drop => {
                self.receiver.is_read = false;
                self.receiver.showing.let_go();
            }
            Step::Settle => {
                self.receiver.is_final().then_some(())?;
                self.receiver.settle(Ending::Whole);
            }
            Step::Expire => self.receiver.settle(Ending::SessionEnded),
        }
        Some(())
    }
}

impl World {
    fn writers(&self, state: &State, steps: &mut Vec<Step>) {
        if state.writer_has_ended() {
            return;
        }
        if state.written < WINDOWS {
            steps.push(Step::Write);
        }
        if let Release::Windows(released) = state.told {
            steps.extend((0..released).map(Step::Overwrite));
            steps.extend((released + 1..WINDOWS).map(Step::Release));
        }
        steps.push(Step::Finish);
        if self.may_abort {
            steps.extend([Step::Abort, Step::Stop]);
        }
    }

    fn networks(&self, state: &State, steps: &mut Vec<Step>) {
        for at in 0..state.flight.len() {
            steps.push(Step::Deliver(at));
            if state.losses > 0 {
                steps.push(Step::Lose(at));
            }
            if state.duplicates > 0 {
                steps.push(Step::Double(at));
            }
            if state.drops > 0 && state.receiver.may_land(state.flight[at].0) {
                steps.push(Step::DropBehindGate(at));
            }
        }
    }

    fn receivers(&self, state: &State, steps: &mut Vec<Step>) {
        let receiver = &state.receiver;
        if receiver.has_arrivals() {
            steps.push(Step::Poll);
        }
        if receiver.is_zero_copy {
            let has_left = |window: &u32| state.sent >= grain().fragments_of(*window + 1);
            let is_new =
                |window: &u32| state.digests & 1 << window == 0 && receiver.released.fragments() > window * 2;
            steps.extend((0..WINDOWS).filter(has_left).filter(is_new).map(Step::Digest));
        }
        if receiver.is_read {
            steps.push(Step::Read);
            if receiver.ending.is_some() || self.may_abort {
                steps.push(Step::Drop);
            }
        }
        if receiver.ending.is_none() {
            steps.push(Step::Settle);
            if self.may_expire {
                steps.push(Step::Expire);
            }
        }
        if receiver.ending.is_none() && receiver.is_read {
            // A packet that is sent again wants the place of what came, or is to be copied there.
            let is_shown = |byte: u64| receiver.shown.check(byte..byte + 1).is_ok();
            let shown = (0..COUNT).filter(|index| is_shown(u64::from(index * 2)));
            steps.extend(shown.flat_map(|index| [Step::Repost(index), Step::Rewrite(index)]));
        }
        if receiver.ending.is_none() && state.reposts > 0 {
            // Not of a window's lowest, whose headers would go over a tail that is not saved (I5).
            let may_again = |index: &u32| receiver.is_placed(*index) && !shape().is_lowest(*index);
            steps.extend((0..COUNT).filter(may_again).map(Step::PostAgain));
        }
        if state.is_quiet() {
            let is_left = !receiver.entries.is_empty() || receiver.lacks_header;
            if is_left && (state.sent >= receiver.posted_to || receiver.ending.is_some()) {
                steps.push(Step::Rebuild);
            } else if receiver.ending.is_none() {
                steps.push(Step::Repair);
            }
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(self)]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.broken.is_some() {
            return;
        }
        self.writers(state, steps);
        if state.outgoing.release() != state.told {
            steps.push(Step::Look);
        }
        if state.receiver.released.release() != state.outgoing.release() && state.receiver.ending.is_none() {
            steps.push(Step::Announce);
        }
        if state.may_send() && state.flight.len() < 2 {
            steps.push(Step::Send);
        }
        self.networks(state, steps);
        self.receivers(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        next.take(step)?;
        let is_less = |window| next.part_of(window) < state.part_of(window);
        if (0..WINDOWS).any(is_less) {
            next.broken = Some(Broken::S4);
        }
        Some(next)
    }

    fn properties(&self) -> Vec<stateright::Property<World>> {
        crate::checks::properties()
    }
}

impl State {
    /// Whether nothing is left to be done, whatever order was taken.
    pub(crate) fn has_come_to_rest(&self, world: &World) -> bool {
        let mut steps = Vec::new();
        world.actions(self, &mut steps);
        steps
            .into_iter()
            .all(|step| world.next_state(self, step).is_none())
    }

    pub(crate) fn part_of(&self, window: u32) -> Part {
        let bytes = grain().bytes(window);
        match self.receiver.shown.valid_to(bytes.start) {
            to if to >= bytes.end => Part::Whole,
            to if to > bytes.start => Part::Body,
            _ => Part::Nothing,
        }
    }
}
