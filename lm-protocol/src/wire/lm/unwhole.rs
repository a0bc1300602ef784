//! What a CREDIT's payload names: messages that are settled and not whole.

/// A receiver says of so many settled messages whether they are whole: as many as may be under way.
pub const SETTLED_KEPT: u32 = 256;

/// A word so far ahead of the header's `delivered` begins a group: less than that behind it no message is under way.
const GROUP: u32 = 1 << 31;
/// Statuses are 16 bits long; behind them is the group of those of which fragments are missing.
const MISSING: u32 = 1 << 16;

/// A message that is settled and not whole.
///
/// ```text
///  0               4               8                        12              16
/// +---------------+---------------+------------------------+---------------+- -
/// |  message u32  |  message u32  |  delivered + 2^31 + s  |  message u32  |
/// +---------------+---------------+------------------------+---------------+- -
/// ```
///
/// Fragments are missing of the first ones. A word `s` ahead of the farthest number from the header's `delivered` says of those behind it
/// that the receiver declined them with the status `s`; with an `s` of 65,536 that fragments are missing again. To a sender that knows
/// of no statuses such a word is the number of a message that is not under way, and the others are incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnwholeMessage {
    /// Its number.
    pub message: u32,
    /// The status that the receiver declined it with; `None`: fragments are missing.
    pub declined: Option<u16>,
}

impl UnwholeMessage {
    /// Those in a CREDIT's payload with this `delivered`.
    pub fn iter(payload: &[u8], delivered: u32) -> impl Iterator<Item = UnwholeMessage> + '_ {
        let words = payload.as_chunks::<4>().0.iter();
        let mut declined = None;
        words.filter_map(move |bytes| {
            let message = u32::from_be_bytes(*bytes);
            match message.wrapping_sub(delivered.wrapping_add(GROUP)) {
                ahead @ 0..=MISSING => {
                    declined = u16::try_from(ahead).ok();
                    None
                }
                _ => Some(UnwholeMessage { message, declined }),
            }
        })
    }

    /// Writes messages, near `delivered`, to the payload of a CREDIT that says `delivered`, as far as there is room: those with the same status
    /// had best be neighbours. Where all would have room, but not their statuses too, the last ones are incomplete. Gives the length.
    pub fn encode_all(
        messages: impl Iterator<Item = UnwholeMessage> + Clone,
        delivered: u32,
        payload: &mut [u8],
    ) -> usize {
        let (mut len, mut group) = (0, None);
        let mut beginnings = (payload.len() / 4).saturating_sub(messages.clone().count());
        for UnwholeMessage { message, declined } in messages {
            // The last beginning is that of those without a status.
            let declined = declined.filter(|_| group == declined || beginnings > 1);
            beginnings -= usize::from(group != declined);
            let ahead = declined.map_or(MISSING, u32::from);
            let begins = (group != declined).then(|| delivered.wrapping_add(GROUP).wrapping_add(ahead));
            let words = begins.into_iter().chain([message]);
            let needed = 4 * words.clone().count();
            let Some(room) = payload.get_mut(len..len + needed) else {
                break;
            };
            for (bytes, word) in room.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                *bytes = word.to_be_bytes();
            }
            (len, group) = (len + needed, declined);
        }
        len
    }
}
