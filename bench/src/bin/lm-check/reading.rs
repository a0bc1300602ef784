//! Messages that are read while they arrive: what is shown is what was sent, at once and as long as it is kept.

use std::collections::VecDeque;
use std::ops::Range;

use lm_dataplane::{Ending, Endpoint, Incoming};
use serde::Serialize;

use crate::plan::PlanArgs;

/// Messages that are kept after they have ended, while others land.
const KEPT: usize = 4;

/// What was read.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct ReadingReport {
    /// Messages that were read while they arrived.
    pub(crate) messages: u64,
    /// Their bytes that were read before they had ended.
    pub(crate) early_bytes: u64,
    /// Of these messages those that ended incomplete.
    pub(crate) incomplete: u64,
}

/// A message, and the bytes that were compared.
#[derive(Debug)]
struct Reading {
    incoming: Incoming,
    compared: Vec<Range<u64>>,
    has_ended: bool,
}

/// Reads what arrives.
#[derive(Debug, Default)]
pub(crate) struct Readings {
    readings: VecDeque<Reading>,
    report: ReadingReport,
}

impl Readings {
    /// What was done so far.
    pub(crate) fn report(&self) -> ReadingReport {
        self.report
    }

    /// Takes what has begun to arrive, and compares what is shown anew; of messages that have ended, everything.
    ///
    /// # Errors
    /// A byte that is shown is not the one that was sent.
    pub(crate) fn look(&mut self, plan: &PlanArgs, endpoint: &mut Endpoint) -> Result<(), String> {
        while let Some(incoming) = endpoint.try_incoming() {
            self.report.messages += 1;
            self.readings.push_back(Reading {
                incoming,
                compared: Vec::new(),
                has_ended: false,
            });
        }
        for reading in self.readings.iter_mut().filter(|reading| !reading.has_ended) {
            let ending = reading.incoming.settled();
            reading.has_ended = ending.is_some();
            if reading.has_ended {
                self.report.incomplete += u64::from(ending != Some(Ending::Whole));
                reading.compared.clear();
            }
            let bytes = reading.compare(plan)?;
            self.report.early_bytes += if reading.has_ended { 0 } else { bytes };
        }
        while self.readings.iter().filter(|reading| reading.has_ended).count() > KEPT {
            let oldest = self.readings.iter().position(|reading| reading.has_ended);
            let Some(mut oldest) = oldest.and_then(|at| self.readings.remove(at)) else {
                break;
            };
            oldest.compared.clear();
            oldest.compare(plan)?;
        }
        Ok(())
    }
}

impl Reading {
    /// Compares what is shown and was not yet compared; how many bytes.
    fn compare(&mut self, plan: &PlanArgs) -> Result<u64, String> {
        let mut count = 0;
        let shown: Vec<Range<u64>> = self.incoming.shown().collect();
        for range in &shown {
            let compared = self.compared.iter().filter(|one| range.contains(&one.start));
            let ends = compared.clone().map(|one| one.end);
            let starts = compared.map(|one| one.start).chain([range.end]);
            for (start, end) in [range.start].into_iter().chain(ends).zip(starts) {
                self.compare_bytes(plan, start..end)?;
                count += end - start;
            }
        }
        self.compared = shown;
        Ok(count)
    }

    fn compare_bytes(&self, plan: &PlanArgs, bytes: Range<u64>) -> Result<(), String> {
        let (tag, len) = (self.incoming.tag(), self.incoming.len());
        let read = (self.incoming.bytes(bytes.clone()))
            .map_err(|error| format!("bytes {bytes:?} of message {tag} were shown: {error}"))?;
        let mut expected = vec![0; read.len()];
        plan.fill(tag as u32, bytes.start, &mut expected);
        match read.iter().zip(&expected).position(|(read, sent)| read != sent) {
            None => Ok(()),
            Some(at) => {
                let at = bytes.start + at as u64;
                Err(format!(
                    "byte {at} of {len} of message {tag} was shown and is wrong"
                ))
            }
        }
    }
}
