//! Messages in lent memory.

use std::time::Duration;

use lm_examples::{Dice, noise, semantics};
use lm_realtime::{NotSent, RtBuffer, SendError, SendOutcome, SocketConfig};
use lm_sim::Semantics;

use crate::{Bed, PORT, options, three_blocks, with_blocks};

fn written(mut buffer: RtBuffer, message: &[u8]) -> RtBuffer {
    buffer[..message.len()].copy_from_slice(message);
    buffer
}

/// Two buffers in turns, as a program writes one while the other leaves. Each comes back once, and not before the device has read all of it.
#[test]
fn lent_memory_is_locked_until_its_last_packet_is_completed() {
    let mut came = 0;
    for seed in 0..40 {
        let semantics = semantics()[seed as usize % 2];
        let config = SocketConfig {
            frames: 1 + seed as u32 % 5,
            ..with_blocks()
        };
        let mut bed = Bed::new(semantics, seed, &config, None);
        let most = bed.sockets[0].payload_max();
        let mut dice = Dice(seed);
        let lens: Vec<usize> = (0..20)
            .map(|_| dice.roll() as usize % (most >> (dice.roll() % 6)))
            .collect();
        let message = |number: usize| noise(seed << 32 | number as u64, lens[number]);
        let mut buffers = [(); 2].map(|()| bed.sockets[0].buffer(most));
        let places = buffers
            .each_mut()
            .map(|buffer| buffer.as_mut().expect("18 of 16 pages").as_mut_ptr());
        for (number, len) in lens.iter().enumerate() {
            let place = number % 2;
            let buffer = written(buffers[place].take().expect("it came back"), &message(number));
            let sender = &mut bed.sockets[0];
            sender
                .send_buffer(buffer, *len, options(0, 0))
                .expect("connected");
            while buffers[place].is_none() {
                bed.round();
                // What is due leaves first, and a device that is quick has sent it before the round ends.
                let all_are_put = bed.sockets[0].statistics().sent as usize > number;
                while let Some((mut buffer, outcome)) = bed.sockets[0].unlocked() {
                    assert!(
                        all_are_put,
                        "seed {seed}: unlocked before its last packet was put"
                    );
                    assert_eq!((outcome, buffer.len()), (SendOutcome::Left, most), "seed {seed}");
                    assert_eq!(buffer.as_mut_ptr(), places[place], "seed {seed}");
                    assert!(buffer[..*len] == message(number), "seed {seed}");
                    assert!(buffers[place].replace(buffer).is_none(), "seed {seed}");
                }
                while let Some(message) = bed.sockets[1].recv() {
                    let number = message.info().number as usize;
                    let expected = noise(seed << 32 | number as u64, lens[number]);
                    assert!(message[..] == expected, "seed {seed}: {number}");
                    came += 1;
                }
            }
        }
        assert_eq!(bed.sockets[0].statistics().sent, 20, "seed {seed}");
    }
    assert!(came > 400, "{came} of 800");
}

#[test]
fn lent_memory_comes_back_with_what_became_of_its_message() {
    let config = three_blocks();
    let mut bed = Bed::new(Semantics::Copy, 9, &config, None);
    bed.calm();
    let mut buffers: Vec<RtBuffer> = (0..3)
        .map(|_| bed.sockets[0].buffer(2000).expect("of three"))
        .collect();
    assert!(bed.sockets[0].buffer(2000).is_none());
    assert!(bed.sockets[0].buffer(3997).is_none());
    let mut other = bed.socket(1, &config).expect("free");
    let refused = |sent: Result<(), NotSent>| {
        let NotSent { buffer, reason } = sent.expect_err("refused");
        (buffer, reason)
    };
    let buffer = buffers.pop().expect("three");
    let (buffer, reason) = refused(other.send_buffer(buffer, 1, options(0, 0)));
    assert_eq!(reason, SendError::NotConnected);
    other
        .connect(&mut bed.world.ends[0], bed.peer, PORT)
        .expect("frames");
    let (buffer, reason) = refused(other.send_buffer(buffer, 1, options(0, 0)));
    assert_eq!(reason, SendError::Foreign);
    let (buffer, reason) = refused(bed.sockets[0].send_buffer(buffer, 3997, options(0, 0)));
    assert_eq!(reason, SendError::TooLong(3996));
    buffers.push(buffer);
    // One keeps its place, the one before gives way, and what is late says so.
    for (byte, deadline_us) in [(1, 0), (2, 0)] {
        let buffer = written(buffers.pop().expect("three"), &[byte; 3000]);
        let sent = bed.sockets[0].send_buffer(buffer, 3000, options(0, deadline_us));
        sent.expect("connected");
    }
    bed.rounds(5);
    let unlocked = |bed: &mut Bed| {
        let all = std::iter::from_fn(|| bed.sockets[0].unlocked());
        all.map(|(buffer, outcome)| (buffer[0], outcome))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        unlocked(&mut bed),
        [(1, SendOutcome::Superseded), (2, SendOutcome::Left)]
    );
    let came = bed.sockets[1].recv().expect("nothing is lost");
    assert!(came[..] == [2; 3000]);
    let buffer = written(buffers.pop().expect("the third"), &[3]);
    let sent = bed.sockets[0].send_buffer(buffer, 1, options(0, 500));
    sent.expect("connected");
    bed.pause(Duration::from_millis(1));
    bed.world.round();
    assert_eq!(unlocked(&mut bed), [(3, SendOutcome::Late)]);
    // Those that were dropped are there again.
    assert!(bed.sockets[0].buffer(2000).is_some());
}
