//! Entries of ANNOUNCE and CREDIT.

use crate::*;

/// What an extension adds to an entry is skipped by its length, and a way of delivery that is not known is the session's.
#[test]
fn what_is_not_known_of_an_entry_is_skipped() {
    let entry = AnnounceEntry {
        len: 5,
        tag: 6,
        delivery: Some(Delivery::Partial),
        windows_released: 7,
        has_facts: false,
    };
    let digest = MessageDigest {
        message: 8,
        digest: 9,
    };
    let mut payload = Vec::new();
    for opaque_len in [0, 1, 3, 4, 48] {
        let at = payload.len();
        payload.extend(entry.encode());
        payload[at + 18..at + 20].copy_from_slice(&[0, opaque_len]);
        payload.resize(payload.len() + usize::from(opaque_len.next_multiple_of(4)), 0xee);
    }
    payload[16] = 3;
    let packet_with = |payload: &[u8], entries| {
        let header = LmHeader::Announce {
            session_key: 1,
            first: 2,
            entries,
            sent: 3,
        };
        let trailer = Trailer::new(&header, payload, SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7168));
        [
            &header.encode(payload.len() as u16)[..],
            payload,
            trailer.as_bytes(),
        ]
        .concat()
    };
    let with_digest = [&payload[..], &digest.encode()].concat();
    let packet = packet_with(&with_digest, 5);
    let (_, read) = lm::parse_datagram(&packet).unwrap();
    let mut entries: Vec<AnnounceEntry> = AnnounceEntry::iter(read, 5).collect();
    assert_eq!(entries[0].delivery, None);
    entries[0].delivery = entry.delivery;
    assert_eq!(entries, [entry; 5]);
    assert!(MessageDigest::iter(read, 5).eq([digest]));

    // Opaque bytes that are not there, and those of which the padding is not.
    for cut in 1..=48 {
        let packet = packet_with(&payload[..payload.len() - cut], 5);
        assert_eq!(lm::parse_datagram(&packet), Err(lm::LmError::Length), "{cut}");
    }
    let mut overrun = with_digest.clone();
    overrun[18..20].fill(0xff);
    let overrun = packet_with(&overrun, 5);
    assert_eq!(lm::parse_datagram(&overrun), Err(lm::LmError::Length));
    let too_many = packet_with(&payload, u32::MAX);
    assert_eq!(lm::parse_datagram(&too_many), Err(lm::LmError::Length));
}

#[test]
fn opaque_bytes_come_with_their_entries() {
    let entries = [0usize, 1, 4, 47, 48].map(|len| {
        let entry = AnnounceEntry {
            len: len as u64,
            tag: 6,
            delivery: None,
            windows_released: AnnounceEntry::ALL_WINDOWS,
            has_facts: false,
        };
        (entry, vec![len as u8 + 1; len])
    });
    let mut payload = [0xeeu8; 5 * AnnounceEntry::LEN + 4 + 4 + 48 + 48];
    let mut len = 0;
    for (entry, opaque) in &entries {
        let before = len;
        len += entry.write(opaque, &mut payload[len..]).unwrap();
        // Without room nothing is written.
        let mut short = payload[before..len - 1].to_vec();
        let kept = short.clone();
        assert_eq!(entry.write(opaque, &mut short), None);
        assert_eq!(short, kept);
    }
    assert_eq!(len, payload.len());
    assert!(payload.ends_with(&[49; 48]));
    let read = AnnounceEntry::with_opaque(&payload, 5).map(|(entry, opaque)| (entry, opaque.to_vec()));
    assert_eq!(read.collect::<Vec<_>>(), entries);
    assert!(AnnounceEntry::iter(&payload, 5).eq(entries.iter().map(|(entry, _)| *entry)));

    // More than a sender gives along are another's.
    let mut longer = entries[0].0.encode().to_vec();
    longer[18..20].copy_from_slice(&49u16.to_be_bytes());
    longer.extend([7; 52]);
    let read: Vec<_> = AnnounceEntry::with_opaque(&longer, 1).collect();
    assert_eq!(read, [(entries[0].0, &[][..])]);
}

#[test]
fn unwhole_messages_survive() {
    let of = |message: u32, declined: Option<u16>| UnwholeMessage { message, declined };
    for delivered in [0, 7, 100, u32::MAX, 1 << 31] {
        let near = |n: u32| delivered.wrapping_sub(n);
        let messages = [
            of(near(9), None),
            of(near(8), Some(0)),
            of(near(7), Some(0)),
            of(near(5), None),
            of(near(4), Some(u16::MAX)),
            of(near(3), Some(1)),
            of(near(1), Some(1)),
        ];
        // Four statuses begin, and there is room for one that does not.
        let mut payload = [0u8; 4 * (7 + 5)];
        let len = UnwholeMessage::encode_all(messages.into_iter(), delivered, &mut payload);
        assert_eq!(len, payload.len() - 4);
        let payload = &payload[..len];
        assert!(UnwholeMessage::iter(payload, delivered).eq(messages));
        // Who knows of no statuses takes each word for a number: none of them is near.
        let words = payload
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_be_bytes(*word));
        let is_near = |word: &u32| delivered.wrapping_sub(*word) <= lm::SETTLED_KEPT;
        assert!(
            words
                .filter(is_near)
                .eq(messages.iter().map(|message| message.message))
        );
        // As many as there is room for, and with it the first statuses.
        for room in 0..payload.len() {
            let mut short = vec![0; room];
            let len = UnwholeMessage::encode_all(messages.into_iter(), delivered, &mut short);
            let read: Vec<_> = UnwholeMessage::iter(&short[..len], delivered).collect();
            let count = messages.len().min(room / 4);
            let numbers =
                |messages: &[UnwholeMessage]| messages.iter().map(|of| of.message).collect::<Vec<_>>();
            assert_eq!(numbers(&read), numbers(&messages[..count]));
            let named = read
                .iter()
                .zip(&messages)
                .filter(|(read, told)| read == told)
                .count();
            let lost = read.iter().filter(|read| read.declined.is_none()).count();
            assert!(lost + named >= count && (room < 4 * 9 || named > 2), "{read:?}");
        }
    }
}
