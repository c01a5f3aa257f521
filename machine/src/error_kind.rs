//! The kind of an error, which determines the command's exit code and an HTTP response's status.

use vm_api::config::error::Problem;

/// The kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// Text that does not parse. Exit code 2, status 400.
    Syntax,
    /// A value, or a combination of values, that is not valid. Exit code 1, status 400.
    Invalid,
    /// The named object does not exist. Exit code 1, status 404.
    NotFound,
    /// Conflict with another device or with the VM's state. Exit code 1, status 409.
    Conflict,
    /// An earlier request has not completed; try again. Exit code 1, status 429.
    Busy,
    /// The host lacks something, or failed. Exit code 1, status 500.
    Host,
    /// Not supported by this version. Exit code 1, status 501.
    Unsupported,
}

impl ErrorKind {
    /// The exit code of a command that ends with such an error: 1 or 2.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Syntax => 2,
            _ => 1,
        }
    }

    /// The status of an HTTP response that reports such an error: 400 to 599.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::Syntax | Self::Invalid => 400,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::Busy => 429,
            Self::Host => 500,
            Self::Unsupported => 501,
        }
    }
}

impl From<virtio_devices::ErrorKind> for ErrorKind {
    fn from(kind: virtio_devices::ErrorKind) -> Self {
        use virtio_devices::ErrorKind as Device;
        match kind {
            Device::Invalid | Device::Missing | Device::Unsuitable => Self::Invalid,
            Device::Busy => Self::Conflict,
            Device::Denied | Device::Peer | Device::Host => Self::Host,
        }
    }
}

impl From<&Problem> for ErrorKind {
    fn from(problem: &Problem) -> Self {
        match problem {
            Problem::Syntax(_) => Self::Syntax,
            Problem::InUse { .. } => Self::Conflict,
            Problem::Host(_) => Self::Host,
            // A value that a later version may support is status 400 here, as one that no version supports.
            Problem::Value(_)
            | Problem::Missing(_)
            | Problem::Conflict(_)
            | Problem::Limit(_)
            | Problem::NotYet { .. } => Self::Invalid,
        }
    }
}
