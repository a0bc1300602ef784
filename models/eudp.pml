/* The firmware of E-UDP (§4.3, figure 6): four threads on a network card's processor, and three DMA engines beside it.
 *
 *     cargo xtask models                               # every formula of this folder, and every mistake
 *     spin -run -ltl NAME models/eudp.pml              # NAME: a formula from the end of this file
 *     spin -k eudp.pml.trail -p -g models/eudp.pml     # the trail of one that was violated, step by step
 *     spin -DUNGUARDED -run -ltl one_owner models/eudp.pml      # RDMA does not ask for the host DMA engine: violated
 *     spin -DCHUNKS=5 -DTHRESHOLD=0 -run -ltl one_owner models/eudp.pml
 *
 * Spin 6.5.2 takes less than a second for each (15,457 states, and 149,104 for the last), beside the compiler's.
 *
 * Table 1's formulas 1 to 3 ask whether something can happen. So `never_1` to `never_3` say that it never does, and are
 * to be violated: the trail is the witness. `one_owner` (formula 4) and `every_packet_through` are to hold. `always_1`
 * is formula 1 as a promise for each run: violated by runs without overlap, so not what the paper means.
 *
 * Table 1 is mended: `fine sdma`, defined over RDMA, is `fine_rdma`; formula 4 has Rdma_Last_Fragment, which no symbol
 * names and which uses the engine, too.
 *
 * A thread keeps the processor from one dispatching state to the next: each such step is atomic. Engines move a chunk
 * at a step. Packets go both ways: SDMA and SEND send, RECV and RDMA receive.
 */

#ifndef PACKETS
#define PACKETS 2
#endif
#ifndef CHUNKS
#define CHUNKS 3
#endif
/* Fine-grained steps begin when there are more chunks than these. */
#ifndef THRESHOLD
#define THRESHOLD 1
#endif

mtype = {
    iIdle,
    Sdma,
    Coarse_Grained_Send, Fine_Grained_Send, Fine_Grained_Send_Done, Send_Last_Fragment,
    Recv,
    Coarse_Grained_Rdma, Fine_Grained_Rdma, Fine_Grained_Rdma_Done, Rdma_Last_Fragment
};

mtype SDMA_state = iIdle;
mtype SEND_state = iIdle;
mtype RECV_state = iIdle;
mtype RDMA_state = iIdle;

/* The packet that each thread works at. */
byte sdma_packet, send_packet, recv_packet, rdma_packet;

/* Chunks of each packet: brought from the host into the card's memory and sent from there; arrived there and landed in
   the host. */
byte brought[PACKETS + 1], sent[PACKETS + 1], arrived[PACKETS + 1], landed[PACKETS + 1];

/* Chunks that an engine has yet to move. The host DMA engine serves two threads. */
byte host_left, send_left, recv_left;
bool host_is_taken;
bool is_for_host; /* for RDMA, into the host */

#ifdef UNGUARDED
#define RDMA_MAY_TAKE true
#else
#define RDMA_MAY_TAKE (!host_is_taken)
#endif

#define take_host(for_host, chunks) host_is_taken = true; is_for_host = for_host; host_left = chunks

active proctype host_engine() {
end:
    do
    :: atomic {
        host_left > 0 ->
        host_left--;
        if
        :: is_for_host -> landed[rdma_packet]++
        :: else -> brought[sdma_packet]++
        fi
    }
    od
}

active proctype send_engine() {
end:
    do
    :: atomic { send_left > 0 -> send_left--; sent[send_packet]++ }
    od
}

active proctype receive_engine() {
end:
    do
    :: atomic { recv_left > 0 -> recv_left--; arrived[recv_packet]++ }
    od
}

active proctype SDMA() {
    do
    :: sdma_packet == PACKETS -> break
    :: atomic {
        sdma_packet < PACKETS && !host_is_taken ->
        take_host(false, CHUNKS);
        SDMA_state = Sdma
    }
    atomic {
        host_left == 0 ->
        host_is_taken = false;
        sdma_packet++;
        SDMA_state = iIdle
    }
    od
}

#define to_send (brought[send_packet] - sent[send_packet])
#define is_brought (brought[send_packet] == CHUNKS)

active proctype SEND() {
idle:
    if
    :: send_packet == PACKETS -> goto finished
    :: atomic {
        send_packet < PACKETS && is_brought ->
        send_left = CHUNKS;
        SEND_state = Coarse_Grained_Send
    }
    goto last
    :: atomic {
        send_packet < PACKETS && !is_brought && to_send > THRESHOLD ->
        send_left = to_send;
        SEND_state = Fine_Grained_Send
    }
    fi;
fine:
    atomic { send_left == 0 -> SEND_state = Fine_Grained_Send_Done }
    if
    :: atomic {
        to_send > THRESHOLD ->
        send_left = to_send;
        SEND_state = Fine_Grained_Send
    }
    goto fine
    :: atomic {
        to_send <= THRESHOLD && is_brought ->
        send_left = to_send;
        SEND_state = Send_Last_Fragment
    }
    fi;
last:
    atomic { send_left == 0 -> send_packet++; SEND_state = iIdle }
    goto idle;
finished:
    skip
}

active proctype RECV() {
    do
    :: recv_packet == PACKETS -> break
    :: atomic { recv_packet < PACKETS -> recv_left = CHUNKS; RECV_state = Recv }
    atomic { recv_left == 0 -> recv_packet++; RECV_state = iIdle }
    od
}

#define to_land (arrived[rdma_packet] - landed[rdma_packet])
#define is_received (arrived[rdma_packet] == CHUNKS)

active proctype RDMA() {
idle:
    if
    :: rdma_packet == PACKETS -> goto finished
    :: atomic {
        rdma_packet < PACKETS && is_received && RDMA_MAY_TAKE ->
        take_host(true, CHUNKS);
        RDMA_state = Coarse_Grained_Rdma
    }
    goto last
    :: atomic {
        rdma_packet < PACKETS && !is_received && to_land > THRESHOLD && RDMA_MAY_TAKE ->
        take_host(true, to_land);
        RDMA_state = Fine_Grained_Rdma
    }
    fi;
fine:
    atomic { host_left == 0 -> host_is_taken = false; RDMA_state = Fine_Grained_Rdma_Done }
    if
    :: atomic {
        to_land > THRESHOLD && RDMA_MAY_TAKE ->
        take_host(true, to_land);
        RDMA_state = Fine_Grained_Rdma
    }
    goto fine
    :: atomic {
        to_land <= THRESHOLD && is_received && RDMA_MAY_TAKE ->
        take_host(true, to_land);
        RDMA_state = Rdma_Last_Fragment
    }
    fi;
last:
    atomic { host_left == 0 -> host_is_taken = false; rdma_packet++; RDMA_state = iIdle }
    goto idle;
finished:
    skip
}

#define sdma (SDMA_state == Sdma)
#define coarse_send (SEND_state == Coarse_Grained_Send)
#define fine_send (SEND_state == Fine_Grained_Send)
#define recv (RECV_state == Recv)
#define coarse_rdma (RDMA_state == Coarse_Grained_Rdma)
#define fine_rdma (RDMA_state == Fine_Grained_Rdma)
#define last_fragment (RDMA_state == Rdma_Last_Fragment)

/* Violated: the trails show that a packet leaves while one is brought, that one lands while one arrives, and that both
   ways are in use. */
ltl never_1 { [] !(sdma && (coarse_send || fine_send)) }
ltl never_2 { [] !((coarse_rdma || fine_rdma) && recv) }
ltl never_3 { [] !((coarse_send || fine_send) && recv) }

/* Violated: it is the same packet. */
ltl never_1_inside { [] !(sdma && fine_send && sdma_packet == send_packet) }
ltl never_2_inside { [] !(fine_rdma && recv && rdma_packet == recv_packet) }

/* Violated. */
ltl always_1 { <> (sdma && (coarse_send || fine_send)) }

/* Hold. */
ltl one_owner { [] !(sdma && (coarse_rdma || fine_rdma || last_fragment)) }
ltl every_packet_through { <> (sent[PACKETS - 1] == CHUNKS && landed[PACKETS - 1] == CHUNKS &&
    send_packet == PACKETS && rdma_packet == PACKETS) }
