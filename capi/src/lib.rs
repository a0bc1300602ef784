//! Real-time sockets for C: `lm_rt.h` says what each function does.
//!
//! Nothing of a socket is C's but the bytes of its buffers: a handle is a number, so that a wrong one is an error and no crash. No panic
//! crosses the border: it is `EIO`, and the socket is of no use any more.

mod failure;
mod socket;
mod table;

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::{NonZeroU32, NonZeroU64};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use libc::{sockaddr, sockaddr_in, socklen_t};
use lm_protocol::time::Time;
use lm_realtime::{
    Blocks, Deadline, Foreign, Percentiles, SendOptions, SendOutcome, SocketConfig, monotonic,
};

use crate::failure::{Failure, failure};
use crate::socket::{Config, Received, Socket};

const DELIVER_LATE: u32 = 1;
const SAME_HOST: u32 = 2;
const REPLACE_QDISC: u32 = 4;
const ABSTIME: u32 = 1;
/// Bytes of a block that no message takes.
const MARGINS_LEN: usize = 100;
const PAGE_LEN: usize = 4096;

/// `struct lm_rt_config`.
#[derive(Debug)]
#[repr(C)]
pub struct LmRtConfig {
    size: usize,
    interface: *const c_char,
    allow: *const c_char,
    link_bits_per_second: u64,
    period_ns: u64,
    keep: u32,
    frames: u32,
    blocks_of_1: u32,
    blocks_of_4: u32,
    blocks_of_8: u32,
    blocks_of_16: u32,
    packets_per_second: u32,
    port: u16,
    number: u16,
    flags: u32,
}

/// `struct lm_rt_options`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct LmRtOptions {
    size: usize,
    deadline_ns: u64,
    priority: u32,
    flags: u32,
}

/// `struct lm_rt_info`.
#[derive(Debug)]
#[repr(C)]
pub struct LmRtInfo {
    size: usize,
    from: sockaddr_in,
    sent_ns: u64,
    received_ns: u64,
    delay_ns: u64,
    len: u64,
    number: u32,
    lost: u32,
    priority: u32,
    late: u32,
}

/// `struct lm_rt_stats`.
#[derive(Debug)]
#[repr(C)]
pub struct LmRtStats {
    size: usize,
    sent: u64,
    late_unsent: u64,
    superseded: u64,
    beyond_rate: u64,
    reported_whole: u64,
    reported_lost: u64,
    reported_refused: u64,
    received: u64,
    lost: u64,
    late: u64,
    missed: u64,
    overtaken: u64,
    no_block: u64,
    superseded_here: u64,
    refused_packets: u64,
    refused_reports: u64,
    credits_per_second: u64,
    holds_kernel: u64,
    latency_ns: Percentiles,
    jitter_ns: Percentiles,
    delay_ns: Percentiles,
    late_ns: Percentiles,
    missed_ns: Percentiles,
    superseded_ns: Percentiles,
    lost_in_a_row: Percentiles,
}

/// `lm_rt`: a handle, which is never looked behind.
#[derive(Debug)]
#[repr(C)]
pub struct LmRt([u8; 0]);

thread_local! {
    /// Why the last call failed, and the copy that C reads.
    static WHY: RefCell<(Failure, Option<CString>)> =
        const { RefCell::new((failure(0, "no call has failed"), None)) };
}

fn fail(failure: Failure) {
    // SAFETY: the thread's errno is there as long as the thread.
    unsafe { *libc::__errno_location() = failure.errno };
    // A thread that is ending has no words any more.
    let _ = WHY.try_with(|why| why.borrow_mut().0 = failure);
}

/// A call from C: what it returns, or `failed` with errno.
fn call<R>(failed: R, body: impl FnOnce() -> Result<R, Failure>) -> R {
    let defect = |_: Box<dyn Any + Send>| {
        Err(failure(
            libc::EIO,
            "a defect of this library, which standard error tells of; close the socket",
        ))
    };
    match catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(defect) {
        Ok(result) => result,
        Err(failure) => {
            fail(failure);
            failed
        }
    }
}

/// Whether a structure of C is one that this library knows, with nothing in members that came later. `None` for NULL.
///
/// # Safety
///
/// It is NULL, or its first member says how many bytes of it are there.
unsafe fn known<T>(start: *const T) -> Result<Option<usize>, Failure> {
    if start.is_null() {
        return Ok(None);
    }
    // SAFETY: it begins with that, as the caller says.
    let size = unsafe { start.cast::<usize>().read() };
    if !(size_of::<T>()..=PAGE_LEN).contains(&size) {
        return Err(failure(
            libc::EINVAL,
            "a structure does not say its size; begin with lm_rt_defaults or LM_RT_SIZED",
        ));
    }
    // SAFETY: there are as many bytes, as the caller says.
    let beyond = unsafe { std::slice::from_raw_parts(start.add(1).cast::<u8>(), size - size_of::<T>()) };
    match beyond.iter().all(|byte| *byte == 0) {
        true => Ok(Some(size)),
        false => Err(failure(
            libc::E2BIG,
            "a structure has members that this library does not know; install the one that the program was built for",
        )),
    }
}

const NULL: Failure = failure(libc::EFAULT, "a pointer is NULL that must not be");

fn with<R>(handle: *mut LmRt, body: impl FnOnce(&mut Socket) -> Result<R, Failure>) -> Result<R, Failure> {
    table::with(handle.addr(), body)
}

/// A text of C; `None` for NULL.
///
/// # Safety
///
/// It is NULL, or ends with a zero.
unsafe fn text(start: *const c_char) -> Result<Option<String>, Failure> {
    if start.is_null() {
        return Ok(None);
    }
    // SAFETY: it ends with a zero, as the caller says.
    let text = unsafe { CStr::from_ptr(start) };
    let text = text
        .to_str()
        .map_err(|_| failure(libc::EINVAL, "a text is not UTF-8"))?;
    Ok(Some(text.to_owned()))
}

/// Addresses in CIDR notation, between commas.
fn networks(text: &str) -> Option<Vec<(Ipv4Addr, u8)>> {
    let network = |word: &str| {
        let (address, len) = word.trim().split_once('/').unwrap_or((word.trim(), "32"));
        let len = len.parse().ok().filter(|len| *len <= 32)?;
        Some((address.parse().ok()?, len))
    };
    text.split(',').map(network).collect()
}

/// # Safety
///
/// Its texts are NULL, or end with a zero.
unsafe fn config(of_c: &LmRtConfig) -> Result<Config, Failure> {
    // SAFETY: as the caller says.
    let (interface, allow) = unsafe { (text(of_c.interface)?, text(of_c.allow)?) };
    if of_c.flags & !(DELIVER_LATE | SAME_HOST | REPLACE_QDISC) != 0 {
        return Err(failure(libc::EINVAL, "flags has a bit that means nothing"));
    }
    let allow = allow.map(|text| {
        networks(&text).ok_or(failure(
            libc::EINVAL,
            "allow names addresses or networks between commas, such as 10.0.0.0/8,192.0.2.7",
        ))
    });
    Ok(Config {
        interface: interface.ok_or(NULL)?,
        allow: allow.transpose()?.unwrap_or_default(),
        link: NonZeroU64::new(of_c.link_bits_per_second),
        foreign: match of_c.flags & REPLACE_QDISC {
            0 => Foreign::Keep,
            _ => Foreign::Replace,
        },
        port: of_c.port,
        number: of_c.number,
        socket: SocketConfig {
            keep: of_c.keep as usize,
            frames: of_c.frames,
            blocks: Blocks {
                of_1: of_c.blocks_of_1,
                of_4: of_c.blocks_of_4,
                of_8: of_c.blocks_of_8,
                of_16: of_c.blocks_of_16,
            },
            drops_late: of_c.flags & DELIVER_LATE == 0,
            same_host: of_c.flags & SAME_HOST != 0,
            period: (of_c.period_ns > 0).then(|| Duration::from_nanos(of_c.period_ns)),
            packets_per_second: NonZeroU32::new(of_c.packets_per_second),
        },
    })
}

/// Opens a socket; its handle, or NULL.
///
/// # Safety
///
/// `config_of_c` is NULL or one, whose texts are NULL or end with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lm_rt_socket(config_of_c: *const LmRtConfig) -> *mut LmRt {
    call(std::ptr::null_mut(), || {
        // SAFETY: it is NULL or a configuration, as the caller says.
        let of_c = unsafe { known(config_of_c)?.map(|_| &*config_of_c) }.ok_or(NULL)?;
        // SAFETY: as the caller says.
        let config = unsafe { config(of_c) }?;
        let handle = table::insert(Box::new(Socket::open(&config)?))?;
        Ok(std::ptr::without_provenance_mut(handle))
    })
}

/// A buffer of so many pages, or NULL.
#[unsafe(no_mangle)]
pub extern "C" fn lm_rt_mmap(handle: *mut LmRt, pages: c_uint) -> *mut c_void {
    call(std::ptr::null_mut(), || {
        with(handle, |socket| match pages {
            1 | 4 | 8 | 16 => Ok(socket.lend(pages as usize * PAGE_LEN - MARGINS_LEN)?.cast()),
            _ => Err(failure(libc::EINVAL, "a buffer has 1, 4, 8 or 16 pages")),
        })
    })
}

/// An address of C; `None` for NULL.
///
/// # Safety
///
/// `to` is NULL, or `len` bytes can be read there.
unsafe fn address(to: *const sockaddr, len: socklen_t) -> Result<Option<SocketAddrV4>, Failure> {
    if to.is_null() {
        return Ok(None);
    }
    if (len as usize) < size_of::<sockaddr_in>() {
        return Err(failure(
            libc::EINVAL,
            "the address is shorter than a struct sockaddr_in",
        ));
    }
    // SAFETY: there are as many bytes, as the caller says; any bytes are one.
    let to = unsafe { to.cast::<sockaddr_in>().read_unaligned() };
    if c_int::from(to.sin_family) != libc::AF_INET {
        return Err(failure(
            libc::EAFNOSUPPORT,
            "the address is none of IPv4 (AF_INET)",
        ));
    }
    if to.sin_port == 0 {
        return Err(failure(
            libc::EINVAL,
            "the address has no port; that of the other socket, such as LM_RT_PORT",
        ));
    }
    let ip = Ipv4Addr::from(u32::from_be(to.sin_addr.s_addr));
    Ok(Some(SocketAddrV4::new(ip, u16::from_be(to.sin_port))))
}

fn options(of_c: LmRtOptions) -> Result<SendOptions, Failure> {
    if of_c.priority > 7 {
        return Err(failure(libc::EINVAL, "priorities are 0 to 7"));
    }
    if of_c.flags & !ABSTIME != 0 {
        return Err(failure(
            libc::EINVAL,
            "flags of a message has a bit that means nothing",
        ));
    }
    // One from now on counts from here: a host's first answer may take a second.
    let deadline = match of_c.flags & ABSTIME {
        _ if of_c.deadline_ns == 0 => None,
        0 => Some(monotonic() + Duration::from_nanos(of_c.deadline_ns)),
        _ => Some(Time::from_nanos(of_c.deadline_ns)),
    };
    Ok(SendOptions {
        priority: of_c.priority as u8,
        deadline: deadline.map(Deadline::At),
    })
}

/// Sends a message; its length, or −1.
///
/// # Safety
///
/// `of_c` is NULL or options; `to` is NULL, or `to_len` bytes can be read there. `buffer` is only compared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lm_rt_sendto(
    handle: *mut LmRt,
    buffer: *const c_void,
    len: usize,
    of_c: *const LmRtOptions,
    to: *const sockaddr,
    to_len: socklen_t,
) -> isize {
    call(-1, || {
        with(handle, |socket| {
            // SAFETY: it is NULL or options, as the caller says.
            let of_c = unsafe { known(of_c)?.map(|_| *of_c) };
            let options = options(of_c.unwrap_or_default())?;
            // SAFETY: as the caller says.
            let to = unsafe { address(to, to_len) }?;
            socket.send((buffer.addr(), len), options, to)?;
            Ok(len as isize) // a block has no more than 65,436
        })
    })
}

/// What became of a buffer's message, or −1.
#[unsafe(no_mangle)]
pub extern "C" fn lm_rt_unlocked(handle: *mut LmRt, buffer: *const c_void) -> c_int {
    call(-1, || {
        with(handle, |socket| {
            Ok(match socket.unlocked(buffer.addr())? {
                None => 0,
                Some(SendOutcome::Left) => 1,
                Some(SendOutcome::Late) => 2,
                Some(SendOutcome::Superseded) => 3,
                Some(_) => 4,
            })
        })
    })
}

fn info(received: &Received, size: usize) -> LmRtInfo {
    let info = &received.info;
    let from = received
        .from
        .unwrap_or(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
    LmRtInfo {
        size,
        from: sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: from.port().to_be(),
            sin_addr: libc::in_addr {
                s_addr: from.ip().to_bits().to_be(),
            },
            sin_zero: [0; 8],
        },
        sent_ns: info.sent_at.as_nanos(),
        received_ns: info.received_at.as_nanos(),
        delay_ns: info.delay.as_nanos() as u64,
        len: received.len as u64,
        number: info.number,
        lost: info.lost,
        priority: info.priority.into(),
        late: info.late.into(),
    }
}

/// Receives a message; its length, or −1.
///
/// # Safety
///
/// `len` bytes can be written at `buffer`; `told` is NULL, or a `struct lm_rt_info` can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lm_rt_recvfrom(
    handle: *mut LmRt,
    buffer: *mut c_void,
    len: usize,
    timeout_ns: i64,
    told: *mut LmRtInfo,
) -> isize {
    call(-1, || {
        with(handle, |socket| {
            if buffer.is_null() && len > 0 {
                return Err(NULL);
            }
            // SAFETY: as the caller says.
            let size = unsafe { known(told) }?;
            let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
            let received = socket.recv(timeout)?;
            if let Some(size) = size {
                // SAFETY: there is room for it, as the caller says.
                unsafe { told.write(info(&received, size)) };
            }
            if received.len > len {
                return Err(failure(
                    libc::EMSGSIZE,
                    "the message is longer than that (len of the information); receive it again with more room",
                ));
            }
            let message = socket.take().expect("it was waited for");
            if !message.is_empty() {
                // SAFETY: there is room for `len` bytes, which are as many at least, and nobody else has them, as the caller says.
                unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), buffer.cast(), message.len()) };
            }
            Ok(received.len as isize)
        })
    })
}

/// A descriptor that is readable when something may have come, or −1.
#[unsafe(no_mangle)]
pub extern "C" fn lm_rt_fd(handle: *mut LmRt) -> c_int {
    call(-1, || with(handle, |socket| Ok(socket.fd())))
}

/// Writes what the socket has done; 0, or −1.
///
/// # Safety
///
/// `told` is NULL, or a `struct lm_rt_stats` can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lm_rt_stats(handle: *mut LmRt, told: *mut LmRtStats) -> c_int {
    call(-1, || {
        with(handle, |socket| {
            // SAFETY: as the caller says.
            let size = unsafe { known(told) }?.ok_or(NULL)?;
            let statistics = socket.statistics();
            let (credits_per_second, holds_kernel) = socket.smoothed();
            let times = socket.histograms();
            let stats = LmRtStats {
                size,
                sent: statistics.sent,
                late_unsent: statistics.late_unsent,
                superseded: statistics.superseded,
                beyond_rate: statistics.beyond_rate,
                reported_whole: statistics.reported_whole.into(),
                reported_lost: statistics.reported_lost.into(),
                reported_refused: statistics.reported_refused.into(),
                received: statistics.whole,
                lost: statistics.lost,
                late: statistics.late,
                missed: statistics.missed,
                overtaken: statistics.overtaken,
                no_block: statistics.no_block,
                superseded_here: statistics.superseded_here,
                refused_packets: statistics.refused_packets,
                refused_reports: statistics.refused_reports,
                credits_per_second: credits_per_second.unwrap_or(0).into(),
                holds_kernel: holds_kernel.into(),
                latency_ns: times.latency.percentiles(),
                jitter_ns: times.jitter.percentiles(),
                delay_ns: times.delay.percentiles(),
                late_ns: times.late.percentiles(),
                missed_ns: times.missed.percentiles(),
                superseded_ns: times.superseded.percentiles(),
                lost_in_a_row: times.lost.percentiles(),
            };
            // SAFETY: there is room for it, as the caller says.
            unsafe { told.write(stats) };
            Ok(0)
        })
    })
}

/// Closes a socket; 0, or −1.
#[unsafe(no_mangle)]
pub extern "C" fn lm_rt_socket_close(handle: *mut LmRt) -> c_int {
    call(-1, || table::close(handle.addr()).map(|()| 0))
}

/// Why this thread's last call failed.
#[unsafe(no_mangle)]
pub extern "C" fn lm_rt_error() -> *const c_char {
    let said = WHY.try_with(|why| {
        let (failure, copy) = &mut *why.borrow_mut();
        // An error's words have no zero inside.
        let new = CString::new(failure.why.as_bytes()).unwrap_or_default();
        copy.insert(new).as_ptr()
    });
    said.unwrap_or(c"this thread is ending".as_ptr())
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::path::Path;
    use std::process::Command;

    use super::*;

    const HEADER: &str = include_str!("../lm_rt.h");

    /// What the header's structures and constants are in C.
    fn in_c(members: &[(&str, &str, usize)]) -> Vec<usize> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = std::env::temp_dir().join(format!("lm-rt-layout-{}", std::process::id()));
        let source = program.with_extension("c");
        let prints = members.iter().map(|(of, member, _)| match *member {
            "" => format!("printf(\"%zu\\n\", (size_t)({of}));"),
            "sizeof" => format!("printf(\"%zu\\n\", sizeof(struct {of}));"),
            member => format!("printf(\"%zu\\n\", offsetof(struct {of}, {member}));"),
        });
        let prints: String = prints.collect();
        let text =
            format!("#include <stdio.h>\n#include <lm_rt.h>\nint main(void) {{ {prints} return 0; }}\n");
        std::fs::write(&source, text).unwrap();
        let compiled = Command::new("cc")
            .arg("-I")
            .arg(folder)
            .arg(&source)
            .arg("-o")
            .arg(&program)
            .status();
        assert!(compiled.unwrap().success());
        let output = Command::new(&program).output().unwrap();
        for file in [&source, &program] {
            std::fs::remove_file(file).unwrap();
        }
        let said = String::from_utf8(output.stdout).unwrap();
        said.lines().map(|line| line.parse().unwrap()).collect()
    }

    macro_rules! layout {
        ($($name:literal $of:ident { $($member:ident)* })*) => {
            vec![$(
                ($name, "sizeof", size_of::<$of>()),
                $(($name, stringify!($member), offset_of!($of, $member)),)*
            )*]
        };
    }

    #[test]
    fn the_header_has_the_structures_and_constants_that_the_library_has() {
        let mut expected = layout! {
            "lm_rt_config" LmRtConfig {
                size interface allow link_bits_per_second period_ns keep
                frames blocks_of_1 blocks_of_4 blocks_of_8 blocks_of_16 packets_per_second
                port number flags
            }
            "lm_rt_options" LmRtOptions { size deadline_ns priority flags }
            "lm_rt_info" LmRtInfo { size from sent_ns received_ns delay_ns len number lost priority late }
            "lm_rt_percentiles" Percentiles { count p50 p99 p999 max }
            "lm_rt_stats" LmRtStats {
                size sent late_unsent superseded beyond_rate reported_whole reported_lost reported_refused received lost
                late missed overtaken no_block
                superseded_here refused_packets refused_reports credits_per_second holds_kernel
                latency_ns jitter_ns delay_ns late_ns missed_ns superseded_ns lost_in_a_row
            }
        };
        let defaults = SocketConfig::default();
        expected.extend([
            ("LM_RT_DELIVER_LATE", "", DELIVER_LATE as usize),
            ("LM_RT_SAME_HOST", "", SAME_HOST as usize),
            ("LM_RT_REPLACE_QDISC", "", REPLACE_QDISC as usize),
            ("LM_RT_ABSTIME", "", ABSTIME as usize),
            ("LM_RT_PORT", "", lm_dataplane::DEFAULT_PORT.into()),
            ("LM_RT_MESSAGE_MAX(16)", "", 65_436),
            ("lm_rt_defaults(NULL).keep", "", defaults.keep),
            ("lm_rt_defaults(NULL).frames", "", defaults.frames as usize),
            ("lm_rt_defaults(NULL).blocks_of_1", "", defaults.keep + 2),
            ("lm_rt_defaults(NULL).port", "", lm_dataplane::DEFAULT_PORT.into()),
        ]);
        let found = in_c(&expected);
        assert_eq!(found.len(), expected.len());
        for ((of, member, here), there) in expected.iter().zip(found) {
            assert_eq!(*here, there, "{of} {member}");
        }
        // Every member is looked at.
        let members = HEADER
            .lines()
            .skip_while(|line| !line.starts_with("struct lm_rt_config"));
        let members = members.filter(|line| {
            line.starts_with("    ") && line.split("/*").next().unwrap().trim().ends_with(';')
        });
        let looked_at = expected
            .iter()
            .filter(|(_, member, _)| !matches!(*member, "" | "sizeof"));
        // Two lines are the body of lm_rt_defaults, one is the end of a prototype.
        assert_eq!(members.count() - 3, looked_at.count());
    }

    #[test]
    fn the_manual_names_every_function_and_the_package_has_the_version() {
        let manual = include_str!("../lm_rt.3");
        let names = HEADER.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        let functions: std::collections::BTreeSet<&str> = names
            .filter(|name| name.starts_with("lm_rt_") && HEADER.contains(&format!("{name}(")))
            .collect();
        assert_eq!(functions.len(), 10, "{functions:?}");
        for function in functions {
            assert!(manual.contains(&format!("{function}(")), "{function}");
        }
        let version = format!("\nVersion: {}\n", env!("CARGO_PKG_VERSION"));
        assert!(include_str!("../lm_rt.pc").contains(&version));
    }

    #[test]
    fn networks_are_addresses_with_and_without_a_length() {
        let all = |text: &str| networks(text).map(|all| format!("{all:?}"));
        assert_eq!(
            all("10.0.0.0/8, 192.0.2.7").as_deref(),
            Some("[(10.0.0.0, 8), (192.0.2.7, 32)]")
        );
        for bad in [
            "",
            "/8",
            "10.0.0.0/33",
            "10.0.0.0/",
            "10.0.0.0/8,",
            "10.0.0.0/-1",
            "a",
        ] {
            assert_eq!(all(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_panic_does_not_cross_the_border() {
        assert_eq!(call(-1, || -> Result<i32, Failure> { panic!("a defect") }), -1);
        // SAFETY: the thread's errno; the text was just made, and ends with a zero.
        let (errno, why) = unsafe { (*libc::__errno_location(), CStr::from_ptr(lm_rt_error())) };
        assert_eq!(errno, libc::EIO);
        assert!(why.to_str().unwrap().contains("defect"));
    }
}
