//! An IPv4 address range in CIDR notation (RFC 4632 §3.1).

use core::fmt;
use core::net::Ipv4Addr;
use core::str::FromStr;

/// An IPv4 prefix such as `192.0.2.0/24`. An address without a length means that one host (`/32`).
///
/// ```
/// use lm_admission::Cidr;
/// let net: Cidr = "192.0.2.0/24".parse().unwrap();
/// assert!(net.contains([192, 0, 2, 7].into()));
/// assert!(!net.contains([192, 0, 3, 7].into()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    network: u32,
    prefix_len_bits: u8,
}

impl Cidr {
    /// The range of all addresses whose first `prefix_len_bits` (0..=32) agree with `address`.
    ///
    /// # Errors
    /// [`CidrError::PrefixTooLong`] above 32 bits, [`CidrError::HostBits`] when `address` has bits set after the
    /// prefix: `10.0.0.7/8` is more often a slip of the pen than the wish to allow sixteen million hosts.
    pub fn new(address: Ipv4Addr, prefix_len_bits: u8) -> Result<Self, CidrError> {
        if prefix_len_bits > 32 {
            return Err(CidrError::PrefixTooLong);
        }
        let network = u32::from(address) & mask(prefix_len_bits);
        if network != u32::from(address) {
            return Err(CidrError::HostBits {
                network: Ipv4Addr::from(network),
                prefix_len_bits,
            });
        }
        Ok(Cidr {
            network,
            prefix_len_bits,
        })
    }

    /// First address, and bits that all have in common.
    #[must_use]
    pub fn parts(&self) -> (Ipv4Addr, u8) {
        (Ipv4Addr::from(self.network), self.prefix_len_bits)
    }

    /// Whether `address` lies in the range.
    #[must_use]
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        u32::from(address) & mask(self.prefix_len_bits) == self.network
    }
}

/// The network mask of a prefix; a shift by 32 is not defined for `u32`, hence the checked one.
fn mask(prefix_len_bits: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix_len_bits)).unwrap_or(0)
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from(self.network), self.prefix_len_bits)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let (address, prefix_len_bits) = match text.split_once('/') {
            // `u8::from_str` would take "+8": digits only.
            Some((address, bits)) if !bits.is_empty() && bits.bytes().all(|b| b.is_ascii_digit()) => {
                (address, bits.parse().map_err(|_| CidrError::PrefixTooLong)?)
            }
            Some(_) => return Err(CidrError::Malformed),
            None => (text, 32),
        };
        Cidr::new(
            address.parse().map_err(|_| CidrError::Malformed)?,
            prefix_len_bits,
        )
    }
}

/// Why a text or a pair of numbers is no [`Cidr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CidrError {
    /// Not of the form `a.b.c.d` or `a.b.c.d/n`.
    #[error("not an IPv4 range; write it as 192.0.2.0/24")]
    Malformed,
    /// The prefix is longer than an IPv4 address.
    #[error("an IPv4 prefix has 0 to 32 bits")]
    PrefixTooLong,
    /// Bits after the prefix are set.
    #[error(
        "bits are set after the prefix; write {network}/{prefix_len_bits} for the network, or /32 for one host"
    )]
    HostBits {
        /// The address with those bits cleared: what was probably meant.
        network: Ipv4Addr,
        /// The prefix length as given, in bits.
        prefix_len_bits: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn accepts_networks_and_single_hosts() {
        for (text, shown) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("192.0.2.9", "192.0.2.9/32"),
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn refuses_what_is_no_range() {
        for text in [
            "",
            "/",
            "/8",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0/8",
            "::1/64",
            "10.0.0.0/8/8",
            "10.0.0.0 /8",
        ] {
            assert_eq!(text.parse::<Cidr>(), Err(CidrError::Malformed), "{text:?}");
        }
        assert_eq!("10.0.0.0/33".parse::<Cidr>(), Err(CidrError::PrefixTooLong));
        assert_eq!("10.0.0.0/999".parse::<Cidr>(), Err(CidrError::PrefixTooLong));
        let error = "10.0.0.7/8".parse::<Cidr>().unwrap_err();
        assert!(error.to_string().contains("10.0.0.0/8"), "{error}");
    }

    #[test]
    fn the_edges_of_a_range() {
        let net: Cidr = "192.0.2.128/25".parse().unwrap();
        assert!(!net.contains([192, 0, 2, 127].into()));
        assert!(net.contains([192, 0, 2, 128].into()));
        assert!(net.contains([192, 0, 2, 255].into()));
        assert!(!net.contains([192, 0, 3, 0].into()));
        let all: Cidr = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains([255, 255, 255, 255].into()));
    }

    proptest! {
        #[test]
        fn text_never_panics(text in ".{0,40}") {
            let _ = text.parse::<Cidr>();
        }

        #[test]
        fn contains_agrees_with_division(address: u32, probe: u32, bits in 0u8..=32) {
            let block = 1u64 << (32 - bits);
            let network = u64::from(address) / block * block;
            let net = Cidr::new(Ipv4Addr::from(network as u32), bits).unwrap();
            prop_assert_eq!(net.contains(probe.into()), u64::from(probe) / block == network / block);
            prop_assert_eq!(net.to_string().parse::<Cidr>().unwrap(), net);
        }
    }
}
