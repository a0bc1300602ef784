//! Steering: which packets the card puts on which queue.

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
        match *wish {
            Steer::Landing { .. } => return self.lead(wish),
            Steer::General { queue, from } => {
                let flow = Flow {
                    source: *from.ip(),
                    destination: *local.ip(),
                    source_port: from.port(),
                    destination_port: local.port(),
                };
                steering.keep(&flow, queue)?;
            }
            Steer::Later => {
                return Ok(NonZeroU16::new(Steering::source_port(
                    Entropy::Kernel.draw() as u32
                )));
            }
            Steer::Nothing => steering.unlead()?,
        }
        Ok(None)
    }

    fn lead(&mut self, wish: &Steer<'_>) -> Result<Option<NonZeroU16>, PortError> {
        let (
            Some(steering),
            Steer::Landing {
                queue,
                general,
                from,
                port,
                hashed,
                elsewhere,
                alone,
            },
        ) = (&mut self.steering, *wish)
        else {
            return Ok(None);
        };
        let local = self.side.udp.local();
        let flow = |source_port: u16, destination_port: u16| Flow {
            source: *from.ip(),
            destination: *local.ip(),
            source_port,
            destination_port,
        };
        let (theirs, ours) = (from.port(), local.port());
        let other = |source, destination, queue| Neighbouring {
            flow: flow(source, destination),
            queue,
        };
        let mut others = vec![
            other(theirs, ours, general),
            other(theirs.wrapping_add(1), ours.wrapping_add(1), None),
            other(theirs, ours.wrapping_add(1), None),
            other(theirs.wrapping_add(1), ours, None),
        ];
        if hashed == HashInput::Addresses {
            steering.lead_addresses(queue, &flow(theirs, ours), &others)?;
            return Ok(None);
        }
        others.extend(elsewhere.iter().map(|from| Neighbouring {
            flow: Flow {
                source: *from.ip(),
                source_port: from.port(),
                ..flow(0, ours)
            },
            queue: None,
        }));
        let seed = Entropy::Kernel.draw() as u32;
        let port = steering.lead(queue, &flow(0, ours), port, &others, (alone, seed))?;
        Ok(NonZeroU16::new(port))
    }
}
