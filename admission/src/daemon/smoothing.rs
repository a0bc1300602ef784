//! The smoother of an interface, while programs send real-time messages there: they share its credits, and the kernel's traffic follows it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lm_cards::{Followed, Follower, Foreign};
use lm_dataplane::ipc::Reply;
use lm_ebpf::CreditPage;
use lm_protocol::smoother::{Credits, Departures, Parameters, Smoother};
use lm_protocol::time::Time;

use super::Daemon;
use super::attachment::Attachment;
use super::calls::Answer;
use super::program::{Program, ProgramId};
use super::status::SmootherStatus;
use crate::clock;
use crate::config::{BitRate, Config};

/// Length of an Ethernet header.
const ETHERNET_LEN: u16 = 14;

/// A smoother that programs have.
pub(crate) struct Smoothing {
    owner: Arc<Owner>,
    follower: Follower,
    /// What programs map.
    map: OwnedFd,
}

/// It alone changes the rate: on its thread, at each refresh.
struct Owner {
    interface: String,
    credits: CreditPage,
    smoother: Mutex<Smoother<CreditPage>>,
}

impl Owner {
    fn smoother(&self) -> MutexGuard<'_, Smoother<CreditPage>> {
        // A panic elsewhere is that thread's failure; a smoother is plain data.
        self.smoother.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn credits(&self) -> &Credits {
        self.credits.as_ref()
    }
}

impl Followed for Owner {
    fn now(&self) -> Time {
        clock::now()
    }

    fn refreshed(&self, kernel: Option<(u32, bool)>) -> (u32, Time) {
        self.credits().set_holds_kernel(kernel.is_some());
        let (kernels_per_second, they_wait) = kernel.unwrap_or_default();
        let mut smoother = self.smoother();
        if they_wait {
            self.credits().others_wait();
        }
        let (now, signals) = (self.now(), smoother.signals());
        smoother.look(now);
        if smoother.signals() > signals {
            tracing::debug!(
                interface = self.interface,
                packets_per_second = smoother.rate().credits_per_second(),
                refresh_period = ?smoother.rate().refresh_period(),
                credits = self.credits().whole(),
                forgiven = self.credits().forgiven(),
                signals = smoother.signals(),
                "a loss or a delay lowers the smoother's rate"
            );
        }
        smoother.set_elsewhere(kernels_per_second, now);
        (smoother.rate().credits_per_second(), smoother.next_refresh())
    }

    fn departures(&self) -> Departures {
        self.credits().departures()
    }
}

impl Smoothing {
    fn start(attachment: &mut Attachment, config: &Config) -> Result<Smoothing, String> {
        let name = &attachment.name;
        let Some(link_rate) = config.link_rate else {
            return Err(format!(
                "there is no smoother: how fast the link of {name} is, --link-rate says (lm-admissiond --link-rate \
                 100M)"
            ));
        };
        let told = |error: &dyn std::fmt::Display| format!("{name}: cannot make the smoother: {error}");
        let (map, credits) = attachment.ground.gate.credits().map_err(|error| told(&error))?;
        let parameters = Parameters {
            law: config.law.into(),
            loss_tolerance: config.tolerance,
            ..Parameters::of_link(link_rate.0, attachment.ground.mtu + ETHERNET_LEN)
        };
        let smoother =
            Smoother::over(credits.clone(), parameters, clock::now()).map_err(|error| told(&error))?;
        let owner = Arc::new(Owner {
            interface: name.clone(),
            credits,
            smoother: Mutex::new(smoother),
        });
        let foreign = match config.replace_qdisc {
            true => Foreign::Replace,
            false => Foreign::Keep,
        };
        let followed = || Arc::clone(&owner) as Arc<dyn Followed>;
        let follower = Follower::start(name, foreign, followed()).or_else(|what| {
            tracing::warn!(
                interface = name,
                "the smoother holds LM's packets back, and not the kernel's: {what}"
            );
            Follower::alone(name, followed())
        });
        let follower = follower.map_err(|what| told(&what))?;
        // Programs may ask before the first refresh.
        owner.credits().set_holds_kernel(follower.traffic().is_some());
        Ok(Smoothing { follower, owner, map })
    }

    pub(super) fn status(&self, programs: usize) -> SmootherStatus {
        let (rate, signals) = {
            let smoother = self.owner.smoother();
            (smoother.rate(), smoother.signals())
        };
        let (credits, departures) = (self.owner.credits(), self.owner.credits().sent());
        let kernel = self.follower.traffic();
        SmootherStatus {
            programs,
            packets_per_second: rate.credits_per_second(),
            refresh_period_s: rate.refresh_period().as_secs_f64(),
            credits: credits.whole(),
            forgiven: credits.forgiven(),
            signals,
            first: departures.0,
            others: departures.1,
            holds_kernel: kernel.is_some(),
            kernel_packets: kernel.map_or(0, |kernel| kernel.packets.into()),
            kernel_dropped: kernel.map_or(0, |kernel| kernel.dropped.into()),
            kernel_waiting: kernel.map_or(0, |kernel| kernel.waiting.into()),
        }
    }
}

impl Daemon {
    /// A program wants the smoother of an interface.
    pub(super) fn smooth(&mut self, id: ProgramId, interface: &str) -> Answer {
        let position = self.config.interface.iter().position(|name| name == interface);
        let Some(position) = position else {
            return Err(format!(
                "the daemon does not serve {interface}: start it with --interface {interface}"
            ));
        };
        let has = self.programs.get(&id).and_then(|program| program.smooths);
        if let Some(has) = has.filter(|has| *has != position) {
            let has = &self.config.interface[has];
            return Err(format!(
                "this connection has the smoother of {has}: open another one for {interface}"
            ));
        }
        let Some(attachment) = self.attachments[position].as_mut() else {
            return Err(format!("{interface} is not there: {}", self.absent[position].0));
        };
        if attachment.smoothing.is_none() {
            attachment.smoothing = Some(Smoothing::start(attachment, &self.config)?);
        }
        let map = attachment
            .smoothing
            .as_ref()
            .map(|smoothing| smoothing.map.try_clone());
        let map = map
            .expect("it is there")
            .map_err(|error| format!("no descriptor: {error}"))?;
        if let Some(program) = self.programs.get_mut(&id) {
            program.smooths = Some(position);
        }
        Ok(Some((Reply::Smoother, vec![map])))
    }

    /// Smoothers that programs have begin anew at the rate of another link, with the same page of credits.
    pub(super) fn set_link_rate(&mut self, link_rate: Option<BitRate>) {
        if std::mem::replace(&mut self.config.link_rate, link_rate) == link_rate {
            return;
        }
        for attachment in self.attachments.iter_mut().flatten() {
            if attachment.smoothing.take().is_none() {
                continue;
            }
            match Smoothing::start(attachment, &self.config) {
                Ok(smoothing) => attachment.smoothing = Some(smoothing),
                Err(what) => tracing::error!("{what}"),
            }
        }
    }

    /// Programs that have the smoother of an interface.
    pub(super) fn smoothing_programs(&self, position: usize) -> usize {
        let has = |program: &&Program| program.smooths == Some(position);
        self.programs.values().filter(has).count()
    }

    /// A program that is gone had the smoother of an interface: the last one takes it along. Its credits stay for the next.
    pub(super) fn unsmooth(&mut self, position: usize) {
        if self.smoothing_programs(position) == 0
            && let Some(attachment) = self.attachments[position].as_mut()
            && let Some(smoothing) = attachment.smoothing.take()
        {
            smoothing.owner.credits().undeclare_all();
        }
    }
}
