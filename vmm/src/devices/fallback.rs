//! Network functions that are stopped while their VM is sent, because their backends have no dirty log.

use pci::VfIndex;
use virtio_devices::MemoryUser;

use super::missing::tell;
use super::vhost_user_backends::function_option;
use super::{Devices, Plugged};

/// A function that is or will be stopped.
pub(crate) struct Held {
    id: String,
    vf: Option<VfIndex>,
}

/// The functions, and their backends with their options.
pub(crate) type HeldBackends = (Vec<Held>, Vec<(String, MemoryUser)>);

/// Reason for the link's state, in an event.
const REASON: &str = "its backend has no dirty log, and is stopped while the VM is sent";

impl Devices {
    /// Takes down the links of all network functions whose backends cannot log their writes to the guest's memory. The
    /// backends have stopped once [`MemoryUser::stand`] has returned for each.
    ///
    /// # Errors
    ///
    /// Fails if a device without a link has such a backend. Nothing has changed then.
    pub(crate) fn hold_unlogged(&self) -> Result<HeldBackends, String> {
        let (mut held, mut users) = (Vec::new(), Vec::new());
        for plugged in &self.plugged {
            let mut of_device = Vec::new();
            plugged.slot.with(|device| device.memory_users(&mut of_device));
            for (vf, user) in of_device.into_iter().filter(|(_, user)| !user.logs_writes()) {
                let option = function_option(&plugged.plan, vf);
                if plugged.plan.net().is_none() {
                    return Err(format!(
                        "{option}: what this backend writes to the guest's memory is not known, and it has no link \
                         that could be taken down; pause the guest first (vm.pause)"
                    ));
                }
                held.push(Held { id: plugged.plan.id.clone(), vf });
                users.push((option, user));
            }
        }
        for held in &held {
            self.set_held(held, true);
            tell(&self.host.events, "vf-degraded", &held.id, held.vf, ("reason", REASON));
        }
        Ok((held, users))
    }

    /// Lets these functions continue in a VM that was not moved.
    pub(crate) fn let_go(&self, held: &[Held]) {
        for held in held {
            let backend = self.set_held(held, false);
            tell(&self.host.events, "vf-attached", &held.id, held.vf, ("backend", &backend));
        }
    }

    /// Takes the link of a function down, or restores the state that the host has set. Returns the name of its backend.
    fn set_held(&self, Held { id, vf }: &Held, held: bool) -> String {
        let set = |plugged: &Plugged| {
            plugged.slot.with(|device| {
                let port = device.host_nic(*vf)?;
                port.hold_link(held);
                Some(port.backend_name().to_string())
            })
        };
        self.find(id).and_then(set).flatten().unwrap_or_default()
    }
}
