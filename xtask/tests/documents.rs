//! What can be checked of the documents: their size, the files, numbers and places that they name.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longest line in characters, but in tables and code.
const LINE_LEN_MAX: usize = 130;
/// Longest cell of a table, in characters.
const CELL_LEN_MAX: usize = 200;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All documents.
fn documents() -> Vec<String> {
    let listed = Command::new("git")
        .current_dir(root())
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "*.md"])
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let is_there = |path: &&str| root().join(path).exists();
    let found: Vec<_> = listed.lines().filter(is_there).map(str::to_owned).collect();
    assert!(found.len() > 10, "{found:?}");
    found
}

/// Lines that are no code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

fn cells(line: &str) -> Vec<String> {
    let line = line.replace("\\|", "/");
    let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
    inner.split('|').map(|cell| cell.trim().to_owned()).collect()
}

/// What is between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Dated records of measurements, in `bench/notebook`, have no bound.
#[test]
fn documents_stay_short() {
    let mut all = 0;
    for path in documents()
        .iter()
        .filter(|path| !path.starts_with("bench/notebook/"))
    {
        let len = read(path).len();
        let most = match path.as_str() {
            "README.md" | "CONTRIBUTING.md" => 6_000,
            "ARCHITECTURE.md" => 10_240,
            _ => 25_000,
        };
        assert!(len <= most, "{path} has {len} bytes, and may have {most}");
        all += len;
    }
    assert!(all <= 150_000, "the documents have {all} bytes together");
}

#[test]
fn lines_and_cells_stay_short() {
    for path in documents() {
        for (number, line) in prose(&read(&path)) {
            if line.starts_with('|') {
                let longest = cells(line).iter().map(|cell| cell.chars().count()).max();
                assert!(
                    longest <= Some(CELL_LEN_MAX),
                    "{path}:{number}: a cell of {longest:?}"
                );
            } else {
                let len = line.chars().count();
                assert!(len <= LINE_LEN_MAX, "{path}:{number}: {len} characters");
            }
        }
    }
}

#[test]
fn each_step_of_the_datas_path_names_files_that_exist() {
    let text = read("ARCHITECTURE.md");
    let (_, path) = text.split_once("\n## The data's path\n").unwrap();
    let path = path.split("\n## ").next().unwrap();
    for step in 1..=9 {
        let (_, from_here) = path.split_once(&format!("\n{step}. ")).unwrap();
        let next = format!("\n{}. ", step + 1);
        let step_text = from_here
            .split(&next)
            .next()
            .unwrap()
            .split("\n\n")
            .next()
            .unwrap();
        let files: Vec<&str> = quoted(step_text).filter(|name| name.contains('/')).collect();
        assert!(!files.is_empty(), "step {step} names no file");
        for file in files {
            assert!(root().join(file).is_file(), "step {step}: there is no {file}");
        }
    }
}

/// What an expression of the code comes to, in nanoseconds where it is a time.
fn value(code: &str, expression: &str) -> Option<u128> {
    let number = |text: &str| text.trim().replace('_', "").parse::<u128>().ok();
    let factor = |text: &str| {
        let text = text.trim().split(" as ").next().unwrap_or_default();
        if let Some(call) = text.strip_prefix("Duration::from_") {
            let (unit, count) = call.strip_suffix(')')?.split_once('(')?;
            let nanoseconds = match unit {
                "secs" => 1_000_000_000,
                "millis" => 1_000_000,
                "micros" => 1_000,
                _ => return None,
            };
            return Some(number(count)? * nanoseconds);
        }
        if let Some((number_of, shift)) = text.split_once("<<") {
            return Some(number(number_of)? << number(shift)?);
        }
        number(text).or_else(|| constant(code, text))
    };
    expression.split(" * ").map(factor).product()
}

fn constant(code: &str, name: &str) -> Option<u128> {
    let definition = format!("const {name}: ");
    let mut found = code.split(&definition).skip(1);
    let (only, None) = (found.next()?, found.next()) else {
        return None;
    };
    let (_, expression) = only.split_once(';')?.0.split_once('=')?;
    value(code, expression)
}

/// A number with its unit, as documents have it.
fn told(text: &str) -> Option<u128> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let unit = match unit {
        "" => 1,
        "µs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        _ => return None,
    };
    Some(number.parse::<u128>().ok()? * unit)
}

#[test]
fn numbers_are_those_of_the_code() {
    let mut compared = 0;
    for path in documents() {
        let text = read(&path);
        let mut is_of_constants = false;
        for (number, line) in prose(&text) {
            if !line.starts_with('|') {
                is_of_constants = false;
                continue;
            }
            let cells = cells(line);
            if cells.get(1).is_some_and(|cell| cell == "constant") {
                is_of_constants = true;
            } else if is_of_constants && !cells[0].starts_with('-') {
                let (name, file) = (cells[1].trim_matches('`'), cells[2].trim_matches('`'));
                let here = constant(&read(file), name);
                assert!(
                    here.is_some(),
                    "{path}:{number}: {file} has no one {name} that can be read"
                );
                assert_eq!(told(&cells[0]), here, "{path}:{number}: {name} of {file}");
                compared += 1;
            }
        }
    }
    assert!(compared > 40, "{compared}");
}

/// A heading's name in links, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_lead_somewhere() {
    for path in documents() {
        let text = read(&path);
        for (number, line) in prose(&text) {
            for link in line.split("](").skip(1) {
                let link = link.split(')').next().unwrap();
                if link.starts_with("http") {
                    continue;
                }
                let (file, place) = link.split_once('#').unwrap_or((link, ""));
                let folder = Path::new(&path).parent().unwrap();
                let target = if file.is_empty() {
                    PathBuf::from(&path)
                } else {
                    folder.join(file)
                };
                assert!(root().join(&target).exists(), "{path}:{number}: {link}");
                if !place.is_empty() {
                    let target = read(&target);
                    let headings = prose(&target).filter(|(_, line)| line.starts_with('#'));
                    let anchors: BTreeSet<String> = headings.map(|(_, line)| anchor(line)).collect();
                    assert!(anchors.contains(place), "{path}:{number}: {link}");
                }
            }
        }
    }
}

#[test]
fn expressions_are_understood() {
    let code = "const A: u32 = 1_024;\nconst B: u64 = 2 * A as u64;\nconst C: Duration = \
        Duration::from_millis(25);\nconst D: u64 = 4 << 20;\n";
    let found = ["A", "B", "C", "D", "E"].map(|name| constant(code, name));
    assert_eq!(
        found,
        [Some(1024), Some(2048), told("25 ms"), told("4 MiB"), None]
    );
    assert_eq!(anchor("## The data's path"), "the-datas-path");
}

/// Where packets and calls of others are handled.
const REACHED: [&str; 8] = [
    "admission/src",
    "bench/src/output",
    "bench/src/recv.rs",
    "bench/src/transfer",
    "dataplane/src",
    "ebpf/src",
    "lm-protocol/src",
    "realtime/src",
];
const GROWING: [&str; 9] = [
    "ArrayQueue<",
    "BTreeMap<",
    "BTreeSet<",
    "BinaryHeap<",
    "HashMap<",
    "HashSet<",
    "Sender<",
    "Vec<",
    "VecDeque<",
];

/// Each field of a struct there that may grow, as `file: field`.
fn growing_fields() -> BTreeSet<String> {
    let listed = Command::new("git")
        .current_dir(root())
        .arg("ls-files")
        .args(REACHED)
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let is_product =
        |path: &&str| path.ends_with(".rs") && !path.contains("test") && !path.contains("fuzzing");
    let mut found = BTreeSet::new();
    for path in listed.lines().filter(is_product) {
        let text = read(path);
        let mut in_struct = false;
        for line in text.split("\n#[cfg(test)]\nmod tests {").next().unwrap().lines() {
            let words = line.trim_start();
            in_struct |= line.ends_with('{') && (words.starts_with("struct ") || words.contains(" struct "));
            in_struct &= !words.starts_with('}');
            let field = words
                .split_once(": ")
                .filter(|_| in_struct && !words.starts_with("//"));
            if let Some((name, kind)) = field
                && GROWING.iter().any(|growing| kind.contains(growing))
            {
                found.insert(format!("{path}: {}", name.rsplit(' ').next().unwrap()));
            }
        }
    }
    assert!(found.len() > 100, "{found:?}");
    found
}

/// `file: field, field` becomes one entry a field.
fn entries(text: &str) -> Vec<String> {
    let (file, fields) = text
        .split_once(": ")
        .unwrap_or_else(|| panic!("`{text}` is not `file: field`"));
    fields
        .split(", ")
        .map(|field| format!("{file}: {field}"))
        .collect()
}

/// What others can make grow has a row with its bound and a test; all else that may grow is listed in xtask/bounds.txt.
#[test]
fn each_growing_field_has_a_bound_or_grows_by_the_process_itself() {
    let threats = read("docs/security.md");
    let (_, table) = threats.split_once("\n## Bounds\n").expect("a table of bounds");
    let rows: Vec<_> = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(cells)
        .collect();
    let names = read("xtask/test-names.txt");
    let mut bounded = BTreeSet::new();
    for row in &rows {
        for entry in entries(quoted(&row[0]).next().unwrap()) {
            let (file, field) = entry.split_once(": ").unwrap();
            assert!(
                read(file).contains(field),
                "docs/security.md: {file} has no {field}"
            );
            assert!(
                bounded.insert(entry.clone()),
                "docs/security.md has {entry} twice"
            );
        }
        let tests = row.last().unwrap();
        assert!(
            tests.contains('`'),
            "docs/security.md: no test reads the bound of {}",
            row[0]
        );
        for test in quoted(tests) {
            assert!(names.contains(test), "docs/security.md: there is no test {test}");
        }
    }
    let others = read("xtask/bounds.txt");
    let others: BTreeSet<_> = others
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(entries)
        .collect();
    let growing = growing_fields();
    let listed: BTreeSet<_> = bounded.union(&others).cloned().collect();
    let missing: Vec<_> = growing.difference(&listed).cloned().collect();
    let gone: Vec<_> = others.difference(&growing).cloned().collect();
    assert!(
        missing.is_empty(),
        "a row of docs/security.md, or a line of xtask/bounds.txt, for:\n{}",
        missing.join("\n")
    );
    assert!(
        gone.is_empty(),
        "xtask/bounds.txt has what is not there:\n{}",
        gone.join("\n")
    );
}
