//! What the fuzz targets in `fuzz/` do with a fuzzer's bytes, and the tests with every input that is committed there. Each panics where
//! something is wrong.

/// The kernel's answer to a question over rtnetlink: nothing panics, and reading ends.
pub fn netlink(bytes: &[u8]) {
    for is_dump in [true, false] {
        let mut answers: Vec<netlink_packet_route::RouteNetlinkMessage> = Vec::new();
        crate::netlink::read(bytes, is_dump, &mut true, &mut answers).ok();
    }
}

/// The steering journal that a process left when it died, on a model of the card: see there.
pub fn steering(bytes: &[u8]) {
    crate::steering::recover_from(bytes);
}

/// The shaping journal that a process left when it died.
pub fn shaping(bytes: &[u8]) {
    crate::shaping::recover_from(&String::from_utf8_lossy(bytes));
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_of_netlink_is_survived() {
        replay("netlink", super::netlink);
    }

    #[test]
    fn the_corpus_of_shaping_is_survived() {
        replay("shaping", super::shaping);
    }

    #[test]
    fn the_corpus_of_steering_is_survived() {
        replay("steering", super::steering);
    }
}
