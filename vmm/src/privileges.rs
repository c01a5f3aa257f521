//! The rights that this process keeps: as few as its VM may need.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Capabilities that a VM may need while it runs, for devices that are added, too. No process gets more than it had.
const KEPT: CapabilitySet = CapabilitySet::empty()
    // Taps are made, set up and brought up.
    .union(CapabilitySet::NET_ADMIN)
    // vDPA devices and io_uring pin memory, beyond RLIMIT_MEMLOCK.
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_RESOURCE)
    // Images, devices and sockets of other users, as root has always been able to use them.
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER);

/// Gives up all capabilities but those that a VM may need, and any way to get more: no program that this process might
/// run has more rights than it. For the calling thread and those that it starts from then on.
///
/// # Errors
///
/// The kernel refuses.
pub(crate) fn reduce() -> io::Result<()> {
    set_no_new_privs(true)?;
    let CapabilitySets { effective, permitted, .. } = capabilities(None)?;
    // Who may not change the set of what programs can get has no use for it: see above.
    if effective.contains(CapabilitySet::SETPCAP) {
        let others = CapabilitySet::all().difference(KEPT);
        for capability in others.iter().filter(|one| capability_is_in_bounding_set(*one).unwrap_or(false)) {
            remove_capability_from_bounding_set(capability)?;
        }
    }
    clear_ambient_capability_set()?;
    let kept = CapabilitySets {
        effective: effective & KEPT,
        permitted: permitted & KEPT,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, kept)?)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn what_no_vm_needs_is_given_up_for_good_and_nothing_is_gained() {
        let before = capabilities(None).unwrap();
        let (after, in_bounds) = thread::spawn(|| {
            reduce().unwrap();
            reduce().unwrap();
            let in_bounds = |one: &CapabilitySet| capability_is_in_bounding_set(*one).unwrap_or(false);
            (capabilities(None).unwrap(), CapabilitySet::all().iter().filter(in_bounds).collect::<Vec<_>>())
        })
        .join()
        .unwrap();
        assert_eq!(after.permitted, before.permitted & KEPT);
        assert_eq!(after.effective, before.effective & KEPT);
        assert!(after.inheritable.is_empty());
        if before.effective.contains(CapabilitySet::SETPCAP) {
            assert!(in_bounds.iter().all(|one| KEPT.contains(*one)), "{in_bounds:?}");
            assert!(!before.effective.contains(CapabilitySet::SYS_ADMIN) || !KEPT.contains(CapabilitySet::SYS_ADMIN));
        }
        assert_eq!(capabilities(None).unwrap(), before, "another thread keeps what it has");
    }
}
