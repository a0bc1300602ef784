//! Several senders and one receiver on a switch, or a cluster of equal hosts: a bridge in a namespace of its own.
//!
//! ```text
//!   …-left    lm0 198.18.0.1 ──┐   namespace …-switch
//!   …-left3   lm0 198.18.0.3 ──┤  ┌──────────────────┐
//!   …-left4   lm0 198.18.0.4 ──┼──│ port1 port3 …    │      namespace …-right
//!                              │  │   bridge   port2 │───── lm0 198.18.0.2
//! ```
//!
//! **Which queue a packet comes in on.** On a veth pair it is the transmit queue that it was sent on. Behind a bridge
//! that is chosen anew, from what the packet remembers (`skb_tx_hash` in net/core/dev.c): what an XSK of the sender
//! sent on queue
//! `q ≥ 1` comes in on queue `q − 1` of the receiver, because the number counts as that of a receive queue by then, and
//! what was sent on queue 0, or by a kernel socket, on one that a hash of the flow picks. LM's data, from queue 1,
//! would come in on queue
//! 0. Transmit packet steering (XPS) of the bridge's ports overrides that: everything for the receiver goes to its
//!    landing
//! queue, as the rule of a network card (`ethtool -N`) would have it, and everything for a sender to its general queue.
//!
//! **No firewall.** With `br_netfilter` a bridge shows every packet to iptables, and takes it from its socket before
//! that (`setup_pre_routing` in net/bridge/br_netfilter_hooks.c). An XSK's completions then come when the packet
//! reaches the bridge, not when it has left the receiver's ring, and no longer bound what lies in that: it overflows
//! now and then, and fragments take the one-copy path.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Host, host, until};

/// The side of the bridge's namespace.
pub(super) const SWITCH: &str = "switch";
/// Most senders: the addresses of the network end there.
pub(super) const SENDERS_MAX: u32 = 64;
/// Receive queue for everything that goes to the receiver: LM's landing queue where there are two.
pub(super) const RECEIVER_QUEUE: u32 = 1;

/// The last numbers of the addresses of the senders beyond the left host.
pub(super) fn further_senders(senders: u32) -> Result<std::ops::Range<u8>> {
    ensure!(
        (1..=SENDERS_MAX).contains(&senders),
        "a bed has 1 to {SENDERS_MAX} senders, not {senders}"
    );
    Ok(3..senders as u8 + 2)
}

/// The bridge's port towards a host, of the link with this number.
pub(super) fn port_of(host: &Host, number: u8) -> String {
    let [.., last] = host.address().octets();
    match number {
        0 => format!("port{last}"),
        _ => format!("port{last}-{number}"),
    }
}

/// Steers what goes to a host to one of its receive queues: it is sent on the transmit queue beside that by every CPU,
/// since packets are steered by the CPU that sends them.
pub(super) fn steer(switch: &Host, host: &Host, queue: u32, queues: u32) -> Result<()> {
    let path = "/sys/devices/system/cpu/possible";
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let last = last_of_list(text.trim()).with_context(|| format!("{path} says {text:?}"))?;
    ensure!(
        last < 64,
        "a switch steers packets on machines with 64 CPUs at most"
    );
    for each in 0..queues {
        let cpus = if each == queue { u64::MAX >> (63 - last) } else { 0 };
        let file = format!("/sys/class/net/{}/queues/tx-{each}/xps_cpus", port_of(host, 0));
        switch.write_file(&file, &host::cpu_mask(cpus))?;
    }
    Ok(())
}

/// Waits until the bridge forwards what comes in on every port, which it does when the kernel has looked at the port's
/// carrier: up to a second after both ends are up.
pub(super) fn await_forwarding(switch: &Host, hosts: &[Host]) -> Result<()> {
    // BR_STATE_FORWARDING in linux/if_bridge.h
    const FORWARDING: &str = "3";
    for host in hosts {
        let port = port_of(host, 0);
        let file = format!("/sys/class/net/{port}/brport/state");
        until(&format!("{port} forwards"), Duration::from_secs(10), || {
            Ok(switch.read_file(&file)?.trim() == FORWARDING)
        })?;
    }
    Ok(())
}

/// Joins the ports of a link to a bridge, which shows iptables nothing.
pub(super) fn bridge(switch: &Host, number: u8, hosts: &[Host]) -> Result<()> {
    const TO_IPTABLES: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";
    // It is there where `br_netfilter` is.
    if switch.enter(|| Ok(Path::new(TO_IPTABLES).exists()))? {
        switch.write_file(TO_IPTABLES, "0")?;
    }
    let mut commands = vec![format!("link add bridge{number} type bridge mcast_snooping 0")];
    for host in hosts {
        commands.push(format!(
            "link set {} master bridge{number} up",
            port_of(host, number)
        ));
    }
    commands.push(format!("link set bridge{number} up"));
    switch.ip(&commands).context("cannot make the bridge")
}

/// The last number in a list like `0-3,8`.
fn last_of_list(list: &str) -> Option<u32> {
    list.rsplit(['-', ',']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_have_addresses_of_their_own() {
        assert!(further_senders(1).unwrap().is_empty());
        assert!(further_senders(3).unwrap().eq([3, 4]));
        assert!(further_senders(0).is_err() && further_senders(65).is_err());
        assert_eq!(further_senders(64).unwrap().end, 66);
    }

    #[test]
    fn lists_of_cpus() {
        assert_eq!(last_of_list("0"), Some(0));
        assert_eq!(last_of_list("0-1"), Some(1));
        assert_eq!(last_of_list("0-3,8"), Some(8));
        assert_eq!(last_of_list(""), None);
    }
}
