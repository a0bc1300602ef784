use super::*;
use crate::bed::Launch;
use crate::bed::leftovers::temporary_folder;
use crate::content::sha256;

/// Files in a folder whose names end so, sorted.
fn files_ending(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().ends_with(ending))
        .collect();
    files.sort();
    Ok(files)
}

#[test]
fn the_cache_lies_where_the_environment_says() {
    let find = |variables: &'static [(&'static str, &'static str)]| {
        folder(|name| {
            let (_, value) = variables.iter().find(|(variable, _)| *variable == name)?;
            Some(PathBuf::from(value))
        })
    };
    let all = &[("LM_VM_CACHE", "/c"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
    assert_eq!(find(all), Some("/c".into()));
    assert_eq!(find(&all[1..]), Some("/x/lm-vm".into()));
    assert_eq!(find(&all[2..]), Some("/h/.cache/lm-vm".into()));
    assert_eq!(
        find(&[("LM_VM_CACHE", "relative"), ("HOME", "/h")]),
        Some("/h/.cache/lm-vm".into())
    );
    assert_eq!(find(&[]), None);
}

/// A mirror in a folder: packages that `dpkg-deb` builds, with the list that apt reads.
struct Mirror {
    folder: PathBuf,
    _folder: crate::bed::leftovers::Registered,
}

impl Mirror {
    fn new() -> Mirror {
        let (folder, registered) = temporary_folder(&std::env::temp_dir(), "mirror").unwrap();
        Mirror {
            folder,
            _folder: registered,
        }
    }

    /// Puts a package there, in place of other versions; its pin.
    fn put(&self, name: &str, version: &str, content: &str) -> String {
        for old in files_ending(&self.folder, ".deb").unwrap() {
            std::fs::remove_file(old).unwrap();
        }
        let tree = self.folder.join("tree");
        std::fs::create_dir_all(tree.join("DEBIAN")).unwrap();
        std::fs::create_dir_all(tree.join("usr/bin")).unwrap();
        std::fs::write(tree.join("usr/bin").join(name), content).unwrap();
        let control = format!(
            "Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody \
                <nobody@localhost>\nDescription: a test\n"
        );
        std::fs::write(tree.join("DEBIAN/control"), &control).unwrap();
        let name = format!("{name}_{}_amd64.deb", version.replace(':', "%3a"));
        let file = self.folder.join(&name);
        let build = Launch::new("dpkg-deb").args(["--root-owner-group", "-b"]);
        build.args([&tree, &file]).spawn().unwrap().finish().unwrap();
        std::fs::remove_dir_all(&tree).unwrap();
        let sha256 = sha256(&file).unwrap();
        let len = std::fs::metadata(&file).unwrap().len();
        let list = format!("{control}Filename: ./{name}\nSize: {len}\nSHA256: {sha256}\n");
        std::fs::write(self.folder.join("Packages"), list).unwrap();
        format!("tools {name} {sha256}")
    }

    /// Unpacks what is pinned, from this mirror alone; what the tool says.
    fn tool(&self, pin: &str) -> Result<String> {
        let (cache, lock) = (self.folder.join("the cache"), self.folder.join("lock"));
        std::fs::write(&lock, format!("# a lock\n{pin}\n")).unwrap();
        let sources = format!("deb [trusted=yes] file:{} ./", self.folder.display());
        fetch(&cache, &lock, &sources, &["tools"])?;
        Ok(std::fs::read_to_string(cache.join("tools/usr/bin/lm-tool")).unwrap())
    }
}

/// Why a fetch is a reason to skip, in one line.
fn lacking(result: Result<impl fmt::Debug>) -> String {
    let said = result.unwrap_err().downcast::<Unavailable>().unwrap().0;
    assert!(said.lines().count() == 1 && said.contains("; "), "{said}");
    said
}

fn flip_a_byte(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn what_is_pinned_is_fetched_once_and_a_changed_byte_is_noticed() {
    let mirror = Mirror::new();
    let pin = mirror.put("lm-tool", "1:1.0-1", "the first");
    assert_eq!(mirror.tool(&pin).unwrap(), "the first");
    let packages = mirror.folder.join("Packages");
    let list = std::fs::read_to_string(&packages).unwrap();

    // Without a mirror the cache is enough, and what was changed in the unpacked folder is unpacked again.
    std::fs::write(&packages, "").unwrap();
    assert_eq!(mirror.tool(&pin).unwrap(), "the first");
    flip_a_byte(&mirror.folder.join("the cache/tools/usr/bin/lm-tool"));
    assert_eq!(mirror.tool(&pin).unwrap(), "the first");

    // A changed package is no package: it must be fetched.
    let file = pin.split(' ').nth(1).unwrap();
    flip_a_byte(&mirror.folder.join("the cache/debs").join(file));
    let said = lacking(mirror.tool(&pin));
    assert!(said.contains("lm-tool") && said.contains("--refresh"), "{said}");
    std::fs::write(&packages, list).unwrap();
    assert_eq!(mirror.tool(&pin).unwrap(), "the first");
}

#[test]
fn another_version_is_not_taken_and_other_bytes_of_the_version_are_refused() {
    let mirror = Mirror::new();
    let pin = mirror.put("lm-tool", "1.0-1", "the first");
    mirror.put("lm-tool", "1.0-2", "newer");
    let said = lacking(mirror.tool(&pin));
    assert!(said.contains("1.0-1") && said.contains("--refresh"), "{said}");

    mirror.put("lm-tool", "1.0-1", "not the first");
    let error = mirror.tool(&pin).unwrap_err();
    assert!(!error.is::<Unavailable>(), "that is no reason to skip");
    let said = format!("{error:#}");
    assert!(said.contains("SHA-256") && said.contains("pinned"), "{said}");
    let error = mirror
        .tool(&pin.replace("tools", "kernel"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("pins nothing for tools"), "{error}");
}

/// Packages are pinned as apt names them: of the kernel those of its release alone.
#[test]
fn the_newest_packages_are_pinned_and_what_apt_says_is_sorted() {
    let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "apt").unwrap();
    let hash = "0f".repeat(32);
    let uri =
        |name: &str, hash: &str| format!("'http://mirror/x.deb' {name}_1%3a7.2-1_amd64.deb 1000 {hash}\n");
    let kinds = [
        "image-7.2+deb13-amd64",
        "modules-7.2+deb13-amd64",
        "image-amd64",
        "base-7.2+deb13-amd64",
    ];
    let mut uris: String = kinds
        .iter()
        .map(|kind| uri(&format!("linux-{kind}"), &format!("SHA256:{hash}")))
        .collect();
    uris += &(uri("weak", "MD5Sum:1") + "noise\n");
    std::fs::write(folder.join("uris"), uris).unwrap();
    let lock = folder.join("lock");
    let refresh = |apt: &str| {
        std::fs::write(&lock, "# kept\ntools old_1_amd64.deb 00\n").unwrap();
        let path = folder.join("apt-get");
        std::fs::write(&path, format!("#!/bin/sh\ncd {}\n{apt}\n", folder.display())).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let script = "PATH=$1:$PATH; shift; eval \"$0\"";
        let mut sh = Command::new("sh");
        sh.args(["-c", script, PACKAGES])
            .args([&folder, &folder.join("cache"), &lock])
            .args(["", "--refresh"]);
        let output = sh.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(refresh("case $* in *print-uris*) cat uris ;; esac").0, Some(0));
    let text = std::fs::read_to_string(&lock).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        (lines[0], lines.len()),
        ("# kept", 1 + 2 + 2 * kinds.len()),
        "{text}"
    );
    assert_eq!(
        lines[1],
        format!("kernel linux-image-7.2+deb13-amd64_1%3a7.2-1_amd64.deb {hash}")
    );
    for (stderr, line, remedy) in [
        (
            "W: slow\nE: The repository is not signed.\nE: x",
            "(The repository is not signed.)",
            "upgrade debian-arch",
        ),
        (
            "E: Unable to locate package x",
            "Unable to locate package x",
            "--refresh",
        ),
        (
            "E: Temporary failure resolving 'd'",
            "(Temporary failure resolving 'd')",
            "the network",
        ),
        ("W: only this", "(only this)", "the network"),
        ("odd\n\n", "(odd)", "the network"),
        ("", "(no message)", "the network"),
    ] {
        std::fs::write(folder.join("said"), stderr).unwrap();
        let (code, said) = refresh("cat said >&2; exit 100");
        assert_eq!((code, said.lines().count()), (Some(LACKING), 1), "{said}");
        assert!(said.contains(line) && said.contains(remedy), "{said}");
    }
}

#[test]
fn apt_never_touches_the_machines_own_state() {
    let folders: Vec<&str> = PACKAGES
        .lines()
        .filter(|line| line.starts_with("Dir::"))
        .collect();
    assert!(folders.len() > 10);
    for line in folders {
        let value = line.split('"').nth(1).unwrap();
        assert!(
            value.is_empty() || value == "/dev/null" || value.starts_with("$cache/apt"),
            "{line}"
        );
    }
    for needed in [
        "Dir::State::status ",
        "Dir::Cache ",
        "Dir::State ",
        "#clear APT::Update::Post-Invoke;",
    ] {
        assert!(PACKAGES.contains(needed), "{needed}");
    }
}

#[test]
fn the_committed_pins_are_whole_and_in_order() {
    let text = include_str!("packages.lock");
    let pins: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    for name in [
        "kernel linux-image-",
        "kernel linux-modules-",
        "qemu qemu-system-x86",
        "tools busybox-static",
        "tools iproute2",
        "tools ethtool",
        "tools dash",
    ] {
        assert!(
            pins.iter().any(|pin| pin.starts_with(name)),
            "{LOCK} pins no {name}"
        );
    }
    for pin in &pins {
        let words: Vec<&str> = pin.split(' ').collect();
        assert!(
            words.len() == 3 && words[2].len() == 64 && words[1].ends_with(".deb"),
            "{pin}"
        );
    }
    assert!(pins.is_sorted());
}

#[test]
fn modules_come_after_what_they_depend_on() {
    let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "modules").unwrap();
    let error = load_order(&folder, &["igb"]).unwrap_err().to_string();
    assert!(error.contains("modules.dep"), "{error}");
    let list = "kernel/igb.ko.xz: kernel/i2c-algo-bit.ko.xz kernel/dca.ko\nkernel/dca.ko:\n\
                kernel/i2c-algo-bit.ko.xz: kernel/dca.ko\nkernel/tun.ko.zst:\n";
    std::fs::write(folder.join("modules.dep"), list).unwrap();
    let order = |required: &[&str]| load_order(&folder, required).unwrap();
    let files = |names: &[&str]| {
        names
            .iter()
            .map(|name| folder.join("kernel").join(name))
            .collect::<Vec<_>>()
    };
    // `tun` is useful; the others of that kind are not there.
    let all = files(&["dca.ko", "i2c-algo-bit.ko.xz", "igb.ko.xz", "tun.ko.zst"]);
    assert_eq!(order(&["igb", "dca"]), all);
    let two = files(&["dca.ko", "i2c-algo-bit.ko.xz", "tun.ko.zst"]);
    assert_eq!(order(&["dca", "i2c_algo_bit"]), two);
    assert_eq!(order(&["hwmon"]), files(&["tun.ko.zst"]), "it may be built in");
}
