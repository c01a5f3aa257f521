//! Reasons why a process cannot be confined, and accesses that its confinement does not allow.

use std::io;
use std::path::PathBuf;

use landlock::RulesetError;

use crate::error_kind::ErrorKind;

/// Reason why this process cannot be confined, or access that its confinement does not allow, in one line.
#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    /// The kernel lacks Landlock.
    #[error(
        "--landlock: the host's kernel has no Landlock, or an old one; boot Linux 6.2 or later with landlock in its \
         list of security modules (lsm=), or leave --landlock out"
    )]
    Unsupported,
    /// A file that the configuration names cannot be inspected.
    #[error("{option}: {}: {error}; with --landlock, it must be there when the VM is created", path.display())]
    File {
        /// The option that names it.
        option: String,
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// A file that this process may not use.
    #[error(
        "{option}: --landlock keeps this program from {}; create the VM with --landlock-rules path={},access={access}, \
         in a new process",
        path.display(), path.display()
    )]
    Beyond {
        /// The option that names it.
        option: String,
        /// The file.
        path: PathBuf,
        /// Access that is needed: `r`, `w` or `rw`.
        access: &'static str,
    },
    /// The kernel refused.
    #[error("--landlock: the kernel refuses the rules: {0}")]
    Refused(#[from] RulesetError),
    /// The rules' files cannot be kept open.
    #[error("--landlock: the rules cannot be kept: {0}")]
    Host(#[from] io::Error),
}

impl LandlockError {
    /// The kind of this error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::File { .. } => ErrorKind::Invalid,
            Self::Beyond { .. } => ErrorKind::Conflict,
            Self::Unsupported | Self::Refused(_) | Self::Host(_) => ErrorKind::Host,
        }
    }
}
