//! Reports of functions whose backend is missing, and of their recovery.

use pci::VfIndex;
use virtio_devices::{HostNic as _, Net};

use crate::telemetry::events::{Events, Source};

/// Reports that `net` has no backend, if so. It is VF `vf` of the device `id`, or that device's own function.
pub(super) fn tell_missing(net: &Net, id: &str, vf: Option<VfIndex>, events: &Events) {
    if let Some(reason) = net.backend_missing() {
        tell(events, "vf-degraded", id, vf, ("reason", reason));
    }
}

/// Reports an event about the backend of VF `vf` of the device `id`, or of that device's own function.
pub(super) fn tell(events: &Events, event: &'static str, id: &str, vf: Option<VfIndex>, last: (&'static str, &str)) {
    let index = vf.map(|vf| vf.to_string());
    let index = index.as_deref().map(|index| ("index", index));
    let properties: Vec<_> = [("id", id)].into_iter().chain(index).chain([last]).collect();
    events.tell(Source::Sriov, event, &properties);
}
