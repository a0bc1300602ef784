//! `--wire ipfrag`: LM on one side only. Its packets are plain IP fragments in reverse order, which any host puts
//! together again; the receiver here is an ordinary UDP socket, with no LM near it.

use std::net::{SocketAddrV4, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Arguments, Content, TRANSFER_LIMIT, result, send_options};
use crate::bed::{Bed, BedConfig, INTERFACE, Launch};
use crate::machine::two_cores;
use crate::workspace::Programs;

const PORT: u16 = 7168;
/// How long the receiver waits for the next datagram before it takes the last one to have been the last.
const IDLE_LIMIT: Duration = Duration::from_secs(2);
/// How long it waits for the first.
const FIRST_LIMIT: Duration = Duration::from_secs(20);

pub(super) fn run(arguments: &Arguments, programs: &Programs) -> Result<Value> {
    let content = Content::make(arguments)?;
    let [sending, _] = two_cores();
    let bed = Bed::new(&BedConfig::default())?;
    let address = SocketAddrV4::new(bed.right().address(), PORT);
    let (to, received, len) = (
        address.to_string(),
        content.folder.join("received"),
        content.len as usize,
    );
    let socket = bed
        .right()
        .enter(|| bind(address, len).with_context(|| format!("cannot bind {address}")))?;
    let sender = Launch::new(programs.path("lm-send"))
        .args([
            "--interface",
            INTERFACE,
            "--wire",
            "ipfrag",
            "--json",
            "--to",
            &to,
        ])
        .args(send_options(arguments))
        .arg(&content.path)
        .core(sending)
        .time_limit(TRANSFER_LIMIT);
    println!("receiver   an ordinary UDP socket bound to {to}: recv() and nothing else");
    println!("sender     {}", sender.command_line());
    let receiver = std::thread::spawn(move || receive(&socket, len));
    let sent = bed
        .left()
        .spawn(sender)?
        .finish()?
        .json()
        .context("lm-send --json")?;
    ensure!(
        !bed.right().has_xdp_program()?,
        "an XDP program is attached where only a UDP socket should be"
    );
    let (bytes, datagrams) = receiver
        .join()
        .expect("it gives errors back")
        .context("cannot receive")?;
    ensure!(
        bytes.len() == len,
        "{} of {len} bytes arrived: UDP has no flow control, and the receiving socket overflowed; try a smaller --size",
        bytes.len()
    );
    std::fs::write(&received, &bytes).with_context(|| format!("cannot write {}", received.display()))?;
    let sha256 = content.compare(&received)?;
    println!("transfer   {datagrams} datagrams, sent by LM as IP fragments, put together by the kernel");
    println!("checked    SHA-256 of what the UDP socket received is that of what LM sent");
    let transfer =
        json!({"send": sent, "receive": {"bytes": len, "datagrams": datagrams}, "sha256_received": sha256});
    Ok(result(
        "LM to an ordinary UDP socket",
        &content,
        transfer,
        Vec::new(),
    ))
}

/// A socket with room for everything that may come while nothing is taken: its sender does not wait.
fn bind(address: SocketAddrV4, len: usize) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    // The kernel counts its own structures too, about as much again; where it refuses, the default has to do.
    let room = len.saturating_mul(2).clamp(1 << 20, 512 << 20);
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, room);
    Ok(socket)
}

/// Receives datagrams until all bytes have come or none comes any more; the bytes, and the number of datagrams.
fn receive(socket: &UdpSocket, len: usize) -> std::io::Result<(Vec<u8>, u64)> {
    let (mut bytes, mut datagrams) = (Vec::with_capacity(len), 0);
    let mut datagram = vec![0; 1 << 16];
    while bytes.len() < len {
        socket.set_read_timeout(Some(if datagrams == 0 { FIRST_LIMIT } else { IDLE_LIMIT }))?;
        match socket.recv(&mut datagram) {
            Ok(len) => {
                bytes.extend_from_slice(&datagram[..len]);
                datagrams += 1;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok((bytes, datagrams))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn the_ordinary_udp_receiver_keeps_what_arrives() {
        let content: Vec<u8> = (0..300_000_u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 9) as u8)
            .collect();
        for sent_len in [content.len(), content.len() - 1] {
            let receiver = bind(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0), content.len()).unwrap();
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            for datagram in content[..sent_len].chunks(65_507) {
                sender.send_to(datagram, receiver.local_addr().unwrap()).unwrap();
            }
            // One byte too few, and the receiver ends by its idle limit.
            let (bytes, datagrams) = receive(&receiver, content.len()).unwrap();
            assert!(bytes == content[..sent_len], "{} bytes", bytes.len());
            assert_eq!(datagrams, sent_len.div_ceil(65_507) as u64);
        }
    }
}
