//! Opens the backend of a NIC from its plan.

use virtio_devices::{
    Absent, Backend, Memory, PortHandle, Switch, SwitchError, SwitchSpec, Tap, TapError, TapSpec, Vdpa, VdpaError,
    VhostKernel, VhostNet, VhostNetError, VhostUserDevice, VhostUserDeviceSpec, VhostUserError,
};

use crate::config::{
    BackendPlan, MissingBackend, NetPlan, NicPlan, Options as _, SwitchPlan, UplinkPlan, VdpaConfig, Vhost,
};
use crate::devices::passed_taps::{NicTaps, PassedTaps, TapOf};
use crate::devices::vhost_user_backends::VhostUserBackends;
use crate::error_kind::ErrorKind;
use crate::passed_fd;
use crate::telemetry::log_line;
use crate::vfio::{OpenDevice, VfioError};

/// Reason why a NIC has no backend: one line, to follow the option that names the network function.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Tap that cannot be used.
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
    /// vDPA device that cannot be used.
    #[error(",{key}={}: {}", error.path.display(), error.fault)]
    Vdpa {
        /// Key of the device's path in the option.
        key: &'static str,
        /// Cause.
        error: VdpaError,
    },
    /// The switch cannot be created.
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

/// Files of a vhost-user backend: listener, connection, back-channel and inflight region, and at most two that arrive
/// with an answer, or the far end of the back-channel, until they are closed; enough for a vDPA device as well.
pub(super) const OF_SOCKET_OR_DEVICE: u64 = 6;

/// The surroundings of a network function whose backend is opened.
pub(crate) struct NicSite {
    /// Owner of its tap, if it has one.
    pub tap_of: TapOf,
    /// Switch port, if it is on a switch.
    pub port: Option<PortHandle>,
    /// True if its backend must follow the IOMMU.
    pub behind_iommu: bool,
}

/// Opener of backends, for one start of a VM or for a device that is added later.
pub(crate) struct BackendOpener<'a> {
    /// The guest's memory.
    memory: &'a Memory,
    /// The vhost-user backends, which are connected already.
    peers: VhostUserBackends,
    /// Taps that come from another program.
    passed: Option<&'a PassedTaps>,
    /// The taps that were opened since [`Self::take_taps`].
    taps: NicTaps,
    /// The host device, if it was opened before.
    host_device: Option<Result<OpenDevice, VfioError>>,
    /// Reason why the kernel does not carry packets with `vhost=auto`.
    without_vhost: Option<VhostNetError>,
}

impl<'a> BackendOpener<'a> {
    /// Opens backends for a guest with this memory.
    pub(crate) const fn new(memory: &'a Memory, peers: VhostUserBackends) -> Self {
        Self { memory, peers, passed: None, taps: Vec::new(), host_device: None, without_vhost: None }
    }

    /// As [`Self::new`], with the taps in `passed`, which are not opened.
    pub(crate) fn with_taps(self, passed: &'a PassedTaps) -> Self {
        Self { passed: Some(passed), ..self }
    }

    /// The taps that were opened since the last call.
    pub(crate) fn take_taps(&mut self) -> NicTaps {
        std::mem::take(&mut self.taps)
    }

    /// The tap of `of`: the one that was passed for it, or the one of `spec`.
    fn tap(&mut self, spec: &TapSpec, of: TapOf) -> Result<Tap, TapError> {
        let passed = self.passed.and_then(|passed| passed.find(&of));
        let tap = passed.map_or_else(|| Tap::open(spec), |passed| Tap::passed(spec, passed))?;
        let handle = tap.handle();
        if handle.was_made() {
            // A name that is mistyped makes a tap, too.
            let subject = log_line::subject(&of.id, of.vf.map(|vf| vf.to_string()).as_deref());
            log::info!("{subject}: made the tap {}; it is in no bridge and ends with the VM", tap.name());
        }
        self.taps.push((of, handle));
        Ok(tap)
    }

    /// The tap whose descriptors were passed to this program by its creator.
    fn tap_of_fds(&mut self, fds: &[i32], of: TapOf) -> Result<Tap, BackendError> {
        let queue = |fd: &i32| passed_fd::duplicate(*fd).ok_or(BackendError::Fd(*fd));
        let tap = Tap::from_fds(fds.iter().map(queue).collect::<Result<_, _>>()?)?;
        self.taps.push((of, tap.handle()));
        Ok(tap)
    }

    /// The opener with a host device that was opened before, or the reason why it could not be.
    pub(crate) fn with_host_device(self, host_device: Option<Result<OpenDevice, VfioError>>) -> Self {
        Self { host_device, ..self }
    }

    /// Takes the host device that was opened before.
    pub(crate) fn host_device(&mut self) -> Option<Result<OpenDevice, VfioError>> {
        self.host_device.take()
    }

    /// Creates the switch of `plan`, if it has one, for ports as planned.
    ///
    /// # Errors
    ///
    /// Fails if its uplink does not exist or is in use, or the host has no descriptors for it.
    pub(crate) fn switch(&mut self, plan: &NetPlan) -> Result<Option<Switch>, BackendError> {
        let Some(switch) = &plan.switch else { return Ok(None) };
        let ports = u16::try_from(plan.functions().count()).unwrap_or(u16::MAX);
        let switch = self.empty_switch(plan.id(), switch, ports)?;
        let settings = (0..).zip(plan.functions()).filter_map(|(port, function)| match function.backend {
            BackendPlan::Port(settings) => Some((port, settings)),
            _ => None,
        });
        // No worker runs before the first port is opened.
        drop(switch.set_ports(settings));
        Ok(Some(switch))
    }

    /// Opens the switch of the NIC `id`, with as many ports as `ports` that have no NIC yet.
    ///
    /// # Errors
    ///
    /// As [`Self::switch`].
    pub(crate) fn empty_switch(&mut self, id: &str, plan: &SwitchPlan, ports: u16) -> Result<Switch, BackendError> {
        let of = TapOf { id: id.to_string(), vf: None, uplink: true };
        let uplink = match &plan.uplink {
            Some(UplinkPlan::Tap(spec)) => Some(self.tap(spec, of)?),
            Some(UplinkPlan::Fd(fd)) => Some(self.tap_of_fds(&[*fd], of)?),
            None => None,
        };
        let (id, mode, workers) = (id.to_string(), plan.mode, plan.workers);
        Ok(Switch::new(SwitchSpec { id, mode, ports, workers, uplink, uplink_rate: plan.uplink_rate })?)
    }

    /// Opens the backend of `plan`, which `option` names, at `site`.
    ///
    /// # Errors
    ///
    /// Fails if the backend does not exist, is in use, or cannot follow. Anything opened or created for it is then
    /// closed and removed.
    pub(crate) fn open(&mut self, plan: &NicPlan, option: &str, site: NicSite) -> Result<Backend, BackendError> {
        match (&plan.missing, self.open_present(plan, option, site)) {
            (MissingBackend::LinkDown, Err(error)) => {
                log::warn!("{option}{error}; its link is down until it is given a backend (vm.set-vf)");
                Ok(absent(plan, &error.to_string()).into())
            }
            (_, opened) => opened,
        }
    }

    fn open_present(&mut self, plan: &NicPlan, option: &str, site: NicSite) -> Result<Backend, BackendError> {
        let NicSite { tap_of, port, behind_iommu } = site;
        if let MissingBackend::LeftOut(reason) = &plan.missing {
            return Ok(absent(plan, reason).into());
        }
        match &plan.backend {
            BackendPlan::Port(_) => Ok(port.ok_or(BackendError::NoPort)?.into()),
            BackendPlan::Tap { spec, vhost } => {
                let tap = self.tap(spec, tap_of)?;
                self.carried(tap, *vhost, behind_iommu)
            }
            BackendPlan::Fds { fds, vhost } => {
                let tap = self.tap_of_fds(fds, tap_of)?;
                self.carried(tap, *vhost, behind_iommu)
            }
            BackendPlan::VhostUser { socket, .. } => {
                let backend = self.peers.nic(socket);
                let missing = || VhostUserError::Missing(socket.display().to_string());
                Ok(backend.ok_or_else(|| self.peers.take_error(socket).unwrap_or_else(missing))?.into())
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
    /// Fails if there is none.
    pub(crate) fn device(&mut self, spec: &VhostUserDeviceSpec) -> Result<VhostUserDevice, BackendError> {
        let device = self.peers.device(&spec.socket);
        Ok(device.ok_or_else(|| VhostUserError::Missing(spec.socket.display().to_string()))?)
    }

    /// A backend of `tap`, whose packets the kernel carries if `vhost` requires or allows it.
    fn carried(&mut self, tap: Tap, vhost: Vhost, behind_iommu: bool) -> Result<Backend, BackendError> {
        if vhost == Vhost::Off {
            return Ok(tap.into());
        }
        let kernel = VhostKernel::ask();
        match kernel.and_then(|kernel| if behind_iommu { kernel.behind_iommu() } else { Ok(kernel) }) {
            Ok(kernel) => Ok(VhostNet::new(tap, kernel).into()),
            Err(error) if vhost == Vhost::On => Err(error.into()),
            Err(error) => {
                self.without_vhost.get_or_insert(error);
                Ok(tap.into())
            }
        }
    }

    /// Takes the reason why the kernel does not carry the packets of a tap with `vhost=auto` that was opened since the
    /// last call, if there is one.
    pub(crate) fn take_without_vhost(&mut self) -> Option<VhostNetError> {
        self.without_vhost.take()
    }
}

/// Substitute for the backend of `plan`, which is missing for this reason.
pub(super) fn absent(plan: &NicPlan, reason: &str) -> Absent {
    Absent {
        // The part of the message after the option's name.
        reason: reason.trim_start_matches([':', ',', ' ']).to_string(),
        queue_pairs: plan.spec.queue_pairs,
        of_kernel: matches!(plan.backend, BackendPlan::Tap { .. } | BackendPlan::Fds { .. }),
        has_own_mac: plan.backend.has_own_mac(),
    }
}
