//! Sizes in bytes as people write them: `1448`, `64K`, `1M`, `2GiB`. The suffixes are binary (K = 1024).

use std::fmt;
use std::str::FromStr;

/// A number of bytes given on a command line.
///
/// ```
/// use lm_measure::size::ByteSize;
/// assert_eq!("64K".parse::<ByteSize>().unwrap().bytes(), 65_536);
/// assert_eq!(ByteSize::new(1 << 30).to_string(), "1G");
/// assert_eq!(ByteSize::new(65_507).to_string(), "65507");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(u64);

/// Suffix letters and the power of two that each one stands for, largest first.
const SUFFIXES: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl ByteSize {
    /// A size of exactly `bytes`.
    #[must_use]
    pub const fn new(bytes: u64) -> Self {
        ByteSize(bytes)
    }

    /// The size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, suffix) = text.split_at(digits);
        if number.is_empty() {
            return Err(MALFORMED);
        }
        let number: u64 = number.parse().map_err(|_| TOO_LARGE)?;
        let shift = match suffix.as_bytes() {
            [] | [b'B'] => 0,
            [letter] | [letter, b'i', b'B'] => SUFFIXES
                .iter()
                .find(|(name, _)| *name == char::from(letter.to_ascii_uppercase()))
                .map(|(_, shift)| *shift)
                .ok_or(MALFORMED)?,
            _ => return Err(MALFORMED),
        };
        number.checked_mul(1 << shift).map(ByteSize).ok_or(TOO_LARGE)
    }
}

impl fmt::Display for ByteSize {
    /// The shortest exact form: `1M`, `1500`; what [`FromStr`] reads back to the same number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match shortest(self.0) {
            (number, Some(name)) => write!(f, "{number}{name}"),
            (number, None) => write!(f, "{number}"),
        }
    }
}

fn shortest(bytes: u64) -> (u64, Option<char>) {
    let fits = |&&(_, shift): &&(char, u32)| bytes != 0 && bytes.trailing_zeros() >= shift;
    match SUFFIXES.iter().find(fits) {
        Some((name, shift)) => (bytes >> shift, Some(*name)),
        None => (bytes, None),
    }
}

/// `bytes` for people, exactly: `64 KiB`, `1500 B`.
#[must_use]
pub fn exact(bytes: u64) -> String {
    match shortest(bytes) {
        (number, Some(name)) => format!("{number} {name}iB"),
        (number, None) => format!("{number} B"),
    }
}

/// `bytes` for people: three significant figures with a binary unit (`1.50 MiB`), exact below 1 KiB.
#[must_use]
pub fn approximate(bytes: u64) -> String {
    for (name, shift) in SUFFIXES {
        if bytes >> shift != 0 {
            let scaled = bytes as f64 / (1u64 << shift) as f64;
            let decimals = usize::from(scaled < 10.0) + usize::from(scaled < 100.0);
            return format!("{scaled:.decimals$} {name}iB");
        }
    }
    format!("{bytes} B")
}

/// Why a text is no size.
const MALFORMED: &str = "write a whole number of bytes with an optional K, M, G or T (binary), such as 64K";
const TOO_LARGE: &str = "larger than 64 bits can count";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn suffixes_are_binary() {
        for (text, bytes) in [
            ("0", 0),
            ("1448", 1448),
            ("12B", 12),
            ("1k", 1024),
            ("64K", 65_536),
            ("1M", 1 << 20),
            ("1MiB", 1 << 20),
            ("3G", 3 << 30),
            ("2T", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse::<ByteSize>(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in [
            "", "K", "-1", "+1", "1.5M", "1KB", "1 M", "1X", "1Mi", "1MiBs", "0x10", "1é", "é",
        ] {
            assert_eq!(text.parse::<ByteSize>(), Err(MALFORMED), "{text:?}");
        }
        for text in ["18446744073709551616", "16777216T"] {
            assert_eq!(text.parse::<ByteSize>(), Err(TOO_LARGE), "{text:?}");
        }
    }

    #[test]
    fn approximations_have_three_figures() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536 << 10, "1.50 MiB"),
            (250 << 20, "250 MiB"),
        ] {
            assert_eq!(approximate(bytes), text);
        }
    }

    #[test]
    fn exact_sizes_have_the_largest_unit_that_they_are_whole_numbers_of() {
        assert_eq!(
            [65_536, 7168, 1 << 20, 1000, 0].map(exact),
            ["64 KiB", "7 KiB", "1 MiB", "1000 B", "0 B"]
        );
    }

    proptest! {
        #[test]
        fn what_is_shown_reads_back(bytes: u64, shift in 0u32..64) {
            let size = ByteSize(bytes >> shift << (shift / 2));
            prop_assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
        }

        #[test]
        fn text_never_panics(text in ".{0,30}") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
