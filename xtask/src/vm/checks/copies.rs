//! The check `no-copies`: the kernel's own testimony that no copying path ran while a message landed.
//!
//! Kernel probes count the calls of functions that stand for a way to receive or send: those that copy (AF_XDP's copy
//! mode, packets turned into the kernel's own `sk_buff`, bounce buffers) and those that do not. A function that the
//! compiler has inlined cannot be counted, so a run in which copies are made must move the counters of the copying
//! ways: else nothing was shown.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::overlay;
use super::pair::Pair;
use super::spoil;
use super::transfer;
use crate::content::Content;
use crate::vm::devices::Device;
use crate::vm::protocol::{Plan, ZERO_COPY};

const TRACING: &str = "/sys/kernel/tracing";
const GROUP: &str = "lm_calls";
/// A probe misses a call in an interrupt that comes within another probe. Then everything is counted once more.
const ATTEMPTS: u32 = 4;

/// A way that a packet can take through the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// AF_XDP copies the received packet into the UMEM.
    CopyingReceive,
    /// AF_XDP copies the packet to send out of the UMEM.
    CopyingSend,
    /// A received packet becomes an `sk_buff`, for the kernel's stack.
    Stack,
    /// The device reaches the memory by a copy elsewhere.
    Bounce,
    /// AF_XDP puts a frame on the RX ring: in copy mode, too, after the copy.
    HandOver,
    /// The driver takes frames of the UMEM for its device to write.
    ZeroCopyReceive,
    /// The device reads the UMEM.
    ZeroCopySend,
}

/// Functions, by the way that they stand for. Those that a kernel has not, or has inlined, are left out and named.
const FUNCTIONS: [(&str, Way); 20] = [
    // net/xdp/xsk.c: `xsk_rcv` calls the first in copy mode, which calls the second for each part; generic mode calls
    // the third.
    ("__xsk_rcv", Way::CopyingReceive),
    ("xsk_copy_xdp", Way::CopyingReceive),
    ("xsk_generic_rcv", Way::CopyingReceive),
    ("__xsk_generic_xmit", Way::CopyingSend),
    ("xsk_build_skb", Way::CopyingSend),
    // net/core/skbuff.c and the drivers.
    ("napi_alloc_skb", Way::Stack),
    ("napi_build_skb", Way::Stack),
    ("build_skb", Way::Stack),
    ("igb_construct_skb", Way::Stack),
    ("igb_construct_skb_zc", Way::Stack),
    ("igb_build_skb", Way::Stack),
    ("page_to_skb", Way::Stack),
    ("xsk_construct_skb", Way::Stack),
    // kernel/dma/swiotlb.c
    ("swiotlb_bounce", Way::Bounce),
    // net/xdp/xsk.c: `xsk_rcv` calls it where the packet lies in the pool's own memory, and `__xsk_rcv` with its copy.
    ("__xsk_rcv_zc", Way::HandOver),
    // net/xdp/xsk_buff_pool.c, for drivers.
    ("xp_alloc_batch", Way::ZeroCopyReceive),
    ("igb_clean_rx_irq_zc", Way::ZeroCopyReceive),
    ("igb_xmit_zc", Way::ZeroCopySend),
    ("xsk_tx_peek_desc", Way::ZeroCopySend),
    ("xsk_tx_peek_release_desc_batch", Way::ZeroCopySend),
];

/// How often each function was called.
#[derive(Clone, Debug, Default)]
struct Counts {
    /// Calls of each function that can be counted.
    calls: Vec<(Way, &'static str, u64)>,
    /// Calls that a probe missed.
    missed: u64,
}

impl Counts {
    fn most(&self, way: Way) -> u64 {
        let of_way = self.calls.iter().filter(|call| call.0 == way);
        of_way.map(|call| call.2).max().unwrap_or(0)
    }

    /// Packets that AF_XDP put on an RX ring, where that can be counted.
    fn handed_over(&self) -> Option<u64> {
        let is_it = |call: &&(Way, &str, u64)| call.1 == "__xsk_rcv_zc";
        self.calls.iter().find(is_it).map(|call| call.2)
    }
}

/// Counts what the kernel calls while `run` runs, in the whole machine.
///
/// # Errors
/// Those of `run`, and when tracefs refuses the probes.
fn copies_counted<T>(run: impl FnOnce() -> Result<T>) -> Result<(T, Counts)> {
    let probes = Probes::set()?;
    append(&format!("events/{GROUP}/enable"), "1").context("cannot enable the probes")?;
    let value = run()?;
    Ok((value, probes.read()?))
}

/// Probes at functions of the kernel's (kprobes); gone when this is dropped.
struct Probes(Vec<(String, Way, &'static str)>);

impl Probes {
    fn set() -> Result<Probes> {
        let list = Path::new(TRACING).join("available_filter_functions");
        let list = std::fs::read_to_string(&list).with_context(|| {
            format!(
                "cannot read {}; mount tracefs, in a kernel with kprobes",
                list.display()
            )
        })?;
        let mut probes = Probes(Vec::new());
        for (function, way) in FUNCTIONS {
            for symbol in symbols(&list, function) {
                let event = format!("f{}", probes.0.len());
                // A symbol that is there twice cannot be named; then the function counts as missing.
                if append("kprobe_events", &format!("p:{GROUP}/{event} {symbol}")).is_ok() {
                    probes.0.push((event, way, function));
                }
            }
        }
        ensure!(!probes.0.is_empty(), "the kernel lets no function be counted");
        Ok(probes)
    }

    fn read(&self) -> Result<Counts> {
        let path = Path::new(TRACING).join("kprobe_profile");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let profile = profile(&text)?;
        let mut counts = Counts::default();
        for &(ref event, way, function) in &self.0 {
            let (hits, missed) = profile
                .get(event.as_str())
                .with_context(|| format!("kprobe_profile does not name the probe of {function}"))?;
            // A function's variants are one function.
            match counts.calls.iter_mut().find(|call| call.1 == function) {
                Some(call) => call.2 += hits,
                None => counts.calls.push((way, function, *hits)),
            }
            counts.missed += missed;
        }
        Ok(counts)
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        // A probe that stays counts on, and does no harm; the next run names it otherwise.
        let _ = append(&format!("events/{GROUP}/enable"), "0");
        for (event, ..) in &self.0 {
            let _ = append("kprobe_events", &format!("-:{GROUP}/{event}"));
        }
    }
}

fn append(file: &str, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new()
        .append(true)
        .open(Path::new(TRACING).join(file))?;
    file.write_all(format!("{line}\n").as_bytes())
}

/// The symbols of a function as a probe is told them: `NAME`, the compiler's variants of it (`NAME.isra.0`),
/// `MODULE:NAME`.
fn symbols(list: &str, function: &str) -> Vec<String> {
    let matching = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        let is_it = name
            .strip_prefix(function)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let module = words
            .next()
            .map(|word| word.trim_matches(['[', ']']).to_owned() + ":");
        is_it.then(|| module.unwrap_or_default() + name)
    };
    list.lines().filter_map(matching).collect()
}

/// Hits and misses of each event: `NAME HITS MISSES` a line.
fn profile(text: &str) -> Result<BTreeMap<&str, (u64, u64)>> {
    let event = |line| {
        let mut words = str::split_whitespace(line);
        let (name, hits, missed) = (words.next()?, words.next()?, words.next()?);
        Some((name, (hits.parse().ok()?, missed.parse().ok()?)))
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| event(line).with_context(|| format!("kprobe_profile has the line {line:?}")))
        .collect()
}

pub(super) fn check(plan: &Plan, device: Device) -> Result<()> {
    let mut attempt = 1;
    let (report, landed) = loop {
        let (report, landed) = copies_counted(|| overlay::Pair::of(device)?.overlay())?;
        // A copy that was seen is one, whatever else was missed.
        ensure_no_copies(&landed, &COPIES)?;
        if landed.missed == 0 || attempt == ATTEMPTS {
            break (report, landed);
        }
        attempt += 1;
    };
    let ((), control) = copies_counted(|| transfer::transfer(plan, device))?;
    judge(&landed, &control, number(&report, "packets")?)
}

/// The check `transfer-copies`: the same of a file that `lm-send` and `lm-recv` transfer in zero-copy mode, and what
/// user space copied.
pub(super) fn check_transfer(plan: &Plan, device: Device) -> Result<()> {
    let (received, transferred) = copies_counted(|| transfer(plan, device))?;
    judge_transfer(&transferred, &received)
}

/// Bytes of the file that is transferred in zero-copy mode.
const FILE_LEN: u64 = 2 << 20;
/// Slow, so that the emulated cards lose no packets: what lies behind a loss is copied.
const RATE: &str = "30Mbit";
/// Packets that a transfer has beside fragments and that go through the kernel's stack, at most: requests, grants, ARP.
const REQUESTS: u64 = 64;
/// Payload of a fragment at MTU 1500, in bytes.
const PAYLOAD_LEN: u64 = 1448;

/// Sends a file from one host to the other in zero-copy mode; the receiver's report.
fn transfer(plan: &Plan, device: Device) -> Result<Value> {
    let source = Content::new(&std::env::temp_dir(), FILE_LEN)?;
    let pair = Pair::new(plan, device)?;
    let (_, output) = transfer::pass(&pair, &source, ZERO_COPY, &format!("--rate {RATE}"))?;
    ensure!(
        output.stderr.contains("virtio_net is a loaded module") == (device == Device::VirtioNet),
        "lm-recv says of the driver: {}",
        output.stderr
    );
    spoil::file(plan.spoil, &source.received())?;
    source.ensure_same(&source.received())?;
    output.json().context("lm-recv --json")
}

fn number(report: &Value, name: &str) -> Result<u64> {
    report[name]
        .as_u64()
        .with_context(|| format!("no {name} in {report}"))
}

/// What was called during a transfer in zero-copy mode, and what the receiver says of it. Requests, grants and the like
/// go through the kernel's stack: a few packets.
fn judge_transfer(counts: &Counts, report: &Value) -> Result<()> {
    let fragments = FILE_LEN.div_ceil(PAYLOAD_LEN);
    ensure!(
        number(report, "manifests_requested")? == 0,
        "fragments were not in their places: {report}"
    );
    ensure_no_copies(counts, &[Way::CopyingReceive, Way::CopyingSend, Way::Bounce])?;
    // Until the receiver has seen what the device writes beside packets it refuses requests, which come again: a packet
    // each, and an answer.
    let refused = report["drops"]["request_refused"].as_u64().unwrap_or(0);
    ensure!(
        counts.most(Way::Stack) <= 2 * refused + REQUESTS,
        "the kernel's stack took part in the transfer: {counts:?} {report}"
    );
    if let Some(calls) = counts.handed_over() {
        ensure!(
            calls + counts.missed >= fragments,
            "{fragments} fragments, and {calls} packets were handed over: {counts:?}"
        );
    }
    let number = |name| number(report, name);
    let (copied, page_ends) = (number("user_copied_bytes")?, number("page_end_fragments")?);
    // Messages are alike, and each one's last fragment is shorter.
    let message_len = number("bytes")? / number("messages")?.max(1);
    let last = message_len.saturating_sub(1) % PAYLOAD_LEN + 1;
    ensure!(
        (0..=page_ends).any(|short| (page_ends - short) * PAYLOAD_LEN + short * last == copied),
        "user space copied {copied} bytes, and {page_ends} fragments lay at a huge page's end: {report}"
    );
    Ok(())
}

/// Ways that are copies, where nothing but packets of LM's comes.
const COPIES: [Way; 4] = [Way::CopyingReceive, Way::CopyingSend, Way::Stack, Way::Bounce];

fn ensure_no_copies(counts: &Counts, ways: &[Way]) -> Result<()> {
    for &way in ways {
        ensure!(counts.most(way) == 0, "{way:?} ran in zero-copy mode: {counts:?}");
    }
    Ok(())
}

/// `landed` is what was called while `packets` came in zero-copy mode and nothing else happened, `control` while
/// a file was transferred in copy mode.
fn judge(landed: &Counts, control: &Counts, packets: u64) -> Result<()> {
    // A call that was missed in the other run would have been one more of those that must be there.
    ensure!(landed.missed == 0, "the kernel missed calls: {landed:?}");
    for way in [Way::CopyingReceive, Way::CopyingSend, Way::Stack] {
        ensure!(
            control.most(way) > 0,
            "{way:?} was not seen although copies were made, so nothing is shown: {control:?}"
        );
    }
    ensure_no_copies(landed, &COPIES)?;
    if let Some(calls) = landed.handed_over() {
        ensure!(
            calls == packets,
            "{packets} packets came, and {calls} were handed over: {landed:?}"
        );
    }
    ensure!(
        landed.most(Way::ZeroCopyReceive) > 0 && landed.most(Way::ZeroCopySend) > 0,
        "the ways without copies were not seen: {landed:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn counts(calls: &[(Way, &'static str, u64)]) -> Counts {
        Counts {
            calls: calls.to_vec(),
            missed: 0,
        }
    }

    #[test]
    fn symbols_are_the_function_and_its_variants() {
        let list = "__xsk_rcv_zc.constprop.0\n__xsk_rcv\n__xsk_rcv_zc_safe\nxsk_construct_skb [virtio_net]\n";
        assert_eq!(symbols(list, "__xsk_rcv"), ["__xsk_rcv"]);
        assert_eq!(symbols(list, "__xsk_rcv_zc"), ["__xsk_rcv_zc.constprop.0"]);
        assert_eq!(
            symbols(list, "xsk_construct_skb"),
            ["virtio_net:xsk_construct_skb"]
        );
        assert!(symbols(list, "xsk_copy_xdp").is_empty());
    }

    #[test]
    fn profiles_are_a_line_an_event() {
        let text =
            "  f0                                                        12               0\n  f1  0  3\n";
        let profile = profile(text).unwrap();
        assert_eq!((profile["f0"], profile["f1"]), ((12, 0), (0, 3)));
        assert!(super::profile("f0 many 0\n").is_err());
    }

    #[test]
    fn a_transfer_copies_what_lies_at_page_ends_and_nothing_else() {
        use Way::*;
        let calls = [(CopyingReceive, "__xsk_rcv", 0), (HandOver, "__xsk_rcv_zc", 2920)];
        let report = |copied: u64, page_ends: u64, manifests: u64| {
            json!({
                "bytes": FILE_LEN,
                "messages": 2,
                "user_copied_bytes": copied,
                "page_end_fragments": page_ends,
                "manifests_requested": manifests,
                "drops": {"request_refused": 20},
            })
        };
        // 1 MiB ends with a fragment of 224 bytes.
        for (copied, page_ends) in [(0, 0), (2896, 2), (4 * 1448 + 2 * 224, 6)] {
            judge_transfer(&counts(&calls), &report(copied, page_ends, 0)).unwrap();
        }
        for (copied, page_ends) in [(1, 0), (1448, 0), (0, 1), (2897, 2), (1448, 2)] {
            let error = judge_transfer(&counts(&calls), &report(copied, page_ends, 0)).unwrap_err();
            assert!(error.to_string().contains("user space copied"), "{error}");
        }
        let error = judge_transfer(&counts(&calls), &report(0, 0, 1)).unwrap_err();
        assert!(error.to_string().contains("not in their places"), "{error}");
        for (more, why) in [
            ((CopyingReceive, "__xsk_rcv", 1), "CopyingReceive ran"),
            ((CopyingSend, "__xsk_generic_xmit", 1), "CopyingSend ran"),
            ((Bounce, "swiotlb_bounce", 1), "Bounce ran"),
            ((Stack, "build_skb", 105), "stack took part"),
            ((HandOver, "__xsk_rcv_zc", 1000), "were handed over"),
        ] {
            let mut calls = calls.to_vec();
            calls.retain(|(_, function, _)| *function != more.1);
            calls.push(more);
            let error = judge_transfer(&counts(&calls), &report(0, 0, 0)).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn a_copy_a_gap_and_a_silent_control_are_failures() {
        use Way::*;
        let landed = [
            (CopyingReceive, "__xsk_rcv", 0),
            (HandOver, "__xsk_rcv_zc", 8),
            (ZeroCopyReceive, "xp_alloc_batch", 9),
            (ZeroCopySend, "igb_xmit_zc", 20),
        ];
        let control = [
            (CopyingReceive, "__xsk_rcv", 725),
            (CopyingSend, "__xsk_generic_xmit", 30),
            (Stack, "napi_build_skb", 4),
        ];
        let with = |calls: &[(Way, &'static str, u64)], more: (Way, &'static str, u64)| {
            let mut calls = calls.to_vec();
            calls.retain(|(_, function, _)| *function != more.1);
            calls.push(more);
            counts(&calls)
        };
        assert!(judge(&counts(&landed), &counts(&control), 8).is_ok());
        let reason = |landed: &Counts, control: &Counts| judge(landed, control, 8).unwrap_err().to_string();
        for copy in [
            (CopyingReceive, "__xsk_rcv", 1),
            (CopyingSend, "__xsk_generic_xmit", 1),
            (Stack, "build_skb", 1),
            (Bounce, "swiotlb_bounce", 1),
        ] {
            let text = reason(&with(&landed, copy), &counts(&control));
            assert!(text.contains("ran in zero-copy mode"), "{text}");
        }
        for silent in ["__xsk_rcv", "__xsk_generic_xmit", "napi_build_skb"] {
            let mut calls = control.to_vec();
            calls.retain(|(_, function, _)| *function != silent);
            let text = reason(&counts(&landed), &counts(&calls));
            assert!(text.contains("nothing is shown"), "{text}");
        }
        for calls in [7, 9] {
            let text = reason(
                &with(&landed, (HandOver, "__xsk_rcv_zc", calls)),
                &counts(&control),
            );
            assert!(text.contains("8 packets came"), "{text}");
        }
        for way in [ZeroCopyReceive, ZeroCopySend] {
            let mut calls = landed.to_vec();
            calls.retain(|(one, ..)| *one != way);
            let text = reason(&counts(&calls), &counts(&control));
            assert!(text.contains("were not seen"), "{text}");
        }
        let missed = Counts {
            missed: 1,
            ..counts(&landed)
        };
        assert!(reason(&missed, &counts(&control)).contains("missed"));
    }
}
