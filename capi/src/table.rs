//! The sockets of the process, and what C has of them: handles, which are no addresses, so that a wrong one is known.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::failure::{Failure, failure};
use crate::socket::Socket;

/// Sockets of a process at most.
const SOCKETS: usize = 64;

/// A place for a socket, and how many have had it.
struct Place {
    generation: usize,
    socket: Option<Box<Socket>>,
}

static TABLE: [Mutex<Place>; SOCKETS] = [const {
    Mutex::new(Place {
        generation: 0,
        socket: None,
    })
}; SOCKETS];

/// Where the buffers of all sockets begin. Locked where one comes or goes, and for one that its socket does not know.
static BUFFERS: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

const NONE: Failure = failure(
    libc::EINVAL,
    "there is no such socket: it is closed, or was never opened",
);
const SHARED: Failure = failure(
    libc::EBUSY,
    "another thread is in a call of this socket; use it from one thread at a time",
);
const BROKEN: Failure = failure(
    libc::EIO,
    "a call of this socket failed by a defect of this library; close it",
);

pub(crate) fn buffers() -> MutexGuard<'static, BTreeSet<usize>> {
    // A set of numbers: right after a panic, too.
    BUFFERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives a socket a place; its handle, which is not 0.
pub(crate) fn insert(socket: Box<Socket>) -> Result<usize, Failure> {
    for (index, place) in TABLE.iter().enumerate() {
        if let Ok(mut place) = place.try_lock()
            && place.socket.is_none()
        {
            place.generation += 1;
            place.socket = Some(socket);
            return Ok(place.generation * SOCKETS + index);
        }
    }
    Err(failure(
        libc::EMFILE,
        "this process has 64 real-time sockets; close one",
    ))
}

/// The place that a handle names.
fn place(handle: usize, is_closing: bool) -> Result<MutexGuard<'static, Place>, Failure> {
    let place = match TABLE[handle % SOCKETS].try_lock() {
        Ok(place) => place,
        Err(TryLockError::Poisoned(place)) if is_closing => place.into_inner(),
        Err(TryLockError::Poisoned(_)) => return Err(BROKEN),
        Err(TryLockError::WouldBlock) => return Err(SHARED),
    };
    match place.socket.is_some() && place.generation == handle / SOCKETS {
        true => Ok(place),
        false => Err(NONE),
    }
}

/// A call of a socket.
pub(crate) fn with<R>(
    handle: usize,
    call: impl FnOnce(&mut Socket) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let mut place = place(handle, false)?;
    call(place.socket.as_mut().expect("it was looked for"))
}

/// Closes a socket, unless a buffer of it is locked.
pub(crate) fn close(handle: usize) -> Result<(), Failure> {
    let mutex = &TABLE[handle % SOCKETS];
    let is_broken = mutex.is_poisoned();
    let mut place = place(handle, true)?;
    if !is_broken {
        place.socket.as_mut().expect("it was looked for").may_close()?;
    }
    let socket = place.socket.take().expect("it was looked for");
    mutex.clear_poison();
    drop(place);
    socket.close();
    Ok(())
}
