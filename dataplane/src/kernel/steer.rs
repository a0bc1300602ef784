//! Steering: which packets the card puts on which queue.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;

use lm_cards::{Interface, Neighbouring, Steering, SteeringError};
use lm_protocol::rss::{Flow, HashInput};

use super::KernelNic;
use crate::entropy::Entropy;
use crate::port::{ModeRequest, PortError, Steer};

impl KernelNic {
    /// Keeps packets off landing queues until [`Port::steer`](crate::port::Port::steer) says which may come. After the channels were opened: attaching a program
    /// and binding sockets makes some drivers set their queues up anew.
    ///
    /// # Errors
    ///
    /// See [`SteeringError`]; the device is as before then.
    pub fn begin_steering(
        &mut self,
        interface: &Interface,
        landing_queues: &[u32],
    ) -> Result<(), SteeringError> {
        let mut steering = Steering::apply(interface, landing_queues)?;
        if self.mode == ModeRequest::ZeroCopy {
            steering.forbid_relaxed_ordering()?;
        }
        self.steering = Some(steering);
        Ok(())
    }

    pub(super) fn steer_as(&mut self, wish: &Steer<'_>) -> Result<Option<NonZeroU16>, PortError> {
        let local = self.side.udp.local();
        let Some(steering) = &mut self.steering else {
            return Ok(None);
        };
        let seed = || Entropy::Kernel.draw() as u32;
        match *wish {
            Steer::Landing {
                queue,
                general,
                from,
                port,
                hashed,
                elsewhere,
                alone,
            } => {
                let others = others(local, from, general, elsewhere);
                if hashed == HashInput::Addresses {
                    let others = &others[..OF_ONE_SENDER];
                    steering.lead_addresses(queue, &flow(from, from.port(), local), others)?;
                    return Ok(None);
                }
                let fragments = flow(from, 0, local);
                let port = steering.lead(queue, &fragments, port, &others, (alone, seed()))?;
                Ok(NonZeroU16::new(port))
            }
            Steer::Later { from, elsewhere } => {
                let others = others(local, from, None, elsewhere);
                let port = steering.source_port(&flow(from, 0, local), &others, seed());
                Ok(NonZeroU16::new(port))
            }
            Steer::General { queue, from } => {
                steering.keep(&flow(from, from.port(), local), queue)?;
                Ok(None)
            }
            Steer::Nothing => {
                steering.unlead()?;
                Ok(None)
            }
        }
    }
}

/// Packets of a sender to one of our ports.
fn flow(from: SocketAddrV4, source_port: u16, to: SocketAddrV4) -> Flow {
    Flow {
        source: *from.ip(),
        destination: *to.ip(),
        source_port,
        destination_port: to.port(),
    }
}

/// How many of [`others`] are of the sender itself: its data and control port, to each of ours.
const OF_ONE_SENDER: usize = 4;

/// What may not meet a landing queue beside the fragments of the sender at `from`.
fn others(
    local: SocketAddrV4,
    from: SocketAddrV4,
    general: Option<u32>,
    elsewhere: &[SocketAddrV4],
) -> Vec<Neighbouring> {
    let control = |port: SocketAddrV4| SocketAddrV4::new(*port.ip(), port.port().wrapping_add(1));
    let of = |from: SocketAddrV4, to| flow(from, from.port(), to);
    let other = |flow, queue| Neighbouring { flow, queue };
    let mut others = vec![
        other(of(from, local), general),
        other(of(control(from), control(local)), None),
        other(of(from, control(local)), None),
        other(of(control(from), local), None),
    ];
    others.extend(elsewhere.iter().map(|&from| other(of(from, local), None)));
    others
}
