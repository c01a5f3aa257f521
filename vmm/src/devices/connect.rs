//! Backends that were missing or lost, and are connected to their functions later.

use pci::VfIndex;
use virtio_devices::{ConnectError, Memory, NewBackend, NotResumed, new_backend};

use super::Devices;
use super::backends::{BackendError, BackendOpener, NicSite};
use super::error::DeviceError;
use super::handle::Handle;
use super::missing::tell;
use super::passed_taps::{NicTaps, TapOf};
use super::vhost_user_backends::{VhostUserBackends, function_option};
use crate::config::{DeviceKind, DevicePlan, NicPlan};
use crate::pci_host::device_watch::backend_observer;

/// A backend for a function, and its tap if it has one.
pub(crate) type Connecting = (NewBackend, NicTaps);

/// Opens the backend of VF `vf` of the device of `plan`, or of that device's own function, on any thread. A vhost-user
/// backend is taken from `peers`. The VM may have an IOMMU.
///
/// # Errors
///
/// Fails if the backend cannot be opened, or does not suit this function. It is closed then.
pub(crate) fn open(
    plan: &DevicePlan,
    vf: Option<VfIndex>,
    nic: &NicPlan,
    memory: &Memory,
    peers: VhostUserBackends,
    has_iommu: bool,
) -> Result<Connecting, DeviceError> {
    let option = function_option(plan, vf);
    let mut opener = BackendOpener::new(memory, peers);
    let behind_iommu = has_iommu && (vf.is_some() || plan.iommu);
    let tap_of = TapOf { id: plan.id.clone(), vf: vf.map(|vf| vf.0), uplink: false };
    let backend = opener.open(nic, &option, NicSite { tap_of, port: None, behind_iommu });
    let backend = backend.map_err(|error: BackendError| DeviceError::Backend { option: option.clone(), error })?;
    if let Some(error) = opener.take_without_vhost() {
        log::warn!("{option}: vhost=auto: this program moves the packets itself: {error}");
    }
    let backend = new_backend(&nic.spec, backend).map_err(|error| DeviceError::open(option, error.kind(), error))?;
    Ok((backend, opener.take_taps()))
}

impl Devices {
    /// Gives VF `vf` of the device `id`, or that device's own function, the backend `new`, described by `nic`. Its
    /// queues resume where they stopped, at once if the guest `runs`.
    ///
    /// # Errors
    ///
    /// Fails if the function has a working backend, or its driver was offered features that `new` lacks; nothing has
    /// changed then. Also fails if the host has no thread for it; then the function has the backend, and its queues are
    /// stopped until the guest is resumed.
    pub(crate) fn connect(
        &mut self,
        (id, vf): (&str, Option<VfIndex>),
        nic: &NicPlan,
        (mut new, taps): Connecting,
        runs: bool,
    ) -> Result<(), DeviceError> {
        let Some(plugged) = self.plugged.iter_mut().find(|plugged| plugged.plan.id == id) else { return Ok(()) };
        let option = function_option(&plugged.plan, vf);
        let (kind, name) = (new.kind(), new.name().to_string());
        let observer = backend_observer(id, vf, &name, &self.host.events);
        let (connected, resumed) = plugged.slot.exchange(vf, runs, |device| {
            device.connect(vf, &mut new)?;
            if let Some(port) = device.host_nic(vf) {
                port.observe_backend(observer);
                port.backend_replaced();
            }
            Ok(())
        });
        // Closes the previous or the refused backend without the device's lock.
        drop(new);
        let connected = connected.unwrap_or(Err(ConnectError::NoNic));
        connected.map_err(|error| DeviceError::Connect { option: option.clone(), error })?;
        let n = vf.map_or(0, |VfIndex(index)| usize::from(index) + 1);
        if let Handle::Net(net) = &mut plugged.handle {
            if let Some(counters) = net.counters.get_mut(n) {
                *counters = counters.with_backend(kind, &name, &nic.backend);
            }
            net.taps.retain(|(of, _)| taps.iter().all(|(other, _)| other != of));
            net.taps.extend(taps);
        }
        if let DeviceKind::Net(net) = &mut plugged.plan.kind
            && let Some(function) = net.functions_mut().nth(n)
        {
            *function = nic.clone();
        }
        tell(&self.host.events, "vf-attached", id, vf, ("backend", &name));
        resumed.map_err(|NotResumed { error, .. }| DeviceError::NotResumed { option, error })
    }
}
