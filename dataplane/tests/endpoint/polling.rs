//! Who runs the landing queue's NAPI instance while a stream goes on, and after it.

use std::time::{Duration, Instant};

use lm_cards::Interface;
use lm_dataplane::{Deferral, Napi};
use lm_dataplane::{Endpoint, EndpointConfig, IdleStrategy};

use crate::harness::{Bed, PATIENCE, config_a, config_b, connect, content, recv, send, settle};

const LEN: u64 = 1 << 20;
const MESSAGES: u64 = 400;
/// Somebody's own setting.
const BEFORE: Deferral = Deferral {
    hard_irqs: 3,
    timeout_ns: 20_000,
};

/// Instances of B's device that are not as they were.
fn kept(napis: &mut [Napi]) -> usize {
    let deferrals = napis
        .iter_mut()
        .map(|napi| napi.deferral().expect("the instance"));
    deferrals.filter(|&deferral| deferral != BEFORE).count()
}

fn wait_until_left(endpoint: &mut Endpoint, napis: &mut [Napi]) {
    let deadline = Instant::now() + PATIENCE;
    while kept(napis) > 0 {
        assert!(Instant::now() < deadline, "the queue is kept after the stream");
        endpoint.poll();
    }
}

#[test]
fn a_stream_keeps_its_queue_to_the_receiving_core_and_leaves_it_as_it_was() {
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
                napi.set(&napi.setting(BEFORE))
                    .expect("Linux 6.14 and CAP_NET_ADMIN");
            }
            assert_eq!(kept(&mut napis), 0);
            let mut seen = 0;
            for _ in 0..MESSAGES {
                // `check` would take so long that the stream pauses.
                assert!(*recv(b) == *bytes, "another message");
                seen += kept(&mut napis);
                assert!(kept(&mut napis) <= 1, "the general queue is never kept");
            }
            assert!(seen > 0, "no stream was noticed: {:?}", b.counters());
            wait_until_left(b, &mut napis);
        },
    );
}
