//! What an application says of a session that it asks for.

use std::num::NonZeroU64;
use std::time::Duration;

use lm_protocol::delivery::Delivery;
use lm_protocol::geometry::Wire;

/// How to reach a peer.
#[derive(Clone, Copy, Debug)]
pub struct ConnectOptions {
    /// How fragments travel.
    pub wire: Wire,
    /// Longest message that will be sent, in bytes.
    pub max_message_len: u64,
    /// Messages that will be announced and unconfirmed at once.
    pub messages_in_flight: u32,
    /// What is to become of messages of which fragments are lost. With `ipfrag`, whose packets carry no session key, it is
    /// always [`Delivery::Unreliable`].
    pub delivery: Delivery,
    /// How long to try.
    pub timeout: Duration,
    /// Whether all messages take the one-copy path, which the receiving host's kernel copies: the session never takes a place of the
    /// receiver's landing queue. Else they do while there is no place for it, and land from the next one on when there is;
    /// [`Counters::messages_one_copy`](crate::Counters::messages_one_copy) tells how many did not. With `ipfrag` a session waits for its place.
    pub one_copy: bool,
    /// Whether to ask for a session now. Without one only messages of one fragment can be sent.
    pub session: bool,
    /// Most that may leave for the peer while the session lasts, in bits per second of Ethernet frames, from the
    /// destination address to the last payload byte (no preamble, no checksum). Over any time `t` no more than
    /// `rate · t` leaves and a burst: as many full packets as the rate brings in a millisecond, 4 at least and 256 at
    /// most (one packet more where messages of one fragment go as well). Repeated fragments and small messages count;
    /// acknowledgements and other control packets do not.
    ///
    /// A receiver gives a message up that brings no packet for its `patience`: full packets should leave more
    /// often than that.
    pub rate: Option<NonZeroU64>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            wire: Wire::Lm,
            max_message_len: 1 << 20,
            messages_in_flight: 8,
            delivery: Delivery::Reliable,
            timeout: Duration::from_secs(3),
            one_copy: false,
            session: true,
            rate: None,
        }
    }
}
