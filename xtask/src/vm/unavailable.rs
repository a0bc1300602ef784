//! Why the machine's parts cannot be had here: a reason to skip, not a defect.

use std::fmt;

/// What is missing, with the remedy in its text. Anything that `cargo xtask vm` cannot do for such a reason fails with an
/// error that [`reason`] finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// A command of this machine.
    Command(&'static str),
    /// Debian's keys, in this file.
    Keyring(&'static str),
    /// Keys that are too old for the release, by apt's message.
    OldKeys(String),
    /// The mirror, by apt's message.
    Network(String),
    /// Something that Debian does not have (any more).
    Package(String),
    /// Room for them, in this folder.
    Space(String),
    /// A program for the guest.
    Tool(String),
    /// The machine is no x86-64.
    Processor(&'static str),
}

/// What to do instead of fetching packages.
const OWN: &str = "or name your own: --kernel FILE --modules DIR --qemu FILE";

impl Unavailable {
    /// Sorts a message of apt.
    pub fn from_apt(message: &str) -> Unavailable {
        let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
        if says(&["NO_PUBKEY", "not signed", "signatures couldn't be verified"]) {
            Unavailable::OldKeys(message.to_owned())
        } else if says(&[
            "Unable to locate package",
            "Can't find a source to download version",
            "has no installation candidate",
            "was not found",
        ]) {
            Unavailable::Package(message.to_owned())
        } else {
            Unavailable::Network(message.to_owned())
        }
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unavailable::Command(command) => write!(
                f,
                "the command `{command}` is missing, which fetches and unpacks Debian's packages; install it, {OWN}"
            ),
            Unavailable::Space(folder) => write!(
                f,
                "the disk has no room for Debian's packages in {folder}; free 1 GiB there, or name another folder (LM_VM_CACHE), {OWN}"
            ),
            Unavailable::Keyring(path) => write!(
                f,
                "Debian's keys are missing ({path}); install debian-archive-keyring, {OWN}"
            ),
            Unavailable::OldKeys(message) => write!(
                f,
                "Debian's keys here are too old ({message}); upgrade debian-archive-keyring, {OWN}"
            ),
            Unavailable::Network(message) => write!(
                f,
                "cannot fetch Debian's packages ({message}); check the network or apt's proxy, {OWN}"
            ),
            Unavailable::Package(what) => {
                write!(
                    f,
                    "Debian's mirror has no such thing (any more): {what}; pin what it has now (`cargo xtask vm --refresh`) and commit \
                     {}, put the package into the cache's folder debs, {OWN}",
                    super::lock::PATH
                )
            }
            Unavailable::Tool(name) => write!(
                f,
                "the guest's `{name}` is missing; install busybox-static, iproute2 and ethtool, or let Debian's be fetched"
            ),
            Unavailable::Processor(found) => write!(
                f,
                "the virtual machine is an x86-64 one, and this machine is {found}; run this on an x86-64 machine"
            ),
        }
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
        let of = Unavailable::from_apt;
        assert!(matches!(
            of("The repository is not signed."),
            Unavailable::OldKeys(_)
        ));
        assert!(matches!(
            of("Unable to locate package x"),
            Unavailable::Package(_)
        ));
        assert!(matches!(
            of("Temporary failure resolving 'deb.debian.org'"),
            Unavailable::Network(_)
        ));
    }

    #[test]
    fn each_reason_is_a_line_with_a_remedy_and_is_found_again() {
        let all = [
            Unavailable::Command("apt-get"),
            Unavailable::Keyring("/k"),
            Unavailable::OldKeys("m".to_owned()),
            Unavailable::Network("m".to_owned()),
            Unavailable::Package("p".to_owned()),
            Unavailable::Tool("ip".to_owned()),
            Unavailable::Processor("aarch64"),
        ];
        for unavailable in all {
            let text = unavailable.to_string();
            assert!(!text.contains('\n') && text.contains(';'), "{text}");
            let error = anyhow::Error::from(unavailable.clone());
            assert_eq!(reason(&error.context("cannot start")), Some(&unavailable));
        }
        let other = std::fs::read("/nowhere").context("cannot read").unwrap_err();
        assert_eq!(reason(&other), None);
    }
}
