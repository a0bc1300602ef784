//! What apt answers. Text in, values out: nothing here starts a command.

use super::lock::Package;

/// The numbers in a version, in order: enough to compare versions of one package.
pub fn numbers(version: &str) -> Vec<u64> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

/// Whether a package is a kernel or a part of one, and not a name that stands for the newest.
pub fn is_of_kernel(name: &str) -> bool {
    ["linux-image-", "linux-binary-", "linux-modules-"]
        .iter()
        .any(|part| {
            let release = name.strip_prefix(part);
            release.is_some_and(|release| release.starts_with(|c: char| c.is_ascii_digit()))
        })
}

/// The packages that `apt-get --print-uris` would fetch, with the SHA-256 of each: lines of `'URI' FILE BYTES SHA256:HASH`.
pub fn packages(uris: &str) -> impl Iterator<Item = (Package, &str)> {
    uris.lines()
        .filter(|line| line.starts_with('\''))
        .filter_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            let package = Package::of_file(words.next()?)?;
            Some((package, words.nth(1)?.strip_prefix("SHA256:")?))
        })
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

    #[test]
    fn a_kernel_comes_with_its_parts() {
        for name in [
            "linux-image-7.2.10+deb13-amd64",
            "linux-binary-7.2.10+deb13-amd64",
            "linux-modules-7.2.10+deb13-amd64",
        ] {
            assert!(is_of_kernel(name), "{name}");
        }
        for name in [
            "linux-image-amd64",
            "linux-modules-amd64",
            "linux-base",
            "linux-base-7.2.10+deb13-amd64",
            "kmod",
        ] {
            assert!(!is_of_kernel(name), "{name}");
        }
    }

    #[test]
    fn versions_compare_by_their_numbers() {
        assert!(numbers("7.2.10-1~bpo13+1") > numbers("7.2.9-1~bpo13+1"));
        assert!(numbers("6.14") >= vec![6, 14] && numbers("6.9") < vec![6, 14]);
        assert_eq!(numbers("none"), Vec::<u64>::new());
    }

    #[test]
    fn files_to_fetch_are_named() {
        let uris = "'http://mirror/a.deb' a_1%3a1_amd64.deb 1000 SHA256:00ff\nnoise\n'http://x/b.deb' b_2_all.deb 24 MD5Sum:1\n";
        let found: Vec<_> = packages(uris)
            .map(|(package, sha256)| (package.asked(), sha256))
            .collect();
        assert_eq!(found, [("a=1:1".to_owned(), "00ff")]);
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
