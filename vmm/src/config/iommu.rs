//! The virtual IOMMU of a VM, and the devices behind it.

use virtio_devices::ADDRESS_WIDTHS;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::option::Options as _;
use vm_api::config::{PlatformConfig, VmConfig};

use crate::acpi::viot::MOST_SINGLE_DEVICES;
use crate::config::device::{DeviceKind, DevicePlan, IommuSpec};
use crate::config::net::backend::BackendPlan;

/// The id of the virtual IOMMU.
const ID: &str = "__iommu";
/// The number of bits of addresses if none is given.
const ADDRESS_WIDTH: u8 = 64;

/// Plans the virtual IOMMU of a VM with these devices and `segments` PCI segments, if any option asks for one.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan(
    config: &VmConfig,
    devices: &[DevicePlan],
    segments: u16,
) -> Result<Option<DevicePlan>, ConfigError> {
    let default = PlatformConfig::default();
    let platform = config.platform.as_ref().unwrap_or(&default);
    let (width, behind) = (platform.iommu_address_width, &platform.iommu_segments);
    let fail = |key: String, problem| Err(ConfigError::new(format!("{} {key}", PlatformConfig::OPTION), problem));
    if !ADDRESS_WIDTHS.contains(&width) {
        let what = format!("give {} to {}", ADDRESS_WIDTHS.start(), ADDRESS_WIDTHS.end());
        return fail(format!("iommu_address_width={width}"), Problem::Value(what));
    }
    if let Some(segment) = behind.iter().find(|segment| **segment >= segments) {
        let what = format!("there is no PCI segment {segment}; give one below num_pci_segments={segments}");
        return fail(format!("iommu_segments=[{segment}]"), Problem::Value(what));
    }
    let wanted = config.iommu || platform.iommu || !behind.is_empty() || devices.iter().any(|device| device.iommu);
    if !wanted {
        if width != ADDRESS_WIDTH {
            let what = "the VM has no virtual IOMMU; add iommu=on, or leave iommu_address_width out".to_string();
            return fail(format!("iommu_address_width={width}"), Problem::Missing(what));
        }
        return Ok(None);
    }
    for device in devices {
        check(device, behind)?;
    }
    let single = devices.iter().filter(|device| device.iommu && !behind.contains(&device.pci_segment)).count();
    if single > usize::from(MOST_SINGLE_DEVICES) {
        let what = format!(
            "{single} devices with iommu=on are on segments whose other devices are not behind the virtual IOMMU, and \
             at most {MOST_SINGLE_DEVICES} can be; name whole segments"
        );
        return fail(format!("iommu_segments={behind:?}"), Problem::Limit(what));
    }
    let kind = DeviceKind::Iommu(IommuSpec { address_width: width, segments: behind.clone() });
    let (flag, id) = (PlatformConfig::OPTION, ID.to_string());
    Ok(Some(DevicePlan { flag, id, pci_segment: 0, pci_device_id: None, iommu: false, kind }))
}

/// Checks that a device behind the IOMMU can be there, and that devices of its segments are.
fn check(device: &DevicePlan, segments: &[u16]) -> Result<(), ConfigError> {
    let fail = |option: String, problem| Err(ConfigError::new(option, problem));
    if !device.iommu && segments.contains(&device.pci_segment) {
        // A device with neither key is on segment 0.
        let is_fixed = matches!(
            device.kind,
            DeviceKind::Watchdog | DeviceKind::Pvpanic | DeviceKind::GuestChannel | DeviceKind::Mem { .. }
        );
        let advice = match is_fixed {
            true => ", and this one cannot be; leave it out, or the segment",
            false => "; add iommu=on, or put it on another segment",
        };
        let segment = device.pci_segment;
        let what = format!("all devices of segment {segment} are behind the virtual IOMMU (iommu_segments){advice}");
        return fail(device.option(), Problem::Missing(what));
    }
    let iommu = format!("{},iommu=on", device.option());
    match &device.kind {
        DeviceKind::VhostUser(_) if device.iommu => {
            return fail(iommu, Problem::Conflict(by_itself("a vhost-user backend")));
        }
        // A VF with such a backend works as long as its driver does not use the IOMMU (bypass).
        DeviceKind::Net(net) if device.iommu && matches!(net.pf.backend, BackendPlan::VhostUser { .. }) => {
            return fail(iommu, Problem::Conflict(by_itself("a vhost-user backend")));
        }
        _ => {}
    }
    Ok(())
}

/// Checks that a device can be added to a booted VM with this IOMMU, if there is one. A guest learns at boot which
/// endpoints are behind its IOMMU: all VFs of segment 0, whole segments, and the devices on bus 0 at that time.
///
/// # Errors
///
/// Fails if the guest's tables would not list the device as behind the IOMMU.
pub(crate) fn check_added(iommu: Option<&IommuSpec>, device: &DevicePlan) -> Result<(), ConfigError> {
    let what = match iommu {
        _ if !device.iommu => return Ok(()),
        Some(spec) if spec.segments.contains(&device.pci_segment) => return Ok(()),
        Some(_) => "put it on one of iommu_segments, or leave iommu out",
        None => "leave iommu out; this VM was booted without a virtual IOMMU",
    };
    let what = format!("a running guest cannot learn that a further device is behind a virtual IOMMU; {what}");
    Err(ConfigError::new(format!("{},iommu=on", device.option()), Problem::Conflict(what)))
}

fn by_itself(who: &str) -> String {
    format!(
        "{who} reaches the guest's memory by itself, and does not follow a virtual IOMMU yet; use a tap or a switch"
    )
}

#[cfg(test)]
mod tests {
    use vm_api::config::net::vhost::Vhost;

    use super::*;
    use crate::config::plan::VmPlan;
    use crate::config::sriov::NicPlan;

    fn planned(change: impl FnOnce(&mut VmConfig)) -> Result<VmPlan, String> {
        let mut config = VmConfig::default();
        config.payload.kernel = Some("vmlinux".into());
        change(&mut config);
        VmPlan::of(&config).map_err(|error| error.to_string())
    }

    fn platform(text: &str) -> Option<PlatformConfig> {
        Some(text.parse().unwrap())
    }

    fn iommu(plan: &VmPlan) -> Option<IommuSpec> {
        plan.devices.iter().find_map(|device| match &device.kind {
            DeviceKind::Iommu(spec) => Some(spec.clone()),
            _ => None,
        })
    }

    #[test]
    fn vm_has_an_iommu_only_if_something_requests_one() {
        let spec = |address_width, segments: &[u16]| Some(IommuSpec { address_width, segments: segments.to_vec() });
        let of = |change: fn(&mut VmConfig)| iommu(&planned(change).unwrap());
        assert_eq!(of(|vm| vm.net.push("sriov_vfs=2".parse().unwrap())), None);
        assert_eq!(of(|vm| vm.platform = platform("iommu=off,iommu_segments=[]")), None);
        assert_eq!(of(|vm| vm.iommu = true), spec(64, &[]));
        assert_eq!(of(|vm| vm.platform = platform("iommu=on,iommu_address_width=48")), spec(48, &[]));
        assert_eq!(of(|vm| vm.platform = platform("num_pci_segments=3,iommu_segments=[1,2]")), spec(64, &[1, 2]));
        assert_eq!(of(|vm| vm.rng.iommu = true), spec(64, &[]));
        assert_eq!(of(|vm| vm.net.push("iommu=on".parse().unwrap())), spec(64, &[]));
    }

    #[test]
    fn the_kernel_may_move_packets_behind_the_iommu() {
        let plan = planned(|vm| {
            vm.platform = platform("iommu=on");
            vm.net.push("vhost=auto,iommu=on".parse().unwrap());
        });
        let vhost = |nic: &NicPlan| match &nic.backend {
            BackendPlan::Tap { vhost, .. } => *vhost,
            other => panic!("{other:?}"),
        };
        let vhosts: Vec<_> = plan.unwrap().nets().next().unwrap().functions().map(vhost).collect();
        assert_eq!(vhosts, [Vhost::Auto]);
    }

    #[test]
    fn a_backend_unfit_for_an_iommu_is_refused_in_a_line() {
        let follow =
            "reaches the guest's memory by itself, and does not follow a virtual IOMMU yet; use a tap or a switch";
        let vf = |backend: &str| {
            planned(|vm| {
                vm.platform = platform("iommu=on");
                vm.memory.shared = true;
                vm.net.push("id=pf,sriov_vfs=2".parse().unwrap());
                let mut vf: vm_api::config::NetVf = format!("pf=pf,index=1,{backend}").parse().unwrap();
                vf.vf.index = 1.into();
                vm.net[0].vfs.push(vf.vf);
            })
        };
        for backend in ["vhost=on", "vhost_user=on,socket=/s", "vdpa=/dev/vhost-vdpa-0"] {
            assert_eq!(vf(backend).err(), None, "{backend}");
        }
        let net = |text: &str| planned(|vm| vm.net.push(text.parse().unwrap()));
        assert_eq!(
            net("id=n,vhost_user=on,socket=/s,iommu=on"),
            Err(format!("--net id=n,iommu=on: a vhost-user backend {follow}"))
        );
        assert!(net("vhost_user=on,socket=/s").is_ok());
        let device = planned(|vm| vm.devices.push("path=/d,iommu=on".parse().unwrap())).unwrap();
        assert!(iommu(&device).is_some(), "a device of the host can");
        let disk = planned(|vm| vm.disks.push("id=d,vhost_user=on,socket=/s,iommu=on".parse().unwrap()));
        assert_eq!(disk, Err(format!("--disk id=d,iommu=on: a vhost-user backend {follow}")));
    }

    #[test]
    fn hot_add_behind_iommu_is_refused_if_guest_cannot_detect_it() {
        let added = |platform_of: &str, net: &str| {
            let before = planned(|vm| vm.platform = platform(platform_of)).unwrap();
            let after = planned(|vm| {
                vm.platform = platform(platform_of);
                vm.net.push(format!("id=n,{net}").parse().unwrap());
            });
            let device = after.unwrap().devices.into_iter().find(|device| device.id == "n").unwrap();
            check_added(before.iommu(), &device).map_err(|error| error.to_string())
        };
        let all = "--net id=n,iommu=on: a running guest cannot learn that a further device is behind a virtual IOMMU;";
        let none = format!("{all} leave iommu out; this VM was booted without a virtual IOMMU");
        assert_eq!(added("", "iommu=on"), Err(none));
        let other = format!("{all} put it on one of iommu_segments, or leave iommu out");
        assert_eq!(added("num_pci_segments=2,iommu_segments=[1]", "iommu=on"), Err(other));
        assert_eq!(added("num_pci_segments=2,iommu_segments=[1]", "iommu=on,pci_segment=1"), Ok(()));
        assert_eq!(added("iommu=on", "sriov_vfs=4"), Ok(()), "its VFs are behind it");
        assert_eq!(added("", "sriov_vfs=4"), Ok(()));
    }

    #[test]
    fn bad_iommu_numbers_and_outsiders_on_its_segments_are_refused() {
        let of = |text: &str| planned(|vm| vm.platform = platform(text)).unwrap_err();
        assert_eq!(of("iommu=on,iommu_address_width=31"), "--platform iommu_address_width=31: give 32 to 64");
        assert_eq!(
            of("iommu_address_width=48"),
            "--platform iommu_address_width=48: the VM has no virtual IOMMU; add iommu=on, or leave \
             iommu_address_width out"
        );
        assert_eq!(
            of("iommu_segments=[1]"),
            "--platform iommu_segments=[1]: there is no PCI segment 1; give one below num_pci_segments=1"
        );
        let many = planned(|vm| {
            vm.platform = platform("num_pci_segments=18");
            let net = |n: u16| format!("pci_segment={},iommu=on", 1 + n / 31).parse().unwrap();
            vm.net.extend((0..513).map(net));
        });
        assert_eq!(
            many.unwrap_err(),
            "--platform iommu_segments=[]: 513 devices with iommu=on are on segments whose other devices are not \
             behind the virtual IOMMU, and at most 512 can be; name whole segments"
        );
        let on = |text: &str| {
            planned(|vm| {
                vm.platform = platform("num_pci_segments=2,iommu_segments=[1]");
                vm.net.push(text.parse().unwrap());
            })
        };
        assert!(on("pci_segment=1,iommu=on").is_ok() && on("pci_segment=0").is_ok());
        assert_eq!(
            on("id=n,pci_segment=1").unwrap_err(),
            "--net id=n: all devices of segment 1 are behind the virtual IOMMU (iommu_segments); add iommu=on, or put \
             it on another segment"
        );
    }

    #[test]
    fn device_that_cannot_be_behind_its_segments_iommu_is_refused() {
        let with = |change: fn(&mut VmConfig)| {
            planned(|vm| {
                vm.platform = platform("iommu_segments=[0]");
                (vm.rng.iommu, vm.console.iommu) = (true, true);
                change(vm);
            })
            .err()
        };
        let fixed = "all devices of segment 0 are behind the virtual IOMMU (iommu_segments), and this one cannot be; \
                     leave it out, or the segment";
        assert_eq!(with(|_| ()), None);
        assert_eq!(with(|vm| vm.watchdog = true), Some(format!("--watchdog id=__watchdog: {fixed}")));
        assert_eq!(with(|vm| vm.pvpanic = true), Some(format!("--pvpanic id=__pvpanic: {fixed}")));
        let memory = with(|vm| vm.memory = "size=1G,hotplug_method=virtio-mem,hotplug_size=1G".parse().unwrap());
        assert!(memory.as_ref().is_some_and(|memory| memory.ends_with(fixed)), "{memory:?}");
    }
}
