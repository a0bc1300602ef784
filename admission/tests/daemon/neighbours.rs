//! Other users of the same machine: what they can take from the daemon, or from root through it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use lm_dataplane::ipc::*;
use rustix::fs::{FlockOperation, Mode, OFlags};
use xtask::bed::INTERFACE;

use crate::bed::{Hosts, Side, one_line, wait_until};
use crate::program::{Client, MEMORY_LEN, as_user, memory, udp};
use crate::smoothing::tc;

/// Users who are nobody's friends.
const ONE: u32 = 2001;
const OTHER: u32 = 2002;
/// Whom the daemon becomes.
const NOBODY: u32 = 65534;

/// Locks every file and folder under `path` that this user can open.
fn lock_all(path: &Path, locked: &mut Vec<OwnedFd>) {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
    if let Ok(file) = rustix::fs::open(path, flags, Mode::empty())
        && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
    {
        locked.push(file);
    }
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        lock_all(&entry.path(), locked);
    }
}

#[test]
fn nobody_else_can_take_the_lock() {
    let Some(hosts) = Hosts::new("lock") else { return };
    let host = hosts.host(Side::Left);
    let index = host
        .read_file(&format!("/sys/class/net/{INTERFACE}/ifindex"))
        .unwrap();
    // A name in the network namespace, which everybody can take.
    let name = format!("lm-admissiond/{index}");
    let named = host
        .enter(|| {
            Ok(as_user(ONE, || {
                use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
                let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None).unwrap();
                let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
                rustix::net::bind(&socket, &address).unwrap();
                socket
            }))
        })
        .unwrap();
    hosts.daemon(Side::Left).kill();
    // Whatever the daemon left that they can reach.
    let locked = as_user(ONE, || {
        let mut locked = Vec::new();
        for folder in [
            &hosts.folder,
            Path::new("/sys/fs/bpf/lm"),
            Path::new("/run/lm-admissiond"),
        ] {
            lock_all(folder, &mut locked);
        }
        locked
    });
    assert!(!locked.is_empty(), "not even the test's own folder");
    let daemon = hosts.daemon(Side::Left);
    drop((named, locked));
    daemon.stop();
}

#[test]
fn no_link_in_a_users_folder_is_followed() {
    let Some(hosts) = Hosts::new("links") else { return };
    let victim = hosts.folder.join("victim");
    std::fs::write(&victim, "root's").unwrap();
    std::fs::set_permissions(&victim, PermissionsExt::from_mode(0o600)).unwrap();
    let folder = hosts.folder.join("Left");
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::chown(&folder, Some(NOBODY), Some(NOBODY)).unwrap();
    let mut arguments = hosts.arguments(Side::Left);
    arguments.extend(["--user".to_owned(), NOBODY.to_string()]);
    let is_untouched = || {
        let found = victim.metadata().unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777), (0, 0o600));
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "root's");
    };
    for name in ["state.json", "state.new", "socket.lock"] {
        let link = folder.join(name);
        as_user(NOBODY, || symlink(&victim, &link).unwrap());
        let mut daemon = hosts.tool(Side::Left, &arguments);
        wait_until("it starts, or refuses", || {
            hosts.socket(Side::Left).exists() || daemon.has_ended().unwrap()
        });
        is_untouched();
        let told = one_line(daemon);
        assert!(
            told.contains(link.to_str().unwrap()) && told.contains("link"),
            "{told}"
        );
        std::fs::remove_file(&link).unwrap();
    }
    // Nor is a folder made behind one.
    let target = hosts.folder.join("target");
    std::fs::create_dir(&target).unwrap();
    as_user(NOBODY, || symlink(&target, folder.join("link")).unwrap());
    let further: Vec<String> = (arguments.iter())
        .map(|argument| argument.replace("/Left", "/Left/link/made"))
        .collect();
    hosts.refused(Side::Left, &further, "link");
    assert_eq!(std::fs::read_dir(&target).unwrap().count(), 0);
    // Without them it serves.
    std::fs::remove_dir_all(&folder).unwrap();
    let daemon = hosts.daemon_with(Side::Left, &["--user", &NOBODY.to_string()]);
    assert_eq!(folder.metadata().unwrap().uid(), NOBODY);
    daemon.stop();
    is_untouched();
}

#[test]
fn a_user_leaves_something_to_others() {
    let Some(hosts) = Hosts::with_queues("share", 4) else {
        return;
    };
    let [one, other] = [ONE, OTHER].map(|uid| uid.to_string());
    let users = ["--allow-uid", &one, "--allow-uid", &other];
    let daemon = hosts.daemon_with(
        Side::Left,
        &[&users[..], &["--programs-max", "6", "--memory-per-user", "2M"]].concat(),
    );
    let (path, host) = (hosts.socket(Side::Left), hosts.host(Side::Left));
    // Queues: half of them, whatever for and by however many programs.
    let mut first = Client::connect_as(&path, ONE).hello().join(host, 7168, true);
    assert_eq!(
        (first.joined().general_queue, first.landing_queue()),
        (Some(0), 3)
    );
    let mut second = Client::connect_as(&path, ONE).hello();
    let socket = udp(host, 7200);
    let told = second.refused(Client::join_call(false), &[socket.as_fd()]);
    assert!(told.contains("user 2001") && told.contains("--queues-per-user"));
    let memory_of = memory(4 * MEMORY_LEN);
    let call = Client::channel_call(1, Role::Transmit, MEMORY_LEN);
    first.refused_for(call, &[memory_of.as_fd()], "--queues-per-user");
    // Memory: of all its programs together.
    first.open(3, Role::Landing);
    let call = Client::channel_call(0, Role::General, 2 * MEMORY_LEN);
    let told = first.refused(call, &[memory_of.as_fd()]);
    assert!(told.contains("user 2001") && told.contains("--memory-per-user"));
    first.open(0, Role::General);
    // Connections.
    let mut crowd: Vec<Client> = Vec::new();
    wait_until("it is turned away", || {
        let mut client = Client::connect_as(&path, ONE);
        let is_in = client.is_let_in();
        crowd.push(client);
        !is_in
    });
    assert!(crowd.len() <= 3, "{} connections more", crowd.len());
    // All of that is another user's still.
    let mut neighbour = Client::connect_as(&path, OTHER).hello().join(host, 7300, true);
    assert_eq!(
        (neighbour.joined().general_queue, neighbour.landing_queue()),
        (Some(1), 2)
    );
    neighbour.open(2, Role::Landing);
    neighbour.open(1, Role::General);
    // What it keeps open counts, though it is gone from the daemon.
    let kept = std::mem::take(&mut first.channels);
    drop((first, second, crowd));
    drop(neighbour);
    wait_until("its queues are free", || daemon.is_free());
    for _ in 0..3 {
        let mut again = Client::connect_as(&path, ONE).hello();
        let why = "user 2001 has 2 of the 4 queues";
        again.refused_for(Client::join_call(true), &[socket.as_fd()], why);
    }
    // And disturbs nobody.
    let mut neighbour = Client::connect_as(&path, OTHER).hello().join(host, 7300, true);
    neighbour.open(neighbour.landing_queue(), Role::Landing);
    neighbour.open(neighbour.joined().general_queue.unwrap(), Role::General);
    // What ends is free again.
    drop(kept);
    wait_until("it may have queues again", || {
        let mut again = Client::connect_as(&path, ONE).hello();
        let (reply, _) = again.call_beside(Client::join_call(true), &[socket.as_fd()]);
        matches!(reply, Reply::Joined(_))
    });
    daemon.stop();
}

/// All lines that programs make: strangers that ask or come too often, and those that join, leave, or whose smoother cannot
/// hold the kernel's traffic.
#[test]
fn programs_that_come_and_go_do_not_fill_the_log() {
    let Some(hosts) = Hosts::new("comings") else {
        return;
    };
    let (path, host) = (hosts.socket(Side::Left), hosts.host(Side::Left));
    tc(host, &format!("qdisc add dev {INTERFACE} root bfifo"));
    let daemon = hosts.daemon_with(Side::Left, &["--link-rate", "100M"]);
    const CALLS: u64 = 500;
    let mut stranger = Client::connect_as(&path, ONE).hello();
    for _ in 0..CALLS {
        stranger.refused_for(Call::Status, &[], "user 2001");
    }
    drop(
        (0..200)
            .map(|_| Client::connect_as(&path, ONE))
            .collect::<Vec<_>>(),
    );
    assert_eq!(daemon.status().refusals, CALLS);
    for round in 0..100 {
        let mut program = Client::sender(&path, host, 7200 + round);
        assert_eq!(program.call(Client::smooth_call(INTERFACE)), Reply::Smoother);
        program.hang_up();
    }
    let said = daemon.stop().stderr;
    for kind in ["2001", "joined", "a program ends", "and not the kernel's"] {
        let lines = said.lines().filter(|line| line.contains(kind)).count();
        assert!((1..40).contains(&lines), "{lines} lines: {kind}");
    }
}

/// A bpffs of the test's own.
pub(crate) struct Bpffs(PathBuf);

impl Bpffs {
    pub(crate) fn new(hosts: &Hosts, user: u32) -> Bpffs {
        let path = hosts.folder.join("bpf");
        std::fs::create_dir(&path).unwrap();
        let options = format!("mode=0700,uid={user},gid={user}");
        let mounted = Command::new("mount")
            .args(["-t", "bpf", "-o", &options, "bpf"])
            .arg(&path)
            .status();
        assert!(mounted.unwrap().success());
        Bpffs(path)
    }

    pub(crate) fn name(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn pins_of_a_mount_namespace_of_its_own() {
    let Some(hosts) = Hosts::new("mounts") else { return };
    let host = hosts.host(Side::Left);
    let program = env!("CARGO_BIN_EXE_lm-admissiond");
    let exec = ["ip", "netns", "exec", host.name(), program];
    let folder = PathBuf::from("/sys/fs/bpf");
    // Its pins go with it, and it says so; what it mounts is closed to others, and not to the user that it becomes.
    let daemon = hosts.daemon_by(&exec, Side::Left, &["--user", &NOBODY.to_string()]);
    let mounted = PathBuf::from(format!("/proc/{}/root/sys/fs/bpf", daemon.id()));
    assert_eq!(mounted.metadata().unwrap().mode() & 0o777, 0o700);
    assert_ne!(
        mounted.metadata().unwrap().dev(),
        folder.metadata().unwrap().dev()
    );
    Client::receiver(&hosts.socket(Side::Left), host, 7168);
    let said = daemon.kill().stderr;
    let told: Vec<&str> = said.lines().filter(|line| line.contains("--bpffs")).collect();
    assert_eq!(told.len(), 1, "{said}");
    wait_until("the gate goes with its daemon", || {
        !host.has_xdp_program().unwrap()
    });
    std::fs::remove_dir_all(hosts.folder.join("Left")).unwrap();

    // In another one they stay, and nothing needs to be told.
    let bpffs = Bpffs::new(&hosts, 0);
    let place = ["--bpffs", bpffs.name()];
    let said = hosts.daemon_by(&exec, Side::Left, &place).kill().stderr;
    // Where the test is in a mount namespace of its own, so is that.
    let is_told = !std::fs::read_to_string("/proc/1/mountinfo")
        .unwrap()
        .contains(bpffs.name());
    assert_eq!(said.contains("--bpffs"), is_told, "{said}");
    assert!(host.has_xdp_program().unwrap());
    let said = hosts.daemon_by(&exec, Side::Left, &place).stop().stderr;
    assert!(said.contains("taken_over=true"), "{said}");
    assert!(!host.has_xdp_program().unwrap());
    let elsewhere = ["--bpffs", "/tmp"].map(str::to_owned);
    let arguments = [&hosts.arguments(Side::Left)[..], &elsewhere].concat();
    hosts.refused(Side::Left, &arguments, "mount -t bpf");
}

/// The capabilities that a manual names, up to a word.
fn named(manual: &str, from: &str, to: &str) -> Vec<String> {
    let (_, rest) = manual.split_once(from).expect("the manual names them");
    let (named, _) = rest.split_once(to).expect("and ends");
    let words = named.split(|letter: char| letter != '_' && !letter.is_ascii_uppercase());
    let words = words.filter(|word| word.starts_with("CAP_"));
    words
        .map(|word| word.trim_start_matches("CAP_").to_lowercase())
        .collect()
}

/// Starts what follows as nobody, with these capabilities and a new user's limits.
fn with_only(capabilities: &[String]) -> Vec<String> {
    let all: Vec<String> = capabilities.iter().map(|name| format!("+{name}")).collect();
    let sets = format!("-all,{}", all.join(","));
    let mut words = vec![
        "prlimit".to_owned(),
        "--memlock=8388608".to_owned(),
        "setpriv".to_owned(),
    ];
    let user = NOBODY.to_string();
    for (name, value) in [
        ("--reuid", &user),
        ("--regid", &user),
        ("--inh-caps", &sets),
        ("--ambient-caps", &sets),
        ("--bounding-set", &sets),
    ] {
        words.extend([name.to_owned(), value.clone()]);
    }
    words.push("--clear-groups".to_owned());
    words
}

#[test]
fn the_daemon_runs_with_what_its_manual_names() {
    let Some(hosts) = Hosts::new("named") else { return };
    let manual = hosts.tool(Side::Left, ["--help"]).finish().unwrap().stdout;
    let names = named(&manual, "Needs ", "which it keeps");
    assert!(!names.is_empty());
    // Its key, its folders and a bpffs are its own.
    let bpffs = Bpffs::new(&hosts, NOBODY);
    let folder = hosts.folder.join("Left");
    std::fs::create_dir(&folder).unwrap();
    for path in [&folder, &hosts.key()] {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let inside = format!("--net=/run/netns/{}", hosts.host(Side::Left).name());
    let start = |names: &[String]| {
        let mut words = vec!["nsenter".to_owned(), inside.clone()];
        words.extend(with_only(names));
        words.push(hosts.program_for_all());
        words
    };
    let daemon = hosts.daemon_by(&start(&names), Side::Left, &["--bpffs", bpffs.name()]);
    Client::receiver(&hosts.socket(Side::Left), hosts.host(Side::Left), 7168);
    daemon.stop();
    // And none of them is too much.
    for left_out in 0..names.len() {
        let mut fewer = names.clone();
        let name = fewer.remove(left_out);
        let told = hosts.refused_by(&start(&fewer), Side::Left, &["--bpffs", bpffs.name()]);
        assert!(
            told.to_lowercase().contains(&format!("cap_{name}")),
            "without {name}: {told}"
        );
    }
}
