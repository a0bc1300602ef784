//! A source of landing memory that does as it is told, message by message.
#![cfg(test)]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use super::bed::Bed;
use crate::message::LandingRegion;
use crate::placing::{Announced, Placed, Placement, Settled, ZoneSource};

/// What a source does with a message.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    Arena,
    /// In the next region.
    Region,
    Later,
    Refuse(u16),
}

/// A source, as its application sees it.
pub(super) struct Desk {
    pub(super) regions: VecDeque<LandingRegion>,
    /// Those for the next messages; for what comes then a region, if there is one.
    pub(super) answers: VecDeque<Answer>,
    /// Number, tag, length and words of what was asked for.
    pub(super) asked: Vec<(u32, u64, u64, Vec<u8>)>,
    keeps_asked: bool,
    pub(super) settled: VecDeque<(Placed, Settled)>,
}

#[derive(Clone)]
pub(super) struct Source(pub(super) Arc<Mutex<Desk>>);

impl Source {
    pub(super) fn new() -> Source {
        Source(Arc::new(Mutex::new(Desk {
            regions: VecDeque::with_capacity(64),
            answers: VecDeque::new(),
            asked: Vec::new(),
            keeps_asked: true,
            settled: VecDeque::with_capacity(64),
        })))
    }

    /// One that decides for a host.
    pub(super) fn at(bed: &mut Bed, host: usize) -> Source {
        let source = Source::new();
        bed.hosts[host].place_by(Some(Box::new(source.clone())));
        source
    }

    pub(super) fn desk(&self) -> MutexGuard<'_, Desk> {
        self.0.lock().expect("one thread")
    }

    /// It says only where messages land.
    pub(super) fn keep_nothing(&self) {
        self.desk().keeps_asked = false;
    }

    pub(super) fn answer(&self, answers: impl IntoIterator<Item = Answer>) {
        self.desk().answers.extend(answers);
    }

    pub(super) fn asked(&self) -> Vec<u64> {
        self.desk().asked.iter().map(|(_, tag, ..)| *tag).collect()
    }

    /// Runs the bed until a message is settled.
    pub(super) fn settled(&self, bed: &mut Bed) -> (Placed, Settled) {
        for _ in 0..100_000 {
            let settled = self.desk().settled.pop_front();
            if let Some(settled) = settled {
                return settled;
            }
            bed.round();
        }
        panic!("nothing is settled");
    }

    pub(super) fn landed(&self, bed: &mut Bed) -> crate::message::Message {
        match self.settled(bed) {
            (_, Settled::Landed(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn give(&self, region: LandingRegion) {
        self.desk().regions.push_back(region);
    }
}

impl ZoneSource for Source {
    fn place(&mut self, of: &Announced<'_>) -> Placement {
        let mut desk = self.desk();
        if desk.keeps_asked {
            desk.asked.push((of.number, of.tag, of.len, of.words.to_vec()));
        }
        let usual = match desk.regions.is_empty() {
            true => Answer::Arena,
            false => Answer::Region,
        };
        match desk.answers.pop_front().unwrap_or(usual) {
            Answer::Arena => Placement::Arena,
            Answer::Region => Placement::Land(desk.regions.pop_front().expect("a region")),
            Answer::Later => Placement::Later,
            Answer::Refuse(status) => Placement::Refuse(status),
        }
    }

    fn settled(&mut self, of: &Placed, how: Settled) {
        self.desk().settled.push_back((*of, how));
    }
}
