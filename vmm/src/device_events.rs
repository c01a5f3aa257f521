//! What guests do to devices, told as events.
//!
//! A guest can change a device again and again. So an access only notes that its device may have changed; the thread that tells events
//! looks at it when it can, compares it with what has been told, and tells the difference. What changes there and back in between
//! is not told. The last state always is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pci::{Effects, VfIndex};
use virtio_devices::{BackendChange, BackendObserver, Net, Port as _, Status, VirtioPci};

use crate::events::{Events, Source, Tell, Watched};
use crate::slot::Slot;

/// A device whose changes are told.
pub struct DeviceWatch {
    id: String,
    slot: Weak<Slot>,
    events: Events,
    /// It may have changed since it was last looked at.
    changed: AtomicBool,
    told: Mutex<State>,
}

/// What of a device is told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct State {
    /// Its own driver is up.
    driver: bool,
    /// The VFs that exist.
    enabled: u16,
    /// Those with a driver that is up, by index.
    running: Vec<bool>,
}

/// A change of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Activated,
    Reset,
    VfsEnabled(u16),
    VfsDisabled(u16),
    VfDriverOk(u16),
    VfReset(u16),
}

impl DeviceWatch {
    /// Begins to tell what changes of the device in `slot`, which is called `id` and in its state of power-on.
    pub fn begin(id: &str, slot: &Arc<Slot>, events: &Events) {
        let (id, slot_of, events_of) = (id.to_string(), Arc::downgrade(slot), events.clone());
        let (changed, told) = (AtomicBool::new(false), Mutex::default());
        let watch = Arc::new(Self { id, slot: slot_of, events: events_of, changed, told });
        let watched: Arc<dyn Watched> = watch.clone();
        events.watch(Arc::downgrade(&watched));
        slot.set_watch(watch);
    }

    /// Notes that an access had `effects`.
    pub fn note(&self, effects: Effects) {
        let may_differ = effects.queues || effects.vfs.is_some() || effects.reset.is_some();
        if may_differ && !self.changed.swap(true, Ordering::Relaxed) {
            self.events.look();
        }
    }
}

/// Begins to tell when the backend of `net`, which is VF `vf` of the device called `id` or that device itself, is lost, and when it is
/// back. That is no guest's doing: it is told at once.
pub fn tell_backend(net: &Net, id: &str, vf: Option<VfIndex>, events: &Events) {
    net.observe_backend(observer(id, vf, net.backend_name(), events));
}

fn observer(id: &str, vf: Option<VfIndex>, backend: &str, events: &Events) -> BackendObserver {
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
        // Before the look: what changes from here on is noted again.
        if !self.changed.swap(false, Ordering::AcqRel) {
            return;
        }
        // The slot is let go at once: telling may take long, and a device that is removed has to let its tap go.
        let Some(now) = self.slot.upgrade().map(|slot| slot.with(|device| State::of(device))) else { return };
        let mut told = self.told.lock();
        for change in told.changes(&now) {
            let (source, event, property) = change.event();
            let value = property.map(|(name, number)| (name, number.to_string()));
            let second = value.as_ref().map(|(name, text)| (*name, text.as_str()));
            let properties: Vec<_> = [("id", self.id.as_str())].into_iter().chain(second).collect();
            tell(source, event, &properties);
        }
        *told = now;
    }
}

impl State {
    fn of(device: &dyn VirtioPci) -> Self {
        let is_up = |vf| device.function_status(vf).is_some_and(|status| status.driver.contains(Status::DRIVER_OK));
        let enabled = device.num_visible();
        Self { driver: is_up(None), enabled, running: (0..enabled).map(|index| is_up(Some(VfIndex(index)))).collect() }
    }

    /// What lies between this state and `now`, in an order in which it may have happened. VFs that are gone have no driver any
    /// more; that is not told.
    fn changes(&self, now: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        let stays = self.enabled == now.enabled;
        if !stays && self.enabled > 0 {
            changes.push(Change::VfsDisabled(self.enabled));
        }
        if self.driver != now.driver {
            changes.push(if now.driver { Change::Activated } else { Change::Reset });
        }
        if !stays && now.enabled > 0 {
            changes.push(Change::VfsEnabled(now.enabled));
        }
        for (index, up) in (0..).zip(&now.running) {
            let was_up = stays && self.running.get(usize::from(index)) == Some(&true);
            match (was_up, *up) {
                (false, true) => changes.push(Change::VfDriverOk(index)),
                (true, false) => changes.push(Change::VfReset(index)),
                _ => {}
            }
        }
        changes
    }
}

impl Change {
    /// Whom it is about, what it is called, and what else is told of it but the device.
    const fn event(self) -> (Source, &'static str, Option<(&'static str, u16)>) {
        match self {
            Self::Activated => (Source::VirtioDevice, "activated", None),
            Self::Reset => (Source::VirtioDevice, "reset", None),
            Self::VfsEnabled(count) => (Source::Sriov, "vfs-enabled", Some(("num_vfs", count))),
            Self::VfsDisabled(count) => (Source::Sriov, "vfs-disabled", Some(("num_vfs", count))),
            Self::VfDriverOk(index) => (Source::Sriov, "vf-driver-ok", Some(("index", index))),
            Self::VfReset(index) => (Source::Sriov, "vf-reset", Some(("index", index))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::event_monitor::EventMonitor;
    use crate::events::EventStream;

    fn state(driver: bool, running: &[bool]) -> State {
        State { driver, enabled: u16::try_from(running.len()).unwrap(), running: running.to_vec() }
    }

    #[test]
    fn a_change_of_each_kind_is_told_once() {
        let off = State::default();
        let up = state(true, &[]);
        let enabled = state(true, &[false, false]);
        let running = state(true, &[false, true]);
        assert_eq!(off.changes(&up), [Change::Activated]);
        assert_eq!(up.changes(&enabled), [Change::VfsEnabled(2)]);
        assert_eq!(enabled.changes(&running), [Change::VfDriverOk(1)]);
        assert_eq!(running.changes(&enabled), [Change::VfReset(1)]);
        assert_eq!(running.changes(&up), [Change::VfsDisabled(2)]);
        assert_eq!(running.changes(&off), [Change::VfsDisabled(2), Change::Reset]);
        assert_eq!(running.changes(&running), []);
    }

    #[test]
    fn a_backend_that_is_lost_or_back_is_told_with_its_function_and_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let output = EventMonitor::Path(path.clone()).open().unwrap();
        let (stream, events) = EventStream::start(output, std::time::Instant::now()).unwrap();
        observer("pf0", Some(VfIndex(3)), "/run/s", &events)(BackendChange::Lost);
        observer("n", None, "/dev/vhost-vdpa-0", &events)(BackendChange::Restored);
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

    #[test]
    fn vfs_that_are_enabled_anew_have_no_driver_of_before() {
        let changes = state(true, &[true, true]).changes(&state(true, &[true, false, false]));
        assert_eq!(changes, [Change::VfsDisabled(2), Change::VfsEnabled(3), Change::VfDriverOk(0)]);
    }
}
