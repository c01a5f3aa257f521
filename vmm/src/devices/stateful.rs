//! Backends with a state of their own, at the target of a migration.

use pci::VfIndex;

use super::vhost_user_backends::function_option;
use super::{Devices, Plugged};
use crate::machine_state::backend_state::BackendOf;

impl Devices {
    /// Checks that the backends of `wanted`, which have states of their own at the source, can restore them. A function
    /// without a backend is skipped: the client has allowed that.
    ///
    /// # Errors
    ///
    /// Fails if a backend cannot restore its state.
    pub(crate) fn check_stateful(&self, wanted: &[BackendOf]) -> Result<(), String> {
        let here = self.memory_users().stateful();
        let is_missing = |plugged: &Plugged, vf| {
            plugged.slot.with(|device| device.host_nic(vf).is_some_and(|port| port.backend_missing().is_some()))
        };
        for of in wanted.iter().filter(|of| here.iter().all(|backend| backend.of != **of)) {
            let vf = of.vf.map(VfIndex);
            let plugged = self.find(&of.id).ok_or_else(|| format!("{of}: the source has a device that is not here"))?;
            if is_missing(plugged, vf) != Some(true) {
                return Err(format!(
                    "{}: its backend at the source has a state of its own (VHOST_USER_PROTOCOL_F_DEVICE_STATE), which \
                     its backend here cannot take; give it a vhost-user backend that can, or none (link=down)",
                    function_option(&plugged.plan, vf)
                ));
            }
        }
        Ok(())
    }
}
