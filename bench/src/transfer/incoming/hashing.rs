//! Digests of what is there, for which senders ask: a thread takes them, a slice at a time. The address of a slice rests as long as the
//! slice took, and others have their turns meanwhile: one packet may ask for hours of work, which holds up nothing else.

use std::fs::File;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

use crate::transfer::wire::Digest;

/// What is hashed at once, in bytes: a millisecond or two.
const SLICE_LEN: usize = 1 << 20;

/// Questions that the thread has not looked at yet. One that finds no room is asked again.
const ASKED_MAX: usize = 64;

/// The thread gives way to what receives: its nice value.
const NICE: i32 = 10;

/// Which blocks are asked for, and of what. It is worked at as long as its transfer keeps it.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) from: Ipv4Addr,
    pub(super) file: File,
    pub(super) offset: u64,
    pub(super) block_len: u64,
    /// Where the last block ends; not behind the end of what is there.
    pub(super) end: u64,
    /// The digests, or those before the first byte that could not be read.
    pub(super) answer: OnceLock<Vec<Digest>>,
}

/// The thread's end on the receiver's side; it begins with the first question.
#[derive(Debug, Default)]
pub(super) struct Hasher(Option<SyncSender<Weak<Question>>>);

impl Hasher {
    /// Whether the question will be worked at. Without a thread its answer is that nothing can be read.
    pub(super) fn ask(&mut self, question: &Arc<Question>) -> bool {
        if self.0.is_none() {
            let (ask, asked) = sync_channel(ASKED_MAX);
            let thread = thread::Builder::new().name("digests".to_owned());
            self.0 = thread.spawn(move || work(&asked)).ok().map(|_| ask);
        }
        let sent = self.0.as_ref().map(|ask| ask.try_send(Arc::downgrade(question)));
        match sent {
            Some(Ok(())) => return true,
            Some(Err(TrySendError::Full(_))) => return false,
            None | Some(Err(TrySendError::Disconnected(_))) => self.0 = None,
        }
        question.answer.set(Vec::new()).is_ok()
    }
}

/// A question under way.
struct Job {
    question: Weak<Question>,
    from: Ipv4Addr,
    hash: Sha256,
    /// The next byte, and where its block ends.
    at: u64,
    block_end: u64,
    digests: Vec<Digest>,
}

impl Job {
    fn new(question: Weak<Question>) -> Option<Job> {
        let asked = question.upgrade()?;
        Some(Job {
            question,
            from: asked.from,
            hash: Sha256::new(),
            at: asked.offset,
            block_end: asked.offset.saturating_add(asked.block_len).min(asked.end),
            digests: Vec::new(),
        })
    }

    /// Hashes a slice. `false`: the question is answered, or asked no more.
    fn go_on(&mut self, slice: &mut [u8]) -> bool {
        let Some(question) = self.question.upgrade() else {
            return false;
        };
        let len = self.block_end.saturating_sub(self.at).min(slice.len() as u64) as usize;
        match question.file.read_at(&mut slice[..len], self.at) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return true,
            Ok(read) if read > 0 => {
                self.hash.update(&slice[..read]);
                self.at += read as u64;
                if self.at == self.block_end {
                    self.digests.push(self.hash.finalize_reset().into());
                    self.block_end = self.at.saturating_add(question.block_len).min(question.end);
                }
                if self.at < question.end {
                    return true;
                }
            }
            // What cannot be read is sent again.
            _ => {}
        }
        let _ = question.answer.set(std::mem::take(&mut self.digests));
        false
    }
}

/// Works until the receiver is gone.
fn work(asked: &Receiver<Weak<Question>>) {
    // Of this thread alone (setpriority(2)); what is refused leaves it as it is.
    let _ = rustix::process::nice(NICE);
    let mut slice = vec![0; SLICE_LEN];
    let mut jobs: Vec<Job> = Vec::new();
    let mut resting: Vec<(Ipv4Addr, Instant)> = Vec::new();
    loop {
        jobs.extend(asked.try_iter().filter_map(Job::new));
        jobs.retain(|job| job.question.strong_count() > 0);
        let now = Instant::now();
        resting.retain(|(_, until)| *until > now);
        let rests = |job: &Job| resting.iter().any(|(from, _)| *from == job.from);
        let Some(next) = jobs.iter().position(|job| !rests(job)) else {
            let soonest = resting.iter().map(|(_, until)| *until - now).min();
            let wait = soonest.filter(|_| !jobs.is_empty()).unwrap_or(Duration::MAX);
            match asked.recv_timeout(wait) {
                Ok(question) => jobs.extend(Job::new(question)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            continue;
        };
        let mut job = jobs.remove(next);
        let is_unanswered = job.go_on(&mut slice);
        resting.push((job.from, Instant::now() + now.elapsed()));
        if is_unanswered {
            jobs.push(job);
        }
    }
}
