//! Who runs the landing queue's NAPI instance while a stream goes on, and after it.

use std::time::Duration;

use lm_cards::Interface;
use lm_dataplane::{Deferral, Napi};
use lm_dataplane::{Endpoint, EndpointConfig, IdleStrategy};

use crate::harness::{Bed, config_a, config_b, connect, content, recv, send, settle, wait_until};

const LEN: u64 = 1 << 20;
const MESSAGES: u64 = 400;
/// Somebody's own setting.
const BEFORE: Deferral = Deferral {
    hard_irqs: 3,
    timeout_ns: 20_000,
};

/// What a keeper sets: a program that is killed leaves it.
const KEPT: Deferral = Deferral {
    hard_irqs: 200,
    timeout_ns: 1_000_000,
};

/// Instances of B's device with this setting.
fn with(napis: &mut [Napi], setting: Deferral) -> usize {
    let deferrals = napis
        .iter_mut()
        .map(|napi| napi.deferral().expect("the instance"));
    deferrals.filter(|&deferral| deferral == setting).count()
}

#[test]
fn a_stream_keeps_its_queue_to_the_receiving_core_and_leaves_it_as_it_was() {
    stream(BEFORE, |b, napis, seen| {
        assert!(seen > 0, "no stream was noticed: {:?}", b.counters());
        wait_until(b, "the queue is left", |_| with(napis, BEFORE) == 2);
    });
}

#[test]
fn what_a_keeper_that_was_killed_has_left_goes_with_the_next_stream() {
    stream(KEPT, |b, napis, _| {
        wait_until(b, "the queue is left", |_| with(napis, Deferral::default()) == 1);
        assert_eq!(with(napis, KEPT), 1, "the general queue is never touched");
    });
}

/// Passes a stream to B, whose instances have this setting before. `then` gets how often one was seen to be kept.
fn stream(before: Deferral, then: impl FnOnce(&mut Endpoint, &mut [Napi], usize) + Send) {
    let Some(bed) = Bed::new(2) else { return };
    let spinning = |config| EndpointConfig {
        idle: IdleStrategy {
            spin: Duration::from_millis(5),
            ..IdleStrategy::default()
        },
        ..config
    };
    let bytes = content(0, LEN);
    bed.talk(
        &spinning(config_a()),
        &spinning(config_b()),
        |a| {
            let peer = connect(a, LEN);
            for _ in 0..MESSAGES {
                send(a, peer, 0, &bytes);
            }
            settle(a);
        },
        |b| {
            let interface = Interface::by_name("vb").expect("the device");
            let ids = Napi::ids_of(interface.index).expect("the instances");
            let mut napis: Vec<Napi> = (ids.iter())
                .map(|&id| Napi::new(id).expect("the instance"))
                .collect();
            assert_eq!(napis.len(), 2, "one for each queue");
            for napi in &mut napis {
                napi.set(&napi.setting(before))
                    .expect("Linux 6.14 and CAP_NET_ADMIN");
            }
            assert_eq!(with(&mut napis, before), 2);
            let mut seen = 0;
            for _ in 0..MESSAGES {
                // `check` would take so long that the stream pauses.
                assert!(*recv(b) == *bytes, "another message");
                seen += with(&mut napis, KEPT);
                assert!(with(&mut napis, before) >= 1, "the general queue is never kept");
            }
            then(b, &mut napis, seen);
        },
    );
}
