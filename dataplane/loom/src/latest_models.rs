//! The last messages between two threads: each is taken once or comes back once, in order, and nobody has an entry that another one has.

use loom::thread;

use crate::latest::latest;
use crate::weak::{Access, weaken};

fn pass(keep: usize, messages: u32) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let (mut writer, mut reader) = latest(keep);
        let putting = thread::spawn(move || {
            let put = (0..messages).filter_map(|number| writer.put(Box::new(number)));
            put.map(|number| *number).collect::<Vec<_>>()
        });
        let mut taken = Vec::new();
        for _ in 0..messages {
            taken.extend(reader.take().map(|number| *number));
        }
        let mut all = putting.join().expect("no panic");
        taken.extend(std::iter::from_fn(|| reader.take().map(|number| *number)));
        assert!(taken.is_sorted_by(|a, b| a < b), "{taken:?}");
        all.append(&mut taken);
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..messages), "{all:?}");
    });
}

#[test]
fn each_message_is_taken_once_or_comes_back_once() {
    pass(1, 3);
    pass(2, 4);
    pass(3, 4);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_message_that_is_put_relaxed_is_noticed() {
    weaken(Access::LatestPut);
    pass(2, 4);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_message_that_is_taken_relaxed_is_noticed() {
    weaken(Access::LatestTake);
    pass(2, 4);
}
