//! What of this host spoils real time, each with its remedy: what no program can mend for itself.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use caps::{CapSet, Capability};
use lm_cards::ethtool::{Coalescing, Ethtool};
use rustix::process::{Resource, getrlimit};

/// A processor that wakes more slowly sleeps too deep.
const WAKE_UP_MOST_US: u64 = 10;
/// A card that holds interrupts back for longer delays each packet as long.
const COALESCING_MOST_US: u32 = 10;
/// What sockets with blocks of all kinds lock.
const LOCKED_LEAST: u64 = 64 << 20;

/// Ask what of this host spoils real time
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Network interface to look at, too
    #[arg(long)]
    interface: Option<String>,
}

/// What was asked, what was found, and what to do about it if that spoils real time.
#[derive(Debug)]
struct Answer {
    what: &'static str,
    found: String,
    remedy: Option<&'static str>,
}

fn answer(what: &'static str, found: impl Into<String>, spoils: bool, remedy: &'static str) -> Answer {
    Answer {
        what,
        found: found.into(),
        remedy: spoils.then_some(remedy),
    }
}

/// Looks at the host, and says what it finds, one line each; 1: something spoils real time.
pub fn doctor(args: &DoctorArgs) -> ExitCode {
    let mut answers = of_kernel(Path::new("/"));
    answers.extend(of_process());
    answers.extend(
        args.interface
            .iter()
            .flat_map(|interface| of_interface(interface)),
    );
    for Answer { what, found, remedy } in &answers {
        match remedy {
            Some(remedy) => println!("spoils real time: {what}: {found}; {remedy}"),
            None => println!("well: {what}: {found}"),
        }
    }
    match answers.iter().any(|answer| answer.remedy.is_some()) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}

/// What the kernel says of itself in files below `root`.
fn of_kernel(root: &Path) -> Vec<Answer> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let number = |path: &str| read(path)?.trim().parse::<i64>().ok();
    let preemption = match number("sys/kernel/realtime") {
        Some(1) => "PREEMPT_RT".to_owned(),
        // The one that is chosen stands in brackets.
        _ => read("sys/kernel/debug/sched/preempt")
            .and_then(|all| Some(all.split_once('(')?.1.split_once(')')?.0.to_owned()))
            .unwrap_or_else(|| "unknown (mount debugfs to see it)".into()),
    };
    let is_early = matches!(&preemption[..], "PREEMPT_RT" | "full");
    let runtime_us = number("proc/sys/kernel/sched_rt_runtime_us").unwrap_or(-1);
    let period_us = number("proc/sys/kernel/sched_rt_period_us").unwrap_or(1_000_000);
    let is_throttled = (0..period_us).contains(&runtime_us);
    let stopped_us = period_us - runtime_us;
    let found = match is_throttled {
        true => format!("real-time threads stop for {stopped_us} µs in each {period_us} µs"),
        false => "real-time threads run as long as they like".into(),
    };
    vec![
        answer(
            "preemption",
            preemption,
            !is_early,
            "boot with preempt=full, or a kernel with PREEMPT_RT",
        ),
        of_sleep(root),
        answer(
            "throttling",
            found,
            is_throttled,
            "let loops sleep in each period, or set sysctl kernel.sched_rt_runtime_us=-1",
        ),
    ]
}

/// How deep the first processor sleeps.
fn of_sleep(root: &Path) -> Answer {
    let states = fs::read_dir(root.join("sys/devices/system/cpu/cpu0/cpuidle"));
    let slowest = states.into_iter().flatten().flatten().filter_map(|state| {
        let read = |file: &str| fs::read_to_string(state.path().join(file)).ok();
        let is_off = read("disable").is_some_and(|disable| disable.trim() == "1");
        let latency_us: u64 = read("latency")?.trim().parse().ok()?;
        (!is_off).then(|| (latency_us, read("name").unwrap_or_default()))
    });
    let (found, is_deep) = match slowest.max() {
        Some((us, name)) => (format!("{} wakes in {us} µs", name.trim()), us > WAKE_UP_MOST_US),
        None => ("processors do not sleep deep here".into(), false),
    };
    answer(
        "C-states",
        found,
        is_deep,
        "hold /dev/cpu_dma_latency open with a 0 written to it, or boot with processor.max_cstate=1",
    )
}

/// What this process may do.
fn of_process() -> Vec<Answer> {
    let has = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
    // `None`: as much as there is.
    let locked = getrlimit(Resource::Memlock).current;
    let locked = locked.filter(|_| !has(Capability::CAP_IPC_LOCK));
    let is_bounded = locked.is_some_and(|most| most < LOCKED_LEAST);
    let found = match locked {
        None => "as much as there is may be locked".into(),
        Some(most) => format!("{} KiB may be locked", most / 1024),
    };
    let priority = getrlimit(Resource::Rtprio).current;
    let may_lead = has(Capability::CAP_SYS_NICE) || priority.is_none_or(|most| most > 0);
    let lead = match may_lead {
        true => "threads may run ahead",
        false => "no thread may run ahead of others",
    };
    vec![
        answer(
            "memlock",
            found,
            is_bounded,
            "raise it (ulimit -l, or LimitMEMLOCK= of its unit), or give CAP_IPC_LOCK",
        ),
        answer(
            "priorities",
            lead,
            !may_lead,
            "allow SCHED_FIFO (ulimit -r, or LimitRTPRIO= of its unit), or give CAP_SYS_NICE",
        ),
    ]
}

/// What a card does with packets.
fn of_interface(interface: &str) -> Vec<Answer> {
    let ethtool = match Ethtool::named(interface) {
        Ok(ethtool) => ethtool,
        Err(error) => {
            let found = format!("{interface}: {error}");
            return vec![answer("interface", found, true, "name one of `ip link`")];
        }
    };
    let (found, holds) = match ethtool.coalescing().ok() {
        None => ("interrupts are not held back".into(), false),
        Some(held) if held.is_adaptive => ("interrupts are held back as the card likes".into(), true),
        Some(Coalescing { rx_us, .. }) => {
            let found = format!("interrupts are held back for {rx_us} µs");
            (found, rx_us > COALESCING_MOST_US)
        }
    };
    let features = ethtool.features().unwrap_or_default();
    let mut on = features.iter().filter(|feature| feature.on);
    let is_whole = on.any(|one| ["tx-generic-segmentation", "tx-tcp-segmentation"].contains(&&*one.name));
    let segments = match is_whole {
        true => "TCP's leave in one piece, 45 frames long",
        false => "TCP's are single frames",
    };
    vec![
        answer(
            "coalescing",
            found,
            holds,
            "ethtool -C INTERFACE adaptive-rx off rx-usecs 0",
        ),
        answer(
            "GSO",
            segments,
            is_whole,
            "open real-time sockets with the link's rate, which bounds them meanwhile, or ethtool -K INTERFACE gso \
             off tso off",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn host(files: &[(&str, &str)]) -> Vec<Answer> {
        let scratch = Scratch::new("doctor");
        for (path, content) in files {
            let path = scratch.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        of_kernel(scratch.path())
    }

    fn spoiling(answers: &[Answer]) -> Vec<&'static str> {
        let spoils = answers.iter().filter(|answer| answer.remedy.is_some());
        spoils.map(|answer| answer.what).collect()
    }

    #[test]
    fn a_host_for_real_time_is_well_and_an_ordinary_one_is_not() {
        const IDLE: &str = "sys/devices/system/cpu/cpu0/cpuidle";
        let idle = [0, 1]
            .map(|state| ["latency", "disable", "name"].map(|file| format!("{IDLE}/state{state}/{file}")));
        let [[a_us, a_off, a_name], [b_us, b_off, b_name]] = &idle;
        let mut files = vec![
            ("sys/kernel/realtime", "1\n"),
            ("proc/sys/kernel/sched_rt_runtime_us", "-1\n"),
            (a_us, "2\n"),
            (a_off, "0\n"),
            (a_name, "C1\n"),
            (b_us, "133\n"),
            (b_off, "1\n"),
            (b_name, "C6\n"),
        ];
        assert_eq!(spoiling(&host(&files)), [""; 0]);
        files[0] = ("sys/kernel/debug/sched/preempt", "none (voluntary) full\n");
        files[1].1 = "950000\n";
        files[6].1 = "0\n";
        let answers = host(&files);
        assert_eq!(spoiling(&answers), ["preemption", "C-states", "throttling"]);
        let found: Vec<_> = answers.iter().map(|answer| &answer.found[..]).collect();
        assert_eq!(
            found,
            [
                "voluntary",
                "C6 wakes in 133 µs",
                "real-time threads stop for 50000 µs in each 1000000 µs"
            ]
        );
        files[0].1 = "none voluntary (full)\n";
        assert_eq!(spoiling(&host(&files)), ["C-states", "throttling"]);
        // Where nothing is known nothing is well but what cannot be otherwise.
        assert_eq!(spoiling(&host(&[])), ["preemption"]);
    }
}
