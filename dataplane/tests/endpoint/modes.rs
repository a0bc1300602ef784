//! Native, generic and zero-copy mode; devices with one queue; MTUs.

use lm_cards::Interface;
use lm_dataplane::{
    ConnectError, ConnectOptions, EffectiveMode, Endpoint, EndpointConfig, LinkConfig, MemoryConfig,
    ModeRequest, OpenError, PeerId,
};
use lm_protocol::control::RejectReason;
use lm_protocol::geometry::Wire;

use crate::harness::{
    B, Bed, assert_clean, assert_delivered, check, config_a, config_b, connect, content, open, recv, send,
    settle, up_to,
};

const LENGTHS: [u64; 6] = [0, 64, 1449, 7168, 100_000, 3 << 20];

fn generic(config: EndpointConfig) -> EndpointConfig {
    EndpointConfig {
        link: LinkConfig {
            mode: ModeRequest::Generic,
            ..config.link
        },
        ..config
    }
}

fn send_each(endpoint: &mut Endpoint, peer: PeerId, lengths: &[u64]) {
    let mut sent = Vec::new();
    for (tag, &len) in (0..).zip(lengths) {
        sent.push((send(endpoint, peer, tag, &content(tag, len)), tag, len));
    }
    assert_delivered(&settle(endpoint), &sent);
    assert_clean(endpoint);
}

fn receive_each(endpoint: &mut Endpoint, lengths: &[u64]) -> PeerId {
    let mut peer = None;
    let mut tags = Vec::new();
    for _ in lengths {
        let message = recv(endpoint);
        check(endpoint, &message, message.tag(), lengths[message.tag() as usize]);
        tags.push(message.tag());
        peer = Some(message.peer());
    }
    tags.sort_unstable();
    assert!(tags.iter().copied().eq(0..lengths.len() as u64), "{tags:?}");
    assert_clean(endpoint);
    peer.expect("at least one message")
}

/// Nothing lands there, whichever CPUs run the gate.
#[test]
fn generic_mode_copies_large_messages() {
    let Some(bed) = Bed::new(2) else { return };
    let check = |end: &Endpoint| {
        assert_eq!(end.status().mode(), EffectiveMode::CopyGeneric);
        let counters = end.counters();
        assert_eq!((counters.sessions_granted, counters.sessions_one_copy), (1, 1));
        assert_eq!((counters.landing_packets, counters.violations.total()), (0, 0));
    };
    bed.talk(
        &generic(config_a()),
        &generic(config_b()),
        |a| {
            let peer = connect(a, 3 << 20);
            send_each(a, peer, &LENGTHS);
            receive_each(a, &LENGTHS);
            check(a);
        },
        |b| {
            let peer = receive_each(b, &LENGTHS);
            b.peer(peer).open_session(&up_to(3 << 20)).unwrap();
            send_each(b, peer, &LENGTHS);
            check(b);
        },
    );
}

#[test]
fn generic_mode_says_what_it_costs() {
    let Some(bed) = Bed::new(2) else { return };
    let warnings = |config| bed.pair.b.run(|| open(&config).status().warnings().to_vec());
    let told = warnings(generic(config_b()));
    assert!(
        matches!(&told[..], [told] if told.contains("copied") && told.contains("--mode copy") && !told.contains('\n')),
        "{told:?}"
    );
    // It is nothing to a sender, whose messages land elsewhere.
    let sender = EndpointConfig {
        memory: MemoryConfig {
            landing_len: 0,
            ..generic(config_b()).memory
        },
        ..generic(config_b())
    };
    assert_eq!(warnings(sender), [""; 0]);
}

/// They have no other path than to land.
#[test]
fn ip_fragments_are_refused_in_generic_mode() {
    let Some(bed) = Bed::new(2) else { return };
    bed.talk(
        &config_a(),
        &generic(config_b()),
        |a| {
            let fragments = ConnectOptions {
                wire: Wire::IpFrag,
                ..up_to(1 << 20)
            };
            let error = a.connect(B, &fragments).unwrap_err();
            let reason = RejectReason::Unsupported;
            assert!(
                matches!(error, ConnectError::Rejected { reason: found, .. } if found == reason),
                "{error:?}"
            );
            let peer = connect(a, 1 << 20);
            send_each(a, peer, &[1 << 20]);
        },
        |b| {
            receive_each(b, &[1 << 20]);
        },
    );
}

#[test]
fn zero_copy_on_veth_is_an_error_that_names_copy_mode() {
    let Some(bed) = Bed::new(2) else { return };
    let config = EndpointConfig {
        link: LinkConfig {
            mode: ModeRequest::ZeroCopy,
            ..config_b().link
        },
        ..config_b()
    };
    let (error, program) = bed.pair.b.run(|| {
        let error = Endpoint::open(&config).unwrap_err().to_string();
        (error, Interface::by_name("vb").unwrap().xdp_program)
    });
    assert!(
        error.contains("zero-copy") && error.contains("copy mode"),
        "{error}"
    );
    assert!(!error.contains('\n'), "{error}");
    assert_eq!(program, None, "nothing stays attached");
}

#[test]
fn one_queue_lands_and_small_traffic_uses_the_kernels_socket() {
    let Some(bed) = Bed::new(1) else { return };
    bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let peer = connect(a, 3 << 20);
            send_each(a, peer, &LENGTHS);
            receive_each(a, &LENGTHS);
            assert!(a.counters().one_copy_packets > 0);
            assert_eq!(a.counters().general_packets, 0);
        },
        |b| {
            let peer = receive_each(b, &LENGTHS);
            b.peer(peer).open_session(&up_to(3 << 20)).unwrap();
            // Both landing sessions are open now.
            assert_eq!(
                (b.counters().sessions_granted, b.counters().sessions_ended),
                (1, 0)
            );
            send_each(b, peer, &LENGTHS);
            assert!(b.counters().one_copy_packets > 0);
            assert_eq!(b.counters().general_packets, 0);
        },
    );
}

#[test]
fn small_and_large_mtus() {
    for mtu in [576_u16, 1400, 3498] {
        let Some(bed) = Bed::new(2) else { return };
        bed.pair.a.ip(&format!("link set va mtu {mtu}"));
        bed.pair.b.ip(&format!("link set vb mtu {mtu}"));
        let (fragment, stride) = (u64::from(mtu) - 52, (u64::from(mtu) - 52) / 8 * 8);
        bed.talk(
            &config_a(),
            &config_b(),
            |a| {
                assert_eq!(
                    a.status().mode(),
                    EffectiveMode::CopyNative,
                    "MTU {mtu}: {:?}",
                    a.status().warnings()
                );
                assert_eq!(a.status().warnings(), [""; 0]);
                let peer = connect(a, 3 << 20);
                assert!(fragment >= stride);
                // The longest with its digest in one packet, and one of a session.
                send_each(a, peer, &[stride - 8, stride + 1, 3 << 20]);
                assert_eq!(
                    a.counters().data_packets_sent,
                    (stride + 1).div_ceil(stride) + (3_u64 << 20).div_ceil(stride)
                );
            },
            |b| {
                receive_each(b, &[stride - 8, stride + 1, 3 << 20]);
            },
        );
    }
}

#[test]
fn a_chosen_mtu_is_kept_and_an_impossible_one_refused() {
    let Some(bed) = Bed::new(2) else { return };
    let at = |mtu, config: EndpointConfig| EndpointConfig {
        link: LinkConfig {
            mtu: Some(mtu),
            ..config.link
        },
        ..config
    };
    // The smaller of both holds.
    bed.talk(
        &at(1500, config_a()),
        &at(1000, config_b()),
        |a| {
            let peer = connect(a, 1 << 20);
            send_each(a, peer, &[944, 945, 1 << 20]);
        },
        |b| {
            receive_each(b, &[944, 945, 1 << 20]);
        },
    );
    let error = bed
        .pair
        .b
        .run(|| Endpoint::open(&at(1501, config_b())).unwrap_err());
    assert!(matches!(error, OpenError::Config(_)));
    assert!(error.to_string().contains("ip link set vb mtu 1501"), "{error}");
    let error = bed
        .pair
        .b
        .run(|| Endpoint::open(&at(500, config_b())).unwrap_err());
    assert!(error.to_string().contains("576"), "{error}");
}

/// Packets longer than a frame take several, in both modes, without a word from anybody but `ip link set mtu`.
#[test]
fn packets_of_several_frames() {
    const LONG: u64 = 3 << 20;
    // With its digest.
    const IN_ONE_FRAME: u64 = 3432;
    for (mtu, mode) in [
        (4000_u16, ModeRequest::Auto),
        (9000, ModeRequest::Auto),
        (9000, ModeRequest::Generic),
        (60_000, ModeRequest::Auto),
        (65_521, ModeRequest::Auto),
    ] {
        let Some(bed) = Bed::new(3) else { return };
        bed.pair.a.ip(&format!("link set va mtu {mtu}"));
        bed.pair.b.ip(&format!("link set vb mtu {mtu}"));
        let payload_len = (u64::from(mtu) - 52) / 8 * 8;
        // Around the ends of frames, of fragments, and of what goes in one frame without a session.
        let mut lens = vec![
            1,
            IN_ONE_FRAME,
            IN_ONE_FRAME + 1,
            payload_len,
            payload_len + 1,
            2 * payload_len + 3774,
            LONG,
        ];
        lens.extend((1..=payload_len / 3840).flat_map(|frames| [frames * 3840 - 66, frames * 3840 - 65]));
        lens.extend([LONG; 8]);
        let with = |config: EndpointConfig| EndpointConfig {
            link: LinkConfig { mode, ..config.link },
            ..config
        };
        bed.talk(
            &with(config_a()),
            &with(config_b()),
            |a| {
                let effective = match mode {
                    ModeRequest::Generic => EffectiveMode::CopyGeneric,
                    _ => EffectiveMode::CopyNative,
                };
                assert_eq!(
                    a.status().mode(),
                    effective,
                    "MTU {mtu}: {:?}",
                    a.status().warnings()
                );
                let peer = connect(a, LONG);
                send_each(a, peer, &lens);
                let fragments: u64 = (lens.iter().filter(|&&len| len > IN_ONE_FRAME))
                    .map(|len| len.div_ceil(payload_len))
                    .sum();
                let sent = a.counters();
                assert_eq!(
                    sent.data_packets_sent - sent.fragments_resent,
                    fragments,
                    "MTU {mtu}"
                );
            },
            |b| {
                receive_each(b, &lens);
                let received = b.counters();
                if received.fragments_displaced + received.one_copy_packets == 0 {
                    assert_eq!(received.user_copied_bytes, 0, "MTU {mtu}");
                }
                assert_eq!(received.violations.total(), 0, "MTU {mtu}: {received:?}");
            },
        );
    }
}

/// One end has short packets: those of both have to be.
#[test]
fn the_smaller_of_both_interfaces_decides() {
    let Some(bed) = Bed::new(2) else { return };
    bed.pair.a.ip("link set va mtu 9000");
    bed.talk(
        &config_a(),
        &config_b(),
        |a| {
            let peer = connect(a, 3 << 20);
            send_each(a, peer, &[1449, 3 << 20]);
            assert_eq!(a.counters().data_packets_sent, 2 + (3_u64 << 20).div_ceil(1448));
        },
        |b| {
            receive_each(b, &[1449, 3 << 20]);
        },
    );
}
