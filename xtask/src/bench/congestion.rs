//! What the kernel's TCP can do about congestion.

use anyhow::{Context, Result};

/// The congestion controls of this system.
#[derive(Clone, Debug)]
pub(super) struct Congestion {
    /// What a socket has that asks for none.
    pub(super) default: String,
    /// All that are there.
    pub(super) available: Vec<String>,
}

impl Congestion {
    pub(super) fn of_this_system() -> Result<Congestion> {
        let read = |name: &str| {
            let path = format!("/proc/sys/net/ipv4/{name}");
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
        };
        Ok(Congestion {
            default: read("tcp_congestion_control")?.trim().to_owned(),
            available: (read("tcp_available_congestion_control")?.split_whitespace())
                .map(str::to_owned)
                .collect(),
        })
    }

    /// Whether sockets can ask for this one.
    pub(super) fn has(&self, name: &str) -> bool {
        self.available.iter().any(|one| one == name)
    }

    /// Cubic is what most systems use: shown beside another default.
    pub(super) fn shows_cubic(&self) -> bool {
        self.has("cubic") && self.default != "cubic"
    }
}
