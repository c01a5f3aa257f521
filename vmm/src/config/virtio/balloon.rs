//! The rules for the balloon, and its plan.

use virtio_devices::BalloonSpec;
use vm_api::config::bytes;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::virtio::balloon::BalloonConfig;

use crate::config::common_keys::CommonKeys;
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::subject::Subject;

/// The default id of the balloon.
const ID: &str = "__balloon";

/// Plans the balloon of a guest with `memory` bytes, which has the devices `others`.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan<'a>(
    config: &BalloonConfig,
    memory: u64,
    others: impl IntoIterator<Item = &'a DevicePlan>,
) -> Result<DevicePlan, ConfigError> {
    let subject = Subject::device("--balloon", None, 0, 1);
    let keys = CommonKeys {
        id: config.id.as_deref().filter(|id| *id != ID),
        slot: (config.pci_segment, config.pci_device_id),
    };
    keys.check("--balloon", &subject)?;
    if let Err(what) = check_size(config.size, memory) {
        return Err(ConfigError::new(subject.key("size", bytes(config.size)), Problem::Limit(what)));
    }
    // Such a device would continue to use the pages that the guest has returned.
    if let Some(other) = others.into_iter().find(|other| other.pins_memory()) {
        let what = format!("{} may have pinned the memory that a balloon returns; leave one out", other.option());
        return Err(ConfigError::new("--balloon", Problem::Conflict(what)));
    }
    let id = config.id.clone().unwrap_or_else(|| ID.to_string());
    let BalloonConfig { size, deflate_on_oom, free_page_reporting, pci_segment, pci_device_id, .. } = *config;
    let spec = BalloonSpec { id: id.clone(), size, deflate_on_oom, free_page_reporting };
    Ok(DevicePlan {
        flag: "--balloon",
        id,
        pci_segment,
        pci_device_id,
        iommu: config.iommu,
        kind: DeviceKind::Balloon(spec),
    })
}

/// Checks a balloon of `size` bytes in a guest with `memory` bytes.
///
/// # Errors
///
/// Fails with the problem of the size.
pub(crate) fn check_size(size: u64, memory: u64) -> Result<(), String> {
    if size < memory {
        return Ok(());
    }
    Err(format!("the guest has {} of memory, and cannot return all of it; give less", bytes(memory)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NetConfig, VmConfig, VmPlan};

    fn planned(text: &str) -> Result<DevicePlan, String> {
        let config = text.parse::<BalloonConfig>().map_err(|error| error.to_string())?;
        plan(&config, 1 << 30, &[]).map_err(|error| error.to_string())
    }

    #[test]
    fn a_balloon_is_empty_and_has_a_name_of_its_own() {
        let balloon = |id: &str, size, on, pci_device_id| DevicePlan {
            flag: "--balloon",
            id: id.to_string(),
            pci_segment: 0,
            pci_device_id,
            iommu: false,
            kind: DeviceKind::Balloon(BalloonSpec {
                id: id.to_string(),
                size,
                deflate_on_oom: on,
                free_page_reporting: on,
            }),
        };
        assert_eq!(planned("").unwrap(), balloon("__balloon", 0, false, None));
        assert_eq!(planned("size=512M,id=__balloon").unwrap(), balloon("__balloon", 512 << 20, false, None));
        let chosen = planned("size=1023M,deflate_on_oom=on,free_page_reporting=on,id=b,pci_device_id=9").unwrap();
        assert_eq!(chosen, balloon("b", 1023 << 20, true, Some(9)));
    }

    #[test]
    fn an_impossible_balloon_is_refused_with_a_way_out() {
        for (text, expected) in [
            ("size=1G", "--balloon size=1G: the guest has 1G of memory, and cannot return all of it; give less"),
            (
                "id=__x",
                "--balloon id=__x: not a device name; use printable characters, and do not start with two underscores",
            ),
            ("pci_device_id=0", "--balloon pci_device_id=0: bus 0 has slots 1 to 31 for devices; give one of them"),
        ] {
            assert_eq!(planned(text).unwrap_err(), expected);
        }
    }

    #[test]
    fn balloon_and_possibly_pinning_vdpa_device_exclude_each_other() {
        let mut config = VmConfig { balloon: Some("".parse().unwrap()), ..VmConfig::default() };
        VmPlan::of(&config).unwrap();
        config.net.push("id=a,sriov_vfs=2,vhost_user=on,socket=/s".parse::<NetConfig>().unwrap_or_default());
        config.vdpa.push("path=/dev/vhost-vdpa-0,id=v".parse().unwrap());
        assert_eq!(
            VmPlan::of(&config).unwrap_err().to_string(),
            "--balloon: --vdpa id=v may have pinned the memory that a balloon returns; leave one out"
        );
    }
}
