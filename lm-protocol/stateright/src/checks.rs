//! Properties S1 to S7, what must come about in the end, what must be possible, and the mistakes that these must find.

use std::time::Instant;

use lm_protocol::turns::Turns;
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};

use crate::mistakes::Made;
use crate::mutants::MUTANTS;
use crate::receiver::{COUNT, WINDOWS};
use crate::streaming::{Ending, Part, Release, packets_released};
use crate::world::{Broken, State, World};

fn is_unbroken(state: &State, rule: Broken) -> bool {
    state.broken != Some(rule)
}

/// What is shown is right and stays so. Nobody looks any more once the reader is gone.
fn shown_is_final(state: &State) -> bool {
    let receiver = &state.receiver;
    let is_final = |byte| receiver.is_right(byte) && !receiver.posted_over(byte);
    !receiver.is_read || receiver.shown.valid().flatten().all(is_final)
}

/// A session beside this one has a message that is whole; it has the turn where this one has nothing that may come.
fn stalled_has_no_turn(state: &State) -> bool {
    let other = (COUNT, true);
    let released = &state.receiver.released;
    let (fragments, is_whole) = (released.fragments(), released.release() == Release::Whole);
    let left = packets_released([(fragments, is_whole), other]).saturating_sub(state.sent.into());
    let sessions = [left, packets_released([other])];
    let waiting = sessions.into_iter().enumerate().filter(|(_, left)| *left > 0);
    let is_stalled = fragments <= state.sent && !is_whole;
    !is_stalled || Turns::<2>::default().next(waiting) == Some(1)
}

/// What was released is shown; but for the bytes over which the headers of what is not released will go.
fn released_is_shown(state: &State) -> bool {
    let released = match state.told {
        Release::Windows(windows) => windows,
        Release::Aborted => 0,
        Release::Whole => WINDOWS,
    };
    let is_shown = |window| match window + 1 == released && released < WINDOWS {
        true => state.part_of(window) >= Part::Body,
        false => state.part_of(window) == Part::Whole,
    };
    state.receiver.ending == Some(Ending::SessionEnded) || (0..released).all(is_shown)
}

fn ends_are_settled(state: &State) -> bool {
    let receiver = &state.receiver;
    let is_freed = receiver.ending.is_none() || receiver.is_free();
    let ended = match state.told {
        _ if receiver.ending == Some(Ending::SessionEnded) => true,
        Release::Windows(_) => receiver.ending.is_none(),
        Release::Aborted => {
            receiver.ending == Some(Ending::Aborted) && state.outgoing.release() == Release::Aborted
        }
        Release::Whole => receiver.ending == Some(Ending::Whole),
    };
    ended && is_freed
}

/// Every step uses something up, so every run ends, and what must come about in the end has come about where nothing is left to do.
pub(crate) fn properties() -> Vec<Property<World>> {
    vec![
        Property::always(
            "S1: the sender reads only what is released",
            |_, state: &State| is_unbroken(state, Broken::S1),
        ),
        Property::always("S2: the writer touches only what is not", |_, state: &State| {
            is_unbroken(state, Broken::S2)
        }),
        Property::always(
            "S3: what is shown is right, and nothing is posted over it",
            |_, state| is_unbroken(state, Broken::S3) && shown_is_final(state),
        ),
        Property::always("S4: what is shown only grows", |_, state: &State| {
            is_unbroken(state, Broken::S4)
        }),
        Property::always("S5: what is delivered is shown", |_, state: &State| {
            state.receiver.ending != Some(Ending::Whole)
                || (0..WINDOWS).all(|window| state.part_of(window) == Part::Whole)
        }),
        Property::always(
            "S6: a zone is free without a reader and without entries",
            |_, state: &State| {
                let receiver = &state.receiver;
                !receiver.is_free() || !receiver.is_read && receiver.entries.is_empty()
            },
        ),
        Property::always("S7: a stalled session has no turn", |_, state: &State| {
            stalled_has_no_turn(state)
        }),
        Property::always(
            "in the end released windows are shown",
            |world: &World, state: &State| released_is_shown(state) || !state.has_come_to_rest(world),
        ),
        Property::always(
            "in the end messages are settled at both ends",
            |world: &World, state: &State| ends_are_settled(state) || !state.has_come_to_rest(world),
        ),
        Property::sometimes(
            "a window is written while the one before it leaves and the one before that is read",
            |_, state: &State| {
                let leaves = state.flight.iter().any(|(position, _)| (2..4).contains(position));
                state.written == WINDOWS
                    && matches!(state.told, Release::Windows(2))
                    && leaves
                    && state.part_of(0) >= Part::Body
            },
        ),
        Property::sometimes(
            "a later window is shown before an earlier one",
            |_, state: &State| state.part_of(0) == Part::Nothing && state.part_of(1) >= Part::Body,
        ),
    ]
}

const COPY: World = World {
    is_zero_copy: false,
    losses: 2,
    duplicates: 0,
    drops: 0,
    reposts: 0,
    may_abort: false,
    may_expire: false,
};

const WORLDS: [(&str, World); 6] = [
    ("copy mode, two losses", COPY),
    (
        "zero-copy mode, a loss",
        World {
            is_zero_copy: true,
            losses: 1,
            ..COPY
        },
    ),
    (
        "copy mode, a loss, the writer gives up or stops, the session ends",
        World {
            losses: 1,
            may_abort: true,
            may_expire: true,
            ..COPY
        },
    ),
    (
        "copy mode, a loss, a duplicate",
        World {
            losses: 1,
            duplicates: 1,
            ..COPY
        },
    ),
    (
        "copy mode, a loss, a packet dropped behind the gate",
        World {
            losses: 1,
            drops: 1,
            ..COPY
        },
    ),
    (
        "zero-copy mode, an entry that is posted once more",
        World {
            is_zero_copy: true,
            losses: 0,
            reposts: 1,
            ..COPY
        },
    ),
];

/// Searches all of a world. The properties that failed.
fn search(world: World, name: &str) -> Vec<&'static str> {
    let started = Instant::now();
    let checker = world
        .checker()
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    println!(
        "{name}: {} states, {} deep, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        started.elapsed().as_secs_f64()
    );
    let found = checker.discoveries();
    let mut failed = Vec::new();
    for property in properties() {
        let path = found.get(property.name);
        let fails = match property.expectation {
            Expectation::Sometimes => path.is_none(),
            _ => path.is_some(),
        };
        if fails {
            failed.push(property.name);
        }
    }
    if failed.is_empty() {
        assert!(checker.is_done(), "{name}: the search was cut short");
    }
    failed
}

fn holds(number: usize) {
    let _made = Made::new(None);
    let (name, world) = WORLDS[number];
    if let Some(property) = search(world, name).first() {
        let checker = world
            .checker()
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_bfs()
            .join();
        match checker.discovery(property) {
            Some(path) => panic!(
                "{name}: \"{property}\" fails after\n{:#?}\n{:#?}",
                path.clone().into_actions(),
                path.last_state()
            ),
            None => panic!("{name}: \"{property}\" never comes about"),
        }
    }
}

#[test]
fn copy_mode_with_losses() {
    holds(0);
}

#[test]
fn copy_mode_with_a_duplicate() {
    holds(3);
}

#[test]
fn copy_mode_with_a_log_that_is_wrong() {
    holds(4);
}

#[test]
fn zero_copy_mode() {
    holds(1);
    holds(5);
}

#[test]
fn writers_that_give_up_and_sessions_that_end() {
    holds(2);
}

#[test]
fn every_mistake_is_found() {
    let mut missed = Vec::new();
    for mutant in MUTANTS {
        let _made = Made::new(Some(mutant.name));
        let found = WORLDS
            .iter()
            .find_map(|(name, world)| search(*world, name).first().copied());
        println!("\"{}\" breaks {}", mutant.name, found.unwrap_or("nothing"));
        if !found.is_some_and(|property| property.starts_with(mutant.breaks)) {
            missed.push((mutant.name, mutant.breaks));
        }
    }
    assert!(
        missed.is_empty(),
        "not found by the property that is to find them: {missed:?}"
    );
}
