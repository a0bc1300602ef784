//! What is checked in the guest. A check is an entry of [`TABLE`] and a function, which runs in the guest, as root, in a
//! process of its own, on devices that are its own meanwhile.

mod bare;
pub mod card;
mod cards;
mod copies;
mod ends;
mod fragments;
mod overlay;
mod pair;
mod refusals;
mod shared;
mod spoil;
mod stall;
mod streams;
mod transfer;
mod waits;

use anyhow::{Context, Result, bail};

use super::devices::Device;
use super::protocol::{PLAN_PATH, Plan, Spoil, Work};

/// A check, of each kind of device in turn.
pub struct Check {
    /// Its name; the full name is `DEVICE/NAME`.
    pub name: &'static str,
    run: fn(&Plan, Device) -> Result<()>,
    /// What it shows, for `--list`.
    pub about: &'static str,
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

/// All checks, in the order in which they run, by the program that runs them and their subject. A new one needs an entry here and
/// nothing else.
pub const TABLE: &[(List, &[Device], &[Check])] = &[
    (
        List::Machine,
        CARDS,
        &[
            Check {
                name: "boot",
                run: cards::boot,
                about: "the kernel, the cards with their drivers and queues, and the huge pages are as asked \
                    for",
            },
            Check {
                name: "bind-zerocopy",
                run: cards::bind_zerocopy,
                about: "an endpoint's sockets, one on each queue, are in zero-copy mode by XDP_OPTIONS, over \
                    memory in huge pages",
            },
        ],
    ),
    (
        List::Machine,
        &Device::ALL,
        &[Check {
            name: "transfer",
            run: transfer::transfer,
            about: "a file of 1 MiB through lm-send and lm-recv in copy mode, compared by SHA-256",
        }],
    ),
    (
        List::Short,
        CARDS,
        &[
            Check {
                name: "overlay",
                run: overlay::check,
                about: "a message into a landing zone in zero-copy mode, and after each packet what every \
                    byte of the memory is",
            },
            Check {
                name: "transfer-copies",
                run: copies::check_transfer,
                about: "the same during a transfer of lm-send and lm-recv, and user space copies what lies at \
                    huge pages' ends alone",
            },
            Check {
                name: "sizes",
                run: streams::sizes,
                about: "messages from 1 byte to 16 MiB, at the bounds of fragments and windows, in windows of \
                    16, 256 and 4096: every byte",
            },
            Check {
                name: "foreign",
                run: streams::foreign,
                about: "the same while foreign packets come to the landing queue: with the same hash, \
                    VLAN-tagged, over-long",
            },
            Check {
                name: "ipfrag",
                run: fragments::check,
                about: "IP fragments under exclusive use: messages up to a whole UDP datagram, every byte; \
                    refused without",
            },
            Check {
                name: "finality",
                run: streams::finality,
                about: "delivered messages are kept, and none of their bytes changes while messages and \
                    foreign packets go on coming",
            },
            Check {
                name: "reading",
                run: streams::reading,
                about: "messages are read while they arrive, every byte, and a file's pass while they are \
                    read at one end and written at the other",
            },
            Check {
                name: "repair",
                run: streams::repair,
                about: "loss, duplication, reordering and corruption on the way: every delivered byte is \
                    right, every message accounted for",
            },
            Check {
                name: "stalled",
                run: stall::check,
                about: "a sender is stopped in the middle of a message: another one gets its place, and it \
                    goes on without; every byte",
            },
            Check {
                name: "rebind",
                run: ends::rebind,
                about: "both ends are opened, pass a message and are closed, 100 times: nothing is left on \
                    the card",
            },
            Check {
                name: "refusals",
                run: refusals::cards,
                about: "one queue, no huge pages: zero-copy demanded is refused with the remedy, and auto \
                    copies and says so",
            },
        ],
    ),
    (
        List::Short,
        &[Device::Veth],
        &[Check {
            name: "no-driver",
            run: refusals::veth,
            about: "the same on veth, whose driver has no zero-copy",
        }],
    ),
    (
        List::Long,
        CARDS,
        &[
            Check {
                name: "no-copies",
                run: copies::check,
                about: "no copying function of the kernel is called in zero-copy mode, by its own probes",
            },
            Check {
                name: "abort",
                run: ends::abort,
                about: "senders are killed in the middle of a message: the next one gets through, and memory \
                    does not grow",
            },
            Check {
                name: "takeover",
                run: ends::takeover,
                about: "a receiver is killed: the next one puts the card right, takes over, and leaves it as \
                    it was",
            },
            Check {
                name: "kernel-traffic",
                run: ends::kernel_traffic,
                about: "ping and TCP between the same interfaces while a stream lands",
            },
            Check {
                name: "bare",
                run: bare::check,
                about: "bare AF_XDP, copied and in zero-copy mode: round trips from the first packet on, and \
                    a stream",
            },
        ],
    ),
    (
        List::Long,
        &[Device::Igb],
        &[Check {
            name: "shared",
            run: shared::check,
            about: "where one NAPI instance receives and sends for a queue, the calls that wake the driver do \
                its work; where not, interrupts",
        }],
    ),
    (
        List::Named,
        CARDS,
        &[Check {
            name: "waits",
            run: waits::check,
            about: "round trips of LM from 64 bytes to 64 KiB, polling and sleeping, interrupts held back and \
                not: none waits for a timer",
        }],
    ),
];

/// Checks that are run with a fault, too, and must find it.
pub const SPOILED: [(&str, Spoil); 4] = [
    ("virtio-net/transfer-copies", Spoil::File),
    ("virtio-net/finality", Spoil::Message),
    ("virtio-net/rebind", Spoil::Card),
    ("igb/waits", Spoil::Interrupts),
];

/// A check of one device.
#[derive(Clone, Copy)]
pub struct Selected {
    /// The program that runs it.
    pub list: List,
    /// The entry of the table.
    pub check: &'static Check,
    /// The device.
    pub device: Device,
}

impl Selected {
    /// `igb/transfer`…
    pub fn name(&self) -> String {
        format!("{}/{}", self.device.name(), self.check.name)
    }
}

/// Every check that these devices can have.
pub fn all(devices: &[Device]) -> Vec<Selected> {
    let mut all = Vec::new();
    for &(list, kinds, checks) in TABLE {
        for check in checks {
            let kinds = kinds.iter().filter(|kind| devices.contains(kind));
            all.extend(kinds.map(|&device| Selected { list, check, device }));
        }
    }
    all
}

/// The checks of these names: `transfer` is that of each device, `igb` every one of that device, `igb/transfer` a
/// single one. Devices alone, and no names at all, stand for those checks that `is_listed` takes.
pub fn select(
    names: &[String],
    devices: &[Device],
    is_listed: impl Fn(List) -> bool,
) -> Result<Vec<Selected>> {
    let all = all(devices);
    let listed = |one: &Selected| is_listed(one.list);
    if names.is_empty() {
        return Ok(all.into_iter().filter(listed).collect());
    }
    let is_called = |one: &Selected, name: &String| {
        one.name() == *name || one.check.name == name || (one.device.name() == name && listed(one))
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

/// The guest's plan.
pub(super) fn read_plan() -> Result<Plan> {
    let text = std::fs::read_to_string(PLAN_PATH).with_context(|| {
        format!("cannot read {PLAN_PATH}: checks run in the guest of `cargo xtask vm` and nowhere else")
    })?;
    serde_json::from_str(&text).with_context(|| format!("cannot understand {PLAN_PATH}"))
}

/// Run a check of `cargo xtask vm` or a row of `cargo xtask bench card`, in its guest.
#[derive(Debug, clap::Args)]
pub struct TaskArguments {
    /// What to do, as JSON.
    work: String,
}

/// Runs a check, or prints what a row has measured as one line of JSON. In the guest.
pub fn run(arguments: &TaskArguments) -> Result<()> {
    let mut plan = read_plan()?;
    let (name, spoil) = match serde_json::from_str(&arguments.work).context("no task is that")? {
        Work::Check(name, spoil) => (name, spoil),
        Work::Row(row) => {
            println!("{}", card::measure(&row)?);
            return Ok(());
        }
        Work::Command(line) => bail!("{line} is the shell's"),
    };
    plan.spoil = spoil;
    let mut all = all(&Device::ALL).into_iter();
    let selected = all.find(|one| one.name() == name);
    let selected = selected.with_context(|| format!("no check is called {name}"))?;
    let found = (selected.check.run)(&plan, selected.device);
    match spoil {
        Some(spoil) => finds(spoil, found),
        None => found,
    }
}

/// A check with a fault passes by finding it.
fn finds(spoil: Spoil, found: Result<()>) -> Result<()> {
    match found {
        Err(error) if format!("{error:#}").contains(spoil.words()) => Ok(()),
        found => bail!("the fault that was put in was not found: {:#?}", found.err()),
    }
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
        let of = |is_listed: fn(List) -> bool| {
            let selected = select(&[], &Device::ALL, is_listed).unwrap();
            selected.iter().map(Selected::name).collect::<Vec<_>>()
        };
        let short = of(|list| list == List::Short);
        assert!(
            short.contains(&"virtio-net/foreign".to_owned()) && short.contains(&"veth/no-driver".to_owned())
        );
        assert!(!short.contains(&"igb/boot".to_owned()) && !short.contains(&"igb/abort".to_owned()));
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
                "igb/boot",
                "virtio-net/boot",
                "igb/bind-zerocopy",
                "virtio-net/bind-zerocopy",
                "igb/transfer",
                "virtio-net/transfer"
            ]
        );
        assert_eq!(names(&["transfer"], &Device::ALL).unwrap().len(), 3);
        assert_eq!(names(&["veth"], &Device::ALL).unwrap(), ["veth/transfer"]);
        assert_eq!(
            names(&["igb/bind-zerocopy", "igb/boot"], two).unwrap(),
            ["igb/boot", "igb/bind-zerocopy"]
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
        for check in TABLE.iter().flat_map(|(.., checks)| *checks) {
            assert!(!check.about.is_empty());
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
    fn a_check_with_a_fault_passes_by_finding_it() {
        let failed = || Err(anyhow::anyhow!("1 instead of 2").context("SHA-256"));
        finds(Spoil::File, failed()).unwrap();
        for (spoil, found) in [(Spoil::Card, failed()), (Spoil::File, Ok(()))] {
            let error = finds(spoil, found).unwrap_err().to_string();
            assert!(error.contains("was not found"), "{error}");
        }
    }

    #[test]
    fn checks_run_in_the_guest_only() {
        let work = String::new();
        let error = run(&TaskArguments { work }).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("in the guest of `cargo xtask vm`"), "{error}");
    }
}
