//! Faults on demand: `vm.inject-fault`.

use pci::VfIndex;
use virtio_devices::{Fault as DeviceFault, FaultError};

use super::{Instance, no_device};
use crate::api::{Failure, Fault, InjectFault, MOST_FAULTS};
use crate::error_kind::ErrorKind;
use crate::telemetry::events::Source;
use crate::telemetry::log_line;

impl Instance {
    /// Makes or arms a fault in a function of a booted VM, for tests of its driver. Armed faults are neither saved nor
    /// sent to another host.
    ///
    /// # Errors
    ///
    /// Fails without a change if there is no such function, or it cannot have this fault now.
    pub(crate) fn inject_fault(&mut self, wanted: &InjectFault) -> Result<(), Failure> {
        let InjectFault { id, fault, index, .. } = wanted;
        let of = index.map(|index| index.to_string());
        let name = log_line::subject(id, of.as_deref());
        let refuse = |kind, what: String| Failure::new(kind, format!("{name}: {}: {what}", fault.name()));
        let vm = self
            .vm
            .as_mut()
            .ok_or_else(|| refuse(ErrorKind::Conflict, "the VM is not booted; boot it first (vm.boot)".to_string()))?;
        let plugged = vm.devices().find(id).ok_or_else(|| no_device(id))?;
        let device_fault = device_fault(wanted, &name).map_err(|what| refuse(ErrorKind::Invalid, what))?;
        let total_vfs = plugged.plan().total_vfs();
        if let Some(index) = index.filter(|index| *index >= total_vfs) {
            return Err(refuse(ErrorKind::NotFound, format!("there is no VF {index}; the device has {total_vfs}")));
        }
        let is_removal = index.is_none() && *fault == Fault::SurpriseRemoval;
        if is_removal && (!plugged.plan().is_removable() || plugged.is_going()) {
            let what = "it stays as long as its VM, or the guest was asked to release it; name another device";
            return Err(refuse(ErrorKind::Conflict, what.to_string()));
        }
        let slot = plugged.slot().clone();
        let (count, vector) = told(wanted);
        let properties = [
            ("id", Some(id.as_str())),
            ("index", of.as_deref()),
            ("fault", Some(fault.name())),
            ("count", count.as_deref()),
            ("vector", vector.as_deref()),
        ];
        let properties: Vec<_> = properties.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        if is_removal {
            let Some(removed) = vm.remove_by_surprise(id) else {
                return Err(refuse(ErrorKind::Conflict, "it is gone already".to_string()));
            };
            self.events.tell(Source::Vm, "fault-injected", &properties);
            self.forget(&[removed]);
            return Ok(());
        }
        slot.inject(index.map(VfIndex), device_fault).map_err(|error| refuse(kind_of(error), error.to_string()))?;
        self.events.tell(Source::Vm, "fault-injected", &properties);
        Ok(())
    }
}

/// The number and the vector of a fault, as its event has them.
fn told(wanted: &InjectFault) -> (Option<String>, Option<String>) {
    let is_counted = matches!(wanted.fault, Fault::LoseInterrupts | Fault::RefuseVfEnable);
    let count = is_counted.then(|| wanted.count.unwrap_or(1).to_string());
    (count, wanted.vector.map(|vector| vector.to_string()))
}

/// The fault of the function `name` as its device makes it.
fn device_fault(wanted: &InjectFault, name: &str) -> Result<DeviceFault, String> {
    let InjectFault { fault, count, vector, .. } = wanted;
    let is_counted = matches!(fault, Fault::LoseInterrupts | Fault::RefuseVfEnable);
    if !is_counted && count.is_some() {
        return Err("count is for lose-interrupts and refuse-vf-enable; leave it out".to_string());
    }
    if *fault != Fault::LoseInterrupts && vector.is_some() {
        return Err("vector is for lose-interrupts; leave it out".to_string());
    }
    let count = count.unwrap_or(1);
    if count > MOST_FAULTS {
        return Err(format!("count={count}: give 0 to {MOST_FAULTS}"));
    }
    Ok(match fault {
        Fault::NeedsReset => DeviceFault::NeedsReset,
        Fault::LoseInterrupts => DeviceFault::LoseInterrupts { name: name.to_string(), vector: *vector, count },
        Fault::RefuseVfEnable => DeviceFault::RefuseVfEnable { count },
        Fault::SurpriseRemoval => DeviceFault::Removal,
    })
}

/// The kind of a failure for which the state of the function, or the request, is the reason.
const fn kind_of(error: FaultError) -> ErrorKind {
    match error {
        FaultError::NoVf | FaultError::NoDriver => ErrorKind::Conflict,
        FaultError::NoVector { .. } | FaultError::Backend | FaultError::NotPf | FaultError::NotVirtio => {
            ErrorKind::Invalid
        }
    }
}
