//! Sizes with suffixes, as the tools take them: `64K`, `256M`, `1G`; powers of 1024.

use anyhow::{Context, Result};

/// Bytes of `text`.
pub fn parse(text: &str) -> Result<u64> {
    let (digits, shift) = match text.chars().last() {
        Some('k' | 'K') => (&text[..text.len() - 1], 10),
        Some('m' | 'M') => (&text[..text.len() - 1], 20),
        Some('g' | 'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = digits
        .parse()
        .ok()
        .with_context(|| format!("{text:?} is no size; write 4096, 64K, 1M or 1G"))?;
    number
        .checked_mul(1 << shift)
        .with_context(|| format!("{text} is too large"))
}

/// `len` bytes with a suffix where it is a whole number of that.
pub fn show(len: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if len > 0 && len.trailing_zeros() >= shift {
            return format!("{} {unit}", len >> shift);
        }
    }
    format!("{len} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 65536),
            ("1m", 1 << 20),
            ("2G", 2 << 30),
        ] {
            assert_eq!(parse(text).unwrap(), bytes);
        }
        for wrong in ["", "K", "1.5M", "-1", "64KB", "99999999999G", "é"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            [show(65536), show(1 << 20), show(1000), show(0)],
            ["64 KiB", "1 MiB", "1000 B", "0 B"]
        );
    }
}
