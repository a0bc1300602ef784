//! What a test sends from one endpoint to another, and what it checks of it; on whatever bed, one at a time.
#![allow(dead_code, unreachable_pub)] // each test program has its own copy and uses a part

use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use lm_dataplane::{
    Completion, ConnectOptions, Endpoint, EndpointConfig, LoanError, Message, Outcome, PeerId, RecvError,
    SendToken,
};

/// No test waits longer for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// One bed at a time: each test takes both cores of a small machine.
static ALONE: Mutex<()> = Mutex::new(());
/// What endpoints say of programs that are faulty, since the bed was made.
static BLAME: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Listens to what endpoints say.
struct Listener;

impl tracing::Subscriber for Listener {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Words(String);
        impl tracing::field::Visit for Words {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?} ");
            }
        }
        let mut words = Words(String::new());
        event.record(&mut words);
        if words.0.contains("program is faulty") {
            BLAME.lock().unwrap_or_else(PoisonError::into_inner).push(words.0);
        }
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// One bed. Where its endpoints are all honest, none says of another that it is faulty.
pub struct Alone {
    are_honest: bool,
    _guard: MutexGuard<'static, ()>,
}

impl Alone {
    pub fn new(are_honest: bool) -> Alone {
        static LISTENS: Once = Once::new();
        LISTENS.call_once(|| tracing::subscriber::set_global_default(Listener).expect("the first"));
        // A test that failed leaves nothing behind that others could see.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        BLAME.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Alone {
            are_honest,
            _guard: alone,
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        if self.are_honest && !std::thread::panicking() {
            let blame = BLAME.lock().unwrap_or_else(PoisonError::into_inner).clone();
            assert_eq!(blame, [""; 0], "an honest endpoint was blamed");
        }
    }
}

pub fn open(config: &EndpointConfig) -> Endpoint {
    Endpoint::open(config).unwrap_or_else(|error| panic!("{}: {error}", config.interface))
}

/// Polls until the condition holds.
pub fn wait_until(endpoint: &mut Endpoint, what: &str, mut condition: impl FnMut(&mut Endpoint) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition(endpoint) {
        assert!(
            Instant::now() < deadline,
            "waiting until {what}: {:?}",
            endpoint.counters()
        );
        if endpoint.poll() == 0 {
            endpoint.wait(Duration::from_millis(1));
        }
    }
}

/// For messages of up to `len` bytes, which land: on a busy machine a grant may take so long that others would begin before. A receiver whose
/// memory grows answers when the kernel has released its queue, which then takes a second, or tries again after 5 s.
pub fn up_to(len: u64) -> ConnectOptions {
    ConnectOptions {
        max_message_len: len,
        timeout: PATIENCE / 2,
        ..ConnectOptions::default()
    }
}

/// The content of message `tag`: no two fragments of any two are alike.
pub fn content(tag: u64, len: u64) -> Vec<u8> {
    let mut state = tag.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = Vec::with_capacity(len as usize + 8);
    while (bytes.len() as u64) < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}

/// Sends without a copy of the library's: written into the loaned region.
pub fn send(endpoint: &mut Endpoint, peer: PeerId, tag: u64, bytes: &[u8]) -> SendToken {
    let deadline = Instant::now() + PATIENCE;
    let mut region = loop {
        match endpoint.loan(peer, bytes.len() as u64) {
            Ok(region) => break region,
            Err(LoanError::WouldBlock) => endpoint.wait(Duration::from_millis(1)),
            Err(error) => panic!("message {tag} of {}: {error}", bytes.len()),
        }
        assert!(
            Instant::now() < deadline,
            "no memory for message {tag}: {:?}",
            endpoint.counters()
        );
    };
    std::io::Write::write_all(&mut region, bytes).expect("the region is as long as was asked for");
    assert_eq!(region.written(), bytes.len() as u64);
    endpoint
        .send(region, tag)
        .unwrap_or_else(|error| panic!("message {tag}: {error}"))
}

pub fn recv(endpoint: &mut Endpoint) -> Message {
    match endpoint.recv(Some(PATIENCE)) {
        Ok(message) => message,
        Err(error @ RecvError::TimedOut) => panic!("{error}: {:?}", endpoint.counters()),
        Err(error) => panic!("{error}: {:?}", endpoint.counters()),
    }
}

/// Checks every byte, and that the slice is where its kind of message has to be.
pub fn check(endpoint: &Endpoint, message: &Message, tag: u64, len: u64) {
    let counters = endpoint.counters();
    assert_eq!((message.tag(), message.len() as u64), (tag, len), "{counters:?}");
    assert!(
        **message == *content(tag, len),
        "message {tag} of {len} bytes is not what was sent"
    );
    let landing = endpoint.status().landing_range();
    let slice = message.umem_offset()..message.umem_offset() + len;
    let inside = landing.start <= slice.start && slice.end <= landing.end;
    assert_eq!(
        inside,
        !message.is_eager(),
        "message {tag}: {slice:?} of {landing:?}"
    );
}

/// Waits for the completion of everything sent, and takes the completions.
pub fn settle(endpoint: &mut Endpoint) -> Vec<Completion> {
    endpoint
        .flush(PATIENCE)
        .unwrap_or_else(|error| panic!("{error}: {:?}", endpoint.counters()));
    completions(endpoint)
}

pub fn completions(endpoint: &mut Endpoint) -> Vec<Completion> {
    std::iter::from_fn(|| endpoint.try_completion()).collect()
}

pub fn assert_delivered(completions: &[Completion], expected: &[(SendToken, u64, u64)]) {
    let mut found: Vec<_> = completions.iter().map(|c| (c.token, c.tag, c.len)).collect();
    let mut expected = expected.to_vec();
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);
    for completion in completions {
        assert_eq!(completion.outcome, Outcome::Delivered, "{completion:?}");
        assert!(completion.latency_ns > 0, "{completion:?}");
    }
}

/// What one thread of a test tells the others.
#[derive(Default)]
pub struct Flag(Mutex<bool>, Condvar);

impl Flag {
    pub fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_all();
    }

    pub fn is_set(&self) -> bool {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for another thread.
    #[track_caller]
    pub fn wait(&self) {
        let value = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.1.wait_timeout_while(value, PATIENCE, |is_set| !*is_set);
        let is_set = *waited.unwrap_or_else(PoisonError::into_inner).0;
        assert!(is_set, "the other side");
    }
}
