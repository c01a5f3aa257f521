//! A file that a tool such as logrotate may rename while this program writes it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use virtio_devices::create_file;

use crate::landlock;

/// A regular file by its path, and the file that was found there last.
#[derive(Debug)]
pub(crate) struct Rotated {
    path: PathBuf,
    /// Device and inode of the open file.
    id: (u64, u64),
}

impl Rotated {
    /// Takes `file`, which was opened at `path`. `None` if it is not a regular file: pipes and terminals are not
    /// rotated.
    pub(super) fn new(path: &Path, file: &File) -> Option<Self> {
        let found = file.metadata().ok().filter(fs::Metadata::is_file)?;
        Some(Self { path: path.to_owned(), id: (found.dev(), found.ino()) })
    }

    /// Opens or creates the file at the path. `None` if the path still names the open file.
    ///
    /// # Errors
    ///
    /// Fails with one line if it cannot be opened. The open file stays in use.
    pub(super) fn reopen(&mut self) -> Result<Option<File>, String> {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.id) {
            return Ok(None);
        }
        let file = create_file(&self.path, false, OFlags::NONBLOCK).map_err(|error| self.failed(&error))?;
        let found = file.metadata().map_err(|error| self.failed(&error))?;
        self.id = (found.dev(), found.ino());
        Ok(Some(file))
    }

    fn failed(&self, error: &io::Error) -> String {
        let path = self.path.display();
        let remedy = if error.kind() == io::ErrorKind::PermissionDenied && landlock::is_entered() {
            "Landlock keeps the VM from new files: rotate with copytruncate"
        } else {
            "correct that, and send SIGHUP again"
        };
        format!("{path}: cannot be opened again: {error}; the renamed file is still written; {remedy}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path) -> (File, Rotated) {
        let file = create_file(path, false, OFlags::NONBLOCK).unwrap();
        let rotated = Rotated::new(path, &file).unwrap();
        (file, rotated)
    }

    #[test]
    fn a_renamed_file_is_opened_again_and_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let (_file, mut rotated) = open(&path);
        assert!(rotated.reopen().unwrap().is_none());
        fs::rename(&path, folder.path().join("log.1")).unwrap();
        // It stays open, as a log does: another file cannot have its inode.
        let file = rotated.reopen().unwrap();
        assert!(file.is_some());
        assert!(path.exists() && rotated.reopen().unwrap().is_none());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let line = rotated.reopen().unwrap_err();
        assert!(line.contains("log: cannot be opened again: ") && !line.contains('\n'), "{line}");
    }

    #[test]
    fn only_regular_files_are_rotated() {
        let null = File::options().write(true).open("/dev/null").unwrap();
        assert!(Rotated::new(Path::new("/dev/null"), &null).is_none());
    }
}
