//! Admission over a network that loses, doubles, delays and reorders, under virtual time.

mod receiver;

use lm_protocol::control::{ControlMessage, MAX_CONTROL_LEN};
use lm_protocol::session::*;
use lm_protocol::time::Time;
use proptest::prelude::*;
use receiver::*;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Debug)]
struct Weather {
    loss_percent: u64,
    duplicate_percent: u64,
    max_delay_ms: u64,
}

/// What a sender does with its session.
#[derive(Clone, Copy, Debug)]
struct Plan {
    start_ms: u64,
    hold_ms: u64,
    /// Dies without a farewell.
    vanishes: bool,
}

struct Sender {
    plan: Plan,
    applicant: Applicant,
    ends_at: Option<Time>,
    farewell: Option<Farewell>,
    gone: bool,
}

struct Network {
    weather: Weather,
    seed: u64,
    sequence: u64,
    /// By arrival time, then by number: to a sender, or from it to the grantor; always as bytes.
    flying: BTreeMap<(Time, u64), (usize, bool, Vec<u8>)>,
}

impl Network {
    fn random(&mut self, below: u64) -> u64 {
        // splitmix64
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % below
    }

    fn transmit(&mut self, now: Time, sender: usize, up: bool, request_id: u32, message: &ControlMessage) {
        let mut datagram = [0; MAX_CONTROL_LEN];
        let len = message.encode(request_id, &mut datagram);
        let copies = 1 + u64::from(self.random(100) < self.weather.duplicate_percent);
        for _ in 0..copies {
            if self.random(100) < self.weather.loss_percent {
                continue;
            }
            let arrival = now + Duration::from_micros(self.random(self.weather.max_delay_ms * 1000) + 20);
            self.sequence += 1;
            self.flying
                .insert((arrival, self.sequence), (sender, up, datagram[..len].to_vec()));
        }
    }
}

/// Runs until nothing happens any more; checks on the way what must hold at any moment.
fn run(weather: Weather, seed: u64, plans: &[Plan], queues: u16) -> (Vec<Sender>, Receiver) {
    let patience = Duration::from_secs(120);
    let landing: Vec<u16> = (1..=queues).collect();
    let mut receiver = Receiver::new(&landing);
    let mut network = Network {
        weather,
        seed,
        sequence: 0,
        flying: BTreeMap::new(),
    };
    let mut senders: Vec<Sender> = plans
        .iter()
        .enumerate()
        .map(|(number, &plan)| Sender {
            plan,
            applicant: Applicant::new(
                request(number as u64),
                100 + number as u32,
                ms(plan.start_ms),
                patience,
            ),
            ends_at: None,
            farewell: None,
            gone: false,
        })
        .collect();

    let mut now = Time::ZERO;
    for step in 0.. {
        assert!(step < 100_000, "no end in sight");
        // What is due, in the order: packets, senders, leases.
        while let Some((&(at, sequence), _)) = network.flying.first_key_value()
            && at <= now
        {
            let (number, up, bytes) = network.flying.remove(&(at, sequence)).unwrap();
            let (request_id, message) = ControlMessage::parse(&bytes).unwrap();
            if up {
                let Receiver {
                    grantor,
                    queues,
                    permit,
                } = &mut receiver;
                let from = peer(number as u8);
                if let Some(reply) = grantor.handle(from, request_id, &message, now, permit, queues) {
                    network.transmit(now, number, false, request_id, &reply);
                }
            } else if !senders[number].gone {
                senders[number].applicant.handle(request_id, &message, now);
                if let Some(farewell) = &mut senders[number].farewell {
                    farewell.handle(request_id, &message);
                }
            }
        }
        for (number, sender) in senders.iter_mut().enumerate() {
            if sender.gone {
                continue;
            }
            while let Some(message) = sender.applicant.poll_transmit(now) {
                network.transmit(now, number, true, sender.applicant.request_id(), &message);
            }
            if let ApplicantState::Granted(grant) = *sender.applicant.state() {
                // What was granted was opened, for this sender.
                assert_eq!(
                    receiver.queues.opened.get(&grant.session_key),
                    Some(&(number as u64))
                );
                let ends_at = *sender
                    .ends_at
                    .get_or_insert(now + Duration::from_millis(sender.plan.hold_ms));
                if now < ends_at {
                    let queue = grant.landing_queue;
                    // Data flows, in the session's own queue.
                    if receiver
                        .queues
                        .open
                        .get(&queue)
                        .is_some_and(|open| open.0 == grant.session_key)
                    {
                        receiver.grantor.touched(grant.session_key, now);
                    }
                } else if sender.plan.vanishes {
                    sender.gone = true;
                } else if sender.farewell.is_none() {
                    let id = 200 + number as u32;
                    sender.farewell = Some(Farewell::new(grant.session_key, 1, id, now, SECOND * 100));
                }
            }
            if let Some(farewell) = &mut sender.farewell
                && let Some(message) = farewell.poll_transmit(now)
            {
                network.transmit(now, number, true, farewell.request_id(), &message);
            }
        }
        receiver.grantor.expire(now, &mut receiver.queues);
        assert_eq!(receiver.grantor.sessions().count(), receiver.queues.open.len());

        // The next moment at which anything can happen.
        let timeouts = senders.iter().filter(|sender| !sender.gone).flat_map(|sender| {
            let farewell = sender.farewell.as_ref().and_then(Farewell::poll_timeout);
            let holding = sender
                .ends_at
                .filter(|&at| at > now)
                .map(|at| at.min(now + SECOND));
            [sender.applicant.poll_timeout(), farewell, holding]
        });
        let packet = network.flying.first_key_value().map(|(&(at, _), _)| at);
        let Some(next) = timeouts
            .chain([packet, receiver.grantor.poll_timeout()])
            .flatten()
            .min()
        else {
            break;
        };
        now = now.max(next);
    }
    (senders, receiver)
}

fn any_plan() -> impl Strategy<Value = Plan> {
    (0u64..3000, 0u64..3000, prop::bool::weighted(0.2)).prop_map(|(start_ms, hold_ms, vanishes)| Plan {
        start_ms,
        hold_ms,
        vanishes,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Lost, doubled, late and reordered messages: everybody gets a session in the end, no queue ever has two, and nothing
    /// stays open.
    #[test]
    fn admission_survives_the_network(
        loss_percent in 0u64..40,
        duplicate_percent in 0u64..40,
        max_delay_ms in 1u64..400,
        seed: u64,
        plans in prop::collection::vec(any_plan(), 1..6),
        queues in 1u16..4,
    ) {
        let weather = Weather { loss_percent, duplicate_percent, max_delay_ms };
        let (senders, receiver) = run(weather, seed, &plans, queues);
        for sender in &senders {
            let granted = matches!(sender.applicant.state(), ApplicantState::Granted(_));
            prop_assert!(granted, "{:?}", sender.applicant);
            if let Some(farewell) = &sender.farewell {
                prop_assert_eq!(*farewell.state(), FarewellState::Ended { delivered: 5 });
            }
        }
        prop_assert!(receiver.queues.open.is_empty());
        prop_assert_eq!(receiver.queues.closed.len(), receiver.queues.opened.len());
    }

    /// Without loss and with short delays nothing is ever opened in vain.
    #[test]
    fn fair_weather_wastes_nothing(
        duplicate_percent in 0u64..=100,
        seed: u64,
        plans in prop::collection::vec(any_plan(), 1..6),
        queues in 1u16..4,
    ) {
        let weather = Weather { loss_percent: 0, duplicate_percent, max_delay_ms: 20 };
        let (senders, receiver) = run(weather, seed, &plans, queues);
        prop_assert_eq!(receiver.queues.opened.len(), senders.len());
        for (sender, &(_, reason)) in senders.iter().zip(&receiver.queues.closed) {
            let ended = matches!(reason, CloseReason::Ended { messages: 1 } | CloseReason::Expired);
            prop_assert!(ended);
            prop_assert!(sender.plan.vanishes || sender.farewell.is_some());
        }
    }
}

#[test]
fn a_network_that_is_down_is_reported_at_the_deadline() {
    let weather = Weather {
        loss_percent: 100,
        duplicate_percent: 0,
        max_delay_ms: 1,
    };
    let plan = Plan {
        start_ms: 0,
        hold_ms: 0,
        vanishes: false,
    };
    let (senders, receiver) = run(weather, 1, &[plan], 1);
    assert_eq!(*senders[0].applicant.state(), ApplicantState::Unreachable);
    assert!(receiver.queues.opened.is_empty());
}
