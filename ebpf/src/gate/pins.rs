//! Pins: a gate that outlives its process, and is taken over by the next one.
//!
//! A folder of a bpffs has the program, the maps, each log as `log-QUEUE`, and the link, pinned last: what is there
//! without a link was not finished. The link's name says what the program was loaded with, so that nobody takes over
//! another one. A smoother's credits come when they are asked for.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::maps::{Array, ArrayOfMaps, IterableMap, MapData, MapError};
use lm_cards::Interface;
use lm_protocol::smoother::Credits;

use super::{BPF_F_MMAPABLE, ChannelLog, Gate, GateError, LogArray, typed};
use crate::CreditPage;
use crate::attach::{self, AttachError, EffectiveMode, GateConfig, object_digest};
use crate::layout::{QUEUES, SESSIONS};
use crate::log::Log;
use crate::sys;

const PROGRAM: &str = "program";
const CREDITS: &str = "credits";
pub(super) const MAPS: [&str; 5] = ["lm_channels", "lm_sessions", "lm_xsks", "lm_logs", "lm_ports"];

/// No dots: bpffs keeps them for itself.
fn link_name(config: &GateConfig, mode: EffectiveMode) -> String {
    format!(
        "link-{}-{}-{:08x}-{}-{}",
        match mode {
            EffectiveMode::Native => "native",
            EffectiveMode::Generic => "generic",
        },
        if config.several_programs { "several" } else { "one" },
        config.local_ip.unwrap_or(Ipv4Addr::UNSPECIFIED).to_bits(),
        config.control_port,
        object_digest()
    )
}

fn log_path(dir: &Path, queue: u32) -> PathBuf {
    dir.join(format!("log-{queue}"))
}

/// Removes what is pinned in `dir`, and the folder. Where nobody else holds it the gate goes from its interface, as
/// after [`Gate::unpin`]; no error where there is nothing.
///
/// # Errors
/// What unlink(2) and rmdir(2) say.
pub fn remove_pins(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let mut names: Vec<PathBuf> = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<_>>()?;
    // The link first: a gate without maps must not stay.
    names.sort_by_key(|path| !is_link(path));
    names.iter().try_for_each(fs::remove_file)?;
    fs::remove_dir(dir)
}

/// Removes what is pinned in the folders of `parent` for interfaces that are gone, of whichever network namespace.
///
/// # Errors
/// What readdir(3) of `parent`, unlink(2) and rmdir(2) say; no error where there is no `parent`.
pub fn remove_defunct_pins(parent: &Path) -> io::Result<()> {
    let folders = match fs::read_dir(parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for folder in folders {
        let folder = folder?.path();
        // Another user's daemon has a folder for itself.
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        let entries = entries.flatten().map(|entry| entry.path());
        for link in entries.filter(|path| is_link(path)) {
            // The kernel shows no interface where the link has none any more.
            if sys::open_pin(&link)
                .and_then(|link| sys::link_interface(link.as_fd()))
                .is_ok_and(|index| index == 0)
            {
                remove_pins(&folder)?;
                break;
            }
        }
    }
    Ok(())
}

fn is_link(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(b"link-"))
}

impl Gate {
    /// Pins the gate in `dir`, a folder of a bpffs (made where it is not there): it stays attached then when the
    /// process ends, in whatever way, with its sessions open, and [`Gate::reopen`] takes it over. Logs made later are
    /// pinned too. What was pinned there before is removed.
    ///
    /// # Errors
    /// What bpf(2) and mkdir(2) say; nothing is pinned then.
    pub fn pin(&mut self, dir: &Path) -> io::Result<()> {
        remove_pins(dir)?;
        fs::create_dir_all(dir)?;
        let pinned = self.pin_all(dir);
        if pinned.is_err() {
            // The first error is the one to tell.
            let _ = remove_pins(dir);
        }
        pinned
    }

    fn pin_all(&mut self, dir: &Path) -> io::Result<()> {
        sys::pin(self.program.as_fd(), &dir.join(PROGRAM))?;
        for (name, map) in MAPS.iter().zip(&self.maps) {
            sys::pin(map.as_fd(), &dir.join(name))?;
        }
        self.pins = Some(dir.to_owned());
        let queues = (0..QUEUES).filter(|&queue| !self.needs_log(queue));
        let logs = queues.map(|queue| self.pin_log(queue).map_err(io::Error::other));
        let pinned = logs
            .collect::<io::Result<Vec<()>>>()
            .and_then(|_| sys::pin(self.link.as_fd(), &dir.join(link_name(&self.config, self.mode))));
        if pinned.is_err() {
            self.pins = None;
        }
        pinned
    }

    /// Removes the pins: the gate goes with this process again.
    ///
    /// # Errors
    /// What unlink(2) and rmdir(2) say.
    pub fn unpin(&mut self) -> io::Result<()> {
        match self.pins.take() {
            Some(dir) => remove_pins(&dir),
            None => Ok(()),
        }
    }

    /// Takes over the gate that an earlier process attached to the interface and pinned in `dir`. Its sessions are open
    /// still ([`Gate::open_sessions`]); roles and ports are as they were. Every row without an open session counts as
    /// closing, and a queue without a role as left by its program: a CPU may be inside the gate with what the earlier
    /// process closed last.
    ///
    /// `None`: there is none, or it cannot be used any more (its interface is gone, it was loaded with another
    /// configuration or by another version); then it is removed.
    ///
    /// # Errors
    /// [`AttachError::NotPrivileged`], [`AttachError::NoInterface`], and what keeps unusable pins from being removed.
    pub fn reopen(ifindex: u32, config: &GateConfig, dir: &Path) -> Result<Option<Gate>, AttachError> {
        if !dir.exists() {
            return Ok(None);
        }
        let gate = attach::interface(ifindex).and_then(|interface| {
            for mode in [EffectiveMode::Native, EffectiveMode::Generic] {
                let path = dir.join(link_name(config, mode));
                if path.exists() {
                    let link = sys::open_pin(&path)?;
                    return match sys::link_interface(link.as_fd())? == ifindex {
                        true => Gate::open_pins(link, interface, config, mode, dir),
                        false => Err(AttachError::System(io::ErrorKind::NotFound.into())),
                    };
                }
            }
            Err(AttachError::System(io::ErrorKind::NotFound.into()))
        });
        match gate {
            Ok(gate) => Ok(Some(gate)),
            Err(AttachError::System(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(AttachError::NotPrivileged {
                    action: "opening the pinned gate",
                    capabilities: "CAP_BPF and CAP_NET_ADMIN",
                })
            }
            Err(error) => {
                remove_pins(dir)?;
                match error {
                    AttachError::NoInterface(_) => Err(error),
                    _ => Ok(None),
                }
            }
        }
    }

    fn open_pins(
        link: OwnedFd,
        interface: Interface,
        config: &GateConfig,
        mode: EffectiveMode,
        dir: &Path,
    ) -> Result<Gate, AttachError> {
        let fds: Vec<OwnedFd> = MAPS
            .iter()
            .map(|name| sys::open_pin(&dir.join(name)))
            .collect::<io::Result<_>>()?;
        let maps: [OwnedFd; 5] = fds.try_into().expect("as many as names");
        let program = sys::open_pin(&dir.join(PROGRAM))?;
        let mut gate = Gate::over((link, program), maps, mode, interface, config)?;
        gate.pins = Some(dir.to_owned());
        // Who made it said so by its type; asked here, because nobody uses it as one.
        typed::<ArrayOfMaps<MapData, LogArray>>(gate.logs_fd.try_clone()?)?;
        for queue in 0..QUEUES {
            let open = (0..SESSIONS).filter(|&row| gate.is_open(queue, row));
            gate.closing[queue as usize] = !open.fold(0, |rows, row| rows | 1u64 << row);
            let path = log_path(dir, queue);
            if gate.role(queue) != 0 || path.exists() {
                let map: LogArray = typed(sys::open_pin(&path)?)?;
                gate.channel_logs[queue as usize] = Some(ChannelLog {
                    mapping: Log::of_map(IterableMap::map(&map).fd().as_fd()).ok(),
                    map,
                });
                gate.progress.vacated |= u64::from(gate.role(queue) == 0) << queue;
            }
        }
        Ok(gate)
    }

    /// The map of the interface's credits, and what is in it: those of the gate's owner before, where they are pinned.
    /// If those were frozen, no program has them mapped, and there are new ones.
    ///
    /// # Errors
    /// What bpf(2), mmap(2) and unlink(2) say.
    pub fn credits(&mut self) -> io::Result<(OwnedFd, CreditPage)> {
        let known = match self.credits.take() {
            Some(known) => known,
            None => self.find_credits()?,
        };
        let (map, page) = self.credits.insert(known);
        Ok((map.try_clone()?, page.clone()))
    }

    fn find_credits(&self) -> io::Result<(OwnedFd, CreditPage)> {
        let of = |map: OwnedFd| CreditPage::of_map(map.as_fd()).map(|page| (map, page));
        let pinned = self.pins.as_ref().map(|dir| dir.join(CREDITS));
        if let Some(path) = pinned.as_ref().filter(|path| path.exists()) {
            match sys::open_pin(path).and_then(of) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => fs::remove_file(path)?,
                found => return found,
            }
        }
        // A map, since unlike a file it cannot be cut short.
        let map = Array::<MapData, [u8; size_of::<Credits>()]>::create(1, BPF_F_MMAPABLE);
        let map = map.map_err(|error| match error {
            MapError::CreateError { io_error, .. } => io_error,
            error => io::Error::other(error),
        })?;
        let new = of(IterableMap::map(&map).fd().as_fd().try_clone_to_owned()?)?;
        if let Some(path) = &pinned {
            sys::pin(new.0.as_fd(), path)?;
        }
        Ok(new)
    }

    pub(super) fn pin_log(&self, queue: u32) -> Result<(), GateError> {
        if let Some(dir) = &self.pins {
            sys::pin(self.log_fd(queue)?, &log_path(dir, queue))?;
        }
        Ok(())
    }

    pub(super) fn unpin_log(&self, queue: u32) {
        if let Some(dir) = &self.pins {
            // It may never have been pinned.
            let _ = fs::remove_file(log_path(dir, queue));
        }
    }
}
