//! Introductions in a small world, in every order: a sender that lives several times at one address, a receiver, and an attacker who
//! saw everything that earlier lives said, repeats it at any time and makes up the rest, but does not see what is said now.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};

use lm_protocol::control::Proof;
use lm_protocol::introduction::{Cookies, PERIOD, is_same_incarnation};
use lm_protocol::time::Time;

const FROM: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), 7168);
/// Incarnations of the sender, one after the other, and one that the attacker makes up.
const LIVES: [u64; 3] = [
    0x1111_0000_0000_0001,
    0x2222_0000_0000_0001,
    0x3333_0000_0000_0001,
];
const MADE_UP: u64 = 0x4444_0000_0000_0001;
const MESSAGES: u8 = 2;

/// What comes to the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Packet {
    Eager { sender_id: u64, number: u8 },
    Proof { sender_id: u64, cookie: u64 },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct World {
    life: usize,
    /// Messages that the present life has sent.
    sent: u8,
    /// Everything that any life has said: each packet may come at any time, any number of times, or never.
    said: BTreeSet<Packet>,
    /// What the present life was challenged with.
    challenges: BTreeSet<u64>,
    known: Option<u64>,
    next: u8,
}

/// The receiver's rules, as an endpoint has them; `beside`: the cookie is about what is known when it is made.
struct Rules {
    cookies: Cookies,
    beside: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Reaction {
    None,
    Challenge(u64),
    Delivered,
}

impl Rules {
    fn known(&self, world: &World) -> Option<u64> {
        world.known.filter(|_| self.beside)
    }

    fn take(&self, world: &mut World, packet: Packet) -> Reaction {
        match packet {
            Packet::Eager { sender_id, number } => match world.known {
                Some(known) if is_same_incarnation(known, sender_id) => {
                    let is_next = number == world.next;
                    world.next += u8::from(is_next);
                    if is_next {
                        Reaction::Delivered
                    } else {
                        Reaction::None
                    }
                }
                _ => {
                    let known = self.known(world);
                    Reaction::Challenge(self.cookies.make(FROM, sender_id, known, Time::ZERO))
                }
            },
            Packet::Proof { sender_id, cookie } => {
                let proof = Proof {
                    sender_id,
                    cookie,
                    data_port: FROM.port(),
                    uncompleted_max: 0,
                    word: [0; 16],
                };
                let is_known = world
                    .known
                    .is_some_and(|known| is_same_incarnation(known, sender_id));
                if !is_known
                    && self
                        .cookies
                        .are_proved_by(&proof, FROM, self.known(world), Time::ZERO)
                {
                    world.known = Some(sender_id);
                    world.next = 0;
                }
                Reaction::None
            }
        }
    }

    /// Everything that can happen next, and whether the receiver's view of the present life stays right.
    fn steps(&self, world: &World) -> Result<Vec<World>, String> {
        let present = LIVES[world.life];
        let mut next = Vec::new();
        if world.sent < MESSAGES {
            let mut sent = world.clone();
            let number = sent.sent;
            sent.said.insert(Packet::Eager {
                sender_id: present,
                number,
            });
            sent.sent += 1;
            next.push(sent);
        }
        if world.life + 1 < LIVES.len() {
            next.push(World {
                life: world.life + 1,
                sent: 0,
                challenges: BTreeSet::new(),
                ..world.clone()
            });
        }
        for &cookie in &world.challenges {
            let mut proved = world.clone();
            proved.said.insert(Packet::Proof {
                sender_id: present,
                cookie,
            });
            next.push(proved);
        }
        let mut coming: Vec<Packet> = world.said.iter().copied().collect();
        // Of an earlier life the attacker can say what that life never said; of the present one nothing.
        for number in 0..=MESSAGES {
            let earlier = LIVES[..world.life].iter().chain([&MADE_UP]);
            coming.extend(earlier.map(|&sender_id| Packet::Eager { sender_id, number }));
        }
        coming.push(Packet::Proof {
            sender_id: MADE_UP,
            cookie: 7,
        });
        for packet in coming {
            let mut after = world.clone();
            let reaction = self.take(&mut after, packet);
            if world.known == Some(present) && after.known != world.known {
                return Err(format!(
                    "{packet:?} made the receiver forget the present life: {world:?}"
                ));
            }
            let (Packet::Eager { sender_id, .. } | Packet::Proof { sender_id, .. }) = packet;
            if world.known == Some(present) && reaction == Reaction::Delivered && sender_id != present {
                return Err(format!("{packet:?} was delivered: {world:?}"));
            }
            if let Reaction::Challenge(cookie) = reaction
                && sender_id == present
            {
                after.challenges.insert(cookie);
            }
            next.push(after);
        }
        Ok(next)
    }

    /// Whatever happened before, the present life is heard within two round trips.
    fn is_heard(&self, world: &World) -> bool {
        let mut world = world.clone();
        let sender_id = LIVES[world.life];
        let number = if world.known == Some(sender_id) {
            world.next
        } else {
            0
        };
        let eager = Packet::Eager { sender_id, number };
        match self.take(&mut world, eager) {
            Reaction::Delivered => true,
            Reaction::Challenge(cookie) => {
                self.take(&mut world, Packet::Proof { sender_id, cookie });
                self.take(&mut world, eager) == Reaction::Delivered
            }
            Reaction::None => false,
        }
    }

    fn explore(&self) -> Result<usize, String> {
        let mut seen = BTreeSet::from([World::default()]);
        let mut open = vec![World::default()];
        while let Some(world) = open.pop() {
            if !self.is_heard(&world) {
                return Err(format!("the present life is not heard: {world:?}"));
            }
            for next in self.steps(&world)? {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        Ok(seen.len())
    }
}

fn rules(beside: bool) -> Rules {
    Rules {
        cookies: Cookies::new(&[7; 16]),
        beside,
    }
}

#[test]
fn replays_never_bring_an_old_life_back_and_the_present_one_is_always_heard() {
    let worlds = rules(true).explore().expect("no order does harm");
    assert!(worlds > 1000, "{worlds}");
}

/// The model can fail: with cookies that are not about what is known, an old proof resets the present life.
#[test]
fn cookies_that_forget_what_is_known_would_not_do() {
    let found = rules(false).explore().expect_err("an old proof does harm");
    assert!(found.contains("forget the present life"), "{found}");
}

#[test]
fn a_cookie_is_for_one_address_incarnation_and_time_and_one_receiver() {
    let cookies = Cookies::new(&[1; 16]);
    let cookie = cookies.make(FROM, LIVES[0], None, Time::ZERO);
    let proof = Proof {
        sender_id: LIVES[0],
        cookie,
        data_port: FROM.port(),
        uncompleted_max: 0,
        word: [0; 16],
    };
    let next = Time::ZERO + PERIOD;
    assert!(cookies.are_proved_by(&proof, FROM, None, Time::ZERO));
    assert!(cookies.are_proved_by(&proof, FROM, None, next));
    assert!(!cookies.are_proved_by(&proof, FROM, None, next + PERIOD));
    assert!(!cookies.are_proved_by(&proof, FROM, Some(LIVES[1]), Time::ZERO));
    let other = SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 2), 7168);
    assert!(!cookies.are_proved_by(&proof, other, None, Time::ZERO));
    let proof = Proof {
        sender_id: LIVES[1],
        ..proof
    };
    assert!(!cookies.are_proved_by(&proof, FROM, None, Time::ZERO));
    let stranger = Cookies::new(&[2; 16]);
    let proof = Proof {
        sender_id: LIVES[0],
        ..proof
    };
    assert!(!stranger.are_proved_by(&proof, FROM, None, Time::ZERO));
}

#[test]
fn numberings_of_one_endpoint_are_one_incarnation() {
    let own = LIVES[0];
    for later in [0u64, 2, 2000, (1 << 33) - 2] {
        assert!(is_same_incarnation(own, own.wrapping_add(later)));
        assert!(is_same_incarnation(own.wrapping_add(later), own));
    }
    for other in [
        own ^ 1,
        own.wrapping_add(1 << 33),
        own.wrapping_sub(1 << 33),
        LIVES[1],
    ] {
        assert!(!is_same_incarnation(own, other), "{other:#x}");
    }
    assert!(is_same_incarnation(u64::MAX, 1));
}
