//! `cargo xtask run --hosts N`: all to all on a cluster, every byte compared.

use std::collections::BTreeMap;
use std::slice::from_ref;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::size;
use lm_measure::table::Table;
use serde_json::{Value, json};

use crate::bed::daemons::{Ground, NOBODY};
use crate::bed::{Host, INTERFACE, Launch, Program};
use crate::machine::cores;
use crate::workspace::Programs;

/// Length of messages.
const MESSAGE_LEN: u64 = 64 << 10;
/// How long each program sends in the demonstration.
const SECONDS: f64 = 5.0;
/// Sessions may wait for others, and the last messages for their confirmation, on a machine that is busy with all
/// hosts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Starts a host's program, which sends to all others for `seconds`. Seed decides contents; `life`: how often it was
/// started before.
pub(crate) fn exchange(
    ground: &Ground,
    host: &Host,
    seconds: f64,
    [seed, life]: [u64; 2],
) -> Result<Program> {
    let hosts = ground.bed.hosts().iter();
    let peers: Vec<String> = hosts.map(|host| host.address().to_string()).collect();
    let limit = Duration::from_secs_f64(seconds) + 3 * PATIENCE;
    let line = format!(
        "--time-limit {} exchange --interface {INTERFACE} --idle default --peers {} --message-size {MESSAGE_LEN} \
         --seconds {seconds} --patience {} --seed {seed} --life {life} --admission",
        limit.as_secs_f64(),
        peers.join(","),
        PATIENCE.as_secs_f64()
    );
    let launch = Launch::new(ground.daemons.tool("lm-check"))
        .args(line.split_whitespace())
        .arg(ground.daemons.socket(host))
        .user(NOBODY)
        .time_limit(limit);
    host.spawn(launch)
}

/// Runs the command.
pub(super) fn run(hosts: u32, programs: &Programs) -> Result<Value> {
    let ground = Ground::new(programs, "cluster", hosts)?;
    let cluster = ground.bed.hosts();
    println!(
        "hosts      {hosts} on one switch, {} to {}, veth, MTU 1500, two queues each; all share {} cores",
        cluster[0].address(),
        cluster[hosts as usize - 1].address(),
        cores()
    );
    println!(
        "messages   {} each, for {SECONDS} s from every host to every other one",
        size::exact(MESSAGE_LEN)
    );
    println!("programs   user {NOBODY}, without privileges, by the daemon of each host");
    let start = |host| exchange(&ground, host, SECONDS, [1, 0]);
    let running: Vec<Program> = cluster.iter().map(start).collect::<Result<_>>()?;
    let reports = reports(running, |_| ())?;
    let pairs = check(&reports)?;
    println!("\n{}", table(&reports)?);
    println!(
        "checked    every byte of {} messages, and that each of {pairs} pairs delivered what its sender counts as \
            delivered",
        sum(&reports, "from", "messages")
    );
    Ok(json!({
        "kind": "all to all",
        "hosts": hosts,
        "message_bytes": MESSAGE_LEN,
        "seconds": SECONDS,
        "reports": reports,
    }))
}

/// Waits until all messages are confirmed, and ends the programs: their reports. What each has said, `heard` is told.
pub(crate) fn reports(mut running: Vec<Program>, mut heard: impl FnMut(&str)) -> Result<Vec<Value>> {
    for program in &mut running {
        program.await_text("done")?;
    }
    // Only now: until here each may have had to confirm what others sent.
    let ended = running.into_iter().map(|program| {
        let output = program.stop()?;
        heard(&output.stderr);
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
        for from in peers(from_ref(report), "from") {
            delivered.insert((address(from)?, own), from["messages"].as_u64());
        }
    }
    let mut pairs = 0;
    for report in reports {
        let own = address(report)?;
        for sent in peers(from_ref(report), "to") {
            let to = address(sent)?;
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
    ensure!(
        pairs == reports.len() * (reports.len() - 1),
        "{pairs} pairs reported"
    );
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
        let number = |name: &str| some.iter().filter_map(|one| one[name].as_u64()).sum::<u64>();
        let rate = |way: &str| {
            let of = |one: &Value| {
                let seconds = one["seconds"].as_f64().filter(|&seconds| seconds > 0.0);
                sum(from_ref(one), way, "bytes") as f64 * 8.0 / seconds.unwrap_or(1.0) / 1e6
            };
            format!("{:.0}", some.iter().map(of).sum::<f64>())
        };
        let [landed, others] = ["fragments_landed", "fragments_one_copy"].map(number);
        let share = 100.0 * landed as f64 / (landed + others) as f64;
        table.row([
            name.to_owned(),
            sum(some, "to", "messages").to_string(),
            sum(some, "from", "messages").to_string(),
            rate("to"),
            rate("from"),
            sum(some, "to", "failed").to_string(),
            number("retransmissions").to_string(),
            format!("{share:.2} %"),
        ]);
    };
    for report in reports {
        row(address(report)?, from_ref(report));
    }
    row("all", reports);
    Ok(table)
}

/// What reports say of peers, `to` or `from` them.
pub(crate) fn peers<'a>(reports: &'a [Value], way: &'a str) -> impl Iterator<Item = &'a Value> {
    let lists = reports.iter().filter_map(move |report| report[way].as_array());
    lists.flatten()
}

/// The sum of a number over all peers of all reports.
pub(crate) fn sum(reports: &[Value], way: &str, name: &str) -> u64 {
    peers(reports, way).filter_map(|peer| peer[name].as_u64()).sum()
}

/// The host of the report, or the peer that it is about.
pub(crate) fn address(value: &Value) -> Result<&str> {
    let address = value["address"].as_str();
    address.context("lm-check exchange reported no address")
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
