//! The open files that a VM may need, checked against the process's limit (RLIMIT_NOFILE).
//!
//! With too low a limit, a VM would boot, and fail when its guest enables VFs. So the limit is checked before anything
//! is opened.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::DevicePlan;
use crate::devices::kind;
use crate::vm::error::VmError;

/// Files of a VM besides its devices and those of the API's clients: KVM, memory, payload, consoles, log, signals, and
/// some for short-lived use.
const OTHERS: u64 = 64;

/// Raises the soft limit of open files to the hard limit, and checks that it suffices.
///
/// # Errors
///
/// Fails with [`VmError::OpenFiles`] if the limit is too low for a VM with these devices and vCPUs, plus `others`: the
/// files that were open before, and those that clients may open.
pub(super) fn reserve<'a>(
    devices: impl IntoIterator<Item = &'a DevicePlan>,
    vcpus: u32,
    others: u64,
) -> Result<(), VmError> {
    let given = getrlimit(Resource::Nofile);
    // If this fails, the current limit may still be enough.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: given.maximum, maximum: given.maximum });
    let devices: Vec<_> = devices.into_iter().collect();
    let has_vfs = devices.iter().any(|device| device.total_vfs() > 0);
    let needed = needed(devices, vcpus, others);
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < needed => Err(VmError::OpenFiles { needed, limit, has_vfs }),
        _ => Ok(()),
    }
}

/// Files that the VM may have open at once, including those of VFs that are not enabled yet.
fn needed<'a>(devices: impl IntoIterator<Item = &'a DevicePlan>, vcpus: u32, others: u64) -> u64 {
    others + OTHERS + u64::from(vcpus) + devices.into_iter().map(kind::open_files).sum::<u64>()
}

/// Files that this process has open.
pub(crate) fn already_open() -> u64 {
    // Without /proc, assume that no files were passed in.
    std::fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64)
}

#[cfg(test)]
mod tests {
    use crate::config::{VmConfig, VmPlan};

    use super::*;

    fn devices(nets: &[&str]) -> Vec<DevicePlan> {
        let mut config = VmConfig { net: nets.iter().map(|net| net.parse().unwrap()).collect(), ..VmConfig::default() };
        config.payload.kernel = Some("vmlinux".into());
        VmPlan::of(&config).unwrap().devices
    }

    #[test]
    fn each_function_counts_whether_its_vf_is_enabled_or_not() {
        let with = |nets: &[&str]| needed(&devices(nets), 1, 10);
        let (none, one) = (with(&[]), with(&["sriov_vfs=63"]));
        // A console has 8, and the entropy device 4.
        assert_eq!(none, 10 + OTHERS + 1 + 8 + 4);
        // A tap, a doorbell and 4 interrupts.
        assert_eq!(one - none, 64 * 6);
        assert_eq!(with(&["sriov_vfs=63", "sriov_vfs=63"]) - none, 2 * (one - none));
        assert_eq!(with(&["fd=7"]) - none, 7);
        // A tap, a kernel's device and its copy of the tap's queue, 2 doorbells, 4 of the worker, and 4 interrupts.
        assert_eq!(with(&["vhost=on"]) - none, 13);
        assert_eq!(with(&["vhost_user=on,socket=/s"]) - none, 16);
        assert_eq!(with(&["vdpa=/d"]) - none, 16);
    }
}
