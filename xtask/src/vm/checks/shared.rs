//! Who runs a queue's NAPI instance where one both receives and sends, as with many cards: the calls that wake the
//! driver. Where each way has an instance of its own, as igb's while few of its queues are in use, nothing would ever
//! be sent so, and interrupts go on to do it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::card::lm_bench_compare;
use super::pair::{Pair, await_link, lm_bench, share_instances};
use crate::bed::{Bed, Host, until};
use crate::ends::Ends;
use crate::vm::devices::Device;
use crate::vm::protocol::Plan;

/// For how many microseconds a read polls its socket's queue.
const BUSY_READ: &str = "/proc/sys/net/core/busy_read";
/// Longer than any command here takes, in seconds.
const LIMIT: u32 = 200;
const SOCKET_ROUND_TRIPS: u32 = 50;
/// The stream's are 7168 and the next.
const SOCKET_PORT: u16 = 7180;
const COMMANDS: [(&str, &str); 2] = [
    (
        "lm,lm --idle default",
        "--tasks round-trips --sizes 64,65536 --count 20 --seconds 5",
    ),
    (
        "lm --idle default",
        "--tasks stream --sizes 65536 --warm-up 0.05 --seconds 0.2",
    ),
];

/// Round trips and a stream in zero-copy mode come to their end either way, and packets are taken by calls in one.
pub(super) fn check(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    let bed = &pair.bed;
    let apart = measure(bed)?;
    ensure!(
        apart == [0, 0],
        "calls took {apart:?} packets, though another instance sends"
    );
    share_instances(bed, true)?;
    let shared = measure(bed).and_then(|shared| Ok((shared, beside_a_socket(&pair)?)));
    // The cards keep their queues when the bed has gone.
    share_instances(bed, false)?;
    let (shared, ()) = shared?;
    ensure!(
        shared.iter().all(|&packets| packets > 0),
        "calls took {shared:?} packets, though their instance sends as well"
    );
    Ok(())
}

/// Kernel sockets that poll the general queue's instance as well: they and a stream get all that is theirs.
fn beside_a_socket(pair: &Pair) -> Result<()> {
    let bed = &pair.bed;
    let (receiver, sender) = pair.start_stream(65_536, [0.5, 6.0])?;
    until("the sender begins", Duration::from_secs(20), || {
        bed.left().has_xdp_program()
    })?;
    await_link(bed)?;
    // Sockets that are made from here on poll before they sleep; it is the whole guest's setting.
    std::fs::write(BUSY_READ, "20").context(BUSY_READ)?;
    let mut ends = Ends::round_trips("udp-blocking", 64, SOCKET_ROUND_TRIPS, 4.0);
    ends.port = SOCKET_PORT;
    let answering = bed.right().spawn_until(lm_bench(ends.far(), 1), "ready")?;
    let asked = bed.left().spawn(lm_bench(ends.near(), 0))?.finish()?.json()?;
    std::fs::write(BUSY_READ, "0").context(BUSY_READ)?;
    answering.stop()?;
    ensure!(
        asked["messages"].as_u64() >= Some(1),
        "the sockets had no round trip: {asked}"
    );
    sender.finish()?;
    let received = receiver.finish()?.json()?;
    ensure!(
        received["messages"].as_u64() > Some(0) && received["lost_messages"] == 0,
        "the stream lost messages: {received}"
    );
    Ok(())
}

/// Packets that calls of both hosts have taken meanwhile.
fn measure(bed: &Bed) -> Result<[u64; 2]> {
    let hosts = [bed.left(), bed.right()];
    let before = [taken(hosts[0])?, taken(hosts[1])?];
    for (systems, line) in COMMANDS {
        let options = format!("{line} --rounds 1 --mode zero-copy");
        let (ended, report) = lm_bench_compare(bed, LIMIT, systems, &options)?;
        ensure!(ended.status.success(), "{line}: {}", ended.stderr.trim());
        ensure!(
            report["failures"].as_array().is_none_or(Vec::is_empty),
            "{line}: {}",
            report["failures"]
        );
    }
    Ok([taken(hosts[0])? - before[0], taken(hosts[1])? - before[1]])
}

/// Packets that busy polling has taken in a host's namespace so far.
fn taken(host: &Host) -> Result<u64> {
    let text = host.read_file("/proc/thread-self/net/netstat")?;
    busy_polled(&text).with_context(|| format!("no BusyPollRxPackets in {text}"))
}

/// Names are in a line, and numbers in the next.
fn busy_polled(netstat: &str) -> Option<u64> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, numbers) = (lines.next()?, lines.next()?);
    let at = names.split(' ').position(|name| name == "BusyPollRxPackets")?;
    numbers.split(' ').nth(at)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_busy_polls_are_read_by_name() {
        let text = "TcpExt: SyncookiesSent BusyPollRxPackets TCPAutoCorking\nTcpExt: 1 42 3\nIpExt: \
            InNoRoutes\nIpExt: 7\n";
        assert_eq!(busy_polled(text), Some(42));
        assert_eq!(busy_polled("IpExt: InNoRoutes\nIpExt: 7\n"), None);
    }
}
