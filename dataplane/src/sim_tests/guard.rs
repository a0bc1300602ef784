//! Guard bytes: a pattern in all landing memory that belongs to no zone, and in the margins of each zone.
//!
//! Whoever writes outside the packets that he may write leaves a trace there: the kernel, or the engine when it moves or
//! restores bytes. Painted is what is free at the time; the margins of a zone are checked when its message is delivered,
//! everything free is checked now and then.

#![cfg(test)]

use std::ops::Range;

use crate::arena::{PAGE_LEN, pages_len};
use crate::engine::Engine;
use crate::memory::Umem;
use crate::simnic::SimNic;

/// Pages behind the arena that are guarded, too.
const BEHIND: u64 = 16;

/// The guard of one host's landing memory.
#[derive(Debug)]
pub(crate) struct Guard {
    start: u64,
    /// Length of the arena when it was last looked at: it may grow.
    len: u64,
    /// Which pages held the pattern when they were last free.
    painted: Vec<bool>,
    /// Zones that were painted before they went back: start and whole length.
    clean: Vec<(u64, u64)>,
}

/// What every page's pattern is a part of: bytes with a difference of [`STEP`], which come again after 256.
static BYTES: [u8; PAGE_LEN as usize + 256] = {
    let mut bytes = [0u8; PAGE_LEN as usize + 256];
    let mut at = 1;
    while at < bytes.len() {
        bytes[at] = bytes[at - 1].wrapping_add(STEP);
        at += 1;
    }
    bytes
};
/// Odd, so that each of the 256 parts begins with another byte.
const STEP: u8 = 31;

/// The pattern of a page: another one than its neighbours'. A slice of a table, because much of the time of simulated transfers would go
/// into computing it.
fn pattern(page: u64) -> &'static [u8] {
    let first = usize::from((page * 17 + 0x5d) as u8);
    &BYTES[first..first + PAGE_LEN as usize]
}

impl Guard {
    /// Begins to guard the landing memory of `engine`.
    pub(crate) fn new(engine: &mut Engine<SimNic>) -> Guard {
        let landing = engine.landing.as_mut().expect("a landing channel");
        landing.arena.journal = Some(Vec::new());
        let mut guard = Guard {
            start: landing.arena.start(),
            len: landing.arena.len(),
            painted: vec![false; ((engine.memory.umem().len() - landing.arena.start()) / PAGE_LEN) as usize],
            clean: Vec::new(),
        };
        guard.paint_free(engine);
        guard
    }

    /// Pages of a range of whole pages.
    fn pages(&self, start: u64, len: u64) -> Range<usize> {
        let first = ((start - self.start) / PAGE_LEN) as usize;
        first..first + (len / PAGE_LEN) as usize
    }

    /// Free runs, and what lies behind the arena.
    fn free(&self, engine: &Engine<SimNic>) -> Vec<Range<usize>> {
        let Some(landing) = &engine.landing else {
            return Vec::new();
        };
        let end = landing.arena.start() + landing.arena.len();
        let behind = (engine.memory.umem().len() - end).min(BEHIND * PAGE_LEN) / PAGE_LEN * PAGE_LEN;
        landing
            .arena
            .gaps()
            .chain([(end, behind)])
            .map(|(start, len)| self.pages(start, len))
            .collect()
    }

    /// Learns what was given back since: its contents are not the pattern any more, unless the application painted it.
    fn learn(&mut self, engine: &mut Engine<SimNic>) -> bool {
        let Some(journal) = engine
            .landing
            .as_mut()
            .and_then(|landing| landing.arena.journal.as_mut())
        else {
            return false;
        };
        let freed = std::mem::take(journal);
        for &zone in &freed {
            let painted = self.clean.iter().position(|&clean| clean == zone);
            if let Some(at) = painted {
                self.clean.swap_remove(at);
            }
            for page in self.pages(zone.0, zone.1) {
                self.painted[page] = painted.is_some();
            }
        }
        !freed.is_empty()
    }

    /// Paints what is free and not painted. Call after each round.
    pub(crate) fn look(&mut self, engine: &mut Engine<SimNic>) {
        let freed = self.learn(engine);
        let len = engine.landing.as_ref().map_or(0, |landing| landing.arena.len());
        if freed || len != self.len {
            self.len = len;
            self.paint_free(engine);
        }
    }

    fn paint_free(&mut self, engine: &Engine<SimNic>) {
        for pages in self.free(engine) {
            for page in pages {
                if !self.painted[page] {
                    self.paint(engine.memory.umem(), page);
                }
            }
        }
    }

    fn paint(&mut self, umem: &Umem, page: usize) {
        umem.copy_to(self.start + page as u64 * PAGE_LEN, pattern(page as u64));
        self.painted[page] = true;
    }

    /// Checks everything that is free.
    pub(crate) fn check_free(&mut self, engine: &mut Engine<SimNic>) -> Result<(), String> {
        self.look(engine);
        for pages in self.free(engine) {
            for page in pages {
                let start = self.start + page as u64 * PAGE_LEN;
                self.check(engine.memory.umem(), start..start + PAGE_LEN)?;
            }
        }
        Ok(())
    }

    /// Checks the margins of the zone at `start` of `len` bytes, in which only `written` may have been written.
    pub(crate) fn check_margins(
        &mut self,
        engine: &mut Engine<SimNic>,
        (start, len): (u64, u64),
        written: Range<u64>,
    ) -> Result<(), String> {
        if start > written.start {
            // It lies between others, in a region that it shares with them.
            return Ok(());
        }
        self.learn(engine);
        self.check(engine.memory.umem(), start..written.start)?;
        self.check(engine.memory.umem(), written.end..start + pages_len(len))
    }

    /// The application is done with a zone: paints it before it goes back.
    pub(crate) fn leave(&mut self, engine: &mut Engine<SimNic>, (start, len): (u64, u64), payload: u64) {
        if start == payload {
            return engine.memory.umem().zero(start, len);
        }
        self.learn(engine);
        let len = pages_len(len);
        for page in self.pages(start, len) {
            self.paint(engine.memory.umem(), page);
        }
        self.clean.push((start, len));
    }

    /// Checks a range, as far as it was painted.
    fn check(&self, umem: &Umem, range: Range<u64>) -> Result<(), String> {
        let mut at = range.start;
        while at < range.end {
            let page = (at - self.start) / PAGE_LEN;
            let page_start = self.start + page * PAGE_LEN;
            let end = range.end.min(page_start + PAGE_LEN);
            let mut found = [0; PAGE_LEN as usize];
            let found = &mut found[..(end - at) as usize];
            umem.copy_from(at, found);
            let expected = &pattern(page)[(at - page_start) as usize..][..found.len()];
            if self.painted[page as usize] && found != expected {
                let wrong = (0..found.len()).find(|&at| found[at] != expected[at]);
                let wrong = wrong.expect("they differ");
                return Err(format!(
                    "guard byte at {:#x} of the landing memory was overwritten (checked {:#x} to {:#x})",
                    at - self.start + wrong as u64,
                    range.start - self.start,
                    range.end - self.start
                ));
            }
            at = end;
        }
        Ok(())
    }
}
