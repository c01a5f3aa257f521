//! Folder of a snapshot, which has all of its files or none.
//!
//! Files are written under temporary names, flushed, and renamed when all are complete, `state.json` last. So a folder
//! with that file has a complete snapshot, even after a crash of the host.

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
/// All other state. Exists only if all other files do.
pub(crate) const STATE: &str = "state.json";

/// Returns the path of the folder that `url` names, relative to the current folder unless absolute. Also accepts an
/// absolute path.
///
/// # Errors
///
/// Fails if `url` does not name a local folder.
pub(crate) fn path_of(key: &'static str, url: &str) -> Result<PathBuf, SnapshotError> {
    match url.strip_prefix("file://") {
        Some(path) if !path.is_empty() => return Ok(path.into()),
        None if Path::new(url).is_absolute() => return Ok(url.into()),
        _ => {}
    }
    // An error is one line, and a URL may have any bytes.
    let url = url.chars().filter(|c| !c.is_control()).take(200).collect();
    Err(SnapshotError::Url { key, url })
}

/// A snapshot being written. Dropping it before [`Self::publish`] removes its files.
pub(crate) struct NewSnapshot {
    folder: OwnedFd,
    path: PathBuf,
    /// Prefix of temporary names.
    prefix: String,
    /// Names of the files to remove.
    made: Vec<String>,
}

impl NewSnapshot {
    /// Starts a snapshot in the folder at `path`.
    ///
    /// # Errors
    ///
    /// Fails if the folder does not exist, or has a snapshot.
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

    /// Creates the file `name`, readable only by this user.
    ///
    /// # Errors
    ///
    /// Fails if the folder is gone or not writable.
    pub(crate) fn create(&mut self, name: &str) -> Result<File, SnapshotError> {
        let temporary = self.temporary(name);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&self.folder, &temporary, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| self.write_error(name, error.into()))?;
        self.made.push(temporary);
        Ok(file.into())
    }

    /// Error for a file `name` that cannot be written.
    pub(crate) fn write_error(&self, name: &str, error: io::Error) -> SnapshotError {
        match error.kind() {
            io::ErrorKind::Interrupted => SnapshotError::Abandoned,
            _ => SnapshotError::Write { path: self.path.join(name), error },
        }
    }

    /// Renames the files, which must be complete and flushed, to their final names.
    ///
    /// # Errors
    ///
    /// Fails if another snapshot exists now, or the folder is gone. All files of this snapshot are removed then.
    pub(crate) fn publish(mut self) -> Result<(), SnapshotError> {
        for name in [MEMORY, CONFIG, STATE] {
            if name == STATE {
                // The other names must be on the disk first.
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

    /// Temporary name of the file `name`.
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
            // The file system does not support RENAME_NOREPLACE.
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
        // `state.json`, which marks a complete snapshot, is removed first.
        for name in self.made.iter().rev() {
            let _ = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty());
        }
    }
}

/// Converts bytes to hexadecimal digits.
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
    fn second_of_two_concurrent_snapshots_fails_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let [mut first, mut second] = [[1; 16], [2; 16]].map(|id| NewSnapshot::begin(folder.path(), &id).unwrap());
        write(&mut first);
        write(&mut second);
        first.publish().unwrap();
        assert!(matches!(second.publish().unwrap_err(), SnapshotError::Exists(_)));
        assert_eq!(names(folder.path()), [CONFIG, MEMORY, STATE]);
    }

    #[test]
    fn a_folder_that_is_missing_or_removed_is_an_error() {
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
