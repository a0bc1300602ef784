//! Interface features (offloads) and statistics through the `SIOCETHTOOL` ioctl, so that a bed needs no `ethtool` installed.
//!
//! Names, bits and structures are those of `include/uapi/linux/ethtool.h`: `ETHTOOL_GSSET_INFO` tells how many
//! features this kernel has, `ETHTOOL_GSTRINGS` their names, `ETHTOOL_GFEATURES` and `ETHTOOL_SFEATURES` read
//! and switch them, 32 to a block. `ETHTOOL_GSTATS` reads a driver's statistics, 64 bits each. All act in the network
//! namespace of the calling thread.

use std::net::UdpSocket;
use std::os::fd::AsRawFd as _;

use anyhow::{Context, Result, bail, ensure};

const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSTATS: u32 = 0x1d;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETH_SS_STATS: u32 = 1;
const ETH_SS_FEATURES: u32 = 4;
const NAME_LEN: usize = 32; // ETH_GSTRING_LEN
/// More than any kernel has (64 features in 6.18, some ten statistics a queue): bounds what is believed of the kernel's answer.
const MAX_NAMES: u32 = 4096;

/// One feature as `ethtool -k` lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// For example `rx-gro`.
    pub name: String,
    /// Whether it is on.
    pub active: bool,
    /// Whether this device can switch it (`ethtool -k` says `[fixed]` otherwise).
    pub changeable: bool,
}

impl Feature {
    /// Whether the feature lets several packets cross the stack as one: segmentation on the way out, receive
    /// coalescing on the way in.
    pub fn joins_packets(&self) -> bool {
        let name = self.name.as_str();
        name.ends_with("-segmentation")
            || name.starts_with("tx-gso-")
            || name.starts_with("rx-gro")
            || name == "rx-udp-gro-forwarding"
            || name == "rx-lro"
    }
}

/// All features of `interface`.
pub fn features(interface: &str) -> Result<Vec<Feature>> {
    let names = names(interface, ETH_SS_FEATURES)?;
    let blocks = names.len().div_ceil(32);
    // struct ethtool_gfeatures { cmd, size; { available, requested, active, never_changed } [size] }
    let mut request = vec![0_u32; 2 + 4 * blocks];
    request[0] = ETHTOOL_GFEATURES;
    request[1] = blocks as u32;
    ethtool(interface, &mut request).context("cannot read the interface's features")?;
    let features = names.into_iter().enumerate().map(|(bit, name)| {
        let block = &request[2 + 4 * (bit / 32)..][..4];
        let mask = 1 << (bit % 32);
        Feature {
            name,
            active: block[2] & mask != 0,
            changeable: block[0] & mask != 0 && block[3] & mask == 0,
        }
    });
    Ok(features.collect())
}

/// Switches features of `interface` by name and checks that they are as wanted afterwards.
pub fn set_features(interface: &str, wanted: &[(&str, bool)]) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let names = names(interface, ETH_SS_FEATURES)?;
    let blocks = names.len().div_ceil(32);
    // struct ethtool_sfeatures { cmd, size; { valid, requested } [size] }
    let mut request = vec![0_u32; 2 + 2 * blocks];
    request[0] = ETHTOOL_SFEATURES;
    request[1] = blocks as u32;
    for (name, on) in wanted {
        let Some(bit) = names.iter().position(|known| known == name) else {
            bail!("this kernel has no interface feature called {name}");
        };
        let mask = 1 << (bit % 32);
        let block = &mut request[2 + 2 * (bit / 32)..][..2];
        block[0] |= mask;
        if *on {
            block[1] |= mask;
        }
    }
    ethtool(interface, &mut request).context("cannot switch the interface's features")?;
    let after = features(interface)?;
    for (name, on) in wanted {
        let active = after
            .iter()
            .any(|feature| feature.name == *name && feature.active);
        ensure!(
            active == *on,
            "{interface} would not switch {name} {}",
            if *on { "on" } else { "off" }
        );
    }
    Ok(())
}

/// The driver's statistics by name, as `ethtool -S` shows them.
pub fn statistics(interface: &str) -> Result<Vec<(String, u64)>> {
    let names = names(interface, ETH_SS_STATS)?;
    // struct ethtool_stats { cmd, n_stats, u64 data[n_stats] }
    let mut request = vec![0_u32; 2 + 2 * names.len()];
    request[..2].copy_from_slice(&[ETHTOOL_GSTATS, names.len() as u32]);
    ethtool(interface, &mut request).context("cannot read the interface's statistics")?;
    let bytes: Vec<u8> = request[2..].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let values = bytes.as_chunks().0.iter().map(|&value| u64::from_ne_bytes(value));
    Ok(names.into_iter().zip(values).collect())
}

/// The names of a set: this kernel's features in the order of their bits, or a driver's statistics.
fn names(interface: &str, set: u32) -> Result<Vec<String>> {
    // struct ethtool_sset_info { cmd, reserved, u64 sset_mask, data[1] }
    let mut request = [ETHTOOL_GSSET_INFO, 0, 0, 0, 0];
    let mask = (1_u64 << set).to_ne_bytes();
    request[2] = u32::from_ne_bytes(mask[..4].try_into().expect("4 bytes"));
    request[3] = u32::from_ne_bytes(mask[4..].try_into().expect("4 bytes"));
    ethtool(interface, &mut request).context("cannot ask for the number of names")?;
    let count = request[4];
    ensure!(
        count > 0 && count <= MAX_NAMES,
        "the kernel claims to have {count} names in set {set} of {interface}"
    );
    // struct ethtool_gstrings { cmd, string_set, len, u8 data[len * 32] }
    let mut request = vec![0_u32; 3 + count as usize * NAME_LEN / 4];
    request[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, set, count]);
    ethtool(interface, &mut request).context("cannot ask for the names")?;
    let bytes: Vec<u8> = request[3..].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let name = |raw: &[u8]| {
        let end = raw.iter().position(|&byte| byte == 0).unwrap_or(raw.len());
        String::from_utf8_lossy(&raw[..end]).into_owned()
    };
    Ok(bytes.chunks_exact(NAME_LEN).map(name).collect())
}

/// One `SIOCETHTOOL` call; `request` is the command's structure and receives the answer.
fn ethtool(interface: &str, request: &mut [u32]) -> Result<()> {
    ensure!(
        interface.len() < libc::IFNAMSIZ,
        "{interface} is too long for an interface name"
    );
    let socket = UdpSocket::bind("0.0.0.0:0").context("cannot open a socket")?;
    // SAFETY: `ifreq` is plain data; all zeros is an empty name and a null union.
    let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in ifreq.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    ifreq.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
    // SAFETY: the descriptor is a socket for the whole call; `ifreq` is a valid `struct ifreq` with a terminated
    // name (its last byte is never written above), and `ifru_data` points to `request`, exclusively borrowed.
    // The kernel reads and writes as much as the command's own length field says; each caller above sets that
    // field to what it allocated. The kernel is trusted to keep to it.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &mut ifreq) };
    if result < 0 {
        return Err(std::io::Error::last_os_error()).with_context(|| format!("SIOCETHTOOL on {interface}"));
    }
    Ok(())
}
