//! Backends that reach the guest's memory directly: vhost-net, vhost-user, vDPA.

use std::sync::Arc;
use std::time::Instant;

use pci::VfIndex;
use virtio_devices::MemoryUser;

use super::vhost_user_backends::function_option;
use crate::config::DevicePlan;
use crate::machine_state::backend_state::{BackendOf, StatefulBackend};
use crate::pci_host::slot::Slot;

/// Plugged devices, which may have such backends.
pub(crate) struct MemoryUsers(Vec<Device>);

struct Device {
    slot: Arc<Slot>,
    plan: DevicePlan,
}

impl MemoryUsers {
    /// Users of memory among `devices`.
    pub(super) fn of<'d>(devices: impl Iterator<Item = (&'d DevicePlan, &'d Arc<Slot>)>) -> Self {
        Self(devices.map(|(plan, slot)| Device { slot: Arc::clone(slot), plan: plan.clone() }).collect())
    }

    /// The present backends, with their options. A driver that starts later has another worker, so call this before
    /// each use.
    pub(crate) fn find(&self) -> Vec<(String, MemoryUser)> {
        self.each(|plan, vf, user| Some((function_option(plan, vf), user)))
    }

    /// Backends with a state of their own in addition to their queues.
    pub(crate) fn stateful(&self) -> Vec<StatefulBackend> {
        self.each(|plan, vf, user| {
            let of = BackendOf { id: plan.id.clone(), vf: vf.map(|vf| vf.0) };
            user.has_state().then(|| StatefulBackend { of, option: function_option(plan, vf), user })
        })
    }

    /// The options of paused devices' backends that may still write to the guest's memory. Waits until `until` for
    /// those that are ending.
    pub(crate) fn unstopped(&self, until: Instant) -> Vec<String> {
        self.each(|plan, vf, user| user.may_still_write(until).then(|| function_option(plan, vf)))
    }

    /// Results of `make` for each backend.
    fn each<T>(&self, make: impl Fn(&DevicePlan, Option<VfIndex>, MemoryUser) -> Option<T>) -> Vec<T> {
        let mut made = Vec::new();
        for Device { slot, plan } in &self.0 {
            let mut of_device: Vec<(Option<VfIndex>, MemoryUser)> = Vec::new();
            // The device's lock is released before `make` runs: vCPUs take it.
            slot.with(|device| device.memory_users(&mut of_device));
            made.extend(of_device.into_iter().filter_map(|(vf, user)| make(plan, vf, user)));
        }
        made
    }
}
