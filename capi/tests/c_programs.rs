//! Programs in C, compiled as a user would and run between two hosts.

#[path = "../../dataplane/tests/bed/mod.rs"]
mod bed;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use bed::{Namespace, Pair};

const SOURCES: &str = env!("CARGO_MANIFEST_DIR");

/// Where the library is: beside this program.
fn libraries() -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    program.parent().expect("a folder").to_owned()
}

fn success(output: &Output, what: &str) -> String {
    let (said, error) = (&output.stdout, &output.stderr);
    let [said, error] = [said, error].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(
        output.status.success(),
        "{what}: {}\n{said}{error}",
        output.status
    );
    said
}

/// Compiles a program and links it as the words say.
fn compiled(source: &str, link: &[&str]) -> PathBuf {
    let source = Path::new(SOURCES).join(source);
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(source.file_stem().expect("a name"));
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread"]);
    command.args(["-I", SOURCES, "-o"]).arg(&program).arg(&source);
    let output = command.args(link).output().expect("a C compiler");
    success(&output, "cc");
    program
}

/// A program that is ended when it is dropped.
struct Running(Child);

impl Running {
    /// Starts it in a namespace, and waits until it is ready.
    fn start(namespace: &Namespace, program: &Path, words: &[&str]) -> Running {
        let start = || Command::new(program).args(words).stdout(Stdio::piped()).spawn();
        let mut child = namespace.run(start).expect("it was compiled");
        let mut line = String::new();
        let said = child.stdout.as_mut().expect("piped");
        BufReader::new(said).read_line(&mut line).expect("text");
        assert_eq!(line, "ready\n");
        Running(child)
    }

    /// What it says until it ends.
    fn rest(&mut self) -> String {
        let mut said = String::new();
        let output = self.0.stdout.as_mut().expect("piped");
        output.read_to_string(&mut said).expect("text");
        said
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(namespace: &Namespace, program: &Path, words: &[&str]) -> String {
    let output = namespace.run(|| Command::new(program).args(words).output());
    success(&output.expect("it was compiled"), &format!("{words:?}"))
}

#[test]
fn the_header_is_c_and_cplusplus() {
    let compiles = |compiler: &str, words: &[&str]| {
        let mut command = Command::new(compiler);
        command.args([
            "-fsyntax-only",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-DLM_RT_PAPER_NAMES",
        ]);
        command.args(words).arg(Path::new(SOURCES).join("lm_rt.h"));
        match command.output() {
            Ok(output) => drop(success(&output, compiler)),
            Err(error) => assert_eq!(compiler, "c++", "{error}"),
        }
    };
    compiles("cc", &["-std=c11", "-x", "c"]);
    // C++ need not be there.
    compiles("c++", &["-std=c++11", "-x", "c++"]);
}

/// A program that was linked with this library finds no other one in its place.
#[test]
fn the_library_says_which_interface_it_has() {
    let library = libraries().join("liblm_rt.so");
    let output = Command::new("readelf").arg("-d").arg(library).output();
    let said = success(&output.expect("binutils"), "readelf");
    let named = said.lines().find(|line| line.contains("(SONAME)"));
    assert!(
        named.is_some_and(|line| line.contains("[liblm_rt.so.0]")),
        "{named:?}"
    );
    let header = std::fs::read_to_string(Path::new(SOURCES).join("lm_rt.h")).expect("the header");
    let unsized_ones: Vec<_> = { header.split("\nstruct ").skip(1) }
        .filter(|one| !one.contains("\n    size_t size;") && !one.starts_with("lm_rt_percentiles"))
        .map(|one| one.lines().next())
        .collect();
    assert!(unsized_ones.is_empty(), "{unsized_ones:?} cannot grow");
}

#[test]
fn messages_of_every_length_and_every_error() {
    if !bed::root() {
        return;
    }
    let folder = libraries();
    let folder = folder.to_str().expect("a name in UTF-8");
    // What ldconfig(8) makes.
    let link = Path::new(env!("CARGO_TARGET_TMPDIR")).join("liblm_rt.so.0");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(Path::new(folder).join("liblm_rt.so"), &link).expect("a link");
    let search = format!("-Wl,-rpath,{}", env!("CARGO_TARGET_TMPDIR"));
    let program = compiled("tests/c/sockets.c", &["-L", folder, "-llm_rt", &search]);
    let pair = Pair::new(2);
    pair.a.ip("link add vc type veth peer name vd");
    pair.a.ip("address add 10.78.0.1/24 dev vc");
    pair.a.ip("link set vd up");
    pair.a.ip("link set vc up");
    let refuses = Running::start(&pair.b, &program, &["refuse", "vb"]);
    assert_eq!(run(&pair.a, &program, &["refused", "va"]), "refused\n");
    drop(refuses);
    let _echo = Running::start(&pair.b, &program, &["echo", "vb"]);
    let said = run(&pair.a, &program, &["check", "va", "vc"]);
    assert_eq!(said, "all as it should be\n");
}

/// The numbers in a line that begins so.
fn numbers(said: &str, with: &str) -> Vec<u64> {
    let line = said.lines().find(|line| line.contains(with)).expect(said);
    let words = line.split(|letter: char| !letter.is_ascii_digit());
    words.filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn the_loop_of_the_example_runs_at_1_khz_and_outlives_its_other_end() {
    if !bed::root() {
        return;
    }
    let library = libraries().join("liblm_rt.a");
    let library = library.to_str().expect("a name in UTF-8");
    let program = compiled("examples/loop.c", &[library, "-lm", "-ldl"]);
    let pair = Pair::new(2);
    let answer = || Running::start(&pair.b, &program, &["answer", "vb"]);
    let first = answer();
    let begun = Instant::now();
    let said = run(&pair.a, &program, &["ask", "va", "10.77.0.2", "1000"]);
    assert!(begun.elapsed() > Duration::from_secs(1));
    let counts = numbers(&said, " states sent");
    // What this machine has no time for is left out, or late.
    assert!(
        counts[0] > 800 && counts[1] > 200 && counts[1] <= counts[0],
        "{said}"
    );
    let trips = numbers(&said, "round trip");
    assert!(
        trips.is_sorted() && (1000..1_000_000_000).contains(&trips[1]),
        "{said}"
    );
    let in_histogram: u64 = said
        .lines()
        .filter(|line| line.starts_with("under"))
        .map(|line| numbers(line, "us")[1])
        .sum();
    assert_eq!(in_histogram, counts[1], "{said}");
    // The one that answers ends when it has answered, and begins again.
    drop(first);
    let first = answer();
    let mut asking = Running::start(&pair.a, &program, &["ask", "va", "10.77.0.2", "3500"]);
    drop(first);
    let _second = answer();
    let said = asking.rest();
    let counts = numbers(&said, " states sent");
    assert!(counts[2] > 3000, "the last of 3500 that was answered: {said}");
}
