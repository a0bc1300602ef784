//! What is checked in the guest. A check is a line of [`TABLE`] and a function, which runs in the guest, as root, in a process of
//! its own, on devices that nobody else uses meanwhile.

use std::io::Read as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::devices::Device;
use super::guest::{all_cards, cards, facts};
use super::protocol::{PLAN_PATH, Plan};
use super::{copies, debian, overlay, qemu};
use crate::bed::leftovers::temporary_folder;
use crate::bed::{Bed, BedConfig, Host, INTERFACE, Launch};
use crate::content;

/// A check, of the machine or of each kind of device in turn.
pub struct Check {
    /// Its name; with devices the full name is `DEVICE/NAME`.
    pub name: &'static str,
    /// Kinds of devices that it is for; none: for the machine.
    pub devices: &'static [Device],
    /// It has failed after so many seconds.
    pub limit_s: u32,
    /// What it shows, for `--list`.
    pub about: &'static str,
    run: fn(&Plan, Option<Device>) -> Result<Value>,
}

/// All checks, in the order in which they run. A new one needs a line here and nothing else.
pub const TABLE: &[Check] = &[
    Check {
        name: "boot",
        devices: &[],
        limit_s: 20,
        about: "the kernel, the cards with their drivers and queues, and the huge pages are as asked for",
        run: boot,
    },
    Check {
        name: "transfer",
        devices: &[Device::Igb, Device::VirtioNet, Device::Veth],
        limit_s: 60,
        about: "a file of 1 MiB through lm-send and lm-recv in copy mode, compared by SHA-256",
        run: transfer,
    },
    Check {
        name: "bind-zerocopy",
        devices: &[Device::Igb, Device::VirtioNet],
        limit_s: 60,
        about: "each queue binds landing memory on huge pages with XDP_ZEROCOPY, and XDP_OPTIONS says so",
        run: bind_zerocopy,
    },
    Check {
        name: "overlay",
        devices: &[Device::Igb, Device::VirtioNet],
        limit_s: 60,
        about: "a message into a landing zone in zero-copy mode, and after each packet what every byte of the memory is",
        run: overlay::check,
    },
    Check {
        name: "no-copies",
        devices: &[Device::Igb, Device::VirtioNet],
        limit_s: 150,
        about: "no copying function of the kernel is called in zero-copy mode, by its own probes",
        run: copies::check,
    },
    Check {
        name: "transfer-copies",
        devices: &[Device::Igb, Device::VirtioNet],
        limit_s: 150,
        about: "the same during a transfer of lm-send and lm-recv, and user space copies what lies at huge pages' ends alone",
        run: copies::check_transfer,
    },
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
    let of_check = |check: &'static Check| {
        let of_machine = check
            .devices
            .is_empty()
            .then_some(Selected { check, device: None });
        let of_devices = check.devices.iter().filter(|device| devices.contains(device));
        of_machine
            .into_iter()
            .chain(of_devices.map(move |&device| Selected {
                check,
                device: Some(device),
            }))
    };
    TABLE.iter().flat_map(of_check).collect()
}

/// The checks of these names: `transfer` is that of each device, `igb` every one of that device, `igb/transfer` a single one.
/// No names: all.
pub fn select(names: &[String], devices: &[Device]) -> Result<Vec<Selected>> {
    let all = all(devices);
    if names.is_empty() {
        return Ok(all);
    }
    let is_called = |one: &Selected, name: &String| {
        one.name() == *name
            || one.check.name == name
            || one.device.is_some_and(|device| device.name() == name)
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
}

/// Runs a check and prints its report as one line of JSON. In the guest.
pub fn run(arguments: &CheckArguments) -> Result<()> {
    let text = std::fs::read_to_string(PLAN_PATH).with_context(|| {
        format!("cannot read {PLAN_PATH}: checks run in the guest of `cargo xtask vm` and nowhere else")
    })?;
    let plan: Plan = serde_json::from_str(&text).with_context(|| format!("cannot understand {PLAN_PATH}"))?;
    let found = all(&Device::ALL)
        .into_iter()
        .find(|one| one.name() == arguments.name);
    let selected = found.with_context(|| format!("no check is called {}", arguments.name))?;
    match (selected.check.run)(&plan, selected.device) {
        Ok(report) => println!("{report}"),
        Err(error) => match error.downcast_ref::<NotHere>() {
            Some(NotHere(why)) => println!("{}", json!({"skipped": why})),
            None => return Err(error),
        },
    }
    Ok(())
}

fn boot(plan: &Plan, _device: Option<Device>) -> Result<Value> {
    let facts = facts();
    for device in &plan.devices {
        let Some(driver) = device.driver() else {
            continue;
        };
        let found = cards(driver);
        ensure!(
            found.len() == 2,
            "{} interfaces with the driver {driver} instead of 2; all cards: {:?}",
            found.len(),
            all_cards()
        );
        ensure!(
            found.iter().all(|card| card.rx_queues > 0),
            "no queues: {found:?}"
        );
    }
    let reserved = facts["huge_pages"]["total"].as_u64();
    ensure!(
        reserved == Some(u64::from(plan.huge_pages)),
        "{reserved:?} huge pages instead of {}; does the machine have the memory?",
        plan.huge_pages
    );
    Ok(facts)
}

/// Two hosts on the devices of one kind, with a link.
pub(super) fn hosts(device: Option<Device>) -> Result<Bed> {
    let device = device.context("this check is of a device")?;
    let cards = match device.driver() {
        None => None,
        Some(driver) => {
            let found = cards(driver);
            let [one, other] = found.as_slice() else {
                bail!("{} interfaces with the driver {driver} instead of 2", found.len());
            };
            Some([one.interface.clone(), other.interface.clone()])
        }
    };
    let bed = Bed::new(&BedConfig {
        cards,
        ..BedConfig::default()
    })?;
    await_link(&bed)?;
    Ok(bed)
}

/// Waits until both interfaces have their link: a card negotiates it anew whenever it is set up.
pub(super) fn await_link(bed: &Bed) -> Result<()> {
    let limit = Duration::from_secs(15);
    let end = Instant::now() + limit;
    let carrier = format!("/sys/class/net/{INTERFACE}/carrier");
    for host in [bed.left(), bed.right()] {
        while host.read_file(&carrier).ok().as_deref() != Some("1") {
            ensure!(
                Instant::now() < end,
                "no link on {} within {} s",
                host.name(),
                limit.as_secs()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

/// Sends everything that comes in to the landing queue, as a rule of a real card would. Whether that worked.
fn steer(host: &Host) -> Result<bool> {
    let program = Launch::new("ethtool").args(["-X", INTERFACE, "start", "1", "equal", "1"]);
    Ok(host.spawn(program)?.outcome()?.status.success())
}

const FILE_LEN: u64 = 1 << 20;

pub(super) fn transfer(_plan: &Plan, device: Option<Device>) -> Result<Value> {
    let bed = hosts(device)?;
    let (left, right) = (bed.left(), bed.right());
    let (folder, _folder) = temporary_folder(&std::env::temp_dir(), "transfer")?;
    let (file, received) = (folder.join("sent"), folder.join("received"));
    write_random(&file, FILE_LEN)?;
    let sha256 = content::sha256(&file)?;
    let tool = |name: &str| {
        Launch::new(Path::new("/bin").join(name)).args(["--interface", INTERFACE, "--mode", "copy", "--json"])
    };
    let mut receiver = right.spawn(
        tool("lm-recv")
            .args(["--count", "1", "--output"])
            .arg(&received)
            .core(1)
            .time_limit(Duration::from_secs(40)),
    )?;
    // Said when the gate is attached; the control port is bound before.
    receiver.await_text("listening on")?;
    // The gate made the card begin anew.
    await_link(&bed)?;
    // Only now: attaching an XDP program sets virtio-net's number of queues, at which QEMU forgets its table (virtio_net_handle_mq
    // of hw/net/virtio-net.c).
    let steered = device != Some(Device::Veth) && steer(right)?;
    let sender = tool("lm-send")
        .args(["--to", &right.address().to_string()])
        .arg(&file)
        .core(0)
        .time_limit(Duration::from_secs(40));
    let sent = left.spawn(sender)?.finish()?.json().context("lm-send --json")?;
    let report = receiver.finish()?.json().context("lm-recv --json")?;
    let found = content::sha256(&received)?;
    ensure!(
        found == sha256,
        "what arrived is not what was sent: SHA-256 {found} instead of {sha256}"
    );
    Ok(
        json!({"bytes": FILE_LEN, "sha256": sha256, "steered_to_queue_1": steered, "send": sent, "receive": report}),
    )
}

pub(super) fn write_random(path: &Path, len: u64) -> Result<()> {
    let source = std::fs::File::open("/dev/urandom").context("cannot open /dev/urandom")?;
    let mut file = std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let written = std::io::copy(&mut source.take(len), &mut file);
    ensure!(
        written.with_context(|| format!("cannot write {}", path.display()))? == len,
        "/dev/urandom ended early"
    );
    Ok(())
}

fn bind_zerocopy(_plan: &Plan, device: Option<Device>) -> Result<Value> {
    let release = facts()["kernel"].as_str().unwrap_or_default().to_owned();
    if let Some(device) = device {
        let since = device.zerocopy_since().context("this device has no zero-copy")?;
        if debian::numbers(&release) < since.to_vec() {
            bail!(NotHere(format!(
                "{} has zero-copy since Linux {}.{}, and this is {release}; take a newer one (--kernel FILE --modules DIR)",
                device.name(),
                since[0],
                since[1]
            )));
        }
    }
    let bed = hosts(device)?;
    let mut reports = Vec::new();
    for host in [bed.left(), bed.right()] {
        let program =
            Launch::new("/bin/lm-bench").args(["bind", "--interface", INTERFACE, "--mode", "zero-copy"]);
        let report = host.spawn(program)?.finish()?.json().context("lm-bench bind")?;
        let queues = report["queues"]
            .as_array()
            .context("lm-bench bind names no queues")?;
        ensure!(!queues.is_empty(), "{INTERFACE} has no queues");
        for queue in queues {
            ensure!(
                queue["zero_copy"] == true,
                "queue {} of {} is not in zero-copy mode: {queue}",
                queue["queue"],
                host.name()
            );
        }
        reports.push(report);
    }
    Ok(json!({"left": reports[0], "right": reports[1], "huge_pages": qemu::HUGE_PAGES}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str], devices: &[Device]) -> Result<Vec<String>> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        Ok(select(&names, devices)?.iter().map(Selected::name).collect())
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
                "virtio-net/bind-zerocopy",
                "igb/overlay",
                "virtio-net/overlay",
                "igb/no-copies",
                "virtio-net/no-copies",
                "igb/transfer-copies",
                "virtio-net/transfer-copies"
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
        let mut names = names(&[], &Device::ALL).unwrap();
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
    fn checks_run_in_the_guest_only() {
        let name = "boot".to_owned();
        let error = format!("{:#}", run(&CheckArguments { name }).unwrap_err());
        assert!(error.contains("in the guest of `cargo xtask vm`"), "{error}");
    }

    #[test]
    fn random_files_have_their_length() {
        let path = std::env::temp_dir().join(format!("xtask-random-{}", std::process::id()));
        write_random(&path, 100_001).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.len() == 100_001 && bytes.iter().any(|&byte| byte != bytes[0]));
        std::fs::remove_file(&path).unwrap();
    }
}
