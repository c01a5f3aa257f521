//! The kind of an error: the party that must act.

/// Class of an error, by the party that must act on it. Determines the exit code and the HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The user gave a value that no device can have.
    Invalid,
    /// The user named a file, socket or device that does not exist.
    Missing,
    /// The user named a file, socket or device that exists but is not suitable.
    Unsuitable,
    /// Another program or device uses the named resource.
    Busy,
    /// This process lacks a permission that the host's administrator can grant.
    Denied,
    /// The program or device at the other end fails, hangs or breaks its protocol.
    Peer,
    /// The host lacks a resource: a module, memory, file descriptors.
    Host,
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;

    use super::*;
    use crate::{CharError, RngError, TapError, VdpaError, VdpaFault, VhostNetError, VhostUserError};

    #[test]
    fn a_user_an_administrator_and_the_other_end_are_told_apart() {
        assert_eq!(TapError::InUse("t".into()).kind(), ErrorKind::Busy);
        assert_eq!(TapError::NotOurs("t".into()).kind(), ErrorKind::Denied);
        assert_eq!(VhostUserError::Refused("s".into()).kind(), ErrorKind::Missing);
        assert_eq!(VhostNetError::Missing.kind(), ErrorKind::Host);
        assert_eq!(VdpaError { path: PathBuf::new(), fault: VdpaFault::Silent }.kind(), ErrorKind::Peer);
    }

    #[test]
    fn the_systems_error_of_a_path_decides_the_kind() {
        let open = |kind: io::ErrorKind| RngError::Open { path: PathBuf::new(), error: kind.into() }.kind();
        assert_eq!(open(io::ErrorKind::NotFound), ErrorKind::Missing);
        assert_eq!(open(io::ErrorKind::PermissionDenied), ErrorKind::Unsuitable);
        let file = |kind: io::ErrorKind| CharError::File { path: PathBuf::new(), error: kind.into() }.kind();
        assert_eq!(file(io::ErrorKind::PermissionDenied), ErrorKind::Denied);
        assert_eq!(file(io::ErrorKind::NotFound), ErrorKind::Host);
    }
}
