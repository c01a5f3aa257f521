//! Numbers of devices and VFs that a VM has room for.

use pci::Capacity;
use vm_api::config::error::{ConfigError, Problem};

use crate::arch::x86_64::layout;
use crate::config::subject::Subject;

/// Capacity of segment 0.
pub(crate) const CAPACITY: Capacity = Capacity::new(layout::LAST_BUS);

/// Checks that a device can be in this slot of a root bus of a segment. Only bus 0 of segment 0 has a host bridge, in
/// slot 0.
///
/// # Errors
///
/// Fails if there is no such slot, or it is the host bridge's.
pub(crate) fn check_slot((segment, root): (u16, u8), slot: u8, subject: &Subject) -> Result<(), ConfigError> {
    let slots = Capacity::SLOTS;
    let first = if segment == 0 && root == 0 { *slots.start() } else { 0 };
    if (first..=*slots.end()).contains(&slot) {
        return Ok(());
    }
    let what = format!("bus {root} has slots {first} to {} for devices; give one of them", slots.end());
    Err(ConfigError::new(subject.key("pci_device_id", slot), Problem::Value(what)))
}

#[cfg(test)]
mod tests {
    use vm_api::config::{NetConfig, help};

    use super::*;

    #[test]
    fn the_help_has_the_limits() {
        let text = help::<NetConfig>();
        let vfs = format!("Number of SR-IOV virtual functions (VFs) to reserve, up to {}.", CAPACITY.vfs());
        assert!(text.contains(&vfs), "{text}");
        let slots = Capacity::SLOTS;
        let slots = format!("Device number on bus 0, {} to {}, or 0 on another segment", slots.start(), slots.end());
        assert!(text.contains(&slots), "{text}");
    }

    #[test]
    fn a_document_may_have_all_vfs_of_a_pf() {
        assert_eq!(vm_api::document::MOST_VFS, usize::from(CAPACITY.vfs()));
    }
}
