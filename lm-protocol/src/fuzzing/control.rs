//! Admission messages: what is accepted is the same again when it is written.

use crate::control::{ControlError, ControlMessage, MAX_CONTROL_LEN};
use crate::wire::lm::{SEAL_VERSION, TYPE_SEALED, VERSION};

/// An admission message, or none.
pub fn control(bytes: &[u8]) {
    match ControlMessage::parse(bytes) {
        Ok((request_id, message)) => {
            let mut again = [0; MAX_CONTROL_LEN];
            let len = message.encode(request_id, &mut again);
            assert_eq!(len, bytes.len());
            assert_eq!(ControlMessage::parse(&again[..len]), Ok((request_id, message)));
        }
        Err(ControlError::VersionMismatch { theirs, request_id }) => {
            assert_ne!(theirs, VERSION);
            assert!(request_id.is_none() || bytes.len() >= 8);
        }
        // A seal has a version of its own.
        Err(error) => assert!(
            (bytes.first())
                .is_none_or(|&byte| byte >> 4 == VERSION || byte == SEAL_VERSION << 4 | TYPE_SEALED),
            "{error}"
        ),
    }
}
