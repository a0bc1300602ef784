//! What a result file says about the machine it was measured on, and how it is written.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::workspace::{root, said_by};

/// Kernel, processor, cores, time, command and commit of this measurement.
pub fn describe() -> Value {
    let processor = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let now = std::time::SystemTime::now();
    let since_epoch = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    json!({
        "kernel": kernel.trim(),
        "processor": processor,
        "cores": cores(),
        "unix_time_s": since_epoch.as_secs(),
        "date": humantime::format_rfc3339_seconds(now).to_string(),
        "command": command_line(std::env::args().skip(1)),
        "revision": revision(),
    })
}

/// What was typed, without where its results went.
pub fn command_line(mut arguments: impl Iterator<Item = String>) -> String {
    let mut line = vec!["cargo xtask".to_owned()];
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => {
                arguments.next();
            }
            other if other.starts_with("--json=") => {}
            _ => line.push(argument),
        }
    }
    line.join(" ")
}

/// The sum of fields of a process's `status` that count KiB: VmRSS, HugetlbPages and so on.
pub fn status_kib(pid: u32, names: &[&str]) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let field = |name: &&str| kib_in(&text, name).with_context(|| format!("{path} does not tell {name}"));
    names.iter().map(field).sum()
}

fn kib_in(status: &str, name: &str) -> Option<u64> {
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The compiler's version, by its own words.
pub fn rustc() -> Option<String> {
    let said = said_by(Command::new("rustc").arg("--version")).ok()?;
    Some(said.trim().to_owned())
}

/// The commit of this tree, `-dirty` where it is not quite that.
pub fn revision() -> Option<String> {
    let mut git = Command::new("git");
    let git = git.current_dir(root()).args(["describe", "--always", "--dirty"]);
    Some(said_by(git).ok()?.trim().to_owned())
}

/// Two different cores for a sender and a receiver; the same one twice on a machine with one.
pub fn two_cores() -> [usize; 2] {
    let allowed = rustix::thread::sched_getaffinity(None).ok();
    let mut cores = (0..1024).filter(|&core| allowed.as_ref().is_some_and(|set| set.is_set(core)));
    let first = cores.next().unwrap_or(0);
    [first, cores.next().unwrap_or(first)]
}

/// A result file that is written whole or not at all. Opened before anything is measured: that it cannot be
/// written is better learnt then than after ten minutes.
#[derive(Debug)]
pub struct ResultFile {
    path: PathBuf,
    partial: PathBuf,
    file: File,
}

impl ResultFile {
    /// Makes `PATH.part` beside the file, in place of what has that name: a link is not followed.
    pub fn create(path: &Path) -> Result<ResultFile> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".part");
        let partial = PathBuf::from(partial);
        let _ = std::fs::remove_file(&partial);
        let file = File::create_new(&partial).with_context(|| {
            format!(
                "cannot write {}; name a file in a folder that exists",
                path.display()
            )
        })?;
        Ok(ResultFile {
            path: path.to_owned(),
            partial,
            file,
        })
    }

    /// Writes the result and gives the file its name.
    pub fn write(mut self, value: &Value) -> Result<()> {
        (|| {
            self.file.write_all(format!("{value:#}\n").as_bytes())?;
            std::fs::rename(&self.partial, &self.path)
        })()
        .with_context(|| format!("cannot write {}", self.path.display()))?;
        eprintln!("kept in {}", self.path.display());
        Ok(())
    }
}

impl Drop for ResultFile {
    fn drop(&mut self) {
        // After a successful write there is no such file any more.
        let _ = std::fs::remove_file(&self.partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_follows_no_link() {
        let folder = std::env::temp_dir().join(format!("lm-result-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let [victim, result, partial] = ["victim", "r.json", "r.json.part"].map(|name| folder.join(name));
        std::fs::write(&victim, "kept").unwrap();
        for link in [&result, &partial] {
            std::os::unix::fs::symlink(&victim, link).unwrap();
        }
        ResultFile::create(&result)
            .unwrap()
            .write(&serde_json::json!(1))
            .unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "kept");
        assert_eq!(std::fs::read_to_string(&result).unwrap(), "1\n");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn memory_is_that_of_all_pages() {
        let text = "Name:\tlm-recv\nVmHWM:\t   14000 kB\nVmRSS:\t   13000 kB\nHugetlbPages:\t    4096 kB\n";
        assert_eq!(
            ["VmRSS", "HugetlbPages", "Vm", "Name"].map(|name| kib_in(text, name)),
            [Some(13_000), Some(4096), None, None]
        );
        assert!(status_kib(std::process::id(), &["VmRSS", "HugetlbPages"]).unwrap() > 0);
        assert!(
            status_kib(std::process::id(), &["VmNothing"])
                .unwrap_err()
                .to_string()
                .contains("VmNothing")
        );
    }

    #[test]
    fn a_command_is_told_without_its_files() {
        let words = [
            "bench",
            "core",
            "--json",
            "x.json",
            "--pairs",
            "3",
            "--json=y.json",
        ];
        let line = command_line(words.map(str::to_owned).into_iter());
        assert_eq!(line, "cargo xtask bench core --pairs 3");
    }

    #[test]
    fn result_files_appear_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("xtask-result-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("r.json");
        drop(ResultFile::create(&path).unwrap());
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        ResultFile::create(&path)
            .unwrap()
            .write(&json!({"a": 1}))
            .unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\n  \"a\": 1\n}\n");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
        let error = ResultFile::create(Path::new("/no/such/folder/r.json")).unwrap_err();
        assert!(format!("{error:#}").contains("/no/such/folder/r.json"));
    }
}
