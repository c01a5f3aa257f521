use std::io;

use thiserror::Error;

use super::connection::{Fault, PeerError};
use super::message::MAX_FDS;
use super::socket::VhostUserSocket;

/// Why a vhost-user backend cannot be used: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum VhostUserError {
    /// There is no socket of that name.
    #[error("socket={0}: no such file; start the backend first, or give the path of its socket")]
    Missing(String),
    /// There is something else of that name.
    #[error("socket={0}: not a stream socket; give the path of the backend's socket")]
    NotASocket(String),
    /// There is something else where a socket is to be listened on.
    #[error("socket={0}: there is something that is no socket; give another path, or remove it")]
    Occupied(String),
    /// The socket is there, and its owner is gone.
    #[error("socket={0}: nobody listens there (Connection refused); start the backend first")]
    Refused(String),
    /// Others wait already.
    #[error("socket={0}: the backend does not accept connections, and others wait; end them, or start another backend")]
    Busy(String),
    /// This user may not connect, or not create the socket.
    #[error(
        "socket={0}: no right to use it; give this user write access to it, or to its folder if it is to listen there"
    )]
    NoRight(String),
    /// The path of a socket that is to be listened on has no folder.
    #[error("socket={0}: its folder does not exist; create it")]
    NoFolder(String),
    /// Somebody else listens there.
    #[error("socket={0}: another program listens there; stop it, name another socket, or use vhost_mode=client")]
    InUse(String),
    /// No backend came.
    #[error(
        "socket={path}: no backend connected within {} s; start it in client mode, or use vhost_mode=client if it listens",
        VhostUserSocket::PATIENCE.as_secs()
    )]
    NobodyCame {
        /// The socket's path.
        path: String,
    },
    /// The socket does not work.
    #[error("socket={path}: {source}")]
    Socket {
        /// Its path.
        path: String,
        /// What the system says.
        source: io::Error,
    },
    /// The peer does not do as a vhost-user backend does.
    #[error("socket={path}: {request}: {reason}; is a vhost-user backend there, and not stuck?")]
    Peer {
        /// The socket's path.
        path: String,
        /// What it was asked.
        request: String,
        /// What came of that.
        reason: String,
    },
    /// The backend is one for drivers of before virtio 1.
    #[error("socket={0}: the backend does not offer VIRTIO_F_VERSION_1; it is none for a virtio 1 device")]
    Legacy(String),
    /// The backend has too few queues.
    #[error("socket={path}: the backend has fewer than {}; {}", pairs(*.wanted), fewer(*.wanted))]
    TooFewQueues {
        /// The socket's path.
        path: String,
        /// The pairs that were asked for.
        wanted: u16,
    },
    /// Other processes cannot map guest memory.
    #[error("socket={0}: the backend cannot reach guest memory; add --memory shared=on")]
    NotShared(String),
    /// Guest memory is in too many pieces.
    #[error("socket={path}: guest memory has {regions} regions, and vhost-user takes {MAX_FDS}; give it fewer", MAX_FDS = MAX_FDS)]
    TooManyRegions {
        /// The socket's path.
        path: String,
        /// How many there are.
        regions: usize,
    },
}

impl VhostUserError {
    /// An error of the peer at `path`.
    pub(super) fn of_peer(path: &str, error: PeerError) -> Self {
        let path = path.to_owned();
        match error.fault {
            Fault::System(source) => Self::Socket { path, source },
            fault => Self::Peer { path, request: error.request.to_string(), reason: fault.to_string() },
        }
    }
}

fn pairs(wanted: u16) -> String {
    if wanted == 1 { "one pair of queues".into() } else { format!("{wanted} pairs of queues") }
}

/// What to do when the backend has fewer than `wanted` pairs.
fn fewer(wanted: u16) -> String {
    match wanted {
        0 | 1 => "start it with more".into(),
        wanted => format!("give num_queues={} or less, or start it with more", 2 * u32::from(wanted - 1)),
    }
}
