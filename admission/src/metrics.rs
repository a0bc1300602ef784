//! Metrics for Prometheus, over HTTP, by one thread: the loop only gives away a [`Status`] when it is asked for one.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::daemon::status::{SmootherStatus, Status};

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

/// An answer is given again so long, however often it is asked for.
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

type Labels = Vec<(&'static str, String)>;

/// A status in OpenMetrics' text format.
fn text(status: &Status) -> String {
    let mut registry = Registry::with_prefix("lm_admissiond");
    let mut gauge = |name: &str, help: &str, values: Vec<(Labels, i64)>| {
        let family = Family::<Labels, Gauge>::default();
        for (labels, value) in values {
            if labels.is_empty() {
                let alone: Gauge = Gauge::default();
                alone.set(value);
                registry.register(name, help, alone);
                return;
            }
            family.get_or_create(&labels).set(value);
        }
        registry.register(name, help, family);
    };
    let by_interface = |value: fn(&crate::daemon::status::InterfaceStatus) -> i64| {
        let interfaces = status.interfaces.iter();
        interfaces
            .map(|interface| (vec![("interface", interface.name.clone())], value(interface)))
            .collect()
    };
    gauge(
        "interface_up",
        "Whether the interface is there",
        by_interface(|interface| i64::from(interface.absent.is_none())),
    );
    gauge(
        "sessions",
        "Sessions of receivers here",
        by_interface(|interface| interface.sessions.len() as i64),
    );
    gauge(
        "waiting",
        "Requests that wait for a place",
        by_interface(|interface| interface.waiting as i64),
    );
    gauge(
        "outgoing",
        "Sessions and requests of senders here",
        by_interface(|interface| interface.outgoing as i64),
    );
    gauge(
        "hosts",
        "Other hosts that are known",
        by_interface(|interface| interface.hosts as i64),
    );
    gauge(
        "recv_addrs",
        "Entries of the LM_RECV_ADDR list",
        by_interface(|interface| interface.recv_addrs.len() as i64),
    );
    gauge(
        "queues_free",
        "Queues that no program has",
        by_interface(|interface| {
            interface
                .queues
                .iter()
                .filter(|queue| queue.pid.is_none())
                .count() as i64
        }),
    );
    let smoothers = || {
        let interfaces = status.interfaces.iter();
        interfaces
            .filter_map(|interface| Some((vec![("interface", interface.name.clone())], interface.smoother?)))
    };
    gauge(
        "smoother_packets_per_second",
        "PAR: packets that may leave beside real time",
        smoothers()
            .map(|(labels, smoother)| (labels, smoother.packets_per_second.into()))
            .collect(),
    );
    gauge(
        "smoother_refresh_period_us",
        "RP in microseconds",
        smoothers()
            .map(|(labels, smoother)| (labels, (smoother.refresh_period_s * 1e6).round() as i64))
            .collect(),
    );
    gauge(
        "smoother_credits",
        "Credits that there are; negative: real time used up more",
        smoothers()
            .map(|(labels, smoother)| (labels, smoother.credits))
            .collect(),
    );
    gauge(
        "programs",
        "Programs that have an endpoint here, or are awaited",
        vec![(Vec::new(), status.programs.len() as i64)],
    );
    let memory: u64 = status.programs.iter().map(|program| program.memory_bytes).sum();
    gauge(
        "memory_bytes",
        "Memory that programs have registered",
        vec![(Vec::new(), memory as i64)],
    );

    let mut counter = |name: &str, help: &str, values: Vec<(Labels, u64)>| {
        let family = Family::<Labels, Counter>::default();
        for (labels, value) in values {
            if labels.is_empty() {
                let alone: Counter = Counter::default();
                alone.inc_by(value);
                registry.register(name, help, alone);
                return;
            }
            family.get_or_create(&labels).inc_by(value);
        }
        registry.register(name, help, family);
    };
    counter("calls", "Calls of programs", vec![(Vec::new(), status.calls)]);
    counter(
        "refusals",
        "Calls that were refused",
        vec![(Vec::new(), status.refusals)],
    );
    for (name, help, value) in [
        (
            "smoother_signals",
            "Losses and delays that lowered the smoother's rate",
            (|smoother| smoother.signals) as fn(SmootherStatus) -> u64,
        ),
        (
            "smoother_forgiven",
            "Debt that was forgiven, in credits",
            |smoother| smoother.forgiven,
        ),
        (
            "smoother_kernel_dropped",
            "Packets of the kernel that its class dropped",
            |smoother| smoother.kernel_dropped,
        ),
    ] {
        let values = smoothers().map(|(labels, smoother)| (labels, value(smoother)));
        counter(name, help, values.collect());
    }
    let mut datagrams = Vec::new();
    let mut packets = Vec::new();
    for interface in &status.interfaces {
        let label = |key, value: &String| vec![("interface", interface.name.clone()), (key, value.clone())];
        datagrams.extend(
            interface
                .datagrams
                .iter()
                .map(|(outcome, &count)| (label("outcome", outcome), count)),
        );
        packets.extend(
            interface
                .packets
                .iter()
                .map(|(verdict, &count)| (label("verdict", verdict), count)),
        );
    }
    counter("datagrams", "Datagrams of the admission protocol", datagrams);
    counter("packets", "Packets at the gate", packets);
    let mut text = String::new();
    // Into a string: nothing can fail.
    let _ = encode(&mut text, &registry);
    text
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
    }
}
