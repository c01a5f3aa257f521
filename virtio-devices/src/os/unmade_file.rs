//! Reasons why a socket or another file cannot be made, for users.

use std::io::{Error, ErrorKind};
use std::path::Path;

use rustix::io::Errno;

/// The longest path of a Unix socket in bytes: `sun_path` of unix(7), less the zero at its end.
const LONGEST: usize = 107;

/// Returns why no socket can be made at `path`, after `error`, and the remedy: one line, to follow the option's name
/// and the path.
pub fn why_no_socket(path: &Path, error: &Error) -> String {
    match path.as_os_str().len() {
        // Linux has an error for it; the standard library has another one.
        len if len > LONGEST => format!("{len} bytes; a socket's path has at most {LONGEST}, shorten it"),
        _ if error.kind() == ErrorKind::AddrInUse => "it exists already; remove it, or give another path".to_string(),
        _ => why_no_file(path, error),
    }
}

/// Returns why no file can be made at `path`, after `error`, and the remedy, as [`why_no_socket`].
pub fn why_no_file(path: &Path, error: &Error) -> String {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = folder.display();
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) if !folder.exists() => {
            format!("the folder {name} does not exist; make it (mkdir -p), or give another path")
        }
        Some(Errno::NOTDIR) => format!("{name} is not a folder; give another path"),
        Some(Errno::ACCESS | Errno::PERM) => {
            // A file that exists may be another user's.
            let denied = if path.exists() { path } else { folder };
            format!(
                "no permission ({error}); give this user write access to {}, or give another path",
                denied.display()
            )
        }
        Some(Errno::ROFS) => format!("{name} is on a read-only file system; give another path"),
        Some(Errno::NOSPC | Errno::DQUOT) => format!("the disk of {name} is full ({error}); make room there"),
        _ if error.kind() == ErrorKind::InvalidInput => format!("{error}; give another path"),
        _ => format!("cannot be made: {error}; give another path"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_of_a_missing_file_has_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().display();
        let why = |path: &str, errno: Errno| why_no_socket(&folder.path().join(path), &errno.into());
        let missing = format!("the folder {name}/no does not exist; make it (mkdir -p), or give another path");
        assert_eq!(why("no/s", Errno::NOENT), missing);
        assert_eq!(why("s", Errno::NOTDIR), format!("{name} is not a folder; give another path"));
        let denied = "no permission (Permission denied (os error 13)); give this user write access to";
        assert_eq!(why("s", Errno::ACCESS), format!("{denied} {name}, or give another path"));
        std::fs::write(folder.path().join("file"), "").unwrap();
        assert_eq!(why("file", Errno::ACCESS), format!("{denied} {name}/file, or give another path"));
        assert_eq!(why("s", Errno::ROFS), format!("{name} is on a read-only file system; give another path"));
        assert_eq!(why("s", Errno::ADDRINUSE), "it exists already; remove it, or give another path");
        assert!(why("s", Errno::NOSPC).contains(" is full ("));
        assert!(why("s", Errno::MFILE).starts_with("cannot be made: "));
        let long = why(&"x".repeat(200), Errno::NAMETOOLONG);
        assert!(long.ends_with(" bytes; a socket's path has at most 107, shorten it"), "{long}");
        assert!(why_no_file(Path::new("s"), &Errno::ROFS.into()).starts_with(". is on"));
    }
}
