//! What Debian's package lists and apt's answers say. Text in, values out: nothing here starts a command.

use std::collections::BTreeMap;

use super::lock::Package;

/// The oldest kernel whose igb driver has AF_XDP zero-copy: version 6.14.
pub const ZEROCOPY_KERNEL: [u64; 2] = [6, 14];

/// Flavours of `linux-image-…-amd64` that are another kernel, or no kernel to boot.
const OTHER_FLAVOURS: [&str; 4] = ["cloud", "rt", "unsigned", "dbg"];
/// What a kernel image is made of, beside itself: newer images carry the kernel and its modules in packages of their own.
const PARTS: [&str; 2] = ["linux-binary-", "linux-modules-"];

/// The packages of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelPackages {
    /// For example `6.16.3+deb13-amd64`, as `uname -r` says it.
    pub release: String,
    /// Its packages, the image first.
    pub packages: Vec<Package>,
}

/// The paragraphs of a `Packages` file, field by field; continuation lines are left out.
fn paragraphs(index: &str) -> impl Iterator<Item = BTreeMap<&str, &str>> {
    index.split("\n\n").filter_map(|paragraph| {
        let fields: BTreeMap<&str, &str> = paragraph
            .lines()
            .filter(|line| !line.starts_with([' ', '\t']))
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name, value.trim()))
            .collect();
        (!fields.is_empty()).then_some(fields)
    })
}

/// The numbers in a version, in order: enough to compare versions of one package.
pub fn numbers(version: &str) -> Vec<u64> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

/// The kernel's release in the name of an image package that boots an ordinary amd64 machine.
fn release_of(package: &str) -> Option<&str> {
    let release = package.strip_prefix("linux-image-")?;
    let ordinary = release.starts_with(|c: char| c.is_ascii_digit())
        && release.ends_with("-amd64")
        && !release.split('-').any(|word| OTHER_FLAVOURS.contains(&word));
    ordinary.then_some(release)
}

/// The newest kernel in a `Packages` file that is new enough for igb's zero-copy, with the parts it depends on.
pub fn newest_kernel(index: &str) -> Option<KernelPackages> {
    // A list may have several versions of a package: the newest one counts.
    let mut known: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
    for paragraph in paragraphs(index) {
        let (Some(&name), Some(&version)) = (paragraph.get("Package"), paragraph.get("Version")) else {
            continue;
        };
        let wanted = release_of(name).is_some() || PARTS.iter().any(|part| name.starts_with(part));
        let newer = known
            .get(name)
            .is_none_or(|other| numbers(other["Version"]) < numbers(version));
        if wanted && newer {
            known.insert(name, paragraph);
        }
    }
    let (&image, fields) = known
        .iter()
        .filter(|(name, _)| {
            release_of(name).is_some_and(|release| numbers(release) >= ZEROCOPY_KERNEL.to_vec())
        })
        .max_by_key(|(name, fields)| (numbers(name), numbers(fields["Version"])))?;
    let package = |name: &str, fields: &BTreeMap<&str, &str>| Package {
        name: name.to_owned(),
        version: fields["Version"].to_owned(),
        architecture: "amd64".to_owned(),
    };
    let mut packages = vec![package(image, fields)];
    let mut names = vec![image];
    let mut at = 0;
    while let Some(name) = names.get(at) {
        at += 1;
        for part in dependencies(known[name].get("Depends").copied().unwrap_or_default()) {
            let part = part.into_iter().find(|alternative| {
                PARTS.iter().any(|prefix| alternative.starts_with(prefix)) && known.contains_key(alternative)
            });
            if let Some(part) = part.filter(|part| !names.contains(part)) {
                packages.push(package(part, &known[part]));
                names.push(part);
            }
        }
    }
    Some(KernelPackages {
        release: release_of(image)?.to_owned(),
        packages,
    })
}

/// A `Depends` field: of each dependency the alternatives' names.
fn dependencies(field: &str) -> Vec<Vec<&str>> {
    let name = |alternative: &'_ str| -> Option<usize> {
        let end = alternative.find(|c: char| c.is_whitespace() || "(:[".contains(c));
        Some(end.unwrap_or(alternative.len()))
    };
    field
        .split(',')
        .map(|dependency| {
            dependency
                .split('|')
                .map(str::trim)
                .filter_map(|alternative| alternative.get(..name(alternative)?))
                .filter(|name| !name.is_empty())
                .collect()
        })
        .collect()
}

/// The names of the files that `apt-get --print-uris` would fetch: lines of `'URI' FILE BYTES HASH`.
pub fn files(uris: &str) -> impl Iterator<Item = &str> {
    uris.lines()
        .filter(|line| line.starts_with('\''))
        .filter_map(|line| line.split_whitespace().nth(1))
}

/// The line of apt's messages that says most: its first error, else its first warning, else its last line.
pub fn apt_message(stderr: &str) -> &str {
    let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let marked = |mark: &str| lines().find_map(|line| line.strip_prefix(mark));
    marked("E: ")
        .or_else(|| marked("W: "))
        .or_else(|| lines().next_back())
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX: &str = "\
Package: linux-image-6.16.3+deb13-amd64
Source: linux-signed-amd64 (6.16.3+1~bpo13+1)
Version: 6.16.3-1~bpo13+1
Depends: kmod, linux-base (>= 4.12~), initramfs-tools (>= 0.120) | linux-initramfs-tool
Filename: pool/main/l/old.deb

Package: linux-image-7.2.10+deb13-amd64
Version: 7.2.10-1~bpo13+1
Depends: kmod, linux-binary-7.2.10+deb13-amd64 (= 7.2.10-1~bpo13+1) | linux-binary-7.2.10+deb13-amd64-unsigned,
 linux-base
Description: Linux 7.2
 a line with a colon: not a field

Package: linux-image-7.2.9+deb13-amd64
Version: 7.2.9-1~bpo13+1
Depends: kmod

Package: linux-image-7.2.11+deb13-rt-amd64
Version: 7.2.11-1~bpo13+1

Package: linux-image-7.2.11+deb13-cloud-amd64
Version: 7.2.11-1~bpo13+1

Package: linux-image-7.2.11+deb13-amd64-unsigned
Version: 7.2.11-1~bpo13+1

Package: linux-image-amd64
Version: 7.2.11-1~bpo13+1

Package: linux-binary-7.2.10+deb13-amd64
Version: 7.2.10-1~bpo13+1
Depends: linux-modules-7.2.10+deb13-amd64 (= 7.2.10-1~bpo13+1)

Package: linux-modules-7.2.10+deb13-amd64
Version: 7.2.10-1~bpo13+1
Depends: linux-binary-7.2.10+deb13-amd64

Package: linux-modules-7.2.10+deb13-amd64
Version: 7.2.10-1~bpo13+2
Depends: linux-binary-7.2.10+deb13-amd64
";

    fn asked(kernel: &KernelPackages) -> Vec<String> {
        kernel.packages.iter().map(Package::asked).collect()
    }

    #[test]
    fn the_newest_ordinary_kernel_comes_with_its_parts() {
        let kernel = newest_kernel(INDEX).unwrap();
        assert_eq!(kernel.release, "7.2.10+deb13-amd64");
        assert_eq!(
            asked(&kernel),
            [
                "linux-image-7.2.10+deb13-amd64=7.2.10-1~bpo13+1",
                "linux-binary-7.2.10+deb13-amd64=7.2.10-1~bpo13+1",
                "linux-modules-7.2.10+deb13-amd64=7.2.10-1~bpo13+2",
            ]
        );
    }

    #[test]
    fn a_kernel_in_one_package_stands_alone_and_an_old_one_does_not_count() {
        let (first, _) = INDEX.split_once("\n\n").unwrap();
        let kernel = newest_kernel(first).unwrap();
        assert_eq!(
            asked(&kernel),
            ["linux-image-6.16.3+deb13-amd64=6.16.3-1~bpo13+1"]
        );
        assert_eq!(newest_kernel(&first.replace("6.16.3", "6.12.9")), None);
        assert_eq!(newest_kernel(""), None);
        assert_eq!(newest_kernel("no list at all\n\n\n\n: :\n"), None);
    }

    #[test]
    fn versions_compare_by_their_numbers() {
        assert!(numbers("7.2.10-1~bpo13+1") > numbers("7.2.9-1~bpo13+1"));
        assert!(numbers("6.14") >= ZEROCOPY_KERNEL.to_vec() && numbers("6.9") < ZEROCOPY_KERNEL.to_vec());
        assert_eq!(numbers("none"), Vec::<u64>::new());
    }

    #[test]
    fn dependencies_are_names_with_alternatives() {
        assert_eq!(
            dependencies("libc6 (>= 2.38), a:any | b [amd64]"),
            [vec!["libc6"], vec!["a", "b"]]
        );
        assert_eq!(dependencies(""), [Vec::<&str>::new()]);
    }

    #[test]
    fn files_to_fetch_are_named() {
        let uris = "'http://mirror/a.deb' a_1_amd64.deb 1000 SHA256:00\nnoise\n'http://x/b.deb' b_2_all.deb 24 MD5Sum:1\n";
        assert_eq!(files(uris).collect::<Vec<_>>(), ["a_1_amd64.deb", "b_2_all.deb"]);
    }

    #[test]
    fn apt_says_it_in_one_line() {
        let stderr = "W: slow\nE: Failed to fetch http://x  Could not resolve\nE: Some index files failed\n";
        assert_eq!(apt_message(stderr), "Failed to fetch http://x  Could not resolve");
        assert_eq!(apt_message("W: only this\n"), "only this");
        assert_eq!(apt_message("odd\n\n"), "odd");
        assert_eq!(apt_message(""), "no message");
    }
}
