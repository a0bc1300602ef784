use super::*;

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
    fn put(&self, name: &str, version: &str, content: &str) -> Pin {
        for old in files_ending(&self.folder, ".deb").unwrap() {
            std::fs::remove_file(old).unwrap();
        }
        let tree = self.folder.join("tree");
        std::fs::create_dir_all(tree.join("DEBIAN")).unwrap();
        std::fs::create_dir_all(tree.join("usr/bin")).unwrap();
        std::fs::write(tree.join("usr/bin").join(name), content).unwrap();
        let control = format!(
            "Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody <nobody@localhost>\nDescription: a test\n"
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
        Pin {
            part: TOOLS.to_owned(),
            file: name,
            sha256,
        }
    }

    /// A cache that takes from this mirror alone.
    fn cache(&self, pin: &Pin) -> Cache {
        let sources = format!("deb [trusted=yes] file:{} ./\n", self.folder.display());
        Cache::at(self.folder.join("cache"), vec![pin.clone()], sources).unwrap()
    }
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
    let tool = |cache: &Cache| {
        let folder = cache.unpacked(TOOLS).unwrap();
        std::fs::read_to_string(folder.join("usr/bin/lm-tool")).unwrap()
    };
    assert_eq!(tool(&mirror.cache(&pin)), "the first");
    let list = std::fs::read_to_string(mirror.folder.join("Packages")).unwrap();

    // Without a mirror the cache is enough, and what was changed in the unpacked folder is unpacked again.
    std::fs::write(mirror.folder.join("Packages"), "").unwrap();
    assert_eq!(tool(&mirror.cache(&pin)), "the first");
    let folder = mirror.cache(&pin).unpacked(TOOLS).unwrap();
    flip_a_byte(&folder.join("usr/bin/lm-tool"));
    assert_eq!(tool(&mirror.cache(&pin)), "the first");

    // A changed package is no package: it must be fetched.
    let cache = mirror.cache(&pin);
    flip_a_byte(&cache.file_of(&pin));
    let error = cache.unpacked(TOOLS).unwrap_err();
    drop(cache);
    let said = super::super::skip_reason(&error).unwrap_or_else(|| panic!("{error:#}"));
    assert!(
        said.contains("lm-tool") && said.contains("--refresh") && said.lines().count() == 1,
        "{said}"
    );
    std::fs::write(mirror.folder.join("Packages"), list).unwrap();
    assert_eq!(tool(&mirror.cache(&pin)), "the first");
}

#[test]
fn another_version_is_not_taken_and_other_bytes_of_the_version_are_refused() {
    let mirror = Mirror::new();
    let pin = mirror.put("lm-tool", "1.0-1", "the first");
    mirror.put("lm-tool", "1.0-2", "newer");
    let error = mirror.cache(&pin).unpacked(TOOLS).unwrap_err();
    let said = super::super::skip_reason(&error).unwrap_or_else(|| panic!("{error:#}"));
    assert!(
        said.contains("1.0-1") && said.contains("--refresh") && said.lines().count() == 1,
        "{said}"
    );

    mirror.put("lm-tool", "1.0-1", "not the first");
    let error = mirror.cache(&pin).unpacked(TOOLS).unwrap_err();
    assert_eq!(
        super::super::skip_reason(&error),
        None,
        "that is no reason to skip"
    );
    let said = format!("{error:#}");
    assert!(said.contains("SHA-256") && said.contains("pinned"), "{said}");
    let unpinned = mirror.cache(&Pin {
        part: KERNEL.to_owned(),
        ..pin
    });
    let error = unpinned.unpacked(TOOLS).unwrap_err().to_string();
    assert!(error.contains("pins nothing for tools"), "{error}");
}

#[test]
fn apt_never_touches_the_machines_own_state() {
    let text = settings(Path::new("/cache/apt"));
    let folders = text.lines().filter(|line| line.starts_with("Dir::"));
    for line in folders {
        let value = line.split('"').nth(1).unwrap();
        assert!(
            value.is_empty() || value == "/dev/null" || value.starts_with("/cache/apt"),
            "{line}"
        );
    }
    for needed in [
        "Dir::State::status ",
        "Dir::Cache ",
        "Dir::State ",
        "#clear APT::Update::Post-Invoke;",
    ] {
        assert!(text.contains(needed), "{needed}");
    }
    assert_eq!(
        sources(),
        "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main\n\
         deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie-backports main\n"
    );
}

#[test]
fn files_are_named_as_apt_names_them() {
    let hash = "0f".repeat(32);
    let pin = |file: &str| Pin::new(TOOLS, file, &hash);
    let found = pin("libcap2_1%3a2.75-10+deb13u1+b3_amd64.deb").unwrap();
    assert_eq!(found.asked(), "libcap2=1:2.75-10+deb13u1+b3");
    for other in ["libcap2_1.deb", "a_b_c_d.deb", "a_1_amd64.rpm"] {
        assert_eq!(pin(other), None, "{other}");
    }
}

#[test]
fn files_to_fetch_are_named() {
    let hash = "0f".repeat(32);
    let uris = |part: &str, file: &str, hash: &str| {
        Pin::of_uri(part, &format!("'http://mirror/a.deb' {file} 1000 {hash}"))
    };
    let sealed = format!("SHA256:{hash}");
    let found = uris(TOOLS, "a_1%3a1_amd64.deb", &sealed).unwrap();
    assert_eq!((found.asked(), found.sha256), ("a=1:1".to_owned(), hash.clone()));
    assert_eq!(uris(TOOLS, "a_1_amd64.deb", "MD5Sum:1"), None);
    assert_eq!(Pin::of_uri(TOOLS, "noise"), None);
    // A kernel comes with its parts, and without names that stand for the newest and what only an installation needs.
    let is_pinned = |name: &str| uris(KERNEL, &format!("{name}_7.2.10-1_amd64.deb"), &sealed).is_some();
    for kind in ["image", "binary", "modules"] {
        assert!(is_pinned(&format!("linux-{kind}-7.2.10+deb13-amd64")), "{kind}");
    }
    for name in [
        "linux-image-amd64",
        "linux-modules-amd64",
        "linux-base",
        "linux-base-7.2.10+deb13-amd64",
        "kmod",
    ] {
        assert!(!is_pinned(name), "{name}");
    }
}

#[test]
fn the_committed_pins_are_whole_and_as_they_would_be_written() {
    let pins = committed().unwrap();
    for (part, name) in [
        (KERNEL, "linux-image-"),
        (KERNEL, "linux-modules-"),
        (QEMU, "qemu-system-x86"),
        (TOOLS, "busybox-static"),
        (TOOLS, "iproute2"),
        (TOOLS, "ethtool"),
        (TOOLS, "dash"),
    ] {
        let is_it = |pin: &Pin| pin.part == part && pin.file.starts_with(name);
        assert!(pins.iter().any(is_it), "{LOCK} pins no {name} for {part}");
    }
    assert_eq!(lock_file(&pins), COMMITTED);
}

#[test]
fn a_line_that_pins_nothing_is_an_error() {
    for line in [
        "tools dash_1.0_amd64.deb",
        "tools dash_1.0_amd64.deb abc",
        "",
        "a  b",
    ] {
        assert!(Pin::parse(line).is_err(), "{line:?}");
    }
}
