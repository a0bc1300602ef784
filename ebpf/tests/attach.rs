//! Attaching and detaching on real interfaces.

mod bed;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};

use bed::pair::lm_session;
use lm_ebpf::{AttachError, AttachMode, EffectiveMode, Gate, GateConfig, GateError, Role};

#[test]
fn native_attaches_and_detaches() {
    bed::in_namespace(|| {
        let (ifindex, _) = bed::veth_pair();
        let gate = Gate::attach(ifindex, &GateConfig::default(), AttachMode::Auto).unwrap();
        assert_eq!(gate.mode(), EffectiveMode::Native);
        assert!(gate.warnings().is_empty());
        assert_eq!(gate.interface(), "veth0");
        drop(gate);
        bed::attach_once_free(ifindex, &GateConfig::default(), AttachMode::Native);
    });
}

#[test]
fn what_cannot_be_attached_to() {
    bed::in_namespace(|| {
        let error = Gate::attach(999, &GateConfig::default(), AttachMode::Auto).unwrap_err();
        assert!(matches!(error, AttachError::NoInterface(999)), "{error}");
        // The loopback device's driver runs no XDP programs.
        let error = Gate::attach(1, &GateConfig::default(), AttachMode::Native).unwrap_err();
        assert!(matches!(error, AttachError::NoNative { .. }), "{error}");
        assert!(error.to_string().starts_with("lo does not"), "{error}");
    });
}

#[test]
fn a_foreign_program_is_named() {
    bed::in_namespace(|| {
        let (ifindex, _) = bed::veth_pair();
        for (flags, mode) in [(1 << 1, "generic"), (1 << 2, "native")] {
            let foreign = bed::foreign::Program::attach(ifindex, "somebody_else", flags);
            for asked in [AttachMode::Auto, AttachMode::Native, AttachMode::Generic] {
                let error = Gate::attach(ifindex, &GateConfig::default(), asked).unwrap_err();
                match &error {
                    AttachError::Occupied { interface, id, name } => {
                        assert_eq!(
                            (interface.as_str(), name.as_str(), *id),
                            ("veth0", "somebody_else", foreign.id())
                        );
                    }
                    other => panic!("{mode}: {other}"),
                }
                assert!(
                    error
                        .to_string()
                        .contains(&format!("\"somebody_else\" (id {})", foreign.id())),
                    "{error}"
                );
            }
        }
        let gate = Gate::attach(ifindex, &GateConfig::default(), AttachMode::Auto).unwrap();
        let error = Gate::attach(ifindex, &GateConfig::default(), AttachMode::Auto).unwrap_err();
        assert!(
            matches!(&error, AttachError::Occupied { name, .. } if name == "lm_gate"),
            "{error}"
        );
        drop(gate);
    });
}

#[test]
fn generic_where_the_driver_refuses() {
    bed::in_namespace(|| {
        // Its peer has more transmit queues than it has receive queues (`veth_xdp_set`).
        let queues = |count| format!("numrxqueues {count} numtxqueues {count}");
        bed::ip(&format!(
            "link add veth0 {} type veth peer name veth1 {}",
            queues(2),
            queues(3)
        ));
        let ifindex = bed::ifindex("veth0");
        let error = Gate::attach(ifindex, &GateConfig::default(), AttachMode::Native).unwrap_err();
        assert!(matches!(error, AttachError::NoNative { .. }), "{error}");
        let gate = Gate::attach(ifindex, &GateConfig::default(), AttachMode::Auto).unwrap();
        assert_eq!(gate.mode(), EffectiveMode::Generic);
        assert_eq!(gate.warnings().len(), 1);
        assert!(
            gate.warnings()[0].contains("generic mode, where large messages are copied"),
            "{:?}",
            gate.warnings()
        );
    });
}

#[test]
fn generic_on_demand_and_nothing_lands_there() {
    bed::in_namespace(|| {
        let (ifindex, _) = bed::veth_pair();
        let mut gate = Gate::attach(ifindex, &GateConfig::default(), AttachMode::Generic).unwrap();
        assert_eq!(gate.mode(), EffectiveMode::Generic);
        assert!(gate.warnings().is_empty());
        gate.set_role(1, Role::Landing).unwrap();
        let error = gate.open_session(1, &lm_session()).unwrap_err();
        assert!(matches!(error, GateError::Generic), "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
        assert!(gate.open_sessions().is_empty());
    });
}

const CHILD: &str = "LM_TEST_ATTACHED_CHILD";

/// Run by the test below in a process of its own: attaches, says so, and waits to be killed.
#[test]
fn child_that_is_killed() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let mut gate = Gate::attach(bed::ifindex("veth0"), &GateConfig::default(), AttachMode::Auto).unwrap();
    gate.set_role(1, Role::Landing).unwrap();
    let _log = gate.log(1).unwrap();
    eprintln!("attached");
    // Until it is killed; if the test ends without that, so does this.
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn a_killed_process_leaves_nothing() {
    bed::in_namespace(|| {
        let (ifindex, _) = bed::veth_pair();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_is_killed", "--nocapture"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stderr.take().unwrap())
            .lines()
            .map_while(Result::ok);
        let attached = said.into_iter().any(|line| line == "attached");
        let occupied = Gate::attach(ifindex, &GateConfig::default(), AttachMode::Auto);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(attached);
        assert!(matches!(occupied, Err(AttachError::Occupied { .. })));
        // The dead process' descriptors are closed by the time it is waited for, or very soon after.
        bed::attach_once_free(ifindex, &GateConfig::default(), AttachMode::Auto);
    });
}
