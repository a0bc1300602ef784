//! Asks a running daemon for its status.

use std::path::Path;
use std::time::Duration;

use lm_dataplane::ipc::{Asked, Call, Reply, Said, VERSION};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::daemon::status::Status;
use crate::socket::Connection;

/// How long the daemon may take.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn status(path: &Path) -> Result<Status, String> {
    let name = path.display();
    let told = |error: Errno| match error {
        Errno::NOENT | Errno::CONNREFUSED => {
            format!("no daemon listens on {name}: start it, or name its --socket")
        }
        Errno::WOULDBLOCK => format!("the daemon at {name} does not answer"),
        error => format!("cannot ask the daemon at {name}: {error}"),
    };
    let connection = Connection::to(path).map_err(told)?;
    set_socket_timeout(&connection, Timeout::Recv, Some(PATIENCE)).map_err(told)?;
    let mut beside = Vec::new();
    for (number, call) in (1..).zip([Call::Hello { version: VERSION }, Call::Status]) {
        let bytes = postcard::to_stdvec(&Asked { number, call }).map_err(|_| told(Errno::INVAL))?;
        rustix::net::send(&connection, &bytes, SendFlags::NOSIGNAL).map_err(told)?;
        let answer = connection.receive();
        let answer = answer.map_err(|broken| format!("cannot ask the daemon at {name}: {broken}"))?;
        let answer = answer.ok_or(Errno::WOULDBLOCK).map_err(told)?;
        match postcard::from_bytes(&answer.bytes) {
            Ok(Said::Reply(_, Reply::Refused(what))) => return Err(what),
            Ok(_) => beside = answer.descriptors,
            Err(_) => return Err(told(Errno::PROTO)),
        }
    }
    let Some(file) = beside.pop() else {
        return Err(format!("the daemon at {name} says nothing"));
    };
    let json = std::io::read_to_string(std::fs::File::from(file));
    let json = json.map_err(|error| format!("cannot read the status: {error}"))?;
    serde_json::from_str(&json).map_err(|error| format!("the status is none: {error}"))
}
