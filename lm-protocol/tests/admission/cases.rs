//! The rules one by one: the paper's sender cases and flags, who waits and for how long, restarts, and what is said how often.

use crate::gate::*;
use crate::world::*;
use lm_protocol::admission::*;
use lm_protocol::control::RejectReason;
use lm_protocol::time::Time;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

fn at(millis: u64) -> Time {
    Time::from_millis(millis)
}

/// What host `host` lists: flag and host number.
fn list(world: &World, host: usize) -> Vec<(String, usize)> {
    let node = world.hosts[host].node.as_ref().unwrap();
    node.recv_addrs(world.now)
        .iter()
        .map(|entry| {
            (
                entry.flag.to_string(),
                (u32::from(entry.address) - 0x0a00_0001) as usize,
            )
        })
        .collect()
}

fn decide(world: &mut World, sender: usize, receiver: usize) -> Decision {
    let to = address(receiver);
    world
        .with(sender, |node, now, local, out| {
            node.request(now, to, PORT, request(99, 1000), MS, local, out)
        })
        .unwrap()
        .unwrap()
}

/// Four hosts under `exclusive`; from 3 s on, host 0 sends to host 1.
fn busy() -> World {
    let mut world = World::new(Setup::new(1, 4, 3));
    world.job(at(3000), 0, 1, 1 << 20, 1000 * MS);
    world.run(at(3010));
    assert_eq!(world.jobs[0].fate, Fate::Holding);
    world
}

#[test]
fn first_case_the_list_is_empty_so_the_sender_requests() {
    let mut world = World::new(Setup::new(1, 4, 3));
    world.run(at(3000));
    assert!(list(&world, 2).is_empty());
    assert!(matches!(decide(&mut world, 2, 3), Decision::Requested(_)));
}

#[test]
fn second_case_the_destination_is_not_listed_so_the_sender_sends_one_copy() {
    let mut world = busy();
    let before = world.datagrams;
    let mut sends_one_copy = |from, to| matches!(decide(&mut world, from, to), Decision::OneCopy(_));
    assert!(sends_one_copy(2, 3));
    assert!(sends_one_copy(0, 2), "a sender, too");
    assert!(sends_one_copy(1, 2), "and the receiver");
    assert_eq!(world.datagrams, before + 3, "the destinations alone are asked");
}

#[test]
fn third_case_the_destination_is_listed_so_the_transmission_is_cancelled() {
    let mut world = busy();
    assert_eq!(decide(&mut world, 2, 1), Decision::Cancel);
}

#[test]
fn the_list_has_the_papers_flags() {
    let mut world = busy();
    let flag = |text: &str| vec![(text.to_owned(), 1)];
    assert_eq!(list(&world, 0), flag("01"), "the sender");
    assert_eq!(list(&world, 1), flag("10"), "the receiver");
    assert_eq!(list(&world, 2), flag("00"), "anybody else");
    // It is kept up for as long as the session lives, and goes with it.
    world.run(at(3990));
    assert_eq!(list(&world, 3), flag("00"));
    world.run(at(4010));
    for host in 0..4 {
        assert_eq!(list(&world, host), [], "host {host}");
    }
    assert_eq!(world.jobs[0].fate, Fate::Done);
}

#[test]
fn a_rejected_sender_falls_back_as_the_paper_says() {
    let mut setup = Setup::new(1, 4, 3);
    setup.weather.delay_min = Duration::from_micros(60);
    setup.weather.delay_max = Duration::from_micros(60);
    let mut world = World::new(setup);
    let after = |micros| at(3000) + Duration::from_micros(micros);
    world.job(after(0), 0, 1, 1 << 20, 50 * MS);
    // Nobody has heard yet that host 1 is becoming active: LM_ACQ_REJ, and host 3 is not listed.
    world.job(after(100), 2, 3, 1 << 20, 50 * MS);
    // Asks host 1 itself, which is listed by the time of the answer.
    world.job(after(250), 3, 1, 1 << 20, 50 * MS);
    world.run(at(3020));
    let fates: Vec<Fate> = world.jobs.iter().map(|job| job.fate).collect();
    assert_eq!(fates, [Fate::Holding, Fate::OneCopy, Fate::Cancelled]);
    assert!(world.jobs[2].is_rejected, "all three had requested");
}

#[test]
fn a_list_entry_of_a_dead_host_expires() {
    let mut world = busy();
    world.die(at(3100), 1, Death::Host, 20_000 * MS);
    world.run(at(2990) + TENURE);
    assert_eq!(list(&world, 2).len(), 1);
    world.run(at(3010) + TENURE);
    assert_eq!(list(&world, 2), []);
}

#[test]
fn without_most_of_the_voters_nobody_receives_and_everybody_is_told() {
    let mut world = World::new(Setup::new(1, 5, 3));
    world.die(at(2500), 0, Death::Host, 10_000 * MS);
    world.die(at(2500), 1, Death::Host, 10_000 * MS);
    world.job(at(3000), 3, 4, 1000, MS);
    world.run(at(4000));
    assert_eq!(world.jobs[0].fate, Fate::OneCopy);
    assert!(world.hosts[4].gate.opened == 0);
    // One is enough again, though a voter that has just started knows nothing for a while.
    world.job(at(12_600), 3, 4, 1000, MS);
    world.job(at(15_000), 3, 4, 1000, MS);
    world.run(Time::MAX);
    assert_eq!(world.jobs[1].fate, Fate::OneCopy);
    assert_eq!(world.jobs[2].fate, Fate::Done);
    world.check_quiet();
}

/// The only voter forgets its promise, and those who ask it have forgotten who receives: the world checks that there are not two.
#[test]
fn a_voter_that_restarts_does_not_promise_twice() {
    let mut world = World::new(Setup::new(1, 5, 1));
    world.job(at(3000), 3, 1, 1 << 20, 1000 * MS);
    for host in [0, 2, 4] {
        world.die(at(3100), host, Death::Daemon, 10 * MS);
    }
    world.job(at(3120), 4, 2, 1 << 20, 1000 * MS);
    world.run(at(3200));
    assert_eq!(
        world.jobs[1].fate,
        Fate::OneCopy,
        "it was asked, and nobody could say yes"
    );
    assert_eq!(world.hosts[1].gate.open.len(), 1);
    world.run(Time::MAX);
    world.check_quiet();
}

#[test]
fn a_receiver_that_loses_the_voters_stops_in_time() {
    let mut world = World::new(Setup::new(1, 5, 3));
    world.job(at(3000), 3, 4, 1000, 60_000 * MS);
    world.die(at(4000), 0, Death::Host, 10_000 * MS);
    world.die(at(4000), 1, Death::Host, 10_000 * MS);
    world.run(at(4000));
    assert_eq!(world.hosts[4].gate.open.len(), 1);
    world.run(at(4000) + TENURE + MS);
    assert_eq!(world.hosts[4].gate.open.len(), 0);
    assert_eq!(world.jobs[0].fate, Fate::Lost, "and its sender is told");
}

#[test]
fn shorter_messages_go_first() {
    let mut world = World::new(Setup::new(1, 8, 0));
    world.job(at(0), 1, 0, 1, 100 * MS);
    for (sender, len) in [(2, 5000), (3, 1000), (4, 3000)] {
        world.job(at(10), sender, 0, len, 100 * MS);
    }
    world.run(Time::MAX);
    let mut order: Vec<_> = world
        .jobs
        .iter()
        .map(|job| (job.granted.unwrap(), job.len))
        .collect();
    order.sort();
    let lens: Vec<u64> = order.iter().map(|&(_, len)| len).collect();
    assert_eq!(lens, [1, 1000, 3000, 5000]);
}

/// A long message waits while short ones come all the time, but not for much longer than the bound.
#[test]
fn a_long_message_does_not_starve() {
    let mut world = World::new(Setup::new(1, 12, 0));
    for step in 0..100 {
        for sender in 2..5 {
            world.job(at(100 * step), sender, 0, 1000, 40 * MS);
        }
    }
    let long = world.job(at(200), 1, 0, 1 << 30, MS);
    world.run(Time::MAX);
    let job = world.jobs[long as usize];
    let waited = job.granted.expect("granted at last").since(job.asked);
    assert!(
        waited >= AGEING_BOUND && waited < AGEING_BOUND + 500 * MS,
        "{waited:?}"
    );
}

#[test]
fn who_waits_too_long_is_told_why() {
    let mut setup = Setup::new(1, 3, 0);
    setup.patience = 700 * MS;
    let mut world = World::new(setup);
    world.job(at(0), 1, 0, 1, 5000 * MS);
    world.job(at(10), 2, 0, 1, MS);
    world.run(at(1000));
    assert_eq!(world.jobs[1].fate, Fate::TimedOut);
    world.run(Time::MAX);
    world.check_quiet();
}

fn waiting(world: &World) -> usize {
    let node = world.hosts[0].node.as_ref().unwrap();
    node.usage(Time::MAX).waiting
}

/// A program gives up while it waits. Gives the receiver's world after what it waited for was over.
fn given_up(is_heard: bool) -> World {
    let mut world = World::new(Setup::new(1, 3, 0));
    world.is_lenient = true;
    world.job(at(0), 1, 0, 1, 300 * MS);
    world.run(at(10));
    let to = address(0);
    let mut asked = None;
    world.with(2, |node, now, local, out| {
        let decision = node.request(now, to, PORT, request(0, 1), 5000 * MS, local, out);
        let Ok(Decision::Requested(ticket)) = decision else {
            panic!("{decision:?}");
        };
        asked = Some(ticket);
    });
    world.run(at(60));
    assert_eq!(waiting(&world), 1);
    world.with(2, |node, now, local, out| {
        let first = out.len();
        node.end(now, asked.unwrap(), 0, local, out);
        assert_eq!(out.len(), first + 1, "the request is withdrawn");
        if !is_heard {
            out.truncate(first);
        }
    });
    world.run(at(299));
    assert_eq!(world.hosts[0].gate.opened, 1);
    world.run(at(400));
    assert_eq!(world.hosts[0].gate.open.len(), 0);
    world
}

#[test]
fn no_place_is_given_to_a_request_that_was_withdrawn() {
    let world = given_up(true);
    assert_eq!(world.hosts[0].gate.opened, 1);
    assert_eq!(waiting(&world), 0);
}

/// Its turn comes all the same: nobody else waits for the lease of a session without a user.
#[test]
fn a_grant_that_nobody_wants_any_more_is_ended() {
    assert_eq!(given_up(false).hosts[0].gate.opened, 2);
}

/// One client's ask, and what it was told.
fn outcomes(world: &mut World, sender: usize, to: usize, port: u16, len: u64) -> Vec<Outcome> {
    let to = address(to);
    let mut told = Vec::new();
    world.with(sender, |node, now, local, out| {
        node.request(now, to, port, request(7, len), 1000 * MS, local, out)
            .unwrap();
    });
    // Straight from one to the other, beside the world's network.
    for _ in 0..20 {
        let out = std::mem::take(&mut world.aside);
        for (from, action) in out {
            match action {
                Action::Send { to, datagram } => {
                    let host = (u32::from(*to.ip()) - 0x0a00_0001) as usize;
                    let from = address(from);
                    world.with(host, |node, now, local, out| {
                        node.on_datagram(now, from, datagram.as_bytes(), local, out);
                    });
                }
                Action::Tell { outcome, .. } => told.push(outcome),
                _ => {}
            }
        }
    }
    told
}

#[test]
fn refusals_have_reasons() {
    let mut world = World::new(Setup::new(1, 2, 0));
    world.is_aside = true;
    let rejected = |told: &[Outcome]| match told {
        [Outcome::Rejected(reject)] => (reject.reason, reject.limit),
        other => panic!("{other:?}"),
    };
    let told = outcomes(&mut world, 0, 1, 9999, 1);
    assert_eq!(rejected(&told), (RejectReason::NoReceiver, 0));
    let limit = permit().max_message_len;
    let told = outcomes(&mut world, 0, 1, PORT, limit + 1);
    assert_eq!(rejected(&told), (RejectReason::TooLarge, limit));
    let told = outcomes(&mut world, 0, 1, PORT, limit);
    assert!(matches!(told[..], [Outcome::Granted(grant)] if grant.data_port == PORT));
}

/// A receiver's program that goes takes its sessions along, and says so.
#[test]
fn a_receiver_that_goes_ends_its_sessions() {
    let mut world = World::new(Setup::new(1, 4, 0));
    world.job(at(0), 1, 0, 1, 5000 * MS);
    world.job(at(10), 2, 0, 1, MS);
    world.run(at(100));
    world.with(0, |node, now, local, out| {
        node.remove_receiver(now, PORT, local, out)
    });
    world.run(at(110));
    assert_eq!(world.jobs[0].fate, Fate::Lost);
    assert_eq!(world.jobs[1].fate, Fate::TimedOut, "rejected: shutting down");
    world.run(Time::MAX);
    world.check_quiet();
}

/// A session outlives both daemons, one after the other.
#[test]
fn a_session_survives_the_daemons() {
    for seed in 0..40 {
        let mut world = World::new(Setup::new(seed, 3, 0));
        world.job(at(0), 0, 1, 1, 9000 * MS);
        world.die(at(2000), 1, Death::Daemon, 1500 * MS);
        world.die(at(5000), 0, Death::Daemon, 1500 * MS);
        world.run(at(8900));
        let adopted = world.hosts[1].gate.open.len() == 1;
        let resumed = world.jobs[0].fate == Fate::Holding;
        world.run(Time::MAX);
        world.check_quiet();
        if adopted && resumed {
            assert_eq!(world.jobs[0].fate, Fate::Done);
            assert_eq!(world.hosts[1].gate.opened, 1, "the same one all the time");
            return;
        }
    }
    panic!("in none of 40 seeds both daemons were given their sessions back");
}

/// First contact costs one more round trip, and later requests none.
#[test]
fn a_grant_takes_one_round_trip_between_hosts_that_know_each_other() {
    let mut setup = Setup::new(1, 2, 0);
    setup.weather.delay_min = MS;
    setup.weather.delay_max = MS;
    let mut world = World::new(setup);
    for start in [0, 100] {
        world.job(at(start), 0, 1, 1, 10 * MS);
    }
    world.run(Time::MAX);
    let took: Vec<_> = world
        .jobs
        .iter()
        .map(|job| job.granted.unwrap().since(job.asked))
        .collect();
    assert_eq!(took, [4 * MS, 2 * MS]);
    // Three of the handshake's and the grant's, a farewell and its confirmation, a request, a grant, and the farewell again;
    // beside those that say that the host is active, and is not any more.
    assert_eq!(world.datagrams, 4 + 2 + 4 + 2);
}

#[test]
fn a_policy_that_says_no_is_asked_before_anything_is_done() {
    let mut world = World::new(Setup::new(1, 3, 3));
    world.run(at(3000));
    let to = address(1);
    world.with(0, |node, now, local, out| {
        let request = request(1, permit().max_message_len + 1);
        node.request(now, to, PORT, request, 100 * MS, local, out)
            .unwrap();
    });
    world.is_lenient = true;
    world.run(at(3500));
    for host in 0..3 {
        let node = world.hosts[host].node.as_ref().unwrap();
        assert!(!node.usage(world.now).promised, "no voter was bothered");
    }
}
