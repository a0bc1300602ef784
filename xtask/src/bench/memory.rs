//! What a receiver takes for one message of 1 GiB, beside the message itself.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::{Comparison, Contender, Sample, Target, Unit};
use crate::bed::{Bed, BedConfig, INTERFACE, Launch, leftovers};
use crate::content;
use crate::machine::{status_kib, two_cores};
use crate::workspace::Programs;

const MESSAGE_LEN: u64 = 1 << 30;
/// How much more than the message the receiver may take, in MiB.
const ALLOWANCE_MIB: f64 = 64.0;
/// The control port of `lm-recv`: bound means that it listens.
const CONTROL_PORT: u16 = 7169;
const LIMIT: Duration = Duration::from_secs(120);

/// One file of 1 GiB as a single message: resident memory at its highest plus huge pages at their highest, less the
/// message. The content is checked each time.
pub(super) fn one_gibibyte() -> Comparison {
    Comparison {
        key: "memory_1g",
        title: "receiver's memory beyond a 1 GiB message",
        unit: Unit::Mebibytes,
        contenders: vec![Contender {
            name: "LM",
            bed: BedConfig::default(),
            measure: Box::new(measure),
        }],
        targets: vec![Target::AtMost(ALLOWANCE_MIB)],
        columns: &[],
        most_rounds: Some(3),
    }
}

fn measure(bed: &Bed, programs: &Programs) -> Result<Sample> {
    let [sending, receiving] = two_cores();
    let (folder, _guard) = leftovers::temporary_folder(&std::env::temp_dir(), "memory")?;
    let (source, received) = (folder.join("message"), folder.join("received"));
    let sha256 = content::write(&source, MESSAGE_LEN).context("cannot write 1 GiB to send")?;
    // No --count: the receiver must still be there when its memory is read.
    let receiver = Launch::new(programs.path("lm-recv"))
        .args([
            "--interface",
            INTERFACE,
            "--max-message-size",
            "1G",
            "--from-anyone",
            "--output",
        ])
        .arg(&received)
        .core(receiving)
        .time_limit(LIMIT);
    let mut receiver = bed.right().spawn(receiver)?;
    receiver.await_udp_port(CONTROL_PORT)?;
    let sender = Launch::new(programs.path("lm-send"))
        .args(["--interface", INTERFACE, "--message-size", "1G", "--json", "--to"])
        .arg(bed.right().address().to_string())
        .arg(&source)
        .core(sending)
        .time_limit(LIMIT);
    let sender = bed.left().spawn(sender)?;

    let mut peak = Peak::default();
    let deadline = Instant::now() + LIMIT;
    // The receiver gives the file its name when it is whole.
    while !received.exists() {
        peak.look(receiver.id())?;
        if Instant::now() > deadline {
            bail!("no message of 1 GiB arrived within {} s", LIMIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    peak.look(receiver.id())?;
    let report = sender.finish()?.json().context("lm-send --json")?;
    receiver.stop()?;
    ensure!(
        report["messages"] == 1,
        "the file did not go as one message: {report}"
    );
    ensure!(
        content::sha256(&received)? == sha256,
        "what arrived is not what was sent"
    );
    Ok(Sample {
        value: peak.total_kib() as f64 / 1024.0 - MESSAGE_LEN as f64 / f64::from(1 << 20),
        report: json!({"resident_kib": peak.resident_kib, "huge_pages_kib": peak.huge_pages_kib, "sender": report}),
    })
}

/// The most memory that a process had.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Peak {
    resident_kib: u64,
    huge_pages_kib: u64,
}

impl Peak {
    /// Looks at a process now. The kernel itself keeps the peak of resident memory, but not that of huge pages.
    fn look(&mut self, process: u32) -> Result<()> {
        let found = status_kib(process, ["VmHWM", "HugetlbPages"]).context("the receiver has ended early")?;
        self.take(found);
        Ok(())
    }

    fn take(&mut self, [resident_kib, huge_pages_kib]: [u64; 2]) {
        self.resident_kib = self.resident_kib.max(resident_kib);
        self.huge_pages_kib = self.huge_pages_kib.max(huge_pages_kib);
    }

    fn total_kib(self) -> u64 {
        self.resident_kib + self.huge_pages_kib
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_kept() {
        let mut peak = Peak::default();
        peak.take([4096, 2048]);
        peak.take([8192, 0]);
        assert_eq!(
            peak,
            Peak {
                resident_kib: 8192,
                huge_pages_kib: 2048
            }
        );
        assert_eq!(peak.total_kib(), 10_240);
    }
}
