//! The cluster's key in a file: 32 random bytes as 64 hexadecimal digits, for the daemon's eyes only.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use lm_protocol::admission::ClusterKey;

/// Longest key file, in bytes.
const FILE_LEN_MAX: u64 = 4096;

/// Reads a key file, which must be root's, this user's, or that of `user`, whom the daemon becomes.
///
/// # Errors
/// One line with the remedy: it is missing, others may read or change it, it is no key.
pub fn read(path: &Path, user: Option<u32>) -> Result<Vec<u8>, String> {
    let name = path.display();
    let mut file = File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => format!(
            "there is no key file {name}: make one with `lm-admissiond keygen {name}`, and copy it to all hosts of \
             the cluster"
        ),
        _ => format!("cannot read the key file {name}: {error}"),
    })?;
    let metadata = file
        .metadata()
        .map_err(|error| format!("cannot read the key file {name}: {error}"))?;
    if !metadata.is_file() {
        return Err(format!("the key file {name} is no file"));
    }
    let (owner, own) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner != 0 && owner != own && Some(owner) != user {
        return Err(format!(
            "the key file {name} belongs to user {owner}, who can change it: chown {own} {name}"
        ));
    }
    let mode = metadata.mode();
    if mode & 0o077 != 0 {
        return Err(format!(
            "the key file {name} can be read or written by others (mode {:04o}): chmod 600 {name}",
            mode & 0o7777
        ));
    }
    let mut text = String::new();
    if let Err(error) = (&mut file).take(FILE_LEN_MAX + 1).read_to_string(&mut text) {
        return Err(format!(
            "the key file {name} is no key ({error}): `lm-admissiond keygen` writes one"
        ));
    }
    from_hex(text.trim()).ok_or_else(|| {
        format!("the key file {name} has something else than hexadecimal digits: `lm-admissiond keygen` writes one")
    })
}

/// The key that these bytes of a key file are.
///
/// # Errors
/// One line with the remedy: they are too few.
pub fn of_bytes(path: &Path, bytes: &[u8]) -> Result<ClusterKey, String> {
    ClusterKey::new(bytes).map_err(|error| {
        let name = path.display();
        format!("the key file {name} is too short: {error}; `lm-admissiond keygen` writes one")
    })
}

/// Makes a key, in a new file that its owner alone may read.
///
/// # Errors
/// One line: the file is there already, or cannot be written.
pub fn generate(path: &Path) -> Result<(), String> {
    let name = path.display();
    let digits = random::<32>()?.map(|byte| format!("{byte:02x}"));
    let text = digits.concat() + "\n";
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => {
                format!("{name} is there already: remove it first, if no host needs that key any more")
            }
            _ => format!("cannot write {name}: {error}"),
        })?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(|error| format!("cannot write {name}: {error}"))
}

/// Random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(format!("the kernel gives no random numbers: {error}")),
        }
    }
    Ok(bytes)
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u32>> = text.chars().map(|digit| digit.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(
        digits
            .chunks_exact(2)
            .map(|pair| (pair[0] << 4 | pair[1]) as u8)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_generated_key_can_be_read_and_bad_ones_are_told() {
        let directory = std::env::temp_dir().join(format!("lm-admissiond-key-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("key");
        let read = |path: &Path| read(path, None).and_then(|bytes| of_bytes(path, &bytes));
        assert!(read(&path).unwrap_err().contains("keygen"));
        generate(&path).unwrap();
        read(&path).unwrap();
        assert!(generate(&path).unwrap_err().contains("already"));

        let mode = |bits| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(bits)).unwrap();
        mode(0o640);
        assert!(read(&path).unwrap_err().contains("chmod 600"));
        mode(0o600);
        for (text, told) in [
            ("00112233", "too short"),
            ("", "too short"),
            ("correct horse battery staple", "hexadecimal"),
            ("123", "hexadecimal"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err();
            assert!(error.contains(told) && !error.contains('\n'), "{error}");
        }
        std::fs::write(&path, [0xff; 40]).unwrap();
        assert!(read(&path).unwrap_err().contains("no key"));
        assert!(read(&directory).unwrap_err().contains("no file"));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
