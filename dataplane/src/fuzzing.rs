//! What the fuzz targets in `fuzz/` do with a fuzzer's bytes, and the tests with every input that is committed there. Each panics where
//! something is wrong.

/// Two engines on a simulated wire, with every decision taken from `tape`: packets from a hostile third, times, what the applications do.
/// No delivered message has a wrong byte, all memory comes back, and honest traffic works afterwards.
pub fn engine(tape: &[u8]) {
    crate::sim_tests::besiege(tape);
}

/// What a program says to its daemon, or a daemon to its program: whatever is taken for a message is the same again when it is written,
/// and so is what it carries of the admission protocol.
pub fn ipc(bytes: &[u8]) {
    use crate::daemon::ipc::{Asked, Call, Control, Event, Outcome, Reply, Said};
    fn again<T: serde::Serialize + serde::de::DeserializeOwned + PartialEq>(message: &T) {
        let bytes = postcard::to_stdvec(message).expect("what was read can be written");
        assert!(postcard::from_bytes::<T>(&bytes).is_ok_and(|read| read == *message));
    }
    fn carried(control: &Control) {
        if let Ok((number, message)) = control.parse() {
            assert_eq!(Control::new(number, &message).parse(), Ok((number, message)));
        }
    }
    if let Ok(asked) = postcard::from_bytes::<Asked>(bytes) {
        again(&asked);
        if let Call::Request { request, .. } = &asked.call {
            carried(request);
        }
    }
    if let Ok(said) = postcard::from_bytes::<Said>(bytes) {
        again(&said);
        match &said {
            Said::Event(Event::Opened { request, grant, .. }) => {
                carried(request);
                carried(grant);
            }
            Said::Event(Event::Told {
                outcome: Outcome::Granted(control) | Outcome::Rejected(control),
                ..
            }) => carried(control),
            Said::Reply(_, Reply::Joined(joined)) => assert!(joined.received.len() <= bytes.len()),
            _ => {}
        }
    }
}

#[cfg(test)]
#[path = "../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_of_engine_is_survived() {
        replay("engine", super::engine);
    }

    #[test]
    fn the_corpus_of_ipc_is_survived() {
        replay("ipc", super::ipc);
    }
}
