//! The sender of a landing stream: packets as LM's data plane sends them, as fast as the receiver posts frames.

use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use lm_protocol::wire::ethernet::MacAddr;
use lm_protocol::wire::{Addressing, DataTemplate};

use super::{Cursor, FIRST_MESSAGE, HEADER_LEN, KEY, PAYLOAD_LEN, StreamArgs, write_content};
use crate::bare::socket::{CHUNK_LEN, CHUNKS_EACH_WAY, Moved, Socket};
use crate::bare::stream::{SendReport, Slots, teach_queue};
use crate::bare::{ToArgs, ifindex};
use crate::suite::Meter;

/// Arguments of `land-send`.
#[derive(Debug, Clone, Args)]
pub struct LandSendArgs {
    /// What both sides must be told alike
    #[command(flatten)]
    pub stream: StreamArgs,
    /// Receiver
    #[command(flatten)]
    pub to: ToArgs,
    /// Seconds to send
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Packets that may be on their way to their completion
    #[arg(long, default_value_t = 192)]
    pub in_flight: u32,
}

/// Runs `land-send`.
///
/// # Errors
///
/// Anything the kernel says when the socket is made, and sending errors other than a full device.
pub fn land_send(args: &LandSendArgs) -> io::Result<SendReport> {
    let port = &args.stream.port;
    let shape = args.stream.shape()?;
    let pace = args.stream.pace()?;
    let mut socket = Socket::open(
        ifindex(&port.interface)?,
        port.queue,
        port.posted,
        CHUNK_LEN,
        Moved::ByKernel,
    )?;
    if let Some(budget) = port.tx_budget {
        socket.set_tx_budget(budget)?;
    }
    let mut free = Slots::new(&socket, 1);
    let addressing = Addressing {
        src_mac: MacAddr(args.to.from_mac.0),
        dst_mac: MacAddr(args.to.to_mac.0),
        vlan: None,
        src_ip: args.to.from,
        dst_ip: args.to.to,
        src_port: port.port,
        dst_port: port.port,
    };
    let mut template = DataTemplate::new(&addressing, KEY, FIRST_MESSAGE, shape.count, PAYLOAD_LEN);
    let mut packet = [0x5a; HEADER_LEN as usize + PAYLOAD_LEN as usize];
    for &chunk in &free.chunks {
        socket.copy_in(chunk, &packet);
    }
    teach_queue(&mut socket, &args.to, port.port, &mut free)?;

    let limit = args.in_flight.min(CHUNKS_EACH_WAY - 1);
    let mut next = Cursor::START;
    let (mut sent, mut wake_ups, mut unfinished) = (0_u64, 0, 0);
    let mut meter = Meter::new(false)?;
    meter.begin();
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds);
    while Instant::now() < end {
        unfinished -= free.reap(&mut socket);
        let credit = u32::try_from(pace.count().saturating_sub(sent)).unwrap_or(u32::MAX);
        let count = (port.batch)
            .min(limit - unfinished)
            .min(socket.tx.room())
            .min(credit);
        // Whole batches while there is traffic, as in the plain stream.
        if count < port.batch && unfinished > limit / 2 {
            std::hint::spin_loop();
        } else {
            for n in 0..count {
                let chunk = free.take();
                let index = next.index(&shape);
                let payload_len = shape.payload_len(index);
                if next.position == 0 {
                    template.set_message(next.message, shape.count);
                }
                template.write(&mut packet, index, payload_len);
                let packet_len = usize::from(HEADER_LEN + payload_len);
                let mut written = usize::from(HEADER_LEN);
                if args.stream.verify {
                    write_content(next.message, index, &mut packet[written..packet_len]);
                    written = packet_len;
                }
                socket.copy_in(chunk, &packet[..written]);
                socket.write_packet(n, chunk, packet_len as u32);
                next.advance(&shape);
            }
            socket.tx.submit(count);
            unfinished += count;
            sent += u64::from(count);
        }
        if !socket.tx.is_drained() {
            socket.wake_tx()?;
            wake_ups += 1;
        }
    }
    Ok(SendReport {
        program: "land-send".to_owned(),
        packets: sent,
        seconds: started.elapsed().as_secs_f64(),
        wake_ups,
        cost: meter.end(),
    })
}
