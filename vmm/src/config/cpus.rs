//! The rules for vCPUs.

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::{CpuAffinity, CpuTopology, CpusConfig};

use crate::arch::x86_64::cpuid::MAX_VCPUS;
use crate::arch::x86_64::topology::Topology;

/// The fewest bits of physical addresses: a 64-bit CPU has that many.
const FEWEST_ADDRESS_BITS: u8 = 36;
/// The most bits of physical addresses (Intel SDM, volume 1, §3.3.1).
const MOST_ADDRESS_BITS: u8 = 52;

/// The number of host CPUs that can be named: Linux's `CPU_SETSIZE`.
pub(crate) const HOST_CPUS: u32 = 1024;

/// Checks the vCPUs.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn check(cpus: &CpusConfig) -> Result<(), ConfigError> {
    let CpusConfig { boot_vcpus: boot, max_vcpus: max, max_phys_bits: bits, .. } = *cpus;
    let fail = |what: String, problem| Err(ConfigError::new(format!("--cpus {what}"), problem));
    if boot == 0 {
        return fail("boot=0".to_string(), Problem::Value("a VM needs a vCPU; give 1 or more".to_string()));
    }
    for (key, value) in [("boot", boot), ("max", max)] {
        if value > MAX_VCPUS {
            let what = format!("a VM has at most {MAX_VCPUS} vCPUs; give fewer");
            return fail(format!("{key}={value}"), Problem::Limit(what));
        }
    }
    if max < boot {
        let what = format!("max is less than boot; give max={boot} or more, or leave max out");
        return fail(format!("boot={boot},max={max}"), Problem::Conflict(what));
    }
    if !(FEWEST_ADDRESS_BITS..=MOST_ADDRESS_BITS).contains(&bits) {
        let what = format!("a CPU has {FEWEST_ADDRESS_BITS} to {MOST_ADDRESS_BITS} address bits; give such a number");
        return fail(format!("max_phys_bits={bits}"), Problem::Value(what));
    }
    if let Some(given) = &cpus.topology {
        check_topology(given, max).map_err(|problem| ConfigError::new(format!("--cpus {cpus}"), problem))?;
    }
    check_affinity(&cpus.affinity, max)
}

fn check_topology(given: &CpuTopology, max: u32) -> Result<(), Problem> {
    let shape = Topology::from(given);
    let Topology { threads, cores, dies, packages } = shape;
    if [threads, cores, dies, packages].contains(&0) {
        return Err(Problem::Value("no number of topology can be 0; give 1 or more".to_string()));
    }
    if shape.vcpus() != u64::from(max) {
        let what = format!("topology has {} vCPUs, and max is {max}; make them equal", shape.vcpus());
        return Err(Problem::Conflict(what));
    }
    let last = shape.apic_id(max.saturating_sub(1));
    // 255 addresses all vCPUs.
    if last > MAX_VCPUS {
        let what = format!(
            "topology needs APIC IDs up to {last}, and they end at {MAX_VCPUS}; give numbers that are powers of two, \
             or fewer vCPUs"
        );
        return Err(Problem::Limit(what));
    }
    Ok(())
}

fn check_affinity(affinity: &[CpuAffinity], max: u32) -> Result<(), ConfigError> {
    for (n, CpuAffinity { vcpu, host_cpus }) in affinity.iter().enumerate() {
        let fail = |problem| Err(ConfigError::new(format!("--cpus affinity=[{vcpu}@...]"), problem));
        if *vcpu >= max {
            let what = format!("the vCPUs are 0 to {}; give one of them", max.saturating_sub(1));
            return fail(Problem::Value(what));
        }
        if affinity.iter().take(n).any(|other| other.vcpu == *vcpu) {
            return fail(Problem::Conflict("the vCPU is there twice; give all of its CPUs at once".to_string()));
        }
        if host_cpus.is_empty() {
            return fail(Problem::Value("a vCPU needs a CPU of the host to run on; give one, or more".to_string()));
        }
        if let Some(cpu) = host_cpus.iter().find(|cpu| **cpu >= HOST_CPUS) {
            let what = format!("CPU {cpu} of the host: they are numbered 0 to {}; give one of these", HOST_CPUS - 1);
            return fail(Problem::Limit(what));
        }
    }
    Ok(())
}
