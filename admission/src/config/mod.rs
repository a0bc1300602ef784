//! What a daemon is told at its start: a command line, and a TOML file with the same words. Both become [`Settings`], and there is
//! one way from there to a [`Config`].

mod file;
mod settings;

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use lm_protocol::smoother::{Law, ParametersError};
use serde::Deserialize;

pub use file::{line_of, parse, read};
pub use settings::{GateMode, LawName, PolicyName, Settings};

/// The daemons' control port unless the configuration says another: the same at all hosts.
pub const CONTROL_PORT: u16 = 7169;

/// Where the cluster's key is unless the configuration says otherwise.
pub const KEY_FILE: &str = "/etc/lm-admissiond/key";

/// Where the daemon keeps what the next one needs, unless the configuration says otherwise.
pub const STATE_DIR: &str = "/run/lm-admissiond";

/// Where the kernel keeps what outlives a program, unless the configuration says otherwise.
pub const BPFFS: &str = "/sys/fs/bpf";

/// Programs that may be connected at the same time, unless the configuration says otherwise.
pub const PROGRAMS_MAX: usize = 256;

/// What a daemon does: valid, and complete.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Names of the interfaces.
    pub interfaces: Vec<String>,
    /// Path of the socket for programs.
    pub socket: PathBuf,
    /// File with the cluster's key.
    pub key_file: PathBuf,
    /// Directory of what the next daemon needs.
    pub state_dir: PathBuf,
    /// The bpffs in which gates are pinned.
    pub bpffs: PathBuf,
    /// UDP port of the admission protocol.
    pub control_port: u16,
    /// Who may receive at the same time as whom; with the voters.
    pub voters: Option<Vec<SocketAddrV4>>,
    /// Users whose programs may connect.
    pub allow_uids: Vec<u32>,
    /// Primary groups whose programs may connect.
    pub allow_gids: Vec<u32>,
    /// Hosts that a broadcast does not reach.
    pub peers: Vec<SocketAddrV4>,
    /// Where the gate is attached.
    pub mode: GateMode,
    /// What the links of the interfaces carry, in bits a second; none: there is no smoother.
    pub link_rate: Option<NonZeroU64>,
    /// How the smoother's credits come.
    pub law: Law,
    /// Z: share of packets that may be lost without a signal to the smoother.
    pub tolerance: f64,
    /// A root qdisc that somebody set gives way to the smoother's.
    pub replace_qdisc: bool,
    /// Never sleep.
    pub spin: bool,
    /// User to become.
    pub user: Option<String>,
    /// Where to serve metrics.
    pub metrics: Option<SocketAddr>,
    /// What to log, as `RUST_LOG` says it.
    pub log: String,
    /// Programs that may be connected at the same time.
    pub programs_max: usize,
    /// Memory that a program may have registered, in bytes.
    pub memory_max_bytes: u64,
    /// What one user may have, where the configuration says it.
    pub per_user: PerUser,
}

/// What all programs of one user may have together; none: [`Config::share`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerUser {
    /// Queues of an interface.
    pub queues: Option<usize>,
    /// Registered memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Connections.
    pub programs: Option<usize>,
}

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

impl FromStr for HostName {
    type Err = String;

    fn from_str(text: &str) -> Result<HostName, String> {
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

impl TryFrom<String> for HostName {
    type Error = String;

    fn try_from(text: String) -> Result<HostName, String> {
        text.parse()
    }
}

/// A number of bytes, as `512M`, `4G` or plain digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let (digits, shift) = match text.as_bytes().last() {
            Some(b'K') => (&text[..text.len() - 1], 10),
            Some(b'M') => (&text[..text.len() - 1], 20),
            Some(b'G') => (&text[..text.len() - 1], 30),
            Some(b'T') => (&text[..text.len() - 1], 40),
            _ => (text, 0),
        };
        let number: Option<u64> = digits.parse().ok();
        number
            .filter(|number| {
                digits.starts_with(|first: char| first.is_ascii_digit()) && *number <= u64::MAX >> shift
            })
            .map(|number| Bytes(number << shift))
            .ok_or_else(|| format!("\"{text}\" is no number of bytes: write 512M or 4G"))
    }
}

impl TryFrom<String> for Bytes {
    type Error = String;

    fn try_from(text: String) -> Result<Bytes, String> {
        text.parse()
    }
}

/// Bits a second, as `100M`, `2.5G` or plain digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct BitRate(pub NonZeroU64);

impl FromStr for BitRate {
    type Err = String;

    fn from_str(text: &str) -> Result<BitRate, String> {
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

impl TryFrom<String> for BitRate {
    type Error = String;

    fn try_from(text: String) -> Result<BitRate, String> {
        text.parse()
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

fn fault(key: &'static str, what: impl Into<String>) -> ConfigError {
    let what = what.into();
    ConfigError { key, what }
}

impl Config {
    /// Checks what was set and adds what was not. Nothing outside is looked at.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn new(settings: Settings) -> Result<Config, ConfigError> {
        let control_port = settings.control_port.unwrap_or(CONTROL_PORT);
        if control_port == 0 {
            return Err(fault("control-port", "0 is no port; 7169 is the usual one"));
        }
        if settings.interface.is_empty() {
            return Err(fault("interface", "none is named: add --interface NAME"));
        }
        let mut names = settings.interface.clone();
        names.sort();
        names.dedup();
        if names.len() != settings.interface.len() {
            return Err(fault("interface", "one is named twice: name each once"));
        }
        if let Some(name) = names.iter().find(|name| name.is_empty() || name.len() > 15) {
            let what = format!("\"{name}\" is no name of an interface: `ip link` shows them");
            return Err(fault("interface", what));
        }
        let socket = settings.socket.unwrap_or_else(|| PathBuf::from(SOCKET));
        if socket.as_os_str().len() > 100 {
            let what = "the path is longer than 100 bytes: choose a shorter one";
            return Err(fault("socket", what));
        }
        let state_dir = settings.state_dir.unwrap_or_else(|| PathBuf::from(STATE_DIR));
        let bpffs = settings.bpffs.unwrap_or_else(|| PathBuf::from(BPFFS));
        for (key, path) in [("socket", &socket), ("state-dir", &state_dir), ("bpffs", &bpffs)] {
            if !path.is_absolute() {
                return Err(fault(key, "the path must begin with /"));
            }
        }
        let voters = voters(settings.policy, &settings.voter, control_port)?;
        let programs_max = settings.programs_max.unwrap_or(PROGRAMS_MAX);
        if !(1..=4096).contains(&programs_max) {
            return Err(fault("programs-max", "must be 1 to 4096"));
        }
        if settings.queues_per_user == Some(0) {
            let what = "0 leaves nobody any: name users with --allow-uid";
            return Err(fault("queues-per-user", what));
        }
        if settings.programs_per_user == Some(0) {
            let what = "0 lets nobody in: name users with --allow-uid";
            return Err(fault("programs-per-user", what));
        }
        let law = match settings.law.unwrap_or_default() {
            LawName::Paced => Law::Paced,
            LawName::Paper => Law::Paper,
        };
        let tolerance = settings.tolerance.unwrap_or(0.0);
        if !(0.0..=1.0).contains(&tolerance) {
            return Err(fault("tolerance", ParametersError::NoShare.to_string()));
        }
        let log = settings.log.unwrap_or_else(|| "info".to_owned());
        if let Err(error) = log.parse::<tracing_subscriber::filter::Targets>() {
            let what = format!("{error}; write info, or lm_admission=debug,warn");
            return Err(fault("log", what));
        }
        Ok(Config {
            interfaces: settings.interface,
            socket,
            key_file: settings.key_file.unwrap_or_else(|| PathBuf::from(KEY_FILE)),
            state_dir,
            bpffs,
            control_port,
            voters,
            allow_uids: settings.allow_uid,
            allow_gids: settings.allow_gid,
            peers: settings.peer.iter().map(|peer| peer.at(control_port)).collect(),
            mode: settings.mode.unwrap_or_default(),
            link_rate: settings.link_rate.map(|rate| rate.0),
            law,
            tolerance,
            replace_qdisc: settings.replace_qdisc,
            spin: settings.spin,
            user: settings.user,
            metrics: settings.metrics,
            log,
            programs_max,
            memory_max_bytes: settings.memory_max.map_or(4 << 30, |bytes| bytes.0),
            per_user: PerUser {
                queues: settings.queues_per_user,
                memory_bytes: settings.memory_per_user.map(|bytes| bytes.0),
                programs: settings.programs_per_user,
            },
        })
    }

    /// Whether programs of this user and primary group may connect.
    pub fn allows(&self, uid: u32, gid: u32) -> bool {
        self.allow_uids.contains(&uid) || self.allow_gids.contains(&gid)
    }

    /// What one user may have of something of which there is so much: all of it where one user alone may come, else half, so that another
    /// one finds some.
    pub fn share(&self, all: u64) -> u64 {
        let is_alone =
            self.allow_gids.is_empty() && self.allow_uids.iter().all(|uid| *uid == self.allow_uids[0]);
        match is_alone {
            true => all,
            false => (all / 2).max(1),
        }
    }

    /// Queues of an interface with so many that one user may have: two at least, since who receives takes two.
    pub fn queues_per_user(&self, queues: usize) -> usize {
        let share = (self.share(queues as u64) as usize).max(2);
        self.per_user.queues.unwrap_or(share)
    }

    /// Connections that one user may have.
    pub fn programs_per_user(&self) -> usize {
        let share = self.share(self.programs_max as u64) as usize;
        self.per_user.programs.unwrap_or(share)
    }

    /// Bytes that one user may have registered, of a machine's memory.
    pub fn memory_per_user_bytes(&self, machine_bytes: u64) -> u64 {
        let share = self.share(machine_bytes / 2);
        self.per_user.memory_bytes.unwrap_or(share)
    }

    /// Settings that a running daemon cannot change, and that differ.
    pub fn fixed_differences(&self, other: &Config) -> Vec<&'static str> {
        let differ = [
            ("interface", self.interfaces != other.interfaces),
            ("socket", self.socket != other.socket),
            ("state-dir", self.state_dir != other.state_dir),
            ("bpffs", self.bpffs != other.bpffs),
            ("control-port", self.control_port != other.control_port),
            ("policy", self.voters != other.voters),
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

const SOCKET: &str = lm_dataplane::ipc::SOCKET_PATH;

fn voters(
    policy: Option<PolicyName>,
    voters: &[HostName],
    control_port: u16,
) -> Result<Option<Vec<SocketAddrV4>>, ConfigError> {
    match policy.unwrap_or_default() {
        PolicyName::Concurrent if !voters.is_empty() => Err(fault(
            "voter",
            "only the policy exclusive has voters: add --policy exclusive, or leave them out",
        )),
        PolicyName::Concurrent => Ok(None),
        PolicyName::Exclusive => {
            let hosts: Vec<SocketAddrV4> = voters.iter().map(|voter| voter.at(control_port)).collect();
            let mut different = hosts.clone();
            different.sort();
            different.dedup();
            if different.len() != hosts.len() {
                return Err(fault("voter", "one is named twice: name each once"));
            }
            match hosts.len() {
                1 | 3 | 5 | 7 => Ok(Some(hosts)),
                count => Err(fault(
                    "voter",
                    format!(
                        "{count} voters: the policy exclusive needs 3 or 5, the same in the same order at all hosts \
                         (1 for a trial)"
                    ),
                )),
            }
        }
    }
}

#[cfg(test)]
mod tests;
