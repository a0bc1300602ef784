//! The two sides of the control connection: `lm-bench serve`, and the commands' [`Far`].
//!
//! One JSON object a line, one client at a time. The client says which of a fixed set of programs to start for it and when they are to
//! end; whatever still runs when the connection ends is ended with it.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use lm_admission::Ipv4Net;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::child::Running;
use super::end::{Side, Spec};
use super::host::{self, LinkEnd};
use super::schema::Host;
use super::tools;
use crate::cli::{Failure, chain};
use crate::link;

/// TCP port of the control connection.
pub(super) const PORT: u16 = 7170;
/// A longer line is no request.
const LINE_MAX: u64 = 16 << 20;
/// Refused clients are shown no more often.
const REFUSALS_SHOWN_EVERY: Duration = Duration::from_secs(1);
/// A client that says nothing for so long has gone; the longest measurement is shorter.
const SILENCE: Duration = Duration::from_secs(180);
/// The longest that a program may run, whatever the client says.
pub(super) const LIMIT: Duration = Duration::from_secs(150);
/// Programs that run at once: what is measured, and a load beside it.
const RUNNING_MAX: usize = 2;

/// Arguments of `serve`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// Address and TCP port to listen on; for others than this host, name who may come
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT))]
    bind: SocketAddrV4,
    /// Run measurements for these addresses only; may be given more than once
    #[arg(long, value_name = "CIDR", value_parser = lm_admission::range)]
    allow: Vec<Ipv4Net>,
    /// Run measurements for whoever can reach the port
    #[arg(long, conflicts_with = "allow")]
    from_anyone: bool,
    /// Core that this host's programs run on
    #[arg(long, default_value_t = 0)]
    core: u32,
}

impl ServeArgs {
    fn allows(&self, address: IpAddr) -> bool {
        let IpAddr::V4(address) = address else {
            return false;
        };
        self.allow.is_empty() || self.allow.iter().any(|range| range.contains(&address))
    }
}

/// What is answered is what is asked for, or why not.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// A [`Hello`].
    Hello,
    /// The [`LinkEnd`] that has this address.
    Link(Ipv4Addr),
    /// One end, for a number of seconds at most. A far one is ready when this is answered; where a near one runs, this host sends, too.
    Start(Side, Box<Spec>, f64),
    /// Waits for the end of what was started first: what it printed.
    Finish,
    /// Ends everything.
    Stop,
}

/// What a host says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    version: String,
    pub(super) host: Host,
    pub(super) machine: String,
    /// Programs that are not of this workspace, of those that are installed.
    pub(super) tools: Vec<String>,
}

impl Hello {
    pub(super) fn of_this_host(core: u32) -> Hello {
        Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: host::host(core),
            machine: host::machine(),
            tools: tools::installed(),
        }
    }
}

/// Runs `serve` until the process is ended.
///
/// # Errors
///
/// A one-line reason when the port cannot be listened on.
pub fn serve(args: &ServeArgs, ready: impl FnOnce()) -> Result<(), Failure> {
    let is_open = args.from_anyone || args.bind.ip().is_loopback();
    if !is_open && args.allow.is_empty() {
        return Err(Failure::usage(format!(
            "whoever reaches {} could have measurements run here: say who may with --allow CIDR, or --from-anyone",
            args.bind
        )));
    }
    let listener = TcpListener::bind(args.bind).map_err(|error| {
        Failure::new(format!(
            "cannot listen on {}: {error}; choose another address or port with --bind",
            args.bind
        ))
    })?;
    ready();
    let mut refusal_shown: Option<Instant> = None;
    loop {
        // A client that went before it was accepted is nobody's loss.
        let Ok((connection, from)) = listener.accept() else {
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        if !args.allows(from.ip()) {
            if refusal_shown.is_none_or(|shown| shown.elapsed() >= REFUSALS_SHOWN_EVERY) {
                refusal_shown = Some(Instant::now());
                eprintln!("lm-bench: {} is refused; --allow names who may come", from.ip());
            }
            continue;
        }
        if let Err(error) = serve_one(connection, args.core) {
            eprintln!("lm-bench: {from}: {}", chain(&error));
        }
    }
}

fn serve_one(connection: TcpStream, core: u32) -> io::Result<()> {
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(SILENCE))?;
    let mut connection = BufReader::new(connection);
    let mut running: VecDeque<Running> = VecDeque::new();
    while let Some(request) = read_line::<Request>(&mut connection)? {
        let reply = match request {
            Request::Hello => Ok(json!(Hello::of_this_host(core))),
            Request::Link(address) => LinkEnd::of(address).map(|link| json!(link)),
            Request::Start(..) if running.len() == RUNNING_MAX => {
                running.clear();
                Err(Failure::new(format!("more than {RUNNING_MAX} programs at once")))
            }
            Request::Start(side, spec, limit_s) => {
                let interface = match side {
                    Side::Near => link::interface_towards(*spec.address.ip()),
                    Side::Far => LinkEnd::of(*spec.address.ip()).map(|end| end.link.interface),
                };
                let start =
                    |interface: String| Running::start(&spec, side, &interface, core, limit_of(limit_s));
                (interface.and_then(start)).map(|program| json!(running.push_back(program)))
            }
            Request::Finish => match running.pop_front() {
                None => Err(Failure::new("nothing runs")),
                Some(program) => finish(program, connection.get_ref())?.map(Value::from),
            },
            Request::Stop => Ok(json!(running.clear())),
        };
        write_line(connection.get_ref(), &reply.map_err(|failure| failure.text))?;
    }
    Ok(())
}

/// How long a program may run for which a client names so many seconds.
pub(super) fn limit_of(limit_s: f64) -> Duration {
    Duration::from_secs_f64(limit_s.clamp(1.0, LIMIT.as_secs_f64()))
}

/// Waits for a program's end, or for the client's.
fn finish(mut program: Running, connection: &TcpStream) -> io::Result<Result<String, Failure>> {
    connection.set_nonblocking(true)?;
    while !program.has_ended() {
        match connection.peek(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_millis(2))
            }
            Err(error) => return Err(error),
            Ok(_) => return Err(io::Error::other("the client has gone while it was measured")),
        }
    }
    connection.set_nonblocking(false)?;
    Ok(program.finish())
}

fn write_line(mut connection: &TcpStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    connection.write_all(&line)
}

/// The next line; `None` at the connection's end.
pub(super) fn read_line<T: DeserializeOwned>(reader: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = String::new();
    let len = reader.take(LINE_MAX).read_line(&mut line)?;
    if len == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line)?))
}

/// The other host, as the commands see it.
pub(super) struct Far {
    connection: BufReader<TcpStream>,
    pub(super) hello: Hello,
}

impl Far {
    /// Connects to `lm-bench serve`.
    pub(super) fn connect(to: SocketAddrV4) -> Result<Far, Failure> {
        let connect = || -> io::Result<_> {
            let patience = Duration::from_secs(5);
            let connection = TcpStream::connect_timeout(&to.into(), patience)?;
            connection.set_nodelay(true)?;
            connection.set_read_timeout(Some(patience))?;
            write_line(&connection, &Request::Hello)?;
            let mut connection = BufReader::new(connection);
            let hello: Option<Result<Hello, String>> = read_line(&mut connection)?;
            connection.get_ref().set_read_timeout(Some(SILENCE))?;
            Ok((connection, hello))
        };
        let (connection, hello) = connect().map_err(|error| {
            Failure::new(format!(
                "no answer from lm-bench serve at {to}: {}; start it on the other host with --allow for this one (one \
                 client at a time)",
                chain(&error)
            ))
        })?;
        let Some(Ok(hello)) = hello else {
            return Err(Failure::new(format!(
                "{to} is no lm-bench serve, or does not let this host in; check the port, and --allow there"
            )));
        };
        let version = env!("CARGO_PKG_VERSION");
        if hello.version != version {
            return Err(Failure::new(format!(
                "lm-bench serve is of version {}, this one of {version}; use the same on both hosts",
                hello.version
            )));
        }
        Ok(Far { connection, hello })
    }

    /// Asks for something; what [`Request`] says is the answer.
    pub(super) fn ask<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T, Failure> {
        let lost = |error: io::Error| Failure::new(format!("the control connection: {}", chain(&error)));
        write_line(self.connection.get_ref(), request).map_err(lost)?;
        match read_line::<Result<T, String>>(&mut self.connection).map_err(lost)? {
            Some(reply) => reply.map_err(|text| Failure::new(format!("on the other host: {text}"))),
            None => Err(Failure::new(
                "the other host has closed the control connection; see what lm-bench serve says there",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server for one client, on this host.
    fn server() -> (SocketAddrV4, thread::JoinHandle<io::Result<()>>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = match listener.local_addr().unwrap() {
            std::net::SocketAddr::V4(address) => address,
            std::net::SocketAddr::V6(_) => unreachable!("it was bound to an IPv4 address"),
        };
        let served = thread::spawn(move || serve_one(listener.accept()?.0, 0));
        (address, served)
    }

    #[test]
    fn a_host_says_who_it_is() {
        let (address, served) = server();
        let mut far = Far::connect(address).unwrap();
        assert_eq!(far.hello.machine, host::machine());
        assert!(far.hello.host.memory_bytes > 0 && !far.hello.host.kernel.is_empty());
        let link = Request::Link("192.0.2.77".parse().unwrap());
        let failure = far.ask::<LinkEnd>(&link).unwrap_err();
        assert!(failure.text.contains("192.0.2.77"), "{failure}");
        let failure = far.ask::<String>(&Request::Finish).unwrap_err();
        assert!(failure.text.contains("nothing runs"), "{failure}");
        far.ask::<()>(&Request::Stop).unwrap();
        drop(far);
        served.join().unwrap().unwrap();
    }

    #[test]
    fn what_is_no_request_ends_the_connection() {
        for line in [
            "hello\n",
            "{\"Start\":[\"Far\",{\"system\":\"/bin/sh\"},1.0]}\n",
            "{\"Start\":[\"Far\",{\"system\":\"sh\",\"task\":{\"beside\":{\"count\":1,\"seconds\":1.0}},\"size\":64,\
             \"address\":\"10.77.0.2:7400\",\"mtu\":1500,\"mode\":\"auto\"},1.0]}\n",
        ] {
            let (address, served) = server();
            let mut connection = TcpStream::connect(address).unwrap();
            connection.write_all(line.as_bytes()).unwrap();
            let mut answer = String::new();
            connection.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, "", "{line}");
            assert!(served.join().unwrap().is_err(), "{line}");
        }
    }
}
