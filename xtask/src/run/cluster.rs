//! `cargo xtask run --hosts N`: all to all on a cluster, every byte compared.

use std::slice::from_ref;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::size;
use lm_measure::table::Table;
use serde_json::{Value, json};

use crate::bed::daemons::{Ground, NOBODY, TOOLS};
use crate::bed::{Host, INTERFACE, Launch, Program};
use crate::machine::cores;
use crate::soak::fates;
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
    let others = ground.bed.hosts().iter().map(Host::address);
    let others = others.filter(|&other| other != host.address());
    let others: Vec<String> = others.map(|other| other.to_string()).collect();
    let limit = Duration::from_secs_f64(seconds) + 3 * PATIENCE;
    let line = format!(
        "--time-limit {} messages --interface {INTERFACE} --idle default --port 7168 --to {} --lens {MESSAGE_LEN} \
         --messages 1048576 --in-flight 2 --seconds {seconds} --patience {} --seed {seed} --life {life} --admission",
        limit.as_secs_f64(),
        others.join(","),
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
pub(super) fn run(hosts: u32) -> Result<Value> {
    let ground = Ground::new(&Programs::build(&TOOLS)?, "cluster", hosts)?;
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
    println!("\n{}", table(&reports));
    println!(
        "checked    every byte of {} messages, and that each of {pairs} pairs delivered what its sender counts as \
            delivered",
        count(&reports, "from", &['w'])
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
        output.report_of("lm-check messages")
    });
    ended.collect()
}

/// Nothing was wrong, and each pair agrees about what was delivered. The number of pairs.
fn check(reports: &[Value]) -> Result<usize> {
    let mut pairs = 0;
    for (at, sent) in reports.iter().enumerate() {
        for received in [&reports[..at], &reports[at + 1..]].concat() {
            // Of messages whose session ended early some may have come, as of those without repetition.
            let fates = fates::compare("unreliable", 1.., sent, &received)
                .with_context(|| format!("{} to {}", sent["address"], received["address"]))?;
            ensure!(
                fates.whole > 0,
                "{} reached no {}",
                sent["address"],
                received["address"]
            );
            pairs += 1;
        }
    }
    Ok(pairs)
}

/// A line for each host, and one for all.
fn table(reports: &[Value]) -> Table {
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
            let numbers = some.iter().filter_map(|one| one["counters"][name].as_u64());
            numbers.sum::<u64>()
        };
        let rate = |way, letter| {
            let of = |one: &Value| {
                let seconds = one["seconds"].as_f64().filter(|&seconds| seconds > 0.0);
                let bytes = count(from_ref(one), way, &[letter]) * MESSAGE_LEN;
                bytes as f64 * 8.0 / seconds.unwrap_or(1.0) / 1e6
            };
            format!("{:.0}", some.iter().map(of).sum::<f64>())
        };
        let [landed, others] = ["landing_packets", "fragments_one_copy"].map(number);
        let share = 100.0 * landed as f64 / (landed + others) as f64;
        table.row([
            name.to_owned(),
            count(some, "to", &['d']).to_string(),
            count(some, "from", &['w']).to_string(),
            rate("to", 'd'),
            rate("from", 'w'),
            count(some, "to", &['i', 'e', 't']).to_string(),
            (number("fragments_resent") + number("eager_resent")).to_string(),
            format!("{share:.2} %"),
        ]);
    };
    for report in reports {
        row(report["address"].as_str().unwrap_or_default(), from_ref(report));
    }
    row("all", reports);
    table
}

/// How many messages `to` or `from` other hosts have one of these letters.
pub(crate) fn count(reports: &[Value], way: &str, letters: &[char]) -> u64 {
    let hosts = reports
        .iter()
        .filter_map(|report| report[way].as_array())
        .flatten();
    let fates = hosts.filter_map(|host| host["fates"].as_str());
    fates.map(|fates| fates.matches(letters).count() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(own: &str, other: &str, sent: &str, came: &str) -> Value {
        let fates = |fates| json!([{"address": other, "life": 0, "fates": fates}]);
        json!({
            "address": own, "seconds": 2.0, "faults": [], "to": fates(sent), "from": fates(came),
            "counters": {"fragments_resent": 2, "eager_resent": 1, "landing_packets": 99, "fragments_one_copy": 1},
        })
    }

    #[test]
    fn pairs_must_agree() {
        let good = [report("a", "b", "ddd", "ww"), report("b", "a", "dd", "www")];
        assert_eq!(check(&good).unwrap(), 2);
        let error = |reports: &[Value]| format!("{:#}", check(reports).unwrap_err());
        let lost = [report("a", "b", "ddd", "ww"), report("b", "a", "ddd", "www")];
        assert!(error(&lost).contains("message 2"), "{}", error(&lost));
        let silent = [report("a", "b", "", "ww"), report("b", "a", "dd", "")];
        assert!(check(&silent).is_err());
        let mut wrong = good.clone();
        wrong[1]["faults"] = json!(["byte 1 is wrong"]);
        assert!(error(&wrong).contains("byte 1 is wrong"), "{}", error(&wrong));
        let mut failed = lost.clone();
        failed[1]["to"][0]["fates"] = json!("dde");
        assert_eq!(check(&failed).unwrap(), 2);
    }

    #[test]
    fn the_table_has_a_line_for_each_and_one_for_all() {
        let text = table(&[report("a", "b", "ddd", "ww"), report("b", "a", "dd", "www")]).to_string();
        assert_eq!(text.lines().count(), 2 + 3, "{text}");
        assert!(
            text.contains("99.00 %") && text.lines().last().unwrap().contains(" 5 "),
            "{text}"
        );
    }
}
