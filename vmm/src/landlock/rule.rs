//! Rule: a file, and the accesses that are allowed.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use landlock::{AccessFs, BitFlags, make_bitflags};

use super::error::LandlockError;
use super::host_file::HostFile;

/// Reading a file or a folder, and querying devices.
pub(crate) const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir | IoctlDev});
/// Writing a file, and querying devices.
pub(crate) const WRITE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{WriteFile | Truncate | IoctlDev});
/// Creating sockets in a folder, and removing them.
pub(super) const SOCKETS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{MakeSock | RemoveFile});

/// A file that this process may use, or a folder with all of its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    /// The option that names it.
    pub option: String,
    /// Path of the file or folder.
    pub path: PathBuf,
    /// Accesses that are allowed.
    pub access: BitFlags<AccessFs>,
    /// Action if there is no such file.
    pub missing: Missing,
}

/// Action if a file does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Missing {
    /// It is an error.
    Refuse,
    /// The VM works without it, or reports the error when it opens the file.
    Skip,
    /// It is created. Otherwise its folder would have to be writable.
    Make,
}

impl Rule {
    /// A file that the option `option` names.
    pub(crate) fn new(option: impl Into<String>, path: impl Into<PathBuf>, access: BitFlags<AccessFs>) -> Self {
        Self { option: option.into(), path: path.into(), access, missing: Missing::Refuse }
    }

    /// The rule, to be skipped if the file does not exist.
    pub(crate) fn if_present(self) -> Self {
        Self { missing: Missing::Skip, ..self }
    }

    /// A file of the host that every VM may use.
    pub(super) fn of_host(path: &str, access: BitFlags<AccessFs>) -> Self {
        Self { missing: Missing::Skip, ..Self::new("", path, access) }
    }

    /// The folder in which a socket is created again each time, and removed. A rule for the socket would end with the
    /// socket.
    pub(crate) fn of_socket(option: impl Into<String>, socket: &Path) -> Self {
        let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty());
        Self::new(option, folder.unwrap_or(Path::new(".")), SOCKETS)
    }

    /// True if the VM needs the file.
    pub(super) fn is_needed(&self) -> bool {
        self.missing != Missing::Skip
    }

    /// Creates an empty file if it does not exist and the rule requires it.
    pub(super) fn make(&self) -> Result<(), LandlockError> {
        if self.missing != Missing::Make {
            return Ok(());
        }
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(self.failed(error)),
            _ => Ok(()),
        }
    }

    /// Inspects the file.
    pub(super) fn look(&self) -> Result<HostFile, LandlockError> {
        HostFile::at(&self.path).map_err(|error| self.failed(error))
    }

    /// The error for a file that cannot be inspected.
    pub(super) fn failed(&self, error: io::Error) -> LandlockError {
        LandlockError::File { option: self.option.clone(), path: self.path.clone(), error }
    }

    /// The error for a file that may not be used.
    pub(super) fn beyond(&self) -> LandlockError {
        let reads = self.access.intersects(AccessFs::ReadFile | AccessFs::ReadDir);
        let writes = self.access.intersects(AccessFs::WriteFile | AccessFs::MakeSock);
        let access = match (reads, writes) {
            (true, false) => "r",
            (false, _) => "w",
            (true, true) => "rw",
        };
        LandlockError::Beyond { option: self.option.clone(), path: self.path.clone(), access }
    }
}
