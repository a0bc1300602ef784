//! The devices of the machine: what QEMU is told about them, and what the guest's kernel calls them.

use serde::{Deserialize, Serialize};

/// A kind of network device, two of each, joined with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// Two Intel 82576, with the kernel's ordinary igb driver; two queues.
    Igb,
    /// Two virtio-net devices.
    VirtioNet,
    /// No hardware: a veth pair, made in the guest.
    Veth,
}

impl Device {
    /// All kinds, in the order of the results.
    pub const ALL: [Device; 3] = [Device::Igb, Device::VirtioNet, Device::Veth];

    /// As the command line and the results name it; the driver's name in sysfs, `None` for what no QEMU device is
    /// behind; and modules that it needs in the guest, unless they are built in.
    const fn names(self) -> (&'static str, Option<&'static str>, &'static [&'static str]) {
        match self {
            Device::Igb => ("igb", Some("igb"), &["igb"]),
            Device::VirtioNet => ("virtio-net", Some("virtio_net"), &["virtio_pci", "virtio_net"]),
            Device::Veth => ("veth", None, &["veth"]),
        }
    }

    /// As the command line and the results name it.
    pub const fn name(self) -> &'static str {
        self.names().0
    }

    /// The driver's name in sysfs.
    pub const fn driver(self) -> Option<&'static str> {
        self.names().1
    }

    /// Modules that it needs in the guest.
    pub const fn modules(self) -> &'static [&'static str] {
        self.names().2
    }

    /// The Ethernet address of the first or the second device, from the range for local use.
    pub fn mac(self, number: usize) -> String {
        format!("52:54:00:4c:{:02x}:{number:02x}", 0x10 + self as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line_and_of_the_results() {
        use clap::ValueEnum as _;
        for device in Device::ALL {
            let value = device.to_possible_value().unwrap();
            assert_eq!(value.get_name(), device.name());
            assert_eq!(
                serde_json::to_value(device).unwrap(),
                serde_json::Value::from(device.name())
            );
        }
        assert_eq!(Device::VirtioNet.mac(1), "52:54:00:4c:11:01");
    }
}
