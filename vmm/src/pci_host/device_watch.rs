//! Events about the guests' changes to devices.
//!
//! A guest can change a device again and again. So an access only marks the device as changed. The thread that writes
//! events compares the device's state with the last reported one when it runs, and reports the difference. A change
//! that is undone in between is not reported; the last state always is.
//!
//! Writes that a register refused, and the actions of drivers, are logged at once, with `-vv`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pci::{Effects, Placement, Reach, Refused, VfIndex};
use virtio_devices::{
    BackendChange, BackendObserver, HostNic as _, NeedsResetObserver, Net, ResetBy, SriovStatus, Status, VirtioPci,
};

use crate::pci_host::refused_writes::RefusedWrites;
use crate::pci_host::slot::{Slot, Watch};
use crate::telemetry::events::{Events, Source, Tell, Watched};
use crate::telemetry::log_line;

/// The most lines about the queues of a function that asks for a reset.
const MOST_FAULTS: usize = 4;

/// A device whose changes become events.
pub(crate) struct DeviceWatch {
    id: String,
    slot: Weak<Slot>,
    events: Events,
    /// True if the device may have changed since the last look.
    changed: AtomicBool,
    /// True once the host removes the device: changes are no longer reported.
    ended: AtomicBool,
    told: Mutex<State>,
    placement: Placement,
    /// Refused writes; `None` without `-vv`.
    refused: Option<RefusedWrites>,
}

/// The state of a device that events report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct State {
    /// True while its own driver is up.
    driver: bool,
    /// Number of VFs that exist.
    enabled: u16,
    /// True for each VF whose driver is up.
    running: Vec<bool>,
    /// The cause of the last disabling of VFs.
    disabled_by: ResetBy,
    /// Causes of the last reset of its own function, and of each VF that exists.
    reset_by: ResetBy,
    vfs_reset_by: Vec<ResetBy>,
    /// True while its own function requests a reset from its driver.
    needs_reset: bool,
    /// The VFs that request a reset.
    need_reset: BTreeSet<u16>,
}

/// A change of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Activated,
    Reset(ResetBy),
    VfsEnabled(u16),
    VfsDisabled(u16, ResetBy),
    VfDriverOk(u16),
    VfReset(u16, ResetBy),
    NeedsReset,
    VfNeedsReset(u16),
}

impl DeviceWatch {
    /// Starts to report changes of the device `id` in `slot`, which is in its state of power-on.
    pub(crate) fn begin(id: &str, slot: &Arc<Slot>, events: &Events) {
        let (id, slot_of, events_of) = (id.to_string(), Arc::downgrade(slot), events.clone());
        let ([changed, ended], told) = ([(); 2].map(|()| AtomicBool::new(false)), Mutex::default());
        let placement = slot.placement();
        let refused = log::log_enabled!(log::Level::Debug).then(RefusedWrites::default);
        let watch = Arc::new(Self { id, slot: slot_of, events: events_of, changed, ended, told, placement, refused });
        let watched: Arc<dyn Watched> = watch.clone();
        events.watch(Arc::downgrade(&watched));
        let noted = Arc::downgrade(&watch);
        let observer: Arc<NeedsResetObserver> =
            Arc::new(move || noted.upgrade().iter().for_each(|watch| watch.note_effects(Effects::QUEUES)));
        slot.with(|device| {
            device.observe_needs_reset(&observer);
            if log::log_enabled!(log::Level::Debug) {
                let index = |vf: Option<VfIndex>| vf.map(|vf| vf.to_string());
                device.log_drivers(&|vf| log_line::subject(&watch.id, index(vf).as_deref()));
            }
        });
        slot.set_watch(watch);
    }

    fn note_effects(&self, effects: Effects) {
        let may_differ = effects.queues || effects.vfs.is_some() || effects.reset.is_some();
        if may_differ && !self.changed.swap(true, Ordering::Relaxed) {
            self.events.look();
        }
    }

    /// Logs a write that was refused, at a limited rate.
    fn note_refused(&self, reach: Reach, refused: Refused) {
        let Some(writes) = &self.refused else { return };
        let vf = self.vf_in(reach);
        if let Some(line) = writes.line(vf, refused) {
            let index = vf.map(|vf| vf.to_string());
            log::debug!("{}: {line}", log_line::subject(&self.id, index.as_deref()));
        }
    }

    /// Lines about the queues of a function that newly asks for a reset.
    fn reset_reasons(&self, device: &dyn VirtioPci, change: Change) -> Vec<String> {
        let vf = match change {
            Change::NeedsReset => None,
            Change::VfNeedsReset(index) => Some(VfIndex(index)),
            _ => return Vec::new(),
        };
        let index = vf.map(|vf| vf.to_string());
        let subject = log_line::subject(&self.id, index.as_deref());
        let mut faults = device.broken_rings(vf);
        let more = faults.len().saturating_sub(MOST_FAULTS);
        faults.truncate(MOST_FAULTS);
        if more > 0 {
            faults.push(format!("and {more} more queues"));
        }
        if faults.is_empty() {
            let other = "it has changed since, is behind an IOMMU or held by its backend, or the host asked for this";
            faults.push(format!("needs a reset, and no invalid ring was found: {other}"));
        }
        faults.into_iter().map(|fault| format!("{subject}: {fault}")).collect()
    }

    /// The VF in `reach`; `None` for the device's own function.
    fn vf_in(&self, reach: Reach) -> Option<VfIndex> {
        let (Reach::Function(rid), Some(vfs)) = (reach, self.placement.vfs) else { return None };
        (0..vfs.total_vfs).map(VfIndex).find(|vf| vfs.vf_rid(self.placement.rid, *vf) == rid)
    }
}

impl Watch for DeviceWatch {
    fn note(&self, reach: Reach, effects: Effects) {
        self.note_effects(effects);
        if let Some(refused) = effects.refused {
            self.note_refused(reach, refused);
        }
    }
}

/// Starts to report when the backend of `net` is lost, and when it returns. `net` is VF `vf` of the device `id`, or
/// that device's own function. A guest cannot cause this, so it is reported at once.
pub(crate) fn tell_backend(net: &Net, id: &str, vf: Option<VfIndex>, events: &Events) {
    net.observe_backend(backend_observer(id, vf, net.backend_name(), events));
}

/// Observer that reports when the backend of the device `id`, or of its VF `vf`, is lost, and when it returns.
pub(crate) fn backend_observer(id: &str, vf: Option<VfIndex>, backend: &str, events: &Events) -> BackendObserver {
    let (id, index) = (id.to_string(), vf.map(|vf| vf.to_string()));
    let (backend, events) = (backend.to_string(), events.clone());
    Box::new(move |change| {
        let event = match change {
            BackendChange::Lost => "backend-lost",
            BackendChange::Restored => "backend-restored",
        };
        let index = index.as_deref().map(|index| ("index", index));
        let properties: Vec<_> =
            [("id", id.as_str())].into_iter().chain(index).chain([("backend", backend.as_str())]).collect();
        events.tell(Source::Sriov, event, &properties);
    })
}

impl Watched for DeviceWatch {
    fn look(&self, tell: Tell<'_>) {
        // Before the look: a change from here on sets the flag again.
        if !self.changed.swap(false, Ordering::AcqRel) {
            return;
        }
        // The slot is dropped at once: reporting may take long, and a device that is removed must close its tap.
        let Some(slot) = self.slot.upgrade() else { return };
        let mut told = self.told.lock();
        let (now, reasons) = slot
            .with(|device| {
                let now = State::of(device);
                // Only with `-vv`: the rings are read again.
                let changes = if self.refused.is_some() { told.changes(&now) } else { Vec::new() };
                (now, changes.into_iter().flat_map(|change| self.reset_reasons(device, change)).collect::<Vec<_>>())
            })
            // A device that was removed was reset before.
            .unwrap_or_default();
        drop(slot);
        if self.ended.load(Ordering::Acquire) {
            return;
        }
        reasons.iter().for_each(|line| log::debug!("{line}"));
        for change in told.changes(&now) {
            let (source, event, number, by) = change.event();
            let number = number.map(|(name, number)| (name, number.to_string()));
            let number = number.as_ref().map(|(name, text)| (*name, text.as_str()));
            let by = by.map(|by| ("by", by));
            let properties: Vec<_> = [("id", self.id.as_str())].into_iter().chain(number).chain(by).collect();
            tell(source, event, &properties);
        }
        *told = now;
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }
}

impl State {
    fn of(device: &dyn VirtioPci) -> Self {
        let is = |vf, bit| device.function_status(vf).is_some_and(|status| status.driver.contains(bit));
        let vf_is = |index, bit| is(Some(VfIndex(index)), bit);
        let by = |vf| device.function_status(vf).map_or(ResetBy::default(), |status| status.reset_by);
        let sriov = device.sriov_status();
        let enabled = sriov.map_or(0, SriovStatus::num_visible);
        Self {
            driver: is(None, Status::DRIVER_OK),
            enabled,
            running: (0..enabled).map(|index| vf_is(index, Status::DRIVER_OK)).collect(),
            disabled_by: sriov.map_or(ResetBy::default(), |sriov| sriov.disabled_by),
            reset_by: by(None),
            vfs_reset_by: (0..enabled).map(|index| by(Some(VfIndex(index)))).collect(),
            needs_reset: is(None, Status::DEVICE_NEEDS_RESET),
            need_reset: (0..enabled).filter(|index| vf_is(*index, Status::DEVICE_NEEDS_RESET)).collect(),
        }
    }

    /// The changes from this state to `now`, in a possible order. Drivers of VFs that no longer exist are not reported.
    fn changes(&self, now: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        let stays = self.enabled == now.enabled;
        if !stays && self.enabled > 0 {
            changes.push(Change::VfsDisabled(self.enabled, now.disabled_by));
        }
        if self.driver != now.driver {
            changes.push(if now.driver { Change::Activated } else { Change::Reset(now.reset_by) });
        }
        if now.needs_reset && !self.needs_reset {
            changes.push(Change::NeedsReset);
        }
        if !stays && now.enabled > 0 {
            changes.push(Change::VfsEnabled(now.enabled));
        }
        for (index, up) in (0..).zip(&now.running) {
            let was_up = stays && self.running.get(usize::from(index)) == Some(&true);
            match (was_up, *up) {
                (false, true) => changes.push(Change::VfDriverOk(index)),
                (true, false) => {
                    let by = now.vfs_reset_by.get(usize::from(index)).copied();
                    changes.push(Change::VfReset(index, by.unwrap_or_default()));
                }
                _ => {}
            }
            if now.need_reset.contains(&index) && !(stays && self.need_reset.contains(&index)) {
                changes.push(Change::VfNeedsReset(index));
            }
        }
        changes
    }
}

impl Change {
    /// Source and name of the event, its number, and the cause of a reset.
    const fn event(self) -> (Source, &'static str, Option<(&'static str, u16)>, Option<&'static str>) {
        match self {
            Self::Activated => (Source::VirtioDevice, "activated", None, None),
            Self::Reset(by) => (Source::VirtioDevice, "reset", None, Some(cause(by, "host"))),
            Self::VfsEnabled(count) => (Source::Sriov, "vfs-enabled", Some(("num_vfs", count)), None),
            Self::VfsDisabled(count, by) => {
                (Source::Sriov, "vfs-disabled", Some(("num_vfs", count)), Some(cause(by, "host")))
            }
            Self::VfDriverOk(index) => (Source::Sriov, "vf-driver-ok", Some(("index", index)), None),
            Self::VfReset(index, by) => {
                (Source::Sriov, "vf-reset", Some(("index", index)), Some(cause(by, "vf-disable")))
            }
            Self::NeedsReset => (Source::VirtioDevice, "needs-reset", None, None),
            Self::VfNeedsReset(index) => (Source::Sriov, "vf-needs-reset", Some(("index", index)), None),
        }
    }
}

/// The cause of a reset, as events name it. `other` caused the conventional reset of this kind of function.
const fn cause(by: ResetBy, other: &'static str) -> &'static str {
    match by {
        ResetBy::Driver => "driver",
        ResetBy::Flr => "flr",
        ResetBy::Removal => "surprise-removal",
        ResetBy::Conventional => other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use pci::spec::{header, sriov};
    use pci::{Access, ConfigTarget as _, Topology};
    use serde_json::json;
    use virtio_devices::NetSriov;
    use virtio_devices::testing::{Driver, FakeDevice, Hosted, memory};

    use super::*;
    use crate::telemetry::events::EventStream;
    use crate::telemetry::monitor::EventMonitor;

    fn state(driver: bool, running: &[bool]) -> State {
        let enabled = u16::try_from(running.len()).unwrap();
        State { driver, enabled, running: running.to_vec(), ..State::default() }
    }

    #[test]
    fn a_change_of_each_kind_is_reported_once() {
        let off = State::default();
        let up = state(true, &[]);
        let enabled = state(true, &[false, false]);
        let running = state(true, &[false, true]);
        assert_eq!(off.changes(&up), [Change::Activated]);
        assert_eq!(up.changes(&enabled), [Change::VfsEnabled(2)]);
        assert_eq!(enabled.changes(&running), [Change::VfDriverOk(1)]);
        assert_eq!(running.changes(&enabled), [Change::VfReset(1, ResetBy::Conventional)]);
        assert_eq!(running.changes(&up), [Change::VfsDisabled(2, ResetBy::Conventional)]);
        assert_eq!(
            running.changes(&off),
            [Change::VfsDisabled(2, ResetBy::Conventional), Change::Reset(ResetBy::Conventional)]
        );
        assert_eq!(running.changes(&running), []);
        let stuck = State { needs_reset: true, need_reset: BTreeSet::from([1]), ..running.clone() };
        assert_eq!(running.changes(&stuck), [Change::NeedsReset, Change::VfNeedsReset(1)]);
        assert_eq!((stuck.changes(&stuck), stuck.changes(&running)), (vec![], vec![]));
    }

    #[test]
    fn a_reset_names_the_driver_a_flr_or_the_disabling_of_vfs() {
        let by = |change: Change| change.event().3.unwrap();
        let causes = [ResetBy::Driver, ResetBy::Flr, ResetBy::Conventional];
        assert_eq!(causes.map(|cause| by(Change::VfReset(1, cause))), ["driver", "flr", "vf-disable"]);
        assert_eq!(by(Change::VfReset(1, ResetBy::Removal)), "surprise-removal");
        assert_eq!(causes.map(|cause| by(Change::Reset(cause))), ["driver", "flr", "host"]);
        assert_eq!(causes.map(|cause| by(Change::VfsDisabled(2, cause))), ["driver", "flr", "host"]);
        let running = State { vfs_reset_by: vec![ResetBy::Driver, ResetBy::Flr], ..state(true, &[true, true]) };
        let reset = State { running: vec![true, false], ..running.clone() };
        assert_eq!(running.changes(&reset), [Change::VfReset(1, ResetBy::Flr)]);
    }

    #[test]
    fn a_refused_write_names_its_function_and_reason() {
        let placement = Topology::<()>::new(127).place(Some(3), 2).unwrap();
        let vfs = (0..2).map(|_| FakeDevice::new(&[64])).collect();
        let device = NetSriov::new(FakeDevice::new(&[64]), vfs, placement, &memory()).unwrap();
        let slot = Slot::new(Box::new(device), placement, Arc::default()).unwrap();
        let noted = Arc::new(Noted::default());
        slot.set_watch(noted.clone());
        let write = |offset, value| {
            let access = Access::decode(u64::from(header::FIRST_EXTENDED_CAPABILITY + offset), 2).unwrap();
            slot.config_write(placement.rid, access.dword(), access.write(&u16::to_le_bytes(value)));
        };
        write(sriov::NUM_VFS_FDL, 3);
        write(sriov::CONTROL_STATUS, sriov::VF_ENABLE);
        let (reach, refused) = noted.0.lock().unwrap();
        assert_eq!(reach, Reach::Function(placement.rid));
        let expected = "refused a write (1 so far): VF Enable stays clear: NumVFs is 3, TotalVFs is 2";
        assert_eq!(RefusedWrites::default().line(None, refused).as_deref(), Some(expected));
    }

    /// The last refused write.
    #[derive(Default)]
    struct Noted(Mutex<Option<(Reach, Refused)>>);

    impl Watch for Noted {
        fn note(&self, reach: Reach, effects: Effects) {
            if let Some(refused) = effects.refused {
                *self.0.lock() = Some((reach, refused));
            }
        }
    }

    #[test]
    fn backend_loss_and_return_are_events_with_function_and_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let output = EventMonitor::Path(path.clone()).open().unwrap();
        let (stream, events) = EventStream::start(output, Instant::now()).unwrap();
        backend_observer("pf0", Some(VfIndex(3)), "/run/s", &events)(BackendChange::Lost);
        backend_observer("n", None, "/dev/vhost-vdpa-0", &events)(BackendChange::Restored);
        drop(stream);
        let text = std::fs::read_to_string(path).unwrap();
        let told = serde_json::Deserializer::from_str(&text).into_iter::<serde_json::Value>();
        let told = told.map(Result::unwrap).map(|mut event| {
            let mut take = |key: &str| event[key].take();
            (take("source"), take("event"), take("properties"))
        });
        assert_eq!(
            told.collect::<Vec<_>>(),
            [
                ("sriov".into(), "backend-lost".into(), json!({"id": "pf0", "index": "3", "backend": "/run/s"})),
                ("sriov".into(), "backend-restored".into(), json!({"id": "n", "backend": "/dev/vhost-vdpa-0"})),
            ]
        );
    }

    /// A worker that finds a broken ring requests a reset without an access of the guest.
    #[test]
    fn a_function_that_asks_for_a_reset_by_itself_is_reported() {
        let placement = Topology::<()>::new(127).place(Some(3), 1).unwrap();
        let device = NetSriov::new(FakeDevice::new(&[64]), vec![FakeDevice::new(&[64])], placement, &memory()).unwrap();
        let mut device = Hosted::new(device);
        let rid = placement.rid;
        Driver::new(&mut device, rid).init();
        let interrupts = device.pf().device().interrupts.clone().unwrap();
        let slot = Slot::new(Box::new(device.into_device()), placement, Arc::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let output = EventMonitor::Path(path.clone()).open().unwrap();
        let (stream, events) = EventStream::start(output, Instant::now()).unwrap();
        DeviceWatch::begin("pf0", &slot, &events);
        interrupts.ask_for_reset();
        let end = Instant::now() + Duration::from_secs(60);
        while !std::fs::read_to_string(&path).unwrap().contains("needs-reset") {
            assert!(Instant::now() < end, "an event reports it");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(stream);
    }

    /// The PF's VFs were enabled when the device was removed: the guest did not disable them before.
    #[test]
    fn events_report_what_ends_with_an_unplugged_device() {
        let placement = Topology::<()>::new(127).place(Some(3), 2).unwrap();
        let vfs = (0..2).map(|_| FakeDevice::new(&[64])).collect();
        let device = NetSriov::new(FakeDevice::new(&[64]), vfs, placement, &memory()).unwrap();
        let slot = Slot::new(Box::new(device), placement, Arc::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let output = EventMonitor::Path(path.clone()).open().unwrap();
        let (stream, events) = EventStream::start(output, Instant::now()).unwrap();
        DeviceWatch::begin("pf0", &slot, &events);
        let wait_for = |event: &str| {
            let end = Instant::now() + Duration::from_secs(60);
            while !std::fs::read_to_string(&path).unwrap().contains(event) {
                assert!(Instant::now() < end, "there is no {event}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let write = |offset, value| {
            let access = Access::decode(u64::from(header::FIRST_EXTENDED_CAPABILITY + offset), 2).unwrap();
            slot.config_write(placement.rid, access.dword(), access.write(&u16::to_le_bytes(value)));
        };
        write(sriov::NUM_VFS_FDL, 2);
        write(sriov::CONTROL_STATUS, sriov::VF_ENABLE);
        wait_for("vfs-enabled");
        slot.retire();
        wait_for("vfs-disabled");
        drop(stream);
    }

    #[test]
    fn vfs_that_are_enabled_again_have_no_earlier_driver() {
        let changes = state(true, &[true, true]).changes(&state(true, &[true, false, false]));
        assert_eq!(changes, [Change::VfsDisabled(2, ResetBy::default()), Change::VfsEnabled(3), Change::VfDriverOk(0)]);
    }
}
