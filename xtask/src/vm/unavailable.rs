//! Why the machine's parts cannot be had here: a reason to skip, not a defect.

use std::fmt;

/// What is missing, with the remedy. Anything that `cargo xtask vm` cannot do for such a reason fails with an error that [`reason`]
/// finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable(pub String);

impl Unavailable {
    /// Something that fetching and unpacking Debian's packages needs: what, and what to do about it.
    pub fn debian(what: &str, remedy: &str) -> Unavailable {
        Unavailable(format!(
            "{what}; {remedy}, or name your own: --kernel FILE --modules DIR --qemu FILE"
        ))
    }

    /// A command of this machine.
    pub fn command(name: &str) -> Unavailable {
        let what = format!("the command `{name}` is missing, which fetches and unpacks Debian's packages");
        Unavailable::debian(&what, "install it")
    }

    /// Something that Debian does not have (any more).
    pub fn package(what: &str) -> Unavailable {
        let remedy = format!(
            "pin what it has now (`cargo xtask vm --refresh`) and commit {}, put the package into the cache's folder debs",
            super::packages::LOCK
        );
        Unavailable::debian(
            &format!("Debian's mirror has no such thing (any more): {what}"),
            &remedy,
        )
    }

    /// Sorts what apt says on standard error by the line that says most: its first error, else its first warning, else its last line.
    pub fn from_apt(stderr: &str) -> Unavailable {
        let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
        let marked = |mark: &str| lines().find_map(|line| line.strip_prefix(mark));
        let message = (marked("E: ").or_else(|| marked("W: ")))
            .or_else(|| lines().next_back())
            .unwrap_or("no message");
        let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
        if says(&["NO_PUBKEY", "not signed", "signatures couldn't be verified"]) {
            let what = format!("Debian's keys here are too old ({message})");
            Unavailable::debian(&what, "upgrade debian-archive-keyring")
        } else if says(&[
            "Unable to locate package",
            "Can't find a source to download version",
            "has no installation candidate",
            "was not found",
        ]) {
            Unavailable::package(message)
        } else {
            let what = format!("cannot fetch Debian's packages ({message})");
            Unavailable::debian(&what, "check the network or apt's proxy")
        }
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// The reason to skip whatever needs the virtual machine, if that is why it failed.
pub fn reason(error: &anyhow::Error) -> Option<&Unavailable> {
    error.chain().find_map(|cause| cause.downcast_ref())
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn messages_of_apt_are_sorted() {
        for (stderr, remedy) in [
            (
                "E: The repository is not signed.",
                "upgrade debian-archive-keyring",
            ),
            ("E: Unable to locate package x", "--refresh"),
            ("E: Temporary failure resolving 'deb.debian.org'", "the network"),
        ] {
            let text = Unavailable::from_apt(stderr).to_string();
            assert!(text.contains(&stderr[3..]) && text.contains(remedy), "{text}");
        }
    }

    #[test]
    fn apt_says_it_in_one_line() {
        for (stderr, line) in [
            (
                "W: slow\nE: Failed to fetch http://x  Could not resolve\nE: Some index files failed\n",
                "(Failed to fetch http://x  Could not resolve)",
            ),
            ("W: only this\n", "(only this)"),
            ("odd\n\n", "(odd)"),
            ("", "(no message)"),
        ] {
            let text = Unavailable::from_apt(stderr).to_string();
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn each_reason_is_a_line_with_a_remedy_and_is_found_again() {
        for unavailable in [
            Unavailable::command("apt-get"),
            Unavailable::package("p"),
            Unavailable::from_apt("E: m"),
            Unavailable::from_apt("E: The repository is not signed."),
        ] {
            let text = unavailable.to_string();
            assert!(!text.contains('\n') && text.contains(';'), "{text}");
            let error = anyhow::Error::from(unavailable.clone());
            assert_eq!(reason(&error.context("cannot start")), Some(&unavailable));
        }
        let other = std::fs::read("/nowhere").context("cannot read").unwrap_err();
        assert_eq!(reason(&other), None);
    }
}
