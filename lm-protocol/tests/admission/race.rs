//! Two receivers are asked at the same instant: under the paper's rules both activate, under ours one does.

use crate::world::*;
use lm_protocol::time::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// LM's control messages.
#[derive(Clone, Copy, Debug)]
enum Paper {
    Req,
    AcqOk,
    AcqRej,
    AppendAddr(usize),
}

/// A node as LM §3.3 has it: figure 3, word by word, as far as a race needs it.
#[derive(Default)]
struct PaperNode {
    lm_recv_addr: BTreeSet<usize>,
    is_active: bool,
}

impl PaperNode {
    fn handle(&mut self, us: usize, from: usize, message: Paper) -> Vec<(Option<usize>, Paper)> {
        match message {
            // "if (LM_RECV_ADDR list is null) { broadcast LM_APPEND_ADDR message to all nodes; activate the DLD scheme; send
            // LM_ACQ_OK message to the applicant; } else send LM_ACQ_REJ message to the applicant;"
            Paper::Req if self.lm_recv_addr.is_empty() => {
                self.lm_recv_addr.insert(us);
                self.is_active = true;
                vec![(None, Paper::AppendAddr(us)), (Some(from), Paper::AcqOk)]
            }
            Paper::Req => vec![(Some(from), Paper::AcqRej)],
            Paper::AppendAddr(address) => {
                self.lm_recv_addr.insert(address);
                Vec::new()
            }
            Paper::AcqOk | Paper::AcqRej => Vec::new(),
        }
    }
}

/// Hosts 0 and 1 send to 2 and 3. Every message takes 50 µs. Gives the most receivers that were active at once.
fn papers_rules(second_asks_at_us: u64) -> usize {
    let mut nodes: Vec<PaperNode> = (0..4).map(|_| PaperNode::default()).collect();
    let mut flying = BTreeMap::from([
        ((50, 0), (2, 0, Paper::Req)),
        ((50 + second_asks_at_us, 1), (3, 1, Paper::Req)),
    ]);
    let mut sequence = 2;
    let mut most = 0;
    while let Some(((now, _), (to, from, message))) = flying.pop_first() {
        for (whither, reply) in nodes[to].handle(to, from, message) {
            for host in (0..4).filter(|&host| host != to && whither.is_none_or(|whither| whither == host)) {
                flying.insert((now + 50, sequence), (host, to, reply));
                sequence += 1;
            }
        }
        most = most.max(nodes.iter().filter(|node| node.is_active).count());
    }
    most
}

#[test]
fn the_papers_rules_activate_two_receivers() {
    assert_eq!(papers_rules(0), 2, "at the same instant");
    assert_eq!(papers_rules(49), 2, "within the time that LM_APPEND_ADDR takes");
    assert_eq!(papers_rules(51), 1, "later");
}

/// When the voters have been up long enough to vote.
const READY: Time = Time::from_millis(3000);

/// The same two requests, with whatever the network does. The world itself checks that there are never two.
fn ours(second_after: Duration, voters: usize, weather: Weather, seed: u64) -> (usize, usize) {
    let mut setup = Setup::new(seed, 4.max(voters), voters);
    setup.weather = weather;
    let mut world = World::new(setup);
    world.job(READY, 0, 2, 1 << 20, Duration::from_millis(20));
    world.job(READY + second_after, 1, 3, 1 << 20, Duration::from_millis(20));
    world.run(Time::MAX);
    world.check_quiet();
    let fates: Vec<Fate> = world.jobs.iter().map(|job| job.fate).collect();
    let count = |fate| fates.iter().filter(|&&is| is == fate).count();
    (count(Fate::Done), count(Fate::OneCopy))
}

#[test]
fn claims_pick_one_of_two_receivers() {
    for voters in 1..=5 {
        for second_after_us in [0, 1, 49, 51, 200, 1000] {
            let fates = ours(
                Duration::from_micros(second_after_us),
                voters,
                Weather::FAIR,
                second_after_us,
            );
            assert_eq!(
                fates,
                (1, 1),
                "{voters} voters, {second_after_us} µs: one lands, the other is sent one-copy"
            );
        }
    }
}

#[test]
fn claims_pick_at_most_one_on_any_network() {
    let mut granted = 0;
    for seed in 0..300 {
        let mut random = Random(seed);
        let weather = Weather {
            loss_per_mille: random.below(500),
            duplicate_per_mille: random.below(500),
            delay_min: Duration::ZERO,
            delay_max: Duration::from_micros(1 + random.below(100_000)),
        };
        let second_after = Duration::from_micros(random.below(50_000));
        granted += ours(second_after, 3, weather, seed).0;
    }
    assert!(
        granted > 150,
        "{granted} of 300: a bad network is no excuse for nothing"
    );
}
