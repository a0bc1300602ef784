//! Bit rates as people write them: `1Gbit`, `500Mbit`, `2.5G`.

use std::str::FromStr;

/// Bits per second; `Gbit` or `G`, `Mbit` or `M`, `kbit` or `k` are powers of 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitRate(pub u64);

impl FromStr for BitRate {
    type Err = String;

    fn from_str(text: &str) -> Result<BitRate, String> {
        let short = text.strip_suffix("bit").unwrap_or(text);
        match scaled(short, &[("G", 1e9), ("M", 1e6), ("k", 1e3)]) {
            Some(rate) if (1e3..=1e12).contains(&rate) => Ok(BitRate(rate as u64)),
            _ => Err("write a rate from 1kbit to 1000Gbit, like 500Mbit".to_owned()),
        }
    }
}

/// A number in multiples of the first unit that it ends with.
pub fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let multiple =
        |(unit, factor): &(&str, f64)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor);
    units.iter().find_map(multiple)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_unit() {
        assert_eq!("1.5Gbit".parse(), Ok(BitRate(1_500_000_000)));
        assert_eq!("64kbit".parse(), Ok(BitRate(64_000)));
        assert_eq!("2.5G".parse(), Ok(BitRate(2_500_000_000)));
        for wrong in ["", "1", "0Gbit", "1bit", "infGbit", "G", "1Gbits", "1g"] {
            assert!(wrong.parse::<BitRate>().is_err(), "{wrong}");
        }
    }
}
