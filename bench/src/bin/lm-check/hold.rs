//! Delivered messages that are kept and looked at again: none of their bytes may ever change (invariant I1).

use std::collections::VecDeque;
use std::ops::Deref;

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// How often kept messages were looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct HeldReport {
    /// Messages that were kept.
    pub(crate) messages: u64,
    /// Their payload bytes.
    pub(crate) bytes: u64,
    /// Digests that were taken of messages after their delivery.
    pub(crate) looks: u64,
}

/// Keeps the latest messages, up to a number of bytes.
#[derive(Debug)]
pub(crate) struct Held<M> {
    limit_bytes: u64,
    bytes: u64,
    /// Oldest first, each with the digest that it had when it was delivered.
    messages: VecDeque<(M, u64)>,
    /// Whose turn it is.
    next: usize,
    report: HeldReport,
}

impl<M: Deref<Target = [u8]>> Held<M> {
    /// Keeps up to `limit_bytes`; with 0 nothing.
    pub(crate) fn new(limit_bytes: u64) -> Held<M> {
        Held {
            limit_bytes,
            bytes: 0,
            messages: VecDeque::new(),
            next: 0,
            report: HeldReport::default(),
        }
    }

    /// What was done so far.
    pub(crate) fn report(&self) -> HeldReport {
        self.report
    }

    /// Keeps a message and lets the oldest go where there are too many bytes; each is looked at before it goes.
    ///
    /// # Errors
    /// A kept message has changed.
    pub(crate) fn keep(&mut self, message: M) -> Result<(), String> {
        if self.limit_bytes == 0 {
            return Ok(());
        }
        self.bytes += message.len() as u64;
        self.report.messages += 1;
        self.report.bytes += message.len() as u64;
        let digest = xxh3_64(&message);
        self.messages.push_back((message, digest));
        while self.bytes > self.limit_bytes {
            self.look_at(0)?;
            let Some((oldest, _)) = self.messages.pop_front() else {
                break;
            };
            self.bytes -= oldest.len() as u64;
            self.next = self.next.saturating_sub(1);
        }
        Ok(())
    }

    /// Looks at the next one; `false` when nothing is kept.
    ///
    /// # Errors
    /// It has changed.
    pub(crate) fn look(&mut self) -> Result<bool, String> {
        if self.messages.is_empty() {
            return Ok(false);
        }
        let at = self.next % self.messages.len();
        self.next = at + 1;
        self.look_at(at).map(|()| true)
    }

    /// Looks at each once more.
    ///
    /// # Errors
    /// One has changed.
    pub(crate) fn look_at_all(&mut self) -> Result<(), String> {
        (0..self.messages.len()).try_for_each(|at| self.look_at(at))
    }

    fn look_at(&mut self, at: usize) -> Result<(), String> {
        let Some((message, digest)) = self.messages.get_mut(at) else {
            return Ok(());
        };
        self.report.looks += 1;
        let now = xxh3_64(message);
        if now == *digest {
            return Ok(());
        }
        // Told once.
        *digest = now;
        Err(format!(
            "a message of {} bytes changed after it was delivered, while {} others were kept",
            message.len(),
            self.messages.len() - 1
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_messages_go_and_all_are_looked_at() {
        let mut held = Held::new(30);
        for byte in 0..5 {
            held.keep(vec![byte; 10]).unwrap();
        }
        assert_eq!((held.messages.len(), held.bytes), (3, 30));
        assert_eq!(
            held.report(),
            HeldReport {
                messages: 5,
                bytes: 50,
                looks: 2
            }
        );
        for _ in 0..6 {
            assert!(held.look().unwrap());
        }
        held.look_at_all().unwrap();
        assert_eq!(held.report().looks, 2 + 6 + 3);
        let mut nothing = Held::<Vec<u8>>::new(0);
        nothing.keep(vec![1]).unwrap();
        assert_eq!(
            (nothing.look(), nothing.report()),
            (Ok(false), HeldReport::default())
        );
    }

    #[test]
    fn a_change_is_told_once() {
        let mut held = Held::new(100);
        held.keep(vec![1; 10]).unwrap();
        held.keep(vec![2; 10]).unwrap();
        held.messages[1].0[3] ^= 1;
        assert!(held.look().is_ok());
        let fault = held.look().unwrap_err();
        assert!(fault.contains("changed after it was delivered"), "{fault}");
        held.look_at_all().unwrap();
    }
}
