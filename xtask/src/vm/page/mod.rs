//! `docs/zero-copy.md`: its figures and tables, made of what the checks `overlay` and `no-copies` reported.
//!
//! Beside the page lie the reports (`docs/zero-copy/DEVICE.json`); everything else is made of them, and a test compares.

mod draw;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::checks::overlay::{Trace, verify};
use crate::workspace::root;

/// Devices whose reports are shown.
const DEVICES: [&str; 2] = ["igb", "virtio-net"];
/// The page's part that is made, with its head and foot.
const BEGIN: &str = "<!-- made by cargo xtask vm --page: from here -->\n";
const END: &str = "<!-- to here -->\n";

/// What is known of a device.
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    calls: Calls,
    overlay: Trace,
}

/// How often the kernel called what, by way and function: the check `no-copies`.
#[derive(Debug, Serialize, Deserialize)]
struct Calls {
    packets: u64,
    zero_copy: Counts,
    copying: Counts,
}

#[derive(Debug, Serialize, Deserialize)]
struct Counts {
    calls: BTreeMap<String, BTreeMap<String, u64>>,
}

/// Makes figures and tables anew, of the reports in `results` (a file of `cargo xtask vm --json`) or else of those that lie there.
pub(super) fn make(results: Option<&Path>) -> Result<()> {
    let folder = root().join("docs/zero-copy");
    if let Some(results) = results {
        let text =
            std::fs::read_to_string(results).with_context(|| format!("cannot read {}", results.display()))?;
        let results: Value =
            serde_json::from_str(&text).context("this is no file of `cargo xtask vm --json`")?;
        for device in DEVICES {
            write(&reports(device), &kept(&taken(&results, device)?)?)?;
        }
    }
    let known: Vec<Known> = DEVICES.map(known).into_iter().collect::<Result<_>>()?;
    for (name, content) in figures(&known) {
        write(&folder.join(name), &content)?;
    }
    let page = page();
    let text = std::fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
    write(&page, &with_tables(&text, &known)?)
}

fn page() -> PathBuf {
    root().join("docs/zero-copy.md")
}

fn reports(device: &str) -> PathBuf {
    root().join(format!("docs/zero-copy/{device}.json"))
}

fn known(device: &str) -> Result<Known> {
    let path = reports(device);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("cannot understand {}", path.display()))
}

fn write(path: &Path, content: &str) -> Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// A device's reports in a result file.
fn taken(results: &Value, device: &str) -> Result<Known> {
    let report = |check: &str| {
        let name = format!("{device}/{check}");
        let checks = results["checks"].as_array()?;
        let ended = checks.iter().find(|ended| ended["name"] == *name)?;
        Some(ended["report"].clone()).filter(Value::is_object)
    };
    let missing =
        || format!("there is no report of {device}; run `cargo xtask vm overlay no-copies --json FILE`");
    let known = Known {
        overlay: serde_json::from_value(report("overlay").with_context(missing)?)?,
        calls: serde_json::from_value(report("no-copies").with_context(missing)?)?,
    };
    verify(&known.overlay)?;
    Ok(known)
}

/// A line for each step, so that differences can be read.
fn kept(known: &Known) -> Result<String> {
    let text = serde_json::to_string(known)?;
    Ok(text
        .replace("\"overlay\":", "\n\"overlay\":")
        .replace("{\"event\"", "\n{\"event\"")
        + "\n")
}

fn figures(known: &[Known]) -> Vec<(String, String)> {
    let films = DEVICES.iter().zip(known);
    let mut figures: Vec<(String, String)> = films
        .map(|(device, known)| (format!("{device}.svg"), draw::film(&known.overlay)))
        .collect();
    if let Some(known) = known.iter().find(|known| known.overlay.footprint.prefix_len > 0) {
        figures.push(("border.svg".into(), draw::seam(&known.overlay)));
    }
    figures
}

/// The page with its tables made anew.
fn with_tables(page: &str, known: &[Known]) -> Result<String> {
    let parts = page
        .split_once(BEGIN)
        .and_then(|(head, rest)| Some((head, rest.split_once(END)?.1)));
    let (head, foot) = parts.context("the page has no place for tables")?;
    ensure!(!foot.contains(BEGIN), "the page has two places for tables");
    Ok(format!("{head}{BEGIN}{}{END}{foot}", tables(known)))
}

fn tables(known: &[Known]) -> String {
    let mut text = String::from(
        "| driver, on Linux | zero-copy says the kernel of sender, receiver | written before a packet | behind it | packets tried |\n\
         |---|---|---|---|---|\n",
    );
    for Known { overlay, .. } in known {
        let prints = &overlay.footprint;
        let before = match (prints.prefix_len, prints.prefix_written) {
            (0, _) => "nothing".to_owned(),
            (len, written) if written < len => format!("{written} of the {len} bytes before it"),
            (len, _) => format!("{len} bytes"),
        };
        let behind = match prints.trailer_len {
            0 => "nothing".to_owned(),
            len => format!("{len} bytes"),
        };
        let yes = |is: bool| if is { "yes" } else { "no" };
        text.push_str(&format!(
            "| {}, {} | {}, {} | {before} | {behind} | {} of {} lengths, {} to {} bytes |\n",
            overlay.driver,
            overlay.kernel,
            yes(overlay.zero_copy_send),
            yes(overlay.zero_copy_receive),
            prints.packets,
            prints.lengths,
            prints.from_len,
            prints.to_len
        ));
    }
    text.push_str("\n| called in the kernel, for | function |");
    for Known { overlay, calls } in known {
        text.push_str(&format!(
            " {}: {} packets as above | {0}: a file, copy mode |",
            overlay.driver, calls.packets
        ));
    }
    text.push_str(&format!("\n|---|---|{}\n", "---:|---:|".repeat(known.len())));
    for (way, name) in WAYS {
        let of = |counts: &Counts| counts.calls.get(way).cloned().unwrap_or_default();
        let every = |Known { calls, .. }: &Known| [&calls.zero_copy, &calls.copying].map(of);
        let mut functions: Vec<String> = known
            .iter()
            .flat_map(every)
            .flat_map(BTreeMap::into_keys)
            .collect();
        functions.sort();
        functions.dedup();
        for function in functions {
            let counts: Vec<[Option<u64>; 2]> = known
                .iter()
                .map(|known| every(known).map(|calls| calls.get(&function).copied()))
                .collect();
            // What is never called shows nothing, except for the copies that nobody made.
            let is_silent = counts.iter().flatten().all(|count| count.unwrap_or(0) == 0);
            if is_silent && way != "bounce" {
                continue;
            }
            text.push_str(&format!("| {name} | `{function}` |"));
            for count in counts.iter().flatten() {
                let count = count.map_or_else(|| "–".to_owned(), |count| count.to_string());
                text.push_str(&format!(" {count} |"));
            }
            text.push('\n');
        }
    }
    text
}

/// Ways as reports name them, and for people.
const WAYS: [(&str, &str); 7] = [
    ("copying_receive", "copy into the UMEM"),
    ("copying_send", "copy out of the UMEM"),
    ("stack", "a packet for the kernel's stack"),
    ("bounce", "copy to or from a bounce buffer"),
    ("hand_over", "a frame on the RX ring, copied or not"),
    ("zero_copy_receive", "frames for the device to write"),
    ("zero_copy_send", "frames for the device to read"),
];

#[cfg(test)]
mod tests {
    use super::super::checks::overlay::{Event, What};
    use super::*;

    #[test]
    fn the_page_shows_what_was_reported() {
        let known: Vec<Known> = DEVICES.map(|device| known(device).unwrap()).into();
        let remedy = "make it anew: cargo xtask vm --page";
        for (name, content) in figures(&known) {
            let path = root().join("docs/zero-copy").join(&name);
            assert!(
                std::fs::read_to_string(&path).unwrap() == content,
                "{name}; {remedy}"
            );
        }
        let text = std::fs::read_to_string(page()).unwrap();
        assert!(
            with_tables(&text, &known).unwrap() == text,
            "docs/zero-copy.md; {remedy}"
        );
        for (name, _) in figures(&known) {
            assert!(
                text.contains(&format!("](zero-copy/{name})")),
                "{name} is not shown"
            );
        }
        for (device, known) in DEVICES.iter().zip(&known) {
            verify(&known.overlay).unwrap();
            assert_eq!(
                std::fs::read_to_string(reports(device)).unwrap(),
                kept(known).unwrap()
            );
        }
    }

    /// The reports that lie in the repository, changed in one place.
    fn refused(change: impl Fn(&mut Trace)) -> String {
        let mut trace = known("virtio-net").unwrap().overlay;
        change(&mut trace);
        verify(&trace).unwrap_err().to_string()
    }

    #[test]
    fn what_breaks_a_promise_is_named() {
        assert!(refused(|trace| trace.zero_copy_receive = false).contains("not in zero-copy mode"));
        assert!(refused(|trace| trace.footprint.prefix_len = 16).contains("beside packets"));
        assert!(refused(|trace| trace.footprint.trailer_len = 4).contains("beside packets"));
        assert!(refused(|trace| trace.footprint.lengths = 2).contains("too few lengths"));
        assert!(refused(|trace| trace.driver = "igb".into()).contains("beside packets"));
        let text = refused(|trace| {
            let step = trace
                .steps
                .iter_mut()
                .find(|step| step.event == Event::Packet { fragment: 1 });
            step.unwrap().event = Event::Packet { fragment: 5 };
        });
        assert!(text.contains("packets came as"), "{text}");
        let text = refused(|trace| {
            trace.steps.pop();
        });
        assert!(text.contains("not contiguous"), "{text}");
        // A single byte, anywhere.
        for number in 0..known("virtio-net").unwrap().overlay.steps.len() {
            let text = refused(|trace| {
                let runs = &mut trace.steps[number].runs;
                runs[0].len -= 1;
                let foreign = super::super::checks::overlay::Run {
                    at: runs[0].at + runs[0].len,
                    len: 1,
                    what: What::Foreign,
                };
                runs.insert(1, foreign);
            });
            assert!(text.contains("the memory is"), "{text}");
        }
    }

    #[test]
    fn a_result_file_without_reports_is_named() {
        let error = taken(&serde_json::json!({"checks": []}), "igb").unwrap_err();
        assert!(error.to_string().contains("no report of igb"), "{error}");
        assert!(with_tables("no place", &[]).is_err());
    }
}
