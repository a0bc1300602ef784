//! What the guest runs: our own programs, as this machine builds them, Debian's `ip`, `tc`, `ethtool` and busybox, and kernel
//! modules. All of it is put into a folder as it shall lie in the guest, and busybox packs that for the kernel.

use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::protocol::{MODULES_DIR, PLAN_PATH, Plan};
use super::qemu::loader;
use super::unavailable::{self, Unavailable};
use crate::bed::Launch;
use crate::workspace::{cargo, run, target_dir};

/// Crates whose programs are in the guest.
const PACKAGES: [&str; 2] = ["lm-bench", "xtask"];
const PROGRAMS: [&str; 5] = ["lm-bench", "lm-check", "lm-recv", "lm-send", "xtask"];
/// Debian's programs, which are linked with Debian's libraries.
const TOOLS: [(&str, &str); 3] = [("ip", "usr/sbin"), ("tc", "usr/sbin"), ("ethtool", "usr/sbin")];
/// Where those and their libraries lie in the guest: its `/lib` has this machine's, which ours are linked with.
const DEBIAN: &str = "usr/lib/debian";
/// Modules that the checks and the tools use where the kernel has them: a bed's bridge, queueing disciplines, the impairment box.
const USEFUL: [&str; 6] = ["bridge", "tun", "dummy", "sch_ingress", "cls_bpf", "act_bpf"];
/// Packs the folder `$1` into the file `$2` by the busybox `$0`: the same files make the same bytes.
const PACK: &str = "cd \"$1\" && find . -exec touch -hd @0 {} + && \
    find . | LC_ALL=C sort | \"$0\" cpio -o -H newc -R 0:0 --ignore-devno --renumber-inodes -F \"$2\"";

/// Which builds of our programs the guest gets. Optimised ones: in software emulation others fall behind their own traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Build {
    /// The engine as it is released, with what `cargo xtask bench instructions` builds, too.
    #[default]
    Counted,
    /// For measurements.
    Release,
}

/// Builds our programs; the folder they are in.
pub(super) fn build(build: Build) -> Result<PathBuf> {
    let profile = match build {
        Build::Counted => "counted",
        Build::Release => "release",
    };
    eprintln!("building the guest's programs");
    run(cargo()
        .args(["build", "--quiet", "--bins", "--lib", "--profile", profile])
        .args(PACKAGES.iter().flat_map(|&package| ["--package", package])))?;
    Ok(target_dir()?.join(profile))
}

/// The one folder in a folder.
pub(super) fn only_entry(folder: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    ensure!(
        entries.len() == 1,
        "{} has not one folder: {entries:?}",
        folder.display()
    );
    Ok(entries[0].clone())
}

/// The files of modules and of those they need, each after what it needs, by depmod's `modules.dep` in a kernel's folder. Built-in ones are left out.
pub(super) fn load_order(folder: &Path, required: &[&str]) -> Result<Vec<PathBuf>> {
    let list = folder.join("modules.dep");
    let list = std::fs::read_to_string(&list).with_context(|| {
        format!(
            "cannot read {}; name the kernel's folder in /lib/modules (--modules DIR), and run depmod if it has none",
            list.display()
        )
    })?;
    // Debian's packages do not say what the kernel itself has: the check of the devices knows better.
    let built_in = std::fs::read_to_string(folder.join("modules.builtin")).ok();
    let is_called = |path: &str, name: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        let stem = file.split(".ko").next().unwrap_or(file);
        // To the kernel they are the same.
        stem.replace('-', "_") == name
    };
    let mut files: Vec<PathBuf> = Vec::new();
    for name in required.iter().chain(&USEFUL) {
        let lines = list.lines().filter_map(|line| line.split_once(':'));
        let Some((file, needed)) = lines.into_iter().find(|(file, _)| is_called(file, name)) else {
            ensure!(
                USEFUL.contains(name)
                    || built_in
                        .iter()
                        .all(|list| list.lines().any(|line| is_called(line, name))),
                "the kernel has no module {name}; is --modules the folder of this kernel?"
            );
            continue;
        };
        for file in needed.split_whitespace().rev().chain([file]) {
            let file = folder.join(file);
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    Ok(files)
}

/// The guest's files, below a folder of this machine.
pub(super) struct Image<'a> {
    root: PathBuf,
    tools: &'a Path,
}

impl Image<'_> {
    /// All files of the guest, in a new folder; `tools` has Debian's programs.
    pub(super) fn new<'a>(
        root: PathBuf,
        tools: &'a Path,
        programs: &Path,
        plan: &Plan,
        modules: &[PathBuf],
        with: &[PathBuf],
    ) -> Result<Image<'a>> {
        let image = Image { root, tools };
        for folder in [
            "proc",
            "sys",
            "dev",
            "run",
            "tmp",
            "root",
            "var",
            "tests",
            MODULES_DIR,
        ] {
            image.make(folder)?;
        }
        // Debian's layout: programs and libraries are below /usr, and iproute2 keeps its namespaces in /var/run.
        for (link, to) in [
            ("sbin", "usr/sbin"),
            ("lib", "usr/lib"),
            ("lib64", "usr/lib64"),
            ("var/run", "/run"),
            ("init", "/bin/xtask"),
        ] {
            symlink(to, image.make_for(link)?).with_context(|| format!("cannot link {link}"))?;
        }
        for name in PROGRAMS {
            image.put_ours("bin", &programs.join(name))?;
        }
        for path in with {
            image.put_ours("tests", path)?;
        }
        image.put_ours("bin", &image.tool("busybox")?)?;
        // Not busybox's shell, which takes its own `ip` before the one on the path.
        image.put_debians("bin/sh", &image.tool("dash").or_else(|_| image.tool("sh"))?)?;
        for (name, folder) in TOOLS {
            image.put_debians(&format!("{folder}/{name}"), &image.tool(name)?)?;
        }
        for module in modules {
            image.put_module(module)?;
        }
        image.write(
            PLAN_PATH,
            &serde_json::to_string_pretty(plan).context("cannot write the plan")?,
        )?;
        Ok(image)
    }

    /// Writes the archive; its length in bytes.
    pub(super) fn pack(&self, archive: &Path) -> Result<u64> {
        let pack = Launch::new("sh").args(["-c", PACK]).arg(self.tool("busybox")?);
        let packed = pack.arg(&self.root).arg(archive).spawn()?.finish();
        packed.with_context(|| format!("cannot write {}; is the disk full?", archive.display()))?;
        Ok(archive.metadata().map_or(0, |metadata| metadata.len()))
    }

    /// A program in the unpacked packages.
    fn tool(&self, name: &str) -> Result<PathBuf> {
        tool(self.tools, name)
    }

    fn make(&self, folder: &str) -> Result<PathBuf> {
        let path = self.root.join(folder.trim_start_matches('/'));
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }

    /// A file's path, with the folders above it.
    fn make_for(&self, path: &str) -> Result<PathBuf> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok(self.make(folder)?.join(name))
    }

    fn write(&self, path: &str, content: impl AsRef<[u8]>) -> Result<()> {
        let path = self.make_for(path)?;
        std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    }

    /// A copy of a file of this machine in a folder, under its name.
    fn put(&self, folder: &str, file: &Path) -> Result<()> {
        let to = self.make(folder)?.join(name_of(file)?);
        std::fs::copy(file, &to)
            .map(drop)
            .with_context(|| format!("cannot copy {} to {}", file.display(), to.display()))
    }

    /// A program that was built here, with this machine's loader and libraries at the places that are written in it.
    fn put_ours(&self, folder: &str, program: &Path) -> Result<()> {
        let root = Path::new("/");
        // A program that is linked statically has none.
        for library in libraries(root, program).unwrap_or_default() {
            self.put("usr/lib/x86_64-linux-gnu", &library)?;
        }
        self.put("usr/lib64", Path::new(&loader(root)?[0]))?;
        // Line tables are most of it, and the emulated machine would have to unpack them.
        let to = self.make(folder)?.join(name_of(program)?);
        let strip = Launch::new("strip")
            .args(["--strip-debug", "-o"])
            .args([&*to, program]);
        match strip.spawn().and_then(|strip| strip.finish()) {
            Ok(_) => Ok(()),
            Err(_) => self.put(folder, program),
        }
    }

    /// A program of Debian's, started by Debian's loader with Debian's libraries, which may be newer than this machine's or older.
    fn put_debians(&self, path: &str, program: &Path) -> Result<()> {
        for library in libraries(self.tools, program)? {
            self.put(&format!("{DEBIAN}/lib"), &library)?;
        }
        let loader = PathBuf::from(&loader(self.tools)?[0]);
        self.put(DEBIAN, &loader)?;
        self.put(DEBIAN, program)?;
        let start = format!(
            "#!/bin/busybox sh\nexec /{DEBIAN}/{} --library-path /{DEBIAN}/lib /{DEBIAN}/{} \"$@\"\n",
            name_of(&loader)?.display(),
            name_of(program)?.display()
        );
        self.write(path, start)?;
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(self.make_for(path)?, executable)
            .with_context(|| format!("cannot make {path} executable"))
    }

    /// A module under its name, decompressed.
    fn put_module(&self, file: &Path) -> Result<()> {
        let (tool, word) = match file.extension().and_then(OsStr::to_str) {
            Some("xz") => (self.tool("busybox")?, "xzcat"),
            Some("zst") => (PathBuf::from("zstd"), "-dcq"),
            _ => return self.put(MODULES_DIR, file),
        };
        let unreadable = || format!("cannot read the module {}", file.display());
        let output = Command::new(tool)
            .arg(word)
            .arg(file)
            .output()
            .with_context(unreadable)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {}", unreadable(), said.trim());
        self.write(
            &format!("{MODULES_DIR}/{}", name_of(file)?.display()),
            output.stdout,
        )
    }
}

fn name_of(file: &Path) -> Result<&OsStr> {
    file.file_name()
        .with_context(|| format!("{} has no name", file.display()))
}

fn tool(tools: &Path, name: &str) -> Result<PathBuf> {
    let folders = ["usr/bin", "usr/sbin", "bin", "sbin"].map(|folder| tools.join(folder).join(name));
    let found = folders.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| {
        Unavailable(format!(
            "the guest's `{name}` is missing; install busybox-static, iproute2 and ethtool, or let Debian's be fetched"
        ))
        .into()
    })
}

/// Where the guest's tools come from: the cache, or this machine itself where nothing can be fetched and nothing else would be.
pub(super) fn tools(fetched: Result<PathBuf>, all_else_is_there: bool) -> Result<PathBuf> {
    match fetched {
        Err(error) if all_else_is_there && unavailable::reason(&error).is_some() => {
            eprintln!("taking ip, tc, ethtool and busybox of this machine: {error:#}");
            Ok(PathBuf::from("/"))
        }
        other => other,
    }
}

/// The libraries of a program that is linked with those below `root`.
fn libraries(root: &Path, program: &Path) -> Result<Vec<PathBuf>> {
    let words = loader(root)?;
    let list = Launch::new(&words[0])
        .args(&words[1..])
        .arg("--list")
        .arg(program);
    let output = list.time_limit(Duration::from_secs(20)).spawn()?.finish();
    let output = output.with_context(|| format!("cannot list the libraries of {}", program.display()))?;
    Ok(listed(&output.stdout))
}

/// The loader's list: lines of `NAME => PATH (ADDRESS)`; what has no path is the kernel's or the loader itself.
fn listed(text: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let (name, rest) = line.split_once(" => ")?;
        let (path, _) = rest.rsplit_once(" (")?;
        (!name.contains('/')).then(|| PathBuf::from(path))
    };
    text.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bed::leftovers::temporary_folder;

    #[test]
    fn the_loaders_list_is_read() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibmnl.so.0 => /cache dir/usr/lib/x86_64-linux-gnu/libmnl.so.0 (0x00007f1)\n\
                    \t/lib64/ld-linux-x86-64.so.2 => /cache/ld.so (0x00007f2)\n\
                    \tlibgone.so => not found\n";
        let path = PathBuf::from("/cache dir/usr/lib/x86_64-linux-gnu/libmnl.so.0");
        assert_eq!(listed(text), [path]);
    }

    #[test]
    fn the_machines_own_tools_stand_in() {
        let fails = || Err(Unavailable::command("apt-get").into());
        assert_eq!(tools(fails(), true).unwrap(), Path::new("/"));
        assert!(tools(fails(), false).is_err());
        assert!(tools(Err(anyhow::anyhow!("a defect")), true).is_err());
        assert_eq!(tools(Ok("/cache".into()), true).unwrap(), Path::new("/cache"));
        let error = tool(Path::new("/nowhere"), "ip").unwrap_err();
        assert!(
            super::super::skip_reason(&error)
                .unwrap()
                .contains("`ip` is missing")
        );
        // What a bed on this machine needs as well: its loader and its C library.
        let libraries = libraries(Path::new("/"), &tool(Path::new("/"), "ip").unwrap()).unwrap();
        assert!(
            libraries.iter().any(|path| path.ends_with("libc.so.6")),
            "{libraries:?}"
        );
    }

    #[test]
    fn modules_come_after_what_they_depend_on() {
        let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "modules").unwrap();
        let error = load_order(&folder, &["igb"]).unwrap_err().to_string();
        assert!(
            error.contains("modules.dep") && error.contains("--modules DIR"),
            "{error}"
        );
        let list = "kernel/igb.ko.xz: kernel/i2c-algo-bit.ko.xz kernel/dca.ko\nkernel/dca.ko:\n\
                    kernel/i2c-algo-bit.ko.xz: kernel/dca.ko\nkernel/tun.ko.zst:\n";
        std::fs::write(folder.join("modules.dep"), list).unwrap();
        let order = |required: &[&str]| load_order(&folder, required);
        let files = |names: &[&str]| {
            names
                .iter()
                .map(|name| folder.join("kernel").join(name))
                .collect::<Vec<_>>()
        };
        // `tun` is useful; the others of that kind are not there.
        let all = files(&["dca.ko", "i2c-algo-bit.ko.xz", "igb.ko.xz", "tun.ko.zst"]);
        assert_eq!(order(&["igb", "dca"]).unwrap(), all);
        assert_eq!(
            order(&["dca", "i2c_algo_bit"]).unwrap(),
            files(&["dca.ko", "i2c-algo-bit.ko.xz", "tun.ko.zst"])
        );
        assert_eq!(
            order(&["hwmon"]).unwrap(),
            files(&["tun.ko.zst"]),
            "nothing says what is built in"
        );
        std::fs::write(folder.join("modules.builtin"), "kernel/drivers/hwmon/hwmon.ko\n").unwrap();
        assert_eq!(order(&["hwmon"]).unwrap(), files(&["tun.ko.zst"]));
        let error = order(&["gone"]).unwrap_err().to_string();
        assert!(error.contains("no module gone"), "{error}");
    }

    #[test]
    fn modules_are_decompressed() {
        let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "decompress").unwrap();
        let image = Image {
            root: folder.join("root"),
            tools: Path::new("/"),
        };
        let plain = folder.join("text.ko");
        std::fs::write(&plain, "some text").unwrap();
        image.put_module(&plain).unwrap();
        let compress = Launch::new("zstd").arg("-q").arg(&plain).spawn();
        // Where the tool is missing there is nothing to show.
        if compress.is_ok_and(|compress| compress.finish().is_ok()) {
            image.put_module(&folder.join("text.ko.zst")).unwrap();
        }
        for entry in std::fs::read_dir(image.root.join("lm/modules")).unwrap() {
            assert_eq!(std::fs::read(entry.unwrap().path()).unwrap(), b"some text");
        }
        std::fs::write(folder.join("bad.ko.zst"), "text").unwrap();
        let error = image.put_module(&folder.join("bad.ko.zst")).unwrap_err();
        assert!(format!("{error:#}").contains("bad.ko.zst"), "{error:#}");
    }
}
