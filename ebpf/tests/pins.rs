//! Pinned gates: what the next process takes over, and what it does not.

mod bed;

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use bed::packet::{CONTROL_PORT, DATA_PORT, LOCAL, Packet};
use bed::pair::lm_session;
use bed::{bare_xsk, ifindex, ip};
use lm_ebpf::{AttachMode, EffectiveMode, Gate, GateConfig, Log, Role, Verdict};
use lm_protocol::landing::SessionAdmission;

const GENERAL: u32 = 0;
const LANDING: u32 = 1;

/// A bpffs of the test's own, which goes with it.
struct BpfFs(PathBuf);

impl BpfFs {
    fn mount(name: &str) -> BpfFs {
        let at = std::env::temp_dir().join(format!("lm-pins-{name}-{}", std::process::id()));
        std::fs::create_dir(&at).unwrap();
        let done = (Command::new("mount").args(["-t", "bpf", "bpf"]).arg(&at))
            .status()
            .unwrap();
        assert!(done.success(), "mount -t bpf");
        BpfFs(at)
    }

    /// Where a daemon would pin: folders that are not there yet.
    fn folder(&self) -> PathBuf {
        self.0.join("lm").join("4026531840-2")
    }
}

impl Drop for BpfFs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

fn config() -> GateConfig {
    GateConfig {
        local_ip: Some(LOCAL),
        several_programs: true,
        control_port: CONTROL_PORT,
        ..GateConfig::default()
    }
}

fn veth() -> u32 {
    let queues = "numrxqueues 4 numtxqueues 4";
    ip(&format!(
        "link add veth0 address 02:00:00:00:00:02 {queues} type veth peer name veth1 {queues}"
    ));
    ip("link set veth0 up");
    ifindex("veth0")
}

fn attach(ifindex: u32) -> Gate {
    bed::attach_once_free(ifindex, &config(), AttachMode::Native)
}

fn reopen(ifindex: u32, dir: &Path) -> Option<Gate> {
    Gate::reopen(ifindex, &config(), dir).unwrap()
}

fn at(place: u32) -> SessionAdmission {
    SessionAdmission {
        key: SessionAdmission::key_at(lm_session().key, place),
        ..lm_session()
    }
}

/// Lets everything land in the session at `place`, and says what became of a packet.
fn lands(gate: &Gate, ifindex: u32, log: &mut Log, place: u32, message: u32) -> Verdict {
    log.set_posted(log.producer() + 100);
    log.set_message_limit(place, message);
    let packet = Packet {
        key: at(place).key,
        ..Packet::data(message, 0, 1, 100)
    };
    let before = log.counters();
    gate.test_run(ifindex, LANDING, &packet.bytes()).unwrap();
    let counted = log.counters().since(&before);
    let found = counted.iter().find(|(_, count)| *count == 1);
    found.expect("each packet counts once").0
}

#[test]
fn a_reopened_gate_is_the_same_gate() {
    bed::in_namespace(|| {
        let fs = BpfFs::mount("same");
        let dir = fs.folder();
        let ifindex = veth();
        let mut gate = attach(ifindex);
        gate.set_role(GENERAL, Role::General).unwrap();
        gate.set_data_port(GENERAL, DATA_PORT).unwrap();
        gate.pin(&dir).unwrap();
        // After the pins as well as before.
        gate.set_role(LANDING, Role::Landing).unwrap();
        gate.set_data_port(LANDING, DATA_PORT).unwrap();
        let xsk = bare_xsk();
        gate.register_xsk(LANDING, xsk.as_fd()).unwrap();
        gate.open_session(LANDING, &at(3)).unwrap();
        gate.open_session(LANDING, &at(5)).unwrap();
        gate.close_session(LANDING, 5).unwrap();
        let mut log = gate.log(LANDING).unwrap();
        assert_eq!(lands(&gate, ifindex, &mut log, 3, 10), Verdict::RedirectLanding);
        drop(gate);
        // Nobody else gets the interface meanwhile.
        assert!(Gate::attach(ifindex, &config(), AttachMode::Native).is_err());

        let mut gate = reopen(ifindex, &dir).expect("the pinned gate");
        assert_eq!(
            (gate.mode(), gate.interface(), gate.data_port(LANDING)),
            (EffectiveMode::Native, "veth0", DATA_PORT)
        );
        let open: Vec<_> = gate
            .open_sessions()
            .iter()
            .map(|open| (open.queue, open.row, open.key))
            .collect();
        assert_eq!(open, [(LANDING, 3, at(3).key)]);
        // The client's mapping, from before, is the gate's log; its session goes on, and its socket is in the map.
        assert_eq!(lands(&gate, ifindex, &mut log, 3, 11), Verdict::RedirectLanding);
        assert_eq!(gate.log(LANDING).unwrap().producer(), 2);
        // A CPU may be inside with what was closed last.
        assert!(gate.is_closing(LANDING, 5) && !gate.is_closing(LANDING, 3));
        gate.open_session(LANDING, &at(5)).unwrap();
        assert_eq!(lands(&gate, ifindex, &mut log, 5, 10), Verdict::RedirectLanding);
        // A queue that changes hands, and is taken over once more.
        gate.vacate(LANDING).unwrap();
        gate.set_role(LANDING, Role::Landing).unwrap();
        gate.set_data_port(LANDING, DATA_PORT).unwrap();
        drop(gate);
        let mut gate = reopen(ifindex, &dir).expect("the pinned gate");
        let mut log = gate.log(LANDING).unwrap();
        assert_eq!((log.producer(), gate.open_sessions()), (0, vec![]));
        gate.open_session(LANDING, &at(3)).unwrap();
        gate.register_xsk(LANDING, xsk.as_fd()).unwrap();
        assert_eq!(lands(&gate, ifindex, &mut log, 3, 10), Verdict::RedirectLanding);
        assert_eq!(gate.log(GENERAL).unwrap().producer(), 0);

        gate.unpin().unwrap();
        assert!(!dir.exists());
        drop(gate);
        drop(attach(ifindex));
    });
}

#[test]
fn a_queue_that_was_left_is_not_ready() {
    bed::in_namespace(|| {
        let fs = BpfFs::mount("left");
        let dir = fs.folder();
        let ifindex = veth();
        let mut gate = attach(ifindex);
        gate.pin(&dir).unwrap();
        for queue in [GENERAL, LANDING, 2] {
            gate.set_role(queue, Role::Landing).unwrap();
        }
        gate.vacate(LANDING).unwrap();
        // The process dies while it makes a new log.
        gate.vacate(2).unwrap();
        let quiesce = gate.start_quiesce(2).unwrap();
        drop(gate);
        let _quiet = quiesce.wait().unwrap();
        let gate = reopen(ifindex, &dir).expect("the pinned gate");
        assert!(gate.is_ready(GENERAL) && !gate.is_ready(LANDING) && !gate.is_ready(2));
        drop(gate);
        lm_ebpf::remove_pins(&dir).unwrap();
    });
}

#[test]
fn what_is_of_no_use_is_removed() {
    bed::in_namespace(|| {
        let fs = BpfFs::mount("useless");
        let dir = fs.folder();
        let ifindex = veth();
        assert!(reopen(ifindex, &dir).is_none());
        // Loaded for another address.
        let mut gate = attach(ifindex);
        gate.pin(&dir).unwrap();
        drop(gate);
        let other = GateConfig {
            local_ip: None,
            ..config()
        };
        assert!(Gate::reopen(ifindex, &other, &dir).unwrap().is_none());
        assert!(!dir.exists());
        // Pins without a link: who made them did not finish.
        let mut gate = attach(ifindex);
        gate.pin(&dir).unwrap();
        let link = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap());
        let link = link
            .into_iter()
            .find(|entry| entry.file_name().to_string_lossy().starts_with("link-"));
        std::fs::remove_file(link.expect("a link").path()).unwrap();
        drop(gate);
        assert!(reopen(ifindex, &dir).is_none() && !dir.exists());
        // The interface went; one of the same name and number may come.
        let mut gate = attach(ifindex);
        gate.pin(&dir).unwrap();
        drop(gate);
        ip("link del veth0");
        let error = Gate::reopen(ifindex, &config(), &dir).unwrap_err();
        assert!(error.to_string().contains("no interface"), "{error}");
        assert!(!dir.exists());
        let ifindex = veth();
        let mut gate = attach(ifindex);
        gate.pin(&dir).unwrap();
        drop(gate);
        ip("link del veth0");
        ip(&format!(
            "link add veth0 index {ifindex} numrxqueues 4 numtxqueues 4 type veth peer name veth1"
        ));
        assert!(reopen(ifindex, &dir).is_none() && !dir.exists());
        drop(attach(ifindex));
    });
}
