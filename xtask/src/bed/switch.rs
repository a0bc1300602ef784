//! Several senders and one receiver on a switch: a bridge in a namespace of its own.
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

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Host, INTERFACE, Side, host, ip, until};

/// The side of the bridge's namespace.
pub(super) const SWITCH: &str = "switch";
/// Most senders: the addresses of the network end there.
pub(super) const SENDERS_MAX: u32 = 64;
/// Receive queue for everything that goes to the receiver: LM's landing queue where there are two.
pub(super) const RECEIVER_QUEUE: u32 = 1;

/// Side and address of the senders beyond the left host.
pub(super) fn further_senders(senders: u32) -> Result<Vec<(String, Ipv4Addr)>> {
    ensure!(
        (1..=SENDERS_MAX).contains(&senders),
        "a bed has 1 to {SENDERS_MAX} senders, not {senders}"
    );
    let sender = |number: u32| {
        let address = Ipv4Addr::new(198, 18, 0, number as u8);
        (format!("{}{number}", Side::Left.name()), address)
    };
    Ok((3..senders + 2).map(sender).collect())
}

/// Whether `side` is one of [`further_senders`].
pub(super) fn is_further_sender(side: &str) -> bool {
    side.strip_prefix(Side::Left.name())
        .and_then(|number| number.parse::<u32>().ok())
        .is_some_and(|number| (3..SENDERS_MAX + 2).contains(&number))
}

/// The bridge's port towards a host.
pub(super) fn port_of(host: &Host) -> String {
    format!("port{}", host.address().octets()[3])
}

/// Joins the ports to a bridge, once the links are there, and steers what goes to each host to the receive queue beside
/// it; where none is, the kernel chooses.
pub(super) fn configure(switch: &Host, hosts: &[(&Host, Option<u32>)]) -> Result<()> {
    switch
        .write_file("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
        .ok();
    let ports: Vec<String> = hosts.iter().map(|(host, _)| port_of(host)).collect();
    bridge(switch, "bridge", &ports)?;
    let cpus = host::cpu_mask(all_cpus()?);
    let steered = hosts.iter().filter_map(|&(host, queue)| Some((host, queue?)));
    switch.enter(|| {
        for (host, queue) in steered {
            let file = format!("/sys/class/net/{}/queues/tx-{queue}/xps_cpus", port_of(host));
            std::fs::write(&file, &cpus).with_context(|| format!("cannot write {cpus} to {file}"))?;
        }
        Ok(())
    })
}

/// Steers what goes to a host to another of its two receive queues.
pub(super) fn steer(switch: &Host, host: &Host, queue: u32) -> Result<()> {
    let cpus = host::cpu_mask(all_cpus()?);
    switch.enter(|| {
        for (queue, cpus) in [(queue, &*cpus), (1 - queue, "0")] {
            let file = format!("/sys/class/net/{}/queues/tx-{queue}/xps_cpus", port_of(host));
            std::fs::write(&file, cpus).with_context(|| format!("cannot write {cpus} to {file}"))?;
        }
        Ok(())
    })
}

/// Waits until the bridge forwards what comes in on every port, which it does when the kernel has looked at the port's
/// carrier: up to a second after both ends are up.
pub(super) fn await_forwarding(switch: &Host, hosts: &[&Host]) -> Result<()> {
    // BR_STATE_FORWARDING in linux/if_bridge.h
    const FORWARDING: &str = "3";
    for host in hosts {
        let port = port_of(host);
        let file = format!("/sys/class/net/{port}/brport/state");
        until(&format!("{port} forwards"), Duration::from_secs(10), || {
            Ok(switch.read_file(&file)?.trim() == FORWARDING)
        })?;
    }
    Ok(())
}

/// Joins ports to a bridge of this name, which shows iptables nothing.
pub(super) fn bridge(switch: &Host, name: &str, ports: &[String]) -> Result<()> {
    const TO_IPTABLES: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";
    // It is there where `br_netfilter` is.
    if switch.enter(|| Ok(Path::new(TO_IPTABLES).exists()))? {
        switch.write_file(TO_IPTABLES, "0")?;
    }
    let mut commands = vec![format!("link add {name} type bridge mcast_snooping 0")];
    for port in ports {
        commands.push(format!("link set {port} master {name}"));
        commands.push(format!("link set {port} up"));
    }
    commands.push(format!("link set {name} up"));
    ip::batch(Some(switch.name()), &commands).context("cannot make the bridge")
}

/// Tells each of `some` the Ethernet addresses of the `others`, and the others theirs: a question to all would go to
/// every port.
pub(super) fn introduce(some: &[&Host], others: &[&Host]) -> Result<()> {
    for (hosts, neighbours) in [(some, others), (others, some)] {
        let lines = neighbours.iter().map(|of| {
            let mac = of.read_file(&format!("/sys/class/net/{INTERFACE}/address"))?;
            let line = format!("neigh replace {} lladdr {mac} dev {INTERFACE}", of.address());
            Ok((of.address(), line))
        });
        let lines: Vec<(Ipv4Addr, String)> = lines.collect::<Result<_>>()?;
        for host in hosts {
            let of_others = lines.iter().filter(|(address, _)| *address != host.address());
            let of_others: Vec<String> = of_others.map(|(_, line)| line.clone()).collect();
            ip::batch(Some(host.name()), &of_others)?;
        }
    }
    Ok(())
}

/// Mask of all CPUs that the machine may have: packets are steered by the CPU that sends them.
fn all_cpus() -> Result<u64> {
    let path = "/sys/devices/system/cpu/possible";
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let last = last_of_list(text.trim()).with_context(|| format!("{path} says {text:?}"))?;
    ensure!(
        last < 64,
        "a switch steers packets on machines with 64 CPUs at most"
    );
    Ok(u64::MAX >> (63 - last))
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
        assert_eq!(further_senders(1).unwrap(), []);
        let three = further_senders(3).unwrap();
        let expected =
            [("left3", 3), ("left4", 4)].map(|(side, n)| (side.to_owned(), Ipv4Addr::new(198, 18, 0, n)));
        assert_eq!(three, expected);
        assert!(further_senders(0).is_err() && further_senders(65).is_err());
        let most = further_senders(64).unwrap();
        assert!(most.iter().all(|(side, _)| is_further_sender(side)));
        for foreign in ["left", "left2", "left66", "leftx", "right3"] {
            assert!(!is_further_sender(foreign), "{foreign}");
        }
    }

    #[test]
    fn lists_of_cpus() {
        assert_eq!(last_of_list("0"), Some(0));
        assert_eq!(last_of_list("0-1"), Some(1));
        assert_eq!(last_of_list("0-3,8"), Some(8));
        assert_eq!(last_of_list(""), None);
    }
}
