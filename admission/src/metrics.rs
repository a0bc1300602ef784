//! Metrics for Prometheus, over HTTP, on a thread of its own: the loop only gives away a [`Status`] when it is asked for one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use mio::Waker;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tiny_http::{Header, Method, Response, Server};

use crate::daemon::status::{SmootherStatus, Status};

/// How long the loop may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

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
        let server = Server::http(address).map_err(|error| {
            format!("metrics: cannot listen on {address} ({error}): choose another address or port")
        })?;
        let (ask, asked) = channel();
        let thread = thread::Builder::new().name("metrics".to_owned());
        let started = thread.spawn(move || {
            for request in server.incoming_requests() {
                let is_metrics = request.method() == &Method::Get && request.url() == "/metrics";
                let text = is_metrics.then(|| snapshot(&ask, &waker).as_ref().map(text));
                let sent = match text {
                    None => request.respond(Response::from_string("see /metrics\n").with_status_code(404)),
                    Some(None) => request.respond(Response::from_string("busy\n").with_status_code(503)),
                    Some(Some(text)) => request.respond(with_type(text)),
                };
                if let Err(error) = sent {
                    tracing::debug!("metrics were not taken: {error}");
                }
            }
        });
        started.map_err(|error| format!("metrics: no thread: {error}"))?;
        Ok(Metrics { asked })
    }

    /// Answers who asks.
    pub(crate) fn answer(&self, status: impl Fn() -> Status) {
        while let Ok(reply) = self.asked.try_recv() {
            // It may have lost its patience.
            let _ = reply.send(status());
        }
    }
}

fn snapshot(ask: &Sender<Sender<Status>>, waker: &Waker) -> Option<Status> {
    let (reply, status) = channel();
    ask.send(reply).ok()?;
    waker.wake().ok()?;
    status.recv_timeout(PATIENCE).ok()
}

fn with_type(text: String) -> Response<std::io::Cursor<Vec<u8>>> {
    let response = Response::from_string(text);
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match Header::from_bytes("Content-Type", kind) {
        Ok(header) => response.with_header(header),
        Err(()) => response,
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
