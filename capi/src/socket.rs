//! A socket: an endpoint, real time on it, and the buffers that are lent. Its calls drive all of it.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use lm_dataplane::{
    AdmissionConfig, ConnectOptions, Endpoint, EndpointConfig, MemoryConfig, Outcome, PeerId, RecvError,
    SendError, SendToken, Session,
};
use lm_protocol::smoother::Parameters;
use lm_realtime::{
    Foreign, Histograms, Info, NotSent, RealTime, RtBuffer, RtMessage, RtSocket, SendOptions, SendOutcome,
    SocketConfig, Statistics, monotonic,
};

use crate::failure::{Failure, failure};
use crate::table::buffers;

/// A host hears a message from whom it knows: this one makes us known.
const GREETING: &[u8] = b"real time";
/// How long a host may take to answer that.
const ANSWER: Duration = Duration::from_secs(1);
/// A receiver that says nothing for so long was started anew perhaps, and does not know us.
const SILENCE: Duration = Duration::from_secs(1);
/// Longest sleep.
const STEP: Duration = Duration::from_millis(10);
/// Length of an Ethernet header.
const ETHERNET_LEN: u32 = 14;

/// How a socket is opened.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) interface: String,
    pub(crate) allow: Vec<(Ipv4Addr, u8)>,
    pub(crate) link: Option<NonZeroU64>,
    pub(crate) foreign: Foreign,
    pub(crate) port: u16,
    pub(crate) number: u16,
    pub(crate) socket: SocketConfig,
}

/// A buffer that C has.
#[derive(Debug)]
struct Lent {
    address: usize,
    /// `None`: it is locked.
    buffer: Option<RtBuffer>,
    /// What became of the message before.
    outcome: SendOutcome,
}

/// Where messages go.
#[derive(Debug)]
struct Destination {
    address: SocketAddrV4,
    peer: PeerId,
    /// What its reports say of messages, and when that changed.
    told: u32,
    told_at: Instant,
}

/// A real-time socket with an endpoint of its own.
#[derive(Debug)]
pub(crate) struct Socket {
    socket: RtSocket,
    real_time: RealTime,
    endpoint: Endpoint,
    number: u16,
    lent: Vec<Lent>,
    to: Option<Destination>,
    /// A greeting under way, and what became of the one before.
    greeting: Option<(PeerId, SendToken)>,
    greeted: Option<Outcome>,
    /// A message that the caller had no room for.
    next: Option<RtMessage>,
    /// The interface went away: what it has not sent stays locked.
    is_link_gone: bool,
}

impl Socket {
    pub(crate) fn open(config: &Config) -> Result<Socket, Failure> {
        let mut endpoint = Endpoint::open(&EndpointConfig {
            interface: config.interface.clone(),
            port: config.port,
            memory: MemoryConfig {
                landing_len: 0, // real-time messages come by the general channel
                ..MemoryConfig::default()
            },
            admission: AdmissionConfig {
                allow: config.allow.clone(),
                ..AdmissionConfig::default()
            },
            ..EndpointConfig::default()
        })?;
        let frame_len = (endpoint.status().device().mtu + ETHERNET_LEN) as u16;
        let link = config.link.map(|rate| Parameters::of_link(rate, frame_len));
        let real_time = RealTime::new(&mut endpoint, link, monotonic)?;
        real_time.hold_kernel(&config.interface, config.foreign);
        Ok(Socket {
            socket: real_time.socket(&mut endpoint, config.number, &config.socket)?,
            real_time,
            endpoint,
            number: config.number,
            lent: Vec::new(),
            to: None,
            greeting: None,
            greeted: None,
            next: None,
            is_link_gone: false,
        })
    }

    /// A round: packets come and leave, greetings are taken and answered, and buffers come back.
    fn drive(&mut self) -> Result<(), Failure> {
        loop {
            match self.endpoint.try_recv() {
                Ok(None) => break,
                Err(RecvError::Link) => {
                    self.is_link_gone = true;
                    return Err(SendError::Link.into());
                }
                // Greetings, and what nobody here asked for.
                Ok(Some(_)) | Err(_) => {}
            }
        }
        while let Some(completion) = self.endpoint.try_completion() {
            if (self.greeting).is_some_and(|(_, token)| token == completion.token) {
                self.greeting = None;
                self.greeted = Some(completion.outcome);
            }
        }
        while let Some((mut buffer, outcome)) = self.socket.unlocked() {
            let address = buffer.as_mut_ptr().addr();
            if let Some(lent) = self.lent.iter_mut().find(|lent| lent.address == address) {
                (lent.buffer, lent.outcome) = (Some(buffer), outcome);
            }
        }
        Ok(())
    }

    /// Lends a buffer for a message of `len` bytes.
    pub(crate) fn lend(&mut self, len: usize) -> Result<*mut u8, Failure> {
        let mut buffer = self.socket.buffer(len).ok_or(failure(
            libc::ENOMEM,
            "no block is left for such a buffer; open the socket with more of these (blocks_of_N)",
        ))?;
        let start = buffer.as_mut_ptr();
        buffers().insert(start.addr());
        self.lent.push(Lent {
            address: start.addr(),
            buffer: Some(buffer),
            outcome: SendOutcome::Left,
        });
        Ok(start)
    }

    fn find(&self, address: usize) -> Result<usize, Failure> {
        let found = self.lent.iter().position(|lent| lent.address == address);
        found.ok_or_else(|| match buffers().contains(&address) {
            true => failure(libc::EINVAL, "this buffer is another socket's; send it there"),
            false => failure(
                libc::EFAULT,
                "this is no buffer; write the message in one of lm_rt_mmap",
            ),
        })
    }

    /// What became of a buffer's message; `None`: it is locked.
    pub(crate) fn unlocked(&mut self, address: usize) -> Result<Option<SendOutcome>, Failure> {
        let place = self.find(address)?;
        if self.lent[place].buffer.is_none() {
            self.drive()?;
        }
        let lent = &self.lent[place];
        Ok(lent.buffer.as_ref().map(|_| lent.outcome))
    }

    /// Sends a message in a buffer.
    pub(crate) fn send(
        &mut self,
        (address, len): (usize, usize),
        options: SendOptions,
        to: Option<SocketAddrV4>,
    ) -> Result<(), Failure> {
        if self.unlocked(address)?.is_none() {
            return Err(failure(
                libc::EBUSY,
                "this buffer is locked: its message has not left; write the next one in another buffer",
            ));
        }
        let place = self.find(address)?;
        let room = self.lent[place].buffer.as_ref().map_or(0, |buffer| buffer.len());
        if len > room {
            return Err(lm_realtime::SendError::TooLong(room).into());
        }
        self.go_to(to)?;
        let lent = &mut self.lent[place];
        let buffer = lent.buffer.take().expect("it is not locked");
        if let Err(NotSent { buffer, reason }) = self.socket.send_buffer(buffer, len, options) {
            lent.buffer = Some(buffer);
            return Err(reason.into());
        }
        self.drive()
    }

    /// Messages go there from now on; `None`: where they went before.
    fn go_to(&mut self, to: Option<SocketAddrV4>) -> Result<(), Failure> {
        let Some(to) = to.or(self.to.as_ref().map(|before| before.address)) else {
            return Err(lm_realtime::SendError::NotConnected.into());
        };
        if self.to.as_ref().is_some_and(|before| before.address == to) {
            self.greet_again();
            return Ok(());
        }
        self.drive()?;
        if self.is_locked() {
            return Err(failure(
                libc::EBUSY,
                "messages to another address have not left: the next one can go elsewhere when no buffer is locked",
            ));
        }
        let options = ConnectOptions {
            session: Session::Later,
            ..ConnectOptions::default()
        };
        let peer = self.endpoint.connect(to, &options)?;
        self.greet(peer)?;
        self.to = None;
        self.socket.connect(&mut self.endpoint, peer, self.number)?;
        self.to = Some(Destination {
            address: to,
            peer,
            told: 0,
            told_at: Instant::now(),
        });
        Ok(())
    }

    /// Makes us known to a host, and waits until it knows us.
    fn greet(&mut self, peer: PeerId) -> Result<(), Failure> {
        let deadline = Instant::now() + ANSWER;
        self.greeted = None;
        loop {
            if self.greeting.is_none_or(|(to, _)| to != peer) {
                match self.endpoint.try_send_copy(peer, GREETING, 0) {
                    Ok(token) => self.greeting = Some((peer, token)),
                    Err(SendError::WouldBlock) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            self.drive()?;
            match self.greeted.take() {
                Some(Outcome::Delivered) => return Ok(()),
                Some(Outcome::Refused) => {
                    return Err(failure(
                        libc::ECONNREFUSED,
                        "that host does not allow us to send there; have it name us (allow)",
                    ));
                }
                _ if Instant::now() >= deadline => {
                    return Err(failure(
                        libc::ETIMEDOUT,
                        "that host does not answer: has it a socket with that UDP port, whose program makes calls?",
                    ));
                }
                _ => self.endpoint.wait(STEP),
            }
        }
    }

    /// Makes us known to a receiver that may have been started anew. Does not wait: what it does not know is lost.
    fn greet_again(&mut self) {
        let statistics = self.socket.statistics();
        let told = statistics.reported_whole.wrapping_add(statistics.reported_lost);
        let Some(to) = &mut self.to else { return };
        if told != to.told {
            (to.told, to.told_at) = (told, Instant::now());
        } else if to.told_at.elapsed() > SILENCE {
            to.told_at = Instant::now();
            let sent = self.endpoint.try_send_copy(to.peer, GREETING, 0);
            self.greeting = sent.ok().map(|token| (to.peer, token));
        }
    }

    /// Waits for a message, so long or (`None`) for ever. It stays until it is taken.
    pub(crate) fn recv(&mut self, timeout: Option<Duration>) -> Result<Received, Failure> {
        let begun = Instant::now();
        loop {
            if self.next.is_none() {
                self.next = self.socket.recv();
            }
            if self.next.is_none() {
                self.drive()?;
                self.next = self.socket.recv();
            }
            if let Some(message) = &self.next {
                let info = *message.info();
                return Ok(Received {
                    info,
                    len: message.len(),
                    from: self.endpoint.peer(info.from).address(),
                });
            }
            if self.socket.missed() > 0 {
                return Err(failure(libc::ENODATA, "a period passed in which no message came"));
            }
            let left = match timeout {
                None => STEP,
                Some(Duration::ZERO) => return Err(failure(libc::EAGAIN, "no message is there")),
                Some(timeout) => timeout.saturating_sub(begun.elapsed()),
            };
            if left.is_zero() {
                return Err(failure(libc::ETIMEDOUT, "no message came in the time given"));
            }
            self.endpoint.wait(STEP.min(left));
        }
    }

    /// The message that was waited for.
    pub(crate) fn take(&mut self) -> Option<RtMessage> {
        self.next.take()
    }

    pub(crate) fn fd(&self) -> i32 {
        self.endpoint.as_fd().as_raw_fd()
    }

    pub(crate) fn histograms(&self) -> &Histograms {
        self.socket.histograms()
    }

    pub(crate) fn statistics(&self) -> Statistics {
        self.socket.statistics()
    }

    /// What the smoother lets others send, if there is one, and whether the kernel is held to it.
    pub(crate) fn smoothed(&self) -> (Option<u32>, bool) {
        (self.real_time.credits_per_second(), self.real_time.holds_kernel())
    }

    fn is_locked(&self) -> bool {
        self.lent.iter().any(|lent| lent.buffer.is_none())
    }

    /// Nothing is under way. Behind a link that went away nothing ever ends.
    pub(crate) fn may_close(&mut self) -> Result<(), Failure> {
        let driven = self.drive();
        match driven.is_ok() && !self.is_link_gone && self.is_locked() {
            true => Err(failure(
                libc::EBUSY,
                "a buffer of this socket is locked; wait until its message has left (lm_rt_unlocked)",
            )),
            false => Ok(()),
        }
    }

    pub(crate) fn close(mut self) {
        let mut all = buffers();
        for lent in &self.lent {
            all.remove(&lent.address);
        }
        drop(all);
        self.socket.close(&mut self.endpoint);
    }
}

/// What is known of a message that came.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) info: Info,
    pub(crate) len: usize,
    /// `None`: its sender is known no more.
    pub(crate) from: Option<SocketAddrV4>,
}
