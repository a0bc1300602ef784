//! Strangers that an `lm-recv` takes for senders: UDP sockets that prove their address, and speak the transfers' protocol as it suits them.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::path::Path;

use lm_bench::transfer::wire::{CONTROL_TAG, Control, Plan, Status, TransferId};
use lm_protocol::control::{ControlMessage, Proof};
use lm_protocol::wire::lm::{LmHeader, Trailer, parse_datagram};

use crate::bed::{Bed, Host, INTERFACE, RECEIVER, Tool, content, names, wait_until};
use crate::forger::{encoded, message};
use crate::resume::{LEN, resume, under_way};

const ATTACKER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 66);

/// A data address of a stranger's.
struct Stranger {
    socket: UdpSocket,
    from: SocketAddrV4,
    sender_id: u64,
    /// Number of the next message, and the packets that are not acknowledged.
    next: u32,
    unacknowledged: Vec<(u32, Vec<u8>)>,
    /// Whether it acknowledges what it is told.
    acknowledges: bool,
    heard: Vec<Control>,
}

impl Stranger {
    /// Strangers at one address of the sending host, which it gets.
    fn at(bed: &Bed, ip: Ipv4Addr, count: u16) -> Vec<Stranger> {
        bed.try_ip(Host::Sender, &format!("address add {ip}/24 dev {INTERFACE}"));
        let one = |port: u16| {
            let socket = bed.udp_socket(Host::Sender, &format!("{ip}:{port}"));
            socket.connect((RECEIVER, 7168)).unwrap();
            socket.set_nonblocking(true).unwrap();
            Stranger {
                socket,
                from: SocketAddrV4::new(ip, port),
                sender_id: u64::from(port) << 20 | 1,
                next: 0,
                unacknowledged: Vec::new(),
                acknowledges: true,
                heard: Vec::new(),
            }
        };
        (0..count).map(|n| one(7300 + n)).collect()
    }

    /// Sends a message of one fragment.
    fn send(&mut self, tag: u64, payload: &[u8]) {
        let packet = message(self.from, self.sender_id, self.next, tag, payload);
        // Refused where nothing listens any more, and sent again where it is lost.
        let _ = self.socket.send(&packet);
        self.unacknowledged.push((self.next, packet));
        self.next += 1;
    }

    fn say(&mut self, control: &Control) {
        self.send(CONTROL_TAG, &control.encode());
    }

    fn start(&mut self, transfer: u32, plan: Plan, key: u64, resume: bool) -> TransferId {
        let transfer = TransferId::new(transfer).unwrap();
        self.say(&start(transfer, plan, Some(key), resume));
        transfer
    }

    /// Takes what came; answers challenges, and sends again what they dropped.
    fn hear(&mut self) {
        let mut bytes = [0; 2048];
        while let Ok(len) = self.socket.recv(&mut bytes) {
            let Ok((header, payload)) = parse_datagram(&bytes[..len]) else {
                continue;
            };
            let sender_id = u64::from_be_bytes(bytes[4..12].try_into().unwrap());
            let number = u32::from_be_bytes(bytes[12..16].try_into().unwrap());
            match header {
                LmHeader::Control { .. } => self.prove(&bytes[..len]),
                LmHeader::EagerAck { next, .. } => self.unacknowledged.retain(|(number, _)| *number >= next),
                LmHeader::Eager { acknowledges, .. } => {
                    let next = acknowledges.map_or(0, |got| got.next);
                    self.unacknowledged.retain(|(number, _)| *number >= next);
                    let (next, limit) = (number + 1, number + 64);
                    let ack = LmHeader::EagerAck {
                        sender_id,
                        next,
                        limit,
                    };
                    if self.acknowledges {
                        let trailer = Trailer::new(&ack, &[], self.from);
                        let _ = self
                            .socket
                            .send(&[&ack.encode(0)[..], trailer.as_bytes()].concat());
                    }
                    self.heard.extend(Control::parse(payload));
                }
                _ => {}
            }
        }
    }

    fn prove(&self, packet: &[u8]) {
        if let Ok((_, ControlMessage::Challenge(challenge))) = ControlMessage::parse(packet) {
            let proof = ControlMessage::Proof(Proof {
                sender_id: challenge.sender_id,
                cookie: challenge.cookie,
                data_port: self.from.port(),
                uncompleted_max: 192,
                word: [0; 16],
            });
            let _ = self.socket.send(&encoded(&proof, 0));
            self.repeat();
        }
    }

    fn repeat(&self) {
        for (_, packet) in &self.unacknowledged {
            let _ = self.socket.send(packet);
        }
    }

    /// Goes on until something is so. What is not acknowledged it sends again.
    fn until(&mut self, what: &str, mut is_so: impl FnMut(&Stranger) -> bool) {
        let mut turns = 0;
        wait_until(what, || {
            self.hear();
            turns += 1;
            if turns % 50 == 0 {
                self.repeat();
            }
            is_so(self)
        });
    }

    /// Waits until all that it said has come.
    fn settle(&mut self) {
        self.until("a stranger is not heard", |it| it.unacknowledged.is_empty());
    }

    /// Waits for a number of such answers.
    fn wait_for(&mut self, what: &str, count: usize, is_it: impl Fn(&Control) -> bool) {
        self.until(what, |it| {
            it.heard.iter().filter(|heard| is_it(heard)).count() >= count
        });
    }
}

/// Files of which all is to come, in messages of that length.
fn endless(message_len: u64) -> Plan {
    Plan::new(None, message_len).unwrap()
}

/// What begins a transfer.
pub(crate) fn start(transfer: TransferId, plan: Plan, key: Option<u64>, resume: bool) -> Control {
    Control::Start {
        transfer,
        ipfrag: false,
        plan,
        key,
        resume,
    }
}

/// The name of what is kept of the attacker's file with this key.
fn part_of(key: u64) -> String {
    format!(".{ATTACKER}-{key:016x}.part")
}

fn abort(transfer: TransferId) -> Control {
    Control::End {
        transfer,
        status: Status::Aborted,
        bytes: 0,
        messages: 0,
    }
}

/// A sender that has left a third of its file.
fn interrupt(bed: &Bed, file: &Path, directory: &Path, receiver: &Tool) {
    let sender = under_way(bed, file, directory, &[]);
    sender.interrupt().expect_code(130);
    receiver.wait_for_line("the sender gave up");
}

/// Three transfers ask about 40 GiB each, in a packet each: others send meanwhile, and go on with their files.
#[test]
fn questions_keep_no_sender_out() {
    const HELD: u64 = 40 << 30;
    let Some(bed) = Bed::new() else { return };
    let (file, directory) = (bed.file("file", LEN), bed.directory("in"));
    for key in 0..3 {
        let part = fs::File::create(directory.join(part_of(key)));
        part.unwrap().set_len(HELD).unwrap();
    }
    let receiver = bed.recv(&["--output", directory.to_str().unwrap()]);
    interrupt(&bed, &file, &directory, &receiver);
    let mut strangers = Stranger::at(&bed, ATTACKER, 3);
    for (key, stranger) in (0..).zip(&mut strangers) {
        let transfer = stranger.start(1, endless(1 << 20), key, true);
        let is_ready = |it: &Control| matches!(it, Control::Ready { held: HELD, .. });
        stranger.wait_for("no READY", 1, is_ready);
        stranger.say(&Control::Check {
            transfer,
            offset: 0,
            block_len: HELD,
            end: HELD,
        });
        stranger.settle();
    }
    assert!(resume(&bed, &file) > LEN as u64 / 8);
    for stranger in &mut strangers {
        stranger.hear();
        let is_answered = |it: &Control| matches!(it, Control::Digests { .. });
        assert!(!stranger.heard.iter().any(is_answered), "nothing was worked at");
    }
    receiver.interrupt().expect_code(130);
}

/// A message of one byte whose index is far ahead, and one behind a hole: what is kept, and counted, is what lies before.
#[test]
fn only_what_is_contiguous_is_kept() {
    let Some(bed) = Bed::new() else { return };
    let (receiver, directory) = bed.recv_into("in", &["--max-bytes", "4000"]);
    let longest = || {
        let len = |name| fs::metadata(directory.join(name)).unwrap().len();
        names(&directory).into_iter().map(len).max().unwrap_or_default()
    };
    let stranger = &mut Stranger::at(&bed, ATTACKER, 1)[0];
    let far = stranger.start(1, endless(1 << 30), 1, false);
    stranger.send(far.data_tag(40), b"x");
    // The second answer comes when the message was taken.
    stranger.start(1, endless(1 << 30), 1, false);
    stranger.wait_for("no READY", 2, |it| matches!(it, Control::Ready { .. }));
    assert_eq!(longest(), 0, "bytes of a file that has one");
    stranger.say(&abort(far));
    let behind = stranger.start(2, endless(1000), 2, false);
    for index in [0, 900] {
        stranger.send(behind.data_tag(index), &content(1000));
    }
    stranger.say(&abort(behind));
    let is_over = |it: &Control| matches!(it, Control::Result { transfer, .. } if *transfer == behind);
    stranger.wait_for("no RESULT", 1, is_over);
    assert_eq!(names(&directory), [part_of(2)]);
    assert_eq!(longest(), 1000);
    // Of 4000 bytes it has 1000.
    bed.send_to_end(&[bed.file("file", 3000).to_str().unwrap()])
        .expect_code(0);
    receiver.interrupt().expect_code(130);
}

/// Strangers that acknowledge nothing: what they are told waits, and nothing else.
#[test]
fn an_answer_that_is_not_taken_holds_up_no_other() {
    let Some(bed) = Bed::new() else { return };
    let file = bed.file("file", 1000);
    let (receiver, _) = bed.recv_into("in", &[]);
    // All that one address may have unacknowledged.
    for (deaf, key) in Stranger::at(&bed, ATTACKER, 80).iter_mut().zip(0..) {
        deaf.acknowledges = false;
        for _ in 0..3 {
            (0..30).for_each(|_| _ = deaf.start(1, endless(1000), key, false));
            deaf.settle();
        }
    }
    for _ in 0..3 {
        bed.send_to_end(&[file.to_str().unwrap()]).expect_code(0);
    }
    receiver.interrupt().expect_code(130);
}

/// One address begins as many transfers as there is room for, then a second one, and no byte comes of any.
#[test]
fn transfers_without_progress_hold_no_places() {
    let Some(bed) = Bed::quiet(false) else { return };
    let (file, directory) = (bed.file("file", 1000), bed.directory("in"));
    let file = file.to_str().unwrap();
    let receiver = bed.recv(&["--output", directory.to_str().unwrap()]);
    let begin = |ip: Ipv4Addr| {
        let mut strangers = Stranger::at(&bed, ip, 16);
        for (stranger, key) in strangers.iter_mut().zip(0..) {
            stranger.start(1, endless(1000), key, false);
            let is_told = |it: &Control| matches!(it, Control::Ready { .. } | Control::Refused { .. });
            stranger.wait_for("no answer", 1, is_told);
        }
        strangers.retain(|stranger| matches!(stranger.heard[0], Control::Ready { .. }));
        strangers
    };
    let mut strangers = begin(ATTACKER);
    assert_eq!(strangers.len(), 8, "places of one address");
    bed.send_to_end(&[file]).expect_code(0);
    strangers.extend(begin(Ipv4Addr::new(10, 77, 0, 67)));
    assert_eq!(strangers.len(), 16);
    // They say that they are there, and then they begin anew each time, as if that were progress.
    let transfer = TransferId::new(1).unwrap();
    for first in [1, 2] {
        let mut number = first;
        wait_until("no place for a sender", || {
            for (stranger, key) in strangers.iter_mut().zip(0..) {
                match first {
                    1 => stranger.say(&Control::Alive { transfer }),
                    _ => _ = stranger.start(number, endless(1000), key, false),
                }
                stranger.hear();
            }
            number += 1;
            bed.send_to_end(&[file]).status.success()
        });
    }
    receiver.interrupt().expect_code(130);
}

/// More parts are there than are kept; then an address breaks off more transfers than its share: of those that have more
/// than theirs the oldest go, and a sender's that waits to be resumed stays.
#[test]
fn parts_are_evicted_by_their_own_address_alone() {
    let Some(bed) = Bed::new() else { return };
    let (file, directory) = (bed.file("file", LEN), bed.directory("in"));
    for number in 0..20 {
        fs::write(directory.join(format!(".192.0.2.1-{number:016x}.part")), b"left").unwrap();
    }
    let receiver = bed.recv(&["--output", directory.to_str().unwrap()]);
    interrupt(&bed, &file, &directory, &receiver);
    assert_eq!(names(&directory).len(), 16);
    let stranger = &mut Stranger::at(&bed, ATTACKER, 1)[0];
    for number in 1..=24 {
        let transfer = stranger.start(number, endless(1000), number.into(), false);
        stranger.send(transfer.data_tag(0), &content(1000));
        stranger.say(&abort(transfer));
        let is_over = |it: &Control| matches!(it, Control::Result { .. });
        stranger.wait_for("no RESULT", number as usize, is_over);
    }
    // Eight others have their share, and one is the sender's.
    let kept: Vec<_> = (18..=24).map(part_of).collect();
    let left = names(&directory);
    assert_eq!((&left[1..8], left.len()), (&kept[..], 16));
    assert!(resume(&bed, &file) > LEN as u64 / 8);
    receiver.interrupt().expect_code(130);
}
