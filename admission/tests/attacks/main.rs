//! What strangers on the network try against a receiver. Each attack runs against both forms of it: an endpoint that admits by itself, and
//! an unprivileged program behind the daemon.

#[path = "../daemon/bed.rs"]
#[allow(dead_code)] // the daemon's own tests use the rest
mod bed;
#[path = "../daemon/program.rs"]
#[allow(dead_code)] // as above
mod program;
#[path = "../../../dataplane/tests/endpoint/traffic.rs"]
mod traffic;

mod control;
mod forger;
mod form;
mod introductions;
mod places;

/// Makes a test of each attack for each form of receiver that it is for. What the attacker does, and what must hold all the same, stands at
/// its function.
macro_rules! attacks {
    (@embedded) => {
        crate::form::Form::Embedded
    };
    (@daemon) => {
        crate::form::Form::Daemon
    };
    ($($module:ident::$attack:ident: $($form:ident)|+ $(, but not $_other:ident: $_why:literal)?;)*) => {$(
        mod $attack {
            $(
                #[test]
                fn $form() {
                    crate::$module::$attack(attacks!(@$form));
                }
            )+
        }
    )*};
}

attacks! {
    // To the control port, where all who are honest have the cluster's key.
    control::altered_truncated_and_replayed: embedded | daemon;
    control::another_key: embedded | daemon;
    control::a_flood_keeps_nobody_out: embedded | daemon;
    control::strangers_ends_and_other_versions_are_answered_in_measure: embedded | daemon;
    // As somebody else, or as an earlier life of somebody.
    introductions::forged_small_messages_reset_nobody: embedded | daemon;
    introductions::a_sender_that_began_anew_is_heard_at_once: embedded | daemon;
    introductions::an_earlier_life_repeated_from_elsewhere_is_not_taken: embedded | daemon;
    introductions::real_time_packets_without_a_socket_cost_nobody: embedded | daemon;
    introductions::who_is_not_allowed_is_heard_by_no_way: embedded | daemon;
    // To the places of a landing queue.
    places::forged_requests_hold_no_place: embedded | daemon;
    places::unused_places_go_to_whoever_waits: embedded | daemon;
    places::a_silent_sender_holds_up_nobody: embedded | daemon;
    places::a_place_whose_message_does_not_come_goes_to_whoever_waits: embedded,
        but not daemon: "without the key nobody has a place to keep; hosts that have it do so in \
                         tests/daemon/unused.rs";
    places::repeated_announcements_keep_no_place: embedded,
        but not daemon: "the same";
}

// Nothing of an endpoint that admits by itself answers to what these try behind a daemon, in tests/daemon:
// `forging` steals from a neighbour behind the same gate, and it shares its gate with no program;
// `strangers` call the daemon over its Unix socket, and it has none;
// `neighbours` are after the daemon's files, and it keeps none.
