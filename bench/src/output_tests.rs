//! Tests of [`super`]: names, refusals, partial files, slow readers, a full disk.

use super::*;
use crate::scratch::Scratch;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::process::Command;

fn go() -> impl FnMut() -> bool {
    || true
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A transfer to this path that begins.
fn begun(path: &Path, force: bool, total_len: Option<u64>) -> Destination {
    let mut output = Output::new(path, force).unwrap();
    output.begin(total_len, None, false).unwrap()
}

#[test]
fn a_file_appears_only_when_complete() {
    let scratch = Scratch::new("output-file");
    let path = scratch.path().join("x.bin");
    let mut output = Output::new(&path, false).unwrap();
    let mut destination = output.begin(Some(6), None, false).unwrap();
    assert!(!destination.in_order());
    destination.write_at(3, b"def", &mut go()).unwrap();
    assert_eq!(
        names(scratch.path()),
        [format!(".x.bin.partial-{}", std::process::id())]
    );
    destination.write_at(0, b"abc", &mut go()).unwrap();
    assert_eq!(destination.finish().unwrap(), path.display().to_string());
    assert_eq!(names(scratch.path()), ["x.bin"]);
    assert_eq!(fs::read(&path).unwrap(), b"abcdef");
}

#[test]
fn nothing_is_overwritten_without_force() {
    let scratch = Scratch::new("output-exists");
    let path = scratch.path().join("x");
    let mut output = Output::new(&path, false).unwrap();
    let mut late = output.begin(Some(3), None, false).unwrap();
    late.write_at(0, b"new", &mut go()).unwrap();
    fs::write(&path, b"old").unwrap();
    // At the start, at a transfer's start, and at its end.
    assert_eq!(Output::new(&path, false).unwrap_err().refusal, Refusal::Exists);
    assert_eq!(
        output.begin(Some(3), None, false).unwrap_err().refusal,
        Refusal::Exists
    );
    let error = late.finish().unwrap_err();
    assert_eq!(error.refusal, Refusal::Exists);
    assert!(error.text.contains("--force"), "{}", error.text);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(scratch.path()), ["x"]);

    let mut destination = begun(&path, true, Some(3));
    destination.write_at(0, b"new", &mut go()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    destination.finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn a_dangling_link_counts_as_existing_and_a_live_one_is_followed() {
    let scratch = Scratch::new("output-link");
    let (link, file) = (scratch.path().join("link"), scratch.path().join("file"));
    symlink(&file, &link).unwrap();
    assert_eq!(Output::new(&link, false).unwrap_err().refusal, Refusal::Exists);
    fs::write(&file, b"old").unwrap();
    let mut destination = begun(&link, true, None);
    destination.write_at(0, b"new", &mut go()).unwrap();
    destination.finish().unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"new");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn a_directory_numbers_its_files() {
    let scratch = Scratch::new("output-directory");
    fs::write(scratch.path().join("transfer-000002"), b"mine").unwrap();
    let mut output = Output::new(scratch.path(), true).unwrap();
    let mut open: Vec<Destination> = (0..3)
        .map(|_| output.begin(Some(1), None, false).unwrap())
        .collect();
    // One number is taken by somebody else before the end, and --force does not apply to chosen names.
    fs::write(scratch.path().join("transfer-000003"), b"theirs").unwrap();
    for destination in &mut open {
        destination.write_at(0, b"x", &mut go()).unwrap();
    }
    for (destination, number) in open.into_iter().zip([1, 4, 5]) {
        let path = numbered(scratch.path(), number);
        assert_eq!(destination.finish().unwrap(), path.display().to_string());
    }
    assert_eq!(fs::read(scratch.path().join("transfer-000002")).unwrap(), b"mine");
    assert_eq!(
        fs::read(scratch.path().join("transfer-000003")).unwrap(),
        b"theirs"
    );
    // A failed transfer's number is free again.
    drop(output.begin(None, None, false).unwrap());
    let next = output.begin(None, None, false).unwrap().finish().unwrap();
    assert!(next.ends_with("transfer-000006"));
}

#[test]
fn places_that_cannot_be_written() {
    let scratch = Scratch::new("output-places");
    for (path, words) in [
        (scratch.path().join("missing/x"), "no such file"),
        (scratch.path().join("missing/"), "does not exist; create it"),
        (PathBuf::from("/proc/self/nothing-here"), "cannot write"),
    ] {
        let error = Output::new(&path, false)
            .and_then(|mut output| output.begin(Some(1), None, false))
            .unwrap_err();
        assert_eq!(error.refusal, Refusal::NotWritable, "{path:?}");
        assert!(
            error.text.contains(words) && error.text.contains("; "),
            "{}",
            error.text
        );
        assert!(
            !error.text.contains("os error") && !error.text.contains('\n'),
            "{}",
            error.text
        );
    }
}

#[test]
fn a_device_is_written_into_and_never_replaced() {
    let mut output = Output::new(Path::new("/dev/null"), true).unwrap();
    assert_eq!(output.concurrent_max(), 1);
    let mut destination = output.begin(Some(3), None, false).unwrap();
    destination.write_at(0, b"abc", &mut go()).unwrap();
    assert_eq!(
        destination.write_at(7, b"abc", &mut go()).unwrap_err().refusal,
        Refusal::NotWritable
    );
    destination.finish().unwrap();
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    let mut full = begun(Path::new("/dev/full"), false, Some(3));
    assert_eq!(
        full.write_at(0, b"abc", &mut go()).unwrap_err().refusal,
        Refusal::DiskFull
    );
}

#[test]
fn long_names_still_have_a_partial_name() {
    let scratch = Scratch::new("output-long");
    let path = scratch.path().join("n".repeat(NAME_LEN_MAX));
    let mut output = Output::new(&path, false).unwrap();
    output.begin(Some(1), None, false).unwrap().finish().unwrap();
    assert!(path.exists());
}

#[test]
fn a_slow_reader_lets_the_engine_run_and_can_be_given_up() {
    let (mut reader, writer) = io::pipe().unwrap();
    let data: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
    let mut destination =
        Destination::stream(std::os::fd::OwnedFd::from(writer).into(), "a pipe".into(), false);
    let mut rounds = 0;
    let mut got = Vec::new();
    // The pipe's 64 KiB fill up; then each round reads a little.
    let result = destination.write_at(0, &data, &mut || {
        rounds += 1;
        let mut some = [0; 10_000];
        let len = reader.read(&mut some).unwrap();
        got.extend_from_slice(&some[..len]);
        true
    });
    result.unwrap();
    assert!(rounds > 10);
    drop(destination);
    reader.read_to_end(&mut got).unwrap();
    assert_eq!(got, data);

    let (reader, writer) = io::pipe().unwrap();
    let mut destination =
        Destination::stream(std::os::fd::OwnedFd::from(writer).into(), "a pipe".into(), false);
    let mut patience = 3;
    let given_up = destination.write_at(0, &data, &mut || {
        patience -= 1;
        patience > 0
    });
    assert!(given_up.is_err());
    drop(reader);
    let error = destination
        .write_at(data.len() as u64, b"x", &mut go())
        .unwrap_err();
    assert!(error.text.contains("nobody reads a pipe"), "{}", error.text);
}

/// Needs a mount of its own: runs itself again in a mount namespace that goes away with the process.
#[test]
fn a_full_disk_is_told_before_and_during_a_transfer() {
    const INSIDE: &str = "LM_TEST_TINY_TMPFS";
    if let Some(directory) = std::env::var_os(INSIDE) {
        return full_disk(Path::new(&directory));
    }
    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "needs root");
        println!("SKIPPED: mounting a small tmpfs needs root");
        return;
    }
    let scratch = Scratch::new("output-full");
    let output = Command::new("unshare")
        .args([
            "--mount",
            "sh",
            "-c",
            r#"mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" --exact "$3""#,
            "sh",
        ])
        .arg(scratch.path())
        .arg(std::env::current_exe().unwrap())
        .arg("output::tests::a_full_disk_is_told_before_and_during_a_transfer")
        .env(INSIDE, scratch.path())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

fn full_disk(directory: &Path) {
    let mut output = Output::new(directory, false).unwrap();
    let error = output.begin(Some(65 << 10), None, false).unwrap_err();
    assert_eq!(error.refusal, Refusal::DiskFull);
    assert!(error.text.contains("64.0 KiB are free"), "{}", error.text);
    assert!(names(directory).is_empty());
    let mut destination = output.begin(None, None, false).unwrap();
    destination.write_at(0, &[7; 60 << 10], &mut go()).unwrap();
    let error = destination
        .write_at(60 << 10, &[7; 60 << 10], &mut go())
        .unwrap_err();
    assert_eq!(error.refusal, Refusal::DiskFull);
    assert!(error.text.contains("4.00 KiB are free"), "{}", error.text);
    drop(destination);
    assert!(names(directory).is_empty());
}
