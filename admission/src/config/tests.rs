use super::*;
use clap::Parser;
use proptest::prelude::*;
use std::path::PathBuf;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    config: Config,
}

fn words(line: &str) -> impl Iterator<Item = &str> + Clone {
    std::iter::once("x").chain(line.split_whitespace())
}

/// What a command line says beside a file.
fn over(file: Config, line: &str) -> Result<Config, ConfigError> {
    file.but(&said::<Line>(words(line)))
}

fn from_line(line: &str) -> Result<Config, ConfigError> {
    let alone = Line::try_parse_from(words(line)).unwrap_or_else(|error| panic!("{error}"));
    let config = over(Config::default(), line)?;
    assert_eq!(config, alone.config);
    Ok(config)
}

const BOTH: &str = "
interface = [\"lm0\", \"lm1\"]
socket = \"/run/x/socket\"
key-file = \"/etc/key\"
allow-uid = [1000]
allow-gid = [100, 101]
control-port = 7000
policy = \"exclusive\"
voter = [\"10.0.0.1\", \"10.0.0.2:7001\", \"10.0.0.3\"]
peer = [\"10.1.0.1\"]
mode = \"generic\"
link-rate = \"2.5G\"
law = \"paper\"
tolerance = 0.01
replace-qdisc = true
spin = true
user = \"lm\"
metrics = \"127.0.0.1:9100\"
state-dir = \"/run/x\"
bpffs = \"/run/bpf\"
log = \"debug\"
programs-max = 7
memory-max = \"1G\"
queues-per-user = 3
memory-per-user = \"2G\"
programs-per-user = 4
";

#[test]
fn file_and_command_line_have_the_same_words() {
    let line = from_line(
        "--interface lm0 --interface lm1 --socket /run/x/socket --key-file /etc/key --allow-uid 1000 --allow-gid 100 \
         --allow-gid 101 --control-port 7000 --policy exclusive --voter 10.0.0.1 --voter 10.0.0.2:7001 --voter \
         10.0.0.3 \
         --peer 10.1.0.1 --mode generic --link-rate 2.5G --law paper --tolerance 0.01 --replace-qdisc --spin --user \
         lm --metrics 127.0.0.1:9100 --state-dir /run/x --bpffs /run/bpf --log debug \
         --programs-max 7 --memory-max 1G --queues-per-user 3 --memory-per-user 2G --programs-per-user 4",
    );
    let config: Config = toml::from_str(BOTH).unwrap();
    assert_eq!(line.as_ref(), Ok(&config));
    let voters = config.voters().unwrap();
    assert_eq!(voters[0], "10.0.0.1:7000".parse().unwrap());
    assert_eq!(voters[1], "10.0.0.2:7001".parse().unwrap());
    assert_eq!(config.memory_max, Bytes(1 << 30));
    assert_eq!(config.link_rate.map(|rate| rate.0.get()), Some(2_500_000_000));
    assert_eq!((config.law, config.tolerance), (LawName::Paper, 0.01));
    assert!(config.allows(1000, 5) && config.allows(5, 101) && !config.allows(5, 5));
}

#[test]
fn the_command_line_goes_before_the_file() {
    let file = || toml::from_str::<Config>(BOTH).unwrap();
    let both = over(file(), "--interface other --control-port 9 --memory-max 1M").unwrap();
    let expected = Config {
        interface: vec!["other".to_owned()],
        control_port: 9,
        memory_max: Bytes(1 << 20),
        ..file()
    };
    assert_eq!(both, expected);
    assert_eq!(
        over(file(), ""),
        Ok(file()),
        "what is not said is the file's, flags too"
    );
}

#[test]
fn nobody_is_allowed_by_default() {
    let config = from_line("--interface lm0").unwrap();
    assert!(!config.allows(0, 0) && !config.allows(1000, 1000));
    assert_eq!(config.control_port, 7169);
}

#[test]
fn a_user_shares_with_whoever_else_may_come() {
    let config = |line: &str| from_line(&format!("-i a --programs-max 100 {line}")).unwrap();
    let alone = config("--allow-uid 5 --allow-uid 5");
    assert_eq!((alone.queues_per_user(8), alone.programs_per_user()), (8, 100));
    assert_eq!(alone.memory_per_user_bytes(8 << 30), 4 << 30);
    for line in ["--allow-uid 5 --allow-uid 6", "--allow-gid 5"] {
        let several = config(line);
        assert_eq!((several.queues_per_user(8), several.programs_per_user()), (4, 50));
        assert_eq!(several.queues_per_user(2), 2);
        assert_eq!(several.memory_per_user_bytes(8 << 30), 2 << 30);
    }
    let said = config("--allow-gid 5 --queues-per-user 1 --memory-per-user 1M --programs-per-user 9");
    assert_eq!((said.queues_per_user(8), said.programs_per_user()), (1, 9));
    assert_eq!(said.memory_per_user_bytes(8 << 30), 1 << 20);
}

#[test]
fn what_makes_no_sense_is_named() {
    for (line, key) in [
        ("", "interface"),
        ("-i a -i a", "interface"),
        ("-i 0123456789abcdef", "interface"),
        ("-i a --control-port 0", "control-port"),
        ("-i a --voter 10.0.0.1", "voter"),
        ("-i a --policy exclusive", "voter"),
        (
            "-i a --policy exclusive --voter 10.0.0.1 --voter 10.0.0.2",
            "voter",
        ),
        (
            "-i a --policy exclusive --voter 10.0.0.1 --voter 10.0.0.1 --voter 10.0.0.2",
            "voter",
        ),
        ("-i a --socket relative", "socket"),
        ("-i a --state-dir relative", "state-dir"),
        ("-i a --bpffs relative", "bpffs"),
        ("-i a --programs-max 0", "programs-max"),
        ("-i a --queues-per-user 0", "queues-per-user"),
        ("-i a --programs-per-user 0", "programs-per-user"),
        ("-i a --tolerance 1.5", "tolerance"),
        ("-i a --tolerance nan", "tolerance"),
        ("-i a --tolerance=-0.1", "tolerance"),
        ("-i a --log lm=nonsense", "log"),
    ] {
        let error = from_line(line).unwrap_err();
        assert_eq!(error.key, key, "{line}: {error}");
        assert!(!error.to_string().contains('\n'));
    }
}

#[test]
fn a_rate_is_bits_a_second() {
    let read = |text: &str| parsed::<BitRate>(text).map(|rate| rate.0.get());
    for (text, rate) in [
        ("100M", 100_000_000),
        ("10k", 10_000),
        ("0.5G", 500_000_000),
        ("7", 7),
    ] {
        assert_eq!(read(text), Ok(rate));
    }
    for text in [
        "",
        "fast",
        "M",
        "0",
        "0.1",
        "-1M",
        "1e9",
        "100 M",
        "100m",
        "1.2.3G",
        "99999999G",
    ] {
        let told = read(text).unwrap_err();
        assert!(
            told.contains("write 100M or 2.5G") && !told.contains('\n'),
            "{told}"
        );
    }
}

#[test]
fn a_bad_line_of_a_file_is_named() {
    let path = PathBuf::from("/etc/config.toml");
    for (text, line) in [
        ("interface = [\"a\"]\nunknown = 1\n", 2),
        ("\n\ncontrol-port = \"x\"\n", 3),
        ("\nvoter = [\n  \"10.0.0.1\",\n  \"ten\"]\n", 2),
        ("spin = maybe\n", 1),
        ("memory-max = \"-1G\"\n", 1),
    ] {
        let error = parse(&path, text).unwrap_err();
        let place = format!("{}:{line}: ", path.display());
        assert!(error.starts_with(&place), "{text:?}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    assert_eq!(line_of("a = 1\n  voter=[]\n", "voter"), Some(2));
    assert_eq!(line_of("voters = 1\n", "voter"), None);
}

proptest! {
    #[test]
    fn text_never_panics(text in ".{0,30}") {
        let _ = parsed::<HostName>(&text);
        let _ = parsed::<Bytes>(&text);
        let _ = toml::from_str::<Config>(&text);
    }
}
