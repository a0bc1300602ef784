//! What shapers are told of what leaves and what is lost.

use std::sync::{Arc, Mutex};

use lm_dataplane::{Class, ConnectOptions, Integrity, Scope, Shaper, Signal};
use lm_protocol::time::Time;
use lm_protocol::wire::lm::TYPE_DATA;
use lm_sim::{Semantics, WireConfig, ZeroCopy};

use super::world::{World, config, noise};

/// Holds nothing back, and counts.
#[derive(Clone, Debug, Default)]
struct Ledger(Arc<Mutex<Counts>>);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    taken: u32,
    allowed: u32,
    left: u32,
    bytes: u64,
    lost: u32,
}

impl Shaper for Ledger {
    fn take(&mut self, _: Class, packets: u32, _: Time) -> u32 {
        self.0.lock().expect("one thread").taken += packets;
        packets
    }

    fn signal(&mut self, signal: Signal) {
        let mut counts = self.0.lock().expect("one thread");
        match signal {
            Signal::Left {
                class: Class::Bulk,
                allowed,
                packets,
                bytes,
            } => {
                counts.allowed += allowed;
                counts.left += packets;
                counts.bytes += bytes;
            }
            Signal::Lost {
                class: Class::Bulk,
                packets,
            } => counts.lost += packets,
            other => panic!("{other:?}"),
        }
    }

    fn next(&self, _: Class) -> Option<Time> {
        None
    }
}

/// Of a message of 70 packets three are lost: they are told, all that was asked for is given back or left, and what left are the packets that
/// crossed, the repetitions with them; whichever way these take, which in zero-copy mode is one of their own.
#[test]
fn a_shaper_is_told_what_was_lost_and_what_left() {
    for semantics in [Semantics::Copy, Semantics::ZeroCopy(ZeroCopy::default())] {
        let wire = WireConfig {
            semantics: [semantics; 2],
            ..WireConfig::default()
        };
        let mut world = World::new(wire, 2, &config(Integrity::Manifest));
        let options = ConnectOptions {
            max_message_len: 1 << 20,
            ..ConnectOptions::default()
        };
        let peer = world.connect(0, 1, &options);
        let ledger = Ledger::default();
        let shaper = Box::new(ledger.clone());
        world.ends[0]
            .extensions()
            .shape(Scope::Class(Class::Bulk), Some(shaper));
        let crossed = Arc::new(Mutex::new((0u32, 0u64)));
        let counted = Arc::clone(&crossed);
        world.wire.set_filter(move |from, packet| {
            let mut crossed = counted.lock().expect("one thread");
            if from == 0 && packet[42] & 0xf == TYPE_DATA {
                *crossed = (crossed.0 + 1, crossed.1 + packet.len() as u64);
                return ![5, 6, 30].contains(&crossed.0);
            }
            true
        });
        let bytes = noise(3, 70 * 1448);
        world.ends[0].try_send_copy(peer, &bytes, 1).expect("room");
        let message = world.until(|world| world.ends[1].try_recv().expect("no failure"));
        assert!(message[..] == bytes[..]);
        world.until(|world| world.ends[0].try_completion());
        let (counts, crossed) = (*ledger.0.lock().unwrap(), *crossed.lock().unwrap());
        assert_eq!(counts.lost, 3, "{counts:?}");
        assert_eq!(crossed.0, 73, "{counts:?}");
        assert_eq!(counts.allowed, counts.taken, "{counts:?}");
        assert_eq!((counts.left, counts.bytes), crossed, "{counts:?}");
    }
}
