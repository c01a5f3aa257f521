//! Devices that another process runs, over vhost-user.

use virtio_devices::VhostUserDeviceSpec;

use super::site::{Opened, Site};
use crate::devices::backends::{BackendOpener, OF_SOCKET_OR_DEVICE};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
use crate::pci_host::device_watch::backend_observer;

/// A thread for its queues, and one while a driver writes to its configuration.
pub(super) const THREADS: u64 = 2;

pub(super) fn open(
    spec: &VhostUserDeviceSpec,
    site: &Site<'_>,
    opener: &mut BackendOpener<'_>,
) -> Result<Opened, DeviceError> {
    let device = opener.device(spec);
    let device = device.map_err(|error| DeviceError::Backend { option: site.option(), error })?;
    device.observe_backend(backend_observer(&site.plan.id, None, device.backend_name(), &site.host.events));
    // The device's requests do not pass through this process.
    Ok((site.function(device)?, Handle::plain("vhost_user", Vec::new)))
}

/// The files of the backend; for each queue a doorbell and a vector; the vector of configuration changes; and the
/// worker's kick, its stand-in for interrupts and one for errors.
pub(super) fn open_files(spec: &VhostUserDeviceSpec) -> u64 {
    OF_SOCKET_OR_DEVICE + 2 * spec.queue_sizes.len() as u64 + 4
}

/// Reason why the state of the backend cannot be saved, if its driver is up.
pub(super) fn unsaved(spec: &VhostUserDeviceSpec) -> Option<&'static str> {
    spec.kind.keeps_state().then_some(
        "its backend keeps state of the guest that cannot be saved; unmount or unbind it in the guest, or remove it",
    )
}
