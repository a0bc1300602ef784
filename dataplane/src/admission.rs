//! Admission: sessions that are asked for, those that were granted to us, and those who speak for us about them.

use lm_protocol::admission::ClusterKey;

use crate::control::{Applying, Held};
use crate::entropy::Entropy;
use crate::introductions::Introductions;
use crate::own_node::OwnNode;
use crate::stewarded::Stewarded;

pub(crate) struct Admissions {
    pub(crate) applying: Vec<Applying>,
    /// Sessions that we have as sender.
    pub(crate) held: Vec<Held>,
    /// Grants sessions, where no daemon does.
    pub(crate) node: Option<OwnNode>,
    /// What the admission daemon does for us, where there is one.
    pub(crate) stewarded: Stewarded,
    pub(crate) introductions: Introductions,
    pub(crate) entropy: Entropy,
    /// The cluster's, for an endpoint that admits by itself.
    pub(crate) key: Option<ClusterKey>,
}
