//! Standard tools, where they are installed: iperf3 and sockperf, by which our own kernel rows are judged.

use serde_json::Value;

use super::end::{Side, Spec, Task};
use super::schema::{Round, Times};
use super::systems::{How, MAX_DATAGRAM};
use crate::cli::Failure;

/// Those of the programs that this host has.
pub(super) fn installed() -> Vec<String> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let is_there =
        |program: &&str| std::env::split_paths(&folders).any(|folder| folder.join(program).is_file());
    let there = ["iperf3", "sockperf"].into_iter().filter(is_there);
    there.map(str::to_owned).collect()
}

/// Program and arguments of a system's end; `None`: that is an end of ours.
pub(super) fn line(spec: &Spec, side: Side) -> Option<String> {
    let (ip, port, size) = (spec.address.ip(), spec.address.port(), spec.size);
    let (Task::RoundTrips { seconds, .. } | Task::Stream { seconds, .. } | Task::Beside { seconds, .. }) =
        spec.task;
    // sockperf and iperf3 count whole seconds.
    let seconds = seconds.ceil().max(1.0) as u64;
    let spins = if spec.system.how == How::SockperfSpinning {
        " --nonblocked"
    } else {
        ""
    };
    let far = side == Side::Far;
    Some(match spec.system.how {
        How::Iperf3 | How::Iperf3Tcp if far => format!("iperf3 -s -1 -B {ip} -p {port}"),
        // As our own UDP programs do where a message is a little too long.
        How::Iperf3 => format!(
            "iperf3 -c {ip} -p {port} -u -b 0 -l {} -t {seconds} -J",
            size.min(MAX_DATAGRAM)
        ),
        How::Iperf3Tcp => format!("iperf3 -c {ip} -p {port} -l {size} -t {seconds} -J"),
        How::Sockperf | How::SockperfSpinning if far => {
            format!("sockperf server --ip {ip} --port {port}{spins}")
        }
        How::Sockperf | How::SockperfSpinning => format!(
            "sockperf ping-pong --ip {ip} --port {port}{spins} --msg-size {} --time {seconds} --full-rtt",
            size.max(14)
        ),
        _ => return None,
    })
}

/// What a near end printed, as a round.
pub(super) fn round(program: &str, at: u32, text: &str) -> Result<Round, Failure> {
    let round = match program {
        "iperf3" => stream(at, text),
        _ => sockperf(at, text),
    };
    round.ok_or_else(|| Failure::new(format!("{program} printed no figure; run it by hand to see why")))
}

/// What iperf3's receiving side counted.
fn stream(at: u32, text: &str) -> Option<Round> {
    let report: Value = serde_json::from_str(text).ok()?;
    let end = &report["end"];
    // TCP: what the receiver took. UDP: `sum` is the sender's, with what the receiver missed.
    let is_tcp = end["sum"].is_null();
    let sum = &end[if is_tcp { "sum_received" } else { "sum" }];
    let of_packets = |name: &str| if is_tcp { Some(0.0) } else { sum[name].as_f64() };
    let (packets, lost) = (of_packets("packets")?, of_packets("lost_packets")?);
    let part = 1.0 - of_packets("lost_percent")? / 100.0;
    let (seconds, bytes) = (sum["seconds"].as_f64()?, sum["bytes"].as_f64()?);
    let cpu = |name: &str| end["cpu_utilization_percent"][name].as_f64().unwrap_or(0.0) / 100.0 * seconds;
    let (send, receive) = (cpu("host_total"), cpu("remote_total"));
    Some(Round {
        at,
        messages: (packets - lost) as u64,
        lost_messages: lost as u64,
        bytes: (bytes * part) as u64,
        seconds,
        cpu_seconds_send: send,
        cpu_seconds_receive: receive,
        cpu_seconds_machine: send + receive,
        ..Round::default()
    })
}

/// Lines like `sockperf: ---> percentile 50.000 =    6.970`, in microseconds.
fn sockperf(at: u32, text: &str) -> Option<Round> {
    let after = |words: &str| {
        let line = text.lines().find(|line| line.contains(words))?;
        line.rsplit('=').next()?.trim().parse::<f64>().ok()
    };
    let percentile = |wanted: &str| Some(after(&format!("percentile {wanted}"))? * 1000.0);
    // `[Valid Duration] RunTime=0.9 sec; SentMessages=1; ReceivedMessages=64532`
    let count = text
        .lines()
        .find(|line| line.contains("Valid Duration"))
        .and_then(|line| line.rsplit('=').next()?.trim().parse().ok());
    // `Summary: Round trip is 7.1 usec`
    let mean = text.lines().find_map(|line| {
        let (_, rest) = line.split_once("Summary: Round trip is ")?;
        rest.split_whitespace().next()?.parse::<f64>().ok()
    });
    let p50_ns = percentile("50.000")?;
    Some(Round {
        at,
        messages: count.unwrap_or(0),
        times: Some(Times {
            min_ns: after("<MIN> observation").map(|us| us * 1000.0),
            p50_ns,
            p99_ns: percentile("99.000"),
            p999_ns: percentile("99.900"),
            max_ns: after("<MAX> observation").map(|us| us * 1000.0),
            mean_ns: mean.map_or(p50_ns, |mean| mean * 1000.0),
        }),
        ..Round::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sockperf_prints() {
        let text = "\
sockperf: [Valid Duration] RunTime=0.950 sec; SentMessages=64532; ReceivedMessages=64532
sockperf: ====> avg-rtt=7.201
sockperf: Summary: Round trip is 7.201 usec
sockperf: ---> <MAX> observation =  101.500
sockperf: ---> percentile 99.900 =   11.000
sockperf: ---> percentile 99.000 =    9.000
sockperf: ---> percentile 90.000 =    8.000
sockperf: ---> percentile 50.000 =    6.970
sockperf: ---> <MIN> observation =    5.500
";
        let round = sockperf(3, text).expect("it is understood");
        assert_eq!((round.at, round.messages), (3, 64_532));
        let times = round.times.unwrap();
        assert_eq!(
            [
                times.min_ns,
                times.p99_ns,
                times.max_ns,
                Some(times.p50_ns),
                Some(times.mean_ns)
            ],
            [5500.0, 9000.0, 101_500.0, 6970.0, 7201.0].map(Some)
        );
        assert!(sockperf(0, "nothing").is_none());
    }

    #[test]
    fn iperf3_counts_what_arrived() {
        let udp = r#"{"end":{"sum":{"seconds":2,"bytes":4000,"packets":4,"lost_packets":1,"lost_percent":25},
            "cpu_utilization_percent":{"host_total":50,"remote_total":25}}}"#;
        let round = stream(0, udp).expect("it is understood");
        assert_eq!((round.bytes, round.messages, round.lost_messages), (3000, 3, 1));
        assert_eq!(round.cpu_seconds_machine, 1.5);
        let tcp =
            r#"{"end":{"sum_sent":{"bytes":9000,"seconds":1},"sum_received":{"bytes":8000,"seconds":1}}}"#;
        assert_eq!(stream(0, tcp).unwrap().bytes, 8000);
        assert!(stream(0, r#"{"error":"refused"}"#).is_none());
    }
}
