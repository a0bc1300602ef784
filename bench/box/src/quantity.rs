//! Quantities as people write them: `1%`, `0.1%`, `200ppm`; `50us`, `2ms`; one value or one for each direction.

use std::time::Duration;

use lm_measure::rate::scaled;

/// Packets of a million.
pub(crate) fn share(text: &str) -> Result<u32, String> {
    let share = match text {
        "0" => Some(0.0),
        _ => scaled(text, &[("%", 1e4), ("ppm", 1.0)]),
    };
    let share = share.ok_or("write a share of all packets, like 1% or 200ppm")?;
    if !(0.0..=1e6).contains(&share) {
        return Err("a share lies between 0% and 100%".to_owned());
    }
    if share > 0.0 && share.round() == 0.0 {
        return Err("less than 1ppm cannot be told from nothing".to_owned());
    }
    Ok(share.round() as u32)
}

/// A span of time; `us`, `ms`, `s`.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    match scaled(text, &[("us", 1e-6), ("ms", 1e-3), ("s", 1.0)]) {
        _ if text == "0" => Ok(Duration::ZERO),
        Some(seconds) if (0.0..=10.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("write a time up to 10s, like 50us or 2ms".to_owned()),
    }
}

/// A value for each direction, from left to right first: `X` is for both, `X,Y` is one for each.
pub(crate) fn both<T: Clone, E: ToString>(
    text: &str,
    value: impl Fn(&str) -> Result<T, E>,
) -> Result<[T; 2], String> {
    let value = |text| value(text).map_err(|error| error.to_string());
    match text.split_once(',') {
        Some((rightward, leftward)) => Ok([value(rightward)?, value(leftward)?]),
        None => value(text).map(|both| [both.clone(), both]),
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
            assert_eq!(share(text), Ok(per_million), "{text}");
        }
        for wrong in ["", "1", "%", "101%", "-1%", "nan%", "0.00001%"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times() {
        assert_eq!(span("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(span("2ms"), Ok(Duration::from_millis(2)));
        assert_eq!(span("0"), Ok(Duration::ZERO));
        for wrong in ["", "1", "-1us", "11s", "nans"] {
            assert!(span(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_value_or_two() {
        let both = |text: &str| both(text, share);
        assert_eq!(both("1%,0"), Ok([10_000, 0]));
        assert_eq!(both("1%"), both("1%,1%"));
        assert!(both("1%,").is_err());
    }
}
