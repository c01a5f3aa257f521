//! Options that a guest knows by CPUID and by the tables of firmware, which it reads once.

use crate::config::CpusConfig;
use crate::migration::machine_error::RestoreError;

/// The options that a guest knows, with their values. The number of its vCPUs can change while it runs.
pub(crate) fn told(cpus: &CpusConfig, segments: usize) -> Vec<(&'static str, String)> {
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

/// Compares what a guest was told, `then`, with the options that it would have `now`. A state of an earlier version may
/// have fewer.
///
/// # Errors
///
/// An option differs. It is named.
pub(crate) fn compare(then: &[(String, String)], now: Vec<(&'static str, String)>) -> Result<(), RestoreError> {
    for (option, now) in now {
        let then = then.iter().find(|(told, _)| told == option).map(|(_, then)| then);
        if let Some(then) = then.filter(|then| **then != now) {
            return Err(RestoreError::Told { option, then: then.clone(), now });
        }
    }
    Ok(())
}
