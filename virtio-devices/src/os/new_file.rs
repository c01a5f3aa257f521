//! Files that this program creates.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// System directories whose links name a process's open descriptors, such as `/dev/stdout`. Only the system creates
/// links there.
const DESCRIPTORS: [&str; 3] = ["/dev", "/dev/fd", "/proc/self/fd"];

/// Opens the file at `path` for writing, and also for reading if `read`; a missing one is created. It does not become
/// the controlling terminal.
///
/// Each write appends to the file (`O_APPEND`), and what it contains stays: an earlier start may have written it, and
/// the source of a migration may still do so. A tool that copies a log and truncates it leaves no hole.
///
/// A symbolic link at the end of `path` is not followed, because a user with write access to the directory could make
/// this program write to any file of its user. Links in `/dev` are followed.
///
/// # Errors
///
/// Fails with the system's error, or if `path` is a symbolic link.
pub fn create_file(path: &Path, read: bool, flags: OFlags) -> io::Result<File> {
    let follows = path.parent().is_some_and(|folder| DESCRIPTORS.iter().any(|known| folder == Path::new(known)));
    let no_follow = if follows { OFlags::empty() } else { OFlags::NOFOLLOW };
    let flags = i32::try_from((flags | no_follow | OFlags::NOCTTY | OFlags::APPEND).bits()).unwrap_or_default();
    let mut options = OpenOptions::new();
    options.read(read).write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
    options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::other("it is a symbolic link, and links are not followed; name the file"),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn file_is_created_or_kept_but_symlinks_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link, dangling] = ["file", "link", "dangling"].map(|name| folder.path().join(name));
        create_file(&file, false, OFlags::empty()).unwrap();
        std::fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::os::unix::fs::symlink(folder.path().join("new"), &dangling).unwrap();
        for link in [link, dangling] {
            let error = create_file(&link, false, OFlags::empty()).unwrap_err().to_string();
            assert!(error.starts_with("it is a symbolic link"), "{error}");
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"old");
        assert!(!folder.path().join("new").exists());
        create_file(&file, false, OFlags::empty()).unwrap().write_all(b" new").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"old new");
    }

    #[test]
    fn output_after_a_truncation_begins_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut file = create_file(&path, false, OFlags::NONBLOCK).unwrap();
        file.write_all(b"first\n").unwrap();
        OpenOptions::new().write(true).truncate(true).open(&path).unwrap();
        file.write_all(b"second\n").unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"of another\n").unwrap();
        file.write_all(b"third\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "second\nof another\nthird\n");
    }

    #[test]
    fn an_open_file_can_be_named_by_the_systems_links() {
        let (near, _far) = rustix::pipe::pipe().unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&_far);
        for folder in ["/dev/fd", "/proc/self/fd"] {
            create_file(&Path::new(folder).join(number.to_string()), false, OFlags::NONBLOCK).unwrap();
        }
        drop(near);
    }
}
