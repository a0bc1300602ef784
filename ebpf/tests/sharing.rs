//! Several programs behind one gate: ports by queue, whose log says what came elsewhere, new logs for new clients, ends
//! of sessions.

mod bed;

use std::os::fd::AsFd as _;

use bed::packet::{CONTROL_PORT, DATA_PORT, EAGER, LOCAL, MAC, PEER_PORT, Packet};
use bed::pair::{GENERAL, LANDING, PLAIN, Pair, ipfrag_session, lm_session};
use bed::{bare_xsk, ifindex, ip};
use lm_ebpf::Verdict::*;
use lm_ebpf::model::ModelGate;
use lm_ebpf::{AttachMode, Gate, GateConfig, GateError, Role, Verdict};

const OTHER_PORT: u16 = 7300;
/// Queues of the second program.
const OTHERS: u32 = 3;

/// A gate for several programs on a veth with four queues, and its model.
struct Shared {
    gate: Gate,
    model: ModelGate,
    ifindex: u32,
}

impl Shared {
    fn new() -> Shared {
        let queues = "numrxqueues 4 numtxqueues 4";
        ip(&format!(
            "link add veth0 address 02:00:00:00:00:02 {queues} type veth peer name veth1 {queues}"
        ));
        ip("link set veth0 up");
        let config = GateConfig {
            local_ip: Some(LOCAL),
            several_programs: true,
            control_port: CONTROL_PORT,
            ..GateConfig::default()
        };
        let ifindex = ifindex("veth0");
        let gate = Gate::attach(ifindex, &config, AttachMode::Native).expect("native XDP on veth");
        let mut model = ModelGate::for_several(Some(LOCAL), CONTROL_PORT);
        model.set_mac(MAC);
        Shared { gate, model, ifindex }
    }

    fn give(&mut self, queue: u32, role: Role, data_port: u16) {
        let xsk = bare_xsk();
        self.gate.set_role(queue, role).expect("role");
        self.gate.set_data_port(queue, data_port).expect("port");
        self.gate
            .register_xsk(queue, xsk.as_fd())
            .expect("XSK in the map");
        self.model.set_role(queue, role);
        self.model.set_data_port(queue, data_port);
    }

    /// The verdict, and how many packets the log of each queue of `queues` says came elsewhere by now.
    fn run<const N: usize>(&mut self, queue: u32, packet: &Packet, queues: [u32; N]) -> (Verdict, [u64; N]) {
        let before = self.gate.counters();
        let expected = self.model.run(queue, &packet.bytes());
        (self.gate)
            .test_run(self.ifindex, queue, &packet.bytes())
            .expect("test run");
        let counted = self.gate.counters().since(&before);
        assert_eq!(
            (counted.total(), counted.get(expected)),
            (1, 1),
            "{expected:?} {counted:?}"
        );
        let told = queues.map(|queue| {
            let here = self.gate.log(queue).expect("log").passed_elsewhere();
            let model = self.model.log(queue).expect("log").passed_elsewhere();
            assert_eq!(here, model, "queue {queue}");
            here
        });
        (expected, told)
    }
}

fn to(port: u16, packet: Packet) -> Packet {
    Packet {
        destination_port: port,
        ..packet
    }
}

#[test]
fn a_packet_on_anothers_queue_is_told_to_its_owner() {
    bed::in_namespace(|| {
        let mut shared = Shared::new();
        shared.give(GENERAL, Role::General, DATA_PORT);
        shared.give(LANDING, Role::Landing, DATA_PORT);
        shared.give(OTHERS, Role::General, OTHER_PORT);
        let eager = || Packet::lm(EAGER, 64);
        let logs = [GENERAL, LANDING, OTHERS];
        // On its own queues a packet is judged as ever. (No XSK in the model, a bare one in the map: both pass.)
        let ours = shared.run(LANDING, &to(DATA_PORT, eager()), logs);
        assert_eq!(ours, (PassOneCopy, [0, 0, 0]));
        let data = shared.run(LANDING, &to(DATA_PORT, Packet::data(1, 0, 1, 100)), logs);
        assert_eq!(data, (PassNoSession, [0, 0, 0]));
        // Elsewhere the lowest queue's log tells: on another program's queue, on nobody's, on one beyond the maps.
        assert_eq!(
            shared.run(LANDING, &to(OTHER_PORT, eager()), logs),
            (PassElsewhere, [0, 0, 1])
        );
        assert_eq!(
            shared.run(OTHERS, &to(DATA_PORT, eager()), logs),
            (PassElsewhere, [1, 0, 1])
        );
        assert_eq!(
            shared.run(PLAIN, &to(DATA_PORT, eager()), logs),
            (PassElsewhere, [2, 0, 1])
        );
        assert_eq!(
            shared.run(OTHERS, &to(53, eager()), logs),
            (PassForeign, [2, 0, 1])
        );
        assert_eq!(
            shared.run(OTHERS, &to(CONTROL_PORT, eager()), logs),
            (PassControl, [2, 0, 1])
        );
        // The first fragment of a datagram names the port of all.
        let first = to(OTHER_PORT, Packet::ip_fragment(9, 0, true, 1480));
        assert_eq!(shared.run(LANDING, &first, logs), (PassFragment, [2, 0, 2]));
        let second = Packet::ip_fragment(9, 1480, false, 100);
        assert_eq!(shared.run(LANDING, &second, logs), (PassFragment, [2, 0, 2]));
        // The port goes with its program.
        shared.gate.vacate(OTHERS).expect("vacated");
        shared.model.set_data_port(OTHERS, 0);
        let gone = shared.run(LANDING, &to(OTHER_PORT, eager()), [GENERAL]);
        assert_eq!(gone, (PassForeign, [2]));
        shared.gate.set_data_port(GENERAL, 0).expect("port");
        shared.model.set_data_port(GENERAL, 0);
        assert_eq!(
            shared.run(PLAIN, &to(DATA_PORT, eager()), [GENERAL, LANDING]),
            (PassElsewhere, [2, 1])
        );
    });
}

#[test]
fn one_program_has_one_port() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        let error = pair.gate.set_data_port(PLAIN, OTHER_PORT).unwrap_err();
        assert!(matches!(error, GateError::OnePort), "{error}");
        assert_eq!(pair.gate.data_port(PLAIN), DATA_PORT);
        let packet = to(OTHER_PORT, Packet::lm(EAGER, 64));
        assert_eq!(pair.run(GENERAL, &packet.bytes()), PassForeign);
        assert_eq!(pair.log.passed_elsewhere(), 0);
    });
}

#[test]
fn a_session_ends_by_the_clock() {
    bed::in_namespace(|| {
        for session in [lm_session(), ipfrag_session()] {
            let mut pair = Pair::new(Some(LOCAL));
            let ended = lm_protocol::landing::SessionAdmission {
                active_until_ns: 1,
                ..session
            };
            pair.open(&ended, 4, 100);
            pair.model.set_now(2);
            let fragment = |index: u16| match session.wire {
                lm_protocol::geometry::Wire::Lm => Packet::data(10, u32::from(index), 3, 1448).bytes(),
                lm_protocol::geometry::Wire::IpFrag => Packet {
                    source_port: PEER_PORT,
                    ..Packet::ip_fragment(10, index * 1480, true, 1480)
                }
                .bytes(),
            };
            let late = match session.wire {
                lm_protocol::geometry::Wire::Lm => PassNoSession,
                lm_protocol::geometry::Wire::IpFrag => PassFragment,
            };
            assert_eq!(pair.run(LANDING, &fragment(1)), late);
            // Longer, for ever, and over again.
            for (until_ns, index, verdict) in [
                (u64::MAX, 1, RedirectLanding),
                (0, 0, RedirectLanding),
                (1, 0, late),
            ] {
                (pair.gate)
                    .extend_session(LANDING, session.row(), until_ns)
                    .unwrap();
                pair.model.extend_session(LANDING, session.row(), until_ns);
                assert_eq!(pair.run(LANDING, &fragment(index)), verdict, "{until_ns}");
            }
            drop(pair);
            ip("link del veth0");
        }
    });
}

#[test]
fn the_next_program_has_a_log_of_its_own() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        pair.open(&lm_session(), 4, 100);
        assert_eq!(
            pair.run(LANDING, &Packet::data(10, 0, 1, 100).bytes()),
            RedirectLanding
        );
        pair.gate.vacate(LANDING).unwrap();
        assert!(!pair.gate.is_ready(LANDING) && pair.gate.open_sessions().is_empty());
        // The wait is another thread's; meanwhile nobody else can begin one.
        let quiesce = pair.gate.start_quiesce(LANDING).unwrap();
        assert!(matches!(
            pair.gate.start_quiesce(LANDING),
            Err(GateError::Quiescing(LANDING))
        ));
        assert!(matches!(
            pair.gate.set_role(LANDING, Role::Landing),
            Err(GateError::Quiescing(LANDING))
        ));
        let quiet = std::thread::spawn(|| quiesce.wait())
            .join()
            .expect("no panic")
            .unwrap();
        pair.gate.finish_quiesce(quiet).unwrap();
        assert!(pair.gate.is_ready(LANDING) && !pair.gate.is_closing(LANDING, lm_session().row()));
        pair.gate.set_role(LANDING, Role::Landing).unwrap();
        let log = pair.gate.log(LANDING).unwrap();
        assert_eq!((log.producer(), log.posted(), log.counters().total()), (0, 0, 0));
        // Who has the old one lets nothing in with it.
        pair.gate.open_session(LANDING, &lm_session()).unwrap();
        let xsk = bare_xsk();
        pair.gate.register_xsk(LANDING, xsk.as_fd()).unwrap();
        pair.log.set_posted(1 << 40);
        pair.log.set_message_limit(lm_session().row(), 1 << 20);
        let frame = Packet::data(10, 0, 1, 100).bytes();
        pair.gate.test_run(pair.ifindex, LANDING, &frame).unwrap();
        assert_eq!((log.producer(), log.counter(PassLimit)), (0, 1));
    });
}

#[test]
fn places_close_one_by_one() {
    bed::in_namespace(|| {
        let mut pair = Pair::new(Some(LOCAL));
        let at = |place| lm_protocol::landing::SessionAdmission {
            key: lm_protocol::landing::SessionAdmission::key_at(lm_session().key, place),
            ..lm_session()
        };
        (pair.gate.open_session(LANDING, &at(3))).unwrap();
        (pair.gate.open_session(LANDING, &at(4))).unwrap();
        pair.gate.close_session(LANDING, 3).unwrap();
        let quiesce = pair.gate.start_quiesce(LANDING).unwrap();
        // Closed after the wait began: the next one is for it.
        pair.gate.close_session(LANDING, 4).unwrap();
        let quiet = quiesce.wait().unwrap();
        pair.gate.finish_quiesce(quiet).unwrap();
        assert!(!pair.gate.is_closing(LANDING, 3) && pair.gate.is_closing(LANDING, 4));
    });
}
