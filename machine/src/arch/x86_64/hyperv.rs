//! Hyper-V's hypervisor interface, which KVM implements and Windows needs: its CPUID leaves and its registers.
//!
//! Leaves, bits and registers are those of Microsoft's Hypervisor Top Level Functional Specification (TLFS), the
//! values those of Cloud Hypervisor.

use std::ops::RangeInclusive;

use kvm_bindings::kvm_cpuid_entry2;

/// The leaves of a hypervisor's interface.
const LEAVES: RangeInclusive<u32> = 0x4000_0000..=0x4000_00ff;
/// The last leaf of an interface of this kind (TLFS, minimal hypervisor requirements).
const LAST: u32 = 0x4000_000a;
/// The leaf with the kind of interface in EAX.
const INTERFACE_LEAF: u32 = 0x4000_0001;
/// The kind of interface. KVM allows a guest access to the registers if this is in its CPUID.
const INTERFACE: u32 = u32::from_le_bytes(*b"Hv#1");
/// The build and the version, 10.0, of the hypervisor.
const IDENTITY: [u32; 2] = [0x3839, 10 << 16];
/// AccessPartitionReferenceCounter, AccessSynicRegs, AccessSyntheticTimerRegs and AccessPartitionReferenceTsc.
const PRIVILEGES: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 9;
/// Events of dynamic partitioning of CPUs.
const CPU_PARTITIONING: u32 = 1 << 3;
/// The guest should use relaxed timing: no watchdog that treats a late interrupt as a fault.
const RELAXED_TIMING: u32 = 1 << 5;

/// The registers, in the order in which they are set. KVM lists only the first register of the timers and of the
/// interrupt controller.
///
/// Without the guest's identity, KVM keeps the page of hypercalls off. A timer starts when KVM gets its configuration,
/// using the count, the reference time and the interrupt controller at that moment. KVM before Linux 6.7 also starts it
/// at its count, which the configuration corrects.
///
/// SVERSION never changes, and EOM has no state.
const MSRS: [RangeInclusive<u32>; 14] = [
    0x4000_0000..=0x4000_0002, // GUEST_OS_ID, HYPERCALL, VP_INDEX
    0x4000_0073..=0x4000_0073, // VP_ASSIST_PAGE
    0x4000_0021..=0x4000_0021, // REFERENCE_TSC
    0x4000_0080..=0x4000_0080, // SCONTROL
    0x4000_0082..=0x4000_0083, // SIEFP, SIMP
    0x4000_0090..=0x4000_009f, // SINT0 to SINT15
    0x4000_00b1..=0x4000_00b1, // STIMER0_COUNT
    0x4000_00b3..=0x4000_00b3,
    0x4000_00b5..=0x4000_00b5,
    0x4000_00b7..=0x4000_00b7,
    0x4000_00b0..=0x4000_00b0, // STIMER0_CONFIG
    0x4000_00b2..=0x4000_00b2,
    0x4000_00b4..=0x4000_00b4,
    0x4000_00b6..=0x4000_00b6,
];

/// The model-specific registers that belong to a vCPU's state, in the order in which they are set.
pub fn msrs() -> impl Iterator<Item = u32> {
    MSRS.into_iter().flatten()
}

/// The position of a register in this interface. `None` if it is not one of its registers.
pub fn place(index: u32) -> Option<usize> {
    msrs().position(|own| own == index)
}

/// Replaces KVM's own interface by this one.
pub fn show(entries: &mut Vec<kvm_cpuid_entry2>) {
    let [ebx, ecx, edx] = [*b"Linu", *b"x KV", *b"M Hv"].map(u32::from_le_bytes);
    let [build, version] = IDENTITY;
    let registers = |function| match function {
        0x4000_0000 => [LAST, ebx, ecx, edx],
        INTERFACE_LEAF => [INTERFACE, 0, 0, 0],
        0x4000_0002 => [build, version, 0, 0],
        0x4000_0003 => [PRIVILEGES, 0, 0, CPU_PARTITIONING],
        0x4000_0004 => [RELAXED_TIMING, 0, 0, 0],
        _ => [0; 4],
    };
    entries.retain(|entry| !LEAVES.contains(&entry.function));
    entries.extend((*LEAVES.start()..=LAST).map(|function| {
        let [eax, ebx, ecx, edx] = registers(function);
        kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() }
    }));
}

/// True if a guest that reads `eax` in `leaf` finds this interface.
pub const fn is_found(leaf: u32, eax: u32) -> bool {
    leaf == INTERFACE_LEAF && eax == INTERFACE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_are_set_after_all_that_they_use() {
        let at = |index: u32| place(0x4000_0000 + index).unwrap();
        assert!(at(0) < at(1), "hypercalls need the guest's identity");
        for timer in 0..4 {
            let (config, count) = (at(0xb0 + 2 * timer), at(0xb1 + 2 * timer));
            assert!(count < config);
            let before = [0x21, 0x80, 0x82, 0x83].into_iter().chain(0x90..=0x9f);
            assert!(before.into_iter().all(|index| at(index) < count));
        }
        let all: std::collections::BTreeSet<_> = msrs().collect();
        assert_eq!((all.len(), msrs().count()), (32, 32), "none is set twice");
        // The version, the end of a message, the clock and the vCPU's run time.
        assert!([0x81, 0x84, 0x20, 0x10].iter().all(|index| place(0x4000_0000 + index).is_none()));
    }
}
