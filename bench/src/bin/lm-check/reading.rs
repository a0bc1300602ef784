//! Messages that are read while they arrive: what is shown is what was sent, at once and as long as it is kept.

use std::collections::VecDeque;
use std::ops::Range;

use lm_dataplane::Incoming;
use serde::Serialize;

use crate::plan::first_wrong;

/// Messages that are kept after they have ended, those that land included.
const KEPT: usize = 4;

/// A message, where the sequence of its contents starts, and the bytes that were compared.
#[derive(Debug)]
struct Reading {
    incoming: Incoming,
    start: u64,
    compared: Vec<Range<u64>>,
    has_ended: bool,
}

/// Reads what arrives.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Readings {
    #[serde(skip)]
    readings: VecDeque<Reading>,
    /// Bytes that were read before their messages had ended.
    early_bytes: u64,
}

impl Readings {
    /// Takes a message that has begun to arrive, whose contents begin at `start` of the sequence.
    pub(crate) fn begin(&mut self, incoming: Incoming, start: u64) {
        self.readings.push_back(Reading {
            incoming,
            start,
            compared: Vec::new(),
            has_ended: false,
        });
    }

    /// Compares what is shown anew; of messages that have ended, everything.
    ///
    /// # Errors
    /// A byte that is shown is not the one that was sent.
    pub(crate) fn look(&mut self) -> Result<(), String> {
        for reading in self.readings.iter_mut().filter(|reading| !reading.has_ended) {
            reading.has_ended = reading.incoming.settled().is_some();
            if reading.has_ended {
                reading.compared.clear();
            }
            let bytes = reading.compare()?;
            self.early_bytes += if reading.has_ended { 0 } else { bytes };
        }
        while self.readings.len() > KEPT && self.readings[0].has_ended {
            self.readings[0].compared.clear();
            let compared = self.readings[0].compare();
            self.readings.pop_front();
            compared?;
        }
        Ok(())
    }
}

impl Reading {
    /// Compares what is shown and was not yet compared; how many bytes.
    fn compare(&mut self) -> Result<u64, String> {
        let mut count = 0;
        let shown: Vec<Range<u64>> = self.incoming.shown().collect();
        // A wrong byte is told once.
        let before = std::mem::replace(&mut self.compared, shown.clone());
        for range in shown {
            let compared = before.iter().filter(|one| range.contains(&one.start));
            let ends = compared.clone().map(|one| one.end);
            let starts = compared.map(|one| one.start).chain([range.end]);
            for (start, end) in [range.start].into_iter().chain(ends).zip(starts) {
                let (tag, len) = (self.incoming.tag(), self.incoming.len());
                let bytes = (self.incoming.bytes(start..end)).map_err(|error| {
                    format!("bytes {:?} of message {tag} were shown: {error}", start..end)
                })?;
                if let Some(at) = first_wrong(self.start, start, bytes, &[]) {
                    return Err(format!(
                        "byte {at} of {len} of message {tag} was shown and is wrong"
                    ));
                }
                count += end - start;
            }
        }
        Ok(count)
    }
}
