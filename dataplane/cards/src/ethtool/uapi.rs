//! The structs of `linux/ethtool.h` that LM exchanges with the kernel, byte for byte.
//!
//! 64-bit layouts. Padding is explicit, so that a struct is nothing but its bytes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub(crate) const GET_DRIVER_INFO: u32 = 0x03;
pub(crate) const GET_COALESCING: u32 = 0x0e;
pub(crate) const GET_RINGS: u32 = 0x10;
pub(crate) const GET_STRINGS: u32 = 0x1b;
pub(crate) const GET_STATISTICS: u32 = 0x1d;
pub(crate) const GET_HASH_FIELDS: u32 = 0x29;
pub(crate) const SET_HASH_FIELDS: u32 = 0x2a;
pub(crate) const GET_RX_RINGS: u32 = 0x2d;
pub(crate) const GET_RULE_COUNT: u32 = 0x2e;
pub(crate) const GET_RULE: u32 = 0x2f;
pub(crate) const GET_RULES: u32 = 0x30;
pub(crate) const DELETE_RULE: u32 = 0x31;
pub(crate) const INSERT_RULE: u32 = 0x32;
pub(crate) const GET_STRING_SETS: u32 = 0x37;
pub(crate) const GET_FEATURES: u32 = 0x3a;
pub(crate) const SET_FEATURES: u32 = 0x3b;
pub(crate) const GET_CHANNELS: u32 = 0x3c;
pub(crate) const GET_RSS: u32 = 0x46;
pub(crate) const SET_RSS: u32 = 0x47;

/// `ETH_SS_STATS`: the set of a driver's statistics.
pub(crate) const STATISTIC_NAMES: u32 = 1;
/// `ETH_SS_FEATURES`: the set of feature names.
pub(crate) const FEATURE_NAMES: u32 = 4;
/// `ETH_GSTRING_LEN`: bytes that a name takes.
pub(crate) const STRING_LEN: usize = 32;
/// `UDP_V4_FLOW`.
pub(crate) const UDP_V4_FLOW: u32 = 2;
/// `ETH_RSS_HASH_TOP`, a bit of [`Rxfh::function`].
pub(crate) const HASH_TOEPLITZ: u8 = 1;
/// `RX_CLS_LOC_SPECIAL`, a flag in the answer to [`GET_RULE_COUNT`]: the driver picks locations itself.
pub(crate) const LOCATION_SPECIAL: u32 = 0x8000_0000;
/// `RX_CLS_LOC_ANY`.
pub(crate) const LOCATION_ANY: u32 = 0xffff_ffff;

/// `struct ethtool_drvinfo`.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct DriverInfo {
    pub(crate) command: u32,
    pub(crate) driver: [u8; 32],
    pub(crate) version: [u8; 32],
    pub(crate) firmware: [u8; 32],
    pub(crate) bus: [u8; 32],
    pub(crate) rom: [u8; 32],
    pub(crate) reserved: [u8; 12],
    pub(crate) counts: [u32; 5],
}

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct Channels {
    pub(crate) command: u32,
    pub(crate) max_rx: u32,
    pub(crate) max_tx: u32,
    pub(crate) max_other: u32,
    pub(crate) max_combined: u32,
    pub(crate) rx: u32,
    pub(crate) tx: u32,
    pub(crate) other: u32,
    pub(crate) combined: u32,
}

/// `struct ethtool_coalesce`.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct Coalesce {
    pub(crate) command: u32,
    pub(crate) rx_us: u32,
    /// Frames, and the same while interrupts are served; for sending; statistics.
    pub(crate) others: [u32; 8],
    pub(crate) is_rx_adaptive: u32,
    /// For sending; by rates of packets.
    pub(crate) rest: [u32; 12],
}

/// `struct ethtool_ringparam`; the kernel has grown it since, for its other interface alone.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct RingParam {
    pub(crate) command: u32,
    pub(crate) rx_max: u32,
    pub(crate) rx_mini_max: u32,
    pub(crate) rx_jumbo_max: u32,
    pub(crate) tx_max: u32,
    pub(crate) rx: u32,
    pub(crate) rx_mini: u32,
    pub(crate) rx_jumbo: u32,
    pub(crate) tx: u32,
}

/// `struct ethtool_rxfh`, which the table's entries (`u32`) and the key's bytes follow.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct Rxfh {
    pub(crate) command: u32,
    pub(crate) rss_context: u32,
    /// Entries of the table that follow.
    pub(crate) table_len: u32,
    /// Bytes of the key that follow.
    pub(crate) key_len: u32,
    /// `ETH_RSS_HASH_*`; 0 in a request: unchanged.
    pub(crate) function: u8,
    /// `RXH_XFRM_*`, since Linux 6.8; before, a reserved byte that must be 0 and is.
    pub(crate) transform: u8,
    pub(crate) reserved: [u8; 6],
}

/// `struct ethtool_rx_flow_spec`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct FlowSpec {
    pub(crate) flow_type: u32,
    /// `h_u`: for UDP over IPv4 a `struct ethtool_tcpip4_spec` at its start.
    pub(crate) header: [u8; 52],
    pub(crate) extension: [u8; 20],
    /// `m_u`: as `header`; a bit that is set must match.
    pub(crate) header_mask: [u8; 52],
    pub(crate) extension_mask: [u8; 20],
    pub(crate) padding: u32,
    /// The receive queue.
    pub(crate) ring_cookie: u64,
    pub(crate) location: u32,
    pub(crate) tail_padding: u32,
}

/// `struct ethtool_rxnfc`, which locations (`u32`) follow from [`RULE_LOCATIONS`] on.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct Rxnfc {
    pub(crate) command: u32,
    pub(crate) flow_type: u32,
    pub(crate) data: u64,
    pub(crate) spec: FlowSpec,
    pub(crate) rule_count: u32,
    pub(crate) padding: u32,
}

/// Where `rule_locs` begins: inside of [`Rxnfc::padding`].
pub(crate) const RULE_LOCATIONS: usize = 188;

/// `struct ethtool_sset_info`, with room for one set.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct StringSet {
    pub(crate) command: u32,
    pub(crate) reserved: u32,
    pub(crate) mask: u64,
    pub(crate) len: u32,
    pub(crate) padding: u32,
}

/// `struct ethtool_gstrings`, which the strings follow.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct Strings {
    pub(crate) command: u32,
    pub(crate) set: u32,
    pub(crate) len: u32,
}

/// `struct ethtool_stats`, which the numbers (`u64`) follow.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct Statistics {
    pub(crate) command: u32,
    pub(crate) count: u32,
}

/// `struct ethtool_gfeatures` and `struct ethtool_sfeatures`, which `size` blocks of 32 features follow.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct Features {
    pub(crate) command: u32,
    pub(crate) size: u32,
}

/// `struct ethtool_get_features_block`.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct FeatureBlock {
    pub(crate) available: u32,
    pub(crate) requested: u32,
    pub(crate) active: u32,
    pub(crate) never_changed: u32,
}

/// `struct ethtool_set_features_block`.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(crate) struct FeatureChange {
    pub(crate) valid: u32,
    pub(crate) requested: u32,
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::mem::offset_of;
    use std::process::Command;

    use super::*;

    /// C's name for each struct and field, and what this file makes of it: size, or offset.
    fn layout() -> Vec<(&'static str, usize)> {
        macro_rules! fields {
            ($c:literal, $rust:ty: $($name:literal = $field:ident),*) => {
                vec![
                    (concat!("sizeof(struct ", $c, ")"), size_of::<$rust>()),
                    $((concat!("offsetof(struct ", $c, ", ", $name, ")"), offset_of!($rust, $field))),*
                ]
            };
        }
        let mut layout = fields!("ethtool_drvinfo", DriverInfo: "cmd" = command, "driver" = driver, "version" = version,
            "fw_version" = firmware, "bus_info" = bus, "erom_version" = rom, "reserved2" = reserved,
            "n_priv_flags" = counts);
        layout.extend(
            fields!("ethtool_channels", Channels: "cmd" = command, "max_rx" = max_rx, "max_tx" = max_tx,
            "max_other" = max_other, "max_combined" = max_combined, "rx_count" = rx, "tx_count" = tx,
            "other_count" = other, "combined_count" = combined),
        );
        layout.extend(fields!("ethtool_ringparam", RingParam: "cmd" = command, "rx_max_pending" = rx_max,
            "rx_mini_max_pending" = rx_mini_max, "rx_jumbo_max_pending" = rx_jumbo_max, "tx_max_pending" = tx_max,
            "rx_pending" = rx, "rx_mini_pending" = rx_mini, "rx_jumbo_pending" = rx_jumbo, "tx_pending" = tx));
        // The transform's byte is the first of rsvd8 in headers before Linux 6.8: no name fits both.
        layout.extend(
            fields!("ethtool_rxfh", Rxfh: "cmd" = command, "rss_context" = rss_context,
            "indir_size" = table_len, "key_size" = key_len, "hfunc" = function),
        );
        layout.extend(fields!("ethtool_coalesce", Coalesce: "rx_coalesce_usecs" = rx_us,
            "use_adaptive_rx_coalesce" = is_rx_adaptive));
        layout.extend([("offsetof(struct ethtool_rxfh, rss_config)", size_of::<Rxfh>())]);
        layout.extend(
            fields!("ethtool_rx_flow_spec", FlowSpec: "flow_type" = flow_type, "h_u" = header,
            "h_ext" = extension, "m_u" = header_mask, "m_ext" = extension_mask, "ring_cookie" = ring_cookie,
            "location" = location),
        );
        layout.extend(
            fields!("ethtool_rxnfc", Rxnfc: "cmd" = command, "flow_type" = flow_type, "data" = data,
            "fs" = spec, "rule_cnt" = rule_count),
        );
        layout.extend([
            ("offsetof(struct ethtool_rxnfc, rule_locs)", RULE_LOCATIONS),
            (
                "offsetof(struct ethtool_sset_info, sset_mask)",
                offset_of!(StringSet, mask),
            ),
            (
                "offsetof(struct ethtool_sset_info, data)",
                offset_of!(StringSet, len),
            ),
            (
                "offsetof(struct ethtool_gstrings, string_set)",
                offset_of!(Strings, set),
            ),
            ("offsetof(struct ethtool_gstrings, len)", offset_of!(Strings, len)),
            ("offsetof(struct ethtool_gstrings, data)", size_of::<Strings>()),
            (
                "offsetof(struct ethtool_stats, n_stats)",
                offset_of!(Statistics, count),
            ),
            ("offsetof(struct ethtool_stats, data)", size_of::<Statistics>()),
            (
                "offsetof(struct ethtool_gfeatures, size)",
                offset_of!(Features, size),
            ),
            (
                "offsetof(struct ethtool_gfeatures, features)",
                size_of::<Features>(),
            ),
            (
                "offsetof(struct ethtool_sfeatures, features)",
                size_of::<Features>(),
            ),
        ]);
        layout.extend(
            fields!("ethtool_get_features_block", FeatureBlock: "available" = available,
            "requested" = requested, "active" = active, "never_changed" = never_changed),
        );
        layout.extend(
            fields!("ethtool_set_features_block", FeatureChange: "valid" = valid,
            "requested" = requested),
        );
        layout.extend([
            ("sizeof(struct ethtool_tcpip4_spec)", 16),
            ("offsetof(struct ethtool_tcpip4_spec, ip4src)", 0),
            ("offsetof(struct ethtool_tcpip4_spec, ip4dst)", 4),
            ("offsetof(struct ethtool_tcpip4_spec, psrc)", 8),
            ("offsetof(struct ethtool_tcpip4_spec, pdst)", 10),
            ("offsetof(struct ethtool_tcpip4_spec, tos)", 12),
        ]);
        for (name, value) in [
            ("ETHTOOL_GDRVINFO", GET_DRIVER_INFO),
            ("ETHTOOL_GCOALESCE", GET_COALESCING),
            ("ETHTOOL_GRINGPARAM", GET_RINGS),
            ("ETHTOOL_GSTRINGS", GET_STRINGS),
            ("ETHTOOL_GSTATS", GET_STATISTICS),
            ("ETHTOOL_GRXFH", GET_HASH_FIELDS),
            ("ETHTOOL_SRXFH", SET_HASH_FIELDS),
            ("ETHTOOL_GRXRINGS", GET_RX_RINGS),
            ("ETHTOOL_GRXCLSRLCNT", GET_RULE_COUNT),
            ("ETHTOOL_GRXCLSRULE", GET_RULE),
            ("ETHTOOL_GRXCLSRLALL", GET_RULES),
            ("ETHTOOL_SRXCLSRLDEL", DELETE_RULE),
            ("ETHTOOL_SRXCLSRLINS", INSERT_RULE),
            ("ETHTOOL_GSSET_INFO", GET_STRING_SETS),
            ("ETHTOOL_GFEATURES", GET_FEATURES),
            ("ETHTOOL_SFEATURES", SET_FEATURES),
            ("ETHTOOL_GCHANNELS", GET_CHANNELS),
            ("ETHTOOL_GRSSH", GET_RSS),
            ("ETHTOOL_SRSSH", SET_RSS),
            ("ETH_SS_STATS", STATISTIC_NAMES),
            ("ETH_SS_FEATURES", FEATURE_NAMES),
            ("ETH_GSTRING_LEN", STRING_LEN as u32),
            ("UDP_V4_FLOW", UDP_V4_FLOW),
            ("RX_CLS_LOC_SPECIAL", LOCATION_SPECIAL),
            ("RX_CLS_LOC_ANY", LOCATION_ANY),
            ("RXH_IP_SRC | RXH_IP_DST", 0x30),
            ("RXH_L4_B_0_1 | RXH_L4_B_2_3", 0xc0),
        ] {
            layout.push((name, value as usize));
        }
        layout
    }

    #[test]
    fn sizes_are_the_kernels_on_64_bits() {
        let sizes = [
            size_of::<DriverInfo>(),
            size_of::<Channels>(),
            size_of::<RingParam>(),
            size_of::<Rxfh>(),
            size_of::<FlowSpec>(),
            size_of::<Rxnfc>(),
            size_of::<StringSet>(),
            size_of::<Strings>(),
            size_of::<Statistics>(),
            size_of::<Features>(),
            size_of::<FeatureBlock>(),
            size_of::<FeatureChange>(),
        ];
        assert_eq!(sizes, [196, 36, 36, 24, 168, 192, 24, 12, 8, 8, 16, 8]);
        assert_eq!(offset_of!(Rxfh, transform), 17);
        assert_eq!(offset_of!(FlowSpec, ring_cookie), 152);
        assert_eq!(offset_of!(Rxnfc, padding), RULE_LOCATIONS);
    }

    /// The compiler's word on every struct, field and constant, where there is one and the kernel's headers.
    #[test]
    fn layout_is_what_a_c_compiler_says() {
        let layout = layout();
        let mut program = String::from(
            "#include <stddef.h>\n#include <stdio.h>\n#include <linux/ethtool.h>\nint main(void) {\n",
        );
        for (expression, _) in &layout {
            writeln!(
                program,
                "printf(\"%lu\\n\", (unsigned long)(unsigned int)({expression}));"
            )
            .expect("a string");
        }
        program.push_str("return 0; }\n");
        let folder = std::env::temp_dir().join(format!("lm-ethtool-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("a folder of our own");
        let (source, binary) = (folder.join("layout.c"), folder.join("layout"));
        std::fs::write(&source, program).expect("the source");
        let compiled = Command::new("cc").arg(&source).arg("-o").arg(&binary).output();
        let printed = match compiled {
            Ok(output) if output.status.success() => {
                Some(Command::new(&binary).output().expect("the program").stdout)
            }
            _ => None,
        };
        std::fs::remove_dir_all(&folder).expect("it is ours");
        let Some(printed) = printed else {
            assert!(
                std::env::var("CI").as_deref() != Ok("true"),
                "CI has a C compiler and the kernel's headers"
            );
            println!("SKIPPED: needs a C compiler and linux/ethtool.h");
            return;
        };
        let printed = String::from_utf8(printed).expect("digits");
        let printed: Vec<usize> = printed
            .lines()
            .map(|line| line.parse().expect("a number"))
            .collect();
        assert_eq!(printed.len(), layout.len());
        for ((expression, ours), kernels) in layout.iter().zip(printed) {
            assert_eq!(*ours, kernels, "{expression}");
        }
    }
}
