//! Backends that reach the guest's memory by themselves: vhost-net, vhost-user, vDPA.

use std::sync::Arc;
use std::time::Instant;

use pci::VfIndex;
use virtio_devices::MemoryUser;

use super::peers::function_option;
use crate::config::DevicePlan;
use crate::machine_state::backend_state::{BackendOf, StatefulBackend};
use crate::pci_host::slot::Slot;

/// Devices that may have such backends: those that are plugged.
pub(crate) struct MemoryUsers(Vec<Device>);

struct Device {
    slot: Arc<Slot>,
    plan: DevicePlan,
}

impl MemoryUsers {
    /// Users among `devices`.
    pub(super) fn of<'d>(devices: impl Iterator<Item = (&'d DevicePlan, &'d Arc<Slot>)>) -> Self {
        Self(devices.map(|(plan, slot)| Device { slot: Arc::clone(slot), plan: plan.clone() }).collect())
    }

    /// The backends as they are now, with the options that say so. A driver that starts later has another worker, so
    /// they are asked for each time that they are told something.
    pub(crate) fn find(&self) -> Vec<(String, MemoryUser)> {
        self.each(|plan, vf, user| Some((function_option(plan, vf), user)))
    }

    /// Backends that have a state of their own besides their queues.
    pub(crate) fn stateful(&self) -> Vec<StatefulBackend> {
        self.each(|plan, vf, user| {
            let of = BackendOf { id: plan.id.clone(), vf: vf.map(|vf| vf.0) };
            user.has_state().then(|| StatefulBackend { of, option: function_option(plan, vf), user })
        })
    }

    /// The options of those of paused devices that may still write to the guest's memory. Those that are just ending
    /// are waited for, until `until`.
    pub(crate) fn at_large(&self, until: Instant) -> Vec<String> {
        self.each(|plan, vf, user| user.may_still_write(until).then(|| function_option(plan, vf)))
    }

    /// Results of `make` for each of them.
    fn each<T>(&self, make: impl Fn(&DevicePlan, Option<VfIndex>, MemoryUser) -> Option<T>) -> Vec<T> {
        let mut made = Vec::new();
        for Device { slot, plan } in &self.0 {
            let mut of_device: Vec<(Option<VfIndex>, MemoryUser)> = Vec::new();
            // Without the device's lock afterwards: vCPUs take it.
            slot.with(|device| device.memory_users(&mut of_device));
            made.extend(of_device.into_iter().filter_map(|(vf, user)| make(plan, vf, user)));
        }
        made
    }
}
