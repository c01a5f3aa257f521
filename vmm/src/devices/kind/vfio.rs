//! Host devices.

use std::path::Path;

use super::site::{Opened, Site};
use crate::devices::backends::BackendOpener;
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
use crate::landlock::{Missing, READ, Rule, WRITE};
use crate::vfio::{VfioInterface, VfioSource, VfioSpec, cdev};

/// The device, its group, the container, KVM's device, three that watch it, and as many MSI-X vectors as usual devices
/// use; further vectors are refused to its driver. With iommufd, two copies of the device's file replace the first two,
/// and a client may have sent a third.
pub(super) const OPEN_FILES: u64 = 8 + 64;
pub(super) const THREADS: u64 = 0;

pub(super) fn open(spec: &VfioSpec, site: &Site<'_>, opener: &mut BackendOpener<'_>) -> Result<Opened, DeviceError> {
    let Site { plan, placement, host } = *site;
    let attachment = host.iommu_attachment(placement, placement.rid).filter(|_| plan.iommu);
    let device = opener.host_device().unwrap_or_else(|| host.vfio.open(spec, &host.memory));
    let device = device.and_then(|device| device.into_function(placement.rid, attachment)).map_err(|error| {
        // A descriptor's number means nothing to a client that sent it.
        let option = match &spec.source {
            VfioSource::Path(path) => format!("{},path={}", site.option(), path.display()),
            VfioSource::Fd(_) => site.option(),
        };
        DeviceError::Vfio { option, error }
    })?;
    let handle = Handle::plain("vfio", device.counters());
    Ok((Box::new(device), handle))
}

/// The folder of the device in sysfs, that of its group, and the group's file.
pub(super) fn files(spec: &VfioSpec, option: &str) -> Vec<Rule> {
    let mut rules = Vec::new();
    let mut add = |path: &Path, access| rules.push(Rule::new(option, path, access));
    match spec.interface {
        VfioInterface::Groups => add(Path::new("/dev/vfio/vfio"), READ | WRITE),
        VfioInterface::Iommufd(None) => add(Path::new("/dev/iommu"), READ | WRITE),
        VfioInterface::Iommufd(Some(_)) => {}
    }
    if let VfioSource::Path(path) = &spec.source {
        add(path, READ);
    }
    // Errors of the device are reported when it is opened.
    if let Ok((device, _)) = spec.source.find() {
        let neighbours = device.folder.join("iommu_group/devices");
        let neighbours = std::fs::read_dir(neighbours).into_iter().flatten().flatten();
        rules.extend(neighbours.filter_map(|entry| Some(Rule::new(option, entry.path().canonicalize().ok()?, READ))));
        let group = device.folder.join("iommu_group").canonicalize();
        rules.extend(group.ok().map(|group| Rule::new(option, group, READ)));
        let file = match (spec.interface, &spec.source) {
            (VfioInterface::Groups, _) => Some(device.group_file()),
            (VfioInterface::Iommufd(_), VfioSource::Path(_)) => cdev::path(&device),
            (VfioInterface::Iommufd(_), VfioSource::Fd(_)) => None,
        };
        let file = file.map(|file| Rule { missing: Missing::Skip, ..Rule::new(option, file, READ | WRITE) });
        rules.extend(file);
    }
    rules
}
