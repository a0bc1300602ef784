//! Datagrams by a timetable, whatever becomes of them: what hosts with real-time and other traffic offer a network (SS-RTUDP, table 4), by the
//! kernel's UDP.
//!
//! What is offered is what the timetable says. A datagram that the kernel refuses, or for which this program had no processor in time, is lost
//! like one that a switch drops: it was due, and nobody got it. Both ends are on one machine and have one clock.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};

use lm_box::split_mix;
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::thread::clock_nanosleep_absolute;
use rustix::time::{ClockId, Timespec, clock_gettime};
use serde::{Deserialize, Serialize};

use super::udp::{RECEIVE_BUFFER, begin_silence, is_silence};
use super::{Outcome, SILENCE, Spec, sys};
use crate::histogram::LatencyHistogram;

/// A datagram that could not be sent for so long is not sent any more: a burst of what had been due before is not in the timetable.
const LATE_NS: u64 = 10_000_000;
/// A wake-up that comes so much later than asked for is told.
const STALL_NS: u64 = 2_000_000;
/// `IP_TOS` of expedited forwarding (DSCP 46, RFC 3246), and the highest `SO_PRIORITY` that takes no privilege.
const EXPEDITED: i32 = 46 << 2;
const PRIORITY: i32 = 6;
/// Send memory in bytes: what waits in the host's own queueing discipline does not block its class.
const SEND_BUFFER: usize = 4 << 20;
/// When it was sent, at the start of a datagram.
pub(super) const STAMP_LEN: usize = 8;
/// Longest timetable.
const SECONDS_MAX: f64 = 3600.0;
const SECOND_NS: u64 = 1_000_000_000;

/// When datagrams are due.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timetable {
    /// When it begins, by the machine's monotonic clock.
    pub(crate) begins_ns: u64,
    /// How long it lasts.
    pub(crate) seconds: f64,
    /// Datagrams a second in the mean.
    pub(crate) rate: f64,
    /// Datagrams that are due at once. One: the gap to the next is within half of its mean around it. More: gaps between bursts are
    /// exponential. Equal ones would lock in phase at a FIFO, and one flow lose all.
    pub(crate) burst: u32,
    /// Decides the gaps.
    pub(crate) seed: u64,
    /// Whether the far end sends each one back. The kernel's are marked for it as those of a real-time program: EF, and priority 6.
    #[serde(default)]
    pub(crate) is_answered: bool,
}

/// What a timetable came to at its sender.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Offered {
    /// Datagrams that were due.
    pub(crate) due: u64,
    /// Not sent: this program woke up too late.
    pub(crate) late: u64,
    /// Not sent: the kernel had no room for it (`EAGAIN`), or dropped it in this host (`ENOBUFS`).
    pub(crate) refused: u64,
    /// Wake-ups that came more than 2 ms late: when, in nanoseconds after the timetable's begin, and by how much.
    pub(crate) stalls_ns: Vec<(u64, u64)>,
}

impl Timetable {
    pub(super) fn check(&self) -> io::Result<()> {
        let is_possible = (0.0..=SECONDS_MAX).contains(&self.seconds)
            && (1.0..=1e7).contains(&self.rate)
            && (1..=1000).contains(&self.burst);
        is_possible.then_some(()).ok_or_else(|| {
            io::Error::other(
                "a timetable has up to 3600 s, 1 to 10,000,000 datagrams a second, bursts of 1 to 1000",
            )
        })
    }

    fn len_ns(&self) -> u64 {
        (self.seconds * SECOND_NS as f64) as u64
    }

    /// When it is over, by the machine's monotonic clock.
    pub(super) fn ends_ns(&self) -> u64 {
        self.begins_ns.saturating_add(self.len_ns())
    }

    /// Times of the bursts, in nanoseconds after its begin.
    fn bursts(self) -> impl Iterator<Item = u64> {
        let mean_ns = SECOND_NS as f64 * f64::from(self.burst) / self.rate;
        let mut at_ns = 0.0;
        let all = (1..).map(move |place| {
            // 53 bits: from 0 to just below 1.
            let random = (split_mix(self.seed, place) >> 11) as f64 / (1_u64 << 53) as f64;
            at_ns += mean_ns
                * if self.burst == 1 {
                    0.5 + random
                } else {
                    -(1.0 - random).ln()
                };
            at_ns as u64
        });
        all.take_while(move |at_ns| *at_ns < self.len_ns())
    }

    /// Does what is due when it is due. `wait` waits until a time, and says how late it is then; `send` sends one, or says that it was refused.
    pub(super) fn follow(
        self,
        mut wait: impl FnMut(u64) -> io::Result<u64>,
        mut send: impl FnMut() -> io::Result<bool>,
    ) -> io::Result<Offered> {
        let burst = u64::from(self.burst);
        let mut offered = Offered::default();
        for at_ns in self.bursts() {
            let late_ns = wait(self.begins_ns.saturating_add(at_ns))?;
            if late_ns > STALL_NS {
                offered.stalls_ns.push((at_ns, late_ns));
            }
            offered.due += burst;
            if late_ns > LATE_NS {
                offered.late += burst;
                continue;
            }
            for _ in 0..burst {
                offered.refused += u64::from(!send()?);
            }
        }
        Ok(offered)
    }
}

pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * SECOND_NS + now.tv_nsec as u64
}

/// Sends what is due when it is due.
pub(super) fn send(spec: &Spec, timetable: Timetable) -> io::Result<Outcome> {
    timetable.check()?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(spec.address)?;
    let _less = rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, SEND_BUFFER);
    // Without it the kernel tells nobody that this host dropped a datagram (`udp_send_skb` in net/ipv4/udp.c).
    sys::set_option(&socket, libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
    let answers = match timetable.is_answered {
        true => {
            urgent(&socket)?;
            let (socket, ends_ns) = (socket.try_clone()?, timetable.ends_ns());
            Some(std::thread::spawn(move || take(&socket, ends_ns, |_, _| ())))
        }
        false => None,
    };
    let mut datagram = vec![0x5a; (spec.size as usize).max(STAMP_LEN)];
    let offered = timetable.follow(wait_until, || {
        datagram[..STAMP_LEN].copy_from_slice(&now_ns().to_le_bytes());
        match rustix::net::send(&socket, &datagram, SendFlags::DONTWAIT) {
            Ok(_) => Ok(true),
            Err(error) if is_refusal(error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    })?;
    let answers = answers.map(|thread| thread.join().expect("it does not panic"));
    let (round_trips, _) = answers.transpose()?.unwrap_or_default();
    Ok(Outcome {
        messages: offered.due - offered.late - offered.refused,
        round_trips: round_trips.counts().collect(),
        seconds: timetable.seconds,
        offered: Some(offered),
        ..Outcome::default()
    })
}

fn urgent(socket: &UdpSocket) -> io::Result<()> {
    // In this order: each TOS brings a priority of its own.
    sys::set_option(socket, libc::IPPROTO_IP, libc::IP_TOS, EXPEDITED)?;
    sys::set_option(socket, libc::SOL_SOCKET, libc::SO_PRIORITY, PRIORITY)
}

fn is_refusal(error: Errno) -> bool {
    matches!(error, Errno::AGAIN | Errno::NOBUFS)
}

/// Sleeps until a time; how late it is then.
fn wait_until(time_ns: u64) -> io::Result<u64> {
    let time = Timespec {
        tv_sec: (time_ns / SECOND_NS) as i64,
        tv_nsec: (time_ns % SECOND_NS) as i64,
    };
    if now_ns() < time_ns {
        clock_nanosleep_absolute(ClockId::Monotonic, &time)?;
    }
    Ok(now_ns().saturating_sub(time_ns))
}

/// Receives what comes, from whomever, until the timetable is over and nothing comes any more.
pub(super) fn receive(spec: &Spec, timetable: Timetable, ready: impl FnOnce()) -> io::Result<Outcome> {
    timetable.check()?;
    let socket = UdpSocket::bind(SocketAddrV4::new(*spec.address.ip(), spec.address.port()))?;
    let _less = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER);
    if timetable.is_answered {
        urgent(&socket)?;
    }
    ready();
    let (delays, bytes) = take(&socket, timetable.ends_ns(), |datagram, from| {
        if timetable.is_answered {
            // One that is refused is lost like any other.
            let _ = rustix::net::sendto(&socket, datagram, SendFlags::DONTWAIT, &from);
        }
    })?;
    Ok(Outcome {
        bytes,
        messages: delays.count(),
        seconds: timetable.seconds,
        delays: delays.counts().collect(),
        ..Outcome::default()
    })
}

/// Takes what comes until a time, and until nothing comes any more: how old each was, and how many bytes they had.
fn take(
    socket: &UdpSocket,
    ends_ns: u64,
    mut each: impl FnMut(&[u8], SocketAddr),
) -> io::Result<(LatencyHistogram, u64)> {
    begin_silence(socket)?;
    let mut delays = LatencyHistogram::new();
    let mut bytes = 0;
    let mut datagram = vec![0; 65_536];
    loop {
        match socket.recv_from(&mut datagram) {
            Ok((len, from)) => {
                let datagram = &datagram[..len];
                delays.record_ns(now_ns().saturating_sub(stamp_of(datagram)));
                bytes += len as u64;
                each(datagram, from);
            }
            Err(error) if !is_silence(&error) => return Err(error),
            Err(_) if now_ns() > ends_ns.saturating_add(SILENCE.as_nanos() as u64) => break,
            Err(_) => {}
        }
    }
    Ok((delays, bytes))
}

/// When a datagram was sent, as it says itself.
pub(super) fn stamp_of(datagram: &[u8]) -> u64 {
    let stamp = datagram.first_chunk().unwrap_or(&[0; STAMP_LEN]);
    u64::from_le_bytes(*stamp)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::cli::Mode;
    use crate::suite::end::Task;
    use crate::suite::systems::System;

    const TABLE: Timetable = Timetable {
        begins_ns: 0,
        seconds: 100.0,
        rate: 2500.0,
        burst: 10,
        seed: 1,
        is_answered: false,
    };

    fn gaps_ms(timetable: Timetable) -> Vec<f64> {
        let times: Vec<u64> = timetable.bursts().collect();
        times
            .windows(2)
            .map(|two| (two[1] - two[0]) as f64 / 1e6)
            .collect()
    }

    #[test]
    fn bursts_come_by_chance_at_their_mean_rate() {
        let gaps = gaps_ms(TABLE);
        // 25,000 gaps: the mean's deviation is 0.6 %.
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean / 4.0 - 1.0).abs() < 0.03, "{mean}");
        let longer = gaps.iter().filter(|gap| **gap > 4.0).count() as f64 / gaps.len() as f64;
        assert!((longer - (-1.0_f64).exp()).abs() < 0.02, "{longer}");
    }

    #[test]
    fn lone_datagrams_come_within_half_of_their_gap() {
        let gaps = gaps_ms(Timetable {
            rate: 400.0,
            burst: 1,
            ..TABLE
        });
        assert!((39_500..=40_500).contains(&gaps.len()), "{}", gaps.len());
        assert!(gaps.iter().all(|gap| (1.249..=3.751).contains(gap)));
        assert!(gaps.iter().any(|gap| *gap < 1.3) && gaps.iter().any(|gap| *gap > 3.7));
    }

    #[test]
    fn the_seed_decides() {
        let other = Timetable { seed: 2, ..TABLE };
        assert_eq!(gaps_ms(TABLE), gaps_ms(TABLE));
        assert_ne!(gaps_ms(TABLE), gaps_ms(other));
    }

    fn spec(timetable: Timetable, socket: &UdpSocket) -> Spec {
        let SocketAddr::V4(address) = socket.local_addr().unwrap() else {
            panic!("it was bound to IPv4")
        };
        Spec {
            system: System::parse("udp-blocking").unwrap(),
            task: Task::Timetable(timetable),
            size: 100,
            address,
            mtu: 1500,
            mode: Mode::Auto,
        }
    }

    #[test]
    fn what_is_too_late_is_not_sent_and_was_offered_all_the_same() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let timetable = Timetable {
            // Half of it is over, and more by the time the first datagram is looked at.
            begins_ns: now_ns() - SECOND_NS / 5,
            seconds: 0.4,
            burst: 1,
            ..TABLE
        };
        let outcome = send(&spec(timetable, &socket), timetable).unwrap();
        let offered = outcome.offered.unwrap();
        assert_eq!(offered.due, timetable.bursts().count() as u64);
        assert!(offered.late >= 400, "{offered:?}");
        assert_eq!(outcome.messages, offered.due - offered.late - offered.refused);
        assert!(offered.stalls_ns.len() as u64 >= offered.late);
    }

    #[test]
    fn what_is_answered_is_measured_there_and_back() {
        // Nobody has its port again before the far end takes it.
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let timetable = Timetable {
            begins_ns: now_ns() + SECOND_NS / 10,
            seconds: 0.3,
            rate: 200.0,
            burst: 1,
            is_answered: true,
            ..TABLE
        };
        let spec = spec(timetable, &socket);
        drop(socket);
        std::thread::scope(|scope| {
            let (ready, is_ready) = std::sync::mpsc::channel();
            let far = scope.spawn(|| receive(&spec, timetable, move || ready.send(()).unwrap()));
            is_ready.recv().unwrap();
            let near = send(&spec, timetable).unwrap();
            let far = far.join().unwrap().unwrap();
            let answers: u64 = near.round_trips.iter().map(|(_, count)| count).sum();
            assert!(
                answers > 0 && answers <= near.messages && far.messages >= answers,
                "{near:?} {far:?}"
            );
            // Each way back takes time, too.
            let least = |times: &[(u64, u64)]| times.iter().map(|(ns, _)| *ns).min();
            assert!(least(&near.round_trips) > least(&far.delays), "{near:?} {far:?}");
        });
    }

    #[test]
    fn impossible_timetables_are_refused() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        for wrong in [
            Timetable { rate: 0.0, ..TABLE },
            Timetable {
                rate: f64::NAN,
                ..TABLE
            },
            Timetable { burst: 0, ..TABLE },
            Timetable {
                seconds: 1e9,
                ..TABLE
            },
            Timetable {
                seconds: -1.0,
                ..TABLE
            },
        ] {
            let spec = spec(wrong, &socket);
            for refused in [send(&spec, wrong), receive(&spec, wrong, || panic!("ready"))] {
                let error = refused.unwrap_err().to_string();
                assert!(error.contains("a timetable has"), "{error}");
            }
        }
    }
}
