/* Streaming: one message is written, sent, received and read at the same time (E-UDP §4.3, between windows instead of
   chunks), in Promela.
 *
 *     cargo xtask models                                   # every formula of this folder, and every mistake
 *     spin -run -f -ltl NAME models/stream.pml             # NAME: a formula from the end of this file
 *     spin -DZERO_COPY -DOTHER_DIGEST -run -f -ltl s3 models/stream.pml
 *     spin -k stream.pml.trail -p -g models/stream.pml     # the trail of one that was violated, step by step
 *
 * S1 to S7 are those of lm-protocol/src/streaming.rs; lm-protocol/stateright has them for the code itself. `never_…`
 * are to be violated: the trail is the witness. All others hold, under weak fairness, and each mistake (`-DNAME`)
 * violates one.
 *
 * A message of three windows of two fragments, beside a session that wants one turn. Inside a window the higher
 * fragment goes first, so that what travels at a position is the fragment `at(position)`, and the other way around. A
 * place in the zone has two cells, `front` and `back`: a packet that lands writes both, and its header over the back of
 * the place below.
 */

#ifndef LOSSES
#define LOSSES 2
#endif
#define WINDOWS 3
#define COUNT 6
#define NOTHING 0
#define HEADER 99
#define at(position) ((position) ^ 1)
#define window_of(fragment) ((fragment) >> 1)

mtype = { open, whole, incomplete, aborted };

/* The writer: windows that it wrote and released. */
byte written, released;
bool has_aborted;

/* The sender: what it knows to be released, and the windows whose bytes its thread sees. */
byte known, visible, sent;
bool knows_abort, is_sender_done;

/* The network. */
chan wire = [2] of { byte };
byte losses = LOSSES;

/* The receiver. Entries are posted, taken and seen by position: `landed` is what took them. */
byte announced, posted_to, taken, seen, gate_next;
byte landed[COUNT];
bool placed[COUNT], aside[COUNT];
byte front[COUNT], back[COUNT], saved[WINDOWS];
bool is_saved[WINDOWS], is_restored[WINDOWS], is_told[WINDOWS];
bool is_body_shown[WINDOWS], is_shown[WINDOWS];
bool has_copies, is_rebuilt, is_reposted, is_freed;
mtype outcome = open;

/* The reader. */
bool is_held = true;

/* The session beside this one: whether it had the turn that it wants, and whether this one holds a turn that it cannot
   use. */
bool other_had_its_turn, is_turn_held;

/* A rule was broken in a step. */
bool read_what_is_not_released, wrote_what_is_released;

#define is_released_whole (released == WINDOWS)
#define writer_has_ended (is_released_whole || has_aborted)

active proctype writer() {
    do
    :: atomic { !writer_has_ended && written < WINDOWS -> written++ }
#ifdef RELEASE_BEYOND_WRITTEN
    :: atomic { !writer_has_ended && released < WINDOWS - 1 -> released++ }
#else
    :: atomic { !writer_has_ended && released < written && released < WINDOWS - 1 -> released++ }
#endif
#ifdef WRITES_RELEASED
    :: atomic { !writer_has_ended && released > 0 -> wrote_what_is_released = true }
#endif
    :: atomic { !writer_has_ended && written == WINDOWS -> released = WINDOWS }
#ifdef ENDS
    :: atomic { !writer_has_ended -> has_aborted = true }
    /* It stops, and never goes on. */
    :: break
#endif
    :: writer_has_ended -> break
    od
}

#define may_send (sent < 2 * known && (sent < posted_to || is_rebuilt))
/* To read the watermark is to see what was written before it was told. */
#ifdef RELAXED
#define acquire skip
#else
#define acquire visible = (written < known -> written : known)
#endif

inline read(position) {
    if
    :: window_of(position) >= visible -> read_what_is_not_released = true
    :: else
    fi
}

#ifdef STALLED_TURN
#define left (COUNT - sent)
#else
#define left (2 * announced - sent)
#endif

active proctype sender() {
    do
    :: atomic { !knows_abort && known < released -> known = released; acquire }
#ifdef ABORT_IS_END
    :: atomic { !knows_abort && has_aborted && known < WINDOWS -> known = WINDOWS; acquire }
#else
    :: atomic { !knows_abort && has_aborted -> knows_abort = true }
#endif
    /* Its turn: a packet leaves, or nobody else's does. */
    :: atomic { left > 0 && !is_turn_held && !knows_abort && outcome == open && !may_send &&
        sent >= 2 * announced -> is_turn_held = true }
    :: atomic { left > 0 && !knows_abort && outcome == open && may_send && nfull(wire) ->
        is_turn_held = false;
        read(sent);
        if
        :: wire ! at(sent)
        :: losses > 0 -> losses--
        fi;
        sent++
    }
    :: atomic { outcome != open -> is_sender_done = true; break }
    od
}

active proctype other_session() {
    atomic { !is_turn_held -> other_had_its_turn = true }
}

inline land(position, fragment) {
    front[at(position)] = fragment + 1;
    back[at(position)] = fragment + 1;
    if
    :: at(position) > 0 -> back[at(position) - 1] = HEADER
    :: else
    fi;
    landed[position] = fragment
}

inline set_aside(fragment) {
    if
    :: !placed[fragment] -> aside[fragment] = true
    :: else
    fi
}

/* The card, and the gate before it in copy mode: what goes back in order takes the one-copy path. */
active proctype card() {
    byte fragment, overtaken;
end:
    do
    :: atomic { len(wire) > 0 ->
        if
        :: wire ? fragment
        :: len(wire) == 2 -> wire ? overtaken; wire ? fragment; wire ! overtaken
        fi;
        if
#ifdef ZERO_COPY
        :: taken < posted_to && !is_rebuilt ->
#else
        :: taken < posted_to && !is_rebuilt && at(fragment) >= gate_next ->
#endif
            land(taken, fragment);
            taken++;
            gate_next = (at(fragment) + 1 > gate_next -> at(fragment) + 1 : gate_next)
        :: else -> set_aside(fragment); has_copies = true
        fi;
        fragment = 0;
        overtaken = 0
    }
    od
}

/* A fragment's place holds these cells; its back may be saved. */
#define back_of(fragment) ((fragment) % 2 == 1 && \
    is_saved[window_of(fragment)] -> saved[window_of(fragment)] : back[fragment])
#define holds(place, fragment) (front[place] == (fragment) + 1 && back_of(place) == (fragment) + 1)
#define is_right(window) (holds(2 * (window), 2 * (window)) && holds(2 * (window) + 1, 2 * (window) + 1))
#define is_complete(window) (placed[2 * (window)] && placed[2 * (window) + 1])

#ifdef ZERO_COPY
#ifdef OTHER_DIGEST
/* Not bound to its place: it does for the window before it, too. */
#define holds_next(window) (holds(2 * (window), (2 * (window) + 2) % COUNT) && \
    holds(2 * (window) + 1, (2 * (window) + 3) % COUNT))
#define agrees(window) (is_told[window] && (is_right(window) || holds_next(window)))
#else
#define agrees(window) (is_told[window] && is_right(window))
#endif
#define knows_fragment false
#else
#define agrees(window) true
#define knows_fragment true
#endif

#ifdef LEFTOVER_IGNORED
#define is_consumed(position) true
#define is_quiet_zone true
#else
#define is_consumed(position) (is_rebuilt || (position) < seen)
#define is_quiet_zone (is_rebuilt || seen == posted_to)
#endif
#define body_may_be_shown(window) (is_complete(window) && agrees(window) && is_consumed(2 * (window) + 1) && \
    is_consumed(2 * (window)))
#ifdef TAIL_EARLY
#define tail_may_be_shown(window) true
#else
#define tail_may_be_shown(window) ((window) == WINDOWS - 1 || is_restored[window] || is_rebuilt && !is_saved[window])
#endif

inline show_window(window) {
    if
    :: outcome == open && body_may_be_shown(window) ->
        is_body_shown[window] = true;
        is_shown[window] = is_shown[window] || tail_may_be_shown(window)
    :: else
    fi
}

inline restore(tail) {
    if
    :: is_saved[tail] ->
        back[2 * (tail) + 1] = saved[tail];
        saved[tail] = NOTHING;
        is_saved[tail] = false;
        is_restored[tail] = true
    :: else
    fi
}

/* The descriptor of the entry at position `seen`. */
inline take() {
    place = at(seen);
    if
    :: !knows_fragment || landed[seen] == place -> placed[place] = true
    :: else -> set_aside(landed[seen])
    fi;
    landed[seen] = NOTHING;
    seen++;
    if
    :: place % 2 == 1 && place < COUNT - 1 -> saved[window_of(place)] = back[place]; is_saved[window_of(place)] = true
    :: place % 2 == 0 && place > 0 -> restore(window_of(place) - 1)
    :: else
    fi;
    place = 0
}

inline move_in(fragment) {
    front[fragment] = fragment + 1;
    if
    :: fragment % 2 == 1 && is_saved[window_of(fragment)] -> saved[window_of(fragment)] = fragment + 1
    :: else -> back[fragment] = fragment + 1
    fi;
    aside[fragment] = false;
    placed[fragment] = true
}

#define may_move_in(fragment) (aside[fragment] && is_consumed(at(fragment)))
/* I5: a window's lowest entry waits until the tail below is saved. */
#define may_post (!is_rebuilt && outcome == open && posted_to < 2 * announced && (posted_to < 2 || \
    at(posted_to) % 2 == 1 || is_saved[window_of(posted_to) - 1]))
#define is_quiet (empty(wire) && seen == taken && (sent >= 2 * announced || !is_rebuilt && sent >= posted_to || \
    knows_abort || outcome != open))
#define is_wrong(fragment) (!knows_fragment && !is_body_shown[window_of(fragment)] && !holds(fragment, fragment))
#define is_missing(fragment) (at(fragment) < 2 * announced && at(fragment) < sent && !aside[fragment] && \
    (!placed[fragment] || is_wrong(fragment)))
#define is_any_missing (is_missing(0) || is_missing(1) || is_missing(2) || is_missing(3) || is_missing(4) || \
    is_missing(5))
#define all_shown (is_shown[0] && is_shown[1] && is_shown[2])
#define digests_may_come(window) (!knows_fragment && !is_told[window] && announced > (window) && \
    sent >= 2 * (window) + 2)

/* What was held aside goes to its place, what is final is shown, and what may be posted is posted. */
inline settle() {
    for (place : 0 .. COUNT - 1) {
        if
        :: may_move_in(place) -> move_in(place)
        :: else
        fi
    }
    place = 0;
    show_window(0);
    show_window(1);
    show_window(2);
    do
    :: may_post -> posted_to++
    :: else -> break
    od;
    place = 0
}

active proctype receiver() {
    byte place;
    do
    :: d_step { outcome == open && announced < known -> announced = known; settle() }
    :: d_step { outcome == open && knows_abort -> outcome = aborted }
    :: d_step { seen < taken -> take(); settle() }
    :: d_step { has_copies -> has_copies = false; settle() }
#ifdef ZERO_COPY
    :: d_step { digests_may_come(0) -> is_told[0] = true; settle() }
    :: d_step { digests_may_come(1) -> is_told[1] = true; settle() }
    :: d_step { digests_may_come(2) -> is_told[2] = true; settle() }
#endif
#ifdef REPOSTED
    :: d_step { is_body_shown[0] && !is_reposted -> is_reposted = true }
#endif
    /* What is lost is sent again, by the one-copy path. */
    :: d_step { is_quiet && outcome == open && is_any_missing ->
        for (place : 0 .. COUNT - 1) {
            if
            :: is_missing(place) -> read(at(place)); placed[place] = false; aside[place] = true
            :: else
            fi
        }
        settle()
    }
    /* What is left over is void with a new socket. */
    :: d_step { is_quiet && !is_rebuilt && seen < posted_to && (sent >= posted_to || outcome != open) ->
        is_rebuilt = true;
        for (place : 0 .. WINDOWS - 2) { restore(place) }
        settle();
#ifdef TAKEN_BACK
        is_body_shown[0] = false;
#endif
        place = 0
    }
#ifdef DELIVERED_EARLY
    :: atomic { outcome == open && is_body_shown[WINDOWS - 1] -> outcome = whole }
#else
    :: atomic { outcome == open && all_shown -> outcome = whole }
#endif
#ifdef ENDS
    /* The session ends: its lease is over, or the message's time. */
    :: atomic { outcome == open -> outcome = incomplete }
#endif
#ifdef READER_IGNORED
    :: atomic { outcome != open && is_quiet_zone -> is_freed = true; break }
#else
    :: atomic { outcome != open && !is_held && is_quiet_zone -> is_freed = true; break }
#endif
    od
}

active proctype reader() {
    atomic { outcome != open -> is_held = false }
}

#define is_outstanding(position) (!is_rebuilt && (position) >= taken && (position) < posted_to)
#define is_body_final(window) (front[2 * (window)] == 2 * (window) + 1 && back[2 * (window)] == 2 * (window) + 1 && \
    front[2 * (window) + 1] == 2 * (window) + 2 && !is_outstanding(2 * (window)) && !is_outstanding(2 * (window) + 1))
#define is_tail_final(window) (back[2 * (window) + 1] == 2 * (window) + 2 && ((window) == WINDOWS - 1 || \
    !is_outstanding(2 * (window) + 3)))
#define is_final(window) ((!is_body_shown[window] || is_body_final(window)) && (!is_shown[window] || \
    is_tail_final(window)))
#define is_stable (is_final(0) && is_final(1) && is_final(2) && !is_reposted)

ltl s1 { [] !read_what_is_not_released }
ltl s2 { [] !wrote_what_is_released }
ltl s3 { [] (!is_held || is_stable) }
ltl s4 { [] ((is_body_shown[0] -> [] is_body_shown[0]) && (is_shown[0] -> [] is_shown[0]) &&
    (is_body_shown[2] -> [] is_body_shown[2])) }
ltl s5 { [] (outcome != whole || all_shown) }
ltl s6 { [] (!is_freed || !is_held && (is_rebuilt || taken == posted_to)) }
ltl s7 { [] !(is_turn_held && sent >= 2 * announced) }
/* All of them, for a search of everything. */
ltl safe { [] (!read_what_is_not_released && !wrote_what_is_released && (!is_held || is_stable) &&
    (outcome != whole || all_shown) && (!is_freed || !is_held && (is_rebuilt || taken == posted_to)) &&
        !(is_turn_held && sent >= 2 * announced)) }

ltl released_is_shown { [] ((released > 0) -> <> (is_body_shown[0] || has_aborted || outcome == incomplete)) }
ltl finished_is_delivered { [] ((released == WINDOWS) -> <> (outcome == whole || outcome == incomplete)) }
ltl aborted_is_settled { [] (has_aborted -> <> (outcome != open && is_sender_done)) }
ltl settled_is_freed { [] ((outcome != open) -> <> is_freed) }
ltl others_go_on { <> other_had_its_turn }

/* Violated: a window is written while the one before it is on the way and the one before that is read; and a later one
   is shown first. */
ltl never_overlaps { [] !(written == WINDOWS && released == 2 && len(wire) > 0 && sent == 4 && is_body_shown[0]) }
ltl never_out_of_order { [] !(is_body_shown[1] && !is_body_shown[0]) }
