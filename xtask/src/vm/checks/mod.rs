//! What is checked in the guest. A check is a line of [`TABLE`] and a function, which runs in the guest, as root, in a
//! process of its own, on devices that are its own meanwhile.

mod bare;
pub mod card;
mod cards;
mod copies;
mod ends;
mod fragments;
pub mod overlay;
mod pair;
mod probes;
mod refusals;
mod shared;
mod spoil;
mod stall;
mod streams;
mod transfer;
mod waits;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::devices::Device;
use super::protocol::{PLAN_PATH, Plan, Spoil};

/// A check, of the machine or of each kind of device in turn.
pub struct Check {
    /// Its name; with devices the full name is `DEVICE/NAME`.
    pub name: &'static str,
    /// Who runs it.
    pub list: List,
    /// It has failed after so many seconds.
    pub limit_s: u32,
    /// What it shows, for `--list`.
    pub about: &'static str,
    run: Run,
}

/// What a check is of, and what it does; it says what it found.
enum Run {
    Machine(fn(&Plan) -> Result<Value>),
    Each(&'static [Device], fn(&Plan, Device) -> Result<Value>),
}

/// Who runs a check that nobody names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// `cargo xtask vm`: machine, cards, and that the tools run on them.
    Machine,
    /// `cargo xtask vm --all`, and with less to do `cargo xtask vm --short`.
    Short,
    /// `cargo xtask vm --all`.
    Long,
    /// Nobody: it judges time, which is the host's unless instructions are counted.
    Named,
}

/// Devices with zero-copy.
const CARDS: &[Device] = &[Device::Igb, Device::VirtioNet];

/// All checks, in the order in which they run. A new one needs a line here and nothing else.
pub const TABLE: &[Check] = &[
    Check {
        name: "boot",
        list: List::Machine,
        limit_s: 20,
        about: "the kernel, the cards with their drivers and queues, and the huge pages are as asked for",
        run: Run::Machine(cards::boot),
    },
    Check {
        name: "transfer",
        list: List::Machine,
        limit_s: 60,
        about: "a file of 1 MiB through lm-send and lm-recv in copy mode, compared by SHA-256",
        run: Run::Each(&Device::ALL, transfer::transfer),
    },
    Check {
        name: "bind-zerocopy",
        list: List::Machine,
        limit_s: 60,
        about: "an endpoint's sockets, one on each queue, are in zero-copy mode by XDP_OPTIONS, over memory in huge \
            pages",
        run: Run::Each(CARDS, cards::bind_zerocopy),
    },
    Check {
        name: "overlay",
        list: List::Short,
        limit_s: 60,
        about: "a message into a landing zone in zero-copy mode, and after each packet what every byte of the memory \
            is",
        run: Run::Each(CARDS, overlay::check),
    },
    Check {
        name: "no-copies",
        list: List::Long,
        limit_s: 150,
        about: "no copying function of the kernel is called in zero-copy mode, by its own probes",
        run: Run::Each(CARDS, copies::check),
    },
    Check {
        name: "transfer-copies",
        list: List::Short,
        limit_s: 150,
        about: "the same during a transfer of lm-send and lm-recv, and user space copies what lies at huge pages' \
            ends alone",
        run: Run::Each(CARDS, copies::check_transfer),
    },
    Check {
        name: "sizes",
        list: List::Short,
        limit_s: 180,
        about: "messages from 1 byte to 16 MiB, at the bounds of fragments and windows, in windows of 16, 256 and \
            4096: every byte",
        run: Run::Each(CARDS, streams::sizes),
    },
    Check {
        name: "foreign",
        list: List::Short,
        limit_s: 180,
        about: "the same while foreign packets come to the landing queue: with the same hash, VLAN-tagged, over-long",
        run: Run::Each(CARDS, streams::foreign),
    },
    Check {
        name: "ipfrag",
        list: List::Short,
        limit_s: 180,
        about: "IP fragments under exclusive use: messages up to a whole UDP datagram, every byte; refused without",
        run: Run::Each(CARDS, fragments::check),
    },
    Check {
        name: "finality",
        list: List::Short,
        limit_s: 120,
        about: "delivered messages are kept, and none of their bytes changes while messages and foreign packets go on \
            coming",
        run: Run::Each(CARDS, streams::finality),
    },
    Check {
        name: "reading",
        list: List::Short,
        limit_s: 120,
        about: "messages are read while they arrive, every byte, and a file's pass while they are read at one end and \
            written at the other",
        run: Run::Each(CARDS, streams::reading),
    },
    Check {
        name: "repair",
        list: List::Short,
        limit_s: 240,
        about: "loss, duplication, reordering and corruption on the way: every delivered byte is right, every message \
            accounted for",
        run: Run::Each(CARDS, streams::repair),
    },
    Check {
        name: "abort",
        list: List::Long,
        limit_s: 300,
        about: "senders are killed in the middle of a message: the next one gets through, and memory does not grow",
        run: Run::Each(CARDS, ends::abort),
    },
    Check {
        name: "stalled",
        list: List::Short,
        limit_s: 180,
        about: "a sender is stopped in the middle of a message: another one gets its place, and it goes on without; \
            every byte",
        run: Run::Each(CARDS, stall::check),
    },
    Check {
        name: "rebind",
        list: List::Short,
        limit_s: 1200,
        about: "both ends are opened, pass a message and are closed, 100 times: nothing is left on the card",
        run: Run::Each(CARDS, ends::rebind),
    },
    Check {
        name: "takeover",
        list: List::Long,
        limit_s: 120,
        about: "a receiver is killed: the next one puts the card right, takes over, and leaves it as it was",
        run: Run::Each(CARDS, ends::takeover),
    },
    Check {
        name: "kernel-traffic",
        list: List::Long,
        limit_s: 120,
        about: "ping and TCP between the same interfaces while a stream lands",
        run: Run::Each(CARDS, ends::kernel_traffic),
    },
    Check {
        name: "refusals",
        list: List::Short,
        limit_s: 120,
        about: "one queue, no huge pages: zero-copy demanded is refused with the remedy, and auto copies and says so",
        run: Run::Each(CARDS, refusals::cards),
    },
    Check {
        name: "no-driver",
        list: List::Short,
        limit_s: 60,
        about: "the same on veth, whose driver has no zero-copy",
        run: Run::Each(&[Device::Veth], refusals::veth),
    },
    Check {
        name: "bare",
        list: List::Long,
        limit_s: 120,
        about: "bare AF_XDP, copied and in zero-copy mode: round trips from the first packet on, and a stream",
        run: Run::Each(CARDS, bare::check),
    },
    Check {
        name: "shared",
        list: List::Long,
        limit_s: 240,
        about: "where one NAPI instance receives and sends for a queue, the calls that wake the driver do its work; \
            where not, interrupts",
        run: Run::Each(&[Device::Igb], shared::check),
    },
    Check {
        name: "waits",
        list: List::Named,
        limit_s: 480,
        about: "round trips of LM from 64 bytes to 64 KiB, polling and sleeping, interrupts held back and not: none \
            waits for a timer",
        run: Run::Each(CARDS, waits::check),
    },
];

/// Checks that are run with a fault, too, and must find it.
pub const SPOILED: [(&str, Spoil); 4] = [
    ("virtio-net/transfer-copies", Spoil::File),
    ("virtio-net/finality", Spoil::Message),
    ("virtio-net/rebind", Spoil::Card),
    ("igb/waits", Spoil::Interrupts),
];

/// A check of one device, or of the machine.
#[derive(Clone, Copy)]
pub struct Selected {
    /// The line of the table.
    pub check: &'static Check,
    /// The device.
    pub device: Option<Device>,
}

impl Selected {
    /// `boot`, `igb/transfer`…
    pub fn name(&self) -> String {
        match self.device {
            Some(device) => format!("{}/{}", device.name(), self.check.name),
            None => self.check.name.to_owned(),
        }
    }
}

/// Every check that these devices can have.
pub fn all(devices: &[Device]) -> Vec<Selected> {
    let of_check = |check: &'static Check| match check.run {
        Run::Machine(_) => vec![Selected { check, device: None }],
        Run::Each(kinds, _) => (kinds.iter())
            .filter(|kind| devices.contains(kind))
            .map(|&kind| Selected {
                check,
                device: Some(kind),
            })
            .collect(),
    };
    TABLE.iter().flat_map(of_check).collect()
}

/// The checks of these names: `transfer` is that of each device, `igb` every one of that device, `igb/transfer` a
/// single one. Devices alone, and no names at all, stand for those checks that `is_listed` takes.
pub fn select(names: &[String], devices: &[Device], is_listed: fn(List) -> bool) -> Result<Vec<Selected>> {
    let all = all(devices);
    let listed = |one: &Selected| is_listed(one.check.list);
    if names.is_empty() {
        return Ok(all.into_iter().filter(listed).collect());
    }
    let is_called = |one: &Selected, name: &String| {
        let is_device = || one.device.is_some_and(|device| device.name() == name);
        one.name() == *name || one.check.name == name || (is_device() && listed(one))
    };
    if let Some(unknown) = names
        .iter()
        .find(|name| !all.iter().any(|one| is_called(one, name)))
    {
        let known: Vec<String> = all.iter().map(Selected::name).collect();
        bail!("no check is called {unknown}; there are {}", known.join(", "));
    }
    Ok(all
        .into_iter()
        .filter(|one| names.iter().any(|name| is_called(one, name)))
        .collect())
}

/// What this kernel or machine cannot do: no failure.
#[derive(Debug)]
struct NotHere(String);

impl std::fmt::Display for NotHere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotHere {}

/// Run one check of `cargo xtask vm`, in its guest.
#[derive(Debug, clap::Args)]
pub struct CheckArguments {
    /// Its full name.
    name: String,
    /// A fault to put into it.
    #[arg(long, value_enum)]
    spoil: Option<Spoil>,
}

/// Runs a check and prints its report as one line of JSON. In the guest.
pub fn run(arguments: &CheckArguments) -> Result<()> {
    let text = std::fs::read_to_string(PLAN_PATH).with_context(|| {
        format!("cannot read {PLAN_PATH}: checks run in the guest of `cargo xtask vm` and nowhere else")
    })?;
    let mut plan: Plan =
        serde_json::from_str(&text).with_context(|| format!("cannot understand {PLAN_PATH}"))?;
    plan.spoil = arguments.spoil;
    let found = all(&Device::ALL)
        .into_iter()
        .find(|one| one.name() == arguments.name);
    let selected = found.with_context(|| format!("no check is called {}", arguments.name))?;
    let found = match (&selected.check.run, selected.device) {
        (Run::Machine(run), _) => run(&plan),
        (Run::Each(_, run), Some(device)) => run(&plan, device),
        (Run::Each(..), None) => unreachable!("it was selected for a device"),
    };
    match found {
        Ok(report) => println!("{report}"),
        Err(error) => match error.downcast_ref::<NotHere>() {
            Some(NotHere(why)) => println!("{}", json!({"skipped": why})),
            None => return Err(error),
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str], devices: &[Device]) -> Result<Vec<String>> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let selected = select(&names, devices, |list| list == List::Machine)?;
        Ok(selected.iter().map(Selected::name).collect())
    }

    #[test]
    fn what_nobody_names_is_run_by_its_list() {
        let of = |is_listed| {
            let selected = select(&[], &Device::ALL, is_listed).unwrap();
            selected.iter().map(Selected::name).collect::<Vec<_>>()
        };
        let short = of(|list| list == List::Short);
        assert!(
            short.contains(&"virtio-net/foreign".to_owned()) && short.contains(&"veth/no-driver".to_owned())
        );
        assert!(!short.contains(&"boot".to_owned()) && !short.contains(&"igb/abort".to_owned()));
        let named = of(|list| list == List::Named);
        let waits = ["igb/waits", "virtio-net/waits"];
        assert_eq!(named, waits);
        assert_eq!(names(&["waits"], CARDS).unwrap(), waits, "by name from any list");
    }

    #[test]
    fn checks_are_selected_by_name_device_or_both() {
        let two = &[Device::Igb, Device::VirtioNet];
        assert_eq!(
            names(&[], two).unwrap(),
            [
                "boot",
                "igb/transfer",
                "virtio-net/transfer",
                "igb/bind-zerocopy",
                "virtio-net/bind-zerocopy"
            ]
        );
        assert_eq!(names(&["transfer"], &Device::ALL).unwrap().len(), 3);
        assert_eq!(names(&["veth"], &Device::ALL).unwrap(), ["veth/transfer"]);
        assert_eq!(
            names(&["igb/bind-zerocopy", "boot"], two).unwrap(),
            ["boot", "igb/bind-zerocopy"]
        );
        let error = names(&["veth/transfer"], two).unwrap_err().to_string();
        assert!(
            error.contains("no check is called veth/transfer") && error.contains("igb/transfer"),
            "{error}"
        );
    }

    #[test]
    fn every_check_has_a_name_of_its_own() {
        let mut names: Vec<String> = all(&Device::ALL).iter().map(Selected::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        for check in TABLE {
            assert!(check.limit_s > 0 && !check.about.is_empty());
            assert!(Device::ALL.iter().all(|device| device.name() != check.name));
        }
    }

    #[test]
    fn checks_that_are_spoiled_exist() {
        let names = SPOILED.map(|(name, _)| name.to_owned());
        let found = select(&names, &Device::ALL, |_| false).unwrap();
        assert_eq!(found.len(), SPOILED.len());
    }

    #[test]
    fn checks_run_in_the_guest_only() {
        let name = "boot".to_owned();
        let error = run(&CheckArguments { name, spoil: None }).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("in the guest of `cargo xtask vm`"), "{error}");
    }
}
