//! Layers of the data plane: which part of it may not name which, and where one still does.
//!
//! `xtask/layers.txt` lists the places that break a rule. A new one fails, and so does one that is on the list and
//! broken no more, so that the list only becomes shorter.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use Part::*;

/// The parts, from the application down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// What an application names.
    Face,
    /// Puts an endpoint together.
    Open,
    /// The round, its stages, peers, small messages.
    Engine,
    /// Large messages on their way out.
    Send,
    /// Large messages on their way in.
    Land,
    /// Requests for sessions, and grants.
    Admission,
    /// What the engine asks of a network card.
    Port,
    /// AF_XDP, sockets, netlink.
    Kernel,
    /// Interfaces, steering, and what a card can do: another crate.
    Cards,
    /// What all others stand on: rings, UMEM, who owns which part of it, bounds, what an application hears of messages.
    Memory,
    /// The programs in the kernel, their maps and their log: another crate.
    Gate,
    /// The simulated card, and whatever belongs to no part.
    Beside,
}

/// In which part a file or a folder of `dataplane/src` is.
const PARTS: [(Part, &str); 10] = [
    (Face, "config endpoint error idle"),
    (Open, "open open_daemon opening over"),
    (
        Engine,
        "aside capture control counters daemon_sessions engine footprint foreign granting \
         handlers hearing integrity landing_channel landing_memory landing_side link looks \
         losses notices outgoing_sessions packet_memory packets peer polling probe requests \
         sending small stream telling timers told watching",
    ),
    (Send, "eager outbound scheduler"),
    (Land, "landing placing"),
    (
        Admission,
        "admission applying connect daemon entropy introductions own_node stewarded terms",
    ),
    (Port, "port"),
    (Kernel, "kernel napi queue_poll ring_queue route udp xsk"),
    (
        Memory,
        "arena bounds checksum completion fragment_digests frames incoming memory message \
         region release ring ring_memory sockopt waker words writer",
    ),
    (Beside, "fuzzing lib mutants"),
];

/// The parts that are other crates. What these never name, the compiler knows.
const CRATES: [(Part, &str); 2] = [(Gate, "lm_ebpf"), (Cards, "lm_cards")];

/// The first never names the second.
const NEVER: [(Part, Part); 19] = [
    (Send, Engine),
    (Land, Engine),
    (Admission, Engine),
    (Engine, Gate),
    (Land, Gate),
    (Land, Send),
    (Land, Admission),
    (Land, Kernel),
    (Port, Gate),
    (Port, Admission),
    (Port, Cards),
    (Port, Kernel),
    (Engine, Face),
    (Send, Face),
    (Land, Face),
    (Engine, Open),
    (Engine, Kernel),
    (Admission, Kernel),
    (Memory, Kernel),
];

/// The part of what the crate has under a name: of a module, of another crate, or of what the crate shows to
/// applications.
fn part_of(module: &str) -> Option<Part> {
    if let Some((part, _)) = CRATES.iter().find(|(_, name)| *name == module) {
        return Some(*part);
    }
    if module.starts_with(|first: char| first.is_ascii_uppercase()) {
        return Some(Face);
    }
    let found = PARTS
        .iter()
        .find(|(_, modules)| modules.split(' ').any(|name| name == module));
    found.map(|(part, _)| *part)
}

/// The code without comments and without the tests at its end.
fn code(text: &str) -> String {
    let lines = text.lines().take_while(|line| !line.starts_with("mod tests {"));
    let code = lines.map(|line| line.split("//").next().unwrap_or_default());
    code.collect::<Vec<_>>().join("\n")
}

/// The modules of the crate that the code names as `crate::MODULE` or in `use crate::{…}`, and the other crates.
fn named(code: &str) -> BTreeSet<String> {
    let word = |text: &str| -> String {
        let is_of_word = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
        text.chars().take_while(is_of_word).collect()
    };
    let mut named = BTreeSet::new();
    for behind in code.split("crate::").skip(1) {
        match behind.strip_prefix('{') {
            None => _ = named.insert(word(behind)),
            Some(list) => {
                let list = list.split_once(';').map_or(list, |(list, _)| list);
                let mut depth = 0;
                for part in list.split_inclusive(['{', '}', ',']) {
                    if depth == 0 {
                        named.insert(word(part.trim_start()));
                    }
                    depth += part.matches('{').count() as i32 - part.matches('}').count() as i32;
                }
            }
        }
    }
    let crates = CRATES.map(|(_, name)| name);
    let others = crates
        .into_iter()
        .filter(|name| code.contains(&format!("{name}::")));
    named.extend(others.map(str::to_owned));
    named.remove("");
    named
}

/// All files of a folder and of those in it, by their paths from the first one.
fn files(root: &Path, folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(root, &path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.insert(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        }
    }
}

/// Each line of the list: the rule, the file, and the module that it names.
fn broken(source: &Path) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    files(source, source, &mut all);
    for module in PARTS.iter().flat_map(|(_, modules)| modules.split(' ')) {
        let is_of_module = |file: &String| file.split(['/', '.']).next() == Some(module);
        assert!(all.iter().any(is_of_module), "no file is of {module}");
    }
    let mut broken = BTreeSet::new();
    for file in &all {
        let is_test = |name: &str| matches!(name, "sim_tests" | "tests" | "tests.rs");
        if file.split('/').any(is_test) {
            continue;
        }
        let module = file.split(['/', '.']).next().unwrap();
        let from = part_of(module).unwrap_or_else(|| panic!("{file} is in no part: say in which"));
        for module in named(&code(&std::fs::read_to_string(source.join(file)).unwrap())) {
            for (a, b) in NEVER {
                if a == from && part_of(&module) == Some(b) {
                    broken.insert(format!("{a:?} names {b:?}: {file} {module}"));
                }
            }
        }
    }
    broken
}

#[test]
fn nothing_breaks_a_rule_that_is_not_listed() {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    let broken = broken(&xtask.join("../dataplane/src"));
    let listed = std::fs::read_to_string(xtask.join("layers.txt")).unwrap();
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    let new: Vec<&String> = broken.difference(&listed).collect();
    let gone: Vec<&String> = listed.difference(&broken).collect();
    assert!(
        new.is_empty() && gone.is_empty(),
        "xtask/layers.txt lists other places than there are\nnew, to be avoided: {new:#?}\nno more, to be struck out: \
            {gone:#?}"
    );
}

#[test]
fn what_code_names_is_found() {
    let text = "//! [`crate::a`]\nuse crate::b::{C, D};\nuse crate::{e, f::{G, H}, i};\nfn x() { crate::j::k() } // \
        crate::l\n\
                use lm_cards::G;\nuse lm_ebpf::Log;\nmod tests {\nuse crate::m;\n}\n";
    let found: Vec<String> = named(&code(text)).into_iter().collect();
    assert_eq!(found, ["b", "e", "f", "i", "j", "lm_cards", "lm_ebpf"]);
}

/// Of another package nothing depends on whether DPDK is compiled, so that what AF_XDP costs is the same.
#[test]
fn dpdk_changes_no_other_package() {
    let packages = |features: &str| -> BTreeSet<String> {
        let line = "tree --locked --package lm-bench --edges normal,build --prefix none --format {p}|{f}";
        let mut tree = Command::new(env!("CARGO"));
        let listed = tree.args(line.split(' ')).arg(features).output().unwrap();
        assert!(
            listed.status.success(),
            "{}",
            String::from_utf8_lossy(&listed.stderr)
        );
        let listed = String::from_utf8(listed.stdout).unwrap();
        let lines = listed
            .lines()
            .map(|line| line.trim_end_matches(" (*)").to_owned());
        lines
            .filter(|line| !["lm-bench ", "lm-dpdk "].iter().any(|own| line.starts_with(own)))
            .collect()
    };
    let (without, with) = (packages("--features="), packages("--features=dpdk"));
    let gone: Vec<_> = without.difference(&with).collect();
    assert!(gone.is_empty() && with.len() > without.len(), "{gone:?}");
    assert!(!without.iter().any(|line| line.starts_with("cc ")), "{without:?}");
}
