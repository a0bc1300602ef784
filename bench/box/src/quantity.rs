//! Quantities as people write them: `1%`, `0.1%`, `200ppm`; `50us`, `2ms`; one value or one for each direction.

use std::str::FromStr;
use std::time::Duration;

/// Packets of a million.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PerMillion(pub u32);

impl FromStr for PerMillion {
    type Err = String;

    fn from_str(text: &str) -> Result<PerMillion, String> {
        const FORMAT: &str = "write a share of all packets, like 1% or 200ppm";
        let (number, factor) = match text {
            "0" => return Ok(PerMillion(0)),
            _ => match (text.strip_suffix('%'), text.strip_suffix("ppm")) {
                (Some(number), _) => (number, 1e4),
                (_, Some(number)) => (number, 1.0),
                _ => return Err(FORMAT.to_owned()),
            },
        };
        let share = number.parse::<f64>().map_err(|_| FORMAT.to_owned())? * factor;
        if !(0.0..=1e6).contains(&share) {
            return Err("a share lies between 0% and 100%".to_owned());
        }
        let rounded = share.round();
        if share > 0.0 && rounded == 0.0 {
            return Err("less than 1ppm cannot be told from nothing".to_owned());
        }
        Ok(PerMillion(rounded as u32))
    }
}

/// A span of time; `us`, `ms`, `s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let units = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
        let seconds = units
            .iter()
            .find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor));
        match seconds {
            _ if text == "0" => Ok(Span(Duration::ZERO)),
            Some(seconds) if (0.0..=10.0).contains(&seconds) => Ok(Span(Duration::from_secs_f64(seconds))),
            _ => Err("write a time up to 10s, like 50us or 2ms".to_owned()),
        }
    }
}

/// A value for each direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Both<T> {
    /// From the left interface to the right one.
    pub rightward: T,
    /// From the right interface to the left one.
    pub leftward: T,
}

impl<T: Copy> Both<T> {
    /// 0 is rightward, 1 is leftward.
    pub(crate) fn of(&self, direction: u64) -> T {
        match direction {
            0 => self.rightward,
            _ => self.leftward,
        }
    }
}

impl<T: FromStr<Err: ToString> + Clone> FromStr for Both<T> {
    type Err = String;

    /// `X` is for both directions, `X,Y` is one for each.
    fn from_str(text: &str) -> Result<Both<T>, String> {
        let value = |text: &str| text.parse::<T>().map_err(|error| error.to_string());
        let (rightward, leftward) = match text.split_once(',') {
            Some((rightward, leftward)) => (value(rightward)?, value(leftward)?),
            None => {
                let both = value(text)?;
                (both.clone(), both)
            }
        };
        Ok(Both { rightward, leftward })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares() {
        for (text, per_million) in [
            ("0", 0),
            ("0%", 0),
            ("1%", 10_000),
            ("0.1%", 1000),
            ("200ppm", 200),
            ("100%", 1_000_000),
        ] {
            assert_eq!(text.parse(), Ok(PerMillion(per_million)), "{text}");
        }
        for wrong in ["", "1", "%", "101%", "-1%", "nan%", "0.00001%"] {
            assert!(wrong.parse::<PerMillion>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn times() {
        assert_eq!("50us".parse(), Ok(Span(Duration::from_micros(50))));
        assert_eq!("2ms".parse(), Ok(Span(Duration::from_millis(2))));
        assert_eq!("0".parse(), Ok(Span(Duration::ZERO)));
        for wrong in ["", "1", "-1us", "11s", "nans"] {
            assert!(wrong.parse::<Span>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_value_or_two() {
        let both = |text: &str| text.parse::<Both<PerMillion>>();
        let expected = Both {
            rightward: PerMillion(10_000),
            leftward: PerMillion(0),
        };
        assert_eq!(both("1%,0"), Ok(expected));
        assert_eq!(both("1%"), both("1%,1%"));
        assert!(both("1%,").is_err());
    }
}
