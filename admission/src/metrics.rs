//! Metrics for Prometheus, over HTTP, by one thread: the loop only gives away a [`Status`] when it is asked for one.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::daemon::status::{InterfaceStatus, SmootherStatus, Status};

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

/// Values of one name, by their labels, in OpenMetrics' text format: counters where it ends with `_total`, else gauges.
fn add(text: &mut String, name: &str, help: &str, values: impl IntoIterator<Item = (String, i128)>) {
    let (family, kind) = match name.strip_suffix("_total") {
        Some(family) => (family, "counter"),
        None => (name, "gauge"),
    };
    let prefix = "lm_admissiond_";
    *text += &format!("# HELP {prefix}{family} {help}.\n# TYPE {prefix}{family} {kind}\n");
    for (labels, value) in values {
        *text += &format!("{prefix}{name}{labels} {value}\n");
    }
}

fn labels(pairs: &[(&str, &str)]) -> String {
    let quoted = pairs.iter().map(|(key, value)| {
        let value = value.replace('\\', r"\\").replace('"', "\\\"");
        format!("{key}=\"{value}\"")
    });
    format!("{{{}}}", quoted.collect::<Vec<_>>().join(","))
}

type Table<'a, Of> = &'a [(&'a str, &'a str, fn(&Of) -> i128)];

/// Of each interface.
const INTERFACES: Table<'_, InterfaceStatus> = &[
    ("interface_up", "Whether the interface is there", |one| {
        one.absent.is_none().into()
    }),
    ("sessions", "Sessions of receivers here", |one| {
        one.sessions.len() as i128
    }),
    ("waiting", "Requests that wait for a place", |one| {
        one.waiting as i128
    }),
    ("outgoing", "Sessions and requests of senders here", |one| {
        one.outgoing as i128
    }),
    ("hosts", "Other hosts that are known", |one| one.hosts as i128),
    ("recv_addrs", "Entries of the LM_RECV_ADDR list", |one| {
        one.recv_addrs.len() as i128
    }),
    ("queues_free", "Queues that no program has", |one| {
        one.queues.iter().filter(|queue| queue.pid.is_none()).count() as i128
    }),
];

/// Of each smoother.
const SMOOTHERS: Table<'_, SmootherStatus> = &[
    (
        "packets_per_second",
        "PAR: packets that may leave beside real time",
        |it| it.packets_per_second.into(),
    ),
    ("refresh_period_us", "RP in microseconds", |it| {
        (it.refresh_period_s * 1e6).round() as i128
    }),
    (
        "credits",
        "Credits that there are; negative: real time used up more",
        |it| it.credits.into(),
    ),
    (
        "signals_total",
        "Losses and delays that lowered the smoother's rate",
        |it| it.signals.into(),
    ),
    ("forgiven_total", "Debt that was forgiven, in credits", |it| {
        it.forgiven.into()
    }),
    (
        "kernel_dropped_total",
        "Packets of the kernel that its class dropped",
        |it| it.kernel_dropped.into(),
    ),
];

/// Of the daemon.
const DAEMON: Table<'_, Status> = &[
    (
        "programs",
        "Programs that have an endpoint here, or are awaited",
        |all| all.programs.len() as i128,
    ),
    ("memory_bytes", "Memory that programs have registered", |all| {
        all.programs
            .iter()
            .map(|program| i128::from(program.memory_bytes))
            .sum()
    }),
    ("calls_total", "Calls of programs", |all| all.calls.into()),
    ("refusals_total", "Calls that were refused", |all| {
        all.refusals.into()
    }),
];

fn text(status: &Status) -> String {
    let mut text = String::new();
    let of = |one: &InterfaceStatus| labels(&[("interface", &one.name)]);
    for (name, help, value) in INTERFACES {
        let values = status.interfaces.iter().map(|one| (of(one), value(one)));
        add(&mut text, name, help, values);
    }
    for (name, help, value) in SMOOTHERS {
        let smoothed = status
            .interfaces
            .iter()
            .filter_map(|one| Some((of(one), value(one.smoother.as_ref()?))));
        add(&mut text, &format!("smoother_{name}"), help, smoothed);
    }
    for (name, help, value) in DAEMON {
        add(&mut text, name, help, [(String::new(), value(status))]);
    }
    type Counts = fn(&InterfaceStatus) -> &BTreeMap<String, u64>;
    let counts: [(&str, &str, &str, Counts); 2] = [
        (
            "datagrams_total",
            "Datagrams of the admission protocol",
            "outcome",
            |one| &one.datagrams,
        ),
        ("packets_total", "Packets at the gate", "verdict", |one| {
            &one.packets
        }),
    ];
    for (name, help, label, of) in counts {
        let values = status.interfaces.iter().flat_map(|one| {
            let labels = |kind| labels(&[("interface", &one.name), (label, kind)]);
            of(one)
                .iter()
                .map(move |(kind, &count)| (labels(kind), count.into()))
        });
        add(&mut text, name, help, values);
    }
    text + "# EOF\n"
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
