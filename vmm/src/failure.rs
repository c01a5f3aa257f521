//! What clients are told when something cannot be done: whose fault it is.
//!
//! A host that lacks something is a fault of the server's. What a request names and is not there, or cannot be, is the request's,
//! and what another device or the VM's state stands in the way of is a conflict.

use virtio_devices::{TapError, VdpaFault, VhostUserError};

use crate::api::{Failure, FailureKind};
use crate::config::{ConfigError, Problem};
use crate::error::Error;
use crate::{backends, devices};

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        let kind = match error.problem {
            Problem::InUse { .. } => FailureKind::Conflict,
            Problem::Host(_) => FailureKind::Internal,
            _ => FailureKind::BadRequest,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::Config(error) => return error.clone().into(),
            Error::Boot(_) | Error::AddressBits { .. } | Error::PrivateMemory { .. } => FailureKind::BadRequest,
            Error::Devices(error) => kind(error),
            Error::VcpuLeaving { .. } => FailureKind::TooManyRequests,
            _ => FailureKind::Internal,
        };
        Self::new(kind, error.to_string())
    }
}

fn kind(error: &devices::Error) -> FailureKind {
    match error {
        devices::Error::Backend { error, .. } => backend_kind(error),
        devices::Error::Net { .. } | devices::Error::Rng { .. } => FailureKind::BadRequest,
        devices::Error::Disk { .. } => FailureKind::BadRequest,
        devices::Error::Place { .. } | devices::Error::NoRoom(_) => FailureKind::Conflict,
        devices::Error::Function { .. }
        | devices::Error::Sriov { .. }
        | devices::Error::Pages { .. }
        | devices::Error::NoConsole => FailureKind::Internal,
    }
}

fn backend_kind(error: &backends::Error) -> FailureKind {
    match error {
        backends::Error::Tap(error) => match error {
            TapError::InUse(_) => FailureKind::Conflict,
            TapError::Name { .. }
            | TapError::Queues { .. }
            | TapError::IsMultiQueue(_)
            | TapError::IsSingleQueue(_)
            | TapError::NotATapInterface(_)
            | TapError::NotATap { .. }
            | TapError::WrongFlags { .. }
            | TapError::DifferentTaps { .. } => FailureKind::BadRequest,
            _ => FailureKind::Internal,
        },
        backends::Error::VhostUser(error) => match error {
            VhostUserError::InUse(_) | VhostUserError::Busy(_) => FailureKind::Conflict,
            VhostUserError::NoRight(_) | VhostUserError::Socket { .. } | VhostUserError::Peer { .. } => {
                FailureKind::Internal
            }
            _ => FailureKind::BadRequest,
        },
        backends::Error::Fd(_) => FailureKind::BadRequest,
        backends::Error::VhostNet(_) => FailureKind::Internal,
        backends::Error::Vdpa { error, .. } => match error.fault {
            VdpaFault::InUse => FailureKind::Conflict,
            VdpaFault::NoRight
            | VdpaFault::Silent
            | VdpaFault::MemoryLock(_)
            | VdpaFault::Map(_)
            | VdpaFault::Changed
            | VdpaFault::Request { .. } => FailureKind::Internal,
            _ => FailureKind::BadRequest,
        },
    }
}
