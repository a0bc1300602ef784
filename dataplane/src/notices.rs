//! Bad input: every packet that no honest peer sends is counted, and each kind is told once for each host it comes from.
//!
//! Counting is all that happens to most of them. Only the first of a kind from a host is put into words
//! ([`tracing::warn`]): what came, from whom, what becomes of it and what to do. Addresses can be forged in any number, so of
//! each kind [`HOSTS_TOLD`] hosts are named, then one line says that no more will be. The packets' payload is never shown.

use std::net::{Ipv4Addr, SocketAddrV4};

use crate::counters::Drops;

/// Hosts that are named of each kind.
pub(crate) const HOSTS_TOLD: usize = 8;
/// Sessions and requests that are over, of which something may still be on the way.
const PAST_LEN: usize = 32;

macro_rules! faults {
    ($($(#[$meta:meta])* $name:ident ($($counter:ident)?): $what:literal, $remedy:literal;)*) => {
        /// What is wrong with a packet, or with what a peer does.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub(crate) enum Fault {
            $($(#[$meta])* $name,)*
        }

        impl Fault {
            pub(crate) const ALL: &'static [Fault] = &[$(Fault::$name,)*];

            /// What came, and what becomes of it and is to be done.
            const fn words(self) -> (&'static str, &'static str) {
                match self { $(Fault::$name => ($what, $remedy),)* }
            }

            /// Its counter; those without one are counted elsewhere.
            #[allow(unused_variables)]
            pub(crate) fn counter(self, drops: &mut Drops) -> Option<&mut u64> {
                match self {
                    $(Fault::$name => {
                        let counter: Option<&mut u64> = None;
                        $(let counter = Some(&mut drops.$counter);)?
                        counter
                    })*
                }
            }
        }
    };
}

faults! {
    Malformed(malformed): "packets that are not LM's, or contradict themselves",
        "dropped; see what sends to the data port and the one behind it, or what changes packets on the way";
    Corrupt(corrupt): "packets whose bytes are not those that were sent",
        "dropped and sent again; a link, a switch or memory on the way is faulty";
    Digests(implausible): "digests that contradict others of the same message, or requests for digests of what was \
                           never sent",
        "dropped; the host's program is faulty";
    Contradictory(): "two digests for one message",
        "the message is given up; the sender's program is faulty";
    Version(other_version): "packets of another version of LM",
        "dropped; run the same version on both hosts";
    Unexpected(unexpected): "acknowledgements, announcements or requests that nothing here waits for",
        "dropped; the host may have been restarted, or somebody forges its address";
    Key(wrong_key): "packets with the key of no session of theirs",
        "dropped; somebody guesses keys, or forges addresses";
    Fragment(fragment_passed): "fragments of no session of theirs",
        "dropped; somebody guesses keys, or forges addresses";
    FragmentShape(): "fragments whose number, count or length is not what was announced",
        "dropped; the sender's program is faulty, or its packets are changed on the way";
    Acknowledgement(implausible): "acknowledgements of messages that were never sent",
        "dropped; the host's program is faulty";
    Overdrawn(implausible): "small messages beyond the credit that their sender has",
        "dropped; the sender's program is faulty";
    Credit(implausible): "credit beyond any receiver's memory, or for messages that were never sent",
        "dropped; the host's program is faulty";
    Missing(implausible): "requests for fragments that were never sent",
        "dropped; the host's program is faulty";
    Claim(implausible): "claims to have sent more than there was credit for",
        "not believed; the sender's program is faulty";
    Announcement(announcement_refused): "announcements of more messages than may be under way, or of longer ones than \
                                         was granted",
        "dropped; the sender's program is faulty";
    Ended(implausible): "the end of a session that confirms messages which were never sent",
        "the session is over, and they count as not delivered; the host's program is faulty";
    Answer(control_unexpected): "answers to requests that were never made",
        "dropped; the host may have been restarted, or somebody forges its address";
    Refused(request_refused): "requests for sessions that cannot be granted now",
        "answered with the reason; if there are many, allow fewer hosts";
    NotAllowed(not_allowed): "messages or requests from an address that may not send here",
        "refused; allow the address if it is to send";
    Proof(unexpected): "proofs of an address that answer no challenge of ours",
        "dropped; it is late, or somebody forges its address";
    PeersFull(peer_table_full): "messages, while the table of peers is full of hosts that are owed something",
        "dropped; allow fewer hosts";
    Frame(foreign_frame): "descriptors of no frame that was posted, or of more than a frame",
        "dropped; this is a fault of the kernel's driver, report it";
    Completion(foreign_completion): "completions of packets that were not sent, or were completed before",
        "ignored; this is a fault of the kernel's driver, report it";
    Violation(): "fragments in an order or at addresses that cannot be (invariant I3)",
        "the session is given up and its messages are reported; if it happens again, use another mode or interface";
    Astray(): "fragments that never reach the landing queue",
        "each is copied once more; have the device or the switch bring them to that queue, or leave it so";
    Stalled(): "nothing more of a message that was begun",
        "the session is given up and its messages are reported; see whether the sender lives and packets pass";
}

/// Who has been told of, and what may still be late.
#[derive(Debug)]
pub(crate) struct Notices {
    hosts: [[Ipv4Addr; HOSTS_TOLD]; Fault::ALL.len()],
    /// How many of `hosts` are set; one more: the last line of this kind was written.
    told: [u8; Fault::ALL.len()],
    past: [u64; PAST_LEN],
    past_next: usize,
    /// Lines written.
    pub(crate) lines: u64,
}

impl Notices {
    pub(crate) fn new() -> Notices {
        Notices {
            hosts: [[Ipv4Addr::UNSPECIFIED; HOSTS_TOLD]; Fault::ALL.len()],
            told: [0; Fault::ALL.len()],
            past: [0; PAST_LEN],
            past_next: 0,
            lines: 0,
        }
    }

    /// Says it, unless it was said.
    #[inline]
    pub(crate) fn tell(&mut self, fault: Fault, from: SocketAddrV4) {
        let told = usize::from(self.told[fault as usize]);
        if told <= HOSTS_TOLD && !self.hosts[fault as usize][..told.min(HOSTS_TOLD)].contains(from.ip()) {
            self.say(fault, from);
        }
    }

    #[cold]
    fn say(&mut self, fault: Fault, from: SocketAddrV4) {
        let (what, remedy) = fault.words();
        let told = usize::from(self.told[fault as usize]);
        self.told[fault as usize] += 1;
        self.lines += 1;
        match self.hosts[fault as usize].get_mut(told) {
            Some(host) => {
                *host = *from.ip();
                tracing::warn!("from {from}: {what}; {remedy}");
            }
            None => {
                tracing::warn!(
                    "from {HOSTS_TOLD} hosts and more, now {from}: {what}; counted from here on, without a word"
                );
            }
        }
    }

    /// A session's key or a request's number is over: what still comes for it is late, not wrong.
    pub(crate) fn remember(&mut self, past: u64) {
        if !self.is_past(past) {
            self.past[self.past_next] = past;
            self.past_next = (self.past_next + 1) % PAST_LEN;
        }
    }

    /// Whether this key or number was good a while ago.
    pub(crate) fn is_past(&self, number: u64) -> bool {
        number != 0 && self.past.contains(&number)
    }
}

/// No host: what a port does by itself.
pub(crate) const NOBODY: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);

/// The IPv4 source of an Ethernet frame that may be anything, and its port if it is UDP; zeros where there is none.
pub(crate) fn source_of(frame: &[u8]) -> SocketAddrV4 {
    let two = |at: usize| Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]));
    let at = match two(12) {
        Some(0x0800) => 14,
        Some(0x8100 | 0x88a8) if two(16) == Some(0x0800) => 18,
        _ => return NOBODY,
    };
    let Some(&[a, b, c, d]) = frame.get(at + 12..at + 16) else {
        return NOBODY;
    };
    let is_udp = frame[at] == 0x45 && frame[at + 9] == 17;
    let port = two(at + 20).filter(|_| is_udp).unwrap_or(0);
    SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), port)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(host: u32) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::from_bits(0x0a00_0000 + host), 7168)
    }

    #[test]
    fn a_kind_is_told_once_for_each_host_and_of_few_hosts() {
        let mut notices = Notices::new();
        for _ in 0..1000 {
            notices.tell(Fault::Key, from(1));
        }
        assert_eq!(notices.lines, 1);
        // Another port of the same host is no news, another kind is.
        notices.tell(Fault::Key, SocketAddrV4::new(*from(1).ip(), 9));
        assert_eq!(notices.lines, 1);
        notices.tell(Fault::Credit, from(1));
        assert_eq!(notices.lines, 2);
        for host in 0..10_000 {
            notices.tell(Fault::Key, from(host));
        }
        assert_eq!(notices.lines, 2 + HOSTS_TOLD as u64);
    }

    #[test]
    fn each_kind_moves_one_counter_at_most() {
        for &fault in Fault::ALL {
            let mut drops = Drops::default();
            let counted = fault.counter(&mut drops).map(|counter| *counter += 1);
            let sum: u64 = drops.iter().map(|(_, count)| count).sum();
            assert_eq!(sum, u64::from(counted.is_some()), "{fault:?}");
            let (what, remedy) = fault.words();
            assert!(!what.contains(';') && !what.ends_with('.') && !remedy.ends_with('.'));
        }
    }

    #[test]
    fn what_is_over_is_remembered_for_a_while() {
        let mut notices = Notices::new();
        assert!(!notices.is_past(0) && !notices.is_past(7));
        notices.remember(7);
        notices.remember(7);
        assert!(notices.is_past(7));
        for number in 100..100 + PAST_LEN as u64 {
            notices.remember(number);
        }
        assert!(!notices.is_past(7) && notices.is_past(100));
    }

    #[test]
    fn sources_of_anything() {
        let mut frame = vec![0; 60];
        assert_eq!(source_of(&frame).port(), 0);
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[23] = 17;
        frame[26..30].copy_from_slice(&[10, 1, 2, 3]);
        frame[34..36].copy_from_slice(&[0x1c, 0]);
        assert_eq!(source_of(&frame), "10.1.2.3:7168".parse().unwrap());
        for len in 0..60 {
            let source = source_of(&frame[..len]);
            assert!(source.ip().is_unspecified() || len >= 30);
        }
        let mut tagged = frame[..12].to_vec();
        tagged.extend([0x81, 0, 0, 7]);
        tagged.extend(&frame[12..]);
        assert_eq!(source_of(&tagged), "10.1.2.3:7168".parse().unwrap());
    }
}
