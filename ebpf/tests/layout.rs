//! The layouts in C (`gate.h`, as the object's BTF tells) and in Rust (`layout.rs`) are the same.

mod bed;

use std::mem::offset_of;

use bed::btf::{Btf, Structure, section};
use lm_ebpf::layout::{self, ChannelRow, Config, CounterRow, LogEntryRow, LogMap, SessionRow};
use lm_ebpf::{Role, Verdict};
use lm_protocol::geometry::Wire;

static OBJECT: &[u8] = include_bytes!("../gate.o");

/// Size, and per field: name, offset, length. The pattern makes the list complete: a new field does not compile without
/// it.
macro_rules! structure {
    ($type:ty { $($field:ident),* $(,)? }) => {{
        type Row = $type;
        fn len_of<F>(_: fn(Row) -> F) -> usize {
            size_of::<F>()
        }
        let _complete = |row: Row| {
            let Row { $($field: _),* } = row;
        };
        Structure {
            size: size_of::<Row>(),
            members: vec![$((stringify!($field).to_owned(), offset_of!(Row, $field), len_of(|row| row.$field))),*],
        }
    }};
}

#[test]
fn structures() {
    let btf = Btf::of(OBJECT);
    assert_eq!(
        btf.structures["lm_config"],
        structure!(Config {
            local_ip,
            control_port,
            reserved,
            flags
        })
    );
    assert_eq!(
        btf.structures["lm_counters"],
        structure!(CounterRow {
            verdicts,
            passed,
            reserved
        })
    );
    assert_eq!(
        btf.structures["lm_channel"],
        structure!(ChannelRow {
            role,
            zero,
            accepted,
            data_port,
            reserved0,
            mac,
            reserved,
            counters
        })
    );
    assert_eq!(
        btf.structures["lm_session"],
        structure!(SessionRow {
            open,
            peer_ip,
            key,
            local_ip,
            peer_port,
            header_len,
            payload_len,
            window_shift,
            wire,
            last_message,
            last_index,
            reserved0,
            active_until_ns,
            reserved1
        })
    );
    assert_eq!(
        btf.structures["lm_log_entry"],
        structure!(LogEntryRow {
            sequence,
            session,
            frames,
            message,
            index,
            frame_len,
            padding_len,
            cpu
        })
    );
    assert_eq!(
        btf.structures["lm_log"],
        structure!(LogMap {
            producer,
            reserved0,
            posted,
            capacity,
            reserved1,
            message_limits,
            counters,
            passed_elsewhere,
            reserved2,
            entries
        })
    );
}

#[test]
fn who_writes_has_a_cache_line_of_its_own() {
    // The gate and user space must not share lines that either writes per packet or per message.
    assert_ne!(offset_of!(LogMap, producer) / 64, offset_of!(LogMap, posted) / 64);
    assert_ne!(
        offset_of!(LogMap, counters) / 64,
        offset_of!(LogMap, message_limits) / 64
    );
    assert_eq!(size_of::<ChannelRow>() % 64, 0);
    assert_eq!(offset_of!(ChannelRow, counters) % 64, 0);
    assert_eq!(size_of::<SessionRow>(), 64);
}

#[test]
fn enumerations() {
    let btf = Btf::of(OBJECT);
    let values = |name: &str| btf.enumerations[name].clone();
    // LM_PASS_NO_SESSION is PassNoSession.
    let camel = |name: &str| -> String {
        let words = name.strip_prefix("LM_").expect("a name of ours").split('_');
        words
            .map(|word| format!("{}{}", &word[..1], word[1..].to_lowercase()))
            .collect()
    };
    let mut expected: Vec<_> = Verdict::ALL
        .iter()
        .map(|verdict| (format!("{verdict:?}"), *verdict as u32))
        .collect();
    expected.push(("Verdicts".to_owned(), Verdict::ALL.len() as u32));
    let verdicts: Vec<_> = values("lm_verdict")
        .iter()
        .map(|(name, value)| (camel(name), *value))
        .collect();
    assert_eq!(verdicts, expected);
    for verdict in Verdict::ALL {
        let name: String = verdict
            .name()
            .split('_')
            .skip(1)
            .map(|word| word[..1].to_uppercase() + &word[1..])
            .collect();
        assert_eq!(name, format!("{verdict:?}"));
    }

    let named = |pairs: &[(&str, u32)]| -> Vec<_> {
        pairs
            .iter()
            .map(|(name, value)| (name.to_string(), *value))
            .collect()
    };
    let roles = [
        Role::None,
        Role::General,
        Role::Landing,
        Role::LandingZeroCopy,
        Role::GeneralZeroCopy,
    ]
    .map(|role| role as u32);
    assert_eq!(
        values("lm_role"),
        named(&[
            ("LM_ROLE_NONE", roles[0]),
            ("LM_ROLE_GENERAL", roles[1]),
            ("LM_ROLE_LANDING", roles[2]),
            ("LM_ROLE_LANDING_ZERO_COPY", roles[3]),
            ("LM_ROLE_GENERAL_ZERO_COPY", roles[4])
        ])
    );
    let wires = [Wire::Lm, Wire::IpFrag].map(|wire| wire as u32);
    assert_eq!(
        values("lm_wire"),
        named(&[("LM_WIRE_LM", wires[0]), ("LM_WIRE_IPFRAG", wires[1])])
    );
    assert_eq!(
        values("lm_flag"),
        named(&[
            ("LM_FLAG_ONE_CPU_PER_QUEUE", layout::FLAG_ONE_CPU_PER_QUEUE),
            ("LM_FLAG_ORDERED_STORES", layout::FLAG_ORDERED_STORES),
            ("LM_FLAG_SEVERAL_PROGRAMS", layout::FLAG_SEVERAL_PROGRAMS),
        ])
    );
    assert_eq!(
        values("lm_limit"),
        named(&[
            ("LM_QUEUES", layout::QUEUES),
            ("LM_STRAY_ROW", layout::STRAY_ROW),
            ("LM_SESSIONS", layout::SESSIONS),
            ("LM_LOG_ENTRIES", layout::LOG_ENTRIES),
            ("LM_VERDICT_ROW", layout::VERDICT_ROW as u32),
            ("LM_SHORT_FRAME", layout::SHORT_FRAME),
        ])
    );
}

#[test]
fn no_path_of_the_building_machine_is_in_the_object() {
    for needle in ["/home", "/work", "/root", "/tmp", "/usr", "clang"] {
        let found = OBJECT
            .windows(needle.len())
            .any(|bytes| bytes == needle.as_bytes());
        assert!(!found, "{needle}");
    }
    assert!(section(OBJECT, ".debug_info").is_none());
    assert!(section(OBJECT, "license").is_some_and(|text| text.starts_with(b"Dual MIT/GPL")));
}
