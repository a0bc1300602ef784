//! What the gate needs from the kernel, and what it says when it does not get it. One test: capabilities are dropped
//! per thread, and the loader asks the kernel for its features once per process.

mod bed;

use std::io;

use lm_ebpf::{AttachError, AttachMode, Gate, GateConfig, Role};

const CAP_NET_ADMIN: u32 = 12;
const CAP_BPF: u32 = 39;

/// Leaves this thread these capabilities and no others.
fn keep(capabilities: &[u32]) {
    let header: [u32; 2] = [0x2008_0522, 0]; // _LINUX_CAPABILITY_VERSION_3, this thread
    let bits = capabilities
        .iter()
        .fold(0u64, |bits, capability| bits | 1 << capability);
    let (low, high) = (bits as u32, (bits >> 32) as u32);
    // Effective, permitted, inheritable: low words, then high words.
    let data: [u32; 6] = [low, low, 0, high, high, 0];
    // SAFETY: header and data are initialised and of the version's size.
    let done = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) };
    assert_eq!(done, 0, "capset: {}", io::Error::last_os_error());
}

/// Runs `test` on a thread that shares this one's namespace, with these capabilities alone.
fn with(capabilities: &[u32], test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            keep(capabilities);
            test();
        });
    });
}

#[test]
fn two_capabilities_suffice() {
    bed::in_namespace(|| {
        let (ifindex, _) = bed::veth_pair();
        let attach = || Gate::attach(ifindex, &GateConfig::default(), AttachMode::Auto);
        // No CAP_PERFMON: the verifier then forbids arithmetic between packet pointers, which the gate does without.
        with(&[CAP_BPF, CAP_NET_ADMIN], || {
            let mut gate = attach().unwrap();
            gate.set_role(1, Role::Landing).unwrap();
            gate.close_session(1, 0).unwrap();
            gate.quiesce(1).unwrap();
            gate.log(1).unwrap();
        });
        for too_few in [&[][..], &[CAP_BPF], &[CAP_NET_ADMIN]] {
            with(too_few, || {
                let error = attach().unwrap_err();
                assert!(
                    matches!(error, AttachError::NotPrivileged { .. }),
                    "{too_few:?}: {error:?}"
                );
                assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
                assert!(!error.to_string().contains('\n'), "{error}");
            });
        }
    });
}
