use super::*;
use proptest::prelude::*;

fn id(number: u32) -> TransferId {
    TransferId::new(number).unwrap()
}

const REFUSALS: [Refusal; 8] = [
    Refusal::Version,
    Refusal::Malformed,
    Refusal::TooLarge,
    Refusal::Exists,
    Refusal::NotWritable,
    Refusal::DiskFull,
    Refusal::NotAllowed,
    Refusal::Busy,
];
const STATUSES: [Status; 8] = [
    Status::Complete,
    Status::Aborted,
    Status::WriteFailed,
    Status::Incomplete,
    Status::Inconsistent,
    Status::TimedOut,
    Status::Stopped,
    Status::Unknown,
];

#[test]
fn start_byte_by_byte() {
    let bytes = Control::Start {
        transfer: id(0x0102_0304),
        ipfrag: true,
        plan: Plan::new(Some(5 << 20), 1 << 20).unwrap(),
        key: Some(0x0506),
        resume: true,
    }
    .encode();
    assert_eq!(
        bytes,
        [
            b'L', b'M', b't', b'r', 3, 0, 0, 0, 1, 2, 3, 4, // head
            0, 0x84, 0x86, 0x88, 0x08, // START and its transfer
            1,    // ipfrag
            1, 0x80, 0x80, 0xc0, 0x02, // total_len
            0x80, 0x80, 0x40, // message_len
            1, 0x86, 0x0a, // key
            1,    // resume
        ]
    );
}

#[test]
fn the_longest_fits() {
    let (transfer, bytes, messages) = (id(u32::MAX - 1), u64::MAX, u64::MAX);
    let longest = [
        Control::Result {
            transfer,
            status: Status::Unknown,
            bytes,
            messages,
            text: "x".repeat(1000),
        },
        Control::Digests {
            transfer,
            offset: bytes,
            block_len: bytes,
            digests: vec![[0xff; 32]; DIGESTS_MAX],
        },
    ];
    let fits = |control: &Control| control.encode().len() <= CONTROL_LEN_MAX;
    assert!(longest.iter().all(fits));
    let [_, mut more] = longest;
    if let Control::Digests { digests, .. } = &mut more {
        digests.push([0; 32]);
    }
    assert!(Control::parse(&more.encode()).is_err(), "one digest more");
}

#[test]
fn every_kind_survives_the_wire() {
    let transfer = id(7);
    let plan = |total| Plan::new(total, 1448).unwrap();
    let mut all = vec![
        Control::Start {
            transfer,
            ipfrag: false,
            plan: plan(None),
            key: None,
            resume: false,
        },
        Control::Start {
            transfer,
            ipfrag: true,
            plan: plan(Some(1)),
            key: Some(0),
            resume: true,
        },
        Control::Ready { transfer, held: 9 },
        Control::Alive { transfer },
        Control::Check {
            transfer,
            offset: 9,
            block_len: 2,
            end: 32,
        },
        Control::Digests {
            transfer,
            offset: 9,
            block_len: 2,
            digests: vec![[7; 32]; DIGESTS_MAX],
        },
        Control::Begin { transfer, first: 9 },
        Control::Begun { transfer, first: 9 },
    ];
    for refusal in REFUSALS {
        all.push(Control::Refused {
            transfer,
            refusal,
            text: "größer".into(),
        });
    }
    for status in STATUSES {
        all.push(Control::End {
            transfer,
            status,
            bytes: 9,
            messages: 2,
        });
        all.push(Control::Result {
            transfer,
            status,
            bytes: 9,
            messages: 2,
            text: "x".into(),
        });
    }
    for control in all {
        let bytes = control.encode();
        assert!(bytes.len() <= CONTROL_LEN_MAX);
        assert_eq!(Control::parse(&bytes).as_ref(), Ok(&control));
        // Cut anywhere it is malformed, never a panic and never another message.
        for len in 0..bytes.len() {
            assert_eq!(
                Control::parse(&bytes[..len]),
                Err(ControlError::Malformed),
                "{control:?} cut at {len}"
            );
        }
    }
}

#[test]
fn another_version_is_told_before_anything_else() {
    let mut bytes = Control::Alive { transfer: id(7) }.encode();
    bytes[4] = 9;
    bytes[5] = 200;
    assert_eq!(
        Control::parse(&bytes),
        Err(ControlError::Version {
            theirs: 9,
            transfer: Some(id(7))
        })
    );
}

#[test]
fn impossible_plans_are_refused() {
    for (total, message_len) in [
        (Some(0), 1),
        (Some(5), 0),
        (None, 0),
        (Some((1 << 32) + 1), 1),
        (Some(u64::MAX), 1),
    ] {
        assert_eq!(Plan::new(total, message_len), None, "{total:?} {message_len}");
    }
    assert!(Plan::new(Some(1 << 32), 1).is_some());
    let bytes = Control::Start {
        transfer: id(7),
        ipfrag: false,
        plan: Plan {
            total_len: Some(10),
            message_len: 0,
        },
        key: None,
        resume: false,
    }
    .encode();
    assert_eq!(
        Control::parse(&bytes),
        Err(ControlError::ImpossiblePlan { transfer: id(7) })
    );
}

#[test]
fn data_tags_and_control_tags_never_meet() {
    for number in [1, 2, u32::MAX - 1] {
        for index in [0, 1, u32::MAX] {
            let tag = id(number).data_tag(index);
            assert_ne!(tag, CONTROL_TAG);
            assert_eq!(TransferId::from_data_tag(tag), Some((id(number), index)));
        }
    }
    assert_eq!(TransferId::from_data_tag(CONTROL_TAG), None);
    assert_eq!(TransferId::from_data_tag(7), None);
    assert_eq!(id(u32::MAX - 1).next(), id(1));
    assert_eq!(id(1).next(), id(2));
    assert_eq!(TransferId::from_random(u32::MAX).number(), 2);
}

#[test]
fn a_peers_text_cannot_drive_the_terminal() {
    let text = "\u{1b}[2Jgone\r\n\u{202e}x";
    let bytes = Control::Refused {
        transfer: id(1),
        refusal: Refusal::Busy,
        text: text.into(),
    }
    .encode();
    let Ok(Control::Refused { text, .. }) = Control::parse(&bytes) else {
        panic!()
    };
    assert_eq!(text, "?[2Jgone???x");
    let long = Control::Refused {
        transfer: id(1),
        refusal: Refusal::Busy,
        text: "ö".repeat(1000),
    };
    let Ok(Control::Refused { text, .. }) = Control::parse(&long.encode()) else {
        panic!()
    };
    assert_eq!(text, "ö".repeat(200));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _ = Control::parse(&bytes);
    }

    /// Random bodies behind a good magic and version reach every branch.
    #[test]
    fn random_bodies_never_panic(kind in 0u8..12, bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let mut message = b"LMtr\x03\0\0\0\0\0\0\x07".to_vec();
        message.push(kind);
        message.extend(bytes);
        if let Ok(control) = Control::parse(&message) {
            prop_assert_eq!(Control::parse(&control.encode()), Ok(control));
        }
    }
}
