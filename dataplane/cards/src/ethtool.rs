//! What ethtool(8) reads and sets of a network card, through the same ioctl (`SIOCETHTOOL`, `linux/ethtool.h`).
//!
//! An [`Ethtool`] belongs to the network namespace of the thread that opened it, wherever it is used later.

mod features;
mod rss;
pub(crate) mod uapi;

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::pci::PciDevice;

pub use features::{Feature, FeatureState};
pub(crate) use rss::{HASH_ADDRESSES_AND_PORTS, hash_input};
pub use rss::{HashProblem, RssSettings, system_key};

/// Most rules that are listed.
const MAX_RULES: usize = 1 << 16;
/// The card behind an interface, for questions and settings.
#[derive(Debug)]
pub struct Ethtool {
    socket: OwnedFd,
    interface_index: u32,
    /// The card's place on the bus, once it was asked for; `None` inside for what has none.
    pub(crate) pci: OnceCell<Option<PciDevice>>,
}

/// A driver, and what it drives (`ETHTOOL_GDRVINFO`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Its name, such as "igb".
    pub name: String,
    /// Where the card sits, such as "0000:01:00.0"; empty for devices without hardware.
    pub bus: String,
}

/// Queues in use (`ETHTOOL_GCHANNELS`). A combined channel has a receive and a transmit queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    /// Receive queues.
    pub rx: u32,
    /// Transmit queues.
    pub tx: u32,
}

/// How long the card holds interrupts for received packets back (`ETHTOOL_GCOALESCE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coalescing {
    /// Microseconds behind a packet.
    pub rx_us: u32,
    /// The driver sets it as packets come.
    pub is_adaptive: bool,
}

impl Ethtool {
    /// For the interface of that index, in the calling thread's network namespace. Whether there is one shows at the first
    /// question.
    ///
    /// # Errors
    ///
    /// What socket(2) says.
    pub fn open(interface_index: u32) -> io::Result<Ethtool> {
        let flags = SocketFlags::CLOEXEC;
        Ok(Ethtool {
            socket: rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?,
            interface_index,
            pci: OnceCell::new(),
        })
    }

    /// For the interface of that name, likewise.
    ///
    /// # Errors
    ///
    /// What socket(2) says; `ENODEV` where there is none.
    pub fn named(interface: &str) -> io::Result<Ethtool> {
        let mut ethtool = Ethtool::open(0)?;
        ethtool.interface_index = rustix::net::netdevice::name_to_index(&ethtool.socket, interface)?;
        Ok(ethtool)
    }

    /// A request that names the interface, by whatever name it has now.
    fn request(&self, what: &'static str) -> Result<libc::ifreq, EthtoolError> {
        // SAFETY: integers and a pointer, for which zeros are values.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_ifru.ifru_ifindex = self.interface_index.cast_signed();
        // SAFETY: the request is live and exclusive; the kernel reads the index and writes the name.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCGIFNAME, &raw mut request) };
        if result < 0 {
            return Err(EthtoolError::new(what, io::Error::last_os_error()));
        }
        Ok(request)
    }

    /// Puts the command at the start of `data` to the driver; its answer takes its place. Gives what ioctl(2) returned.
    ///
    /// # Safety
    ///
    /// `data` begins with a command's number and has room for all that the kernel writes as that command's answer.
    unsafe fn ask(&self, what: &'static str, data: &mut [u8]) -> Result<i32, EthtoolError> {
        let mut request = self.request(what)?;
        request.ifr_ifru.ifru_data = data.as_mut_ptr().cast();
        // SAFETY: the request is live; the kernel reads the command from the exclusive `data` and writes the answer there,
        // for which there is room by the caller's promise. The kernel is trusted not to write more, and copies byte by byte,
        // so that alignment does not matter.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
        if result < 0 {
            Err(EthtoolError::new(what, io::Error::last_os_error()))
        } else {
            Ok(result)
        }
    }

    /// A command's struct with its number, as the driver fills it.
    ///
    /// # Safety
    ///
    /// `S` is that command's struct, which has a fixed size and begins with the number.
    unsafe fn filled<S: FromBytes + IntoBytes>(
        &self,
        what: &'static str,
        command: u32,
    ) -> Result<S, EthtoolError> {
        let mut data = S::new_zeroed();
        data.as_mut_bytes()[..4].copy_from_slice(&command.to_ne_bytes());
        // SAFETY: there is room for the struct, by the caller's promise.
        unsafe { self.ask(what, data.as_mut_bytes())? };
        Ok(data)
    }

    /// An answer of a command's struct and as many bytes behind it as there is room for.
    ///
    /// # Safety
    ///
    /// The kernel writes no more behind the struct, as that is filled.
    unsafe fn with_rest(
        &self,
        what: &'static str,
        head: &(impl IntoBytes + Immutable),
        room: usize,
    ) -> Result<Vec<u8>, EthtoolError> {
        let mut data = head.as_bytes().to_vec();
        data.resize(data.len() + room, 0);
        // SAFETY: there is room by the caller's promise.
        unsafe { self.ask(what, &mut data)? };
        Ok(data)
    }

    /// The driver.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`], as for all questions here.
    pub fn driver(&self) -> Result<Driver, EthtoolError> {
        // SAFETY: the command's struct, which has a fixed size.
        let info: uapi::DriverInfo = unsafe { self.filled("driver's name", uapi::GET_DRIVER_INFO)? };
        Ok(Driver {
            name: text(&info.driver),
            bus: text(&info.bus),
        })
    }

    /// Queues.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn channels(&self) -> Result<Channels, EthtoolError> {
        // SAFETY: the command's struct, which has a fixed size.
        let channels: uapi::Channels = unsafe { self.filled("number of queues", uapi::GET_CHANNELS)? };
        Ok(Channels {
            rx: channels.rx.saturating_add(channels.combined),
            tx: channels.tx.saturating_add(channels.combined),
        })
    }

    /// Descriptors in the ring of each receive queue (`ETHTOOL_GRINGPARAM`).
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn rx_ring_len(&self) -> Result<u32, EthtoolError> {
        // SAFETY: the command's struct, which has a fixed size.
        let rings: uapi::RingParam = unsafe { self.filled("ring lengths", uapi::GET_RINGS)? };
        Ok(rings.rx)
    }

    /// How long interrupts are held back.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn coalescing(&self) -> Result<Coalescing, EthtoolError> {
        // SAFETY: the command's struct, which has a fixed size.
        let held: uapi::Coalesce = unsafe { self.filled("interrupt coalescing", uapi::GET_COALESCING)? };
        Ok(Coalescing {
            rx_us: held.rx_us,
            is_adaptive: held.is_rx_adaptive != 0,
        })
    }

    /// One of the commands with a `struct ethtool_rxnfc`.
    pub(crate) fn rule_command(
        &self,
        what: &'static str,
        command: u32,
        fill: impl FnOnce(&mut uapi::Rxnfc),
    ) -> Result<uapi::Rxnfc, EthtoolError> {
        let mut data = uapi::Rxnfc::new_zeroed();
        data.command = command;
        fill(&mut data);
        assert_ne!(command, uapi::GET_RULES, "its answer is longer");
        // SAFETY: the command's struct, which has a fixed size; what GET_RULES writes behind it is excluded above.
        unsafe { self.ask(what, data.as_mut_bytes())? };
        Ok(data)
    }

    /// The card's table of flow rules.
    pub(crate) fn rules(&self) -> Result<RuleTable, EthtoolError> {
        const WHAT: &str = "flow rules";
        let table = self.rule_command(WHAT, uapi::GET_RULE_COUNT, |_| {})?;
        let room = table.rule_count as usize;
        if room > MAX_RULES {
            return Err(EthtoolError::new(WHAT, io::ErrorKind::InvalidData.into()));
        }
        let mut head = uapi::Rxnfc::new_zeroed();
        head.command = uapi::GET_RULES;
        head.rule_count = table.rule_count;
        // SAFETY: from RULE_LOCATIONS on, inside of the struct, there is room for as many locations as it asks for.
        let data = unsafe { self.with_rest(WHAT, &head, room * 4)? };
        let (answer, _) = uapi::Rxnfc::read_from_prefix(&data).expect("longer than the struct");
        let count = (answer.rule_count as usize).min(room);
        let mut taken: Vec<u32> = numbers(&data[uapi::RULE_LOCATIONS..]).take(count).collect();
        taken.sort_unstable();
        Ok(RuleTable {
            len: u32::try_from(answer.data).unwrap_or(u32::MAX),
            driver_picks: table.data & u64::from(uapi::LOCATION_SPECIAL) != 0,
            taken,
        })
    }
}

/// A card's table of flow rules.
pub(crate) struct RuleTable {
    /// How many places it has.
    pub(crate) len: u32,
    /// Whether the driver picks a rule's place itself.
    pub(crate) driver_picks: bool,
    /// The places in use, ascending.
    pub(crate) taken: Vec<u32>,
}

impl RuleTable {
    /// Where to put one more rule. Where the driver does not pick, the last free place: rules of the administrator,
    /// usually at the front, go first.
    pub(crate) fn free_place(&self) -> Option<u32> {
        if self.driver_picks {
            return Some(uapi::LOCATION_ANY);
        }
        (0..self.len)
            .rev()
            .find(|place| self.taken.binary_search(place).is_err())
    }
}

/// Numbers one behind the other.
fn numbers(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&number| u32::from_ne_bytes(number))
}

/// A string of C's.
fn text(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Why a card did not answer, or does not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EthtoolError {
    /// The driver cannot do that.
    #[error("the driver does not support this: {what}")]
    Unsupported {
        /// What was asked.
        what: &'static str,
    },
    /// It takes CAP_NET_ADMIN.
    #[error("not permitted: {what}; run as root or with CAP_NET_ADMIN")]
    NotPermitted {
        /// What was asked.
        what: &'static str,
    },
    /// There is no such interface (any more).
    #[error("the interface is gone; see ip link")]
    Gone,
    /// Anything else.
    #[error("{what}: {source}")]
    System {
        /// What was asked.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl EthtoolError {
    /// Of a call that is no question to the driver.
    pub(crate) fn of_call(what: &'static str) -> impl Fn(io::Error) -> EthtoolError + Copy {
        move |source| EthtoolError::System { what, source }
    }

    pub(crate) fn new(what: &'static str, source: io::Error) -> EthtoolError {
        match source.raw_os_error() {
            Some(libc::EOPNOTSUPP) => EthtoolError::Unsupported { what },
            Some(libc::EPERM) => EthtoolError::NotPermitted { what },
            Some(libc::ENODEV) => EthtoolError::Gone,
            _ => EthtoolError::System { what, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_take_the_last_free_place() {
        let place = |len, driver_picks, taken: &[u32]| {
            let taken = taken.to_vec();
            RuleTable {
                len,
                driver_picks,
                taken,
            }
            .free_place()
        };
        assert_eq!(place(8, false, &[]), Some(7));
        assert_eq!(place(8, false, &[0, 1, 7]), Some(6));
        assert_eq!(place(2, false, &[0, 1]), None);
        assert_eq!(place(0, false, &[]), None);
        assert_eq!(place(8, true, &[7]), Some(uapi::LOCATION_ANY));
    }

    #[test]
    fn errors_of_the_kernel_have_their_kind() {
        let error = |code| EthtoolError::new("a thing", io::Error::from_raw_os_error(code));
        assert!(matches!(
            error(libc::EOPNOTSUPP),
            EthtoolError::Unsupported { what: "a thing" }
        ));
        assert!(matches!(
            error(libc::EPERM),
            EthtoolError::NotPermitted { what: "a thing" }
        ));
        assert!(matches!(error(libc::ENODEV), EthtoolError::Gone));
        assert!(matches!(
            error(libc::EINVAL),
            EthtoolError::System { what: "a thing", .. }
        ));
    }

    /// Index 1 is the loopback device of every namespace; it has no driver at all.
    #[test]
    fn loopback_supports_nothing_and_says_so() {
        let ethtool = Ethtool::open(1).expect("a socket");
        macro_rules! unsupported {
            ($($question:expr),*) => {
                $(match $question {
                    Err(EthtoolError::Unsupported { .. }) => {}
                    other => panic!("{}: {other:?}", stringify!($question)),
                })*
            };
        }
        unsupported!(
            ethtool.channels(),
            ethtool.rx_ring_len(),
            ethtool.rss(),
            ethtool.hash_input(),
            ethtool.rules().map(|table| table.len)
        );
        let gone = Ethtool::open(i32::MAX as u32).expect("a socket");
        assert!(matches!(gone.driver(), Err(EthtoolError::Gone)));
    }
}
