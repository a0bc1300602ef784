//! What the host tells the guest to do, and what the guest says of it: a plan in the initramfs, lines of JSON on a
//! serial port.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::checks::card::Row;
use super::devices::Device;
use super::qemu::Clock;

/// Where the plan lies in the guest.
pub const PLAN_PATH: &str = "/lm/plan.json";
/// The folder of the modules in the guest.
pub const MODULES_DIR: &str = "/lm/modules";

/// Everything that the guest has to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// File names of modules in [`MODULES_DIR`], in the order in which they are loaded.
    pub modules: Vec<String>,
    /// The kinds of devices that the machine has.
    pub devices: Vec<Device>,
    /// Huge pages of 2 MiB that the kernel was asked to reserve.
    pub huge_pages: u32,
    /// How LM's programs are to receive where a check does not say otherwise.
    pub mode: Mode,
    /// What the guest's time is.
    pub clock: Clock,
    /// Whether checks are to do less.
    pub short: bool,
    /// The fault to put into a check; the check's own command line says which.
    #[serde(skip)]
    pub spoil: Option<Spoil>,
    /// What to run, in order.
    pub tasks: Vec<Task>,
}

/// A fault that is put into a check on purpose, once, to see whether the check finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Spoil {
    /// A byte of a received file is another.
    File,
    /// Bytes of delivered messages change afterwards.
    Message,
    /// A card is left with another RSS table.
    Card,
    /// A card holds its interrupts back for longer than it is to.
    Interrupts,
}

impl Spoil {
    /// As the command line has it.
    pub const fn option(self) -> &'static str {
        match self {
            Spoil::File => "file",
            Spoil::Message => "message",
            Spoil::Card => "card",
            Spoil::Interrupts => "interrupts",
        }
    }

    /// In what a check says that has found it.
    pub const fn words(self) -> &'static str {
        match self {
            Spoil::File => "SHA-256",
            Spoil::Message => "changed",
            Spoil::Card => "the RSS tables were",
            Spoil::Interrupts => "waited for a timer",
        }
    }
}

/// How packets pass between driver and program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The card writes into the messages' memory.
    #[default]
    ZeroCopy,
    /// The kernel copies each packet.
    Copy,
    /// Whatever the driver has.
    #[value(skip)]
    Auto,
}

impl Mode {
    /// As `--mode` of LM's programs takes it.
    pub const fn option(self) -> &'static str {
        match self {
            Mode::ZeroCopy => "zero-copy",
            Mode::Copy => "copy",
            Mode::Auto => "auto",
        }
    }

    /// As LM's programs report it. On a card whose driver is as it should be `auto` is zero-copy.
    pub const fn in_effect(self) -> &'static str {
        match self {
            Mode::ZeroCopy | Mode::Auto => "zero-copy",
            Mode::Copy => "copy-native",
        }
    }

    /// The same, as the ends of measurements report it.
    pub const fn of_ends(self) -> &'static str {
        match self {
            Mode::ZeroCopy | Mode::Auto => "native zero-copy",
            Mode::Copy => "native copy",
        }
    }
}

/// One thing to run in the guest, in a process of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// No other one has this name.
    pub name: String,
    /// After so many seconds it is killed and has failed.
    pub limit_s: u32,
    /// What it does.
    pub work: Work,
}

/// What a task does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// The check of that name.
    Check(String),
    /// The check of that name with a fault, which it must find.
    Spoiled(String, Spoil),
    /// A command line for the guest's shell.
    Command(String),
    /// A row of `cargo xtask bench card`.
    Row(Row),
}

/// One line of the guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The guest is up: kernel, devices, and what could not be set up.
    Booted {
        /// What the guest found, see `guest::facts`.
        facts: Value,
    },
    /// A task begins.
    Started {
        /// Its name.
        name: String,
    },
    /// A task has ended.
    Ended(Ended),
    /// The guest could not go on.
    Broken {
        /// Why.
        reason: String,
    },
    /// All tasks have ended, and the guest powers off.
    Finished,
}

/// What became of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// Its name.
    pub name: String,
    /// Its verdict.
    pub outcome: Outcome,
    /// How long it ran.
    pub seconds: f64,
    /// What the check found; null for a failed one and for command lines.
    pub report: Value,
    /// The end of what it said on standard output (command lines only) and standard error.
    pub output: String,
}

/// A verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// As it should be.
    Passed,
    /// Not as it should be; the output says why.
    Failed,
    /// This kernel or machine cannot do that; the output says why.
    Skipped,
}

impl Outcome {
    /// As tables show it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Outcome::Passed => "passed",
            Outcome::Failed => "FAILED",
            Outcome::Skipped => "skipped",
        }
    }
}

impl Event {
    /// The line, with its end.
    pub fn to_line(&self) -> String {
        let mut line = serde_json::to_string(self).expect("an event is plain data");
        line.push('\n');
        line
    }

    /// Reads a line.
    pub fn parse(line: &str) -> Result<Event> {
        serde_json::from_str(line).with_context(|| {
            let start: String = line.chars().take(80).collect();
            format!("the guest said something that is no result: {start:?}; its console may tell more (--console FILE)")
        })
    }
}

/// Cuts bytes that come in pieces into lines.
#[derive(Debug, Default)]
pub struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// Takes a piece; the lines that are complete with it, without their ends.
    pub fn push(&mut self, piece: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(piece);
        let mut lines = Vec::new();
        while let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line).trim().to_owned();
            if !line.is_empty() {
                lines.push(line);
            }
        }
        lines
    }
}

/// The last bytes of a text, whole characters, at most `len`.
pub fn tail(text: &str, len: usize) -> &str {
    let from = text.len().saturating_sub(len);
    let start = (from..=text.len()).find(|&at| text.is_char_boundary(at));
    &text[start.unwrap_or(text.len())..]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_cross_the_port_as_lines() {
        let events = [
            Event::Booted {
                facts: json!({"kernel": "7.2"}),
            },
            Event::Started {
                name: "boot".to_owned(),
            },
            Event::Ended(Ended {
                name: "igb/transfer".to_owned(),
                outcome: Outcome::Failed,
                seconds: 1.5,
                report: Value::Null,
                output: "error: \"quoted\"\nand more".to_owned(),
            }),
            Event::Broken {
                reason: "no devices".to_owned(),
            },
            Event::Finished,
        ];
        let text: String = events.iter().map(Event::to_line).collect();
        for piece_len in [1, 7, text.len()] {
            let mut lines = Lines::default();
            let found: Vec<Event> = text
                .as_bytes()
                .chunks(piece_len)
                .flat_map(|piece| lines.push(piece))
                .map(|line| Event::parse(&line).unwrap())
                .collect();
            assert_eq!(found, events);
        }
        assert_eq!(
            Event::Finished.to_line(),
            "{\"event\":\"finished\"}\n",
            "others read these lines too"
        );
    }

    #[test]
    fn a_line_that_is_no_result_is_named() {
        for line in [
            "",
            "garbage",
            "{}",
            r#"{"event":"else"}"#,
            r#"{"event":"started"}"#,
        ] {
            let error = format!("{:#}", Event::parse(line).unwrap_err());
            assert!(
                error.contains("no result") && error.contains("--console"),
                "{error}"
            );
        }
        let mut lines = Lines::default();
        assert_eq!(lines.push(b"\r\n\r\n"), Vec::<String>::new());
        assert_eq!(lines.push(b"half"), Vec::<String>::new());
        assert_eq!(lines.push(b" a line\r\nrest"), ["half a line"]);
    }

    #[test]
    fn tails_end_where_the_text_ends() {
        assert_eq!(tail("abcdef", 3), "def");
        assert_eq!(tail("abc", 10), "abc");
        assert_eq!(tail("aéé", 3), "é", "never half a character");
        assert_eq!(tail("", 0), "");
    }
}
