//! `cargo xtask soak --cluster`: all to all, while daemons and programs are killed and started again.
//!
//! Every second one of them is killed, without a chance to say anything. Programs tell of a wrong message at once, so
//! that nothing that a killed one saw is forgotten. At the end all that live have reached each other again, and when
//! the programs have gone nothing may be left: no session, no place in a gate, no descriptor, no memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::kernel::Dice;
use crate::bed::daemons::Ground;
use crate::bed::{Host, Program, require_root, until};
use crate::machine::status_kib;
use crate::run::cluster::{self, Exchange, PATIENCE, sum};
use crate::workspace::Programs;

/// Length of messages.
const MESSAGE_LEN: u64 = 64 << 10;
/// A lease, and the time in which places of a gate get quiet, on a machine that is busy with all hosts.
const END_LIMIT: Duration = Duration::from_secs(5 + 10);
/// A daemon may have so many descriptors more than before: those of its own start, when it took another's things over.
const DESCRIPTORS_MORE: u64 = 4;
/// Memory that allocators keep may move so far, in KiB.
const MEMORY_MORE_KIB: u64 = 4096;

/// What is to happen.
pub(super) struct Trouble {
    pub(super) hosts: u32,
    pub(super) seconds: u32,
    pub(super) seed: u64,
    pub(super) embedded: bool,
}

/// Descriptors and resident memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Size {
    descriptors: u64,
    memory_kib: u64,
}

/// The programs of all hosts, and what those that were killed said.
struct Life<'a> {
    ground: Ground,
    programs: &'a Programs,
    exchanges: Vec<Program>,
    lives: Vec<u32>,
    seed: u64,
    end: Instant,
    faults: Vec<String>,
    killed: [u32; 2],
}

/// Runs the soak.
pub(super) fn run(trouble: &Trouble) -> Result<()> {
    require_root("make network namespaces")?;
    let programs = Programs::build()?;
    let ground = cluster::ground((!trouble.embedded).then_some(&programs), trouble.hosts)?;
    println!(
        "{} hosts on one switch, all to all for {} s with seed {}; programs: {}",
        trouble.hosts,
        trouble.seconds,
        trouble.seed,
        cluster::describe_programs(&ground)
    );
    let fresh = sizes(&ground)?;
    let mut life = Life {
        lives: vec![0; trouble.hosts as usize],
        exchanges: Vec::new(),
        ground,
        programs: &programs,
        seed: trouble.seed,
        end: Instant::now() + Duration::from_secs(trouble.seconds.into()),
        faults: Vec::new(),
        killed: [0; 2],
    };
    for at in 0..trouble.hosts as usize {
        let program = life.start(at)?;
        life.exchanges.push(program);
    }
    let mut dice = Dice(trouble.seed);
    let started = Instant::now();
    let mut middle = Vec::new();
    for second in 1..trouble.seconds {
        let due = started + Duration::from_secs(second.into());
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        life.kill(&mut dice)?;
        if second == trouble.seconds / 2 {
            middle = sizes(&life.ground)?;
        }
    }
    let reports = life.finish()?;
    let busy = sizes(&life.ground)?;
    println!(
        "killed     {} daemons and {} programs; {} messages delivered to programs that lived to the end, in {} \
            sessions",
        life.killed[0],
        life.killed[1],
        sum(&reports, "from", "messages"),
        sum(&reports, "to", "sessions")
    );
    ensure!(
        life.faults.is_empty(),
        "{} messages were wrong, the first: {}; repeat it with --from {}",
        life.faults.len(),
        life.faults[0],
        trouble.seed
    );
    let missing = unreached(&reports);
    ensure!(
        missing.is_empty(),
        "hosts did not reach each other again: {}",
        missing.join(", ")
    );
    await_end(&life.ground)?;
    let idle = sizes(&life.ground)?;
    print_sizes([&fresh, &middle, &busy, &idle]);
    grown(&fresh, &idle)?;
    leave(life.ground)?;
    println!("right      no wrong message, no session or place of a gate left, no daemon that grew");
    Ok(())
}

impl Life<'_> {
    /// Starts a host's program for the time that is left.
    fn start(&self, at: usize) -> Result<Program> {
        let left = self.end.saturating_duration_since(Instant::now());
        let exchange = Exchange {
            message_len: MESSAGE_LEN,
            seconds: left.as_secs_f64().max(0.1),
            seed: self.seed,
            life: self.lives[at],
        };
        let host = &self.ground.cluster.hosts()[at];
        host.spawn(exchange.launch(self.programs, &self.ground, host))
    }

    /// Kills a daemon or a program, and starts it again at once.
    fn kill(&mut self, dice: &mut Dice) -> Result<()> {
        for at in 0..self.exchanges.len() {
            if self.exchanges[at].has_ended()? {
                let address = self.ground.cluster.hosts()[at].address();
                let said = self.exchanges[at].said();
                bail!(
                    "the program on {address} ended by itself and said {}",
                    said.lines().last().unwrap_or("nothing")
                );
            }
        }
        let at = dice.roll(self.exchanges.len() as u64) as usize;
        let is_daemon = dice.roll(2) == 0 && self.ground.daemons.is_some();
        eprintln!(
            "  killed: the {} of {}",
            if is_daemon { "daemon" } else { "program" },
            self.ground.cluster.hosts()[at].address()
        );
        if is_daemon {
            let host = &self.ground.cluster.hosts()[at];
            let daemons = self.ground.daemons.as_ref().context("there are daemons")?;
            let running = &mut self.ground.running[at];
            ensure!(
                !running.has_ended()?,
                "the daemon on {} ended by itself and said {}",
                host.address(),
                running.said().lines().last().unwrap_or("nothing")
            );
            running.signal(Signal::KILL);
            // Its end first: the new one finds its lock free.
            wait_for(running)?;
            *running = daemons.spawn(host, None)?;
            self.killed[0] += 1;
        } else {
            self.exchanges[at].signal(Signal::KILL);
            wait_for(&mut self.exchanges[at])?;
            self.lives[at] += 1;
            let again = self.start(at)?;
            let dead = std::mem::replace(&mut self.exchanges[at], again);
            self.hear(&dead.outcome()?.stderr);
            self.killed[1] += 1;
        }
        Ok(())
    }

    fn hear(&mut self, said: &str) {
        let faults = said.lines().filter_map(|line| line.strip_prefix("fault: "));
        self.faults.extend(faults.map(ToOwned::to_owned));
    }

    /// Waits until all messages are confirmed, and ends the programs; their reports.
    fn finish(&mut self) -> Result<Vec<Value>> {
        for program in &mut self.exchanges {
            program.await_text("done")?;
        }
        let mut reports = Vec::new();
        for program in std::mem::take(&mut self.exchanges) {
            let output = program.stop()?;
            self.hear(&output.stderr);
            reports.push(
                output
                    .json()
                    .context("lm-check exchange ended without a report")?,
            );
        }
        Ok(reports)
    }
}

fn wait_for(dying: &mut Program) -> Result<()> {
    until("a killed program ends", Duration::from_secs(10), || {
        dying.has_ended()
    })
}

/// Pairs of which the second had nothing from the first in its last life.
fn unreached(reports: &[Value]) -> Vec<String> {
    let name = |value: &Value| value["address"].as_str().unwrap_or("?").to_owned();
    let mut missing = Vec::new();
    for report in reports {
        for to in report["to"].as_array().into_iter().flatten() {
            if to["messages"].as_u64().unwrap_or(0) == 0 {
                missing.push(format!("{} to {}", name(report), name(to)));
            }
        }
    }
    missing
}

/// Waits until no daemon has anything of the programs any more.
fn await_end(ground: &Ground) -> Result<()> {
    let Some(daemons) = &ground.daemons else {
        for host in ground.cluster.hosts() {
            ensure!(
                !host.has_xdp_program()?,
                "the gate on {} outlived its program",
                host.address()
            );
        }
        return Ok(());
    };
    let end = Instant::now() + PATIENCE.min(END_LIMIT);
    for host in ground.cluster.hosts() {
        loop {
            let status = daemons.status(host)?;
            let left = left_of(&status);
            if left.is_empty() {
                break;
            }
            ensure!(
                Instant::now() < end,
                "{} s after the programs ended the daemon on {} still has {}",
                END_LIMIT.as_secs(),
                host.address(),
                left.join(", ")
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}

/// What a daemon has that is some program's.
fn left_of(status: &Value) -> Vec<String> {
    let interface = &status["interfaces"][0];
    let queues = || interface["queues"].as_array().into_iter().flatten();
    let places = |name: &str| queues().filter_map(|queue| queue[name].as_u64()).sum::<u64>();
    let in_use = queues().filter(|queue| queue["role"] != "free").count() as u64;
    let joined = status["programs"].as_array().into_iter().flatten();
    let counts = [
        (
            "sessions",
            interface["sessions"].as_array().map_or(1, Vec::len) as u64,
        ),
        ("open places", places("open_places")),
        ("closing places", places("closing_places")),
        ("queues in use", in_use),
        ("sessions as sender", interface["outgoing"].as_u64().unwrap_or(1)),
        ("requests waiting", interface["waiting"].as_u64().unwrap_or(1)),
        (
            "programs",
            joined.filter(|program| !program["data_port"].is_null()).count() as u64,
        ),
    ];
    let left = counts.into_iter().filter(|(_, count)| *count > 0);
    left.map(|(name, count)| format!("{count} {name}")).collect()
}

/// The daemons' sizes, in the hosts' order.
fn sizes(ground: &Ground) -> Result<Vec<Size>> {
    let mut sizes = Vec::new();
    for (host, program) in ground.cluster.hosts().iter().zip(&ground.running) {
        // It may have been killed a moment ago.
        let daemons = ground.daemons.as_ref().context("there are daemons")?;
        let end = Instant::now() + PATIENCE;
        while let Err(error) = daemons.status(host) {
            ensure!(Instant::now() < end, "{error:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
        let folder = format!("/proc/{}", program.id());
        let descriptors = std::fs::read_dir(format!("{folder}/fd"))?.count() as u64;
        let [memory_kib] = status_kib(program.id(), ["VmRSS"])?;
        sizes.push(Size {
            descriptors,
            memory_kib,
        });
    }
    Ok(sizes)
}

fn print_sizes(sizes: [&[Size]; 4]) {
    for (name, sizes) in ["at the start", "in the middle", "at the end", "afterwards"]
        .iter()
        .zip(sizes)
    {
        let most = |of: fn(&Size) -> u64| sizes.iter().map(of).max().unwrap_or(0);
        let (descriptors, memory) = (most(|size| size.descriptors), most(|size| size.memory_kib));
        println!("daemons    {name}: {descriptors} descriptors and {memory} KiB at most");
    }
}

/// Fails when a daemon has more than it had without programs before.
fn grown(before: &[Size], after: &[Size]) -> Result<()> {
    for (at, (before, after)) in before.iter().zip(after).enumerate() {
        ensure!(
            after.descriptors <= before.descriptors + DESCRIPTORS_MORE
                && after.memory_kib <= before.memory_kib + MEMORY_MORE_KIB,
            "the daemon of host {} grew: {before:?} at the start, {after:?} afterwards",
            at + 1
        );
    }
    Ok(())
}

/// Ends the daemons; no gate may be left on any host.
fn leave(ground: Ground) -> Result<()> {
    let Ground { cluster, running, .. } = ground;
    for program in running {
        let output = program.stop()?;
        ensure!(
            output.status.success(),
            "a daemon ended badly and said {}",
            output.stderr.lines().last().unwrap_or("nothing")
        );
    }
    let has_gate = |host: &&Host| host.has_xdp_program().unwrap_or(true);
    match cluster.hosts().iter().find(has_gate) {
        Some(host) => bail!("a gate is left on {}", host.address()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_left_is_named() {
        let queue = |role: &str, open: u64| json!({"role": role, "open_places": open, "closing_places": 0});
        let status = |queues: Vec<Value>, sessions: usize| {
            json!({
                "programs": [{"data_port": null}],
                "interfaces": [{"queues": queues, "sessions": vec![json!({}); sessions], "outgoing": 0, "waiting": 0}],
            })
        };
        assert_eq!(left_of(&status(vec![queue("free", 0)], 0)), Vec::<String>::new());
        assert_eq!(
            left_of(&status(vec![queue("free", 0), queue("landing", 3)], 2)),
            ["2 sessions", "3 open places", "1 queues in use"]
        );
        assert!(!left_of(&Value::Null).is_empty());
    }

    #[test]
    fn growth_is_an_error() {
        let size = |descriptors, memory_kib| {
            vec![Size {
                descriptors,
                memory_kib,
            }]
        };
        assert!(grown(&size(20, 5000), &size(24, 9000)).is_ok());
        assert!(grown(&size(20, 5000), &size(25, 5000)).is_err());
        assert!(grown(&size(20, 5000), &size(20, 9999)).is_err());
    }

    #[test]
    fn hosts_that_were_not_reached() {
        let to = |address: &str, messages: u64| json!({"address": address, "messages": messages});
        let reports = [json!({"address": "a", "to": [to("b", 1), to("c", 0)]})];
        assert_eq!(unreached(&reports), ["a to c"]);
    }
}
