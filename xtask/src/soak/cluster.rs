//! `cargo xtask soak --cluster`: all to all, while daemons and programs are killed and started again.
//!
//! Every second one of them is killed, without a chance to say anything. Programs tell of a wrong message at once, so
//! that nothing that a killed one saw is forgotten. Each ends well when it has reached all others in its last life, and when
//! the programs have gone nothing may be left: no session, no place in a gate, no descriptor, no memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::kernel::Dice;
use crate::bed::daemons::{Ground, NOBODY, TOOLS};
use crate::bed::{Host, Program, require_root, until};
use crate::machine::status_kib;
use crate::run::cluster::{count, exchange, reports};
use crate::workspace::Programs;

/// Hosts, each with a daemon and a program.
const HOSTS: u32 = 16;
/// A lease, and the time in which places of a gate get quiet, on a machine that is busy with all hosts.
const END_LIMIT: Duration = Duration::from_secs(5 + 10);
/// A daemon may have so many descriptors more than before: those of its own start, when it took another's things over.
const DESCRIPTORS_MORE: u64 = 4;
/// Memory that allocators keep may move so far, in KiB.
const MEMORY_MORE_KIB: u64 = 4096;

/// Descriptors and resident memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Size {
    descriptors: u64,
    memory_kib: u64,
}

/// The programs of all hosts, and what those that were killed said.
struct Life {
    ground: Ground,
    exchanges: Vec<Program>,
    lives: [u64; HOSTS as usize],
    seed: u64,
    end: Instant,
    faults: Vec<String>,
    killed: [u32; 2],
}

/// Runs the soak.
pub(super) fn run(seconds: u32, seed: u64) -> Result<()> {
    require_root("make network namespaces")?;
    let ground = Ground::new(&Programs::build(&TOOLS)?, "cluster", HOSTS)?;
    println!(
        "{HOSTS} hosts on one switch, all to all for {seconds} s with seed {seed}; programs: user {NOBODY}, without \
            privileges, by the daemon of each host"
    );
    let started = Instant::now();
    let mut life = Life {
        lives: [0; HOSTS as usize],
        exchanges: Vec::new(),
        ground,
        seed,
        end: started + Duration::from_secs(seconds.into()),
        faults: Vec::new(),
        killed: [0; 2],
    };
    let fresh = life.sizes("at the start")?;
    for at in 0..HOSTS as usize {
        let program = life.start(at)?;
        life.exchanges.push(program);
    }
    let mut dice = Dice(seed);
    for second in 1..seconds {
        let due = started + Duration::from_secs(second.into());
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        life.kill(&mut dice)?;
        if second == seconds / 2 {
            life.sizes("in the middle")?;
        }
    }
    let programs = std::mem::take(&mut life.exchanges);
    let reports = reports(programs, |said| life.hear(said))?;
    life.sizes("at the end")?;
    let sessions = reports.iter().filter_map(|report| report["sessions"].as_u64());
    println!(
        "killed     {} daemons and {} programs; {} messages delivered to programs that lived to the end, in {} \
            sessions",
        life.killed[0],
        life.killed[1],
        count(&reports, "from", &['w']),
        sessions.sum::<u64>()
    );
    ensure!(
        life.faults.is_empty(),
        "{} messages were wrong, the first: {}; repeat it with --from {seed}",
        life.faults.len(),
        life.faults[0]
    );
    await_end(&life.ground)?;
    grown(&fresh, &life.sizes("afterwards")?)?;
    leave(life.ground)?;
    println!("right      no wrong message, no session or place of a gate left, no daemon that grew");
    Ok(())
}

impl Life {
    /// Starts a host's program for the time that is left.
    fn start(&self, at: usize) -> Result<Program> {
        let left = self.end.saturating_duration_since(Instant::now()).as_secs_f64();
        let host = &self.ground.bed.hosts()[at];
        exchange(&self.ground, host, left.max(0.1), [self.seed, self.lives[at]])
    }

    /// Kills a daemon or a program, and starts it again at once.
    fn kill(&mut self, dice: &mut Dice) -> Result<()> {
        let hosts = self.ground.bed.hosts();
        for (host, program) in hosts.iter().zip(&mut self.exchanges) {
            still_runs("program", host, program)?;
        }
        let at = dice.roll(HOSTS.into()) as usize;
        let is_daemon = dice.roll(2) == 0;
        let what = if is_daemon { "daemon" } else { "program" };
        eprintln!("  killed: the {what} of {}", hosts[at].address());
        if is_daemon {
            let running = &mut self.ground.running[at];
            still_runs(what, &hosts[at], running)?;
            // Its end first: the new one finds its lock free.
            end(running)?;
            *running = self.ground.daemons.spawn(&hosts[at])?;
        } else {
            end(&mut self.exchanges[at])?;
            self.lives[at] += 1;
            let again = self.start(at)?;
            let dead = std::mem::replace(&mut self.exchanges[at], again);
            self.hear(&dead.said());
        }
        self.killed[usize::from(!is_daemon)] += 1;
        Ok(())
    }

    fn hear(&mut self, said: &str) {
        let faults = said.lines().filter_map(|line| line.strip_prefix("fault: "));
        self.faults.extend(faults.map(ToOwned::to_owned));
    }

    /// The daemons' sizes, in the hosts' order, of which the largest are told.
    fn sizes(&mut self, when: &str) -> Result<Vec<Size>> {
        let mut sizes = Vec::new();
        for (host, program) in self.ground.bed.hosts().iter().zip(&mut self.ground.running) {
            // It may have been killed a moment ago.
            self.ground.daemons.await_ready(host, program)?;
            sizes.push(Size {
                descriptors: std::fs::read_dir(format!("/proc/{}/fd", program.id()))?.count() as u64,
                memory_kib: status_kib(program.id(), &["VmRSS"])?,
            });
        }
        let most = |of: fn(&Size) -> u64| sizes.iter().map(of).max().unwrap_or(0);
        let (descriptors, memory) = (most(|size| size.descriptors), most(|size| size.memory_kib));
        println!("daemons    {when}: {descriptors} descriptors and {memory} KiB at most");
        Ok(sizes)
    }
}

fn still_runs(what: &str, host: &Host, program: &mut Program) -> Result<()> {
    ensure!(
        !program.has_ended()?,
        "the {what} on {} ended by itself and said {}",
        host.address(),
        program.said().lines().last().unwrap_or("nothing")
    );
    Ok(())
}

fn end(program: &mut Program) -> Result<()> {
    program.signal(Signal::KILL);
    until("a killed program ends", Duration::from_secs(10), || {
        program.has_ended()
    })
}

/// Waits until no daemon has anything of the programs any more.
fn await_end(ground: &Ground) -> Result<()> {
    let end = Instant::now() + END_LIMIT;
    for host in ground.bed.hosts() {
        let mut left = Vec::new();
        let is_over = || {
            left = left_of(&ground.daemons.status(host)?);
            Ok(left.is_empty())
        };
        let patience = end.saturating_duration_since(Instant::now());
        until("what the programs had is given back", patience, is_over)
            .with_context(|| format!("the daemon on {} still has {}", host.address(), left.join(", ")))?;
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
    let joined = joined.filter(|program| !program["data_port"].is_null()).count();
    let sessions = interface["sessions"].as_array().map_or(1, Vec::len);
    let counts = [
        ("sessions", sessions as u64),
        ("open places", places("open_places")),
        ("closing places", places("closing_places")),
        ("queues in use", in_use),
        ("sessions as sender", interface["outgoing"].as_u64().unwrap_or(1)),
        ("requests waiting", interface["waiting"].as_u64().unwrap_or(1)),
        ("programs", joined as u64),
    ];
    let left = counts.into_iter().filter(|(_, count)| *count > 0);
    left.map(|(name, count)| format!("{count} {name}")).collect()
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
    let Ground { bed, running, .. } = ground;
    for program in running {
        let output = program.stop()?;
        ensure!(
            output.status.success(),
            "a daemon ended badly and said {}",
            output.stderr.lines().last().unwrap_or("nothing")
        );
    }
    for host in bed.hosts() {
        ensure!(!host.has_xdp_program()?, "a gate is left on {}", host.address());
    }
    Ok(())
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
}
