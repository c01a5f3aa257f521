//! The VM of the API: a configuration, and a [`Vm`] while it is booted.

mod faults;
mod guest_control;
mod guest_lines;
mod guest_notices;
mod guest_settings;
mod hotplug;
mod resizing;
mod vf_settings;

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pci::Bdf;
use virtio_devices::{Cancel, RateLimit, RateLimiter};
use vm_api::config::error::shortened;
use vm_api::config::id::LONGEST;

use crate::api::info::{PolicyInfo, VmState};
use crate::api::{Action, Failure};
use crate::config::{DeviceKind, DevicePlan, LinkPolicy, NetConfig, PlannedVm, VmConfig};
use crate::control::guest_vfs::{self, GuestVfs};
use crate::control::opening::{Acquire, OpenedResources};
use crate::control::set_vf;
use crate::devices::Removed;
use crate::devices::fallback::Held;
use crate::devices::kind;
use crate::devices::vhost_user_backends::VhostUserBackends;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::landlock;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::overrides;
use crate::snapshot::restorer::Restored;
use crate::snapshot::saver::Saver;
use crate::snapshot::state_file::{SavedDescriptors, SavedLink};
use crate::telemetry::events::{Events, Source};
use crate::vcpu::cpu::Stop;
use crate::vm::host_limits::HostLimits;
use crate::vm::{Vm, VmError};

/// Rate limit of reports about the guest's own reboots, in events and in the log: a burst of one hour's worth, then one
/// per minute, so that a guest cannot fill the host's disk by rebooting.
const REBOOTS: RateLimit = RateLimit { size: 60, one_time_burst: 0, refill: Duration::from_secs(3600) };

/// A VM from `vm.create` to `vm.delete`, booted or not.
pub(crate) struct Instance {
    /// Configuration of the client, with defaults filled in. A planned addition of a device shares it.
    pub(super) planned: Arc<PlannedVm>,
    /// Number of vCPUs now, or after the next start. The configuration keeps the original number, which device queues
    /// were planned for.
    vcpus: u32,
    /// Tap descriptors from clients, by the id of their NIC.
    pub(super) fds: HashMap<String, Vec<OwnedFd>>,
    pub(super) vm: Option<Vm>,
    /// VF links set since boot, by PF and index.
    links: HashMap<(String, u16), LinkPolicy>,
    /// Settings that the guest has made for its VFs.
    guest_vfs: GuestVfs,
    /// True if links may be taken down while the VM is sent.
    pub(super) leaves_links: bool,
    pub(super) held: Vec<Held>,
    /// True once the VM was booted.
    has_run: bool,
    events: Events,
    /// Resource limits of this process.
    limits: HostLimits,
    /// Resources opened for the action to apply next.
    pub(super) acquired: Option<OpenedResources>,
    /// Rate limiter of reboot reports.
    reboots: RateLimiter,
    /// Number of reboots, by the guest or by a client.
    reboot_count: u64,
    /// Number of reboots since the last report.
    untold: u64,
}

/// A device added to a booted VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Added {
    /// Id of the device.
    pub id: String,
    /// Address of the device's own function.
    pub address: Bdf,
}

/// State of the guest after its events.
pub(crate) enum GuestOutcome {
    /// The guest runs.
    On,
    /// The guest powered off.
    Off,
}

impl Instance {
    /// Creates a VM that does not run, and reports to `events`. The payload is checked at boot. `limits`: resource
    /// limits of this process.
    pub(crate) fn new(planned: PlannedVm, events: Events, limits: HostLimits) -> Self {
        planned.log_warnings(None);
        let vcpus = planned.config().cpus.boot_vcpus;
        let (fds, links, reboots) = (HashMap::new(), HashMap::new(), RateLimiter::of_ops(REBOOTS, Instant::now()));
        let new = Self {
            planned: Arc::new(planned),
            vcpus,
            fds,
            links,
            guest_vfs: GuestVfs::new(),
            leaves_links: false,
            held: Vec::new(),
            vm: None,
            has_run: false,
            events,
            limits,
            acquired: None,
            reboots,
            reboot_count: 0,
            untold: 0,
        };
        new.warn_of_macs(None);
        new
    }

    /// Takes over a VM restored from a snapshot, paused. `fds`: tap descriptors from clients.
    ///
    /// # Errors
    ///
    /// Fails if the machine cannot be restored. Nothing is left of the VM then.
    pub(crate) fn restored(
        restored: Restored,
        fds: Vec<OwnedFd>,
        events: Events,
        limits: HostLimits,
    ) -> Result<Self, Error> {
        let Restored { planned, mut vm, machine, links } = restored;
        vm.take_terminal()?;
        guest_vfs::prepare(&vm, &planned, &machine.guest_vfs);
        vm.restore_machine(&machine).map_err(SnapshotError::from)?;
        vm.read_input()?;
        let mut instance = Self::new(planned, events, limits);
        for plugged in vm.devices().iter() {
            instance.planned_mut().set_slot(&plugged.plan().id, plugged.placement().rid.device());
        }
        instance.vcpus = machine.wanted_vcpus.into();
        instance.vm = Some(*vm);
        instance.has_run = true;
        instance.links = links.into_iter().map(|SavedLink { id, vf, link }| ((id, vf), link)).collect();
        instance.restore_links();
        instance.restore_guest_settings(&machine.guest_vfs);
        instance.keep_descriptors(fds);
        Ok(instance)
    }

    /// Keeps descriptors from clients open, for the NICs with their numbers.
    fn keep_descriptors(&mut self, fds: Vec<OwnedFd>) {
        for fd in fds {
            let has_it = |net: &&NetConfig| {
                net.backend.fds.contains(&fd.as_raw_fd())
                    || net.vfs.iter().any(|vf| vf.backend.fds.contains(&fd.as_raw_fd()))
            };
            let id = self.config().net.iter().find(has_it).and_then(|net| net.id.clone());
            self.fds.entry(id.unwrap_or_default()).or_default().push(fd);
        }
    }

    /// VF links that clients have set, by PF and index.
    pub(crate) fn saved_links(&self) -> Vec<SavedLink> {
        let link = |((id, vf), link): (&(String, u16), &LinkPolicy)| SavedLink { id: id.clone(), vf: *vf, link: *link };
        let mut links: Vec<_> = self.links.iter().map(link).collect();
        links.sort_by(|one, other| (&one.id, one.vf).cmp(&(&other.id, other.vf)));
        links
    }

    /// Prepares a snapshot of the paused VM in `folder`.
    ///
    /// # Errors
    ///
    /// Fails if the VM cannot be saved.
    pub(crate) fn saver(&mut self, folder: PathBuf) -> Result<Saver, Failure> {
        // The channel's state has the notices.
        self.report_rest();
        let vm = self.vm.as_mut().ok_or_else(|| Failure::new(ErrorKind::Conflict, "the VM is not booted"))?;
        let mut machine = vm.save_machine().map_err(|error| Error::from(SnapshotError::from(error)))?;
        let (memory, filling) = (vm.memory().clone(), vm.filling().cloned());
        let discarded = vm.devices().discarded();
        machine.guest_vfs = self.saved_guest_settings();
        let machine = serde_json::to_value(machine)
            .map_err(|error| Failure::new(ErrorKind::Host, format!("the machine cannot be JSON: {error}")))?;
        let links = self.saved_links();
        let awaiting = self.awaited_descriptors();
        let config = self.config().clone();
        Ok(Saver { folder, config, awaiting, links, machine, memory, filling, discarded })
    }

    /// Functions that await tap descriptors.
    pub(crate) fn awaited_descriptors(&self) -> Vec<SavedDescriptors> {
        overrides::awaited_descriptors(&self.planned)
    }

    /// Configuration of the client, with defaults filled in.
    pub(crate) fn config(&self) -> &VmConfig {
        self.planned.config()
    }

    /// The configuration and its plan, to change them. An addition that was planned for them before is stale then.
    fn planned_mut(&mut self) -> &mut PlannedVm {
        Arc::make_mut(&mut self.planned)
    }

    /// Number of vCPUs now, or after the next start.
    pub(crate) const fn vcpus(&self) -> u32 {
        self.vcpus
    }

    /// Policy of VF `vf` of the NIC `id`, or of the NIC itself.
    pub(crate) fn policy(&self, id: &str, vf: Option<u16>) -> PolicyInfo {
        let link = vf.and_then(|index| self.links.get(&(id.to_string(), index)));
        let guest = vf.map(|index| self.guest_settings(id, index)).unwrap_or_default();
        set_vf::policy_of(self.config(), id, vf, link.copied(), &guest)
    }

    /// State for `vm.info`.
    pub(crate) fn state(&self) -> VmState {
        match &self.vm {
            Some(vm) if vm.is_paused() => VmState::Paused,
            Some(_) => VmState::Running,
            None if self.has_run => VmState::Shutdown,
            None => VmState::Created,
        }
    }

    /// Opens all host resources of the VM. [`Self::start`] then runs the guest.
    ///
    /// # Errors
    ///
    /// Fails without a change if a resource is missing.
    pub(crate) fn open(&mut self) -> Result<(), Error> {
        let vm = match self.acquired.take() {
            Some(OpenedResources::Vm(vm)) => *vm?,
            _ => {
                self.begin_boot()?;
                self.opener()(None)?
            }
        };
        for plugged in vm.devices().iter() {
            Arc::make_mut(&mut self.planned).set_slot(&plugged.plan().id, plugged.placement().rid.device());
        }
        self.vm = Some(vm);
        self.links.clear();
        self.guest_vfs.clear();
        self.held.clear();
        Ok(())
    }

    /// Runs the checks that need no open resources, and reports that the VM boots.
    fn begin_boot(&self) -> Result<(), Error> {
        self.config().payload.check_present()?;
        landlock::check_vm(self.config(), || kind::all_files(&self.planned.plan().devices))?;
        self.events.vm("booting");
        Ok(())
    }

    /// Returns an opener of all host resources of the VM, for any thread.
    fn opener(&self) -> impl FnOnce(Option<&Cancel>) -> Result<Vm, VmError> + Send + use<> {
        let (mut config, plan) = (self.config().clone(), self.planned.plan().clone());
        config.cpus.boot_vcpus = self.vcpus;
        let (events, limits) = (self.events.clone(), self.limits);
        move |cancel| Vm::new(&config, &plan, events, limits, cancel)
    }

    /// Returns an opener, for any thread, of the vhost-user backends or host devices that `action` needs; `None` if
    /// there are none, or the action will fail. The action must be applied next then. A device that may pin guest
    /// memory counts as doing so until [`Self::end_pinning`], because the guest can reboot or return memory in the
    /// meantime.
    pub(crate) fn acquirer(&mut self, action: &Action) -> Option<Acquire> {
        if matches!(action, Action::Boot) {
            let takes_time =
                |plan: &DevicePlan| VhostUserBackends::are_of(plan) || matches!(plan.kind, DeviceKind::Vfio(_));
            if self.vm.is_some() || !self.planned.plan().devices.iter().any(takes_time) {
                return None;
            }
            self.begin_boot().ok()?;
            let opener = self.opener();
            return Some(Box::new(|cancel: &Cancel| OpenedResources::Vm(opener(Some(cancel)).map(Box::new))));
        }
        match action {
            Action::SetVf(change, fds) if self.vm.is_some() => self.backend_opener(change, fds),
            Action::Add(device) => self.device_opener(device),
            _ => None,
        }
    }

    /// Stores the resources opened for the next action. Returns false if they are stale.
    pub(crate) fn keep(&mut self, acquired: OpenedResources) -> bool {
        let memory = self.vm.as_ref().map(Vm::memory);
        let is_of_use = match &acquired {
            // A reboot may have given the guest other memory.
            OpenedResources::Device(addition) => memory.is_none_or(|memory| addition.opened.suits(memory)),
            OpenedResources::Backend(connection) => memory.is_some_and(|memory| connection.suits(memory)),
            _ => true,
        };
        self.acquired = is_of_use.then_some(acquired);
        is_of_use
    }

    /// Drops resources left over from an action.
    pub(crate) fn forget_acquired(&mut self) {
        self.acquired = None;
    }

    /// Ends the pinning of openers: all their devices are plugged in or closed.
    pub(crate) fn end_pinning(&mut self) {
        if let Some(vm) = &mut self.vm {
            vm.end_pinning();
        }
    }

    /// Runs the guest, after [`Self::open`]. Signals must no longer kill the process, because a terminal must be
    /// restored.
    ///
    /// # Errors
    ///
    /// Fails if the guest cannot run. The VM is shut down then.
    pub(crate) fn start(&mut self) -> Result<(), Error> {
        let Some(vm) = &mut self.vm else { return Ok(()) };
        let started =
            vm.take_terminal().and_then(|()| vm.read_input()).and_then(|()| vm.power_on()).map_err(Error::from);
        match started {
            Ok(()) => {
                self.has_run = true;
                self.events.vm("booted");
            }
            Err(_) => self.vm = None,
        }
        started
    }

    /// Shuts the VM down immediately.
    pub(crate) fn shutdown(&mut self) {
        if let Some(vm) = self.give_up() {
            drop(vm);
            self.events.vm("shutdown");
        }
    }

    /// Hands the VM over; dropping it shuts it down.
    pub(crate) fn give_up(&mut self) -> Option<Vm> {
        self.report_rest();
        let mut vm = self.vm.take()?;
        self.events.end_watches();
        let removed = vm.remove_unplugged();
        self.forget(&removed);
        Some(vm)
    }

    /// Reboots the guest.
    ///
    /// # Errors
    ///
    /// Fails if the guest cannot run. The VM is shut down then.
    pub(crate) fn reset(&mut self) -> Result<(), Error> {
        self.reset_by(Vm::reset, true)
    }

    /// Reboots a guest that has reset itself.
    fn reset_by_guest(&mut self, reset: impl FnOnce(&mut Vm) -> Result<(), VmError>) -> Result<GuestOutcome, Error> {
        let now = Instant::now();
        let is_told = self.reboots.wait(now).is_zero();
        if is_told {
            self.reboots.take_op(now);
            match std::mem::take(&mut self.untold) {
                0 => log::info!("vm: the guest reboots"),
                untold => log::info!("vm: the guest rebooted ({untold} earlier reboots not logged)"),
            }
        } else {
            self.untold += 1;
        }
        self.reset_by(reset, is_told).map(|()| GuestOutcome::On)
    }

    /// Number of reboots since the VM was created, by the guest or by a client.
    pub(crate) const fn reboot_count(&self) -> u64 {
        self.reboot_count
    }

    fn reset_by(&mut self, reset: impl FnOnce(&mut Vm) -> Result<(), VmError>, is_told: bool) -> Result<(), Error> {
        let Some(vm) = &mut self.vm else { return Ok(()) };
        self.reboot_count += 1;
        if is_told {
            self.events.vm("rebooting");
        }
        let removed = vm.remove_unplugged();
        let started = reset(vm).map_err(Error::from);
        self.forget(&removed);
        self.end_stale_guest_settings();
        match started {
            Ok(()) if is_told => self.events.vm("rebooted"),
            Ok(()) => {}
            Err(_) => self.shutdown(),
        }
        started
    }

    /// The booted VM, running or paused.
    pub(crate) const fn vm(&self) -> Option<&Vm> {
        self.vm.as_ref()
    }

    /// The booted VM, running or paused.
    pub(crate) const fn vm_mut(&mut self) -> Option<&mut Vm> {
        self.vm.as_mut()
    }

    /// Handles events of the guest, after [`Vm::event`] became readable.
    ///
    /// # Errors
    ///
    /// Fails if the guest cannot continue. The VM is shut down then.
    pub(crate) fn turn(&mut self) -> Result<GuestOutcome, Error> {
        let Some(vm) = &mut self.vm else { return Ok(GuestOutcome::On) };
        match vm.take_stop() {
            Some(Stop::PowerOff) => {
                log::info!("vm: the guest powers off");
                self.shutdown();
                Ok(GuestOutcome::Off)
            }
            Some(Stop::Reset) => self.reset_by_guest(Vm::reset),
            Some(Stop::TripleFault) => self.reset_by_guest(Vm::reset_after_triple_fault),
            Some(Stop::Failed(error)) => {
                self.shutdown();
                Err(VmError::from(error).into())
            }
            None => {
                let removed = vm.take_ejected();
                self.forget(&removed);
                self.end_stale_guest_settings();
                Ok(GuestOutcome::On)
            }
        }
    }

    fn forget(&mut self, removed: &[Removed]) {
        for Removed { id, address } in removed {
            self.forget_device(id);
            self.events.tell(Source::Vm, "device-removed", &[("id", id), ("bdf", &address.to_string())]);
        }
    }

    fn forget_device(&mut self, id: &str) {
        self.planned_mut().remove(id);
        self.fds.remove(id);
        self.links.retain(|(pf, _), _| pf != id);
        self.guest_vfs.forget(id);
    }
}

pub(super) fn no_device(id: &str) -> Failure {
    let id = shortened(id, LONGEST);
    let line = format!("there is no device {id}; vm.info lists the devices");
    Failure::new(ErrorKind::NotFound, line)
}

#[cfg(test)]
mod tests;
