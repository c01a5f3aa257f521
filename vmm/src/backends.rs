//! From a plan to an open backend of a NIC.

use std::os::fd::{BorrowedFd, OwnedFd};

use virtio_devices::{
    Backend, Memory, Tap, TapError, TapSpec, Vdpa, VdpaError, VdpaSpec, VhostNet, VhostNetError, VhostUser,
    VhostUserError, VhostUserSpec,
};

use crate::config::{BackendPlan, NicPlan, Options as _, VdpaConfig, Vhost, VhostMode};

/// Why a NIC has no backend: one line, to follow the option that names the network function.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its tap cannot be used.
    #[error(": {0}")]
    Tap(#[from] TapError),
    /// A file descriptor passed in is not open.
    #[error(",fd={0}: there is no such open file descriptor; open the tap before starting the VMM")]
    Fd(i32),
    /// The host's kernel does not carry its tap's packets.
    #[error(",{0}")]
    VhostNet(#[from] VhostNetError),
    /// The process that should carry its packets does not.
    #[error(",{0}")]
    VhostUser(#[from] VhostUserError),
    /// Its vDPA device cannot be used.
    #[error(",{key}={}: {}", error.path.display(), error.fault)]
    Vdpa {
        /// What the option calls the device's path.
        key: &'static str,
        /// Why.
        error: VdpaError,
    },
}

/// Opens the backend of `plan`, which `option` names, for a guest with this memory.
///
/// # Errors
///
/// When there is none, or another one has it. What was opened or made for it is closed and gone then.
pub fn open(plan: &NicPlan, option: &str, memory: &Memory) -> Result<Backend, Error> {
    match &plan.backend {
        BackendPlan::Tap { name, ip, mask, host_mac, vhost } => {
            let (name, ip, mask, host_mac) = (name.clone(), *ip, *mask, *host_mac);
            let spec = TapSpec { name, ip, mask, host_mac, mtu: plan.mtu, queue_pairs: plan.queue_pairs };
            carried(|| Ok(Tap::open(&spec)?), *vhost, option)
        }
        BackendPlan::Fds { fds, vhost } => {
            let duplicates = || fds.iter().map(|fd| duplicate(*fd)).collect::<Result<_, _>>();
            carried(|| Ok(Tap::from_fds(duplicates()?)?), *vhost, option)
        }
        BackendPlan::VhostUser { socket, mode } => {
            let (socket, server) = (socket.clone(), *mode == VhostMode::Server);
            let spec = VhostUserSpec { socket, server, queue_pairs: plan.queue_pairs };
            Ok(VhostUser::connect(spec, memory)?.into())
        }
        BackendPlan::Vdpa { path, mac } => {
            let spec = VdpaSpec { path: path.clone(), mac: *mac, queue_pairs: plan.queue_pairs };
            let key = if option.starts_with(VdpaConfig::OPTION) { "path" } else { "vdpa" };
            Ok(Vdpa::open(spec, memory).map_err(|error| Error::Vdpa { key, error })?.into())
        }
    }
}

/// A tap, whose packets the kernel carries if `vhost` says so.
fn carried(tap: impl Fn() -> Result<Tap, Error>, vhost: Vhost, option: &str) -> Result<Backend, Error> {
    match vhost {
        Vhost::Off => Ok(tap()?.into()),
        Vhost::On => Ok(VhostNet::open(tap()?)?.into()),
        Vhost::Auto => match VhostNet::open(tap()?) {
            Ok(carried) => Ok(carried.into()),
            Err(error) => {
                let error = error.to_string();
                let reason = error.trim_start_matches("vhost=on: ");
                log::warn!("{option},vhost=auto: this program carries the packets itself: {reason}");
                // The first one went with what could not have it.
                Ok(tap()?.into())
            }
        },
    }
}

/// A file descriptor of our own for one that was passed in by number.
fn duplicate(fd: i32) -> Result<OwnedFd, Error> {
    // The configuration allows nothing below 3.
    if fd < 0 {
        return Err(Error::Fd(fd));
    }
    // SAFETY: the number is only used for this one call, which fails if it is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    passed.try_clone_to_owned().map_err(|_| Error::Fd(fd))
}
