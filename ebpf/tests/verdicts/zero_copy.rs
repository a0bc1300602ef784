//! Queues in zero-copy mode, and packets of several frames.

use crate::*;

/// In zero-copy mode a general queue's driver keeps the frames that user space does not allow to be redirected.
#[test]
fn a_zero_copy_general_queue_takes_what_is_allowed() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.gate.set_role(GENERAL, Role::GeneralZeroCopy).unwrap();
        pair.model.set_role(GENERAL, Role::GeneralZeroCopy);
        let eager = Packet::lm(EAGER, 64);
        let mut logs = [
            pair.gate.log(GENERAL).expect("a log"),
            pair.model.log(GENERAL).expect("a log"),
        ];
        expect(&mut pair, GENERAL, &eager, PassOneCopy);
        for (allowed, redirected) in [(2, 2), (2, 0), (3, 1), (1, 0), (8, 5)] {
            logs.iter_mut().for_each(|log| log.set_posted(allowed));
            for _ in 0..redirected {
                expect(&mut pair, GENERAL, &eager, RedirectGeneral);
            }
            expect(&mut pair, GENERAL, &eager, PassOneCopy);
            let foreign = Packet {
                destination_port: 9,
                ..eager.clone()
            };
            expect(&mut pair, GENERAL, &foreign, PassForeign);
        }
        logs.iter_mut().for_each(|log| log.set_posted(100));
        pair.set_xsk(GENERAL, false);
        expect(&mut pair, GENERAL, &eager, PassOneCopy);
    });
}

/// In zero-copy mode what lies in a frame may be anything by the time the gate runs: all of it goes to the socket, and
/// is counted.
#[test]
fn a_zero_copy_landing_queue_takes_everything_unread() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.gate.set_role(LANDING, Role::LandingZeroCopy).unwrap();
        pair.model.set_role(LANDING, Role::LandingZeroCopy);
        // With and without a session, beyond what is posted and announced, whatever it is.
        let anything = [
            legal().bytes(),
            Packet {
                ethernet_type: 0x0806,
                ..legal()
            }
            .bytes(),
            vec![0xa5; 1514],
            vec![0; 14],
        ];
        for frame in &anything {
            assert_eq!(pair.run(LANDING, frame), RedirectLanding);
        }
        pair.open(&lm_session(), 1, 1);
        for frame in anything.iter().chain(&anything) {
            assert_eq!(pair.run(LANDING, frame), RedirectLanding);
        }
        assert_eq!(pair.log.producer(), 12);
        assert_eq!(pair.log.entry(3).message, 0, "nothing is logged");
        // Other queues are what they were.
        assert_eq!(pair.run_anywhere(PLAIN, &anything[1]), PassForeign);
        pair.close();
        pair.set_xsk(LANDING, false);
        assert_eq!(pair.run(LANDING, &anything[0]), PassNoSocket);
        pair.set_xsk(LANDING, true);
        // Counting goes on where it was: the log's positions are those of descriptors in either role.
        pair.gate.set_role(LANDING, Role::Landing).unwrap();
        pair.model.set_role(LANDING, Role::Landing);
        pair.open(&lm_session(), 1, 4);
        assert_eq!(pair.run(LANDING, &legal().bytes()), RedirectLanding);
        assert_eq!((pair.log.producer(), pair.log.entry(12).message), (13, 10));
    });
}

#[test]
fn a_packet_of_several_frames_lands_where_as_many_are_posted() {
    const CAPACITY: u32 = 3840;
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        let session = SessionAdmission {
            payload_len: 8944,
            window_fragments: 64,
            ..lm_session()
        };
        pair.set_capacity(CAPACITY);
        let first = session.first_message;
        pair.open(&session, 8, 0);
        let at = pair.log.producer();
        // A full fragment is 9010 bytes, in three frames.
        let full = |message: u32, index| Packet::data(first + message, index, 8, 8944);
        let last = |message: u32, payload_len| Packet::data(first + message, 7, 8, payload_len);
        // Posted, but nothing is said of the frames.
        pair.post(at + 1);
        expect(&mut pair, LANDING, &full(0, 6), PassSlot);
        pair.set_slot(at, 3, 9010);
        expect(&mut pair, LANDING, &full(0, 6), RedirectLanding);
        // One byte more than two frames hold takes three.
        for (frames, payload_len, verdict) in [
            (2, 7680 - 66 + 1, PassSlot),
            (2, 3840 - 66, PassSlot),
            (3, 7680 - 66, PassSlot),
            (2, 7680 - 66, RedirectLanding),
            (1, 3840 - 66 + 1, PassSlot),
            (1, 3840 - 66, RedirectLanding),
            (3, 7680 - 66 + 1, RedirectLanding),
            (1, 1, RedirectLanding),
        ] {
            let position = pair.log.producer();
            pair.set_slot(position, frames, 9010);
            pair.post(position + 1);
            let message = (position - at) as u32;
            expect(&mut pair, LANDING, &last(message, payload_len), verdict);
        }
        // A longer packet would end in a place that is not its slot's (I2), though it takes as many frames.
        let position = pair.log.producer();
        pair.set_slot(position, 3, 9009);
        pair.post(position + 1);
        expect(&mut pair, LANDING, &full(5, 6), PassSlot);
        pair.set_slot(position, 3, 9010);
        expect(&mut pair, LANDING, &full(5, 6), RedirectLanding);
        // What was accepted is no slot any more, a lap of the log later either.
        let entry = pair.log.entry(position);
        assert_eq!((entry.sequence, entry.frame_len), (position as u16, 9010));
        let next = pair.log.producer();
        pair.set_slot(next, 3, 9010);
        assert_ne!(pair.log.entry(next).sequence, next as u16);
        // General packets are in one frame each.
        let general = |payload_len| Packet::lm(EAGER, payload_len);
        expect(&mut pair, GENERAL, &general(3840 - 66), RedirectGeneral);
        expect(&mut pair, GENERAL, &general(3840 - 66 + 1), PassOneCopy);
        expect(&mut pair, GENERAL, &general(60_000), PassOneCopy);
    });
}
