//! Files that a tool writes beside its work: captures, histograms, results, pages. One rule for all of them: what is written is a
//! new file of that name, never what a link of that name leads to.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::cli::Failure;
use crate::output::describe;

/// Creates the file. One that is there stays as it is, unless `force` is set: then the new one takes its name. An empty one of this
/// user's, as a run leaves that failed, is as good as none. FIFOs and character devices are written into.
///
/// # Errors
/// A line that names the file.
pub fn create(path: &Path, force: bool) -> Result<File, Failure> {
    open(path, force).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Failure::new(format!(
            "{} exists; choose another or add --force to replace it",
            path.display()
        )),
        _ => cannot_write(path, &error),
    })
}

/// Why a file could not be written.
#[must_use]
pub fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!(
        "cannot write {}: {}; choose another file",
        path.display(),
        describe(error)
    ))
}

/// The same, with the system's error.
pub(crate) fn open(path: &Path, force: bool) -> io::Result<File> {
    if let Ok(there) = fs::symlink_metadata(path) {
        let kind = there.file_type();
        if kind.is_fifo() || kind.is_char_device() {
            return open_device(path);
        }
        let is_our_empty_file =
            kind.is_file() && there.len() == 0 && there.uid() == rustix::process::geteuid().as_raw();
        if force || is_our_empty_file {
            fs::remove_file(path)?;
        }
    }
    OpenOptions::new().write(true).create_new(true).open(path)
}

fn open_device(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(path)?;
    // Another file may have taken the name meanwhile.
    match file.metadata()?.is_file() {
        true => Err(io::ErrorKind::AlreadyExists.into()),
        false => Ok(file),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn nothing_is_overwritten_and_no_link_followed() {
        let scratch = Scratch::new("files");
        let [file, link, empty] = ["file", "link", "empty"].map(|name| scratch.path().join(name));
        fs::write(&file, "precious").unwrap();
        fs::write(&empty, "").unwrap();
        symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            let error = create(path, false).unwrap_err();
            assert!(
                error.text.contains("exists; ") && error.text.contains("--force"),
                "{error}"
            );
        }
        create(&empty, false).unwrap().write_all(b"new").unwrap();
        assert_eq!(fs::read(&empty).unwrap(), b"new");
        create(&link, true).unwrap().write_all(b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_file());
        assert_eq!(fs::read(&file).unwrap(), b"precious");
        create(&file, true).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"");
        create(Path::new("/dev/null"), true).unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        assert!(
            create(Path::new("/nowhere/x"), false)
                .unwrap_err()
                .text
                .contains("cannot write /nowhere/x: ")
        );
    }
}
