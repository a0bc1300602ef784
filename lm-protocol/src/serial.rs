//! Serial number arithmetic for `u32` (RFC 1982): numbers that wrap, compared by the shorter way around.
//!
//! Message numbers, packet limits and acknowledgements count on for ever and wrap at 2^32. Two numbers that are
//! exactly 2^31 apart have no order (RFC 1982, section 3.2): neither [`precedes`] the other.

/// `a` comes strictly before `b`.
///
/// ```
/// use lm_protocol::serial::precedes;
/// assert!(precedes(1, 2));
/// assert!(precedes(u32::MAX, 0));
/// assert!(!precedes(7, 7));
/// assert!(!precedes(0, 1 << 31) && !precedes(1 << 31, 0));
/// ```
#[inline]
pub const fn precedes(a: u32, b: u32) -> bool {
    distance(a, b) > 0
}

/// `a` comes before `b` or equals it.
#[inline]
pub const fn at_or_before(a: u32, b: u32) -> bool {
    a == b || precedes(a, b)
}

/// Steps from `from` forward to `to`; negative when `to` lies behind. `i32::MIN` means "no order".
#[inline]
pub const fn distance(from: u32, to: u32) -> i32 {
    to.wrapping_sub(from).cast_signed()
}

/// The later one of two numbers; `a` where they have no order.
#[inline]
pub const fn later(a: u32, b: u32) -> u32 {
    if precedes(a, b) { b } else { a }
}

/// The number nearest to `reference` whose low 16 bits are `low`; of two at the same distance the later one.
///
/// An IP identification carries only the low 16 bits of a message number (`ipfrag` wire), and this gives the rest back
/// as long as sender and receiver are less than 2^15 messages apart.
///
/// ```
/// use lm_protocol::serial::expand_u16;
/// assert_eq!(expand_u16(0x0001_fffe, 0x0001), 0x0002_0001);
/// assert_eq!(expand_u16(0x0002_0001, 0xfffe), 0x0001_fffe);
/// ```
#[inline]
pub const fn expand_u16(reference: u32, low: u16) -> u32 {
    let ahead = low.wrapping_sub(reference as u16);
    if ahead <= 1 << 15 {
        reference.wrapping_add(ahead as u32)
    } else {
        reference.wrapping_sub(ahead.wrapping_neg() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn order_holds_anywhere_on_the_circle(a: u32, step in 1u32..(1 << 31)) {
            let b = a.wrapping_add(step);
            prop_assert!(precedes(a, b));
            prop_assert!(!precedes(b, a));
            prop_assert!(at_or_before(a, b) && at_or_before(a, a) && !at_or_before(b, a));
            prop_assert_eq!(later(a, b), b);
            prop_assert_eq!(later(b, a), b);
            prop_assert_eq!(distance(a, b), step as i32);
            prop_assert_eq!(distance(b, a), -(step as i32));
        }

        #[test]
        fn expansion_returns_every_number_less_than_half_a_circle_away(reference: u32, step in -32767i32..=32768) {
            let number = reference.wrapping_add_signed(step);
            prop_assert_eq!(expand_u16(reference, number as u16), number);
        }
    }

    #[test]
    fn half_a_circle_has_no_order() {
        for a in [0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
            let b = a.wrapping_add(1 << 31);
            assert!(!precedes(a, b) && !precedes(b, a));
            assert_eq!(later(a, b), a);
        }
    }
}
