//! A PCI device as sysfs shows it: what its configuration space and its bus say about DMA.
//!
//! `/sys/bus/pci` is the same in every network namespace, unlike `/sys/class/net`.

use std::cell::OnceCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The configuration space (PCI Local Bus 3.0, chapter 6): status, its bit that says that there is a list of capabilities, and where that
/// begins.
const STATUS: u64 = 0x06;
const STATUS_CAPABILITIES: u8 = 1 << 4;
const FIRST_CAPABILITY: u64 = 0x34;
/// The capability PCI Express (PCI Express Base, section 7.5.3), its register Device Control, and there Enable Relaxed Ordering.
const PCI_EXPRESS: u8 = 0x10;
const DEVICE_CONTROL: u64 = 8;
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
        let control = match self.changed.get() {
            Some(config) => device_control(config)?,
            None => device_control(&File::open(self.folder.join("config"))?)?,
        };
        Ok(control.map(|(_, [low, _])| low & RELAXED_ORDERING != 0))
    }

    /// Allows or forbids that. Lasts until the device is reset.
    ///
    /// # Errors
    ///
    /// As [`PciDevice::relaxed_ordering`]; `Unsupported` without PCI Express, or when the device keeps its setting.
    pub(crate) fn set_relaxed_ordering(&self, on: bool) -> io::Result<()> {
        let config = match self.changed.get() {
            Some(config) => config,
            None => {
                let config = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(self.folder.join("config"))?;
                self.changed.get_or_init(|| config)
            }
        };
        let (at, [low, high]) = device_control(config)?.ok_or(io::ErrorKind::Unsupported)?;
        let low = low & !RELAXED_ORDERING | if on { RELAXED_ORDERING } else { 0 };
        // The register has 16 bits: both bytes go in one write, which the kernel makes one access.
        config.write_all_at(&[low, high], at)?;
        match self.relaxed_ordering()? == Some(on) {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
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

/// Where Device Control lies, and what it holds; `None` for a device without it.
fn device_control(config: &File) -> io::Result<Option<(u64, [u8; 2])>> {
    let read = |at: u64| {
        let mut bytes = [0; 2];
        match config.read_exact_at(&mut bytes, at) {
            // Unprivileged readers get 64 bytes (drivers/pci/pci-sysfs.c).
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(io::Error::from(io::ErrorKind::PermissionDenied))
            }
            read => read.map(|()| bytes),
        }
    };
    if read(STATUS)?[0] & STATUS_CAPABILITIES == 0 {
        return Ok(None);
    }
    let mut next = read(FIRST_CAPABILITY)?[0];
    // Each capability takes 4 of the 256 bytes at least: a longer list has a loop.
    for _ in 0x40 / 4..256 / 4 {
        let at = u64::from(next & !3);
        if at < 0x40 {
            return Ok(None);
        }
        let kind;
        [kind, next] = read(at)?;
        if kind == PCI_EXPRESS {
            let at = at + DEVICE_CONTROL;
            return Ok(Some((at, read(at)?)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG_LEN: usize = 256;

    /// A configuration space with capabilities MSI at 0x50 and PCI Express at 0x70.
    fn config(relaxed: bool) -> [u8; CONFIG_LEN] {
        let mut config = [0; CONFIG_LEN];
        config[STATUS as usize] = STATUS_CAPABILITIES;
        config[FIRST_CAPABILITY as usize] = 0x50;
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
        none[STATUS as usize] = 0;
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
        // The list leads out, or the register's second byte is cut off.
        let mut high = config(true);
        high[0x50] = PCI_EXPRESS;
        for (name, config) in [("short", &config(true)[..64]), ("half", &high[..0x59])] {
            let error = Folder::new(name, config).device().relaxed_ordering();
            let error = error.expect_err(name);
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        }
        let whole = Folder::new("whole", &high[..0x5a]);
        let relaxed = whole.device().relaxed_ordering();
        assert_eq!(relaxed.expect("all of it"), Some(false));
    }

    #[test]
    fn only_places_of_devices_are_looked_up() {
        for bus in ["", "virtio0", "../../../etc", ".."] {
            assert!(PciDevice::at(bus).is_none(), "{bus}");
        }
    }
}
