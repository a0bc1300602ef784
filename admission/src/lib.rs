//! Who may send to this host, and how much: the admission policy that receivers embed.
#![forbid(unsafe_code)]

mod cidr;
mod policy;

pub use cidr::{Cidr, CidrError};
pub use policy::Policy;
