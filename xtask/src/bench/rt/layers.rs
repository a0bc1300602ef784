//! **a**, table 1 of SS-RTUDP: where the time of a packet goes, layer by layer, of LM's real time and of kernel UDP.
//!
//! Round trips on a veth pair between two programs that sleep until something comes: whatever else their cores do is a packet's. perf(1) looks
//! at both cores 10,000 times a second (cpu-clock: a virtual machine has no counter of instructions), and a sample belongs to the innermost
//! function that [`LAYERS`] knows. A layer's part of all samples is its part of the time: of two cores, for a round trip of two packets.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lm_measure::table::Table;
use serde_json::{Value, json};

use super::super::Unit::{Microseconds, Percent};
use super::super::{Column, Comparison, Contender, Measured, Sample};
use super::number;
use super::sizes::launch;
use crate::bed::{Bed, BedConfig, leftovers};
use crate::ends::{self, Ends};
use crate::machine::two_cores;
use crate::workspace::Programs;

/// How long round trips go on, more than there is time for, and how long and how often perf looks at them.
const ROUND_TRIPS: u32 = 10_000_000;
const SECONDS: f64 = 6.0;
const LOOK_S: &str = "3";
const PERIOD_NS: &str = "100000";
/// What they have then been under way.
const BEFORE: Duration = Duration::from_millis(500);
const ROUNDS: u32 = 5;

/// A layer, what the paper's took of a UDP packet's 68.1 µs, and what its functions begin with (Linux 6.18); the longest beginning decides.
struct Layer {
    name: &'static str,
    paper_us: Option<f64>,
    functions: &'static str,
}

const fn layer(name: &'static str, paper_us: f64, functions: &'static str) -> Layer {
    Layer {
        name,
        paper_us: if paper_us > 0.0 { Some(paper_us) } else { None },
        functions,
    }
}

const LAYERS: [Layer; 10] = [
    layer(
        "system call and socket",
        3.2,
        "entry_SYSCALL do_syscall x64_sys syscall_ __x64_sys __sys_ ____sys ___sys sock __sock security_socket inet_sendmsg \
         inet_recvmsg fdget __fdget fput import_ move_addr",
    ),
    layer(
        "UDP and IP, sending",
        14.8,
        "udp_send udp_push ip_make __ip_make ip_append __ip_append ip_setup ip_generic ip_route_output ip_output \
         ip_finish_output __ip_finish_output ip_local_out __ip_local_out ip_send ip_fragment ip_do_fragment neigh_ fib_ dst_ \
         ipv4_",
    ),
    layer(
        "UDP and IP, receiving",
        23.5,
        "ip_rcv ip_list_rcv ip_sublist_rcv ip_local_deliver ip_protocol_deliver ip_route_input ip_defrag ip_frag_ inet_frag \
         udp_rcv udp_queue udp_unicast udp_recv udp4_ udp_v4 __udp __skb_recv_udp skb_consume_udp __skb_try_recv",
    ),
    layer("AF_XDP", 0.0, "xsk_ __xsk xp_ xdp_ __xdp"),
    layer(
        "XDP program",
        0.0,
        "bpf_prog_ bpf_dispatcher bpf_xdp htab_ __htab array_map",
    ),
    layer(
        "driver",
        6.8,
        "veth_ dev_ __dev_ netdev_ validate_xmit sch_ skb_scrub eth_ is_skb_forwardable",
    ),
    layer(
        "interrupt and NAPI",
        6.9,
        "net_rx_action napi_ __napi handle_softirqs do_softirq __do_softirq __local_bh irq_exit __irq_exit raise_softirq \
         __raise_softirq netif_ __netif process_backlog run_ksoftirqd asm_ sysvec_ common_interrupt",
    ),
    layer(
        "sleeping and waking up",
        0.0,
        "schedule __schedule sched_ try_to_wake ttwu wake_up __wake autoremove_wake default_wake pollwake sock_def_ ep_ do_poll \
         do_sys_poll __x64_sys_ppoll __x64_sys_poll poll_ __poll finish_task_switch __switch_to prepare_to_wait finish_wait \
         __skb_wait flush_smp_call __flush_smp_call generic_smp_call sysvec_reschedule asm_sysvec_reschedule \
         sysvec_call_function asm_sysvec_call_function",
    ),
    layer("user space", 0.0, ""),
    layer(
        "other",
        7.4,
        "asm_sysvec_apic_timer sysvec_apic_timer hrtimer_interrupt tick_ asm_exc_",
    ),
];
const USER: usize = LAYERS.len() - 2;
const OTHER: usize = LAYERS.len() - 1;
/// What a core does that has nothing to do.
const IDLE: &str = "do_idle default_idle cpuidle cpu_idle cpu_startup_entry pv_native_safe_halt native_safe_halt arch_cpu_idle acpi_idle \
    intel_idle mwait_idle tick_nohz_idle";

macro_rules! table_1 {
    ($key:literal, $size:literal) => {
        Comparison {
            key: concat!("a_table_1_", $key),
            title: concat!("table 1, ", $size, " B, both ends (paper: 68.1 µs)"),
            unit: Microseconds,
            contenders: contenders($size).into(),
            targets: Vec::new(),
            columns: const { &table_1!($size, [
                ("/us/0", "system call and socket (paper: 3.2 µs, 4.7 %)"), ("/us/1", "UDP and IP, sending (paper: 14.8 µs, 21.7 %)"),
                ("/us/2", "UDP and IP, receiving (paper: 23.5 µs, 34.5 %)"), ("/us/3", "AF_XDP"), ("/us/4", "XDP program"),
                ("/us/5", "driver (paper: 6.8 µs, 10.0 %)"), ("/us/6", "interrupt and NAPI (paper: 6.9 µs, 10.1 %)"),
                ("/us/7", "sleeping and waking up"), ("/us/8", "user space"), ("/us/9", "other (paper: 7.4 µs, 10.9 %)")
            ]) },
            most_rounds: Some(ROUNDS),
        }
    };
    ($size:literal, [$(($place:literal, $name:literal)),*]) => {
        [
            $(Column::new($place, concat!("table 1, ", $size, " B, ", $name), Microseconds),)*
            Column::new("/other_percent", concat!("table 1, ", $size, " B, other, of all"), Percent),
            Column::new("/round_trip_us", concat!("table 1, ", $size, " B, a round trip beside it"), Microseconds),
        ]
    };
}

/// Of the shortest message, and of one that nearly fills a packet.
pub(super) fn all() -> [Comparison; 2] {
    [table_1!("4", 4), table_1!("1024", 1024)]
}

/// The first of them.
pub fn table_1() -> Comparison {
    let [shortest, _] = all();
    shortest
}

fn contenders(size: u64) -> [Contender; 2] {
    [
        ("LM real time", "real-time-sleeping"),
        ("kernel UDP", "udp-blocking"),
    ]
    .map(|(name, transport)| Contender {
        name,
        bed: BedConfig::default(),
        measure: Box::new(move |bed, programs| measure(bed, programs, transport, size)),
    })
}

fn measure(bed: &Bed, programs: &Programs, transport: &str, size: u64) -> Result<Sample> {
    let ends = Ends::round_trips(transport, size, ROUND_TRIPS, SECONDS);
    let [asking, answering] = two_cores();
    let mut far = bed.right().spawn(launch(programs, ends.far(), answering))?;
    far.await_text("ready")?;
    let mut near = bed.left().spawn(launch(programs, ends.near(), asking))?;
    std::thread::sleep(BEFORE);
    let (folder, _guard) = leftovers::temporary_folder(&std::env::temp_dir(), "layers")?;
    let file = folder.join("perf.data");
    look([asking, answering], &file)?;
    ensure!(
        !near.has_ended()?,
        "round trips were over while they were looked at"
    );
    let near = near.finish()?.json()?;
    let times = ends::latencies_us([&near["round_trips"]]);
    let round_trip_us = times.iter().sum::<f64>() / times.len() as f64;
    let Tally { samples, all } = tally(&stacks(&file)?);
    ensure!(all > 0 && !times.is_empty(), "nothing was measured");
    let us = samples.map(|of_layer| of_layer as f64 / all as f64 * round_trip_us);
    let sum = us.iter().sum::<f64>();
    Ok(Sample {
        value: sum,
        report: json!({
            "us": us, "other_percent": us[OTHER] / sum * 100.0, "round_trip_us": round_trip_us, "samples": samples, "all_samples": all,
        }),
    })
}

const INSTALL: &str = "perf looks at the cores: install the package linux-perf";

/// Has perf look at these cores.
fn look([one, other]: [usize; 2], file: &Path) -> Result<()> {
    let mut record = Command::new("perf");
    record
        .args([
            "record",
            "--quiet",
            "-e",
            "cpu-clock",
            "-c",
            PERIOD_NS,
            "-g",
            "-C",
        ])
        .arg(format!("{one},{other}"));
    record.arg("-o").arg(file).args(["--", "sleep", LOOK_S]);
    let recorded = record.stdout(Stdio::null()).output().context(INSTALL)?;
    ensure!(
        recorded.status.success(),
        "perf record failed: {}",
        String::from_utf8_lossy(&recorded.stderr)
    );
    Ok(())
}

/// What it has seen, stack by stack.
fn stacks(file: &Path) -> Result<String> {
    let mut script = Command::new("perf");
    script.args(["script", "--no-inline", "-F", "comm,ip,sym", "-i"]);
    let shown = script.arg(file).output().context(INSTALL)?;
    ensure!(shown.status.success(), "perf script failed");
    Ok(String::from_utf8_lossy(&shown.stdout).into_owned())
}

/// Samples by layer, and all of them, those of idle cores and of other programs included.
#[derive(Debug, Default, PartialEq)]
struct Tally {
    samples: [u64; LAYERS.len()],
    all: u64,
}

/// Of what `perf script` prints: the program's name, then a line for each function, the innermost first, then an empty one.
fn tally(script: &str) -> Tally {
    let mut tally = Tally::default();
    for sample in script.split("\n\n").filter(|sample| !sample.trim().is_empty()) {
        tally.all += 1;
        let mut lines = sample.trim_start_matches('\n').lines();
        let program = lines.next().unwrap_or("").trim();
        let is_ours = ["lm-", "swapper", "ksoftirqd"]
            .iter()
            .any(|ours| program.starts_with(ours));
        if let Some(layer) = layer_of(lines).filter(|_| is_ours) {
            tally.samples[layer] += 1;
        }
    }
    tally
}

/// The layer of a stack; `None`: the core was idle.
fn layer_of<'a>(stack: impl Iterator<Item = &'a str>) -> Option<usize> {
    let frames = stack.filter_map(|line| line.trim().split_once(' '));
    for (place, (address, function)) in frames.enumerate() {
        // The kernel's addresses have the highest bit.
        let is_kernels = u64::from_str_radix(address, 16).is_ok_and(|address| address >> 63 == 1);
        if !is_kernels {
            return Some(if place == 0 { USER } else { OTHER });
        }
        let longest = |functions: &str| {
            let fits = { functions.split_whitespace() }.filter(|begin| function.starts_with(begin));
            fits.map(str::len).max().unwrap_or(0)
        };
        let of_layers = LAYERS.iter().map(|layer| longest(layer.functions)).enumerate();
        let (layer, len) = of_layers.max_by_key(|(_, len)| *len).unwrap_or((OTHER, 0));
        if longest(IDLE) > len {
            return None;
        }
        if len > 0 {
            return Some(layer);
        }
    }
    Some(OTHER)
}

/// The table as the paper has it: microseconds, and percent of all.
pub(super) fn remarks(measured: &[Measured]) {
    for one in measured.iter().filter(|one| one.key.starts_with("a_table_1")) {
        let mut table = Table::new(&["layer", "paper's UDP", "kernel UDP", "LM real time"]);
        for (place, layer) in LAYERS.iter().enumerate() {
            let of = |name: &str| {
                let (_, sum, reports) = one.results.iter().find(|(contender, ..)| *contender == name)?;
                let us = median(reports, &format!("/us/{place}"))?;
                Some(cell(us, sum.median))
            };
            table.row([
                layer.name.to_owned(),
                layer.paper_us.map_or_else(String::new, |us| cell(us, 68.1)),
                of("kernel UDP").unwrap_or_default(),
                of("LM real time").unwrap_or_default(),
            ]);
        }
        println!("{}:\n\n{table}", one.title);
    }
}

fn median(reports: &[Value], place: &str) -> Option<f64> {
    let found: Vec<f64> = reports
        .iter()
        .filter_map(|report| number(report, place))
        .collect();
    Some(lm_measure::statistics::Summary::of(&found)?.median)
}

fn cell(us: f64, of_us: f64) -> String {
    format!("{us:.2} µs, {:.1} %", us / of_us * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(frames: &[&str]) -> Option<&'static str> {
        let lines: Vec<String> = (frames.iter())
            .map(|function| format!("\tffffffff81234567 {function}"))
            .collect();
        layer_of(lines.iter().map(String::as_str)).map(|layer| LAYERS[layer].name)
    }

    #[test]
    fn a_sample_is_of_the_innermost_function_that_is_known() {
        for (stack, layer) in [
            (
                &[
                    "memcpy",
                    "__ip_append_data.isra.0",
                    "udp_sendmsg",
                    "do_syscall_64",
                ][..],
                "UDP and IP, sending",
            ),
            (
                &["__memcpy", "xsk_generic_xmit", "xsk_sendmsg", "__sys_sendto"],
                "AF_XDP",
            ),
            (
                &["bpf_prog_6deef7357e7b4530_gate", "veth_xdp_rcv_skb", "veth_poll"],
                "XDP program",
            ),
            (
                &[
                    "skb_release_data",
                    "veth_xdp_rcv_skb",
                    "veth_poll",
                    "net_rx_action",
                ],
                "driver",
            ),
            (
                &["_raw_spin_lock", "try_to_wake_up", "sock_def_readable", "xsk_rcv"],
                "sleeping and waking up",
            ),
            (
                &["kfree_skbmem", "sock_alloc_send_pskb", "udp_sendmsg"],
                "system call and socket",
            ),
            (
                &["nobody_knows", "net_rx_action", "do_syscall_64"],
                "interrupt and NAPI",
            ),
            (
                &[
                    "account_process_tick",
                    "update_process_times",
                    "tick_nohz_handler",
                    "asm_sysvec_apic_timer_interrupt",
                ],
                "other",
            ),
            (&["nobody_knows", "neither"], "other"),
            (
                &["bpf_lsm_socket_sendmsg", "security_socket_sendmsg"],
                "system call and socket",
            ),
        ] {
            assert_eq!(of(stack), Some(layer), "{stack:?}");
        }
        // A core that wakes up for somebody is not idle any more.
        assert_eq!(of(&["pv_native_safe_halt", "default_idle_call", "do_idle"]), None);
        assert_eq!(
            of(&["ttwu_do_activate", "sched_ttwu_pending", "do_idle"]),
            Some("sleeping and waking up")
        );
    }

    #[test]
    fn all_samples_are_counted_and_those_of_others_are_nobodys() {
        let script = "lm-bench \n\t    55d0c1a2b3c4 lm_dataplane::poll\n\t    55d0c1a2b3c4 main\n\nswapper \n\tffffffff81000000 pv_native_safe_halt\n\n\
            lm-bench \n\tffffffff81000000 memcpy\n\tffffffff81000001 udp_recvmsg\n\t    7f00 [unknown]\n\nrustc \n\tffffffff81000001 udp_recvmsg\n\n";
        let mut expected = Tally {
            all: 4,
            ..Tally::default()
        };
        (expected.samples[USER], expected.samples[2]) = (1, 1);
        assert_eq!(tally(script), expected);
    }

    #[test]
    fn columns_name_the_layers_and_what_the_paper_says_of_them() {
        let paper: f64 = LAYERS.iter().filter_map(|layer| layer.paper_us).sum();
        // DMA and media, 5.5 µs, are what a veth pair has not.
        assert!((paper + 5.5 - 68.1).abs() < 1e-9, "{paper}");
        for comparison in all() {
            for (place, (layer, column)) in LAYERS.iter().zip(comparison.columns).enumerate() {
                assert_eq!(column.place, format!("/us/{place}"));
                let told = layer.paper_us.map_or_else(String::new, |us| {
                    format!(" (paper: {us} µs, {:.1} %)", us / 68.1 * 100.0)
                });
                assert!(
                    column.title.ends_with(&format!("{}{told}", layer.name)),
                    "{}",
                    column.title
                );
            }
        }
    }
}
