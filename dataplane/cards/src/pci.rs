//! A PCI device as sysfs shows it: what its configuration space and its bus say about DMA.
//!
//! `/sys/bus/pci` is the same in every network namespace, unlike `/sys/class/net`.

use std::cell::OnceCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Length of the configuration space without PCI Express's extension, in bytes; all capabilities looked for lie in it.
const CONFIG_LEN: usize = 256;
/// Status register, and its bit that says that there is a list of capabilities (PCI Local Bus 3.0, section 6.2.3).
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u8 = 1 << 4;
/// Offset of the first capability.
const FIRST_CAPABILITY: usize = 0x34;
/// Identifier of the PCI Express capability (PCI Express Base, section 7.5.3).
const PCI_EXPRESS: u8 = 0x10;
/// Device Control, from the capability's start, and its bit Enable Relaxed Ordering.
const DEVICE_CONTROL: usize = 8;
const RELAXED_ORDERING: u8 = 1 << 4;

/// A PCI device.
#[derive(Debug)]
pub(crate) struct PciDevice {
    folder: PathBuf,
    /// The configuration space once something was changed there: whoever may change it may take it back, also when it has
    /// given up its privileges since. The kernel looks at those of the opening (pci_read_config of drivers/pci/pci-sysfs.c).
    changed: OnceCell<File>,
}

impl PciDevice {
    /// The device at that place, such as "0000:01:00.0", as a driver names it; `None` where there is none, as behind a
    /// virtual interface.
    pub(crate) fn at(bus: &str) -> Option<PciDevice> {
        let is_place = !bus.is_empty()
            && bus
                .bytes()
                .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
        let folder = Path::new("/sys/bus/pci/devices").join(bus);
        (is_place && folder.join("config").exists()).then_some(PciDevice {
            folder,
            changed: OnceCell::new(),
        })
    }

    /// Whether the device may mark its writes to memory so that they overtake others; `None` for a device that is not on
    /// PCI Express and cannot.
    ///
    /// # Errors
    ///
    /// What sysfs says; `PermissionDenied` without CAP_SYS_ADMIN, which alone may read behind the first 64 bytes of the
    /// configuration space.
    pub(crate) fn relaxed_ordering(&self) -> io::Result<Option<bool>> {
        let (config, len) = match self.changed.get() {
            Some(file) => read_config(file)?,
            None => read_config(&File::open(self.folder.join("config"))?)?,
        };
        Ok(device_control(&config[..len])?.map(|at| config[at] & RELAXED_ORDERING != 0))
    }

    /// Allows or forbids that. Lasts until the device is reset.
    ///
    /// # Errors
    ///
    /// As [`PciDevice::relaxed_ordering`]; `Unsupported` without PCI Express, or when the device keeps its setting.
    pub(crate) fn set_relaxed_ordering(&self, on: bool) -> io::Result<()> {
        let file = match self.changed.get() {
            Some(file) => file,
            None => {
                let file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(self.folder.join("config"))?;
                self.changed.get_or_init(|| file)
            }
        };
        let (config, len) = read_config(file)?;
        let at =
            device_control(&config[..len])?.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        let control = if on {
            config[at] | RELAXED_ORDERING
        } else {
            config[at] & !RELAXED_ORDERING
        };
        // The register has 16 bits: both bytes go in one write, which the kernel makes one access.
        file.write_all_at(&[control, config[at + 1]], at as u64)?;
        match self.relaxed_ordering()? {
            Some(now) if now == on => Ok(()),
            _ => Err(io::Error::from(io::ErrorKind::Unsupported)),
        }
    }

    /// Width of the addresses that the driver lets the device use, in bits.
    pub(crate) fn dma_mask_bits(&self) -> Option<u32> {
        let text = std::fs::read_to_string(self.folder.join("dma_mask_bits")).ok()?;
        text.trim().parse().ok()
    }

    /// How an IOMMU translates the device's addresses ("DMA", "DMA-FQ", "identity" …); `None` without one.
    pub(crate) fn iommu(&self) -> Option<String> {
        let text = std::fs::read_to_string(self.folder.join("iommu_group/type")).ok()?;
        Some(text.trim().to_owned())
    }
}

/// The start of the configuration space, as much as the caller may read of it.
fn read_config(file: &File) -> io::Result<([u8; CONFIG_LEN], usize)> {
    let mut config = [0; CONFIG_LEN];
    let mut len = 0;
    while len < CONFIG_LEN {
        match file.read_at(&mut config[len..], len as u64)? {
            0 => break,
            read => len += read,
        }
    }
    Ok((config, len))
}

/// Where Device Control lies; `None` for a device without it.
fn device_control(config: &[u8]) -> io::Result<Option<usize>> {
    let byte = |at: usize| {
        config.get(at).copied().ok_or_else(|| {
            // Unprivileged readers get 64 bytes (drivers/pci/pci-sysfs.c).
            io::Error::from(io::ErrorKind::PermissionDenied)
        })
    };
    if byte(STATUS)? & STATUS_CAPABILITIES == 0 {
        return Ok(None);
    }
    let mut at = usize::from(byte(FIRST_CAPABILITY)? & !3);
    // Each capability takes 4 bytes at least: a longer list has a loop.
    for _ in 0..(CONFIG_LEN - 0x40) / 4 {
        if at < 0x40 {
            return Ok(None);
        }
        if byte(at)? == PCI_EXPRESS {
            byte(at + DEVICE_CONTROL + 1)?;
            return Ok(Some(at + DEVICE_CONTROL));
        }
        at = usize::from(byte(at + 1)? & !3);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration space with capabilities MSI at 0x50 and PCI Express at 0x70.
    fn config(relaxed: bool) -> [u8; CONFIG_LEN] {
        let mut config = [0; CONFIG_LEN];
        config[STATUS] = STATUS_CAPABILITIES;
        config[FIRST_CAPABILITY] = 0x50;
        config[0x50..0x52].copy_from_slice(&[0x05, 0x70]);
        config[0x70..0x72].copy_from_slice(&[PCI_EXPRESS, 0]);
        // Device Control: other bits are set, and must stay.
        config[0x78..0x7a].copy_from_slice(&[0x0f | if relaxed { 0x10 } else { 0 }, 0x28]);
        config
    }

    /// A device's folder with nothing but a configuration space.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str, config: &[u8]) -> Folder {
            let path = std::env::temp_dir().join(format!("lm-pci-{}-{name}", std::process::id()));
            std::fs::create_dir(&path).expect("a folder of our own");
            std::fs::write(path.join("config"), config).expect("the file");
            Folder(path)
        }

        fn device(&self) -> PciDevice {
            PciDevice {
                folder: self.0.clone(),
                changed: OnceCell::new(),
            }
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).expect("it is ours");
        }
    }

    #[test]
    fn the_bit_is_read_and_switched_alone() {
        let folder = Folder::new("switch", &config(true));
        let device = folder.device();
        assert_eq!(device.relaxed_ordering().expect("a config"), Some(true));
        device.set_relaxed_ordering(false).expect("it can be written");
        assert_eq!(device.relaxed_ordering().expect("a config"), Some(false));
        let bytes = std::fs::read(folder.0.join("config")).expect("the file");
        assert_eq!(bytes, config(false), "no other bit changed");
        // What was opened once is enough, where it could not be opened any more.
        let moved = folder.0.join("moved");
        std::fs::rename(folder.0.join("config"), &moved).expect("it is ours");
        device.set_relaxed_ordering(true).expect("it can be written");
        std::fs::rename(&moved, folder.0.join("config")).expect("it is ours");
        let bytes = std::fs::read(folder.0.join("config")).expect("the file");
        assert_eq!(bytes, config(true));
        assert_eq!(device.dma_mask_bits(), None);
        assert_eq!(device.iommu(), None);
        std::fs::write(folder.0.join("dma_mask_bits"), "32\n").expect("the file");
        assert_eq!(device.dma_mask_bits(), Some(32));
    }

    #[test]
    fn devices_without_pci_express_have_no_such_bit() {
        let mut none = config(true);
        none[STATUS] = 0;
        let mut other = config(true);
        other[0x70] = 0x11;
        let mut ring = other;
        ring[0x71] = 0x50;
        for (name, config) in [("none", none), ("other", other), ("ring", ring)] {
            let folder = Folder::new(name, &config);
            assert_eq!(folder.device().relaxed_ordering().expect(name), None);
            let error = folder.device().set_relaxed_ordering(false).expect_err(name);
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        }
    }

    #[test]
    fn what_may_not_be_read_is_no_answer() {
        let folder = Folder::new("short", &config(true)[..64]);
        let error = folder
            .device()
            .relaxed_ordering()
            .expect_err("the list leads out");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        // The register's second byte is cut off.
        let mut high = config(true);
        high[0x50] = PCI_EXPRESS;
        let error = device_control(&high[..0x59]).expect_err("half a register");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(device_control(&high[..0x5a]).expect("all of it"), Some(0x58));
    }

    #[test]
    fn only_places_of_devices_are_looked_up() {
        for bus in ["", "virtio0", "../../../etc", ".."] {
            assert!(PciDevice::at(bus).is_none(), "{bus}");
        }
    }
}
