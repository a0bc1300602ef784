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
    /// What the guest's time is.
    pub clock: Clock,
    /// Whether checks are to do less.
    pub short: bool,
    /// The fault to put into a check: the check's own.
    #[serde(skip)]
    pub spoil: Option<Spoil>,
    /// What to run, in order.
    pub tasks: Vec<Task>,
}

/// A fault that is put into a check on purpose, once, to see whether the check finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// How packets pass between driver and program, as `--mode` of LM's programs takes it: the card writes into the messages'
/// memory, or the kernel copies each packet.
pub const ZERO_COPY: &str = "zero-copy";
/// See [`ZERO_COPY`].
pub const COPY: &str = "copy";

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
    /// The check of that name; one with a fault passes by finding it.
    Check(String, Option<Spoil>),
    /// A command line for the guest's shell.
    Command(String),
    /// A row of `cargo xtask bench card`.
    Row(Row),
}

/// One line of the guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The guest is up, with this release of the kernel.
    Booted(String),
    /// The task of that name begins.
    Started(String),
    /// A task has ended.
    Ended(Ended),
    /// The guest could not go on: why.
    Broken(String),
    /// All tasks have ended, and the guest powers off.
    Finished,
}

/// What became of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// Its name.
    pub name: String,
    /// Whether all was as it should be; where not, the output says why.
    pub passed: bool,
    /// How long it ran.
    pub seconds: f64,
    /// What a row has measured; null for everything else.
    pub report: Value,
    /// The end of what it said on standard output (command lines only) and standard error.
    pub output: String,
}

impl Ended {
    /// Its verdict as tables show it.
    pub fn verdict(&self) -> &'static str {
        if self.passed { "passed" } else { "FAILED" }
    }
}

impl Event {
    /// The line, with its end.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).expect("an event is plain data") + "\n"
    }

    /// Reads a line.
    pub fn parse(line: &[u8]) -> Result<Event> {
        serde_json::from_slice(line).with_context(|| {
            let start: String = String::from_utf8_lossy(line).chars().take(80).collect();
            format!("the guest said something that is no result: {start:?}; its console may tell more (--console FILE)")
        })
    }
}

/// The last bytes of a text, whole characters, at most `len`.
pub fn tail(text: &str, len: usize) -> &str {
    let from = text.len().saturating_sub(len);
    &text[text.ceil_char_boundary(from)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_cross_the_port_as_lines() {
        let events = [
            Event::Booted("7.2".to_owned()),
            Event::Started("boot".to_owned()),
            Event::Ended(Ended {
                name: "igb/transfer".to_owned(),
                passed: false,
                seconds: 1.5,
                report: Value::Null,
                output: "error: \"quoted\"\nand more".to_owned(),
            }),
            Event::Broken("no devices".to_owned()),
            Event::Finished,
        ];
        let text: String = events.iter().map(Event::to_line).collect();
        let lines = text.split_inclusive('\n');
        let found: Vec<Event> = lines.map(|line| Event::parse(line.as_bytes()).unwrap()).collect();
        assert_eq!(found, events);
    }

    #[test]
    fn a_line_that_is_no_result_is_named() {
        for line in ["", "garbage", "{}", r#"{"else":"x"}"#, r#"{"started":7}"#] {
            let error = format!("{:#}", Event::parse(line.as_bytes()).unwrap_err());
            assert!(
                error.contains("no result") && error.contains("--console"),
                "{error}"
            );
        }
    }

    #[test]
    fn tails_end_where_the_text_ends() {
        assert_eq!(tail("abcdef", 3), "def");
        assert_eq!(tail("abc", 10), "abc");
        assert_eq!(tail("aéé", 3), "é", "never half a character");
        assert_eq!(tail("", 0), "");
    }
}
