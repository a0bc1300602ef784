use clap::Parser as _;

use super::protocol::Ended;
use super::*;

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    arguments: Arguments,
}

fn parse(words: &[&str]) -> Result<Arguments, clap::Error> {
    let words = ["vm"].iter().chain(words);
    Line::try_parse_from(words).map(|line| line.arguments)
}

fn ended(name: &str, passed: bool) -> Ended {
    Ended {
        name: name.to_owned(),
        passed,
        seconds: 1.25,
        report: serde_json::Value::Null,
        output: "first\nlast\n".to_owned(),
    }
}

#[test]
fn the_command_line_says_what_runs() {
    let two = [Device::Igb, Device::VirtioNet];
    let tasks = |words: &[&str]| parse(words).unwrap().tasks(&two).unwrap().0;
    let transfers = tasks(&["transfer"]);
    let needed = |words: &[&str]| parse(words).unwrap().tasks(&Device::ALL).unwrap().1;
    assert_eq!(
        needed(&["igb/boot", "veth/transfer"]),
        [Device::Igb, Device::Veth]
    );
    assert_eq!(needed(&["--run", "true"]), Device::ALL);
    assert_eq!(transfers.len(), 2);
    let transfer = || "igb/transfer".to_owned();
    assert_eq!(
        (&transfers[0].name, &transfers[0].work),
        (&transfer(), &Work::Check(transfer(), None))
    );
    let machines = checks::select(&["transfer".to_owned()], &two, |_| false).unwrap();
    assert!(listing(&machines).starts_with("igb/transfer         a file"));

    let commands = tasks(&["--run", "ls /", "--run", "true"]);
    assert_eq!(commands.len(), 2);
    assert_eq!(commands[0].work, Work::Command("ls /".to_owned()));
    let [short, all, both] = [&["--short"][..], &["--all"], &["--short", "--spoiled"]].map(tasks);
    let has = |tasks: &[Task], name: &str| tasks.iter().any(|task| task.name == name);
    assert!(has(&short, "igb/foreign") && !has(&short, "igb/abort") && !has(&short, "igb/boot"));
    assert!(has(&all, "igb/foreign") && has(&all, "igb/abort") && !has(&all, "igb/waits"));
    let spoiled = tasks(&["--spoiled"]);
    assert_eq!(both, [short, spoiled.clone()].concat());
    assert!(spoiled.len() == 4 && has(&spoiled, "igb/waits with a fault"));
    for wrong in [
        &["--devices", "e1000"][..],
        &["--all", "boot"],
        &["--spoiled", "--all"],
        &["--run", "ls", "boot"],
    ] {
        assert!(parse(wrong).is_err(), "{wrong:?}");
    }
    let error = run(&parse(&["--with", "/nowhere/test"]).unwrap(), &two)
        .unwrap_err()
        .to_string();
    assert_eq!(error, "/nowhere/test is no file");
}

#[test]
fn what_failed_is_told_with_its_words() {
    let mut report = Report {
        ended: vec![ended("boot", true), ended("igb/transfer", false)],
        ..Report::default()
    };
    let text = shown(&report, false);
    assert!(text.contains("igb/transfer      1.2  FAILED"), "{text}");
    assert!(
        text.ends_with("\nigb/transfer FAILED:\n  first\n  last\n"),
        "{text}"
    );
    assert_eq!(shown(&report, true), "first\nlast\nfirst\nlast\n");
    let error = verdict(&report).unwrap_err();
    assert_eq!(
        error.to_string(),
        "1 of 2 failed: igb/transfer; what they said is above"
    );
    report.ended[1].passed = true;
    verdict(&report).unwrap();
    report.died = Some("the guest died in boot: Kernel panic".to_owned());
    let error = verdict(&report).unwrap_err().to_string();
    assert!(
        error.starts_with("the guest died in boot: Kernel panic"),
        "{error}"
    );
}

#[test]
fn what_the_machine_lacks_is_a_failure_in_ci_and_what_fails_is_one_everywhere() {
    let lacking =
        Err(anyhow::Error::from(Unavailable("`apt-get` is missing".to_owned())).context("no machine"));
    let error = unless_lacking(lacking, true).unwrap_err().to_string();
    assert!(
        error.contains("were skipped") && error.contains("`apt-get` is missing"),
        "{error}"
    );
    for is_ci in [false, true] {
        assert!(unless_lacking(Err(anyhow::anyhow!("a row is worse")), is_ci).is_err());
        unless_lacking(Ok(()), is_ci).unwrap();
    }
}
