//! How long a card holds its interrupts back.

use serde::{Deserialize, Serialize};
use zerocopy::{FromZeros, IntoBytes};

use super::uapi;
use super::{Ethtool, EthtoolError};

/// Drivers that mean by these numbers that they choose the interval themselves, as long as 0.8 ms for full packets (`igb_update_ring_itr`).
const CHOOSE: [(&str, &[u32]); 5] = [
    ("e1000", &[1, 3]),
    ("e1000e", &[1, 3]),
    ("igb", &[1, 3]),
    ("igc", &[1, 3]),
    ("ixgbe", &[1]),
];

/// The least time between two interrupts of a queue (`ethtool -C`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coalescing {
    /// Of receive queues, in microseconds.
    pub rx_usecs: u32,
    /// Of transmit queues; 0 where each shares its interrupt with a receive queue.
    pub tx_usecs: u32,
    /// Whether the driver changes the former as packets come.
    pub adapts_rx: bool,
    /// Whether it changes the latter.
    pub adapts_tx: bool,
}

impl Coalescing {
    /// The same with `usecs` at most where the driver would choose the interval. What an administrator chose stays.
    pub(crate) fn chosen(self, usecs: u32, driver: &str) -> Coalescing {
        let means_choice =
            |now: u32| (CHOOSE.iter()).any(|(name, numbers)| *name == driver && numbers.contains(&now));
        let bounded = |now: u32, adapts: bool| match (means_choice(now), adapts) {
            (true, _) => usecs,
            (false, true) => now.min(usecs),
            (false, false) => now,
        };
        Coalescing {
            rx_usecs: bounded(self.rx_usecs, self.adapts_rx),
            tx_usecs: bounded(self.tx_usecs, self.adapts_tx),
            adapts_rx: false,
            adapts_tx: false,
        }
    }
}

impl Ethtool {
    fn coalescing_command(&self) -> Result<uapi::Coalescing, EthtoolError> {
        let mut data = uapi::Coalescing::new_zeroed();
        data.command = uapi::GET_COALESCING;
        // SAFETY: the command's struct, which has a fixed size.
        unsafe { self.ask("interrupt coalescing", data.as_mut_bytes())? };
        Ok(data)
    }

    /// How long interrupts are held back.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn coalescing(&self) -> Result<Coalescing, EthtoolError> {
        let told = self.coalescing_command()?;
        Ok(Coalescing {
            rx_usecs: told.rx_usecs,
            tx_usecs: told.tx_usecs,
            adapts_rx: told.adapts_rx != 0,
            adapts_tx: told.adapts_tx != 0,
        })
    }

    /// Holds them back for so long from now on. What else the driver knows of it stays.
    ///
    /// # Errors
    ///
    /// [`EthtoolError`].
    pub fn set_coalescing(&self, coalescing: Coalescing) -> Result<(), EthtoolError> {
        let mut data = uapi::Coalescing {
            rx_usecs: coalescing.rx_usecs,
            tx_usecs: coalescing.tx_usecs,
            adapts_rx: coalescing.adapts_rx.into(),
            adapts_tx: coalescing.adapts_tx.into(),
            ..self.coalescing_command()?
        };
        data.command = uapi::SET_COALESCING;
        // SAFETY: as above.
        unsafe { self.ask("interrupt coalescing", data.as_mut_bytes())? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_would_choose_is_bounded() {
        let of = |rx_usecs, tx_usecs, adapts| Coalescing {
            rx_usecs,
            tx_usecs,
            adapts_rx: adapts,
            adapts_tx: adapts,
        };
        for (driver, before, after) in [
            ("igb", of(3, 3, false), of(10, 10, false)),
            // Its transmit queues share the receive queues' interrupts, and it refuses any other number.
            ("igb", of(3, 0, false), of(10, 0, false)),
            ("igb", of(125, 1, false), of(125, 10, false)),
            ("mlx5_core", of(8, 16, true), of(8, 10, false)),
            ("mlx5_core", of(1, 50, false), of(1, 50, false)),
            ("ixgbe", of(1, 3, false), of(10, 3, false)),
            ("ice", of(50, 0, true), of(10, 0, false)),
        ] {
            assert_eq!(before.chosen(10, driver), after, "{driver}");
            assert_eq!(after.chosen(10, driver), after, "{driver}, once more");
        }
    }
}
