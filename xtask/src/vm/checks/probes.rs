//! Probes at functions of the kernel's (kprobes): how often they are called. A function that the compiler has inlined
//! cannot be counted.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};

pub(super) const TRACING: &str = "/sys/kernel/tracing";
const GROUP: &str = "lm_calls";

/// Probes in the kernel; gone when this is dropped.
pub(super) struct Probes<T> {
    /// Event names, and what they count.
    pub(super) events: Vec<(String, &'static str, T)>,
    /// Functions that this kernel has not, or has inlined.
    pub(super) not_counted: Vec<&'static str>,
}

impl<T: Copy + PartialEq> Probes<T> {
    /// Puts a probe at each of these functions, each of a kind. One whose name ends with `()` is counted when it
    /// returns, with what it returns in the field `len`, and one whose name ends with `:4` has its fourth argument
    /// there.
    ///
    /// # Errors
    /// When tracefs refuses them.
    pub(super) fn set(functions: &[(&'static str, T)]) -> Result<Probes<T>> {
        let list = Path::new(TRACING).join("available_filter_functions");
        let list = std::fs::read_to_string(&list).with_context(|| {
            format!(
                "cannot read {}; mount tracefs, in a kernel with kprobes",
                list.display()
            )
        })?;
        let mut probes = Probes {
            events: Vec::new(),
            not_counted: Vec::new(),
        };
        for &(function, kind) in functions {
            let before = probes.events.len();
            let symbols = match function.split_once(':') {
                // A compiler's variant of it may have other arguments.
                Some((name, _)) => vec![name.to_owned()],
                None => symbols(&list, function.trim_end_matches("()")),
            };
            for symbol in symbols {
                let event = format!("f{}", probes.events.len());
                let probe = probe(&event, function, &symbol);
                // A symbol that is there twice cannot be named; then the function counts as missing.
                if append("kprobe_events", &probe).is_ok() {
                    probes.events.push((event, function, kind));
                }
            }
            if probes.events.len() == before {
                probes.not_counted.push(function);
            }
        }
        ensure!(
            !probes.events.is_empty(),
            "the kernel lets no function be counted"
        );
        Ok(probes)
    }

    /// Counts in the whole machine from here on, in `kprobe_profile`.
    ///
    /// # Errors
    /// What tracefs says.
    pub(super) fn enable(&self) -> Result<()> {
        append(&format!("events/{GROUP}/enable"), "1").context("cannot enable the probes")
    }
}

impl<T> Drop for Probes<T> {
    fn drop(&mut self) {
        // A probe that stays counts on, and harms nobody; the next run names it otherwise.
        let _ = append(&format!("events/{GROUP}/enable"), "0");
        for (event, ..) in &self.events {
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

/// A line for `kprobe_events`.
fn probe(event: &str, function: &str, symbol: &str) -> String {
    let (kind, field) = match function.split_once(':') {
        Some((_, argument)) => ('p', format!(" len=$arg{argument}:s32")),
        None if function.ends_with("()") => ('r', " len=$retval:s32".to_owned()),
        None => ('p', String::new()),
    };
    format!("{kind}:{GROUP}/{event} {symbol}{field}")
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_probe_has_the_field_that_is_asked_for() {
        let line = |function, symbol| probe("f7", function, symbol);
        assert_eq!(
            line("skb_store_bits:4", "skb_store_bits"),
            "p:lm_calls/f7 skb_store_bits len=$arg4:s32"
        );
        assert_eq!(
            line("__xsk_rcv", "__xsk_rcv.isra.0"),
            "p:lm_calls/f7 __xsk_rcv.isra.0"
        );
        assert_eq!(
            line("igb_xmit_zc()", "igb:igb_xmit_zc"),
            "r:lm_calls/f7 igb:igb_xmit_zc len=$retval:s32"
        );
    }
}
