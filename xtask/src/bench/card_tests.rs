use super::*;

fn parsed(line: &str) -> Result<Arguments, clap::Error> {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }
    let words = std::iter::once("card").chain(line.split_whitespace());
    <Line as clap::Parser>::try_parse_from(words).map(|line| line.arguments)
}

#[test]
fn why_two_runs_differ_is_told() {
    let machine = |qemu: &str, files: &str| Machine {
        device: Device::Igb,
        qemu: qemu.to_owned(),
        guest: "7.3".to_owned(),
        kernel_sha256: "k".to_owned(),
        initramfs_sha256: files.to_owned(),
    };
    let other_machine = baseline::other_machine;
    let first = [machine("10", "a")];
    assert!(other_machine(&first, &first).contains("something else than instructions"));
    let other = other_machine(&[machine("11", "b")], &first);
    assert!(
        other.contains("QEMU") && other.contains("files") && !other.contains("kernel"),
        "{other}"
    );
    assert!(other_machine(&[], &first).contains("another machine"));
}

#[test]
fn each_card_has_what_it_can() {
    let rows = rows(&parsed("--shared -- --tasks stream --sizes 64K").unwrap());
    assert!(rows.iter().all(|row| row.options == "--tasks stream --sizes 64K"));
    let of = |device, taps| {
        let is_it = move |row: &&Row| (row.device, row.taps) == (device, taps);
        rows.iter()
            .filter(is_it)
            .map(|row| &*row.systems)
            .collect::<Vec<_>>()
    };
    for (device, taps, modes) in [
        (Device::Igb, false, [true, true]),
        (Device::VirtioNet, true, [true, false]),
        (Device::VirtioNet, false, [false, true]),
        (Device::Veth, false, [false, true]),
    ] {
        let [lm, bare] = of(device, taps)[..] else {
            panic!("{device:?}")
        };
        for (mode, has) in ["zero-copy", "copy"].into_iter().zip(modes) {
            for system in ["lm", "lm --idle default"] {
                assert_eq!(lm.contains(&format!("{system} --mode {mode}")), has, "{lm}");
            }
            assert_eq!(
                bare.contains(&format!("bare --queue 0 --mode {mode}")),
                has,
                "{bare}"
            );
        }
        assert_eq!(lm.contains("--integrity none --mode copy"), modes[1]);
        assert!(lm.ends_with(KERNELS) && bare.starts_with("bare"));
    }
    assert!(rows.iter().all(|row| row.shared == (row.device == Device::Igb)));
    let names: std::collections::BTreeSet<String> = rows.iter().chain(&short_rows()).map(Row::name).collect();
    assert_eq!(
        names.len(),
        rows.len() + short_rows().len(),
        "a row is known by its name"
    );
    assert!(parsed("--short -- --sizes 64").is_err(), "the list is as it is");
}

#[test]
fn what_failed_is_told() {
    let ended = |passed, report| Ended {
        name: String::new(),
        passed,
        seconds: 1.0,
        report,
        output: "first\nlast words\n".to_owned(),
    };
    assert_eq!(
        said(&ended(true, json!({"said": "a table\n", "error": null}))),
        "a table\n"
    );
    let nothing = json!({"said": "", "error": "nothing was measured"});
    assert_eq!(said(&ended(true, nothing)), "failed: nothing was measured\n");
    assert_eq!(said(&ended(false, Value::Null)), "failed: last words\n");
}
