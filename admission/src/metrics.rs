//! Metrics for Prometheus, over HTTP, by one thread: the loop only gives away a [`Status`] when it is asked for one.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::daemon::status::{InterfaceStatus, Status};

/// How long the loop may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a connection may last, whatever its client does.
const CONNECTION_MAX: Duration = Duration::from_secs(5);

/// Connections at once: one more takes the place of the oldest.
const CONNECTIONS_MAX: usize = 32;

/// How long a round waits while there are connections.
const ROUND: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// The longest request, in bytes.
const REQUEST_LEN_MAX: usize = 4096;

/// How long an answer is given again, however often it is asked for.
const FRESH_FOR: Duration = Duration::from_millis(100);

/// The pause after a failure of the listening socket (out of descriptors), which lasts.
const FAILURE_PAUSE: Duration = Duration::from_millis(100);

/// The loop's end.
#[derive(Debug)]
pub(crate) struct Metrics {
    asked: Receiver<Sender<Status>>,
}

impl Metrics {
    /// Begins to listen.
    ///
    /// # Errors
    /// One line: who may have the port.
    pub(crate) fn serve(address: SocketAddr, waker: Arc<Waker>) -> Result<Metrics, String> {
        let listens = |listener: TcpListener| listener.set_nonblocking(true).map(|()| listener);
        let listener = TcpListener::bind(address).and_then(listens).map_err(|error| {
            format!("metrics: cannot listen on {address} ({error}): choose another address or port")
        })?;
        let (ask, asked) = channel();
        let thread = thread::Builder::new().name("metrics".to_owned());
        let mut pages = Pages {
            ask,
            waker,
            last: None,
        };
        let started = thread.spawn(move || serve(&listener, &mut pages));
        started.map_err(|error| format!("metrics: no thread: {error}"))?;
        Ok(Metrics { asked })
    }

    /// Answers what is asked.
    pub(crate) fn answer(&self, status: impl Fn() -> Status) {
        while let Ok(reply) = self.asked.try_recv() {
            // It may have lost its patience.
            let _ = reply.send(status());
        }
    }
}

/// Serves all connections, one round after the other. None waits for another.
fn serve(listener: &TcpListener, pages: &mut Pages) {
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let wanted = clients.iter().map(|client| {
            let asks = client.answer.is_empty();
            PollFd::new(&client.stream, [PollFlags::OUT, PollFlags::IN][usize::from(asks)])
        });
        let mut polled: Vec<_> = std::iter::once(PollFd::new(listener, PollFlags::IN))
            .chain(wanted)
            .collect();
        // What fails finds nothing ready.
        let _ = rustix::event::poll(&mut polled, (!clients.is_empty()).then_some(&ROUND));
        let ready: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        let mut are_ready = ready[1..].iter();
        clients.retain_mut(|client| {
            let is_ready = are_ready.next().is_some_and(|is_ready| *is_ready);
            client.since.elapsed() < CONNECTION_MAX
                && (!is_ready || client.go_on(pages).is_ok_and(|goes_on| goes_on))
        });
        if !ready[0] {
            continue;
        }
        match listener.accept().and_then(|(stream, _)| Client::new(stream)) {
            Ok(client) => {
                if clients.len() == CONNECTIONS_MAX {
                    clients.remove(0);
                }
                clients.push(client);
            }
            Err(error) => {
                tracing::debug!("metrics: a connection was not taken: {error}");
                thread::sleep(FAILURE_PAUSE);
            }
        }
    }
}

/// A connection: one request, and its answer.
struct Client {
    stream: TcpStream,
    since: Instant,
    request: Vec<u8>,
    /// What is left to send; empty before the request is whole.
    answer: Vec<u8>,
}

impl Client {
    fn new(stream: TcpStream) -> io::Result<Client> {
        stream.set_nonblocking(true)?;
        Ok(Client {
            stream,
            since: Instant::now(),
            request: Vec::new(),
            answer: Vec::new(),
        })
    }

    /// Reads or writes what can be now. `false`: all is answered. An error: the client is gone, or no client.
    fn go_on(&mut self, pages: &mut Pages) -> io::Result<bool> {
        if self.answer.is_empty() {
            let mut bytes = [0; REQUEST_LEN_MAX];
            let room = REQUEST_LEN_MAX - self.request.len();
            let read = self.stream.read(&mut bytes[..room])?;
            self.request.extend_from_slice(&bytes[..read]);
            if self.request.windows(4).any(|end| end == b"\r\n\r\n") {
                self.answer = pages.answer(self.request.starts_with(b"GET /metrics HTTP/"));
            }
            return Ok(read > 0);
        }
        let written = self.stream.write(&self.answer)?;
        self.answer.drain(..written);
        Ok(!self.answer.is_empty())
    }
}

/// What is answered.
struct Pages {
    ask: Sender<Sender<Status>>,
    waker: Arc<Waker>,
    /// The last metrics, and when they were asked for.
    last: Option<(Instant, Option<String>)>,
}

impl Pages {
    fn answer(&mut self, is_metrics: bool) -> Vec<u8> {
        let (status, kind, text) = match is_metrics.then(|| self.metrics()) {
            None => ("404 Not Found", "text/plain", "see /metrics\n"),
            Some(None) => ("503 Service Unavailable", "text/plain", "busy\n"),
            Some(Some(text)) => ("200 OK", "application/openmetrics-text; version=1.0.0", text),
        };
        let len = text.len();
        let head =
            format!("HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {len}");
        format!("{head}\r\nConnection: close\r\n\r\n{text}").into_bytes()
    }

    fn metrics(&mut self) -> Option<&str> {
        if self.last.as_ref().is_none_or(|(at, _)| at.elapsed() > FRESH_FOR) {
            let page = self.snapshot().as_ref().map(text);
            self.last = Some((Instant::now(), page));
        }
        self.last.as_ref()?.1.as_deref()
    }

    fn snapshot(&self) -> Option<Status> {
        let (reply, status) = channel();
        self.ask.send(reply).ok()?;
        self.waker.wake().ok()?;
        status.recv_timeout(PATIENCE).ok()
    }
}

/// Metrics of a status in OpenMetrics' text format.
struct Text<'a> {
    status: &'a Status,
    text: String,
}

impl Text<'_> {
    /// Values of one name, by their labels: counters where it ends with `_total`, else gauges.
    fn add<V: Display>(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (String, V)>) {
        let (family, kind) = match name.strip_suffix("_total") {
            Some(family) => (family, "counter"),
            None => (name, "gauge"),
        };
        let prefix = "lm_admissiond_";
        self.text += &format!("# HELP {prefix}{family} {help}.\n# TYPE {prefix}{family} {kind}\n");
        for (labels, value) in values {
            self.text += &format!("{prefix}{name}{labels} {value}\n");
        }
    }

    /// A value of each interface that has it.
    fn each<V: Display>(&mut self, name: &str, help: &str, value: impl Fn(&InterfaceStatus) -> Option<V>) {
        let interfaces = self.status.interfaces.iter();
        let values = interfaces.filter_map(|one| Some((labels(&[("interface", &one.name)]), value(one)?)));
        self.add(name, help, values);
    }

    /// Counts of each interface, by what `label` says.
    fn counts(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        of: fn(&InterfaceStatus) -> &BTreeMap<String, u64>,
    ) {
        let interfaces = self.status.interfaces.iter();
        let values = interfaces.flat_map(|one| {
            let labels = |kind| labels(&[("interface", &one.name), (label, kind)]);
            of(one).iter().map(move |(kind, count)| (labels(kind), count))
        });
        self.add(name, help, values);
    }
}

fn labels(pairs: &[(&str, &str)]) -> String {
    let quoted = pairs.iter().map(|(key, value)| {
        let value = value.replace('\\', r"\\").replace('"', "\\\"");
        format!("{key}=\"{value}\"")
    });
    format!("{{{}}}", quoted.collect::<Vec<_>>().join(","))
}

fn text(status: &Status) -> String {
    let text = String::new();
    let mut to = Text { status, text };
    to.each("interface_up", "Whether the interface is there", |one| {
        Some(u8::from(one.absent.is_none()))
    });
    to.each("sessions", "Sessions of receivers here", |one| {
        Some(one.sessions.len())
    });
    to.each("waiting", "Requests that wait for a place", |one| {
        Some(one.waiting)
    });
    to.each("outgoing", "Sessions and requests of senders here", |one| {
        Some(one.outgoing)
    });
    to.each("hosts", "Other hosts that are known", |one| Some(one.hosts));
    to.each("recv_addrs", "Entries of the LM_RECV_ADDR list", |one| {
        Some(one.recv_addrs.len())
    });
    to.each("queues_free", "Queues that no program has", |one| {
        Some(one.queues.iter().filter(|queue| queue.pid.is_none()).count())
    });
    let help = "PAR: packets that may leave beside real time";
    to.each("smoother_packets_per_second", help, |one| {
        Some(one.smoother?.packets_per_second)
    });
    to.each("smoother_refresh_period_us", "RP in microseconds", |one| {
        Some((one.smoother?.refresh_period_s * 1e6).round())
    });
    let help = "Credits that there are; negative: real time used up more";
    to.each("smoother_credits", help, |one| Some(one.smoother?.credits));
    let help = "Losses and delays that lowered the smoother's rate";
    to.each("smoother_signals_total", help, |one| Some(one.smoother?.signals));
    let help = "Debt that was forgiven, in credits";
    to.each("smoother_forgiven_total", help, |one| {
        Some(one.smoother?.forgiven)
    });
    let help = "Packets of the kernel that its class dropped";
    to.each("smoother_kernel_dropped_total", help, |one| {
        Some(one.smoother?.kernel_dropped)
    });
    let memory: u64 = status.programs.iter().map(|program| program.memory_bytes).sum();
    for (name, help, value) in [
        (
            "programs",
            "Programs that have an endpoint here, or are awaited",
            status.programs.len() as u64,
        ),
        ("memory_bytes", "Memory that programs have registered", memory),
        ("calls_total", "Calls of programs", status.calls),
        ("refusals_total", "Calls that were refused", status.refusals),
    ] {
        to.add(name, help, [(String::new(), value)]);
    }
    let help = "Datagrams of the admission protocol";
    to.counts("datagrams_total", help, "outcome", |one| &one.datagrams);
    to.counts("packets_total", "Packets at the gate", "verdict", |one| {
        &one.packets
    });
    to.text + "# EOF\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smoother_has_its_metrics() {
        let text = text(&Status::smoothed());
        for line in [
            "smoother_packets_per_second{interface=\"lm0\"} 3600",
            "smoother_refresh_period_us{interface=\"lm0\"} 11111",
            "smoother_credits{interface=\"lm0\"} -3",
            "smoother_forgiven_total{interface=\"lm0\"} 5",
            "smoother_signals_total{interface=\"lm0\"} 7",
            "smoother_kernel_dropped_total{interface=\"lm0\"} 11",
        ] {
            let line = format!("lm_admissiond_{line}");
            assert!(text.lines().any(|had| had == line), "{line}: {text}");
        }
        for kind in ["smoother_credits gauge", "smoother_signals counter"] {
            assert!(text.contains(&format!("# TYPE lm_admissiond_{kind}\n")), "{text}");
        }
        // A name may have any character but a slash and spaces.
        assert_eq!(labels(&[("of", "\"\\")]), r#"{of="\"\\"}"#);
    }
}
