//! The command line's options and the file's keys: the same words, the same types, the same defaults.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Command, FromArgMatches as _, ValueEnum};
use lm_dataplane::ipc::SOCKET_PATH;
use lm_protocol::smoother::Law;
use serde::Deserialize;

use super::{BPFFS, BitRate, Bytes, HostName, parsed};

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

impl From<LawName> for Law {
    fn from(name: LawName) -> Law {
        match name {
            LawName::Paced => Law::Paced,
            LawName::Paper => Law::Paper,
        }
    }
}

/// What a daemon does, by command line or file. What is not set has its default.
#[derive(Clone, Debug, PartialEq, Args, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    /// Interface to receive on; may be repeated
    #[arg(long, short = 'i', value_name = "IF")]
    pub interface: Vec<String>,

    /// Socket for programs
    #[arg(long, value_name = "PATH", default_value = SOCKET_PATH)]
    pub socket: PathBuf,

    /// File with the cluster's key, as `keygen` writes it
    #[arg(long, value_name = "FILE", default_value = "/etc/lm-admissiond/key")]
    pub key_file: PathBuf,

    /// User whose programs may connect, by number; may be repeated [default: nobody]
    ///
    /// Whoever has an AF_XDP socket can send any frame from this host, under any address.
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,

    /// Primary group whose programs may connect, by number; may be repeated [default: nobody]
    #[arg(long, value_name = "GID")]
    pub allow_gid: Vec<u32>,

    /// UDP port of the admission protocol, the same at all hosts
    #[arg(long, value_name = "PORT", default_value_t = 7169)]
    pub control_port: u16,

    /// Who may receive at the same time as whom, the same at all hosts
    #[arg(long, value_enum, value_name = "POLICY", default_value_t)]
    pub policy: PolicyName,

    /// Host that decides under the policy exclusive; three or five, the same in the same order at all hosts
    #[arg(long, value_name = "ADDR", value_parser = parsed::<HostName>)]
    pub voter: Vec<HostName>,

    /// Host that a broadcast on the subnet does not reach; may be repeated
    #[arg(long, value_name = "ADDR", value_parser = parsed::<HostName>)]
    pub peer: Vec<HostName>,

    /// Where the gate is attached
    #[arg(long, value_enum, value_name = "MODE", default_value_t)]
    pub mode: GateMode,

    /// What the links of the interfaces carry, in bits a second: programs that send real-time messages have a smoother then [default: none]
    ///
    /// It holds all other traffic of this host back as far as real-time messages need it, the kernel's too.
    #[arg(long, value_name = "RATE", value_parser = parsed::<BitRate>)]
    pub link_rate: Option<BitRate>,

    /// How the smoother's credits come
    #[arg(long, value_enum, value_name = "LAW", default_value_t)]
    pub law: LawName,

    /// Share of packets that may be lost before the smoother lowers its rate, 0 to 1: Z of SS-RTUDP's equation 1
    #[arg(long, value_name = "Z", default_value_t = 0.0)]
    pub tolerance: f64,

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

    /// Directory of what the next daemon needs to go on
    #[arg(long, value_name = "DIR", default_value = "/run/lm-admissiond")]
    pub state_dir: PathBuf,

    /// The bpffs in which gates outlive the daemon, mounted if it is not
    #[arg(long, value_name = "DIR", default_value = BPFFS)]
    pub bpffs: PathBuf,

    /// What to log: error, warn, info, debug, or as RUST_LOG
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log: String,

    /// Programs that may be connected at the same time
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub programs_max: usize,

    /// Memory that a program may have registered
    ///
    /// It is pinned: it cannot be swapped out.
    #[arg(long, value_name = "BYTES", default_value = "4G", value_parser = parsed::<Bytes>)]
    pub memory_max: Bytes,

    /// Queues of an interface that all programs of a user may have [default: all where one user may come, else half, but 2]
    #[arg(long, value_name = "N")]
    pub queues_per_user: Option<usize>,

    /// Memory that all programs of a user may have registered [default: half of the machine's where one user may come, else a quarter]
    #[arg(long, value_name = "BYTES", value_parser = parsed::<Bytes>)]
    pub memory_per_user: Option<Bytes>,

    /// Programs of a user that may be connected at the same time [default: --programs-max where one user may come, else half]
    #[arg(long, value_name = "N")]
    pub programs_per_user: Option<usize>,
}

impl Default for Config {
    fn default() -> Config {
        let nothing = Config::augment_args(Command::new("")).get_matches_from([""; 0]);
        Config::from_arg_matches(&nothing).expect("what has no default may be left out")
    }
}
