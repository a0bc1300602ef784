//! What is checked in the guest. A check is a line of [`TABLE`] and a function, which runs in the guest, as root, in a
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
    /// Who runs it.
    pub list: List,
    /// What it shows, for `--list`.
    pub about: &'static str,
    /// What it is of.
    devices: &'static [Device],
    run: fn(&Plan, Device) -> Result<()>,
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
        about: "the kernel, the cards with their drivers and queues, and the huge pages are as asked for",
        devices: CARDS,
        run: cards::boot,
    },
    Check {
        name: "transfer",
        list: List::Machine,
        about: "a file of 1 MiB through lm-send and lm-recv in copy mode, compared by SHA-256",
        devices: &Device::ALL,
        run: transfer::transfer,
    },
    Check {
        name: "bind-zerocopy",
        list: List::Machine,
        about: "an endpoint's sockets, one on each queue, are in zero-copy mode by XDP_OPTIONS, over memory in huge \
            pages",
        devices: CARDS,
        run: cards::bind_zerocopy,
    },
    Check {
        name: "overlay",
        list: List::Short,
        about: "a message into a landing zone in zero-copy mode, and after each packet what every byte of the memory \
            is",
        devices: CARDS,
        run: overlay::check,
    },
    Check {
        name: "no-copies",
        list: List::Long,
        about: "no copying function of the kernel is called in zero-copy mode, by its own probes",
        devices: CARDS,
        run: copies::check,
    },
    Check {
        name: "transfer-copies",
        list: List::Short,
        about: "the same during a transfer of lm-send and lm-recv, and user space copies what lies at huge pages' \
            ends alone",
        devices: CARDS,
        run: copies::check_transfer,
    },
    Check {
        name: "sizes",
        list: List::Short,
        about: "messages from 1 byte to 16 MiB, at the bounds of fragments and windows, in windows of 16, 256 and \
            4096: every byte",
        devices: CARDS,
        run: streams::sizes,
    },
    Check {
        name: "foreign",
        list: List::Short,
        about: "the same while foreign packets come to the landing queue: with the same hash, VLAN-tagged, over-long",
        devices: CARDS,
        run: streams::foreign,
    },
    Check {
        name: "ipfrag",
        list: List::Short,
        about: "IP fragments under exclusive use: messages up to a whole UDP datagram, every byte; refused without",
        devices: CARDS,
        run: fragments::check,
    },
    Check {
        name: "finality",
        list: List::Short,
        about: "delivered messages are kept, and none of their bytes changes while messages and foreign packets go on \
            coming",
        devices: CARDS,
        run: streams::finality,
    },
    Check {
        name: "reading",
        list: List::Short,
        about: "messages are read while they arrive, every byte, and a file's pass while they are read at one end and \
            written at the other",
        devices: CARDS,
        run: streams::reading,
    },
    Check {
        name: "repair",
        list: List::Short,
        about: "loss, duplication, reordering and corruption on the way: every delivered byte is right, every message \
            accounted for",
        devices: CARDS,
        run: streams::repair,
    },
    Check {
        name: "abort",
        list: List::Long,
        about: "senders are killed in the middle of a message: the next one gets through, and memory does not grow",
        devices: CARDS,
        run: ends::abort,
    },
    Check {
        name: "stalled",
        list: List::Short,
        about: "a sender is stopped in the middle of a message: another one gets its place, and it goes on without; \
            every byte",
        devices: CARDS,
        run: stall::check,
    },
    Check {
        name: "rebind",
        list: List::Short,
        about: "both ends are opened, pass a message and are closed, 100 times: nothing is left on the card",
        devices: CARDS,
        run: ends::rebind,
    },
    Check {
        name: "takeover",
        list: List::Long,
        about: "a receiver is killed: the next one puts the card right, takes over, and leaves it as it was",
        devices: CARDS,
        run: ends::takeover,
    },
    Check {
        name: "kernel-traffic",
        list: List::Long,
        about: "ping and TCP between the same interfaces while a stream lands",
        devices: CARDS,
        run: ends::kernel_traffic,
    },
    Check {
        name: "refusals",
        list: List::Short,
        about: "one queue, no huge pages: zero-copy demanded is refused with the remedy, and auto copies and says so",
        devices: CARDS,
        run: refusals::cards,
    },
    Check {
        name: "no-driver",
        list: List::Short,
        about: "the same on veth, whose driver has no zero-copy",
        devices: &[Device::Veth],
        run: refusals::veth,
    },
    Check {
        name: "bare",
        list: List::Long,
        about: "bare AF_XDP, copied and in zero-copy mode: round trips from the first packet on, and a stream",
        devices: CARDS,
        run: bare::check,
    },
    Check {
        name: "shared",
        list: List::Long,
        about: "where one NAPI instance receives and sends for a queue, the calls that wake the driver do its work; \
            where not, interrupts",
        devices: &[Device::Igb],
        run: shared::check,
    },
    Check {
        name: "waits",
        list: List::Named,
        about: "round trips of LM from 64 bytes to 64 KiB, polling and sleeping, interrupts held back and not: none \
            waits for a timer",
        devices: CARDS,
        run: waits::check,
    },
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
    /// The line of the table.
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
    let of_check = |check: &'static Check| {
        let kinds = check.devices.iter().filter(|kind| devices.contains(kind));
        kinds.map(move |&device| Selected { check, device })
    };
    TABLE.iter().flat_map(of_check).collect()
}

/// The checks of these names: `transfer` is that of each device, `igb` every one of that device, `igb/transfer` a
/// single one. Devices alone, and no names at all, stand for those checks that `is_listed` takes.
pub fn select(
    names: &[String],
    devices: &[Device],
    is_listed: impl Fn(List) -> bool,
) -> Result<Vec<Selected>> {
    let all = all(devices);
    let listed = |one: &Selected| is_listed(one.check.list);
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
                "igb/transfer",
                "virtio-net/transfer",
                "igb/bind-zerocopy",
                "virtio-net/bind-zerocopy"
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
        for check in TABLE {
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
