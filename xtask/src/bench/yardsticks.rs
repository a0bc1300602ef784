//! iperf3 and sockperf, where they are installed: the kernel's rows must agree with what everybody measures by.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::recipes::SECONDS;
use super::{Contender, Sample};
use crate::bed::{Bed, BedConfig, Launch, Side};
use crate::machine::two_cores;

const LIMIT: Duration = Duration::from_secs(30);

/// A program on the path.
fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// iperf3's UDP stream without a rate limit: what its server received.
pub(super) fn iperf3(datagram_len: u32) -> Option<Contender> {
    let iperf3 = find("iperf3")?;
    Some(Contender {
        name: "iperf3",
        bed: BedConfig::default(),
        measure: Box::new(move |bed, _| {
            let [sending, receiving] = two_cores();
            let launch = |line: &str, core| {
                Launch::new(&iperf3)
                    .args(line.split_whitespace())
                    .core(core)
                    .time_limit(LIMIT)
            };
            let mut server = bed.right().spawn(launch("-s -1 --forceflush", receiving))?;
            server.await_text("Server listening")?;
            let client = format!(
                "-c {} -u -b 0 -l {datagram_len} -t {SECONDS} -J",
                Side::Right.address()
            );
            let report = bed.left().spawn(launch(&client, sending))?.finish()?.json()?;
            server.finish()?;
            received(report)
        }),
    })
}

fn received(report: Value) -> Result<Sample> {
    let sum = &report["end"]["sum"];
    let sent = sum["bits_per_second"]
        .as_f64()
        .context("iperf3 reported no rate")?;
    let lost_percent = sum["lost_percent"]
        .as_f64()
        .context("iperf3 reported no losses")?;
    Ok(Sample {
        value: sent * (1.0 - lost_percent / 100.0) / 1e9,
        report: sum.clone(),
    })
}

/// sockperf's ping-pong of 64 bytes: the median of whole round trips.
pub(super) fn sockperf(spin: bool) -> Option<Contender> {
    let sockperf = find("sockperf")?;
    Some(Contender {
        name: if spin {
            "sockperf, spinning"
        } else {
            "sockperf, blocking"
        },
        bed: BedConfig::default(),
        measure: Box::new(move |bed, _| {
            let text = ping_pong(bed, &sockperf, spin)?;
            let median = percentile(&text, "50.000").context("sockperf printed no median")?;
            Ok(Sample {
                value: median,
                report: json!({ "p50_us": median }),
            })
        }),
    })
}

fn ping_pong(bed: &Bed, sockperf: &PathBuf, spin: bool) -> Result<String> {
    let [sending, receiving] = two_cores();
    let spin = if spin { "--nonblocked" } else { "" };
    let to = format!("--ip {} --port 11111 {spin}", Side::Right.address());
    let launch = |line: &str, core| {
        Launch::new(sockperf)
            .args(line.split_whitespace())
            .core(core)
            .time_limit(LIMIT)
    };
    let mut server = bed.right().spawn(launch(&format!("server {to}"), receiving))?;
    server.await_udp_port(11_111)?;
    let client = format!("ping-pong {to} --msg-size 64 --time 1 --full-rtt");
    let text = bed.left().spawn(launch(&client, sending))?.finish()?.stdout;
    server.stop()?;
    Ok(text)
}

/// The value in a line like `sockperf: ---> percentile 50.000 =    6.970`.
fn percentile(text: &str, wanted: &str) -> Option<f64> {
    let line = text
        .lines()
        .find(|line| line.contains(&format!("percentile {wanted}")))?;
    line.rsplit('=').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sockperf_prints() {
        let text = "sockperf: ---> percentile 75.000 =    7.1\nsockperf: ---> percentile 50.000 =    6.970\n";
        assert_eq!(percentile(text, "50.000"), Some(6.97));
        assert_eq!(percentile("nothing", "50.000"), None);
    }

    #[test]
    fn iperf3_counts_what_arrived() {
        let report = json!({"end": {"sum": {"bits_per_second": 2e9, "lost_percent": 25.0}}});
        assert_eq!(received(report).unwrap().value, 1.5);
        assert!(received(json!({"error": "refused"})).is_err());
    }
}
