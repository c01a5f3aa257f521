//! An Intel X550 or X540 with its VFs.

use virtio_devices::{Inspect as _, PortSettings, X550Spec, X550Sriov};

use super::net::{switch_files, uplink_file};
use super::site::{Opened, Site};
use crate::config::X550Plan;
use crate::devices::backends::BackendOpener;
use crate::devices::counters::NicCounters;
use crate::devices::error::DeviceError;
use crate::devices::handle::{Handle, NetHandle};
use crate::error_kind::ErrorKind;
use crate::landlock::Rule;
use crate::pci_host::device_watch::backend_observer;
use crate::pci_host::failure_watch::FailureWatch;

/// Doorbell of the queues of a pool.
const OF_POOL: u64 = 1;

/// The settings of the device.
fn spec(plan: &X550Plan) -> X550Spec {
    X550Spec { id: plan.id.clone(), model: plan.model, mac: plan.mac.0, total_vfs: plan.total_vfs }
}

pub(super) fn open(x550: &X550Plan, site: &Site<'_>, opener: &mut BackendOpener<'_>) -> Result<Opened, DeviceError> {
    let Site { plan, placement, host } = *site;
    let X550Plan { id, model: _, mac, total_vfs, switch, uplink_policy, link_up, follows_uplink, root: _ } = x550;
    let failure_watch = FailureWatch::of_nic(id, &host.events);
    let opened = opener.empty_switch(id, switch, total_vfs + 1);
    let switch = opened.map_err(|error| DeviceError::Backend { option: site.option(), error })?;
    failure_watch.observe_uplink(&switch);
    let uplink = switch.uplink_name().unwrap_or_default();
    switch.observe_uplink_loss(backend_observer(id, None, uplink, &host.events));
    let settings = PortSettings { follows_uplink: *follows_uplink, ..PortSettings::default() };
    switch.restrict_uplink(uplink_policy.clone());
    // No worker runs before the first port is opened.
    drop(switch.set_ports((0..=*total_vfs).map(|port| (port, settings))));
    let ports = switch.x550(mac.0, *total_vfs);
    let device = X550Sriov::new(spec(x550), placement, &host.memory, ports.clone());
    let mut device = device.map_err(|error| site.failed(ErrorKind::Host, error))?;
    device.attach_iommu(|rid| {
        let is_behind = rid != placement.rid || plan.iommu;
        if is_behind { host.iommu_attachment(placement, rid) } else { None }
    });
    if let (false, Some(nic)) = (*link_up, device.host_nic(None)) {
        // No worker runs yet.
        drop(nic.set_link(false));
    }
    let counters = ports.counters().into_iter().map(NicCounters::of_own).collect();
    let handle = Handle::Net(NetHandle { counters, switch: Some(switch), taps: opener.take_taps() });
    Ok((Box::new(device), handle))
}

/// The file of the switch's uplink.
pub(super) fn files(plan: &X550Plan, option: &str) -> Vec<Rule> {
    uplink_file(&plan.switch, option).into_iter().collect()
}

/// The files of the switch's workers and uplink, and of all functions, enabled or not.
pub(super) fn open_files(plan: &X550Plan) -> u64 {
    switch_files(&plan.switch) + spec(plan).open_files() + OF_POOL * (1 + u64::from(plan.total_vfs))
}

/// The switch's workers.
pub(super) fn threads(plan: &X550Plan) -> u64 {
    plan.switch.workers.into()
}
