//! The capabilities that this process keeps: as few as its VM may need.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Capabilities that a VM may need while it runs, including for devices that are added. A process gets no more than it
/// had.
const KEPT: CapabilitySet = CapabilitySet::empty()
    // For creating and configuring taps, and bringing them up.
    .union(CapabilitySet::NET_ADMIN)
    // vDPA devices and io_uring pin memory beyond RLIMIT_MEMLOCK.
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_RESOURCE)
    // Images, devices and sockets of other users, which root can use.
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER);

/// Drops all capabilities except those that a VM may need, and any way to gain more: a program that this process
/// executes has no more rights. Applies to the calling thread and those that it starts from then on.
///
/// # Errors
///
/// Fails if the kernel refuses.
pub(crate) fn reduce() -> io::Result<()> {
    set_no_new_privs(true)?;
    let CapabilitySets { effective, permitted, .. } = capabilities(None)?;
    // A process that may not change the bounding set does not need to: it cannot gain rights, as above.
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
    fn rights_that_no_vm_needs_are_dropped_and_cannot_be_regained() {
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
