//! Delivered messages that are kept and looked at again: none of their bytes may ever change (invariant I1).

use std::collections::VecDeque;
use std::ops::Deref;

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// Messages that are kept, up to a number of bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Held<M> {
    #[serde(skip)]
    limit_bytes: u64,
    #[serde(skip)]
    bytes: u64,
    /// Each with the digest that it had when it was delivered; the next one to be read comes first.
    #[serde(skip)]
    kept: VecDeque<(M, u64)>,
    /// Messages that were kept.
    messages: u64,
    /// Digests that were taken of messages after their delivery.
    looks: u64,
}

impl<M: Deref<Target = [u8]>> Held<M> {
    /// Keeps up to `limit_bytes`; with 0 nothing.
    pub(crate) fn new(limit_bytes: u64) -> Held<M> {
        Held {
            limit_bytes,
            bytes: 0,
            kept: VecDeque::new(),
            messages: 0,
            looks: 0,
        }
    }

    /// Keeps a message and lets others go where there are too many bytes; each is looked at before it goes.
    ///
    /// # Errors
    /// A kept message has changed.
    pub(crate) fn keep(&mut self, message: M) -> Result<(), String> {
        if self.limit_bytes == 0 {
            return Ok(());
        }
        self.bytes += message.len() as u64;
        self.messages += 1;
        let digest = xxh3_64(&message);
        self.kept.push_back((message, digest));
        while self.bytes > self.limit_bytes {
            let looked = self.look();
            let gone = self.kept.pop_back();
            self.bytes -= gone.map_or(0, |(message, _)| message.len() as u64);
            looked?;
        }
        Ok(())
    }

    /// Looks at the next one; `false` when nothing is kept.
    ///
    /// # Errors
    /// It has changed.
    pub(crate) fn look(&mut self) -> Result<bool, String> {
        let Some((message, digest)) = self.kept.pop_front() else {
            return Ok(false);
        };
        self.looks += 1;
        let (now, len, others) = (xxh3_64(&message), message.len(), self.kept.len());
        // A change is told once.
        self.kept.push_back((message, now));
        match now == digest {
            true => Ok(true),
            false => Err(format!(
                "a message of {len} bytes changed after it was delivered, while {others} others were kept"
            )),
        }
    }

    /// Looks at each once more.
    ///
    /// # Errors
    /// One has changed.
    pub(crate) fn look_at_all(&mut self) -> Result<(), String> {
        (0..self.kept.len()).try_for_each(|_| self.look().map(drop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_go_and_all_are_looked_at() {
        let mut held = Held::new(30);
        for byte in 0..5 {
            held.keep(vec![byte; 10]).unwrap();
        }
        assert_eq!((held.kept.len(), held.bytes), (3, 30));
        assert_eq!((held.messages, held.looks), (5, 2));
        for _ in 0..6 {
            assert!(held.look().unwrap());
        }
        held.look_at_all().unwrap();
        assert_eq!(held.looks, 2 + 6 + 3);
        let mut nothing = Held::<Vec<u8>>::new(0);
        nothing.keep(vec![1]).unwrap();
        assert_eq!((nothing.look(), nothing.messages), (Ok(false), 0));
    }

    #[test]
    fn a_change_is_told_once() {
        let mut held = Held::new(100);
        held.keep(vec![1; 10]).unwrap();
        held.keep(vec![2; 10]).unwrap();
        held.kept[1].0[3] ^= 1;
        assert!(held.look().is_ok());
        let fault = held.look().unwrap_err();
        assert!(fault.contains("changed after it was delivered"), "{fault}");
        held.look_at_all().unwrap();
    }
}
