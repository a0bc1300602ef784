//! The gate and its model side by side: the same steps on both, the same results demanded.

use std::os::fd::{AsFd, OwnedFd};

use lm_ebpf::model::ModelGate;
use lm_ebpf::{Gate, GateConfig, Log, Role, Verdict};
use lm_protocol::geometry::Wire;
use lm_protocol::landing::{ROWS, SessionAdmission};

use super::packet::{CONTROL_PORT, DATA_PORT, KEY, LOCAL, MAC, PEER, PEER_PORT};
use super::{bare_xsk, ifindex, ip};

pub(crate) const GENERAL: u32 = 0;
pub(crate) const LANDING: u32 = 1;
pub(crate) const PLAIN: u32 = 2;

const XDP_PASS: u32 = 2;
const XDP_REDIRECT: u32 = 4;

pub(crate) struct Pair {
    pub(crate) gate: Gate,
    pub(crate) model: ModelGate,
    pub(crate) ifindex: u32,
    pub(crate) log: Log,
    pub(crate) model_log: Log,
    general: (Log, Log),
    xsk: OwnedFd,
}

/// The tests' session on the lm wire: P = 1448 and windows of 4 fragments.
pub(crate) fn lm_session() -> SessionAdmission {
    SessionAdmission {
        key: KEY,
        wire: Wire::Lm,
        peer_ip: PEER,
        peer_port: PEER_PORT,
        local_ip: LOCAL,
        header_len: 66,
        payload_len: 1448,
        window_fragments: 4,
        first_message: 10,
        active_until_ns: 0,
    }
}

/// The tests' session on the ipfrag wire: S = 1480, one window for a whole message.
pub(crate) fn ipfrag_session() -> SessionAdmission {
    SessionAdmission {
        wire: Wire::IpFrag,
        header_len: 42,
        payload_len: 1480,
        window_fragments: 64,
        ..lm_session()
    }
}

impl Pair {
    /// A gate on a veth with four queues, and the model: queue 0 general, 1 landing, 2 and 3 without a role; XSKs on 0
    /// and 1.
    pub(crate) fn new(local_ip: Option<std::net::Ipv4Addr>) -> Pair {
        let queues = "numrxqueues 4 numtxqueues 4";
        ip(&format!(
            "link add veth0 address 02:00:00:00:00:02 {queues} type veth peer name veth1 {queues}"
        ));
        ip("link set veth0 up");
        let ifindex = ifindex("veth0");
        let config = GateConfig {
            local_ip,
            data_port: DATA_PORT,
            control_port: CONTROL_PORT,
            ..GateConfig::default()
        };
        let mut gate =
            Gate::attach(ifindex, &config, lm_ebpf::AttachMode::Native).expect("native XDP on veth");
        let mut model = ModelGate::new(local_ip, DATA_PORT, CONTROL_PORT);
        model.set_mac(MAC);
        let xsk = bare_xsk();
        for (queue, role) in [(GENERAL, Role::General), (LANDING, Role::Landing)] {
            gate.set_role(queue, role).expect("role");
            model.set_role(queue, role);
            gate.register_xsk(queue, xsk.as_fd()).expect("XSK in the map");
            model.set_xsk(queue, true);
        }
        let (log, model_log) = (gate.log(LANDING).expect("log"), model.log(LANDING).expect("log"));
        let general = (gate.log(GENERAL).expect("log"), model.log(GENERAL).expect("log"));
        Pair {
            gate,
            model,
            ifindex,
            log,
            model_log,
            general,
            xsk,
        }
    }

    /// Opens a session on the landing queue of both and lets `messages` messages and `frames` more frames land.
    pub(crate) fn open(&mut self, session: &SessionAdmission, messages: u32, frames: u64) {
        self.gate.open_session(LANDING, session).expect("session");
        self.model.open_session(LANDING, session);
        self.limit(
            session,
            session.first_message.wrapping_add(messages).wrapping_sub(1),
        );
        self.post(self.log.producer() + frames);
    }

    /// Closes every session of the landing queue.
    pub(crate) fn close(&mut self) {
        for row in 0..ROWS {
            self.gate.close_session(LANDING, row).expect("close");
            self.model.close_session(LANDING, row);
        }
    }

    pub(crate) fn limit(&mut self, session: &SessionAdmission, message: u32) {
        self.log.set_message_limit(session.row(), message);
        self.model_log.set_message_limit(session.row(), message);
    }

    pub(crate) fn post(&mut self, position: u64) {
        self.log.set_posted(position);
        self.model_log.set_posted(position);
    }

    /// On both queues.
    pub(crate) fn set_capacity(&mut self, capacity: u32) {
        self.log.set_capacity(capacity);
        self.model_log.set_capacity(capacity);
        self.general.0.set_capacity(capacity);
        self.general.1.set_capacity(capacity);
    }

    pub(crate) fn set_slot(&mut self, position: u64, frames: u8, longest: u16) {
        self.log.set_slot(position, frames, longest);
        self.model_log.set_slot(position, frames, longest);
    }

    pub(crate) fn set_xsk(&mut self, queue: u32, registered: bool) {
        if registered {
            self.gate
                .register_xsk(queue, self.xsk.as_fd())
                .expect("XSK in the map");
        } else {
            self.gate.unregister_xsk(queue).expect("XSK out of the map");
        }
        self.model.set_xsk(queue, registered);
    }

    /// Runs both on a frame that arrives on a queue with a role, and demands the same verdict, action, counters and
    /// log.
    pub(crate) fn run(&mut self, queue: u32, frame: &[u8]) -> Verdict {
        let (log, model_log) = match queue {
            LANDING => (&self.log, &self.model_log),
            GENERAL => (&self.general.0, &self.general.1),
            _ => panic!("queue {queue} has no log: use run_anywhere"),
        };
        let (before, passed, position) = (log.counters(), log.passed(), log.producer());
        let action = self.gate.test_run(self.ifindex, queue, frame).expect("test run");
        let counted = log.counters().since(&before);
        let expected = self.model.run(queue, frame);
        let described = || format!("queue {queue}, {} bytes: {frame:02x?}", frame.len());
        assert_eq!(
            counted.total(),
            1,
            "each packet counts once: {counted:?} {}",
            described()
        );
        assert_eq!(
            counted.get(expected),
            1,
            "model: {expected:?}, gate: {counted:?} {}",
            described()
        );
        assert_eq!(
            action,
            if expected.is_redirect() {
                XDP_REDIRECT
            } else {
                XDP_PASS
            },
            "{}",
            described()
        );
        assert_eq!(log.passed() - passed, u64::from(expected.may_reach_data_socket()));
        assert_eq!(log.counters(), model_log.counters());
        assert_eq!(log.passed(), model_log.passed());
        let landed = u64::from(expected == Verdict::RedirectLanding);
        assert_eq!(log.producer(), position + landed, "{}", described());
        assert_eq!(model_log.producer(), position + landed, "{}", described());
        if landed == 1 {
            let (entry, model_entry) = (log.entry(position), model_log.entry(position));
            assert_eq!(
                lm_protocol::landing::LogEntry { cpu: 0, ..entry },
                model_entry,
                "{}",
                described()
            );
        }
        expected
    }

    /// As `run`, for any queue and without the log: by the sums over all queues.
    pub(crate) fn run_anywhere(&mut self, queue: u32, frame: &[u8]) -> Verdict {
        let (before, model_before) = (self.gate.counters(), self.model.counters());
        let action = self.gate.test_run(self.ifindex, queue, frame).expect("test run");
        let expected = self.model.run(queue, frame);
        assert_eq!(
            self.gate.counters().since(&before),
            self.model.counters().since(&model_before)
        );
        assert_eq!(
            action,
            if expected.is_redirect() {
                XDP_REDIRECT
            } else {
                XDP_PASS
            }
        );
        expected
    }
}
