//! The command line's options and the file's keys: the same words, the same types.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Deserialize;

use super::{BitRate, Bytes, HostName};

/// Who may receive at the same time as whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// Each landing queue carries sessions; requests wait for a place, the shortest first
    #[default]
    Concurrent,
    /// One host of the cluster receives at an instant; hosts that --voter names decide which
    Exclusive,
}

/// Where the gate is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum GateMode {
    /// In the driver, or else in the network stack
    #[default]
    Auto,
    /// In the driver
    Copy,
    /// In the network stack
    Generic,
}

/// How the smoother's credits come, and what a signal does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LawName {
    /// One by one; loss and delay of real-time messages lower the rate
    #[default]
    Paced,
    /// As many at once as SS-RTUDP's figure 5 says; loss lowers the rate
    Paper,
}

/// What can be set, by command line or file. What is not set has its default.
#[derive(Clone, Debug, Default, PartialEq, Args, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// Interface to receive on; may be repeated
    #[arg(long, short = 'i', value_name = "IF")]
    pub interface: Vec<String>,

    /// Socket for programs [default: /run/lm-admissiond/socket]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// File with the cluster's key, as `keygen` writes it [default: /etc/lm-admissiond/key]
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,

    /// User whose programs may connect, by number; may be repeated [default: nobody]
    ///
    /// Whoever has an AF_XDP socket can send any frame from this host, under any address.
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,

    /// Primary group whose programs may connect, by number; may be repeated [default: nobody]
    #[arg(long, value_name = "GID")]
    pub allow_gid: Vec<u32>,

    /// UDP port of the admission protocol, the same at all hosts [default: 7169]
    #[arg(long, value_name = "PORT")]
    pub control_port: Option<u16>,

    /// Who may receive at the same time as whom, the same at all hosts [default: concurrent]
    #[arg(long, value_enum, value_name = "POLICY")]
    pub policy: Option<PolicyName>,

    /// Host that decides under the policy exclusive; three or five, the same in the same order at all hosts
    #[arg(long, value_name = "ADDR")]
    pub voter: Vec<HostName>,

    /// Host that a broadcast on the subnet does not reach; may be repeated
    #[arg(long, value_name = "ADDR")]
    pub peer: Vec<HostName>,

    /// Where the gate is attached [default: auto]
    #[arg(long, value_enum, value_name = "MODE")]
    pub mode: Option<GateMode>,

    /// What the links of the interfaces carry, in bits a second: programs that send real-time messages have a smoother then [default: none]
    ///
    /// It holds all other traffic of this host back as far as real-time messages need it, the kernel's too.
    #[arg(long, value_name = "RATE")]
    pub link_rate: Option<BitRate>,

    /// How the smoother's credits come [default: paced]
    #[arg(long, value_enum, value_name = "LAW")]
    pub law: Option<LawName>,

    /// Share of packets that may be lost before the smoother lowers its rate, 0 to 1: Z of SS-RTUDP's equation 1 [default: 0]
    #[arg(long, value_name = "Z")]
    pub tolerance: Option<f64>,

    /// Let a root qdisc that somebody set give way to the smoother's meanwhile
    #[arg(long)]
    pub replace_qdisc: bool,

    /// Never sleep: answers sooner, and keeps a core busy
    #[arg(long)]
    pub spin: bool,

    /// User to become after the start, by name or number; keeps the four capabilities that are needed
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,

    /// Address on which to serve metrics for Prometheus [default: none]
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,

    /// Directory of what the next daemon needs to go on [default: /run/lm-admissiond]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// The bpffs in which gates outlive the daemon [default: /sys/fs/bpf, mounted if it is not]
    #[arg(long, value_name = "DIR")]
    pub bpffs: Option<PathBuf>,

    /// What to log: error, warn, info, debug, or as RUST_LOG [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,

    /// Programs that may be connected at the same time [default: 256]
    #[arg(long, value_name = "N")]
    pub programs_max: Option<usize>,

    /// Memory that a program may have registered [default: 4G]
    ///
    /// It is pinned: it cannot be swapped out.
    #[arg(long, value_name = "BYTES")]
    pub memory_max: Option<Bytes>,

    /// Queues of an interface that all programs of a user may have [default: all where one user may come, else half, but 2]
    #[arg(long, value_name = "N")]
    pub queues_per_user: Option<usize>,

    /// Memory that all programs of a user may have registered [default: half of the machine's where one user may come, else a quarter]
    #[arg(long, value_name = "BYTES")]
    pub memory_per_user: Option<Bytes>,

    /// Programs of a user that may be connected at the same time [default: --programs-max where one user may come, else half]
    #[arg(long, value_name = "N")]
    pub programs_per_user: Option<usize>,
}

impl Settings {
    /// These, and the file's where these say nothing.
    #[must_use]
    pub fn over(self, file: Settings) -> Settings {
        fn list<T>(own: Vec<T>, file: Vec<T>) -> Vec<T> {
            if own.is_empty() { file } else { own }
        }
        Settings {
            interface: list(self.interface, file.interface),
            socket: self.socket.or(file.socket),
            key_file: self.key_file.or(file.key_file),
            allow_uid: list(self.allow_uid, file.allow_uid),
            allow_gid: list(self.allow_gid, file.allow_gid),
            control_port: self.control_port.or(file.control_port),
            policy: self.policy.or(file.policy),
            voter: list(self.voter, file.voter),
            peer: list(self.peer, file.peer),
            mode: self.mode.or(file.mode),
            link_rate: self.link_rate.or(file.link_rate),
            law: self.law.or(file.law),
            tolerance: self.tolerance.or(file.tolerance),
            replace_qdisc: self.replace_qdisc || file.replace_qdisc,
            spin: self.spin || file.spin,
            user: self.user.or(file.user),
            metrics: self.metrics.or(file.metrics),
            state_dir: self.state_dir.or(file.state_dir),
            bpffs: self.bpffs.or(file.bpffs),
            log: self.log.or(file.log),
            programs_max: self.programs_max.or(file.programs_max),
            memory_max: self.memory_max.or(file.memory_max),
            queues_per_user: self.queues_per_user.or(file.queues_per_user),
            memory_per_user: self.memory_per_user.or(file.memory_per_user),
            programs_per_user: self.programs_per_user.or(file.programs_per_user),
        }
    }
}
