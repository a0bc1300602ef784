//! Streams whose every byte the receiver knows: sizes and windows, with and without foreign traffic on the landing
//! queue, and messages that are kept and looked at after their delivery (I1).

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::ends::await_stream;
use super::pair::{Pair, await_link, ethtool};
use super::spoil;
use super::transfer;
use crate::bed::{Host, INTERFACE, Impairments, Launch, Program, ip};
use crate::content::Content;
use crate::soak::fates;
use crate::vm::devices::Device;
use crate::vm::protocol::{Plan, Spoil, ZERO_COPY};

/// LM's headers behind Ethernet's: IPv4 20, UDP 8, LM 24 bytes. What is left of the MTU is a fragment's payload.
const HEADERS_LEN: u64 = 52;
/// MTU of the tools where packets up to the interface's MTU shall be longer than fragments.
const SHORT_MTU: u64 = 1400;
/// MTU of a sender that also sends packets which the receiver's is too small for. Frames of zero-copy mode must hold
/// it.
const LONG_MTU: u64 = 1700;
/// Foreign packets a second of each kind and length. An emulated card takes some ten thousand packets in that time.
const FLOOD_RATE: u32 = 200;
/// Packets that no session knows, by the kernel's own generator (pktgen) on interface `$0`, beside whatever AF_XDP sends
/// there: plain ones that are no longer than fragments' packets of `$8` bytes, those with a VLAN tag (of VLAN 0, priority
/// only, and of VLAN 5), and longer ones up to `$9`. Of each kind half are as long as may be: short packets do less harm.
/// They have the addresses and ports of the fragments, so that every hash and rule of a card takes them for such. At the
/// end it says how many there were.
const FLOOD: &str = r#"
cd /proc/net/pktgen
add() {
    echo "add_device $interface@$1" >kpktgend_0
    for line in "min_pkt_size $2" "max_pkt_size $3" "flag TXSIZE_RND" ${4-}; do
        echo "$line" >"$interface@$1"
    done
    echo "$common" | while read -r line; do echo "$line" >"$interface@$1"; done
}
interface=$0 fragment=$(($8 + 14)) longest=$(($9 + 14))
common=$(printf 'count 0\nratep %s\ndst %s\ndst_mac %s\nsrc_min %s\nsrc_mac %s' "$1" "$2" "$3" "$4" "$5"
    printf '\nudp_dst_min %s\nudp_dst_max %s\nudp_src_min %s\nudp_src_max %s\n' "$6" "$6" "$7" "$7")
echo rem_device_all >kpktgend_0
IFS=,
add plain 60 $fragment
add plain-full $fragment $fragment
for vlan in 0 5; do
    add vlan$vlan $((fragment - 200)) $((fragment + 4)) "vlan_id $vlan"
    add vlan$vlan-full $((fragment + 4)) $((fragment + 4)) "vlan_id $vlan"
done
add long $((fragment + 1)) $longest
add long-full $longest $longest
trap : TERM
echo ready >&2
echo start >pgctrl || :
for kind in plain vlan long; do
    sum=$(cat "$interface@$kind"* | awk '$1 == "pkts-sofar:" { sum += $2 } END { print sum + 0 }')
    printf '%s"%s": %s' "${comma-{}" $kind "$sum"
    comma=', '
done
echo '}'
echo rem_device_all >kpktgend_0
"#;
/// UDP port of LM's data.
const PORT: &str = "7168";

/// What is sent, and what is done beside it.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// Lengths of messages, over and over.
    pub(super) lens: Vec<u64>,
    /// Number of messages.
    pub(super) messages: usize,
    /// Messages that may be unconfirmed.
    pub(super) in_flight: u32,
    /// Fragments of a window.
    pub(super) window: u32,
    /// The tools' MTU.
    pub(super) mtu: u64,
    /// Whether packets that no session knows come as well.
    pub(super) foreign: bool,
    /// Bytes of delivered messages that are kept and looked at again.
    pub(super) hold: u64,
    /// Decides the contents.
    pub(super) seed: u64,
    /// What becomes of messages that lose fragments.
    pub(super) delivery: &'static str,
    /// More options of the sender and of the receiver.
    pub(super) options: [&'static str; 2],
}

impl Stream {
    /// Each length `times` times.
    pub(super) fn of(lens: Vec<u64>, times: usize) -> Stream {
        Stream {
            messages: lens.len() * times,
            lens,
            in_flight: 4,
            window: 256,
            mtu: 1500,
            foreign: false,
            hold: 0,
            seed: 1,
            delivery: "reliable",
            options: ["", ""],
        }
    }

    /// The command lines of sender and receiver.
    pub(super) fn lines(&self) -> [String; 2] {
        let lens: Vec<String> = self.lens.iter().map(u64::to_string).collect();
        let line = format!(
            "lm-check messages --time-limit 110 --seed {} --lens {} --messages {} --in-flight {} --window {} --mtu {}",
            self.seed,
            lens.join(","),
            self.messages,
            self.in_flight,
            self.window,
            self.mtu
        );
        let [sender, receiver] = self.options;
        [
            format!("{line} --patience 90 --delivery {} {sender}", self.delivery),
            format!("{line} --hold {} {receiver}", self.hold),
        ]
    }

    /// Sends everything from left to right in zero-copy mode and compares what both sides say; the reports of sender
    /// and receiver. In a bed with a box that is to be running.
    pub(super) fn run(&self, pair: &Pair) -> Result<[Value; 2]> {
        let [sending, receiving] = self.lines();
        let receiver = pair.start_receiver(pair.receiving(&receiving), "ready")?;
        // The receiver ends by itself in any case: killed, it would leave its changes of the card to the next check.
        let sent = self.send(pair, &sending, receiver.id());
        let received = receiver.stop()?.report_of("the receiver")?;
        // Whatever became of the sender: what it sent before was wrong.
        fates::ensure_no_fault(&received)?;
        let others = || {
            // Whether something was lost on the way.
            let hosts = [pair.bed.left(), pair.bed.right()];
            let counted = hosts.map(|host| ethtool(host, &format!("-S {INTERFACE}")).unwrap_or_default());
            let counted = counted.each_ref().map(|text| {
                let lines = text.lines().map(str::trim);
                lines.filter(|line| !line.ends_with(": 0")).collect::<Vec<_>>()
            });
            format!("the receiver: {received}; the cards counted {counted:?}")
        };
        let (sent, flood) = sent.with_context(others)?;
        let judged = pair.prove_mode(&sent, &received);
        let judged = judged.and_then(|()| self.judge(&sent, &received, flood.as_ref()));
        judged.with_context(|| format!("sender {sent}; foreign packets {flood:?}; {}", others()))?;
        Ok([sent, received])
    }

    /// Runs the sender, with foreign packets beside it if there are to be any: both reports.
    fn send(&self, pair: &Pair, line: &str, receiver: u32) -> Result<(Value, Option<Value>)> {
        let mut sender = pair.start_sender(pair.sending(line))?;
        let mut flood = None;
        if self.foreign {
            let port = sender.await_line("fragments leave from port ")?;
            flood = Some(self.flood(pair, &port)?);
        }
        if pair.spoil == Some(Spoil::Message) && self.hold > 0 {
            await_stream(pair, &mut sender)?;
            spoil::messages(pair.spoil, receiver)?;
        }
        let sent = sender.finish()?.json().context("the sender")?;
        let flood = flood.map(|flood| flood.stop()?.report_of("foreign packets"));
        Ok((sent, flood.transpose()?))
    }

    pub(super) fn judge(&self, sent: &Value, received: &Value, flood: Option<&Value>) -> Result<()> {
        let fates = fates::compare(self.delivery, self.messages..=self.messages, sent, received)?;
        ensure!(
            self.delivery != "reliable" || fates.whole == self.messages as u64,
            "{fates:?}"
        );
        if self.hold > 0 {
            let held = |name: &str| received["held"][name].as_u64().unwrap_or(0);
            ensure!(
                held("messages") == fates.whole + fates.in_part && held("looks") >= held("messages"),
                "kept messages were not looked at: {}",
                received["held"]
            );
        }
        if let Some(flood) = flood {
            for kind in ["plain", "vlan", "long"] {
                ensure!(
                    flood[kind].as_u64() >= Some(20),
                    "too few {kind} packets came beside the stream to mean anything: {flood}"
                );
            }
            // On the landing queue they take entries, and what lies there is no fragment.
            let is_taken = |drop: &str| received["drops"][drop].as_u64() > Some(0);
            ensure!(
                ["fragment_corrupt", "fragment_stale"].into_iter().any(is_taken),
                "no entry was taken by a foreign packet: they missed the landing queue"
            );
        }
        Ok(())
    }

    /// Starts packets with the addresses and ports of the fragments, until it is stopped.
    fn flood(&self, pair: &Pair, source_port: &str) -> Result<Program> {
        let (left, right) = (pair.bed.left(), pair.bed.right());
        let mac = |host: &Host| host.read_file(&format!("/sys/class/net/{INTERFACE}/address"));
        let line = format!(
            "{FLOOD_RATE} {} {} {} {} {PORT} {source_port} {} {LONG_MTU}",
            right.address(),
            mac(right)?,
            left.address(),
            mac(left)?,
            self.mtu
        );
        let launch = Launch::new("sh").args(["-euc", FLOOD, INTERFACE]);
        let launch = launch.args(line.split(' ')).time_limit(Duration::from_secs(120));
        left.spawn_until(launch, "ready")
    }
}

/// Lengths at which something changes: one byte, one fragment, two, the bounds of windows, and long ones.
fn lens(mtu: u64, window: u32) -> Vec<u64> {
    let payload = mtu - HEADERS_LEN;
    let windowful = payload * u64::from(window);
    let mut lens = vec![1, 100];
    for bound in [payload, 2 * payload, windowful, 2 * windowful] {
        lens.extend([bound - 1, bound, bound + 1]);
    }
    lens.extend([1 << 20, 16 << 20]);
    lens
}

/// The sender's card takes packets that are longer than the receiver's may be. Before any XDP program is there: igb
/// then chooses its buffers.
fn widened(plan: &Plan, device: Device) -> Result<Pair> {
    let pair = Pair::new(plan, device)?;
    let commands = [format!("link set dev {INTERFACE} mtu {LONG_MTU}")];
    ip::batch(Some(pair.bed.left().name()), &commands)?;
    await_link(&pair.bed)?;
    Ok(pair)
}

/// Windows and lengths, each without foreign packets.
pub(super) fn sizes(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::new(plan, device)?;
    let windows: &[u32] = if plan.short { &[256] } else { &[16, 256, 4096] };
    for &window in windows {
        let stream = Stream {
            window,
            in_flight: 2,
            ..Stream::of(lens(1500, window), 1)
        };
        (stream.run(&pair)).with_context(|| format!("windows of {window} fragments"))?;
    }
    Ok(())
}

/// The same with foreign packets: as long as fragments, tagged, longer, and longer than the receiver's MTU.
pub(super) fn foreign(plan: &Plan, device: Device) -> Result<()> {
    let pair = widened(plan, device)?;
    let runs = [(256, SHORT_MTU, 2), (16, 1500, 2), (4096, 1500, 1)];
    for &(window, mtu, in_flight) in &runs[..if plan.short { 1 } else { 3 }] {
        let stream = Stream {
            window,
            mtu,
            in_flight,
            foreign: true,
            seed: u64::from(window),
            ..Stream::of(lens(mtu, window), 2)
        };
        (stream.run(&pair)).with_context(|| format!("windows of {window} fragments, MTU {mtu}"))?;
    }
    Ok(())
}

/// Delivered messages are kept while later ones and foreign packets come.
pub(super) fn finality(plan: &Plan, device: Device) -> Result<()> {
    let lens = vec![64 << 10, 1 << 20, 5000, 300_000, 200, 700_001];
    let stream = Stream {
        foreign: true,
        hold: 12 << 20,
        mtu: SHORT_MTU,
        ..Stream::of(lens, if plan.short { 8 } else { 30 })
    };
    stream.run(&widened(plan, device)?).map(drop)
}

/// Messages are read while they arrive, and a file's leave while they are read and are written while they arrive.
pub(super) fn reading(plan: &Plan, device: Device) -> Result<()> {
    // Of igb's first MiB the digests are here when all of it is.
    let stream = Stream {
        options: ["", "--read"],
        window: 16,
        in_flight: 2,
        ..Stream::of(vec![4 << 20], 3)
    };
    let pair = Pair::new(plan, device)?;
    let [_, received] = stream.run(&pair)?;
    ensure!(
        received["read"]["early_bytes"].as_u64() > Some(0),
        "no byte was read before its message was whole: {}",
        received["read"]
    );
    let source = Content::new(&std::env::temp_dir(), 6 << 20)?;
    let (sent, _) = transfer::pass(&pair, &source, ZERO_COPY, "--message-size 2MiB")?;
    source.ensure_same(&source.received())?;
    // Longer ones than those that leave when they are whole.
    ensure!(
        sent["messages"].as_u64() == Some(3),
        "other messages were sent: {sent}"
    );
    Ok(())
}

/// Loss, duplication, reordering and corruption between the sender and the receiver's card.
pub(super) fn repair(plan: &Plan, device: Device) -> Result<()> {
    let pair = Pair::with_box(plan, device)?;
    let all = [
        ("reliable", "1%", "0.5%", "1%", "0"),
        ("reliable", "5%", "2%", "2%", "0.5%"),
        ("partial", "1%", "1%", "1%", "0.2%"),
        ("reliable", "0.1%", "5%", "5%", "0.1%"),
        ("unreliable", "1%", "1%", "1%", "0.1%"),
        ("reliable", "0.5%", "0", "0", "1%"),
    ];
    let plans = if plan.short { &all[..1] } else { &all };
    for (seed, &(delivery, loss, duplicate, reorder, corrupt)) in (1..).zip(plans) {
        let impairments = Impairments(format!(
            "--loss {loss} --loss-burst 2 --duplicate {duplicate} --reorder {reorder} --reorder-by 5 --corrupt \
                {corrupt} --seed {seed}"
        ));
        let running = pair.bed.start_box(Path::new("/bin/lm-bench"), &impairments)?;
        let stream = Stream {
            delivery,
            seed,
            in_flight: 8,
            hold: 4 << 20,
            ..Stream::of(vec![1 << 20, 1000, 64 << 10, 300_000, 10_000], 10)
        };
        let passed = stream.run(&pair);
        let forwarded = running.stop()?.report_of("the box")?;
        passed.with_context(|| format!("{impairments:?}; the box: {forwarded}"))?;
        let lost = forwarded["rightward"]["lost"].as_u64();
        ensure!(lost > Some(0), "the box lost nothing: {forwarded}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_at_the_bounds_of_fragments_and_windows() {
        let lens = lens(1500, 16);
        for bound in [
            1,
            1447,
            1448,
            1449,
            2896,
            16 * 1448 - 1,
            16 * 1448 + 1,
            1 << 20,
            16 << 20,
        ] {
            assert!(lens.contains(&bound), "{bound} is not in {lens:?}");
        }
    }
}
