//! Reasons why a request has no result.

use std::io;
use std::path::PathBuf;

use vm_api::channel::Refusal;

/// Reason why a request has no result. Each is one line for people.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The guest has no such port.
    #[error(
        "this guest has no channel ({port}): its host gives it one with --net guest_control=, and the guest needs the \
         module virtio_console"
    )]
    NoChannel {
        /// Name of the port.
        port: &'static str,
    },
    /// The guest has the port, and its device node is missing, as in a container.
    #[error(
        "{}: the node of the channel is missing; run this where /dev is the guest's own, not in a container",
        .0.display()
    )]
    NoNode(PathBuf),
    /// Another program has the port, or its lock, until the time limit.
    #[error("{}: another program uses the channel; try again", .0.display())]
    Busy(PathBuf),
    /// The user may not open the port.
    #[error("{}: no permission; run this as root", .0.display())]
    NoPermission(PathBuf),
    /// The VMM did not answer within the time limit.
    #[error("the host did not answer within {seconds} s; try again, and if that fails, look at the VMM's log")]
    NoAnswer {
        /// The time limit in seconds.
        seconds: f64,
    },
    /// The VMM refused the request. Nothing has changed.
    #[error("{}", .0.message)]
    Refused(Refusal),
    /// The answer is not one of this version of the protocol.
    #[error("the host's answer is not as expected: {0}; vfctl and the VMM may be of different versions")]
    Unexpected(String),
    /// The port or its lock cannot be used for another reason.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        error: io::Error,
    },
}
