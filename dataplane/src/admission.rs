//! Admission: sessions that are asked for, those that were granted to us, and those who speak for us about them.

use std::net::SocketAddrV4;

use lm_protocol::admission::ClusterKey;
use lm_protocol::control::{Challenge, Proof, WORD_LEN};

use crate::applying::Requests;
use crate::entropy::Entropy;
use crate::introductions::Introductions;
use crate::own_node::OwnNode;
use crate::stewarded::Stewarded;

pub(crate) struct Admissions {
    /// Sessions that we want or have as sender.
    pub(crate) requests: Requests,
    /// Grants sessions, where no daemon does: taken out while it acts on the landing channel.
    pub(crate) node: Option<OwnNode>,
    /// What the admission daemon does for us, where there is one.
    pub(crate) stewarded: Stewarded,
    pub(crate) introductions: Introductions,
    pub(crate) entropy: Entropy,
    /// The cluster's, for an endpoint that admits by itself.
    pub(crate) key: Option<ClusterKey>,
}

impl Admissions {
    /// The word of whoever has the cluster's key for us at `local`, to a peer that hears nobody without; none where that is neither we nor a
    /// daemon.
    pub(crate) fn word_to(
        &self,
        local: SocketAddrV4,
        to: SocketAddrV4,
        challenge: &Challenge,
    ) -> [u8; WORD_LEN] {
        if let Some(key) = &self.key {
            return key.word(local, to, challenge.sender_id, challenge.cookie);
        }
        self.stewarded.word(to, challenge).unwrap_or_else(|| {
            tracing::warn!(%to, "it hears only whom its cluster's daemons speak for: start lm-admissiond here, with \
                                 the cluster's key");
            [0; WORD_LEN]
        })
    }

    /// Whether a peer's word to us at `local` is one of the cluster; with neither key nor daemon there need be none.
    pub(crate) fn has_word(&self, local: SocketAddrV4, from: SocketAddrV4, proof: &Proof) -> bool {
        match &self.key {
            Some(key) => key.is_word(from, local, (proof.sender_id, proof.cookie), &proof.word),
            None => self.stewarded.is_word(from, proof).unwrap_or(true),
        }
    }
}
