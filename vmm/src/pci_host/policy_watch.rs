//! Events about drivers' actions that policies are about.
//!
//! A guest can repeat such actions, so a worker only records them. The thread that writes events reports the last of
//! each kind and function when it runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use pci::VfIndex;
use virtio_devices::{Net, PolicyNotice};
use vm_api::config::mac::MacAddress;

use crate::telemetry::events::{Events, Source, Tell, Watched};

/// Policy events of a NIC's functions since the last report.
pub(crate) struct PolicyWatch {
    id: String,
    events: Events,
    noted: Mutex<BTreeMap<Option<VfIndex>, Noted>>,
}

/// Policy events of a function.
#[derive(Debug, Default)]
struct Noted {
    /// The address that its driver set.
    mac: Option<[u8; 6]>,
    /// Number of frames sent from addresses that are not its own.
    spoofed: Option<u64>,
}

impl PolicyWatch {
    /// Watch for the NIC `id`.
    pub(crate) fn new(id: &str, events: &Events) -> Arc<Self> {
        let watch = Arc::new(Self { id: id.to_string(), events: events.clone(), noted: Mutex::default() });
        let watched: Arc<dyn Watched> = watch.clone();
        events.watch(Arc::downgrade(&watched));
        watch
    }

    /// Starts to report about `net`, which is VF `vf` of the NIC, or the NIC's own function.
    pub(crate) fn observe(self: &Arc<Self>, net: &Net, vf: Option<VfIndex>) {
        let watch = Arc::clone(self);
        net.observe_policy(Box::new(move |notice| watch.note(vf, notice)));
    }

    fn note(&self, vf: Option<VfIndex>, notice: PolicyNotice) {
        let mut noted = self.noted.lock();
        let of_function = noted.entry(vf).or_default();
        match notice {
            PolicyNotice::AddressChanged { mac } => of_function.mac = Some(mac),
            PolicyNotice::Spoofed { frames } => of_function.spoofed = Some(frames),
        }
        drop(noted);
        self.events.look();
    }
}

impl Watched for PolicyWatch {
    fn look(&self, tell: Tell<'_>) {
        // The lock is not held while reporting, which may take long.
        let noted = std::mem::take(&mut *self.noted.lock());
        for (vf, Noted { mac, spoofed }) in noted {
            let index = vf.map(|vf| vf.to_string());
            let mut tell_one = |event, name, value: String| {
                let index = index.as_deref().map(|index| ("index", index));
                let properties = [("id", self.id.as_str())].into_iter().chain(index).chain([(name, value.as_str())]);
                tell(Source::Sriov, event, &properties.collect::<Vec<_>>());
            };
            if let Some(mac) = mac {
                tell_one("vf-mac-changed", "mac", MacAddress(mac).to_string());
            }
            if let Some(frames) = spoofed {
                tell_one("vf-spoofed", "frames", frames.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_notice_of_each_kind_and_function_is_reported_once() {
        let watch = PolicyWatch::new("pf0", &Events::default());
        let spoofed = |frames| PolicyNotice::Spoofed { frames };
        let mac = |last| PolicyNotice::AddressChanged { mac: [2, 0, 0, 0, 0, last] };
        for (vf, notice) in
            [(Some(3), spoofed(1)), (None, spoofed(4)), (Some(3), spoofed(2)), (Some(3), mac(1)), (Some(3), mac(9))]
        {
            watch.note(vf.map(VfIndex), notice);
        }
        let mut told = Vec::new();
        let mut tell = |_, event: &'static str, properties: &[(&'static str, &str)]| {
            let values: Vec<_> = properties.iter().map(|(name, value)| format!("{name}={value}")).collect();
            told.push(format!("{event} {}", values.join(",")));
        };
        watch.look(&mut tell);
        watch.look(&mut tell);
        let expected = [
            "vf-spoofed id=pf0,frames=4",
            "vf-mac-changed id=pf0,index=3,mac=02:00:00:00:00:09",
            "vf-spoofed id=pf0,index=3,frames=2",
        ];
        assert_eq!(told, expected);
    }
}
