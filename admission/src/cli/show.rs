//! A status as tables, or as JSON.

use std::fmt::Write as _;
use std::io::Write as _;

use crate::daemon::status::{InterfaceStatus, Status};

pub(super) fn print(status: &Status, json: bool) -> Result<(), String> {
    let text = match json {
        true => {
            serde_json::to_string(status).map_err(|error| format!("cannot show the status: {error}"))? + "\n"
        }
        false => tables(status),
    };
    say(&text)
}

/// Prints a text, as far as it is read.
pub(super) fn say(text: &str) -> Result<(), String> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => Ok(()),
        // As with `| head`.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(format!("cannot print: {error}; check standard output")),
    }
}

/// Columns as wide as what is in them.
fn table<T, const N: usize>(out: &mut String, head: [&str; N], of: &[T], row: impl Fn(&T) -> [String; N]) {
    if of.is_empty() {
        return;
    }
    let head = head.map(ToOwned::to_owned);
    let rows: Vec<[String; N]> = std::iter::once(head).chain(of.iter().map(row)).collect();
    let len = |row: &[String; N], column: usize| row[column].chars().count();
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| len(row, column)).max().unwrap_or(0));
    for row in &rows {
        let cells = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(out, "  {}", line.trim_end());
    }
}

fn optional(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn tables(status: &Status) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "lm-admissiond {}, process {}, policy {}",
        status.version, status.pid, status.policy
    );
    for interface in &status.interfaces {
        show_interface(&mut out, interface);
    }
    let _ = writeln!(
        out,
        "programs ({} calls, {} refused)",
        status.calls, status.refusals
    );
    let head = ["pid", "uid", "interface", "port", "memory", "sends", ""];
    table(&mut out, head, &status.programs, |program| {
        [
            program.pid.to_string(),
            program.uid.to_string(),
            program.interface.clone(),
            program.data_port.to_string(),
            format!("{} KiB", program.memory_bytes >> 10),
            program.sent.to_string(),
            ["awaited", "connected"][usize::from(program.connected)].to_owned(),
        ]
    });
    out
}

fn show_interface(out: &mut String, interface: &InterfaceStatus) {
    if let Some(why) = &interface.absent {
        let _ = writeln!(out, "{}: not there: {why}", interface.name);
        return;
    }
    let _ = writeln!(
        out,
        "{}: {}, gate {}, {} hosts known, {} requests wait, {} sessions and requests as sender",
        interface.name,
        optional(interface.address),
        interface.gate,
        interface.hosts,
        interface.waiting,
        interface.outgoing
    );
    if let Some(smoother) = &interface.smoother {
        let _ = writeln!(
            out,
            "  smoother: {} packets/s, RP {:.1} ms, {} credits, {} forgiven, {} signals, {} programs; real time and \
             control {}, others {}{}",
            smoother.packets_per_second,
            smoother.refresh_period_s * 1e3,
            smoother.credits,
            smoother.forgiven,
            smoother.signals,
            smoother.programs,
            smoother.first,
            smoother.others,
            match smoother.holds_kernel {
                true => format!(
                    ", the kernel's {} ({} dropped, {} wait)",
                    smoother.kernel_packets, smoother.kernel_dropped, smoother.kernel_waiting
                ),
                false => "; the kernel's traffic is not held back".to_owned(),
            }
        );
    }
    table(
        out,
        ["queue", "role", "pid", "open", "closing"],
        &interface.queues,
        |queue| {
            [
                queue.queue.to_string(),
                queue.role.clone(),
                optional(queue.pid),
                queue.open_places.to_string(),
                queue.closing_places.to_string(),
            ]
        },
    );
    let head = ["from", "port", "queue", "delivered", "lease"];
    table(out, head, &interface.sessions, |session| {
        [
            session.from.to_string(),
            session.data_port.to_string(),
            optional(session.lands.then_some(session.queue)),
            session.delivered.to_string(),
            format!("{:.1} s", session.expires_in_s),
        ]
    });
    table(
        out,
        ["LM_RECV_ADDR", "flag", "lease"],
        &interface.recv_addrs,
        |entry| {
            let expires = format!("{:.1} s", entry.expires_in_s);
            [entry.address.to_string(), entry.flag.clone(), expires]
        },
    );
    for (what, counts) in [
        ("datagrams", &interface.datagrams),
        ("packets, as programs count them", &interface.packets),
    ] {
        let counts = counts.iter().filter(|(_, count)| **count > 0);
        let counts: Vec<String> = counts.map(|(name, count)| format!("{name} {count}")).collect();
        if !counts.is_empty() {
            let _ = writeln!(out, "  {what}: {}", counts.join(", "));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smoother_has_its_line() {
        let shown = tables(&Status::smoothed());
        let line = "  smoother: 3600 packets/s, RP 11.1 ms, -3 credits, 5 forgiven, 7 signals, 2 programs; real time \
                    and control 100, others 900, the kernel's 50 (11 dropped, 13 wait)";
        assert!(shown.lines().any(|had| had == line), "{shown}");
    }
}
