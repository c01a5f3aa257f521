//! The rules for devices of the host, and their plan.

use std::collections::HashSet;

use vm_api::config::device::DeviceConfig;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::id::numbered;

use crate::config::common_keys::{CommonKeys, check_ids};
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::subject::Subject;
use crate::vfio::VfioSpec;

const FLAG: &str = "--device";

/// Plans all devices of the host.
///
/// # Errors
///
/// The first thing that is wrong. What the host has at a path is looked at when it is opened.
pub(crate) fn plan(all: &[DeviceConfig]) -> Result<Vec<DevicePlan>, ConfigError> {
    let ids = numbered("_vfio", all.iter().map(|device| device.id.as_deref()));
    let (mut plans, mut paths) = (Vec::with_capacity(all.len()), HashSet::new());
    for (index, (device, id)) in all.iter().zip(ids).enumerate() {
        let subject = Subject::device(FLAG, device.id.as_deref(), index, all.len());
        check(device, &subject)?;
        if !paths.insert(&device.path) {
            let (what, user) = ("this device of the host".to_string(), "another --device".to_string());
            let remedy = "give each its own".to_string();
            let problem = Problem::InUse { what, user, remedy };
            return Err(ConfigError::new(subject.key("path", device.path.display()), problem));
        }
        let DeviceConfig { pci_segment, pci_device_id, iommu, .. } = *device;
        let unmapped_bars = device.x_exclude_mmap_bars.clone();
        let spec = VfioSpec { id: id.clone(), path: device.path.clone(), iommu, unmapped_bars };
        plans.push(DevicePlan { flag: FLAG, id, pci_segment, pci_device_id, iommu, kind: DeviceKind::Vfio(spec) });
    }
    check_ids(FLAG, &plans)?;
    Ok(plans)
}

fn check(device: &DeviceConfig, subject: &Subject) -> Result<(), ConfigError> {
    let keys = CommonKeys { id: device.id.as_deref(), pci_device_id: device.pci_device_id };
    keys.check(FLAG, subject)?;
    if device.path.as_os_str().is_empty() {
        let what = "the path is empty; give a folder such as /sys/bus/pci/devices/0000:01:00.1".to_string();
        return Err(ConfigError::new(subject.key("path", ""), Problem::Value(what)));
    }
    if let Some(bar) = device.x_exclude_mmap_bars.iter().find(|bar| **bar > 5) {
        let what = format!("there is no BAR {bar}; give numbers from 0 to 5");
        return Err(ConfigError::new(subject.key("x_exclude_mmap_bars", format!("[{bar}]")), Problem::Value(what)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(all: &[&str]) -> Result<Vec<DevicePlan>, String> {
        let all: Result<Vec<DeviceConfig>, _> = all.iter().map(|text| text.parse()).collect();
        all.and_then(|all| plan(&all)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_device_of_the_host_is_a_folder_and_a_place() {
        let device = |id: &str, path: &str, unmapped_bars: &[u8], pci_device_id| DevicePlan {
            flag: "--device",
            id: id.to_string(),
            pci_segment: 0,
            pci_device_id,
            iommu: false,
            kind: DeviceKind::Vfio(VfioSpec {
                id: id.to_string(),
                path: path.into(),
                iommu: false,
                unmapped_bars: unmapped_bars.to_vec(),
            }),
        };
        let plans = planned(&["path=/a", "path=/b,id=nic,pci_device_id=7,iommu=off,x_exclude_mmap_bars=[0,5]"]);
        assert_eq!(plans.unwrap(), [device("_vfio0", "/a", &[], None), device("nic", "/b", &[0, 5], Some(7))]);
        assert_eq!(planned(&[]), Ok(Vec::new()));
    }

    #[test]
    fn what_it_cannot_have_is_refused_with_a_way_out() {
        for (all, expected) in [
            (&["id=x"][..], "--device: path is required; add it"),
            (
                &["path=/a,x_exclude_mmap_bars=[1,6]"],
                "--device x_exclude_mmap_bars=[6]: there is no BAR 6; give numbers from 0 to 5",
            ),
            (
                &["path=/a", "path=/a"],
                "--device number 2, path=/a: this device of the host is already in use by another --device; give each \
                 its own",
            ),
            (
                &["path=/a,fd=3"],
                "--device fd=3: VFIO devices by descriptor, and iommufd, are not supported yet; leave fd out",
            ),
            (
                &["path=/a,x_nv_gpudirect_clique=1"],
                "--device x_nv_gpudirect_clique=1: peer-to-peer cliques of GPUs are not supported yet; leave \
                 x_nv_gpudirect_clique out",
            ),
        ] {
            assert_eq!(planned(all).unwrap_err(), expected);
        }
    }
}
