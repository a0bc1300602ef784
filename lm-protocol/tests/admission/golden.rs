//! What daemons say to each other, byte by byte. The dumps come from a few lines of Python with its own HMAC, not from this crate.
//! The bodies of LM_REQ, LM_ACQ_OK, LM_ACQ_REJ and LM_ENDME_OK are those of the golden tests of `lm_protocol::control`.

use crate::world::address;
use lm_protocol::admission::message::*;
use lm_protocol::admission::seal::*;
use lm_protocol::control::{ControlError, ControlMessage, End};
use proptest::prelude::*;
use std::net::{Ipv4Addr, SocketAddrV4};

const A: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

fn key() -> ClusterKey {
    let bytes: Vec<u8> = (0..32).collect();
    ClusterKey::new(&bytes).unwrap()
}

fn bytes(dump: &str) -> Vec<u8> {
    dump.split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

const BOOT_TO_ECHO: &str =
    "b0 07 b0 07 b0 07 b0 07 00 00 00 00 00 00 00 05 0c 0c 0c 0c 0c 0c 0c 0c e0 e0 e0 e0 e0 e0 e0 e0";

fn header(port: u16) -> SealHeader {
    SealHeader {
        port,
        boot_id: 0xb007_b007_b007_b007,
        sequence: 5,
        challenge: 0x0c0c_0c0c_0c0c_0c0c,
        echo: 0xe0e0_e0e0_e0e0_e0e0,
    }
}

/// The message from host 10.0.0.1 to 10.0.0.2, or to all, port 7169.
fn check(message: Message, is_for_all: bool, port: u16, start: &str, body_and_tag: &str) {
    let expected = bytes(&format!("{start} {BOOT_TO_ECHO} {body_and_tag}"));
    let mut body = [0; MAX_BODY_LEN];
    let len = message.encode(&mut body);
    let to = (!is_for_all).then_some(address(1));
    let sealed = key().seal(address(0), to, &header(port), &body[..len]);
    assert_eq!(sealed.as_bytes(), expected, "{message:?}");
    let (opened, body) = key().open(address(0), address(1), &expected).unwrap();
    assert_eq!(opened, header(port));
    assert_eq!(Message::parse(body), Ok(message));
    let by_third = key().open(address(0), address(2), &expected);
    assert_eq!(by_third.is_ok(), is_for_all, "who else may open {message:?}");
}

#[test]
fn lm_append_addr() {
    let append = |stage, lease_ms| {
        Message::Append(Append {
            address: A,
            stage,
            number: 7,
            lease_ms,
        })
    };
    check(
        append(Stage::Claim, 2000),
        false,
        0,
        "1e 00 00 30 00 00 00 00",
        "2f 00 00 18 00 00 00 00 06 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
         0a 00 00 01 01 00 00 00 00 00 00 00 00 00 00 07 00 00 07 d0 00 00 00 00 \
         fa 3d 47 56 57 77 c6 ec 7f 88 29 61 a9 b8 a6 23",
    );
    check(
        append(Stage::Active, 1750),
        true,
        0,
        "1e 01 00 30 00 00 00 00",
        "2f 00 00 18 00 00 00 00 06 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
         0a 00 00 01 02 00 00 00 00 00 00 00 00 00 00 07 00 00 06 d6 00 00 00 00 \
         6b d5 d1 99 76 e6 dd 82 2d f1 0f 22 c7 ef b1 54",
    );
}

#[test]
fn lm_remove_addr() {
    check(
        Message::Remove(Remove {
            address: A,
            number: 7,
        }),
        true,
        0,
        "1e 01 00 28 00 00 00 00",
        "2f 00 00 10 00 00 00 00 07 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
         0a 00 00 01 00 00 00 00 00 00 00 00 00 00 00 07 \
         24 4e 5e 79 4f a9 ab 56 ff 46 04 44 1c fe c7 be",
    );
}

#[test]
fn lm_addr_ok() {
    check(
        Message::Answer(Answer {
            address: B,
            number: 9,
            verdict: Verdict::Held,
            holder: Ipv4Addr::new(10, 0, 0, 3),
        }),
        false,
        0,
        "1e 00 00 30 00 00 00 00",
        "2f 00 00 18 00 00 00 00 08 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
         0a 00 00 02 02 00 00 00 00 00 00 00 00 00 00 09 0a 00 00 03 00 00 00 00 \
         6d 85 a5 c0 35 f9 36 3b 7e 98 17 08 4e 70 72 02",
    );
}

#[test]
fn lm_hello() {
    check(
        Message::Hello,
        false,
        0,
        "1e 00 00 18 00 00 00 00",
        "2f 00 00 00 00 00 00 00 09 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
         cb 2d 14 bc 9d 6f 0e 5d b4 ad 05 81 79 49 7f 35",
    );
}

#[test]
fn lm_endme_in_its_seal() {
    check(
        Message::Session {
            request_id: 0x0102_0304,
            message: ControlMessage::End(End {
                session_key: 0x1122_3344_5566_7788,
                messages: 3,
            }),
        },
        false,
        7168,
        "1e 00 00 28 1c 00 00 00",
        "2f 00 00 10 01 02 03 04 02 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
         11 22 33 44 55 66 77 88 00 00 00 03 00 00 00 00 \
         e0 f3 6d dd 4a 6a a4 ea d5 93 b8 79 4b fd b3 a1",
    );
}

/// As version 1 sealed it. The seal is the same, so that each end learns the other's version from the message inside.
#[test]
fn a_message_of_version_1_in_its_seal() {
    let dump = "1f 00 00 10 01 02 03 04 02 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
                11 22 33 44 55 66 77 88 00 00 00 03 00 00 00 00 \
                27 ed b8 36 78 c6 4e 09 99 03 c6 d9 cf 0f 88 b2";
    let sealed = bytes(&format!("1e 00 00 28 1c 00 00 00 {BOOT_TO_ECHO} {dump}"));
    let (opened, body) = key().open(address(0), address(1), &sealed).unwrap();
    assert_eq!(opened, header(7168));
    let told = ControlError::VersionMismatch {
        theirs: 1,
        request_id: Some(0x0102_0304),
    };
    assert_eq!(Message::parse(body), Err(told));
}

pub(crate) fn any_message() -> impl Strategy<Value = Message> {
    let append = (any::<u32>(), any::<bool>(), any::<u64>(), any::<u32>()).prop_map(
        |(ip, claim, number, lease_ms)| {
            Message::Append(Append {
                address: ip.into(),
                stage: if claim { Stage::Claim } else { Stage::Active },
                number,
                lease_ms,
            })
        },
    );
    let remove = (any::<u32>(), any::<u64>()).prop_map(|(ip, number)| {
        Message::Remove(Remove {
            address: ip.into(),
            number,
        })
    });
    let verdicts = [
        Verdict::Promised,
        Verdict::Held,
        Verdict::Abstains,
        Verdict::Released,
    ];
    let answer = (any::<u32>(), any::<u64>(), 0..4usize, any::<u32>()).prop_map(
        move |(ip, number, verdict, holder)| {
            Message::Answer(Answer {
                address: ip.into(),
                number,
                verdict: verdicts[verdict],
                holder: holder.into(),
            })
        },
    );
    let end = (any::<u32>(), any::<u64>(), any::<u32>()).prop_map(|(request_id, session_key, messages)| {
        Message::Session {
            request_id,
            message: ControlMessage::End(End {
                session_key,
                messages,
            }),
        }
    });
    let request = (any::<u32>(), any::<u64>(), any::<u64>()).prop_map(|(request_id, sender_id, len)| {
        Message::Session {
            request_id,
            message: ControlMessage::Request(crate::gate::request(sender_id, len)),
        }
    });
    prop_oneof![append, remove, answer, end, request, Just(Message::Hello)]
}

pub(crate) fn any_address() -> impl Strategy<Value = SocketAddrV4> {
    (any::<u32>(), any::<u16>()).prop_map(|(ip, port)| SocketAddrV4::new(ip.into(), port))
}

proptest! {
    #[test]
    fn messages_are_the_same_again(message in any_message()) {
        let mut body = [0; MAX_BODY_LEN];
        let len = message.encode(&mut body);
        prop_assert_eq!(Message::parse(&body[..len]), Ok(message));
    }

    #[test]
    fn what_is_sealed_is_opened(
        body in prop::collection::vec(any::<u8>(), 0..=MAX_BODY_LEN),
        from in any_address(),
        to in prop::option::of(any_address()),
        us in any_address(),
        (port, boot_id, sequence, challenge, echo) in any::<(u16, u64, u64, u64, u64)>(),
    ) {
        let header = SealHeader { port, boot_id, sequence, challenge, echo };
        let sealed = key().seal(from, to, &header, &body);
        let opened = key().open(from, to.unwrap_or(us), sealed.as_bytes());
        prop_assert_eq!(opened, Ok((header, &body[..])));
    }
}
