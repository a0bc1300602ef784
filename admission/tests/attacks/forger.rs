//! Who writes packets under any address, and does so while others work.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lm_protocol::control::{ControlMessage, MAX_CONTROL_LEN, Request};
use lm_protocol::geometry::{LinkShape, Wire};
use lm_protocol::window::WindowShape;
use lm_protocol::wire::lm::{LmHeader, Trailer};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto};

use crate::form::{At, Bed};

/// A raw socket that writes its own IP headers: any source address.
pub(crate) struct Forger(OwnedFd);

impl Forger {
    fn new() -> Forger {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::RAW));
        Forger(socket.expect("a raw socket"))
    }

    /// Sends a UDP datagram under any address. What finds a queue full is lost, like other packets.
    pub(crate) fn send(&self, from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) {
        let len = 28 + payload.len();
        let mut packet = vec![0u8; 28];
        packet[0] = 0x45;
        packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
        packet[6] = 0x40;
        packet[8] = 64;
        packet[9] = 17;
        packet[12..16].copy_from_slice(&from.ip().octets());
        packet[16..20].copy_from_slice(&to.ip().octets());
        packet[20..22].copy_from_slice(&from.port().to_be_bytes());
        packet[22..24].copy_from_slice(&to.port().to_be_bytes());
        packet[24..26].copy_from_slice(&((len - 20) as u16).to_be_bytes());
        packet.extend_from_slice(payload);
        // The header says to which port.
        let to = SocketAddrV4::new(*to.ip(), 0);
        match rustix::net::sendto(&self.0, &packet, SendFlags::empty(), &to) {
            Ok(_) | Err(Errno::WOULDBLOCK | Errno::NOBUFS) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// A small message of the incarnation `sender_id`.
pub(crate) fn small_message(from: SocketAddrV4, sender_id: u64, number: u32, payload: &[u8]) -> Vec<u8> {
    let header = LmHeader::Eager {
        sender_id: sender_id | 1,
        number,
        tag: 666,
        digested: true,
        acknowledges: None,
    };
    let trailer = Trailer::new(&header, payload, from);
    let mut bytes = header.encode(payload.len() as u16).to_vec();
    bytes.extend_from_slice(payload);
    bytes.extend_from_slice(trailer.as_bytes());
    bytes
}

/// What asks for a session.
pub(crate) fn request(data_port: u16, sender_id: u64) -> Request {
    Request {
        sender_id,
        data_port,
        mtu: 1500,
        wire: Wire::Lm,
        link: LinkShape::IPV4,
        max_message_len: 1 << 20,
        window: WindowShape::DEFAULT,
        messages_in_flight: 4,
        uncompleted_max: 192,
        capabilities: 0,
        delivery: Default::default(),
        integrity: Default::default(),
        lands: true,
    }
}

/// A control message under no key.
pub(crate) fn encoded(message: &ControlMessage, request_id: u32) -> Vec<u8> {
    let mut bytes = [0; MAX_CONTROL_LEN];
    let len = message.encode(request_id, &mut bytes);
    bytes[..len].to_vec()
}

/// Runs an attack from the attacker's host while `work` is done. How many packets it sent.
pub(crate) fn under_attack<T>(
    bed: &Bed,
    attack: impl FnMut(&Forger, u64) + Send,
    per_second: u64,
    work: impl FnOnce() -> T,
) -> (T, u64) {
    let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let attacker = scope.spawn(|| {
            let mut attack = attack;
            bed.on(At::Attacker, || {
                let (forger, start) = (Forger::new(), Instant::now());
                while !over.load(Ordering::Acquire) {
                    let due = (start.elapsed().as_secs_f64() * per_second as f64) as u64;
                    // Relaxed: read when this thread has ended.
                    let done = sent.load(Ordering::Relaxed);
                    for number in done..due {
                        attack(&forger, number);
                    }
                    sent.store(due.max(done), Ordering::Relaxed);
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        over.store(true, Ordering::Release);
        attacker.join().expect("the attacker");
        match result {
            Ok(result) => (result, sent.load(Ordering::Relaxed)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
