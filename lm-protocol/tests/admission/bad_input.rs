//! Input that no honest daemon sends: nothing panics, and nothing changes that the key's owner did not change.

use crate::gate::*;
use crate::golden::{any_address, any_message};
use crate::world::*;
use lm_protocol::admission::message::*;
use lm_protocol::admission::seal::*;
use lm_protocol::admission::*;
use lm_protocol::control::RejectReason;
use lm_protocol::session::Permit;
use lm_protocol::time::Time;
use lm_protocol::wire::lm::{SEAL_VERSION, VERSION};
use proptest::prelude::*;
use std::net::SocketAddrV4;
use std::time::Duration;

const NOW: Time = Time::from_millis(5000);

/// One node, its gate, and what it said.
struct Lone {
    node: Node,
    gate: Gate,
    out: Vec<Action>,
}

impl Lone {
    fn new(policy: Policy, limits: Limits) -> Lone {
        let config = Config {
            address: address(0),
            boot_id: 77,
            key: Some(key()),
            policy,
            limits,
        };
        let mut lone = Lone {
            node: Node::new(config, Time::ZERO),
            gate: Gate::new(0, 1),
            out: Vec::new(),
        };
        lone.act(|node, local, out| node.add_receiver(Time::ZERO, PORT, &[1], local, out));
        lone
    }

    fn act<R>(&mut self, act: impl FnOnce(&mut Node, &mut Local<'_>, &mut Vec<Action>) -> R) -> R {
        let mut permit: Permit = permit();
        let mut local = Local {
            policy: &mut permit,
            landing: &mut self.gate,
        };
        act(&mut self.node, &mut local, &mut self.out)
    }

    fn hear(&mut self, now: Time, from: SocketAddrV4, bytes: &[u8]) {
        self.act(|node, local, out| node.on_datagram(now, from, bytes, local, out));
    }

    /// What it says to a host, opened.
    fn said_to(&mut self, to: SocketAddrV4) -> Vec<(SealHeader, Message)> {
        let out = std::mem::take(&mut self.out);
        let mut said = Vec::new();
        for action in out {
            if let Action::Send {
                to: whither,
                datagram,
            } = action
                && whither == to
            {
                let (header, body) = key().open(address(0), to, datagram.as_bytes()).unwrap();
                said.push((header, Message::parse(body).unwrap()));
            }
        }
        said
    }

    /// Makes itself known as host `host` in life `boot_id`; the messages 1 and 2 of it are used.
    fn meet(&mut self, host: usize, boot_id: u64) {
        self.hear(
            NOW,
            address(host),
            sealed(host, boot_id, 1, 0, &Message::Hello).as_bytes(),
        );
        let challenge = self.said_to(address(host))[0].0.challenge;
        let answer = sealed(host, boot_id, 2, challenge, &Message::Hello);
        self.hear(NOW, address(host), answer.as_bytes());
        assert!(self.node.counters().accepted > 0);
    }
}

fn sealed_with(
    key: &ClusterKey,
    host: usize,
    boot_id: u64,
    sequence: u64,
    echo: u64,
    message: &Message,
) -> Datagram {
    let mut body = [0; MAX_BODY_LEN];
    let len = message.encode(&mut body);
    let header = SealHeader {
        port: PORT,
        boot_id,
        sequence,
        challenge: 0,
        echo,
    };
    key.seal(address(host), Some(address(0)), &header, &body[..len])
}

fn sealed(host: usize, boot_id: u64, sequence: u64, echo: u64, message: &Message) -> Datagram {
    sealed_with(&key(), host, boot_id, sequence, echo, message)
}

fn ask(job: u64) -> Message {
    Message::Session {
        request_id: job as u32,
        message: lm_protocol::control::ControlMessage::Request(request(job, 1000)),
    }
}

#[test]
fn each_kind_of_bad_datagram_has_its_counter() {
    let mut lone = Lone::new(Policy::Concurrent, Limits::default());
    lone.meet(1, 5);
    let before = fingerprint(&lone.node);
    let counted = lone.node.counters();
    let good = sealed(1, 5, 3, 0, &ask(1));
    let good = good.as_bytes();

    lone.hear(NOW, address(1), &[]);
    lone.hear(NOW, address(1), &good[..good.len() - 1]);
    let long = [good, &[0]].concat();
    lone.hear(NOW, address(1), &long);
    // A request as an endpoint without a daemon sends it.
    lone.hear(NOW, address(1), &good[SEAL_HEADER_LEN..good.len() - TAG_LEN]);
    let mut other_version = good.to_vec();
    other_version[0] = (SEAL_VERSION + 1) << 4 | 14;
    lone.hear(NOW, address(1), &other_version);
    let other_key = ClusterKey::new(&[9; 16]).unwrap();
    let foreign = sealed_with(&other_key, 1, 5, 3, 0, &ask(1));
    lone.hear(NOW, address(1), foreign.as_bytes());
    lone.hear(NOW, address(2), good);
    lone.hear(NOW, address(1), sealed(1, 5, 2, 0, &ask(1)).as_bytes());
    lone.hear(NOW, address(1), sealed(1, 6, 9, 0, &ask(1)).as_bytes());
    lone.hear(NOW, address(0), good);

    assert_eq!(
        fingerprint(&lone.node),
        before,
        "nothing of that changed anything"
    );
    let now = lone.node.counters();
    assert_eq!(now.malformed - counted.malformed, 3);
    assert_eq!(now.not_sealed - counted.not_sealed, 1);
    assert_eq!(now.other_version - counted.other_version, 1);
    assert_eq!(now.unauthenticated - counted.unauthenticated, 2);
    assert_eq!(now.replayed - counted.replayed, 1);
    assert_eq!(now.strangers - counted.strangers, 1);
    assert_eq!(now.own - counted.own, 1);
    assert_eq!(now.accepted, counted.accepted);

    lone.hear(NOW, address(1), good);
    assert_eq!(lone.node.counters().accepted, counted.accepted + 1);
    assert_eq!(lone.gate.opened, 1);
    // The very same once more, and the request in a new seal: one session.
    lone.hear(NOW, address(1), good);
    lone.hear(NOW, address(1), sealed(1, 5, 4, 0, &ask(1)).as_bytes());
    assert_eq!(lone.gate.opened, 1);
}

/// A host of the cluster with another version of the messages in the same seal.
#[test]
fn another_version_is_told_ours() {
    let mut lone = Lone::new(Policy::Concurrent, Limits::default());
    lone.meet(1, 5);
    let mut body = [0; MAX_BODY_LEN];
    let len = ask(0x0102_0304).encode(&mut body);
    body[0] = (VERSION - 1) << 4 | 15;
    let header = SealHeader {
        port: PORT,
        boot_id: 5,
        sequence: 3,
        ..SealHeader::default()
    };
    let datagram = key().seal(address(1), Some(address(0)), &header, &body[..len]);
    lone.said_to(address(1));
    lone.hear(NOW, address(1), datagram.as_bytes());
    assert_eq!(lone.node.counters().other_version, 1);
    let said = lone.said_to(address(1));
    assert!(
        matches!(&said[..], [(_, Message::Session {
            request_id: 0x0102_0304,
            message: lm_protocol::control::ControlMessage::Reject(reject),
        })] if reject.reason == RejectReason::Version && reject.version == VERSION),
        "{said:?}"
    );
    assert_eq!(lone.gate.opened, 0);
}

/// A host says of another one that it receives, or does not any more.
#[test]
fn nobody_speaks_for_others() {
    let mut lone = Lone::new(Policy::Concurrent, Limits::default());
    lone.meet(1, 5);
    let of = |host: usize| Append {
        address: *address(host).ip(),
        stage: Stage::Active,
        number: 1,
        lease_ms: 1000,
    };
    lone.hear(
        NOW,
        address(1),
        sealed(1, 5, 3, 0, &Message::Append(of(2))).as_bytes(),
    );
    assert_eq!(
        (lone.node.counters().impossible, lone.node.usage(NOW).listed),
        (1, 0)
    );
    lone.hear(
        NOW,
        address(1),
        sealed(1, 5, 4, 0, &Message::Append(of(1))).as_bytes(),
    );
    assert_eq!(lone.node.usage(NOW).listed, 1);
}

#[test]
fn what_ends_an_entry_may_overtake_what_begins_it() {
    let mut lone = Lone::new(Policy::Concurrent, Limits::default());
    lone.meet(1, 5);
    let address_1 = *address(1).ip();
    let append = |number| {
        Message::Append(Append {
            address: address_1,
            stage: Stage::Active,
            number,
            lease_ms: u32::MAX,
        })
    };
    let remove = |number| {
        Message::Remove(Remove {
            address: address_1,
            number,
        })
    };
    let mut listed = Vec::new();
    let order = [append(2), remove(1), remove(2), append(2), append(1), append(3)];
    for (sequence, message) in (3..).zip(&order) {
        lone.hear(NOW, address(1), sealed(1, 5, sequence, 0, message).as_bytes());
        listed.push(lone.node.usage(NOW).listed);
    }
    assert_eq!(listed, [1, 1, 0, 0, 0, 1]);
    let expires = lone.node.recv_addrs(NOW)[0].expires;
    assert_eq!(expires, NOW + LIST_LEASE_MAX, "an absurd lease is not believed");
}

fn any_policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        Just(Policy::Concurrent),
        Just(Policy::Exclusive {
            voters: vec![address(0), address(1), address(2)]
        }),
    ]
}

proptest! {
    /// Bytes of somebody without the key, from anywhere.
    #[test]
    fn without_the_key_nothing_changes(
        policy in any_policy(),
        message in any_message(),
        flips in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
        cut in any::<prop::sample::Index>(),
        noise in prop::collection::vec(any::<u8>(), 0..300),
        from in any_address(),
    ) {
        let mut lone = Lone::new(policy, Limits::default());
        lone.meet(1, 5);
        lone.meet(2, 6);
        let before = fingerprint(&lone.node);
        let accepted = lone.node.counters().accepted;
        let good = sealed(1, 5, 3, 0, &message);
        let mut flipped = good.as_bytes().to_vec();
        for flip in &flips {
            let bit = flip.index(8 * flipped.len());
            flipped[bit / 8] ^= 1 << (bit % 8);
        }
        prop_assume!(flipped != good.as_bytes());
        lone.hear(NOW, address(1), &flipped);
        lone.hear(NOW, address(1), &good.as_bytes()[..cut.index(good.as_bytes().len())]);
        lone.hear(NOW, address(2), good.as_bytes());
        lone.hear(NOW, from, &noise);
        let foreign = sealed_with(&ClusterKey::new(&[1; 16]).unwrap(), 1, 5, 3, 0, &message);
        lone.hear(NOW, address(1), foreign.as_bytes());
        prop_assert_eq!(fingerprint(&lone.node), before);
        prop_assert_eq!(lone.node.counters().accepted, accepted);
    }

    /// A host that has the key and no sense: nothing panics, memory stays bounded, and everything goes in the end.
    #[test]
    fn absurd_numbers_are_survived(
        policy in any_policy(),
        script in prop::collection::vec((1usize..9, any_message(), 0u64..2_000, any::<u16>()), 1..80),
    ) {
        let limits = Limits { hosts: 4, outgoing: 2, waiting: 3, ..Limits::default() };
        let mut lone = Lone::new(policy, limits);
        let mut now = NOW;
        let mut sequences = [10u64; 9];
        for (host, mut message, step_ms, step) in script {
            now += Duration::from_millis(step_ms);
            // Sometimes a host speaks of itself.
            match &mut message {
                Message::Append(Append { address: ip, .. }) | Message::Remove(Remove { address: ip, .. })
                        if step % 3 > 0 =>
                    {
                    *ip = *address(host).ip();
                }
                Message::Answer(answer) if step % 3 > 0 => answer.address = *address(0).ip(),
                _ => {}
            }
            let echo = lone
                .said_to(address(host))
                .last()
                .map_or(0, |(header, _)| header.challenge);
            sequences[host] = sequences[host].saturating_add(1 + u64::from(step) * u64::from(step));
            lone.hear(now, address(host), sealed(host, host as u64, sequences[host], echo, &message).as_bytes());
            let usage = lone.node.usage(now);
            prop_assert!(usage.hosts <= 4 && usage.listed <= 4, "{usage:?}");
            prop_assert!(usage.waiting <= 3 && usage.sessions <= 1, "{usage:?}");
            if let Some(deadline) = lone.node.next_deadline()
                && deadline <= now
            {
                lone.act(|node, local, out| node.on_timer(now, local, out));
                prop_assert!(lone.node.next_deadline().is_none_or(|next| next > now), "it stands still");
            }
        }
        let mut rounds = 0;
        while let Some(deadline) = lone.node.next_deadline() {
            now = deadline.max(now);
            lone.act(|node, local, out| node.on_timer(now, local, out));
            rounds += 1;
            prop_assert!(rounds < 3000, "no end");
        }
        let usage = lone.node.usage(now + PROMISE);
        prop_assert_eq!((usage.sessions, usage.waiting, usage.listed, usage.promised), (0, 0, 0, false));
        prop_assert!(lone.gate.open.is_empty());
    }
}
