//! From a plan to an open backend of a NIC.

use std::os::fd::{BorrowedFd, OwnedFd};

use virtio_devices::{
    Backend, Memory, PortHandle, Switch, SwitchError, SwitchSpec, Tap, TapError, Vdpa, VdpaError, VhostKernel,
    VhostNet, VhostNetError, VhostUserDevice, VhostUserDeviceSpec, VhostUserError,
};

use crate::config::{BackendPlan, NetPlan, NicPlan, Options as _, UplinkPlan, VdpaConfig, Vhost};
use crate::devices::peers::Peers;
use crate::error_kind::ErrorKind;

/// Why a NIC has no backend: one line, to follow the option that names the network function.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Its tap cannot be used.
    #[error(": {0}")]
    Tap(#[from] TapError),
    /// A file descriptor passed in is not open.
    #[error(",fd={0}: there is no such open file descriptor; open the tap before starting the VMM")]
    Fd(i32),
    /// The host's kernel does not carry its tap's packets.
    #[error(",vhost=on: {0}")]
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
    /// There cannot be such a switch.
    #[error(": {0}")]
    Switch(#[from] SwitchError),
    /// The switch has no such port.
    #[error(": its PF's switch has no port for it; please report this")]
    NoPort,
}

impl BackendError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Tap(error) => error.kind().into(),
            Self::Fd(_) => ErrorKind::Invalid,
            Self::Switch(error) => error.kind().into(),
            Self::NoPort => ErrorKind::Host,
            Self::VhostNet(error) => error.kind().into(),
            Self::VhostUser(error) => error.kind().into(),
            Self::Vdpa { error, .. } => error.kind().into(),
        }
    }
}

/// Opens backends, those of one start of a VM or those of a device that comes later.
pub(crate) struct Opener<'a> {
    /// The guest's memory.
    memory: &'a Memory,
    /// The vhost-user backends, which are connected already.
    peers: Peers,
    /// Why the kernel does not carry packets that it should carry if it can.
    without_vhost: Option<VhostNetError>,
}

impl<'a> Opener<'a> {
    /// Opens backends for a guest with this memory.
    pub(crate) fn new(memory: &'a Memory, peers: Peers) -> Self {
        Self { memory, peers, without_vhost: None }
    }

    /// Makes the switch of `plan`, if it has one, whose ports are to be as planned.
    ///
    /// # Errors
    ///
    /// When its uplink does not exist or is in use, or the host has no descriptors for it.
    pub(crate) fn switch(&mut self, plan: &NetPlan) -> Result<Option<Switch>, BackendError> {
        let Some(switch) = &plan.switch else { return Ok(None) };
        let uplink = match &switch.uplink {
            Some(UplinkPlan::Tap(spec)) => Some(Tap::open(spec)?),
            Some(UplinkPlan::Fd(fd)) => Some(Tap::from_fds(vec![duplicate(*fd)?])?),
            None => None,
        };
        let ports = u16::try_from(plan.functions().count()).unwrap_or(u16::MAX);
        let (id, mode, workers) = (plan.id().to_string(), switch.mode, switch.workers);
        let switch = Switch::new(SwitchSpec { id, mode, ports, workers, uplink })?;
        let settings = (0..).zip(plan.functions()).filter_map(|(port, function)| match function.backend {
            BackendPlan::Port(settings) => Some((port, settings)),
            _ => None,
        });
        switch.set_ports(settings).wait();
        Ok(Some(switch))
    }

    /// Opens the backend of `plan`, which `option` names. On a switch it is its `port`.
    ///
    /// # Errors
    ///
    /// When it does not exist or is in use. Anything opened or created for it is then closed and removed.
    pub(crate) fn open(
        &mut self,
        plan: &NicPlan,
        port: Option<PortHandle>,
        option: &str,
    ) -> Result<Backend, BackendError> {
        match &plan.backend {
            BackendPlan::Port(_) => Ok(port.ok_or(BackendError::NoPort)?.into()),
            BackendPlan::Tap { spec, vhost } => self.carried(Tap::open(spec)?, *vhost),
            BackendPlan::Fds { fds, vhost } => {
                let duplicates = fds.iter().map(|fd| duplicate(*fd)).collect::<Result<_, _>>()?;
                self.carried(Tap::from_fds(duplicates)?, *vhost)
            }
            BackendPlan::VhostUser { socket, .. } => {
                let backend = self.peers.nic(socket);
                Ok(backend.ok_or_else(|| VhostUserError::Missing(socket.display().to_string()))?.into())
            }
            BackendPlan::Vdpa(spec) => {
                let key = if option.starts_with(VdpaConfig::OPTION) { "path" } else { "vdpa" };
                Ok(Vdpa::open(spec.clone(), self.memory).map_err(|error| BackendError::Vdpa { key, error })?.into())
            }
        }
    }

    /// The device over a vhost-user backend that `spec` names.
    ///
    /// # Errors
    ///
    /// There is none.
    pub(crate) fn device(&mut self, spec: &VhostUserDeviceSpec) -> Result<VhostUserDevice, BackendError> {
        let device = self.peers.device(&spec.socket);
        Ok(device.ok_or_else(|| VhostUserError::Missing(spec.socket.display().to_string()))?)
    }

    /// `tap`, whose packets the kernel carries if `vhost` says so.
    fn carried(&mut self, tap: Tap, vhost: Vhost) -> Result<Backend, BackendError> {
        if vhost == Vhost::Off {
            return Ok(tap.into());
        }
        match VhostKernel::ask() {
            Ok(kernel) => Ok(VhostNet::new(tap, kernel).into()),
            Err(error) if vhost == Vhost::On => Err(error.into()),
            Err(error) => {
                self.without_vhost.get_or_insert(error);
                Ok(tap.into())
            }
        }
    }

    /// Why the kernel does not carry the packets of a tap with `vhost=auto` that was opened since the last call, if
    /// there is one.
    pub(crate) fn take_without_vhost(&mut self) -> Option<VhostNetError> {
        self.without_vhost.take()
    }
}

/// A file descriptor of our own for one that was passed in by number.
fn duplicate(fd: i32) -> Result<OwnedFd, BackendError> {
    // The configuration allows nothing below 3.
    if fd < 0 {
        return Err(BackendError::Fd(fd));
    }
    // SAFETY: the number is only used for this one call, which fails if it is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    passed.try_clone_to_owned().map_err(|_| BackendError::Fd(fd))
}
