use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use thiserror::Error;

use super::connection::{Fault, PeerError};
use super::role::VhostUserRole;
use crate::ErrorKind;
use crate::os::unmade_file::why_no_socket;

/// The time limit for a backend to connect when its NIC is plugged in.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The reason why a vhost-user backend cannot be used: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum VhostUserError {
    /// There is no socket of that name.
    #[error("socket={0}: no such file; start the backend first, or give the path of its socket")]
    Missing(String),
    /// There is something else of that name.
    #[error("socket={0}: not a stream socket; give the path of the backend's socket")]
    NotASocket(String),
    /// The path of a listening socket is taken by another kind of file.
    #[error("socket={0}: exists and is not a socket; give another path, or remove it")]
    Occupied(String),
    /// The socket exists, and no program listens on it.
    #[error("socket={0}: nothing is listening there (Connection refused); start the backend first")]
    Refused(String),
    /// Other clients are waiting already.
    #[error(
        "socket={0}: the backend is not accepting connections, and others are waiting; stop them, or start another \
         backend"
    )]
    Busy(String),
    /// This user may not connect to the socket.
    #[error("socket={0}: no permission to use it; give this user write access to it")]
    NoRight(String),
    /// This user may not create the socket.
    #[error("socket={}: {}", .0, why_no_socket(Path::new(.0), &Errno::ACCESS.into()))]
    NoRightToListen(String),
    /// The directory of a listening socket does not exist.
    #[error("socket={}: {}", .0, why_no_socket(Path::new(.0), &Errno::NOENT.into()))]
    NoFolder(String),
    /// Another program listens there.
    #[error("socket={0}: another program is listening there; stop it, name another socket, or use vhost_mode=client")]
    InUse(String),
    /// The wait for the backend was cancelled.
    #[error("socket={0}: the VM ended before the backend was ready")]
    Cancelled(String),
    /// No backend came.
    #[error(
        "socket={path}: no backend connected within {} s; start it in client mode, or use vhost_mode=client if it \
         listens",
        PATIENCE.as_secs()
    )]
    NobodyCame {
        /// The socket's path.
        path: String,
    },
    /// The socket failed.
    #[error("socket={path}: {source}")]
    Socket {
        /// The socket's path.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// The peer breaks the vhost-user protocol, or does not answer.
    #[error("socket={path}: {request}: {reason}; check that a vhost-user backend is listening there and not stuck")]
    Peer {
        /// The socket's path.
        path: String,
        /// The request.
        request: String,
        /// The cause.
        reason: String,
    },
    /// The backend supports legacy virtio only.
    #[error("socket={0}: the backend does not offer VIRTIO_F_VERSION_1, which a virtio 1 device needs")]
    Legacy(String),
    /// The backend has too few queues.
    #[error("socket={path}: the backend has fewer than {}; {}", .role.queues(), fewer(*.role))]
    TooFewQueues {
        /// The socket's path.
        path: String,
        /// The role that was requested.
        role: VhostUserRole,
    },
    /// The backend has no device configuration, and the device needs one.
    #[error(
        "socket={0}: the backend has no device configuration for this type of device; check that it is a backend of \
         that type"
    )]
    NoConfig(String),
    /// Other processes cannot map guest memory.
    #[error("socket={0}: the backend cannot reach guest memory; add --memory shared=on")]
    NotShared(String),
    /// Guest memory is in too many pieces.
    #[error("socket={path}: guest memory has {regions} regions, and the backend takes {most}; give it fewer")]
    TooManyRegions {
        /// The socket's path.
        path: String,
        /// The number of regions.
        regions: usize,
        /// The most that the backend accepts.
        most: usize,
    },
}

impl VhostUserError {
    /// The party that has to act on the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Missing(_) | Self::Refused(_) | Self::NoFolder(_) | Self::NobodyCame { .. } => ErrorKind::Missing,
            Self::NotASocket(_)
            | Self::Occupied(_)
            | Self::Legacy(_)
            | Self::TooFewQueues { .. }
            | Self::NoConfig(_)
            | Self::NotShared(_)
            | Self::TooManyRegions { .. } => ErrorKind::Unsuitable,
            Self::Busy(_) | Self::InUse(_) | Self::Cancelled(_) => ErrorKind::Busy,
            Self::NoRight(_) | Self::NoRightToListen(_) => ErrorKind::Denied,
            Self::Peer { .. } => ErrorKind::Peer,
            Self::Socket { .. } => ErrorKind::Host,
        }
    }

    /// An error of the peer at `path`.
    pub(super) fn of_peer(path: &str, error: PeerError) -> Self {
        let path = path.to_owned();
        match error.fault {
            Fault::System(source) => Self::Socket { path, source },
            Fault::Cancelled => Self::Cancelled(path),
            fault => Self::Peer { path, request: error.request.to_string(), reason: fault.to_string() },
        }
    }
}

/// The remedy if the backend has fewer queues than `role` needs.
fn fewer(role: VhostUserRole) -> String {
    match role {
        VhostUserRole::Nic { queue_pairs: wanted @ 2.. } => {
            format!("give num_queues={} or less, or start it with more", 2 * u32::from(wanted - 1))
        }
        VhostUserRole::Device { queues: 2.., .. } => "give fewer queues, or start it with more".into(),
        VhostUserRole::Nic { .. } | VhostUserRole::Device { .. } => "start it with more".into(),
    }
}
