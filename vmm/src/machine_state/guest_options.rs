//! Options that a guest sees in CPUID and in firmware tables, which it reads once.

use crate::arch::x86_64::hyperv;
use crate::config::CpusConfig;
use crate::machine_state::compatibility::CpuidLeaf;
use crate::machine_state::error::RestoreError;

/// Returns the options that a guest sees, with their values. Its number of vCPUs is not among them, because it can
/// change at run time.
pub(crate) fn guest_options(cpus: &CpusConfig, segments: usize) -> Vec<(&'static str, String)> {
    let CpusConfig { max_vcpus, topology, max_phys_bits, features, nested, .. } = cpus;
    let topology = topology.map_or("none".to_string(), |shape| {
        let numbers = [shape.threads_per_core, shape.cores_per_die, shape.dies_per_package, shape.packages];
        numbers.map(|number| number.to_string()).join(":")
    });
    vec![
        ("cpus.max_vcpus", max_vcpus.to_string()),
        ("cpus.topology", topology),
        ("cpus.max_phys_bits", max_phys_bits.to_string()),
        ("cpus.features.amx", features.amx.to_string()),
        ("cpus.nested", nested.to_string()),
        ("platform.num_pci_segments", segments.to_string()),
    ]
}

/// Compares the options that the guest saw, `then`, with their values `now`. A state of an older version may have
/// fewer.
///
/// # Errors
///
/// Fails if an option differs; the error names it.
pub(crate) fn compare(then: &[(String, String)], now: Vec<(&'static str, String)>) -> Result<(), RestoreError> {
    for (option, now) in now {
        let then = then.iter().find(|(told, _)| told == option).map(|(_, then)| then);
        if let Some(then) = then.filter(|then| **then != now) {
            return Err(RestoreError::Told { option, then: then.clone(), now });
        }
    }
    Ok(())
}

/// Compares the Hyper-V interface in the saved CPUID with the options.
///
/// # Errors
///
/// Fails if they differ.
pub(crate) fn compare_interface(saved: &[CpuidLeaf], cpus: &CpusConfig) -> Result<(), RestoreError> {
    let then = saved.iter().any(|CpuidLeaf { leaf, registers: [eax, ..], .. }| hyperv::is_found(*leaf, *eax));
    if then == cpus.kvm_hyperv {
        return Ok(());
    }
    let (then, now) = (then.to_string(), cpus.kvm_hyperv.to_string());
    Err(RestoreError::Told { option: "cpus.kvm_hyperv", then, now })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_keeps_the_hypervisor_that_it_has_found() {
        let leaf = |leaf, eax| CpuidLeaf { leaf, subleaf: 0, flags: 0, registers: [eax, 0, 0, 0] };
        let (of_kvm, of_hyperv) = ([leaf(0x4000_0001, 0x100_7efb)], [leaf(1, 0), leaf(0x4000_0001, 0x3123_7648)]);
        let told = |saved: &[CpuidLeaf], kvm_hyperv| {
            let cpus = CpusConfig { kvm_hyperv, ..Default::default() };
            compare_interface(saved, &cpus).map_err(|error| error.to_string())
        };
        for saved in [&of_kvm[..], &[leaf(1, 0x3123_7648)], &[]] {
            assert_eq!(told(saved, false), Ok(()));
            let refused =
                "cpus.kvm_hyperv: true in the configuration, but the guest was started with false; give false";
            assert_eq!(told(saved, true), Err(refused.to_string()));
        }
        assert_eq!(told(&of_hyperv, true), Ok(()));
        let refused = "cpus.kvm_hyperv: false in the configuration, but the guest was started with true; give true";
        assert_eq!(told(&of_hyperv, false), Err(refused.to_string()));
    }
}
