//! Receives by key: a message says by eight bytes which memory it is for, and lands there. Of one the memory is not there yet, one is refused
//! with a status, and of one the memory is taken back while it is being written.
//!
//! ```text
//! cargo run -p lm-examples --bin by_key
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use lm_dataplane::{
    Announced, ConnectOptions, LandingRegion, Message, Outcome, PeerId, Placed, Placement, RETRACTED,
    SendError, Settled, ZoneSource,
};
use lm_examples::{Dice, World, noise, run, small};
use lm_sim::Semantics;

const KEYS: u64 = 10;
/// Its memory comes later.
const LATE: u64 = 3;
/// Nobody may write there.
const FORBIDDEN: u64 = 5;
const STATUS: u16 = 403;
/// Its memory is taken back.
const TAKEN_BACK: u64 = 7;
const LEN_MAX: u64 = 200_000;

/// What an application that receives by key has.
#[derive(Default)]
struct Receives {
    /// Memory that waits for a message, by key.
    posted: BTreeMap<u64, LandingRegion>,
    /// Messages that wait for memory, and those that have some.
    waiting: Vec<(u64, PeerId, u32)>,
    placed: BTreeMap<u64, (PeerId, u32)>,
    landed: BTreeMap<u64, Message>,
    /// Memory that came back without a message.
    returned: Vec<LandingRegion>,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Receives>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Receives> {
        self.0.lock().expect("one thread")
    }
}

impl ZoneSource for Shared {
    fn place(&mut self, of: &Announced<'_>) -> Placement {
        let Ok(key) = of.words.try_into().map(u64::from_be_bytes) else {
            return Placement::Refuse(400);
        };
        let mut receives = self.lock();
        match receives.posted.remove(&key) {
            _ if key == FORBIDDEN => Placement::Refuse(STATUS),
            None => {
                receives.waiting.push((key, of.peer, of.number));
                Placement::Later
            }
            Some(region) => {
                receives.placed.insert(key, (of.peer, of.number));
                Placement::Land(region)
            }
        }
    }

    fn settled(&mut self, of: &Placed, how: Settled) {
        let mut receives = self.lock();
        let key = of.tag;
        receives.placed.remove(&key);
        match how {
            Settled::Landed(message) => drop(receives.landed.insert(key, message)),
            Settled::Retracted(region) => receives.returned.push(region),
            Settled::Elsewhere(_) | Settled::GivenUp(_) => panic!("message {key} is not in its memory"),
        }
    }
}

fn one(semantics: Semantics, seed: u64) -> String {
    let mut world = World::new(semantics, seed, &small());
    let peer = world.connect(0, &ConnectOptions::default());
    let receives = Shared::default();
    world.ends[1]
        .extensions()
        .place_by(Some(Box::new(receives.clone())));
    for key in (0..KEYS).filter(|key| *key != LATE) {
        let region = world.ends[1]
            .extensions()
            .landing_region(LEN_MAX)
            .expect("memory");
        receives.lock().posted.insert(key, region);
    }

    let mut dice = Dice(seed);
    let lens: Vec<usize> = (0..KEYS)
        .map(|_| 3000 + dice.roll() as usize % (LEN_MAX as usize - 3000))
        .collect();
    let payload = |key: u64| noise(seed << 8 | key, lens[key as usize]);
    let (patience, hurry) = (dice.roll() % 100, dice.roll() % 20);
    let mut outcomes = BTreeMap::new();
    let (mut next, mut waited, mut begun, mut taken_back) = (0, 0, 0, false);
    world.until(|world| {
        let [sender, receiver] = &mut world.ends;
        if next < KEYS
            && let Ok(mut region) = sender.loan(peer, lens[next as usize] as u64)
        {
            region.set_words(&next.to_be_bytes()).expect("eight bytes");
            let mut rest = &payload(next)[..];
            for range in region.payloads_mut() {
                range.copy_from_slice(rest.split_off(..range.len()).expect("as long as all ranges"));
            }
            match sender.try_send(region, next) {
                Ok(_) => next += 1,
                Err(error) => assert_eq!(error.reason, SendError::WouldBlock, "seed {seed}"),
            }
        }
        // Its memory comes some rounds after the message was announced.
        let late = receives.lock().waiting.first().copied();
        if let Some((key, peer, number)) = late {
            waited += 1;
            if waited > patience {
                assert_eq!(key, LATE, "seed {seed}");
                let region = receiver.extensions().landing_region(LEN_MAX).expect("memory");
                receives.lock().posted.insert(key, region);
                receives.lock().waiting.clear();
                assert!(receiver.peer(peer).retry(number), "seed {seed}");
            }
        }
        // It is taken back some rounds after its first entries were posted.
        let placed = receives.lock().placed.get(&TAKEN_BACK).copied();
        if let Some((peer, number)) = placed {
            begun += 1;
            if begun > hurry && !taken_back {
                taken_back = receiver.peer(peer).retract(number);
            }
        }
        while let Some(completion) = sender.try_completion() {
            outcomes.insert(completion.tag, completion.outcome);
        }
        let Receives { landed, returned, .. } = &*receives.lock();
        let settled = landed.len() + returned.len() + 1;
        (outcomes.len() as u64 == KEYS && settled as u64 == KEYS).then_some(())
    });

    assert!(waited > patience, "seed {seed}: nothing waited");
    let Receives { landed, returned, .. } = &*receives.lock();
    assert_eq!(returned.len(), usize::from(taken_back), "seed {seed}");
    for (key, outcome) in &outcomes {
        let expected = match *key {
            FORBIDDEN => Outcome::Declined { status: STATUS },
            TAKEN_BACK if taken_back => Outcome::Declined { status: RETRACTED },
            _ => Outcome::Delivered,
        };
        assert_eq!(*outcome, expected, "seed {seed}: message {key}");
    }
    for (&key, message) in landed {
        assert!(message[..] == payload(key), "seed {seed}: message {key}");
    }
    let fate = if taken_back {
        "taken back"
    } else {
        "whole before it was taken back"
    };
    format!("{} messages by key, one refused, one {fate}", landed.len())
}

fn main() {
    run(one);
}

#[test]
fn messages_land_by_key() {
    for semantics in lm_examples::semantics() {
        let taken_back =
            (0..lm_examples::SEEDS).filter(|&seed| one(semantics, seed).ends_with("one taken back"));
        assert!(taken_back.count() > 100);
    }
}
