//! The channel by which a guest governs VFs: whether a VM has one.

use vm_api::config::VmConfig;
use vm_api::config::error::{ConfigError, Problem};

use crate::config::device::{DeviceKind, DevicePlan};

/// Plans the channel, if a NIC needs it, or the VM has it from an earlier one.
pub(crate) fn plan(config: &VmConfig) -> Option<DevicePlan> {
    wants_channel(config).then(|| DevicePlan {
        flag: "--net guest_control",
        id: "__channel".to_string(),
        pci_segment: 0,
        pci_device_id: None,
        iommu: false,
        kind: DeviceKind::GuestChannel,
    })
}

/// True if the VM has a channel.
fn wants_channel(config: &VmConfig) -> bool {
    config.guest_channel || config.net.iter().any(|net| net.guest_control.is_some())
}

/// Checks that a booted VM, whose devices are `before`, has the channel that its devices `after` an addition need.
///
/// # Errors
///
/// Fails if it was booted without one.
pub(crate) fn check_added(before: &[DevicePlan], after: &[DevicePlan]) -> Result<(), ConfigError> {
    let has_one = |devices: &[DevicePlan]| devices.iter().any(|device| device.kind == DeviceKind::GuestChannel);
    if has_one(after) && !has_one(before) {
        let what = "the VM was booted without the channel that its guest needs for this; create it with such a NIC, or \
                    with \"guest_channel\": true";
        return Err(ConfigError::new("--net guest_control", Problem::Conflict(what.to_string())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PlannedVm;

    fn vm(guest_channel: bool) -> PlannedVm {
        let config = VmConfig { guest_channel, watchdog: true, pvpanic: true, ..VmConfig::default() };
        PlannedVm::new(config).unwrap()
    }

    #[test]
    fn the_channel_is_the_last_device_and_moves_no_other() {
        let (without, with) = (vm(false), vm(true));
        let (last, others) = with.plan().devices.split_last().unwrap();
        assert_eq!(
            (last.id.as_str(), &last.kind, last.is_removable()),
            ("__channel", &DeviceKind::GuestChannel, false)
        );
        assert_eq!(others, without.plan().devices);
        assert_eq!(PlannedVm::new(with.config().clone()).unwrap(), with);
        assert!(!without.config().guest_channel && with.config().guest_channel);
    }

    #[test]
    fn a_booted_vm_gets_no_channel() {
        let (without, with) = (vm(false), vm(true));
        let devices = |vm: &PlannedVm| vm.plan().devices.clone();
        let refused = check_added(&devices(&without), &devices(&with)).unwrap_err().to_string();
        assert!(refused.starts_with("--net guest_control: the VM was booted without the channel"), "{refused}");
        for (before, after) in [(&with, &with), (&without, &without), (&with, &without)] {
            check_added(&devices(before), &devices(after)).unwrap();
        }
    }
}
