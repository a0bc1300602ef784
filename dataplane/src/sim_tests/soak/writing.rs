//! A soak's writers: messages that are sent while they are written, with pauses, and of which some are given up half way.

use super::plan::pick;
use super::run::Run;
use crate::sim_tests::streams::Writing;
use crate::sim_tests::transfer::Dice;
use crate::writer::MessageWriter;

/// A message that is being written.
pub(super) struct Written {
    tag: u64,
    writing: Writing,
    /// Bytes before this one are written.
    to: u64,
    /// Its writer pauses until then.
    next_ns: u64,
    /// From which byte on it is given up.
    gives_up_at: Option<u64>,
}

impl Written {
    pub(super) fn new(tag: u64, writer: MessageWriter, payload: Vec<u8>, dice: &mut Dice) -> Written {
        let gives_up_at = (dice.roll(6) == 0).then(|| dice.roll(writer.len()));
        Written {
            tag,
            writing: Writing { writer, payload },
            to: 0,
            next_ns: 0,
            gives_up_at,
        }
    }
}

impl Run {
    /// Writers that have paused for long enough go on. Returns how many.
    pub(super) fn write(&mut self, host: usize) -> usize {
        let (now_ns, dice) = (self.bed.now_ns, &mut self.write_dice);
        let application = &mut self.applications[host];
        let mut work = 0;
        application.written.retain_mut(|written| {
            if now_ns < written.next_ns {
                return true;
            }
            work += 1;
            let writer = &written.writing.writer;
            let len = writer.len();
            if writer.is_settled() {
                return false;
            }
            if written.gives_up_at.is_some_and(|at| written.to >= at) {
                application.given_up.insert(written.tag);
                return false;
            }
            written.to = len.min(written.to + 1 + dice.roll(len / 2 + 1));
            written.writing.write_to(written.to, 0xee);
            let pause_max_ns = pick(dice, &[1, 50_000, 2_000_000, 100_000_000]);
            written.next_ns = now_ns + dice.roll(pause_max_ns);
            written.to < len
        });
        work
    }
}
