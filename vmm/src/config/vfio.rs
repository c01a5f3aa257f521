//! The rules for host devices, and their plan.

use std::collections::HashSet;

use vm_api::config::device::DeviceConfig;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::{Options as _, PlatformConfig};

use crate::config::common_keys::{CommonKeys, check_ids};
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::subject::Subject;
use crate::vfio::{VfioInterface, VfioSource, VfioSpec};

const FLAG: &str = "--device";

/// Plans all host devices.
///
/// # Errors
///
/// Fails with the first mistake. The device at a path, or of a descriptor, is checked when it is opened.
pub(crate) fn plan(
    all: &[DeviceConfig],
    ids: Vec<String>,
    platform: Option<&PlatformConfig>,
) -> Result<Vec<DevicePlan>, ConfigError> {
    let interface = interface(platform)?;
    let (mut plans, mut sources) = (Vec::with_capacity(all.len()), HashSet::new());
    for (index, (device, id)) in all.iter().zip(ids).enumerate() {
        let subject = Subject::device(FLAG, device.id.as_deref(), index, all.len());
        check(device, &subject)?;
        let source = source(device, interface, &subject)?;
        if !sources.insert((&device.path, device.fd)) {
            let what = match source {
                VfioSource::Path(_) => "this device of the host",
                VfioSource::Fd(_) => "this descriptor",
            };
            let user = "another --device".to_string();
            let problem = Problem::InUse { what: what.to_string(), user, remedy: "give each its own".to_string() };
            return Err(ConfigError::new(named(device, &subject), problem));
        }
        let DeviceConfig { pci_segment, pci_device_id, iommu, .. } = *device;
        let unmapped_bars = device.x_exclude_mmap_bars.clone();
        let spec = VfioSpec { id: id.clone(), source, interface, iommu, unmapped_bars };
        plans.push(DevicePlan { flag: FLAG, id, pci_segment, pci_device_id, iommu, kind: DeviceKind::Vfio(spec) });
    }
    check_ids(FLAG, &plans)?;
    Ok(plans)
}

/// The kernel interface through which the VM has its host devices.
fn interface(platform: Option<&PlatformConfig>) -> Result<VfioInterface, ConfigError> {
    let Some(PlatformConfig { iommufd, iommufd_fd, .. }) = platform else { return Ok(VfioInterface::Groups) };
    let fail = |key: String, problem| Err(ConfigError::new(format!("{} {key}", PlatformConfig::OPTION), problem));
    match (*iommufd, *iommufd_fd) {
        (_, Some(fd)) if fd <= 2 => {
            let what = format!("{fd} is a standard stream, not an iommufd; open /dev/iommu as 3 or above");
            fail(format!("iommufd_fd={fd}"), Problem::Value(what))
        }
        (false, Some(fd)) => {
            let what = "is for iommufd_fd, too; leave one of the two out".to_string();
            fail(format!("iommufd=off,iommufd_fd={fd}"), Problem::Conflict(what))
        }
        (true, given) => Ok(VfioInterface::Iommufd(given)),
        (false, None) => Ok(VfioInterface::Groups),
    }
}

/// Name of a device in messages. A descriptor's number is not shown: it means nothing to the client that sent it.
fn named(device: &DeviceConfig, subject: &Subject) -> String {
    match &device.path {
        Some(path) => subject.key("path", path.display()),
        None => subject.bare().to_string(),
    }
}

fn source(device: &DeviceConfig, interface: VfioInterface, subject: &Subject) -> Result<VfioSource, ConfigError> {
    let fail = |problem| Err(ConfigError::new(named(device, subject), problem));
    match (&device.path, device.fd) {
        (Some(path), None) => Ok(VfioSource::Path(path.clone())),
        (None, Some(fd)) if fd <= 2 => {
            let what = format!("{fd} is a standard stream, not a device; open the device as 3 or above");
            Err(ConfigError::new(subject.key("fd", fd), Problem::Value(what)))
        }
        (None, Some(fd)) if matches!(interface, VfioInterface::Iommufd(Some(_))) => Ok(VfioSource::Fd(fd)),
        (None, Some(_)) => fail(Problem::Conflict(
            "a device by descriptor (fd=) needs a VM with an iommufd by descriptor; add --platform iommufd_fd=, or \
             give the device's path"
                .to_string(),
        )),
        (Some(_), Some(_)) => fail(Problem::Conflict(
            "a device is given by its path or by a descriptor (fd=); leave one of the two out".to_string(),
        )),
        (None, None) => fail(Problem::Value("give path=, or fd= with --platform iommufd_fd=".to_string())),
    }
}

fn check(device: &DeviceConfig, subject: &Subject) -> Result<(), ConfigError> {
    let keys = CommonKeys { id: device.id.as_deref(), slot: (device.pci_segment, device.pci_device_id) };
    keys.check(FLAG, subject)?;
    if device.path.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
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

    fn ids(devices: &[DeviceConfig]) -> Vec<String> {
        vm_api::config::VmConfig { devices: devices.to_vec(), ..vm_api::config::VmConfig::default() }
            .ids()
            .of::<DeviceConfig>()
    }

    fn planned(all: &[&str]) -> Result<Vec<DevicePlan>, String> {
        let all: Result<Vec<DeviceConfig>, _> = all.iter().map(|text| text.parse()).collect();
        all.and_then(|all| plan(&all, ids(&all), None)).map_err(|error| error.to_string())
    }

    /// The planned devices of a VM with this platform.
    fn planned_on(platform: &str, all: &[&str]) -> Result<Vec<DevicePlan>, String> {
        let all: Vec<DeviceConfig> = all.iter().map(|text| text.parse().unwrap()).collect();
        plan(&all, ids(&all), Some(&platform.parse().unwrap())).map_err(|error| error.to_string())
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
                source: VfioSource::Path(path.into()),
                interface: VfioInterface::Groups,
                iommu: false,
                unmapped_bars: unmapped_bars.to_vec(),
            }),
        };
        let plans = planned(&["path=/a", "path=/b,id=nic,pci_device_id=7,iommu=off,x_exclude_mmap_bars=[0,5]"]);
        assert_eq!(plans.unwrap(), [device("_vfio0", "/a", &[], None), device("nic", "/b", &[0, 5], Some(7))]);
        assert_eq!(planned(&[]), Ok(Vec::new()));
    }

    #[test]
    fn an_impossible_host_device_is_refused_with_a_way_out() {
        for (all, expected) in [
            (&["id=x"][..], "--device id=x: give path=, or fd= with --platform iommufd_fd="),
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
                &["id=x,fd=3"],
                "--device id=x: a device by descriptor (fd=) needs a VM with an iommufd by descriptor; add --platform \
                 iommufd_fd=, or give the device's path",
            ),
            (
                &["path=/a,fd=3"],
                "--device path=/a: a device is given by its path or by a descriptor (fd=); leave one of the two out",
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

    #[test]
    fn all_devices_of_a_vm_have_the_interface_of_its_platform() {
        let interfaces = |platform: &str, all: &[&str]| -> Vec<(VfioSource, VfioInterface)> {
            let of = |plan: DevicePlan| match plan.kind {
                DeviceKind::Vfio(spec) => (spec.source, spec.interface),
                _ => unreachable!(),
            };
            planned_on(platform, all).unwrap().into_iter().map(of).collect()
        };
        let path = || VfioSource::Path("/a".into());
        assert_eq!(interfaces("iommufd=off", &["path=/a"]), [(path(), VfioInterface::Groups)]);
        assert_eq!(interfaces("iommufd=on", &["path=/a"]), [(path(), VfioInterface::Iommufd(None))]);
        let given = VfioInterface::Iommufd(Some(7));
        let both = ["path=/a", "fd=8,iommu=on"];
        assert_eq!(interfaces("iommufd_fd=7", &both), [(path(), given), (VfioSource::Fd(8), given)]);
        assert_eq!(interfaces("iommufd=on,iommufd_fd=7", &both[..1]), [(path(), given)]);
    }

    #[test]
    fn an_impossible_use_of_iommufd_is_refused_with_a_way_out() {
        for (platform, all, expected) in [
            (
                "iommufd=off,iommufd_fd=7",
                &[][..],
                "--platform iommufd=off,iommufd_fd=7: is for iommufd_fd, too; leave one of the two out",
            ),
            (
                "iommufd_fd=1",
                &[],
                "--platform iommufd_fd=1: 1 is a standard stream, not an iommufd; open /dev/iommu as 3 or above",
            ),
            (
                "iommufd=on",
                &["fd=7"],
                "--device: a device by descriptor (fd=) needs a VM with an iommufd by descriptor; add --platform \
                 iommufd_fd=, or give the device's path",
            ),
            (
                "iommufd_fd=7",
                &["fd=2"],
                "--device fd=2: 2 is a standard stream, not a device; open the device as 3 or above",
            ),
            (
                "iommufd_fd=7",
                &["fd=8", "fd=8"],
                "--device number 2: this descriptor is already in use by another --device; give each its own",
            ),
        ] {
            assert_eq!(planned_on(platform, all).unwrap_err(), expected);
        }
    }
}
