//! `cargo xtask run --hosts N`: all to all on a cluster, every byte compared.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::size::{self, ByteSize};
use lm_measure::table::Table;
use serde_json::{Value, json};

use super::Arguments;
use crate::bed::daemons::{Ground, NOBODY};
use crate::bed::{Host, INTERFACE, Launch};
use crate::machine::{cores, describe};
use crate::workspace::Programs;

/// Length of messages unless another one is wanted.
const MESSAGE_LEN: u64 = 64 << 10;
/// Sessions may wait for others, and the last messages for their confirmation, on a machine that is busy with all
/// hosts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What each host's program does.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    /// Length of each message, in bytes.
    pub message_len: u64,
    /// How long each sends.
    pub seconds: f64,
    /// Decides contents.
    pub seed: u64,
    /// How often the host's program was started before.
    pub life: u32,
}

/// `hosts` hosts, with daemons of these programs; without, programs embed the admission.
pub(crate) fn ground(daemons: Option<&Programs>, hosts: u32) -> Result<Ground> {
    let folder = PathBuf::from(format!("/run/lm-cluster-{}", std::process::id()));
    Ground::new(daemons, &folder, hosts)
}

/// Who the programs are, and whom they ask.
pub(crate) fn describe_programs(ground: &Ground) -> String {
    match &ground.daemons {
        Some(_) => format!("user {NOBODY}, without privileges, by the daemon of each host"),
        None => "root, with the admission embedded".to_owned(),
    }
}

impl Exchange {
    /// The program of one of `hosts`.
    pub(crate) fn launch(&self, programs: &Programs, ground: &Ground, host: &Host) -> Launch {
        let (tool, admission) = match &ground.daemons {
            Some(daemons) => (daemons.tool("lm-check"), daemons.socket(host).into_os_string()),
            None => (programs.path("lm-check"), "embedded".into()),
        };
        let hosts = ground.cluster.hosts();
        let peers: Vec<String> = hosts.iter().map(|host| host.address().to_string()).collect();
        let limit = Duration::from_secs_f64(self.seconds) + 3 * PATIENCE;
        let launch = Launch::new(tool)
            .args(["--time-limit", &limit.as_secs_f64().to_string()])
            .args(["exchange", "--interface", INTERFACE, "--idle", "default"])
            .args(["--peers", &peers.join(",")])
            .args(["--message-size", &self.message_len.to_string()])
            .args(["--seconds", &self.seconds.to_string()])
            .args(["--patience", &PATIENCE.as_secs_f64().to_string()])
            .args(["--seed", &self.seed.to_string()])
            .args(["--life", &self.life.to_string()])
            .arg("--admission")
            .arg(admission)
            .time_limit(limit);
        match ground.daemons {
            Some(_) => launch.user(NOBODY),
            None => launch,
        }
    }
}

/// Runs the command.
pub(super) fn run(arguments: &Arguments, hosts: u32, programs: &Programs) -> Result<Value> {
    let exchange = Exchange {
        message_len: arguments.message_size.map_or(MESSAGE_LEN, ByteSize::bytes),
        seconds: arguments.seconds,
        seed: 1,
        life: 0,
    };
    ensure!(exchange.message_len > 0, "messages have 1 byte at least");
    let ground = ground((!arguments.embedded).then_some(programs), hosts)?;
    let cluster = &ground.cluster;
    println!(
        "hosts      {hosts} on one switch, {} to {}, veth, MTU 1500, two queues each; all share {} cores",
        cluster.hosts()[0].address(),
        cluster.hosts()[hosts as usize - 1].address(),
        cores()
    );
    println!(
        "messages   {} each, for {} s from every host to every other one",
        size::exact(exchange.message_len),
        exchange.seconds
    );
    println!("programs   {}", describe_programs(&ground));
    let reports = exchange_all(&ground, programs, &exchange)?;
    let pairs = check(&reports)?;
    println!("\n{}", table(&reports)?);
    println!(
        "checked    every byte of {} messages, and that each of {pairs} pairs delivered what its sender counts as \
            delivered",
        sum(&reports, "from", "messages")
    );
    Ok(json!({
        "suite": "run",
        "kind": "all to all",
        "machine": describe(),
        "hosts": hosts,
        "message_bytes": exchange.message_len,
        "seconds": exchange.seconds,
        "embedded": arguments.embedded,
        "reports": reports,
    }))
}

/// Runs the programs of all hosts at once; their reports.
fn exchange_all(ground: &Ground, programs: &Programs, exchange: &Exchange) -> Result<Vec<Value>> {
    let mut running = Vec::new();
    for host in ground.cluster.hosts() {
        running.push(host.spawn(exchange.launch(programs, ground, host))?);
    }
    for program in &mut running {
        program.await_text("done")?;
    }
    // Only now: until here each may have had to confirm what others sent.
    let ended = running.into_iter().map(|program| {
        let output = program.stop()?;
        output.json().with_context(|| {
            let last = output.stderr.lines().last().unwrap_or("nothing").to_owned();
            format!("lm-check exchange ended without a report and said {last}")
        })
    });
    ended.collect()
}

/// Nothing was wrong, and each pair agrees about what was delivered. The number of pairs.
fn check(reports: &[Value]) -> Result<usize> {
    let mut delivered = BTreeMap::new();
    for report in reports {
        let own = address(report)?;
        ensure!(
            report["faults"] == 0,
            "{own} was given wrong messages: {}",
            report["faults_named"]
        );
        for from in array(report, "from")? {
            delivered.insert((address(from)?, own), from["messages"].as_u64());
        }
    }
    let mut pairs = 0;
    for report in reports {
        let own = address(report)?;
        for to in array(report, "to")? {
            let (to, sent) = (address(to)?, to);
            let came = delivered.get(&(own, to)).copied().flatten().unwrap_or(0);
            let number = |name: &str| sent[name].as_u64().unwrap_or(0);
            // Of those whose session ended early some may have come.
            let confirmed = number("messages");
            ensure!(
                (confirmed..=confirmed + number("failed")).contains(&came) && came > 0,
                "{own} counts {} messages as delivered to {to}, which was given {came}",
                sent["messages"]
            );
            pairs += 1;
        }
    }
    Ok(pairs)
}

/// A line for each host, and one for all.
fn table(reports: &[Value]) -> Result<Table> {
    let mut table = Table::new(&[
        "host",
        "sent",
        "received",
        "Mbit/s sent",
        "Mbit/s received",
        "failed",
        "retransmissions",
        "landed by redirect",
    ]);
    let mut row = |name: &str, some: &[Value]| {
        let number = |name: &str| {
            some.iter()
                .filter_map(|report| report[name].as_u64())
                .sum::<u64>()
        };
        let rate = |way: &str| {
            let of = |one: &Value| {
                let seconds = one["seconds"]
                    .as_f64()
                    .filter(|&seconds| seconds > 0.0)
                    .unwrap_or(1.0);
                sum(std::slice::from_ref(one), way, "bytes") as f64 * 8.0 / seconds / 1e6
            };
            format!("{:.0}", some.iter().map(of).sum::<f64>())
        };
        table.row([
            name.to_owned(),
            sum(some, "to", "messages").to_string(),
            sum(some, "from", "messages").to_string(),
            rate("to"),
            rate("from"),
            sum(some, "to", "failed").to_string(),
            number("retransmissions").to_string(),
            share([number("fragments_landed"), number("fragments_one_copy")]),
        ]);
    };
    for report in reports {
        row(address(report)?, std::slice::from_ref(report));
    }
    row("all", reports);
    Ok(table)
}

/// The first of two counts as a part of both.
fn share([landed, others]: [u64; 2]) -> String {
    match landed + others {
        0 => "–".to_owned(),
        sum => format!("{:.2} %", landed as f64 * 100.0 / sum as f64),
    }
}

/// The sum of a number over all peers of all reports.
pub(crate) fn sum(reports: &[Value], way: &str, name: &str) -> u64 {
    let peers = reports
        .iter()
        .filter_map(|report| report[way].as_array())
        .flatten();
    peers.filter_map(|peer| peer[name].as_u64()).sum()
}

fn address(value: &Value) -> Result<&str> {
    value["address"]
        .as_str()
        .context("lm-check exchange reported no address")
}

fn array<'a>(value: &'a Value, name: &str) -> Result<&'a Vec<Value>> {
    value[name]
        .as_array()
        .with_context(|| format!("lm-check exchange reported no {name}"))
}

/// Seconds that a run may last.
pub(crate) fn parse_seconds(text: &str) -> Result<f64> {
    let seconds = text
        .parse()
        .ok()
        .filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.context("write a number of seconds from 0.1 to 3600")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(own: &str, other: &str, sent: u64, came: u64) -> Value {
        json!({
            "address": own, "seconds": 2.0, "faults": 0, "faults_named": [], "retransmissions": 3,
            "fragments_landed": 99, "fragments_one_copy": 1,
            "to": [{"address": other, "messages": sent, "bytes": sent * 1000, "failed": 0}],
            "from": [{"address": other, "messages": came, "bytes": came * 1000}],
        })
    }

    #[test]
    fn pairs_must_agree() {
        let good = [report("a", "b", 5, 7), report("b", "a", 7, 5)];
        assert_eq!(check(&good).unwrap(), 2);
        let lost = [report("a", "b", 5, 7), report("b", "a", 8, 5)];
        assert!(check(&lost).unwrap_err().to_string().contains("b counts 8"));
        let silent = [report("a", "b", 0, 7), report("b", "a", 7, 0)];
        assert!(check(&silent).is_err());
        let mut wrong = good.clone();
        wrong[1]["faults"] = json!(1);
        assert!(
            check(&wrong)
                .unwrap_err()
                .to_string()
                .contains("b was given wrong")
        );
        let mut failed = lost.clone();
        failed[1]["to"][0]["messages"] = json!(6);
        failed[1]["to"][0]["failed"] = json!(1);
        assert_eq!(check(&failed).unwrap(), 2);
    }

    #[test]
    fn the_table_has_a_line_for_each_and_one_for_all() {
        let text = table(&[report("a", "b", 5, 7), report("b", "a", 7, 5)])
            .unwrap()
            .to_string();
        assert_eq!(text.lines().count(), 2 + 3, "{text}");
        assert!(
            text.contains("99.00 %") && text.lines().last().unwrap().contains("12"),
            "{text}"
        );
    }
}
