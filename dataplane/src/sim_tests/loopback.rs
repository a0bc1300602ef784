//! A third port, in memory and without rings: what [`crate::port`] asks for, and nothing else, carries messages, with a witness and without
//! one, over a device that keeps entries back, gives unused ones back when it stops, and loses packets.
// Not in the build whose instructions are counted: a second kind of engine changes what the compiler inlines.
#![cfg(all(test, debug_assertions))]

mod port;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use lm_ebpf::model::ModelGate;
use lm_protocol::geometry::Wire;

use super::bed::{BedConfig, PORT, data_address, engine_on, fill, ip, noise, plan};
use super::transfer::Dice;
use crate::completion::{Outcome, PeerId};
use crate::connect::ConnectOptions;
use crate::engine::Engine;
use crate::memory::{HugePages, Umem};
use crate::message::Message;
use crate::port::Caps;
use crate::simnic::Impairments;
use crate::simnic::impair::Link;
use crate::simnic::impair::foreign::Ends;
use crate::simnic::mac_of;
use crate::simnic::sockets::Sockets;
use port::{HELD, Host, Hosts, Loopback, carry, locked};

struct Pair {
    hosts: Hosts,
    engines: Vec<Engine<Loopback>>,
    now_ns: u64,
}

impl Pair {
    fn new(witness: bool, seed: u64, impairments: Impairments) -> Pair {
        let config = BedConfig {
            seed,
            ..BedConfig::default()
        };
        let caps = Caps {
            witness,
            held: HELD as u32,
            ..Caps::copying(0)
        };
        let plan = plan(&config, caps);
        let umems = [0, 1].map(|_| Umem::new(plan.total_len(), HugePages::Off).expect("memory"));
        let host = |host: usize| Host {
            mapping: umems[host].mapping().clone(),
            gate: ModelGate::new(Some(ip(host)), PORT, PORT + 1),
            queues: Default::default(),
            sockets: Sockets::new(data_address(host)),
            link: Link::new(
                impairments,
                Ends {
                    from: data_address(host),
                    to: data_address(1 - host),
                    mtu: 1500,
                },
            ),
            witness,
        };
        let hosts: Hosts = Arc::new(Mutex::new(([host(0), host(1)], 0)));
        let engine = |(host, umem)| {
            let port = Loopback(hosts.clone(), host);
            engine_on(&config, host, port, umem, &plan)
        };
        let engines = (0..2).zip(umems).map(engine).collect();
        Pair {
            hosts,
            engines,
            now_ns: 1_000_000_000,
        }
    }

    fn round(&mut self) -> u64 {
        self.now_ns += 20_000;
        locked(&self.hosts).1 = self.now_ns;
        for (host, engine) in self.engines.iter_mut().enumerate() {
            carry(&self.hosts, host, None);
            engine.poll(self.now_ns);
        }
        self.now_ns
    }

    fn connect(&mut self) -> PeerId {
        let (now_ns, to) = (self.round(), data_address(1));
        let sender = &mut self.engines[0];
        let addressing = sender.addressing_to(to, mac_of(*to.ip()));
        let index = sender.peers.find_or_add(to, &addressing, now_ns).expect("room");
        let options = ConnectOptions {
            wire: Wire::Lm,
            max_message_len: 1 << 20,
            ..ConnectOptions::default()
        };
        sender.apply(index, &options, now_ns);
        loop {
            let now_ns = self.round();
            if let Some(outcome) = self.engines[0].application_outcome(index, now_ns) {
                outcome.expect("a session");
                return self.engines[0].peers.id_of(index);
            }
        }
    }

    /// Sends messages of these lengths, with up to four under way, and compares each when it has come and once more behind the next ones.
    /// `each` does what else happens in a round.
    fn carry_all(&mut self, lens: &[usize], seed: u64, mut each: impl FnMut(&mut Pair)) {
        let peer = self.connect();
        let payload = |number: usize| noise(seed << 8 | number as u64, lens[number]);
        let (mut sent, mut got, mut confirmed) = (0, 0, 0);
        let mut kept: VecDeque<(usize, Message)> = VecDeque::new();
        let end_ns = self.now_ns + 20_000_000_000;
        while confirmed < lens.len() || got < lens.len() {
            each(self);
            let now_ns = self.round();
            assert!(now_ns < end_ns, "seed {seed}: {got} of {} messages", lens.len());
            if sent < lens.len()
                && sent < got + 4
                && let Ok(mut region) = self.engines[0].loan(peer, lens[sent] as u64)
            {
                fill(&mut region, &payload(sent));
                let result = self.engines[0].submit(region, sent as u64, now_ns);
                sent += usize::from(result.is_ok());
            }
            while let Some(message) = self.engines[1].take_message().expect("no failure") {
                kept.push_back((message.tag() as usize, message));
                got += 1;
                for (number, message) in &kept {
                    assert!(
                        message[..] == payload(*number)[..],
                        "seed {seed}: message {number}"
                    );
                }
                kept.drain(..kept.len().saturating_sub(3));
            }
            while let Some(completion) = self.engines[0].told.completions().pop_front() {
                assert_eq!(completion.outcome, Outcome::Delivered, "seed {seed}");
                confirmed += 1;
            }
        }
        assert_eq!(self.engines[1].counters.violations.total(), 0, "seed {seed}");
    }
}

#[test]
fn a_port_without_rings_carries_messages() {
    let lens = [1, 1400, 7168, 100_000, 1 << 20];
    for witness in [true, false] {
        let mut pair = Pair::new(witness, 0, Impairments::default());
        pair.carry_all(&lens, 0, |_| {});
        let counters = pair.engines[1].counters;
        // All but the smallest landed, and nothing came by the sockets. What was kept back behind one message is the next one's.
        assert_eq!(counters.fragments_one_copy, 0);
        assert!(counters.user_copied_bytes <= (lens.len() * HELD * 1448) as u64);
    }
}

/// One packet in a hundred is lost, others come twice or late, and the landing queue stops now and then.
#[test]
fn seeded_losses_and_stops_on_a_port_without_rings() {
    for witness in [true, false] {
        let mut came_back = 0;
        for seed in 0..200 {
            let mut dice = Dice(seed * 77 + 3);
            let mut pair = Pair::new(
                witness,
                seed,
                Impairments {
                    seed,
                    loss_ppm: 10_000,
                    duplicate_ppm: 3_000,
                    reorder_ppm: 3_000,
                    reorder_packets_max: 8,
                    reorder_hold_max_ns: 50_000,
                    ..Impairments::default()
                },
            );
            let lens: Vec<usize> = (0..8).map(|_| 1 + dice.roll(200_000) as usize).collect();
            pair.carry_all(&lens, seed, |pair| {
                if dice.roll(50) == 0 {
                    came_back += locked(&pair.hosts).0[1].stop(1);
                }
            });
        }
        assert!(came_back > 2000, "{came_back} entries");
    }
}
