//! What a daemon says before it serves, and how it ends.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;

use crate::bed::{Hosts, Side, wait_until};
use crate::program::Client;

fn replace(arguments: &mut [String], name: &str, value: &str) {
    let at = arguments.iter().position(|argument| argument == name).unwrap();
    arguments[at + 1] = value.to_owned();
}

#[test]
fn bad_starts_are_told_in_a_line() {
    let Some(hosts) = Hosts::new("starts") else { return };
    let side = Side::Left;
    let with = |name: &str, value: &str| {
        let mut arguments = hosts.arguments(side);
        replace(&mut arguments, name, value);
        arguments
    };
    let plus = |further: &[&str]| {
        let mut arguments = hosts.arguments(side);
        arguments.extend(further.iter().map(|&argument| argument.to_owned()));
        arguments
    };
    let key = hosts.folder.join("other");
    let path = key.to_str().unwrap();
    let refuses_key = |why| hosts.refused(side, &with("--key-file", path), why);
    refuses_key("keygen");
    std::fs::write(&key, "0011").unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o644)).unwrap();
    refuses_key("chmod 600");
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    refuses_key("too short");
    // Whose it is counts, too.
    std::os::unix::fs::chown(&key, Some(1234), None).unwrap();
    refuses_key("user 1234");
    refuses_key("chown");

    hosts.refused(side, &with("--interface", "lm7"), "lm7");
    hosts.refused(side, &plus(&["--peer", "192.0.2.7"]), "not on the subnet");
    let voter = plus(&["--policy", "exclusive", "--voter", "192.0.2.7"]);
    hosts.refused(side, &voter, "voter: 192.0.2.7 is not on the subnet");
    hosts.refused(side, &plus(&["--user", "no-such-user"]), "no user");

    // The control port is somebody else's.
    let taken = crate::program::udp(hosts.host(side), 7169);
    hosts.refused(side, &hosts.arguments(side), "is taken");
    drop(taken);

    // A file says file and line.
    let file = hosts.folder.join("toml");
    let path = file.to_str().unwrap();
    let by_file = ["--config", path, "--check"].map(str::to_owned);
    std::fs::write(&file, "interface = [\"lm0\"]\nspin = 3\n").unwrap();
    hosts.refused(side, &by_file[..2], &format!("{path}:2: "));
    std::fs::write(&file, "interface = [\"lm0\"]\n\nvoter = [\"198.18.0.2\"]\n").unwrap();
    hosts.refused(side, &by_file, &format!("{path}:3: voter: "));

    // Nothing of that has attached anything.
    assert!(hosts.pins(side).is_empty());
    let checked = hosts.tool(side, plus(&["--check"])).finish().unwrap();
    assert!(checked.stdout.contains("right"), "{}", checked.stdout);
    assert!(!hosts.host(side).has_xdp_program().unwrap());
}

#[test]
fn one_daemon_for_an_interface_and_a_socket() {
    let Some(hosts) = Hosts::new("second") else { return };
    let daemon = hosts.daemon(Side::Left);
    hosts.refused(
        Side::Left,
        &hosts.arguments(Side::Left),
        "another daemon listens on",
    );
    let mut elsewhere = hosts.arguments(Side::Left);
    let other = hosts.folder.join("other");
    replace(&mut elsewhere, "--socket", other.join("socket").to_str().unwrap());
    replace(&mut elsewhere, "--state-dir", other.to_str().unwrap());
    hosts.refused(Side::Left, &elsewhere, "another daemon serves lm0");
    // The first one has noticed nothing.
    assert_eq!(daemon.interface().queues.len(), 2);
    assert_eq!(hosts.pins(Side::Left).len(), 1);
    daemon.stop();
    assert!(hosts.pins(Side::Left).is_empty());
    assert!(!hosts.host(Side::Left).has_xdp_program().unwrap());
    assert!(!hosts.socket(Side::Left).exists());
}

#[test]
fn four_capabilities_and_another_user() {
    let Some(hosts) = Hosts::new("caps") else { return };
    // The user of that number is nobody; it cannot read the key any more, and need not.
    let folder = hosts.socket(Side::Left);
    let folder = folder.parent().unwrap();
    std::fs::create_dir_all(folder).unwrap();
    let mut arguments = hosts.arguments(Side::Left);
    arguments.extend(["--user", "65534"].map(str::to_owned));
    hosts.refused(Side::Left, &arguments, "chown 65534");
    std::fs::remove_dir(folder).unwrap();
    let daemon = hosts.daemon_with(Side::Left, &["--user", "65534"]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
    let value = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    // CAP_NET_ADMIN 12, CAP_NET_RAW 13, CAP_IPC_LOCK 14, CAP_BPF 39.
    let kept = format!("{:016x}", 1u64 << 12 | 1 << 13 | 1 << 14 | 1 << 39);
    assert_eq!((value("CapEff:"), value("CapPrm:")), (kept.clone(), kept));
    let none = "0".repeat(16);
    for set in ["CapInh:", "CapBnd:", "CapAmb:"] {
        assert_eq!(value(set), none, "{set}");
    }
    assert_eq!(value("Uid:"), "65534");
    assert_eq!(value("NoNewPrivs:"), "1");
    // It is enough: a program gets what it wants.
    Client::receiver(&hosts.socket(Side::Left), hosts.host(Side::Left), 7168);
    wait_until("the program's queue is free again", || daemon.is_free());
    daemon.stop();
    assert!(hosts.pins(Side::Left).is_empty());
}

#[test]
fn a_reload_changes_who_may_come() {
    let Some(hosts) = Hosts::new("reload") else { return };
    let write = |uids: &str| hosts.configure(Side::Left, &format!("allow-uid = [{uids}]"));
    let file = write("");
    let mut program = hosts.configured(Side::Left, &file);
    let udp = crate::program::udp(hosts.host(Side::Left), 7168);
    let join = || Client::connect(&hosts.socket(Side::Left)).hello();
    let beside = [std::os::fd::AsFd::as_fd(&udp)];
    join().refused_for(Client::join_call(true), &beside, "--allow-uid 0");

    write("0");
    program.signal(Signal::HUP);
    program.await_text("read again").unwrap();
    let mut client = join();
    let (reply, _) = client.call_beside(Client::join_call(true), &beside);
    assert!(matches!(reply, lm_dataplane::ipc::Reply::Joined(_)), "{reply:?}");

    // What is wrong changes nothing.
    std::fs::write(&file, "nonsense").unwrap();
    program.signal(Signal::HUP);
    program.await_text("nothing has changed").unwrap();
    client.done(lm_dataplane::ipc::Call::Touched { sessions: Vec::new() });

    // Off the list, and out.
    write("1");
    program.signal(Signal::HUP);
    assert!(client.receive().is_none());
    program.stop().unwrap();
}

/// Root's files, closed to all others, and a daemon that has become another user.
#[test]
fn a_reload_reads_what_only_root_may() {
    let Some(hosts) = Hosts::new("rekey") else { return };
    let file = hosts.folder.join("toml");
    let write = |path: &std::path::Path, text: &str| {
        // As root's tools do: a new file in its place.
        let new = path.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::set_permissions(&new, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::rename(&new, path).unwrap();
    };
    let text = |uid: u32| format!("allow-uid = [0, {uid}]\n");
    write(&file, &text(1));
    let user = ["--user", "65534", "--config", file.to_str().unwrap()];
    // What the command line says goes before the file.
    let mut arguments = hosts.arguments(Side::Left);
    arguments.truncate(arguments.len() - 2);
    arguments.extend(user.map(str::to_owned));
    let mut left = hosts.tool(Side::Left, &arguments);
    left.await_text("serving").unwrap();
    let other = hosts.folder.join("other");
    let made = hosts.tool(Side::Left, ["keygen".as_ref(), other.as_os_str()]);
    assert!(made.finish().unwrap().status.success());
    write(&hosts.key(), &std::fs::read_to_string(&other).unwrap());
    write(&file, &text(2));
    left.signal(Signal::HUP);
    left.await_text("read again").unwrap();
    wait_until("the socket is there", || hosts.socket(Side::Left).exists());
    // Both hold: who may come, and the key, which is that of a daemon that started later.
    let right = hosts.daemon(Side::Right);
    let _receiver = Client::receiver(&hosts.socket(Side::Right), hosts.host(Side::Right), 7168);
    let mut sender =
        Client::connect_as(&hosts.socket(Side::Left), 2)
            .hello()
            .join(hosts.host(Side::Left), 9000, false);
    let to = std::net::SocketAddrV4::new(hosts.host(Side::Right).address(), 7168);
    let ticket = sender.ask(to, 1 << 20);
    sender.granted(ticket);
    // What is wrong is told as ever.
    write(&hosts.key(), "0011");
    left.signal(Signal::HUP);
    left.await_text("too short").unwrap();
    right.stop();
    left.stop().unwrap();
}

#[test]
fn metrics_and_tables() {
    let Some(hosts) = Hosts::new("metrics") else {
        return;
    };
    let address = "127.0.0.1:9169";
    let daemon = hosts.daemon_with(Side::Left, &["--metrics", address]);
    let _program = Client::receiver(&hosts.socket(Side::Left), hosts.host(Side::Left), 7168);
    let get = |path: &str| {
        let asked = hosts.host(Side::Left).enter(|| {
            let mut stream = std::net::TcpStream::connect(address)?;
            write!(
                stream,
                "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        });
        asked.unwrap()
    };
    let metrics = get("/metrics");
    assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
    for line in [
        "lm_admissiond_interface_up{interface=\"lm0\"} 1",
        "lm_admissiond_programs 1",
        "lm_admissiond_queues_free{interface=\"lm0\"} 0",
        "lm_admissiond_memory_bytes 1048576",
        "lm_admissiond_datagrams_total{interface=\"lm0\",outcome=\"unauthenticated\"} 0",
        "# EOF",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    assert!(get("/").starts_with("HTTP/1.1 404"));

    // Connections that say nothing, half of a question, or ask and do not read: metrics are there all the same, and cost one thread.
    let count = |what| {
        std::fs::read_dir(format!("/proc/{}/{what}", daemon.id()))
            .unwrap()
            .count()
    };
    let (threads, files) = (count("task"), count("fd"));
    let silent: Vec<_> = (0..120)
        .map(|number| {
            let words = ["", "GET /metr", "GET /metrics HTTP/1.1\r\n\r\n"][number % 3];
            let connect = || Ok(std::net::TcpStream::connect(address)?);
            let mut stream = hosts.host(Side::Left).enter(connect).unwrap();
            // One that gave way to another may be closed already.
            let _ = stream.write_all(words.as_bytes());
            stream
        })
        .collect();
    assert!(get("/metrics").starts_with("HTTP/1.1 200"));
    assert_eq!(count("task"), threads);
    assert!(count("fd") <= files + 32, "of {} connections", silent.len());

    let socket = hosts.socket(Side::Left);
    let arguments = ["status".as_ref(), "--socket".as_ref(), socket.as_os_str()];
    let shown = hosts.tool(Side::Left, arguments).finish().unwrap().stdout;
    for part in [
        "policy concurrent",
        "lm0: 198.18.0.1:7169, gate native",
        "landing",
        "1024 KiB",
        "connected",
    ] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
    daemon.stop();
    let asked = hosts.tool(Side::Left, arguments).outcome().unwrap();
    assert!(!asked.status.success());
    assert!(asked.stderr.contains("no daemon listens on"), "{}", asked.stderr);
}
