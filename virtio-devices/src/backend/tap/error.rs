use std::io;

use thiserror::Error;

use super::InterfaceNameError;

/// Why a tap cannot be used: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum TapError {
    /// The name is too long or has a character that no interface's name may have.
    #[error("{name:?}: {error}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        error: InterfaceNameError,
    },
    /// The number of queues is out of range.
    #[error("{name} cannot have {queues} queues: a tap has 1 to 256, half of num_queues")]
    Queues {
        /// The tap.
        name: String,
        /// The number that was asked for.
        queues: usize,
    },
    /// There is no tun driver.
    #[error("/dev/net/tun does not exist: load the host's tun module (modprobe tun)")]
    NoTunDevice,
    /// The tun driver may not be used.
    #[error("no right to open /dev/net/tun: give this user read and write access to it")]
    NoRightToTunDevice,
    /// The tun driver cannot be opened for another reason.
    #[error("cannot open /dev/net/tun: {0}")]
    TunDevice(#[source] io::Error),
    /// There is no socket to configure interfaces with.
    #[error("cannot open a socket to configure a tap: {0}")]
    Socket(#[source] io::Error),
    /// The tap's queues are another process's.
    #[error("{0} is in use by another process: stop that one, or name another tap")]
    InUse(String),
    /// The tap exists and belongs to another user.
    #[error(
        "no right to use the existing tap {0}: make it this user's (ip tuntap add {0} mode tap user USER), \
         or run with CAP_NET_ADMIN"
    )]
    NotOurs(String),
    /// The tap does not exist.
    #[error(
        "no right to create the tap {0}: create it for this user (ip tuntap add {0} mode tap user USER), \
         or run with CAP_NET_ADMIN"
    )]
    NoRightToCreate(String),
    /// The tap was deleted, and there is no other one of its name.
    #[error("{0} was deleted: create it again (ip tuntap add {0} mode tap user USER)")]
    Gone(String),
    /// The tap is a multi-queue one and one queue was asked for.
    #[error("{0} is a multi-queue tap: add num_queues=4 or more, or create it without multi_queue")]
    IsMultiQueue(String),
    /// The tap is a single-queue one and several were asked for.
    #[error(
        "{0} is a single-queue tap: use num_queues=2, or create it with multi_queue \
         (ip tuntap add {0} mode tap multi_queue)"
    )]
    IsSingleQueue(String),
    /// There is an interface with that name that is something else.
    #[error("{0} exists and is no tap with a virtio header: name another (ip -d link show {0} says what it is)")]
    NotATapInterface(String),
    /// A queue cannot be attached for another reason.
    #[error("cannot open the tap {name}: {source}")]
    Attach {
        /// The tap.
        name: String,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// Something about the interface needed changing, and could not be.
    #[error("cannot set {what} of the tap {name}: {source}{}", remedy(.source))]
    Configure {
        /// The tap.
        name: String,
        /// What was to be set.
        what: &'static str,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// The address and its mask are not of one family, or the mask has holes.
    #[error("{mask} is no mask for {ip}: give one of its family, as 255.255.255.0")]
    Mask {
        /// The address.
        ip: std::net::IpAddr,
        /// The mask.
        mask: std::net::IpAddr,
    },
    /// A request that each queue needs failed.
    #[error("the tap {name} does not work as one: {source}")]
    Request {
        /// The tap.
        name: String,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// A descriptor that was passed in is something else.
    #[error("file descriptor {index} (counted from 0) of fd= is no tap ({source}); pass /dev/net/tun after TUNSETIFF")]
    NotATap {
        /// Its position.
        index: usize,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// A descriptor that was passed in was opened with other flags.
    #[error(
        "the tap {name} was opened with other flags than fd= needs: IFF_TAP, IFF_NO_PI, IFF_VNET_HDR{}",
        if *.multi_queue { " and IFF_MULTI_QUEUE" } else { "" }
    )]
    WrongFlags {
        /// The tap.
        name: String,
        /// Whether several descriptors were passed.
        multi_queue: bool,
    },
    /// The descriptors that were passed in are of different taps.
    #[error("the file descriptors of fd= are of different taps, {first} and {other}: a NIC has one")]
    DifferentTaps {
        /// The first one's tap.
        first: String,
        /// Another.
        other: String,
    },
}

/// What to do when an interface cannot be changed. Without a privilege it can be changed beforehand; what the host does not take
/// from anyone, it says itself.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => "; set it beforehand, or run with CAP_NET_ADMIN",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_privilege_is_the_remedy_only_where_one_is_missing() {
        let line = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            TapError::Configure { name: "t".into(), what: "the MTU", source }.to_string()
        };
        for errno in [libc::EPERM, libc::EACCES] {
            assert!(line(errno).ends_with("; set it beforehand, or run with CAP_NET_ADMIN"), "{}", line(errno));
        }
        assert_eq!(line(libc::EINVAL), "cannot set the MTU of the tap t: Invalid argument (os error 22)");
    }
}
