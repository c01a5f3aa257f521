//! Packages, dies, cores and threads of the vCPUs, and the local APIC IDs derived from them.
//!
//! An ID has a field of bits for each level, threads lowest, as wide as the level's number needs (Intel SDM, volume 3,
//! §10.9.3). A level whose number is not a power of two leaves IDs unused.

use vm_api::config::{CpuTopology, CpusConfig};

/// The shape of a VM's vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Threads of a core. In a checked configuration, no number is 0.
    pub threads: u32,
    /// Cores of a die.
    pub cores: u32,
    /// Dies of a package.
    pub dies: u32,
    /// Packages.
    pub packages: u32,
}

impl Topology {
    /// A single package of cores with one thread each.
    pub const fn flat(vcpus: u32) -> Self {
        Self { threads: 1, cores: vcpus, dies: 1, packages: 1 }
    }

    /// Topology of a configuration.
    pub fn of(cpus: &CpusConfig) -> Self {
        cpus.topology.as_ref().map_or(Self::flat(cpus.max_vcpus), Self::from)
    }

    /// The number of vCPUs.
    pub fn vcpus(&self) -> u64 {
        let levels = [self.threads, self.cores, self.dies, self.packages];
        levels.into_iter().fold(1, |product: u64, count| product.saturating_mul(count.into()))
    }

    /// The vCPUs of a package.
    pub const fn package_vcpus(&self) -> u32 {
        self.threads.saturating_mul(self.cores).saturating_mul(self.dies)
    }

    /// The number of low bits of an APIC ID that distinguish the threads of a core.
    pub fn core_shift(&self) -> u32 {
        bits(self.threads)
    }

    /// The number of low bits of an APIC ID that distinguish the vCPUs of a die.
    pub fn die_shift(&self) -> u32 {
        self.core_shift() + bits(self.cores)
    }

    /// The number of low bits of an APIC ID that distinguish the vCPUs of a package.
    pub fn package_shift(&self) -> u32 {
        self.die_shift() + bits(self.dies)
    }

    /// The numbers of a vCPU's core, die and package, counted across the VM.
    pub fn position(&self, vcpu: u32) -> Position {
        let core = vcpu / self.threads.max(1);
        let die = core / self.cores.max(1);
        Position { core, die, package: die / self.dies.max(1) }
    }

    /// The local APIC ID of vCPU `vcpu`, which is below [`Self::vcpus`].
    pub fn apic_id(&self, vcpu: u32) -> u32 {
        let Position { core, die, package } = self.position(vcpu);
        let levels = [
            (vcpu % self.threads.max(1), 0),
            (core % self.cores.max(1), self.core_shift()),
            (die % self.dies.max(1), self.die_shift()),
            (package, self.package_shift()),
        ];
        levels.into_iter().fold(0, |id, (number, shift)| id | number.checked_shl(shift).unwrap_or(0))
    }
}

impl From<&CpuTopology> for Topology {
    fn from(topology: &CpuTopology) -> Self {
        Self {
            threads: topology.threads_per_core.into(),
            cores: topology.cores_per_die.into(),
            dies: topology.dies_per_package.into(),
            packages: topology.packages.into(),
        }
    }
}

/// Position of a vCPU; all numbers count across the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Core of the vCPU.
    pub core: u32,
    /// Die of the vCPU.
    pub die: u32,
    /// Package of the vCPU.
    pub package: u32,
}

/// The number of bits that distinguish `count` things.
fn bits(count: u32) -> u32 {
    count.checked_next_power_of_two().map_or(u32::BITS, u32::ilog2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(threads: u32, cores: u32, dies: u32, packages: u32) -> Vec<u32> {
        let topology = Topology { threads, cores, dies, packages };
        (0..topology.vcpus() as u32).map(|vcpu| topology.apic_id(vcpu)).collect()
    }

    #[test]
    fn without_gaps_a_vcpu_has_its_own_number() {
        for (threads, cores, dies, packages) in [(1, 6, 1, 1), (2, 2, 2, 2), (1, 1, 1, 8), (2, 4, 1, 3)] {
            let all: Vec<_> = (0..threads * cores * dies * packages).collect();
            assert_eq!(ids(threads, cores, dies, packages), all);
        }
        assert!((0..254).all(|vcpu| Topology::flat(254).apic_id(vcpu) == vcpu));
    }

    #[test]
    fn a_level_that_is_no_power_of_two_leaves_ids_unused() {
        assert_eq!(ids(1, 3, 1, 2), [0, 1, 2, 4, 5, 6]);
        assert_eq!(ids(2, 3, 1, 2), [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]);
        assert_eq!(ids(1, 1, 3, 2), [0, 1, 2, 4, 5, 6]);
    }

    #[test]
    fn a_place_counts_through_the_vm() {
        let topology = Topology { threads: 2, cores: 2, dies: 2, packages: 2 };
        assert_eq!(topology.position(0), Position { core: 0, die: 0, package: 0 });
        assert_eq!(topology.position(13), Position { core: 6, die: 3, package: 1 });
        assert_eq!((topology.core_shift(), topology.die_shift(), topology.package_shift()), (1, 2, 3));
    }

    #[test]
    fn no_number_of_a_configuration_overflows() {
        let most = u16::MAX.into();
        let topology = Topology { threads: most, cores: most, dies: most, packages: most };
        assert_eq!(topology.vcpus(), u64::from(u16::MAX).pow(4));
        assert!(topology.apic_id(u32::MAX) > 254);
    }
}
