use std::io;

use thiserror::Error;

use super::name::InterfaceNameError;
use crate::ErrorKind;

/// The reason why a tap cannot be used: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum TapError {
    /// The name is too long or has a character that no interface's name may have.
    #[error("{name:?}: {error}")]
    Name {
        /// The name.
        name: String,
        /// The reason.
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
    #[error("/dev/net/tun does not exist; load the host's tun module (modprobe tun)")]
    NoTunDevice,
    /// This user may not open the tun driver.
    #[error(
        "no permission to open /dev/net/tun; pass an open tap (fd=), give a PF a switch (switch=veb), or give this \
         user read and write access to it"
    )]
    NoRightToTunDevice,
    /// The tun driver cannot be opened for another reason.
    #[error("cannot open /dev/net/tun: {0}")]
    TunDevice(#[source] io::Error),
    /// There is no socket to configure interfaces with.
    #[error("cannot open a socket to configure a tap: {0}")]
    Socket(#[source] io::Error),
    /// Another process uses the tap.
    #[error("{0} is in use by another process; stop that one, or name another tap")]
    InUse(String),
    /// The tap exists and belongs to another user.
    #[error(
        "no permission to use the existing tap {0}; make it this user's (ip tuntap add {0} mode tap user USER), \
         or run with CAP_NET_ADMIN"
    )]
    NotOurs(String),
    /// The tap does not exist, and this user may not create it.
    #[error(
        "no permission to create the tap {0}; create it for this user (ip tuntap add {0} mode tap user USER), \
         or run with CAP_NET_ADMIN"
    )]
    NoRightToCreate(String),
    /// The tap was deleted, and no other has its name.
    #[error("{0} was deleted; create it again (ip tuntap add {0} mode tap user USER)")]
    Gone(String),
    /// The tap is multi-queue, and one queue was requested.
    #[error("{0} is a multi-queue tap; add num_queues=4 or more, or create it without multi_queue")]
    IsMultiQueue(String),
    /// The tap is single-queue, and several queues were requested.
    #[error(
        "{0} is a single-queue tap; use num_queues=2, or create it with multi_queue \
         (ip tuntap add {0} mode tap multi_queue)"
    )]
    IsSingleQueue(String),
    /// The interface of that name is not a tap.
    #[error(
        "{0} exists and is not a tap with a virtio header; name another interface (ip -d link show {0} shows what it \
         is)"
    )]
    NotATapInterface(String),
    /// A queue cannot be attached for another reason.
    #[error("cannot open the tap {name}: {source}")]
    Attach {
        /// The tap.
        name: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A setting of the interface could not be changed.
    #[error("cannot set {what} of the tap {name}: {source}{}", remedy(.source))]
    Configure {
        /// The tap.
        name: String,
        /// The setting.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The address and its mask are not of one family, or the mask has holes.
    #[error("{mask} is not a mask for {ip}; give one of the same family, such as 255.255.255.0")]
    Mask {
        /// The address.
        ip: std::net::IpAddr,
        /// The mask.
        mask: std::net::IpAddr,
    },
    /// An ioctl that each queue needs failed.
    #[error("cannot set up the tap {name}: {source}")]
    Request {
        /// The tap.
        name: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A descriptor that was passed in is not a tap.
    #[error(
        "file descriptor {index} (counted from 0) of fd= is not a tap ({source}); pass /dev/net/tun after TUNSETIFF"
    )]
    NotATap {
        /// The position in the list.
        index: usize,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A descriptor that was passed in was opened without all flags that are needed.
    #[error(
        "the tap {name} was opened without all flags that fd= needs: IFF_TAP, IFF_NO_PI, IFF_VNET_HDR{}",
        if *.multi_queue { " and IFF_MULTI_QUEUE" } else { "" }
    )]
    WrongFlags {
        /// The tap.
        name: String,
        /// True if several descriptors were passed.
        multi_queue: bool,
    },
    /// The descriptors that were passed in are of different taps.
    #[error("the file descriptors of fd= belong to different taps, {first} and {other}; a NIC has one tap")]
    DifferentTaps {
        /// The first one's tap.
        first: String,
        /// Another.
        other: String,
    },
}

impl TapError {
    /// The party that has to act on the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Name { .. } | Self::Queues { .. } => ErrorKind::Invalid,
            Self::IsMultiQueue(_)
            | Self::IsSingleQueue(_)
            | Self::NotATapInterface(_)
            | Self::NotATap { .. }
            | Self::WrongFlags { .. }
            | Self::DifferentTaps { .. } => ErrorKind::Unsuitable,
            Self::InUse(_) => ErrorKind::Busy,
            Self::NoRightToTunDevice | Self::NotOurs(_) | Self::NoRightToCreate(_) => ErrorKind::Denied,
            // A tap that was deleted while it was in use, and a mask that the configuration let through, are no fault
            // of a request.
            Self::Gone(_)
            | Self::Mask { .. }
            | Self::NoTunDevice
            | Self::TunDevice(_)
            | Self::Socket(_)
            | Self::Attach { .. }
            | Self::Configure { .. }
            | Self::Request { .. } => ErrorKind::Host,
        }
    }
}

/// The remedy for an interface that cannot be changed, if a privilege is missing.
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
