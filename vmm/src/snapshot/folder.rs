//! The folder of a snapshot: all of its files, or none.
//!
//! Each file is written under a name of its own, flushed, and renamed when all are complete; `state.json` is the last.
//! Who finds that has found a whole snapshot, whatever happened to the host meanwhile.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};

use super::error::SnapshotError;
use crate::lazy_memory::memory_image::SnapshotId;

/// The VM's configuration.
pub(crate) const CONFIG: &str = "config.json";
/// The guest's memory.
pub(crate) const MEMORY: &str = "memory-ranges";
/// Everything else. It is there only if all others are.
pub(crate) const STATE: &str = "state.json";

/// The path of the folder that `url` names, relative to the current one unless it is absolute. An absolute path alone
/// is accepted, too.
///
/// # Errors
///
/// It is not the URL of a local folder.
pub(crate) fn path_of(key: &'static str, url: &str) -> Result<PathBuf, SnapshotError> {
    match url.strip_prefix("file://") {
        Some(path) if !path.is_empty() => return Ok(path.into()),
        None if Path::new(url).is_absolute() => return Ok(url.into()),
        _ => {}
    }
    // An error is one line, and a URL may be anything.
    let url = url.chars().filter(|c| !c.is_control()).take(200).collect();
    Err(SnapshotError::Url { key, url })
}

/// A snapshot that is being written. What there is of it is removed when this is dropped before [`Self::publish`].
pub(crate) struct NewSnapshot {
    folder: OwnedFd,
    path: PathBuf,
    /// Prefix of temporary names.
    prefix: String,
    /// Names of files that are to be removed.
    made: Vec<String>,
}

impl NewSnapshot {
    /// Begins a snapshot in the folder at `path`.
    ///
    /// # Errors
    ///
    /// There is no such folder, or it has a snapshot.
    pub(crate) fn begin(path: &Path, id: &SnapshotId) -> Result<Self, SnapshotError> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| SnapshotError::Folder { path: path.to_path_buf(), error: error.into() })?;
        let prefix = format!(".{}-", hex(id));
        let snapshot = Self { folder, path: path.to_path_buf(), prefix, made: Vec::new() };
        for name in [STATE, CONFIG, MEMORY] {
            if rustix::fs::statat(&snapshot.folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                return Err(SnapshotError::Exists(path.join(name)));
            }
        }
        Ok(snapshot)
    }

    /// Makes the file `name`, which only this user can read.
    ///
    /// # Errors
    ///
    /// The folder is gone, or cannot be written to.
    pub(crate) fn create(&mut self, name: &str) -> Result<File, SnapshotError> {
        let temporary = self.temporary(name);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&self.folder, &temporary, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| self.write_error(name, error.into()))?;
        self.made.push(temporary);
        Ok(file.into())
    }

    /// The error that the file `name` cannot be written.
    pub(crate) fn write_error(&self, name: &str, error: io::Error) -> SnapshotError {
        match error.kind() {
            io::ErrorKind::Interrupted => SnapshotError::Abandoned,
            _ => SnapshotError::Write { path: self.path.join(name), error },
        }
    }

    /// Gives the files, which are complete and on the disk, their names.
    ///
    /// # Errors
    ///
    /// Another snapshot has been put there, or the folder is gone. Nothing is left of this one then.
    pub(crate) fn publish(mut self) -> Result<(), SnapshotError> {
        for name in [MEMORY, CONFIG, STATE] {
            if name == STATE {
                // The others have their names before.
                self.flush()?;
            }
            if self.made.contains(&self.temporary(name)) {
                self.rename(name)?;
            }
        }
        self.flush()?;
        self.made.clear();
        Ok(())
    }

    /// The name of the file `name` until it is complete.
    fn temporary(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn flush(&self) -> Result<(), SnapshotError> {
        rustix::fs::fsync(&self.folder).map_err(|error| self.write_error("", error.into()))
    }

    fn rename(&mut self, name: &str) -> Result<(), SnapshotError> {
        let temporary = self.temporary(name);
        let folder = &self.folder;
        let renamed = match rustix::fs::renameat_with(folder, &temporary, folder, name, RenameFlags::NOREPLACE) {
            // A file system that cannot do it in one step.
            Err(rustix::io::Errno::INVAL) => match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => Err(rustix::io::Errno::EXIST),
                Err(_) => rustix::fs::renameat(folder, &temporary, folder, name),
            },
            renamed => renamed,
        };
        match renamed {
            Ok(()) => {
                self.made.retain(|made| *made != temporary);
                self.made.push(name.to_string());
                Ok(())
            }
            Err(rustix::io::Errno::EXIST) => Err(SnapshotError::Exists(self.path.join(name))),
            Err(error) => Err(self.write_error(name, error.into())),
        }
    }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        // The one that says that all is there goes first.
        for name in self.made.iter().rev() {
            let _ = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty());
        }
    }
}

/// As hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn write(snapshot: &mut NewSnapshot) {
        for name in [MEMORY, CONFIG, STATE] {
            snapshot.create(name).unwrap().write_all(name.as_bytes()).unwrap();
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn all_files_appear_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let mut dropped = NewSnapshot::begin(folder.path(), &[1; 16]).unwrap();
        write(&mut dropped);
        assert_eq!(names(folder.path()).len(), 3);
        drop(dropped);
        assert!(names(folder.path()).is_empty());
        let mut snapshot = NewSnapshot::begin(folder.path(), &[2; 16]).unwrap();
        write(&mut snapshot);
        snapshot.publish().unwrap();
        assert_eq!(names(folder.path()), [CONFIG, MEMORY, STATE]);
        let mode = fs::metadata(folder.path().join(STATE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let refused = NewSnapshot::begin(folder.path(), &[3; 16]).err().unwrap();
        assert!(matches!(refused, SnapshotError::Exists(_)), "{refused}");
    }

    #[test]
    fn of_two_snapshots_at_the_same_time_one_wins_and_the_other_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let [mut first, mut second] = [[1; 16], [2; 16]].map(|id| NewSnapshot::begin(folder.path(), &id).unwrap());
        write(&mut first);
        write(&mut second);
        first.publish().unwrap();
        assert!(matches!(second.publish().unwrap_err(), SnapshotError::Exists(_)));
        assert_eq!(names(folder.path()), [CONFIG, MEMORY, STATE]);
    }

    #[test]
    fn a_folder_that_is_missing_or_goes_away_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_path_buf();
        let mut snapshot = NewSnapshot::begin(&path, &[1; 16]).unwrap();
        drop(folder);
        assert!(matches!(snapshot.create(STATE).unwrap_err(), SnapshotError::Write { .. }));
        let folder = tempfile::tempdir().unwrap();
        let mut snapshot = NewSnapshot::begin(folder.path(), &[1; 16]).unwrap();
        write(&mut snapshot);
        fs::remove_dir_all(folder.path()).unwrap();
        assert!(matches!(snapshot.publish().unwrap_err(), SnapshotError::Write { .. }));
        let missing = NewSnapshot::begin(&path, &[1; 16]).err().unwrap();
        assert_eq!(missing.kind(), crate::ErrorKind::NotFound);
    }

    #[test]
    fn a_url_is_of_a_local_folder() {
        for good in ["file:///a/b", "/a/b"] {
            assert_eq!(path_of("source_url", good).unwrap(), Path::new("/a/b"));
        }
        for (relative, path) in [("file://./snap", "./snap"), ("file://a", "a"), ("file://../a/b", "../a/b")] {
            assert_eq!(path_of("source_url", relative).unwrap(), Path::new(path));
        }
        for bad in ["", "a", "./a", "file://", "http://a/b", "tcp:1"] {
            assert!(path_of("source_url", bad).is_err(), "{bad}");
        }
    }
}
