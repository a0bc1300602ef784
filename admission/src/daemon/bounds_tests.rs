//! A daemon in a namespace of its own, flooded between two turns, and what it holds then.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::Duration;

use lm_dataplane::ipc::{Offer, Role};
use lm_protocol::control::Request;
use lm_protocol::session::{Application, Landing as _, Permit};

use super::DATAGRAMS_PER_TURN;
use super::attachment::Attachment;
use super::ground::ROWS;
use super::program::ProgramId;
use crate::config::Config;
use crate::fuzzing::as_root;
use crate::fuzzing::host::{ADDRESS, Host};

#[test]
fn a_queue_has_a_session_a_row_and_a_data_address_has_one() {
    as_root(|| {
        let host = Host::new("rows");
        let mut daemon = host.daemon().unwrap();
        let ground = &mut daemon.attachments[0].as_mut().unwrap().ground;
        ground.take(0, ProgramId(1), 7168);
        let holder = ground.holder(0).unwrap();
        holder.role = Some(Role::Landing);
        holder.offer = Some(Offer {
            queue: 0,
            mtu: 1500,
            chunk_len: 4096,
            max_message_len: 1 << 20,
            window_max: 64,
            allow: Vec::new(),
        });
        let request = Request {
            data_port: 7168,
            ..Request::default()
        };
        let permit = Permit {
            max_message_len: u64::MAX,
            lease: Duration::from_secs(60),
        };
        for number in 0..4 * ROWS as u32 {
            let from = SocketAddrV4::new(
                Ipv4Addr::from_bits(0xc612_0100 + number),
                Config::default().control_port,
            );
            let application = Application::new(from, number, &request);
            let opened = [0; 2].map(|_| ground.open_aside(0, &application, &permit).is_ok());
            assert_eq!(opened, [number < ROWS as u32, false]);
            let most = ROWS.min(number as usize + 1);
            assert_eq!(ground.holder(0).unwrap().sessions.len(), most);
        }
    });
}

#[test]
fn a_turn_takes_a_bounded_number_of_datagrams() {
    as_root(|| {
        let host = Host::new("turn");
        let mut daemon = host.daemon().unwrap();
        let stranger = UdpSocket::bind((ADDRESS, 0)).unwrap();
        for _ in 0..4 * DATAGRAMS_PER_TURN {
            stranger
                .send_to(&[0; 64], (ADDRESS, Config::default().control_port))
                .unwrap();
        }
        for turns in 1..=4 {
            daemon.receive();
            let Attachment {
                node, told, actions, ..
            } = daemon.attachments[0].as_ref().unwrap();
            assert_eq!(node.counters().not_sealed, turns * DATAGRAMS_PER_TURN as u64);
            assert!(actions.is_empty() && told.len() <= DATAGRAMS_PER_TURN);
        }
    });
}
