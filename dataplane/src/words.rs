//! Words: opaque bytes that a message's sender gives along with the announcement, for who decides where the message lands.

use lm_protocol::wire::lm::AnnounceEntry;

const LEN_MAX: usize = AnnounceEntry::OPAQUE_LEN_MAX;

/// Opaque bytes of a message: 48 at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    bytes: [u8; LEN_MAX],
    len: u8,
}

impl Words {
    pub(crate) const NONE: Words = Words {
        bytes: [0; LEN_MAX],
        len: 0,
    };

    pub(crate) fn new(words: &[u8]) -> Result<Words, WordsError> {
        let mut bytes = [0; LEN_MAX];
        let room = bytes.get_mut(..words.len());
        room.ok_or(WordsError::TooLong { len: words.len() })?
            .copy_from_slice(words);
        Ok(Words {
            bytes,
            len: words.len() as u8,
        })
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// Why a message has no opaque bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WordsError {
    /// There are more than an announcement holds.
    #[error("{len} opaque bytes are too many: give a message {LEN_MAX} at most")]
    TooLong {
        /// How many there are.
        len: usize,
    },
    /// It has no announcement.
    #[error(
        "messages of one packet, and to hosts without LM, have no opaque bytes: put them into the message"
    )]
    NotAnnounced,
}
