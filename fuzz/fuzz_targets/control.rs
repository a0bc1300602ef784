//! Admission messages: what is accepted is the same again when it is written.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lm_protocol::control::{ControlError, ControlMessage, MAX_CONTROL_LEN};
use lm_protocol::wire::lm::VERSION;

fuzz_target!(|bytes: &[u8]| {
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
        Err(error) => assert!(bytes.first().is_none_or(|byte| byte >> 4 == VERSION), "{error}"),
    }
});
