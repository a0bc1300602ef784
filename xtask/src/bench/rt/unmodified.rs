//! **c** beside others that send by themselves: table 4's real time under three `iperf3`, UDP's at the paper's rate or TCP's at any, or under LM's
//! own messages of a packet each, which their receiver's credit bounds. Nothing is asked: what of theirs is lost they say themselves, and the books
//! of a run cannot be closed.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use lm_measure::rate::BitRate;
use serde_json::{Value, json};

use super::super::Unit::{MbitPerSecond, Microseconds, Percent};
use super::super::{Column, Comparison, Contender, Sample};
use super::{CLASSES, LEAD_NS, PAYLOAD_LEN, SET_UP_S, Tally, bed_config, count, now_ns, number};
use crate::bed::{Bed, Launch};
use crate::ends::{RealTime, Timetable};
use crate::machine::two_cores;
use crate::workspace::Programs;

const FIRST_PORT: u16 = 5201;

/// What `iperf3` sends, or the senders' endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Others {
    Udp,
    Tcp,
    Lm,
}

pub(super) fn comparison(link: BitRate, seconds: f64) -> Comparison {
    let contender = |name, others, smoother: Option<&'static str>| Contender {
        name,
        bed: bed_config(link),
        measure: Box::new(move |bed, programs| measure(bed, programs, (others, smoother), link, seconds)),
    };
    Comparison {
        key: "c_beside_iperf3",
        title: "table 4 beside iperf3 or LM's messages, LM's real time lost",
        unit: Percent,
        contenders: vec![
            contender("iperf3 -u, paced", Others::Udp, Some("paced")),
            contender("iperf3 -u, no smoother", Others::Udp, None),
            contender("iperf3, TCP, paced", Others::Tcp, Some("paced")),
            contender("iperf3, TCP, no smoother", Others::Tcp, None),
            contender("LM's messages, paced", Others::Lm, Some("paced")),
            contender("LM's messages, no smoother", Others::Lm, None),
        ],
        targets: Vec::new(),
        columns: COLUMNS,
        most_rounds: None,
    }
}

const COLUMNS: &[Column] = &[
    Column::new(
        "/real_time/delay_us/p99",
        "table 4 beside iperf3, delay p99",
        Microseconds,
    ),
    Column::new(
        "/others/goodput_mbit",
        "table 4 beside iperf3, goodput of what it is beside",
        MbitPerSecond,
    ),
    Column::new(
        "/others/lost_percent",
        "table 4 beside iperf3, iperf3's datagrams lost on the way",
        Percent,
    ),
];

fn measure(
    bed: &Bed,
    programs: &Programs,
    (others, smoother): (Others, Option<&'static str>),
    link: BitRate,
    seconds: f64,
) -> Result<Sample> {
    let [sending, receiving] = two_cores();
    let limit = Duration::from_secs_f64(seconds + SET_UP_S);
    let launch = |program: &Path, core: usize| Launch::new(program).core(core).goes_first().time_limit(limit);
    let real_time = RealTime {
        timetable: Timetable {
            port: CLASSES[0].port,
            size: PAYLOAD_LEN,
            begins_ns: now_ns() + LEAD_NS,
            seconds,
            rate: CLASSES[0].rate,
            burst: CLASSES[0].burst,
            is_answered: false,
        },
        smoother: smoother.map(|law| (law, link)),
        streams: others == Others::Lm,
    };
    let lm_bench = programs.path("lm-bench");
    let time_limit = limit.as_secs_f64().to_string();
    let end = |words: Vec<String>, core: usize| {
        launch(&lm_bench, core)
            .args(["--time-limit", &time_limit])
            .args(words)
    };
    let mut far = bed.right().spawn(end(real_time.far(), receiving))?;
    far.await_text("ready")?;
    let iperf3 = Path::new("iperf3");
    let mut near = Vec::new();
    let mut clients = Vec::new();
    let mut servers = Vec::new();
    for (host, number) in bed.senders().into_iter().zip(0u16..) {
        near.push(host.spawn(end(real_time.near(u64::from(number)), sending))?);
        if others == Others::Lm {
            continue;
        }
        let port = (FIRST_PORT + number).to_string();
        let server =
            launch(iperf3, receiving).args(["--server", "--one-off", "--forceflush", "--port", &port]);
        let mut server = bed
            .right()
            .spawn(server)
            .context("iperf3; apt-get install iperf3")?;
        server.await_text("Server listening")?;
        servers.push(server);
        // It lasts for as long as real time, and its set-up.
        let lasts = (seconds + LEAD_NS as f64 / 1e9).ceil().to_string();
        let to = bed.right().address().to_string();
        let client =
            launch(iperf3, sending).args(["--client", &to, "--port", &port, "--time", &lasts, "--json"]);
        let rate = CLASSES[1].rate * PAYLOAD_LEN as f64 * 8.0;
        let client = match others {
            Others::Udp => client
                .args(["--udp", "--length", &PAYLOAD_LEN.to_string()])
                .args(["--bitrate", &format!("{rate:.0}")]),
            Others::Tcp | Others::Lm => client,
        };
        clients.push(host.spawn(client)?);
    }
    let mut tally = Tally::default();
    for near in near {
        tally.add_sender(&near.finish()?.json()?)?;
    }
    let far = far.finish()?.json()?;
    tally.add_receiver(&far)?;
    let printed = clients.into_iter().map(|client| client.finish()?.json());
    let printed = printed.collect::<Result<Vec<_>>>()?;
    for server in servers {
        server.finish()?;
    }
    let real_time = tally.to_json(seconds);
    let others = match others {
        Others::Lm => json!({"goodput_mbit": count(&far, "/beside_bytes")? as f64 * 8.0 / seconds / 1e6}),
        Others::Udp | Others::Tcp => of_iperf3(&printed)?,
    };
    Ok(Sample {
        value: number(&real_time, "/lost_percent").context("no real-time datagram was due")?,
        report: json!({"real_time": real_time, "others": others, "iperf3": printed}),
    })
}

/// What came of all of them, by their receivers' count.
fn of_iperf3(printed: &[Value]) -> Result<Value> {
    let sum = |places: &[&str]| {
        let each = printed.iter().map(|one| {
            let found = places.iter().find_map(|place| number(one, place));
            found.with_context(|| format!("iperf3 tells no {}: {one}", places[0]))
        });
        each.sum::<Result<f64>>()
    };
    let rate = sum(&["/end/sum_received/bits_per_second", "/end/sum/bits_per_second"])?;
    let lost = sum(&["/end/sum_received/lost_packets", "/end/sum/lost_packets"]).ok();
    let sent = sum(&["/end/sum_sent/packets", "/end/sum/packets"]).ok();
    Ok(json!({
        "goodput_mbit": rate / 1e6,
        "lost_percent": lost.zip(sent).map(|(lost, sent)| 100.0 * lost / sent),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iperf3_counts_what_it_lost() {
        let udp = json!({"end": {"sum": {"bits_per_second": 9e6, "lost_packets": 7, "packets": 100},
            "sum_sent": {"packets": 100}, "sum_received": {"bits_per_second": 8e6, "lost_packets": 20}}});
        let of_two = of_iperf3(&[udp.clone(), udp]).unwrap();
        assert_eq!(of_two, json!({"goodput_mbit": 16.0, "lost_percent": 20.0}));
        let tcp = json!({"end": {"sum_received": {"bits_per_second": 90e6}}});
        assert_eq!(
            of_iperf3(&[tcp]).unwrap(),
            json!({"goodput_mbit": 90.0, "lost_percent": null})
        );
        assert!(of_iperf3(&[json!({})]).is_err());
    }
}
