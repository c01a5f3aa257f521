//! Connecting a backend to a function without one, or whose tap was deleted: `vm.set-vf` with `tap`, `num_fds`,
//! `vhost_socket` or `vdpa`.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;

use pci::VfIndex;
use virtio_devices::{BackendKind, Cancel, Switch};

use crate::api::{Failure, SetVf};
use crate::config::{MissingBackend, PlannedVm, RestoredBackend};
use crate::control::connection::{Connection, WithBackend};
use crate::control::instance::{Instance, no_device};
use crate::control::opening::{Acquire, OpenedResources};
use crate::control::set_vf::kind_of;
use crate::devices::kind;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::landlock;
use crate::snapshot::overrides;

impl Instance {
    /// Returns an opener of the backend in `change`, if there is one that can be opened. From now on guest memory
    /// counts as pinned if the backend may pin it.
    pub(super) fn backend_opener(&mut self, change: &SetVf, fds: &[OwnedFd]) -> Option<Acquire> {
        let numbers: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let given = change.backend(&numbers)?;
        self.check_connects(change, &given).ok()?;
        let mut connection = self.plan_connection(given);
        let Ok(with) = &connection.planned else {
            self.acquired = Some(OpenedResources::Backend(Box::new(connection)));
            return None;
        };
        let pins_memory = with.nic.backend.pins_memory();
        let vm = self.vm_mut()?;
        let memory = vm.memory().clone();
        if pins_memory {
            vm.begin_pinning();
        }
        Some(Box::new(move |cancel: &Cancel| {
            connection.opened = connection.planned.as_ref().ok().map(|with| with.open(&memory, Some(cancel)));
            OpenedResources::Backend(Box::new(connection))
        }))
    }

    /// Connects a backend, opened before, to a function whose backend is missing or is a deleted tap.
    ///
    /// # Errors
    ///
    /// Fails without a change if there is no such function, it has a backend, or the new one could not be opened or
    /// differs from what the driver was offered.
    pub(super) fn connect(
        &mut self,
        change: &SetVf,
        given: &RestoredBackend,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Failure> {
        self.check_connects(change, given)?;
        let Connection { planned, opened, .. } = self.take_connection(given);
        let WithBackend { planned, nic, vf, .. } = planned?;
        let no_backend = || Failure::new(ErrorKind::Host, "the backend was not opened; try again");
        let opened = opened.ok_or_else(no_backend)??;
        let vm = self.vm_mut().ok_or_else(not_booted)?;
        vm.give_backend((&given.id, vf), &nic, opened.backend).map_err(Error::from)?;
        self.planned = Arc::new(planned);
        self.decide_again(|pf, _| pf == given.id);
        if !fds.is_empty() {
            self.fds.entry(given.id.clone()).or_default().extend(fds);
        }
        Ok(())
    }

    /// Takes the plan that [`Self::backend_opener`] made. Plans again if the VM has changed since.
    fn take_connection(&mut self, given: &RestoredBackend) -> Connection {
        let opened = match self.acquired.take() {
            Some(OpenedResources::Backend(connection)) if connection.is_of(given, &self.planned) => {
                return *connection;
            }
            Some(OpenedResources::Backend(stale)) => stale.opened,
            _ => None,
        };
        let mut connection = self.plan_connection(given.clone());
        connection.opened = opened;
        connection
    }

    fn plan_connection(&self, given: RestoredBackend) -> Connection {
        let planned = self.with_backend(&given);
        Connection::new(given, &self.planned, planned)
    }

    /// Checks that `change` only connects the backend `given`, to a function that takes one now.
    fn check_connects(&self, change: &SetVf, given: &RestoredBackend) -> Result<(), Failure> {
        let (id, vf) = (&given.id, given.vf.map(VfIndex));
        let fail = |kind, what: &str| Failure::new(kind, format!("{}: {what}", name(given)));
        if change.index.is_some_and(|index| index.one().is_none()) {
            let what = "a backend belongs to one VF, and this index is several; give the index of one";
            return Err(Failure::new(ErrorKind::Invalid, format!("pf={id}: {what}")));
        }
        if change.changes_more() {
            return Err(fail(ErrorKind::Invalid, "give a backend by a request of its own, and the rest by another"));
        }
        let vm = self.vm().ok_or_else(not_booted)?;
        let plugged = vm.devices().find(id).ok_or_else(|| no_device(id))?;
        let missing = plugged.slot().with(|device| {
            let port = device.host_nic(vf)?;
            let present = || (port.backend_kind(), port.backend_name().to_string());
            Some(if port.takes_backend() { Ok(()) } else { Err(present()) })
        });
        match missing.flatten() {
            None => Err(fail(ErrorKind::NotFound, "there is no such network function; vm.info lists them")),
            Some(Err((BackendKind::Switch, _))) => Err(fail(ErrorKind::Conflict, &of_port(plugged.switch()))),
            Some(Err((_, name))) => {
                let what = format!(
                    "it has a backend ({name}); only one that is missing, or a tap that was deleted, can be replaced"
                );
                Err(fail(ErrorKind::Conflict, &what))
            }
            Some(Ok(())) => Ok(()),
        }
    }

    /// Plans the VM with the backend `given`.
    fn with_backend(&self, given: &RestoredBackend) -> Result<WithBackend, Failure> {
        let (id, vf) = (&given.id, given.vf.map(VfIndex));
        let fail = |kind, what: &str| Failure::new(kind, format!("{}: {what}", name(given)));
        let vm = self.vm().ok_or_else(not_booted)?;
        let mut config = self.config().clone();
        overrides::replace(&mut config, given).map_err(|line| fail(ErrorKind::Invalid, &line))?;
        let planned = PlannedVm::new(config);
        let mut planned = planned.map_err(|error| Failure::new(kind_of(&error.problem), error.to_string()))?;
        planned.keep_slots(self.planned.plan());
        if let Some(nic) = planned.nic_mut(id, given.vf) {
            nic.missing = MissingBackend::Refused;
        }
        let nic = planned.nic_mut(id, given.vf).cloned();
        let device = planned.plan().devices.iter().find(|device| device.id == *id).cloned();
        let (Some(nic), Some(device)) = (nic, device) else { return Err(no_device(id)) };
        let device = device.with_only(given.vf);
        landlock::check_device(|| kind::files(&device)).map_err(Error::from)?;
        if nic.backend.needs_shared_memory() && vm.shared_memory().is_none() {
            let what = "the backend must map the guest's memory, which is private in this VM; give it a tap";
            return Err(fail(ErrorKind::Invalid, what));
        }
        Ok(WithBackend { planned, device, nic, vf })
    }
}

/// Returns the name of the function and its backend for messages.
fn name(given: &RestoredBackend) -> String {
    let index = given.vf.map(|vf| format!(",index={vf}")).unwrap_or_default();
    let key = [("tap", given.tap.is_some()), ("vhost_socket", given.vhost_socket.is_some())];
    let key = key.into_iter().chain([("vdpa", given.vdpa.is_some())]).find(|(_, is)| *is);
    format!("pf={}{index},{}", given.id, key.map_or("num_fds", |(key, _)| key))
}

/// Returns the reason why a port of `switch` takes no backend.
fn of_port(switch: Option<&Switch>) -> String {
    let port = "it is a port of the PF's switch, and has no tap or other backend of its own";
    match switch.and_then(|switch| Some((switch, switch.uplink_name()?))) {
        None => port.to_string(),
        Some((switch, uplink)) if switch.uplink_was_passed() => {
            format!("{port}; the switch's uplink {uplink} was passed as a descriptor, and stays until the VM ends")
        }
        Some((switch, uplink)) if switch.uplink_gone() => format!(
            "{port}; the switch's uplink {uplink} was deleted: make it again, and it is found by its name: \
             ip tuntap add {uplink} mode tap; ip link set {uplink} up"
        ),
        Some((_, uplink)) => format!("{port}; the switch's uplink is {uplink}, and stays until the VM ends"),
    }
}

fn not_booted() -> Failure {
    let what = "the VM is not booted; give backends in vm.create or vm.add-net";
    Failure::new(ErrorKind::Conflict, what)
}
