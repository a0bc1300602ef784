//! The rings: entries cross, slots are used again, indices wrap, nobody sleeps through an entry.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

use crate::ring::{self, Consumer, Descriptor, Fill, Producer, RingKind, Rx};
use crate::weak::{Access, weaken};

/// The indices go over 2³² between the first entry and the second.
const START: u32 = u32::MAX;

trait Numbered: RingKind<Entry: PartialEq + std::fmt::Debug> {
    fn entry(number: u32) -> Self::Entry;
}

impl Numbered for Fill {
    fn entry(number: u32) -> u64 {
        u64::from(number) << 32 | 7
    }
}

impl Numbered for Rx {
    fn entry(number: u32) -> Descriptor {
        Descriptor::received(u64::from(number) * 4096, 256, number + 60)
    }
}

fn produce<K: Numbered>(ring: &mut Producer<K>, entries: std::ops::Range<u32>, batch: u32) {
    for first in entries.clone().step_by(batch as usize) {
        let count = batch.min(entries.end - first);
        while ring.free(count) < count {
            thread::yield_now();
        }
        for offset in 0..count {
            ring.write(offset, K::entry(first + offset));
        }
        ring.submit(count);
    }
}

fn consume<K: Numbered>(ring: &mut Consumer<K>, count: u32, batch: u32) {
    let mut number = 0;
    while number < count {
        let available = ring.available(batch);
        for offset in 0..available {
            assert_eq!(ring.read(offset), K::entry(number + offset));
        }
        ring.release(available);
        number += available;
        if available == 0 {
            thread::yield_now();
        }
    }
}

/// `count` entries through a ring of `len`. Which end is the kernel's makes no difference: both are the same types.
///
/// `preemptions`: only interleavings in which a thread is interrupted so often at most; `None`: all there are.
fn stream<K: Numbered + Send>(len: u32, count: u32, batch: u32, preemptions: Option<usize>) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(move || {
        let (mut producer, mut consumer) = ring::in_memory::<K>(len, START);
        let thread = thread::spawn(move || {
            produce(&mut producer, 0..count, batch);
            producer
        });
        consume(&mut consumer, count, batch);
        let mut producer = thread.join().expect("the producer");
        // Everything was given back, and both ends agree on where they are.
        assert_eq!(producer.free(len), len);
        assert_eq!(producer.produced(), START.wrapping_add(count));
        assert_eq!(consumer.consumed(), START.wrapping_add(count));
        assert_eq!(
            (producer.consumed(), consumer.produced()),
            (START.wrapping_add(count), START.wrapping_add(count))
        );
    });
}

#[test]
fn addresses_go_through_a_ring_of_one() {
    stream::<Fill>(1, 2, 1, None);
}

#[test]
fn descriptors_go_through_a_ring_of_one() {
    stream::<Rx>(1, 3, 1, Some(2));
}

#[test]
fn batches_go_through_a_ring_of_two() {
    stream::<Rx>(2, 4, 2, None);
}

#[test]
fn single_entries_go_through_a_ring_of_two() {
    stream::<Fill>(2, 3, 1, Some(2));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_is_needed() {
    weaken(Access::ConsumerLoad);
    stream::<Fill>(1, 2, 1, None);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn b_is_needed() {
    weaken(Access::ProducerStore);
    stream::<Fill>(1, 2, 1, None);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn c_is_needed() {
    weaken(Access::ProducerLoad);
    stream::<Fill>(1, 2, 1, None);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn d_is_needed() {
    weaken(Access::ConsumerStore);
    stream::<Fill>(1, 2, 1, None);
}

/// A consumer that goes to sleep asks to be woken and looks once more; a producer submits and asks whether it must wake.
/// Never does the consumer sleep over an entry without being woken.
fn sleep_and_wake() {
    loom::model(|| {
        let (mut producer, mut consumer) = ring::in_memory::<Fill>(2, START);
        let woken = Arc::new(AtomicBool::new(false));
        let wakes = Arc::clone(&woken);
        let thread = thread::spawn(move || {
            for number in 0..2 {
                produce(&mut producer, number..number + 1, 1);
                if producer.needs_wakeup() {
                    wakes.store(true, Ordering::Relaxed);
                }
            }
        });
        let mut seen = consumer.available(2);
        if seen < 2 {
            consumer.set_needs_wakeup(true);
            seen = consumer.available(2);
        }
        thread.join().expect("the producer");
        // After the join everything is visible: what the consumer had not seen must have been announced.
        assert!(
            seen == 2 || woken.load(Ordering::Relaxed),
            "asleep with {seen} of 2 entries seen and nobody woke it"
        );
    });
}

#[test]
fn nobody_sleeps_over_an_entry() {
    sleep_and_wake();
}

#[test]
#[should_panic(expected = "nobody woke it")]
fn the_wakeup_fence_is_needed() {
    weaken(Access::WakeupFence);
    sleep_and_wake();
}
