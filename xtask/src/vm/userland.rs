//! What the guest runs: our own programs, as this machine builds them, and Debian's `ip`, `tc`, `ethtool` and busybox.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::initramfs::Tree;
use super::modules::Module;
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
        .args(["build", "--quiet", "--bins", "--profile", profile])
        .args(PACKAGES.iter().flat_map(|&package| ["--package", package])))?;
    Ok(target_dir()?.join(profile))
}

/// Kernel image and modules' folder in unpacked packages.
pub(super) fn kernel_in(root: &Path) -> Result<(PathBuf, PathBuf)> {
    let inside = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let modules = [root.join("usr/lib/modules"), root.join("lib/modules")];
    let modules = modules.into_iter().find(|folder| folder.is_dir());
    // Older packages have the image in /boot, newer ones beside the modules.
    let mut images = inside(&root.join("boot"));
    images.extend(
        modules
            .iter()
            .flat_map(|folder| inside(folder))
            .flat_map(|release| inside(&release)),
    );
    let image = images.into_iter().find(|path| {
        let name = path.file_name().unwrap_or_default();
        path.is_file() && name.to_string_lossy().starts_with("vmlinuz")
    });
    match (image, modules) {
        (Some(image), Some(modules)) => Ok((image, modules)),
        (image, _) => {
            let what = if image.is_some() { "modules" } else { "vmlinuz" };
            Err(Unavailable::Package(format!("{what} in the kernel's packages ({})", root.display())).into())
        }
    }
}

/// All files of the guest.
pub(super) fn tree(
    tools: &Path,
    programs: &Path,
    plan: &Plan,
    modules: Vec<Module>,
    with: &[PathBuf],
    scratch: &Path,
) -> Result<Tree> {
    let mut tree = Tree::new();
    for folder in ["proc", "sys", "run", "tmp", "root", "var", "tests"] {
        tree.folder(folder);
    }
    // Debian's layout: programs and libraries are below /usr, and iproute2 keeps its namespaces in /var/run.
    for (link, to) in [
        ("sbin", "usr/sbin"),
        ("lib", "usr/lib"),
        ("lib64", "usr/lib64"),
        ("var/run", "/run"),
    ] {
        tree.link(link, to);
    }
    // Without it the first process would have no standard output until /dev is mounted.
    tree.character_device("dev/console", 5, 1);
    tree.character_device("dev/null", 1, 3);
    tree.link("init", "/bin/xtask");
    for name in PROGRAMS {
        add_ours(&mut tree, &format!("bin/{name}"), &programs.join(name), scratch)?;
    }
    let busybox = find(tools, "busybox")?;
    // The one of busybox-static needs none; another one of this machine may.
    for (name, file) in libraries(tools, &busybox).unwrap_or_default() {
        tree.file(&format!("usr/lib/x86_64-linux-gnu/{name}"), file);
    }
    tree.file("bin/busybox", busybox);
    // Not busybox's shell, which takes its own `ip` before the one on the path.
    let shell = find(tools, "dash").or_else(|_| find(tools, "sh"))?;
    add_debians(&mut tree, tools, "bin/sh", &shell)?;
    for (name, folder) in TOOLS {
        add_debians(&mut tree, tools, &format!("{folder}/{name}"), &find(tools, name)?)?;
    }
    for module in modules {
        tree.bytes(&format!("{MODULES_DIR}/{}.ko", module.name), module.image);
    }
    let text = serde_json::to_string_pretty(plan).context("cannot write the plan")?;
    tree.bytes(PLAN_PATH, text.into_bytes());
    for path in with {
        let name = path
            .file_name()
            .with_context(|| format!("{} has no name", path.display()))?;
        add_ours(
            &mut tree,
            &format!("tests/{}", name.to_string_lossy()),
            path,
            scratch,
        )?;
    }
    Ok(tree)
}

/// A program that was built here, with this machine's loader and libraries at the places that are written in it.
fn add_ours(tree: &mut Tree, path: &str, program: &Path, scratch: &Path) -> Result<()> {
    let root = Path::new("/");
    // A program that is linked statically has none.
    for (name, file) in libraries(root, program).unwrap_or_default() {
        tree.file(&format!("usr/lib/x86_64-linux-gnu/{name}"), file);
    }
    tree.file("usr/lib64/ld-linux-x86-64.so.2", &loader(root)?[0]);
    // Line tables are most of it, and the emulated machine would have to unpack them.
    let stripped = scratch.join(path.replace('/', "-"));
    let strip = Launch::new("strip")
        .args(["--strip-debug", "-o"])
        .args([stripped.as_path(), program]);
    let is_stripped = strip.spawn().and_then(|strip| strip.finish()).is_ok();
    tree.file(path, if is_stripped { stripped.as_path() } else { program });
    Ok(())
}

/// A program of Debian's, started by Debian's loader with Debian's libraries, which may be newer than this machine's or older.
fn add_debians(tree: &mut Tree, tools: &Path, path: &str, program: &Path) -> Result<()> {
    let (_, name) = path.rsplit_once('/').unwrap_or(("", path));
    for (name, file) in libraries(tools, program)? {
        tree.file(&format!("{DEBIAN}/lib/{name}"), file);
    }
    tree.file(&format!("{DEBIAN}/loader"), &loader(tools)?[0]);
    tree.file(&format!("{DEBIAN}/{name}"), program);
    let start = format!(
        "#!/bin/busybox sh\nexec /{DEBIAN}/loader --library-path /{DEBIAN}/lib /{DEBIAN}/{name} \"$@\"\n"
    );
    tree.bytes(path, start.into_bytes());
    Ok(())
}

/// A program in unpacked packages.
fn find(tools: &Path, name: &str) -> Result<PathBuf> {
    ["usr/bin", "usr/sbin", "bin", "sbin"]
        .map(|folder| tools.join(folder).join(name))
        .into_iter()
        .find(|path| path.is_file())
        .ok_or_else(|| Unavailable::Tool(name.to_owned()).into())
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

/// The libraries of a program that is linked with those below `root`: their names and files.
fn libraries(root: &Path, program: &Path) -> Result<Vec<(String, PathBuf)>> {
    let words = loader(root)?;
    let output = Launch::new(&words[0])
        .args(&words[1..])
        .arg("--list")
        .arg(program)
        .time_limit(Duration::from_secs(20))
        .spawn()?
        .finish()
        .with_context(|| format!("cannot list the libraries of {}", program.display()))?;
    let found = listed(&output.stdout);
    for (name, path) in &found {
        ensure!(path.is_file(), "{name} is no file at {}", path.display());
    }
    Ok(found)
}

/// The loader's list: lines of `NAME => PATH (ADDRESS)`; what has no path is the kernel's or the loader itself.
fn listed(text: &str) -> Vec<(String, PathBuf)> {
    text.lines()
        .filter_map(|line| {
            let (name, rest) = line.split_once(" => ")?;
            let (path, _) = rest.rsplit_once(" (")?;
            let name = name.trim();
            (!name.contains('/')).then(|| (name.to_owned(), PathBuf::from(path)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_list_is_read() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibmnl.so.0 => /cache dir/usr/lib/x86_64-linux-gnu/libmnl.so.0 (0x00007f1)\n\
                    \t/lib64/ld-linux-x86-64.so.2 => /cache/ld.so (0x00007f2)\n\
                    \tlibgone.so => not found\n";
        let path = PathBuf::from("/cache dir/usr/lib/x86_64-linux-gnu/libmnl.so.0");
        assert_eq!(listed(text), [("libmnl.so.0".to_owned(), path)]);
    }

    #[test]
    fn the_machines_own_tools_stand_in() {
        let fails = || Err(Unavailable::Network("none".to_owned()).into());
        assert_eq!(tools(fails(), true).unwrap(), Path::new("/"));
        assert!(tools(fails(), false).is_err());
        assert!(tools(Err(anyhow::anyhow!("a defect")), true).is_err());
        assert_eq!(tools(Ok("/cache".into()), true).unwrap(), Path::new("/cache"));
        let error = find(Path::new("/nowhere"), "ip").unwrap_err();
        assert!(
            super::super::skip_reason(&error)
                .unwrap()
                .contains("`ip` is missing")
        );
        // What a bed on this machine needs as well: its loader and its C library.
        let ip = find(Path::new("/"), "ip").unwrap();
        let libraries = libraries(Path::new("/"), &ip).unwrap();
        assert!(
            libraries.iter().any(|(name, _)| name == "libc.so.6"),
            "{libraries:?}"
        );
    }

    #[test]
    fn a_kernel_is_found_in_unpacked_packages() {
        let root = std::env::temp_dir().join(format!("xtask-kernel-{}", std::process::id()));
        let error = kernel_in(&root).unwrap_err();
        assert!(
            super::super::skip_reason(&error)
                .unwrap()
                .contains("vmlinuz in the kernel's packages")
        );
        std::fs::create_dir_all(root.join("boot")).unwrap();
        std::fs::write(root.join("boot/config-7"), "").unwrap();
        std::fs::write(root.join("boot/vmlinuz-7"), "").unwrap();
        assert!(kernel_in(&root).unwrap_err().to_string().contains("modules"));
        std::fs::create_dir_all(root.join("lib/modules")).unwrap();
        let found = kernel_in(&root).unwrap();
        assert_eq!(found, (root.join("boot/vmlinuz-7"), root.join("lib/modules")));
        std::fs::create_dir_all(root.join("lib/modules/7")).unwrap();
        std::fs::rename(root.join("boot/vmlinuz-7"), root.join("lib/modules/7/vmlinuz")).unwrap();
        let found = kernel_in(&root).unwrap();
        assert_eq!(
            found,
            (root.join("lib/modules/7/vmlinuz"), root.join("lib/modules"))
        );
        std::fs::remove_dir_all(&root).unwrap();
    }
}
