//! What a daemon is told at its start: a TOML file, and a command line with the same words, which goes before it. One [`Config`] is both.

mod file;
mod settings;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU64;

use clap::{ArgMatches, CommandFactory, FromArgMatches as _};
use lm_protocol::smoother::ParametersError;
use serde::Deserialize;

pub use file::{line_of, parse, read};
pub use settings::{Config, GateMode, LawName, PolicyName};

/// Where the kernel keeps what outlives a program, unless the configuration says otherwise: it is mounted then, if it is not.
pub(crate) const BPFFS: &str = "/sys/fs/bpf";

/// Another host, as the configuration names it: an address, and a port where it is not the control port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct HostName {
    ip: Ipv4Addr,
    port: Option<u16>,
}

impl HostName {
    fn at(self, control_port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(self.ip, self.port.unwrap_or(control_port))
    }
}

impl TryFrom<String> for HostName {
    type Error = String;

    fn try_from(text: String) -> Result<HostName, String> {
        let parsed = match text.parse::<SocketAddrV4>() {
            Ok(host) => Some((*host.ip(), Some(host.port()))),
            Err(_) => text.parse().ok().map(|ip| (ip, None)),
        };
        match parsed {
            Some((ip, port)) if !ip.is_unspecified() && !ip.is_multicast() && port != Some(0) => {
                Ok(HostName { ip, port })
            }
            _ => Err(format!(
                "\"{text}\" is no host: write 192.0.2.7 or 192.0.2.7:7169"
            )),
        }
    }
}

/// A number of bytes, as `512M`, `4G` or plain digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Bytes(pub u64);

impl TryFrom<String> for Bytes {
    type Error = String;

    fn try_from(text: String) -> Result<Bytes, String> {
        let shifts = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];
        let mut scaled = shifts
            .iter()
            .filter_map(|&(suffix, shift)| Some((text.strip_suffix(suffix)?, shift)));
        let (digits, shift) = scaled.next().unwrap_or((&text, 0));
        let number: Option<u64> = digits.parse().ok();
        number
            .filter(|number| {
                digits.starts_with(|first: char| first.is_ascii_digit()) && *number <= u64::MAX >> shift
            })
            .map(|number| Bytes(number << shift))
            .ok_or_else(|| format!("\"{text}\" is no number of bytes: write 512M or 4G"))
    }
}

/// Bits a second, as `100M`, `2.5G` or plain digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct BitRate(pub NonZeroU64);

impl TryFrom<String> for BitRate {
    type Error = String;

    fn try_from(text: String) -> Result<BitRate, String> {
        let unit = text.trim_start_matches(|digit: char| digit.is_ascii_digit() || digit == '.');
        let scale = match unit {
            "" => Some(1.0),
            "k" | "K" => Some(1e3),
            "M" => Some(1e6),
            "G" => Some(1e9),
            _ => None,
        };
        let number: Option<f64> = text[..text.len() - unit.len()].parse().ok();
        // Beyond a u64 it would be no link.
        let rate = number
            .zip(scale)
            .and_then(|(number, scale)| NonZeroU64::new((number * scale) as u64));
        rate.filter(|rate| rate.get() < 1 << 50)
            .map(BitRate)
            .ok_or_else(|| format!("\"{text}\" is no rate in bits a second: write 100M or 2.5G"))
    }
}

/// What is wrong with a configuration: one line, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{what}", .key, if .key.is_empty() { "" } else { ": " })]
pub struct ConfigError {
    /// The setting, as the file calls it; empty when it is none in particular.
    pub key: &'static str,
    /// What, and what to do.
    pub what: String,
}

/// A value of the command line, read as one of the file.
fn parsed<T: TryFrom<String, Error = String>>(text: &str) -> Result<T, String> {
    text.to_owned().try_into()
}

fn fault(key: &'static str, what: impl Into<String>) -> ConfigError {
    let what = what.into();
    ConfigError { key, what }
}

/// What of a configuration a command line says: what it leaves to its defaults is no word against the file's.
pub fn said<P: CommandFactory>(line: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> ArgMatches {
    let command = P::command_for_update().mut_args(|arg| arg.default_value(None::<&str>));
    command.get_matches_from(line)
}

impl Config {
    /// This, but where a command line says otherwise; checked. Nothing outside is looked at.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn but(mut self, said: &ArgMatches) -> Result<Config, ConfigError> {
        let (replace_qdisc, spin) = (self.replace_qdisc, self.spin);
        self.update_from_arg_matches(said).expect("it was parsed");
        // What a flag does not say is no word either.
        self.replace_qdisc |= replace_qdisc;
        self.spin |= spin;
        self.check().map(|()| self)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.control_port == 0 {
            return Err(fault("control-port", "0 is no port; 7169 is the usual one"));
        }
        if self.interface.is_empty() {
            return Err(fault("interface", "none is named: add --interface NAME"));
        }
        if !are_different(&self.interface) {
            return Err(fault("interface", "one is named twice: name each once"));
        }
        let is_none = |name: &&String| name.is_empty() || name.len() > 15;
        if let Some(name) = self.interface.iter().find(is_none) {
            let what = format!("\"{name}\" is no name of an interface: `ip link` shows them");
            return Err(fault("interface", what));
        }
        if self.socket.as_os_str().len() > 100 {
            let what = "the path is longer than 100 bytes: choose a shorter one";
            return Err(fault("socket", what));
        }
        for (key, path) in [
            ("socket", &self.socket),
            ("state-dir", &self.state_dir),
            ("bpffs", &self.bpffs),
        ] {
            if !path.is_absolute() {
                return Err(fault(key, "the path must begin with /"));
            }
        }
        self.check_voters()?;
        if !(1..=4096).contains(&self.programs_max) {
            return Err(fault("programs-max", "must be 1 to 4096"));
        }
        if self.queues_per_user == Some(0) {
            let what = "0 leaves nobody any: name users with --allow-uid";
            return Err(fault("queues-per-user", what));
        }
        if self.programs_per_user == Some(0) {
            let what = "0 lets nobody in: name users with --allow-uid";
            return Err(fault("programs-per-user", what));
        }
        if !(0.0..=1.0).contains(&self.tolerance) {
            return Err(fault("tolerance", ParametersError::NoShare.to_string()));
        }
        if let Err(error) = self.log.parse::<tracing_subscriber::filter::Targets>() {
            let what = format!("{error}; write info, or lm_admission=debug,warn");
            return Err(fault("log", what));
        }
        Ok(())
    }

    fn check_voters(&self) -> Result<(), ConfigError> {
        match (self.policy, self.voter.len()) {
            (PolicyName::Concurrent, 0) => Ok(()),
            (PolicyName::Concurrent, _) => Err(fault(
                "voter",
                "only the policy exclusive has voters: add --policy exclusive, or leave them out",
            )),
            (PolicyName::Exclusive, _) if !are_different(&self.at_port(&self.voter)) => {
                Err(fault("voter", "one is named twice: name each once"))
            }
            (PolicyName::Exclusive, 1 | 3 | 5 | 7) => Ok(()),
            (PolicyName::Exclusive, count) => Err(fault(
                "voter",
                format!(
                    "{count} voters: the policy exclusive needs 3 or 5, the same in the same order at all hosts (1 \
                     for a trial)"
                ),
            )),
        }
    }

    fn at_port(&self, hosts: &[HostName]) -> Vec<SocketAddrV4> {
        hosts.iter().map(|host| host.at(self.control_port)).collect()
    }

    /// The hosts that decide, where one host receives at an instant.
    pub fn voters(&self) -> Option<Vec<SocketAddrV4>> {
        (self.policy == PolicyName::Exclusive).then(|| self.at_port(&self.voter))
    }

    /// Hosts that a broadcast does not reach.
    pub fn peers(&self) -> Vec<SocketAddrV4> {
        self.at_port(&self.peer)
    }

    /// Whether programs of this user and primary group may connect.
    pub fn allows(&self, uid: u32, gid: u32) -> bool {
        self.allow_uid.contains(&uid) || self.allow_gid.contains(&gid)
    }

    /// What one user may have of something of which there is so much: all of it where one user alone may come, else half, so that another
    /// one finds some.
    pub fn share(&self, all: u64) -> u64 {
        let is_alone =
            self.allow_gid.is_empty() && self.allow_uid.iter().all(|uid| *uid == self.allow_uid[0]);
        match is_alone {
            true => all,
            false => (all / 2).max(1),
        }
    }

    /// Queues of an interface with so many that one user may have: two at least, since who receives takes two.
    pub fn queues_per_user(&self, queues: usize) -> usize {
        let share = (self.share(queues as u64) as usize).max(2);
        self.queues_per_user.unwrap_or(share)
    }

    /// Connections that one user may have.
    pub fn programs_per_user(&self) -> usize {
        let share = self.share(self.programs_max as u64) as usize;
        self.programs_per_user.unwrap_or(share)
    }

    /// Bytes that one user may have registered, of a machine's memory.
    pub fn memory_per_user_bytes(&self, machine_bytes: u64) -> u64 {
        let share = self.share(machine_bytes / 2);
        self.memory_per_user.map_or(share, |bytes| bytes.0)
    }

    /// Settings that a running daemon cannot change, and that differ.
    pub fn fixed_differences(&self, other: &Config) -> Vec<&'static str> {
        let differ = [
            ("interface", self.interface != other.interface),
            ("socket", self.socket != other.socket),
            ("state-dir", self.state_dir != other.state_dir),
            ("bpffs", self.bpffs != other.bpffs),
            ("control-port", self.control_port != other.control_port),
            ("policy", self.voters() != other.voters()),
            ("mode", self.mode != other.mode),
            // Shaping needs what only a start gives.
            ("link-rate", self.link_rate.is_some() != other.link_rate.is_some()),
            ("law", self.law != other.law),
            ("tolerance", self.tolerance != other.tolerance),
            ("replace-qdisc", self.replace_qdisc != other.replace_qdisc),
            ("spin", self.spin != other.spin),
            ("user", self.user != other.user),
            ("metrics", self.metrics != other.metrics),
        ];
        let differing = differ.iter().filter(|(_, differs)| *differs);
        differing.map(|(name, _)| *name).collect()
    }
}

fn are_different<T: Ord + Clone>(all: &[T]) -> bool {
    BTreeSet::from_iter(all).len() == all.len()
}

#[cfg(test)]
mod tests;
