//! Events about devices whose requests fail on the host: a full disk, a tap that accepts no frames.
//!
//! A guest can cause such failures, so a worker only records the change. The thread that writes events reports a state
//! that differs from the last reported one.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use pci::VfIndex;
use virtio_devices::{Block, FailureChange, FailureObserver, Net, Switch};

use crate::telemetry::events::{Events, Source, Tell, Watched};

/// The events of a kind of device.
struct Names {
    source: Source,
    failing: &'static str,
    recovered: &'static str,
}

const OF_NIC: Names = Names { source: Source::Sriov, failing: "backend-failing", recovered: "backend-recovered" };
const OF_DISK: Names = Names { source: Source::VirtioDevice, failing: "disk-failing", recovered: "disk-recovered" };

/// The failures of a device's functions.
pub(crate) struct FailureWatch {
    id: String,
    names: Names,
    events: Events,
    functions: Mutex<BTreeMap<Option<VfIndex>, State>>,
}

#[derive(Default)]
struct State {
    /// The error, while requests fail.
    error: Option<String>,
    /// True if the failure was reported last.
    told: bool,
}

impl FailureWatch {
    /// Watch for the NIC `id`.
    pub(crate) fn of_nic(id: &str, events: &Events) -> Arc<Self> {
        Self::new(id, OF_NIC, events)
    }

    /// Starts to report failures of the disk `id`.
    pub(crate) fn of_disk(block: &Block, id: &str, events: &Events) {
        block.observe_failures(Self::new(id, OF_DISK, events).observer(None));
    }

    fn new(id: &str, names: Names, events: &Events) -> Arc<Self> {
        let watch = Arc::new(Self { id: id.to_string(), names, events: events.clone(), functions: Mutex::default() });
        let watched: Arc<dyn Watched> = watch.clone();
        events.watch(Arc::downgrade(&watched));
        watch
    }

    /// Starts to report failures of `net`, which is VF `vf` of the NIC, or the NIC's own function.
    pub(crate) fn observe(self: &Arc<Self>, net: &Net, vf: Option<VfIndex>) {
        net.observe_failures(self.observer(vf));
    }

    /// Starts to report failures of the NIC's uplink as those of its own function, which has no tap on a switch.
    pub(crate) fn observe_uplink(self: &Arc<Self>, switch: &Switch) {
        switch.observe_uplink(self.observer(None));
    }

    fn observer(self: &Arc<Self>, vf: Option<VfIndex>) -> FailureObserver {
        let watch = Arc::clone(self);
        Box::new(move |change| watch.note(vf, change))
    }

    fn note(&self, vf: Option<VfIndex>, change: FailureChange) {
        let error = match change {
            FailureChange::Failing(error) => Some(error),
            FailureChange::Recovered => None,
        };
        self.functions.lock().entry(vf).or_default().error = error;
        self.events.look();
    }

    /// Takes the states that differ from the reported ones: the function, and the error while it fails.
    fn take_changes(&self) -> Vec<(Option<VfIndex>, Option<String>)> {
        let mut functions = self.functions.lock();
        let changed = functions.iter_mut().filter(|(_, state)| state.error.is_some() != state.told);
        changed
            .map(|(vf, state)| {
                state.told = state.error.is_some();
                (*vf, state.error.clone())
            })
            .collect()
    }
}

impl Watched for FailureWatch {
    fn look(&self, tell: Tell<'_>) {
        for (vf, error) in self.take_changes() {
            let index = vf.map(|vf| vf.to_string());
            let index = index.as_deref().map(|index| ("index", index));
            let told = error.as_deref().map(|error| ("error", error));
            let event = if error.is_some() { self.names.failing } else { self.names.recovered };
            let properties = [("id", self.id.as_str())].into_iter().chain(index).chain(told);
            tell(self.names.source, event, &properties.collect::<Vec<_>>());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_reported_only_at_its_begin_and_its_end() {
        let watch = FailureWatch::new("pf0", OF_NIC, &Events::default());
        let mut told = Vec::new();
        let mut look = || {
            watch.look(&mut |_, event, properties| {
                let values: Vec<_> = properties.iter().map(|(name, value)| format!("{name}={value}")).collect();
                told.push(format!("{event} {}", values.join(",")));
            });
        };
        let failing = || FailureChange::Failing("full".to_string());
        watch.note(Some(VfIndex(3)), failing());
        look();
        look();
        // A failure that ends and starts again between two looks is the same failure.
        watch.note(Some(VfIndex(3)), FailureChange::Recovered);
        watch.note(Some(VfIndex(3)), failing());
        look();
        watch.note(None, failing());
        watch.note(Some(VfIndex(3)), FailureChange::Recovered);
        look();
        let expected = [
            "backend-failing id=pf0,index=3,error=full",
            "backend-failing id=pf0,error=full",
            "backend-recovered id=pf0,index=3",
        ];
        assert_eq!(told, expected);
    }
}
