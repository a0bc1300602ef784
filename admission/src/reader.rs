//! The files that a reload reads, for a daemon that has become another user.
//!
//! Configuration and key are root's, and closed to others. So a process of its own stays who started it, without a capability: it reads
//! these two when it is asked to, gives nothing else, and ends with the daemon, whose end of the pipe goes then.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::privileges;

/// Makes a daemon's program the reader.
pub(crate) const OPTION: &str = "--reads-for-the-daemon";

/// What the files say.
#[derive(Serialize, Deserialize)]
pub(crate) struct Files {
    /// The configuration, where it is a file.
    pub(crate) config: Option<String>,
    /// The key's bytes.
    pub(crate) key: Vec<u8>,
}

/// The process, seen by the daemon.
#[derive(Debug)]
pub(crate) struct Reader {
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
    _child: Child,
}

impl Reader {
    /// Starts it, with the daemon's own arguments.
    pub(crate) fn start(arguments: &[OsString]) -> Result<Reader, String> {
        let told = |error: std::io::Error| format!("cannot start what reads the files again: {error}");
        let mut child = Command::new("/proc/self/exe")
            .args(arguments)
            .arg(OPTION)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(told)?;
        let (ask, answers) = child
            .stdin
            .take()
            .zip(child.stdout.take())
            .expect("both are piped");
        Ok(Reader {
            ask,
            answers: BufReader::new(answers),
            _child: child,
        })
    }

    /// What the files say now.
    pub(crate) fn read(&mut self) -> Result<Files, String> {
        let mut line = String::new();
        let asked = self.ask.write_all(b"?");
        let read = asked.and_then(|()| self.answers.read_line(&mut line));
        match read {
            Ok(1..) => serde_json::from_str::<Result<Files, String>>(&line)
                .unwrap_or_else(|error| Err(format!("the files came damaged: {error}"))),
            _ => Err("the process that reads the files again is gone: restart the daemon".to_owned()),
        }
    }
}

/// The process itself: reads whenever it is asked, until nobody is there to ask.
pub(crate) fn serve(read: impl Fn() -> Result<Files, String>) -> Result<(), String> {
    privileges::close_ways();
    privileges::keep(&Default::default())?;
    let mut asked = [0];
    while std::io::stdin().read(&mut asked).is_ok_and(|count| count > 0) {
        let mut line = serde_json::to_string(&read()).map_err(|error| error.to_string())?;
        line.push('\n');
        if std::io::stdout().write_all(line.as_bytes()).is_err() {
            break;
        }
    }
    Ok(())
}
