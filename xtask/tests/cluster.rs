//! A cluster with daemons: programs without privileges send to each other, a host that speaks the daemons' protocol is
//! granted sessions, and what must not be believed is not.

use std::path::Path;

use serde_json::Value;
use xtask::bed::daemons::{self, Daemons, NOBODY};
use xtask::bed::{Host, INTERFACE, Launch, Program};
use xtask::workspace::Programs;

/// Says why a test cannot run here, and whether it may be skipped: never where `CI=true`.
fn skipped(why: &str) {
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{why}, and CI=true allows no skipped test"
    );
    println!("SKIPPED: {why}");
}

struct Ground(daemons::Ground);

impl Ground {
    /// Hosts with daemons, of the programs that `cargo xtask test` builds before the tests.
    fn new(purpose: &str, hosts: u32) -> Option<Ground> {
        if !rustix::process::geteuid().is_root() {
            skipped("not root; network namespaces need it");
            return None;
        }
        let built = Path::new(env!("CARGO_BIN_EXE_xtask")).parent().unwrap();
        if !["lm-admissiond", "lm-bench", "lm-check", "lm-recv", "lm-send"]
            .iter()
            .all(|tool| built.join(tool).exists())
        {
            skipped("the tools are not built; cargo build -p lm-bench -p lm-admission --bins");
            return None;
        }
        let programs = Programs::in_folder(built);
        let ground = daemons::Ground::new(&programs, &format!("test-{purpose}"), hosts);
        Some(Ground(ground.unwrap()))
    }

    fn hosts(&self) -> &[Host] {
        self.0.bed.hosts()
    }

    fn daemons(&self) -> &Daemons {
        &self.0.daemons
    }

    fn spawn(&self, host: &Host, tool: &str, line: &str) -> Program {
        let launch = Launch::new(self.daemons().tool(tool)).args(line.split_whitespace());
        host.spawn(launch.user(NOBODY)).unwrap()
    }

    fn socket(&self, host: &Host) -> String {
        self.daemons().socket(host).display().to_string()
    }

    fn interface(&self, host: &Host) -> Value {
        self.daemons().status(host).unwrap()["interfaces"][0].clone()
    }
}

#[test]
fn every_host_sends_to_every_other_one_without_privileges() {
    let Some(ground) = Ground::new("exchange", 3) else {
        return;
    };
    let hosts = ground.hosts();
    let start = |host: &Host| {
        let others = hosts
            .iter()
            .map(Host::address)
            .filter(|&other| other != host.address());
        let others: Vec<String> = others.map(|other| other.to_string()).collect();
        let line = format!(
            "messages --interface {INTERFACE} --idle default --port 7168 --to {} --lens 64K --messages 100000 \
             --in-flight 2 --seconds 0.5 --admission {}",
            others.join(","),
            ground.socket(host)
        );
        ground.spawn(host, "lm-check", &line)
    };
    let mut programs: Vec<Program> = hosts.iter().map(start).collect();
    for program in &mut programs {
        program.await_text("done").unwrap();
    }
    for program in programs {
        let report = program.stop().unwrap().json().unwrap();
        assert_eq!(report["faults"], serde_json::json!([]), "{report}");
        assert!(
            report["counters"]["landing_packets"].as_u64().unwrap() > 0,
            "{report}"
        );
        for (way, letter) in [("to", 'd'), ("from", 'w')] {
            let of_peers = report[way].as_array().unwrap();
            assert_eq!(of_peers.len(), 2, "{report}");
            assert!(
                (of_peers.iter()).all(|peer| peer["fates"].as_str().unwrap().contains(letter)),
                "{report}"
            );
        }
    }
}

#[test]
fn a_program_asks_by_its_own_daemon() {
    let Some(ground) = Ground::new("asking", 2) else {
        return;
    };
    let [asking, asked] = [&ground.hosts()[0], &ground.hosts()[1]];
    let by_daemon = |host: &Host| format!("--admission {}", ground.socket(host));
    let receive = format!(
        "--interface {INTERFACE} --from-anyone --output /tmp {}",
        by_daemon(asked)
    );
    let mut receiver = ground.spawn(asked, "lm-recv", &receive);
    receiver.await_text("listening on").unwrap();
    let send = format!(
        "--json --to {} {} /etc/hostname",
        asked.address(),
        by_daemon(asking)
    );
    let sent = ground
        .spawn(asking, "lm-send", &send)
        .finish()
        .unwrap()
        .json()
        .unwrap();
    assert_eq!(
        (&sent["failed_transfers"], &sent["messages_one_copy"]),
        (&0.into(), &0.into()),
        "{sent}"
    );
    assert_eq!(
        ground.interface(asked)["sessions"].as_array().map(Vec::len),
        Some(0)
    );
    receiver.stop().unwrap();
}
