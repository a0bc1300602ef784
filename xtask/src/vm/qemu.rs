//! QEMU: which one, and its command line.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::devices::Device;
use crate::bed::Launch;

/// Huge pages of 2 MiB: two endpoints with 32 MiB of landing and send memory each, for several queues, and the tests'
/// own.
pub const HUGE_PAGES: u32 = 160;
/// Queues of a virtio-net device on taps.
pub const VIRTIO_QUEUES: u32 = 2;

/// QEMU from a folder of unpacked packages, to be started in a namespace of its own if the machine has taps.
pub fn launch(root: &Path, options: &[String]) -> Launch {
    let script = Launch::new("sh").args(["-c", include_str!("qemu.sh"), "qemu.sh"]);
    script.arg(root).args(options)
}

/// As it says itself, for example `10.0.2 (Debian 1:10.0.2+ds-2)`.
pub fn version(root: &Path) -> Result<String> {
    let asked = launch(root, &["--version".to_owned()]).spawn()?.finish();
    let said = asked.context("cannot start QEMU")?.stdout;
    let version = said.lines().next().unwrap_or_default();
    Ok(version.trim_start_matches("QEMU emulator version ").to_owned())
}

/// What the guest's time is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// This machine's.
    #[default]
    Real,
    /// Two nanoseconds for each instruction, of whichever processor, kernel included. Where all processors are idle it
    /// jumps to the next timer. What this machine does meanwhile is not seen.
    Instructions,
}

impl Clock {
    /// QEMU's `-accel` and `-icount`. Processors that count instructions take turns in one thread.
    const fn options(self) -> (&'static str, Option<&'static str>) {
        match self {
            Clock::Real => ("tcg,thread=multi", None),
            Clock::Instructions => ("tcg,thread=single", Some("shift=1,sleep=off")),
        }
    }

    /// Of virtio-net cards that QEMU joins: what is handed over by threads and bottom halves of QEMU's has the host's
    /// time. Without, a doorbell is heard at once, and packets leave two microseconds later by the guest's own clock.
    const fn virtio_options(self) -> &'static str {
        match self {
            Clock::Real => "",
            Clock::Instructions => ",rx_queue_size=1024,ioeventfd=off,tx=timer,x-txtimer=2000",
        }
    }
}

/// Names of the taps of the two virtio-net devices.
pub const TAPS: [&str; 2] = ["tap0", "tap1"];

/// QEMU's options for a machine with these kinds of devices. Without taps virtio-net devices are joined inside QEMU,
/// with a single queue. `files` are the kernel's image, the guest's files, and where the guest's kernel and its
/// programs say what they say.
pub fn options(devices: &[Device], has_taps: bool, clock: Clock, files: [&Path; 4]) -> Vec<String> {
    let (accelerator, count) = clock.options();
    let fixed = "-nodefaults -no-user-config -no-reboot -display none -M q35 -cpu max -smp 2 -m 2G -accel";
    let mut line = format!("{fixed} {accelerator}");
    if let Some(count) = count {
        // What else differs from boot to boot: what the processor calls random (RSS keys, ports), and the time of day.
        line += &format!(" -icount {count} -seed 1 -rtc base=2026-01-01,clock=vm");
    }
    for (device, number) in devices.iter().flat_map(|&device| [(device, 0), (device, 1)]) {
        let id = format!("{}{number}", device.name());
        let common = format!("netdev={id},mac={},romfile=", device.mac(number));
        match device {
            Device::Veth => {}
            // igb is a PCI Express device: on the root complex itself its capabilities are hidden.
            Device::Igb => {
                line += &format!(
                    " -device pcie-root-port,id=port-{id},chassis={} -netdev hubport,id={id},hubid=1 \
                     -device igb,bus=port-{id},{common}",
                    number + 1
                );
            }
            Device::VirtioNet => {
                let (netdev, queues) = match has_taps {
                    // Two vectors a queue pair, one for the control queue, one for changes of the configuration.
                    true => (
                        format!(
                            "tap,id={id},ifname={},script=no,downscript=no,vhost=off,queues={VIRTIO_QUEUES}",
                            TAPS[number]
                        ),
                        format!(
                            ",mq=on,rss=on,rx_queue_size=1024,vectors={}",
                            2 * VIRTIO_QUEUES + 2
                        ),
                    ),
                    false => (
                        format!("hubport,id={id},hubid=2"),
                        clock.virtio_options().to_owned(),
                    ),
                };
                line += &format!(
                    " -netdev {netdev} -device virtio-net-pci,{common},{VIRTIO}{NO_OFFLOADS}{queues}"
                );
            }
        }
    }
    let mut options: Vec<String> = line.split(' ').map(str::to_owned).collect();
    let [kernel, initramfs, console, results] = files.map(Path::to_string_lossy);
    let mut add = |name: &str, value: String| options.extend([name.to_owned(), value]);
    add("-kernel", kernel.into());
    add("-initrd", initramfs.into());
    add("-append", kernel_command_line(clock));
    for (id, path) in [("console", console), ("results", results)] {
        // QEMU takes `,,` for a comma in an option's value.
        add(
            "-chardev",
            format!("file,id={id},path={}", path.replace(',', ",,")),
        );
        add("-serial", format!("chardev:{id}"));
    }
    options
}

/// Zero-copy needs the DMA interface, which is modern virtio.
const VIRTIO: &str = "iommu_platform=on,disable-legacy=on";

/// XDP needs packets as they are: one buffer each, nothing joined, no checksum left to others. With a single
/// segmentation offload of the guest's left on, drivers/net/virtio_net.c has "big packets", and binding is `ENOENT`.
const NO_OFFLOADS: &str = ",ctrl_guest_offloads=on,mrg_rxbuf=off,\
    csum=off,gso=off,host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off,host_uso=off,\
    guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,guest_uso4=off,guest_uso6=off";

/// Kernel addresses begin here, as far as `virt_to_page` of arch/x86 is concerned (`__START_KERNEL_map`).
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Physical memory that is kept out of use, so that it is zero: where and how much, in bytes.
///
/// drivers/net/virtio_net.c (Linux 6.13 to 7.3) maps the header of AF_XDP's zero-copy packets by `virt_to_page` of a
/// static variable. In a module, which lies in memory of its own, that is some other page, whose bytes the device takes
/// for the header; unless they pass for one, the tap refuses each packet (`EINVAL` of tun_get_user, counted nowhere).
/// Without KASLR it is a page of this memory.
const KEPT_ZERO: (u64, u64) = (1 << 30, 64 << 20);

/// Whether that memory is where the device looks for what a module has at this address.
pub fn is_kept_zero(address: u64, len: u64) -> bool {
    let (start, kept) = KEPT_ZERO;
    let physical = address.wrapping_sub(KERNEL_MAP);
    physical >= start && physical.saturating_add(len) <= start + kept
}

/// The console is the first serial port; a panic ends QEMU (`panic=-1` restarts at once, `-no-reboot` ends instead),
/// and so does an oops, after which no result could be trusted. `PATH` becomes part of the environment of the guest's
/// first process.
fn kernel_command_line(clock: Clock) -> String {
    let (start, kept) = KEPT_ZERO;
    // Where programs lie decides how often their pages and cache lines meet.
    let same = match clock {
        Clock::Real => "",
        Clock::Instructions => "norandmaps ",
    };
    format!(
        "{same}console=ttyS0 loglevel=5 panic=-1 oops=panic mitigations=off audit=0 nokaslr \
            memmap={kept:#x}${start:#x} hugepages={HUGE_PAGES} PATH=/usr/sbin:/usr/bin:/sbin:/bin RUST_BACKTRACE=1"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(taps: bool, devices: &[Device]) -> String {
        options_in(Clock::Real, taps, devices)
    }

    fn options_in(clock: Clock, taps: bool, devices: &[Device]) -> String {
        let files = ["/k/vmlinuz", "/t/initramfs", "/t/a,b", "/t/results"].map(Path::new);
        super::options(devices, taps, clock, files).join(" ")
    }

    #[test]
    fn each_igb_has_a_port_and_both_share_a_hub() {
        let line = options(false, &[Device::Igb]);
        for part in [
            "-M q35 -cpu max -smp 2 -m 2G -accel tcg,thread=multi ",
            "-kernel /k/vmlinuz -initrd /t/initramfs -append console=ttyS0 ",
            "-chardev file,id=console,path=/t/a,,b -serial chardev:console -chardev file,id=results,path=/t/results",
            "-device pcie-root-port,id=port-igb0,chassis=1 -netdev hubport,id=igb0,hubid=1 \
             -device igb,bus=port-igb0,netdev=igb0,mac=52:54:00:4c:10:00,romfile=",
            "-device pcie-root-port,id=port-igb1,chassis=2 -netdev hubport,id=igb1,hubid=1 \
             -device igb,bus=port-igb1,netdev=igb1,mac=52:54:00:4c:10:01,romfile=",
            "-no-reboot",
            "panic=-1",
        ] {
            assert!(line.contains(part), "{part}\n{line}");
        }
        assert!(!line.contains("virtio"));
        assert!(!options(false, &[Device::Veth]).contains("netdev"));
    }

    #[test]
    fn virtio_has_several_queues_on_taps_only() {
        let line = options(true, &[Device::VirtioNet, Device::Igb]);
        for part in [
            "-netdev tap,id=virtio-net1,ifname=tap1,script=no,downscript=no,vhost=off,queues=2",
            "iommu_platform=on,disable-legacy=on",
            "guest_uso6=off,mq=on,rss=on,rx_queue_size=1024,vectors=6",
            "hubport,id=igb1,hubid=1",
        ] {
            assert!(line.contains(part), "{part}\n{line}");
        }
        let line = options(false, &[Device::VirtioNet]);
        assert!(line.contains("hubport,id=virtio-net1,hubid=2") && !line.contains("mq=on"));
    }

    #[test]
    fn where_instructions_are_counted_nothing_is_handed_over_in_the_hosts_time() {
        let in_guest_time = "ioeventfd=off,tx=timer";
        let line = options_in(Clock::Instructions, false, &[Device::VirtioNet]);
        for part in [
            in_guest_time,
            "-icount shift=1,sleep=off",
            "-seed 1",
            "clock=vm",
            "norandmaps",
        ] {
            assert!(line.contains(part), "{part}\n{line}");
        }
        assert!(!options(false, &[Device::VirtioNet]).contains(in_guest_time));
    }
}
