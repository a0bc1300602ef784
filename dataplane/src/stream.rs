//! What the general channel is used for: a stream of small messages, an exchange of them, or neither.

/// Tells a stream of eager messages from an exchange of them: many came since the last one left.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stream {
    since_sent: u32,
    empty_looks: u32,
    /// A message came since the last one left.
    has_come: bool,
    /// When a message last left after another had come.
    answered_ns: Option<u64>,
    /// What left last was of many fragments.
    is_long: bool,
    /// Rounds in sequence that did nothing but bring a message of an exchange.
    hurried: u32,
}

impl Stream {
    /// So many in one direction are a stream.
    const LENGTH: u32 = 64;
    /// So many looks without a packet end it.
    const PATIENCE: u32 = 2000;
    /// An answer was so long ago: the exchange is over.
    const EXCHANGE_NS: u64 = 1_000_000;
    /// So many rounds in sequence do nothing but bring a message of an exchange.
    const HURRIED_MAX: u32 = 8;

    /// A message leaves; whether it answers one, so that somebody waits for it.
    pub(crate) fn sent(&mut self, now_ns: u64) -> bool {
        self.is_long = false;
        if std::mem::take(&mut self.has_come) {
            self.answered_ns = Some(now_ns);
        }
        std::mem::take(&mut self.since_sent) > 0
    }

    /// Something else leaves, which a flow sends: what comes is answered, and no stream.
    pub(crate) fn left_apart(&mut self) {
        self.since_sent = 0;
    }

    /// A message has come: what comes else on the channel (credits, acknowledgements) asks for no answer.
    pub(crate) fn message_came(&mut self) {
        self.has_come = true;
    }

    pub(crate) fn looked(&mut self, packets: u32) {
        if packets > 0 {
            self.since_sent = self.since_sent.saturating_add(packets);
            self.empty_looks = 0;
        } else {
            self.empty_looks = self.empty_looks.saturating_add(1);
            if self.empty_looks > Stream::PATIENCE {
                self.since_sent = 0;
            }
        }
    }

    pub(crate) fn is_hot(&self) -> bool {
        self.since_sent >= Stream::LENGTH
    }

    /// Whether small messages go to and fro, so that somebody waits for each.
    pub(crate) fn is_exchange(&self, now_ns: u64) -> bool {
        !self.is_hot()
            && (self.answered_ns).is_some_and(|then| now_ns.saturating_sub(then) < Stream::EXCHANGE_NS)
    }

    /// What leaves now is of many fragments, which go together.
    pub(crate) fn answers_long(&mut self) {
        self.is_long = true;
    }

    /// Whether small messages go to and fro, so that bulk leaves in short bursts.
    pub(crate) fn is_exchange_of_small(&self, now_ns: u64) -> bool {
        !self.is_long && self.is_exchange(now_ns)
    }

    /// Whether a round that brought a message has the rest wait: the message is part of an exchange, and its sender waits for the answer.
    #[inline]
    pub(crate) fn hurries(&mut self, now_ns: u64) -> bool {
        let hurries = self.is_exchange(now_ns) && self.hurried < Stream::HURRIED_MAX;
        self.hurried += u32::from(hurries);
        hurries
    }

    /// A round does all that is to be done.
    #[inline]
    pub(crate) fn takes_time(&mut self) {
        self.hurried = 0;
    }
}
