//! What the parts of the kernel's port say, as the port's errors.

use lm_cards::SteeringError;
use lm_ebpf::{AttachError, GateError};

use crate::daemon::DaemonError;
use crate::port::PortError;
use crate::udp::UdpError;
use crate::xsk::XskError;

macro_rules! other {
    ($($error:ty),*) => {
        $(impl From<$error> for PortError {
            fn from(error: $error) -> PortError {
                PortError::Other(error.into())
            }
        })*
    };
}

other!(AttachError, GateError, SteeringError, UdpError);

impl From<XskError> for PortError {
    fn from(error: XskError) -> PortError {
        match error {
            XskError::Busy { .. } => PortError::Busy(error.into()),
            error => PortError::Other(error.into()),
        }
    }
}

impl From<DaemonError> for PortError {
    fn from(error: DaemonError) -> PortError {
        PortError::Denied(error.into())
    }
}
