//! The guest's CPUID: KVM's supported features, and the topology of this VM.
//!
//! Leaves and bits are those of the Intel SDM (volume 2A, CPUID) and of the AMD APM (volume 3, appendix E).

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use vm_api::config::CpusConfig;

use crate::arch::x86_64::hyperv;
use crate::arch::x86_64::topology::Topology;

/// The width on CPUs without the leaf, in bits.
const DEFAULT_ADDRESS_BITS: u8 = 36;

/// Without interrupt remapping, local APIC IDs have 8 bits, and 255 means broadcast.
pub const MAX_VCPUS: u32 = 254;

const VMX: u32 = 1 << 5;
const SVM: u32 = 1 << 2;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
const HYPER_THREADING: u32 = 1 << 28;
const CMP_LEGACY: u32 = 1 << 1;
/// Shadow stacks (CET_SS), of ECX of leaf 7.
const SHADOW_STACKS: u32 = 1 << 7;
/// AMX-BF16, AMX-TILE and AMX-INT8.
const AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25;
/// AMX-FP16, of EAX of the first subleaf.
const AMX_FP16: u32 = 1 << 21;
/// AMX-COMPLEX, of EDX of the first subleaf.
const AMX_COMPLEX: u32 = 1 << 8;
const TOPOLOGY_LEVEL_THREAD: u32 = 1;
const TOPOLOGY_LEVEL_CORE: u32 = 2;
const TOPOLOGY_LEVEL_DIE: u32 = 5;

/// The width of the guest's physical addresses, in bits: the host's, at most `most`.
pub fn address_bits(supported: &CpuId, most: u8) -> u8 {
    let leaf = supported.as_slice().iter().find(|entry| entry.function == 0x8000_0008);
    let [host, ..] = leaf.map_or([DEFAULT_ADDRESS_BITS; 4], |entry| entry.eax.to_le_bytes());
    host.min(most)
}

/// True if guests can have AMX.
pub fn has_amx(supported: &CpuId) -> bool {
    supported.as_slice().iter().any(|entry| (entry.function, entry.index) == (7, 0) && entry.edx & AMX == AMX)
}

/// Features of a VM's vCPUs, among those of the host.
#[derive(Debug, Clone, Copy)]
pub struct Features {
    /// The shape of the vCPUs, at most [`MAX_VCPUS`], whose APIC IDs are at most that too.
    pub topology: Topology,
    /// The width of physical addresses, in bits.
    pub address_bits: u8,
    /// True if the local APIC's timer has TSC-deadline mode.
    pub tsc_deadline: bool,
    /// True if the guest can run VMs itself.
    pub nested: bool,
    /// True if the guest has AMX.
    pub amx: bool,
    /// True if the hypervisor presents Hyper-V's interface instead of KVM's.
    pub hyperv: bool,
}

impl Features {
    /// Features of a configuration.
    pub fn of(cpus: &CpusConfig, supported: &CpuId, tsc_deadline: bool) -> Self {
        Self {
            topology: Topology::of(cpus),
            address_bits: address_bits(supported, cpus.max_phys_bits),
            tsc_deadline,
            nested: cpus.nested,
            amx: cpus.features.amx,
            hyperv: cpus.kvm_hyperv,
        }
    }
}

/// The CPUID of a VM's vCPUs, without their IDs.
#[derive(Debug, Clone)]
pub struct Template {
    entries: Vec<kvm_cpuid_entry2>,
    topology: Topology,
}

impl Template {
    /// The CPUID of a VM with these features, among those that KVM supports.
    pub fn new(supported: &CpuId, features: &Features) -> Self {
        let topology = features.topology;
        let vcpus = topology.package_vcpus();
        let mut entries = supported.as_slice().to_vec();
        for entry in &mut entries {
            if (entry.function, entry.index) == (7, 0) {
                // KVM has the shadow stack pointer (SSP) neither in its list of registers nor in the XSAVE area, so it
                // would be lost when a guest is saved. The state of indirect branch tracking is listed.
                entry.ecx &= !SHADOW_STACKS;
            }
            match entry.function {
                0x1 => {
                    entry.ecx |= HYPERVISOR | if features.tsc_deadline { TSC_DEADLINE } else { 0 };
                    entry.ecx = with(entry.ecx, VMX, entry.ecx & VMX != 0 && features.nested);
                    entry.edx = with(entry.edx, HYPER_THREADING, vcpus > 1);
                    entry.ebx = field(entry.ebx, 16, 8, addressable(&topology));
                }
                // Caches: levels 1 and 2 are per core, level 3 is shared by all cores of a die.
                0x4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
                    let is_shared = entry.eax >> 5 & 7 >= 3;
                    let shift = if is_shared { topology.die_shift() } else { topology.core_shift() };
                    entry.eax = field(entry.eax, 14, 12, (1 << shift) - 1);
                    if entry.function == 0x4 {
                        let cores = 1 << (topology.package_shift() - topology.core_shift());
                        entry.eax = field(entry.eax, 26, 6, cores.min(64) - 1);
                    }
                }
                0x7 if !features.amx => match entry.index {
                    0 => entry.edx &= !AMX,
                    1 => (entry.eax, entry.edx) = (entry.eax & !AMX_FP16, entry.edx & !AMX_COMPLEX),
                    _ => {}
                },
                0x8000_0001 => {
                    entry.ecx = with(entry.ecx, CMP_LEGACY, entry.ecx & CMP_LEGACY != 0 && vcpus > 1);
                    entry.ecx = with(entry.ecx, SVM, entry.ecx & SVM != 0 && features.nested);
                }
                0x8000_0008 => {
                    entry.eax = field(entry.eax, 0, 8, features.address_bits.into());
                    // The guest address limit is for nested guests: none.
                    entry.eax = field(entry.eax, 16, 8, 0);
                    entry.ecx = field(entry.ecx, 0, 8, vcpus - 1);
                    entry.ecx = field(entry.ecx, 12, 4, topology.package_shift());
                }
                _ => {}
            }
        }
        set_topology(&mut entries, &topology);
        if features.hyperv {
            hyperv::show(&mut entries);
        }
        Self { entries, topology }
    }

    /// The CPUID of a saved VM, whose vCPUs have this shape.
    pub const fn saved(entries: Vec<kvm_cpuid_entry2>, topology: Topology) -> Self {
        Self { entries, topology }
    }

    /// Entries that all vCPUs have in common.
    pub fn entries(&self) -> &[kvm_cpuid_entry2] {
        &self.entries
    }

    /// The shape of the vCPUs.
    pub const fn topology(&self) -> Topology {
        self.topology
    }

    /// The local APIC ID of vCPU `id`.
    pub fn apic_id(&self, id: u32) -> u32 {
        self.topology.apic_id(id)
    }

    /// The CPUID of vCPU `id`.
    ///
    /// `None` if there are more leaves than KVM accepts, which its own list never has.
    pub fn vcpu(&self, id: u32) -> Option<CpuId> {
        debug_assert!(u64::from(id) < self.topology.vcpus());
        let Topology { threads, dies, .. } = self.topology;
        let (apic_id, position) = (self.apic_id(id), self.topology.position(id));
        // A core's number within its package: without the bits of its threads and of its package.
        let core = (apic_id & ((1 << self.topology.package_shift()) - 1)) >> self.topology.core_shift();
        let mut entries = self.entries.clone();
        for entry in &mut entries {
            match entry.function {
                0x1 => entry.ebx = field(entry.ebx, 24, 8, apic_id),
                0xb | 0x1f => entry.edx = apic_id,
                0x8000_001e => {
                    entry.eax = apic_id;
                    entry.ebx = field(entry.ebx, 0, 16, (threads - 1) << 8 | core & 0xff);
                    // A die is a node. The field has room for 8 in a package.
                    entry.ecx = (dies.min(8) - 1) << 8 | position.die & 0xff;
                }
                _ => {}
            }
        }
        CpuId::from_entries(&entries).ok()
    }
}

/// The number of logical processors of a package, for older software, which rounds the number up to a power of two and
/// uses the result as the number of APIC IDs of a package.
fn addressable(topology: &Topology) -> u32 {
    let (vcpus, room) = (topology.package_vcpus(), 1 << topology.package_shift());
    if vcpus.next_power_of_two() == room { vcpus } else { room.min(255) }
}

/// Replaces the extended topology leaves, which KVM reports for the host's CPU or not at all. Only 0x1f has dies.
fn set_topology(entries: &mut Vec<kvm_cpuid_entry2>, topology: &Topology) {
    let Topology { threads, cores, dies, .. } = *topology;
    if dies > 1
        && let Some(entry) = entries.iter_mut().find(|entry| entry.function == 0 && is_intel(entry))
    {
        entry.eax = entry.eax.max(0x1f);
    }
    let maximum = entries.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
    entries.retain(|entry| !matches!(entry.function, 0xb | 0x1f));
    let package = (topology.package_shift(), topology.package_vcpus());
    let thread = (TOPOLOGY_LEVEL_THREAD, topology.core_shift(), threads);
    let die = [
        thread,
        (TOPOLOGY_LEVEL_CORE, topology.die_shift(), threads * cores),
        (TOPOLOGY_LEVEL_DIE, package.0, package.1),
        (0, 0, 0),
    ];
    let core = [thread, (TOPOLOGY_LEVEL_CORE, package.0, package.1), (0, 0, 0)];
    let leaves = [(0xb, &core[..]), (0x1f, if dies > 1 { &die[..] } else { &core[..] })];
    for (function, levels) in leaves.into_iter().filter(|(function, _)| *function <= maximum) {
        entries.extend((0..).zip(levels).map(|(index, (kind, shift, count))| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: *shift,
            ebx: *count,
            ecx: kind << 8 | index,
            ..Default::default()
        }));
    }
}

/// True if leaf 0 names `GenuineIntel`.
fn is_intel(leaf: &kvm_cpuid_entry2) -> bool {
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

fn with(register: u32, bit: u32, set: bool) -> u32 {
    if set { register | bit } else { register & !bit }
}

/// `register` with the field of `width` bits from bit `shift` on set to `value`.
fn field(register: u32, shift: u32, width: u32, value: u32) -> u32 {
    let mask = ((1 << width) - 1) << shift;
    register & !mask | value << shift & mask
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supported() -> CpuId {
        let entry = |function, eax| kvm_cpuid_entry2 { function, eax, ..Default::default() };
        let cache = |index: u32, level: u32| kvm_cpuid_entry2 { index, ..entry(0x4, 1 | level << 5 | 0xfc00_0000) };
        CpuId::from_entries(&[
            entry(0, 0xd),
            kvm_cpuid_entry2 { ebx: 0xff40_0800, ..entry(1, 0) },
            cache(0, 1),
            cache(3, 3),
            entry(0xb, 7),
            entry(0x8000_0008, 0x30_3034),
            entry(0x8000_001e, 0),
        ])
        .unwrap()
    }

    fn features(topology: Topology) -> Features {
        Features { topology, address_bits: 46, tsc_deadline: true, nested: true, amx: false, hyperv: false }
    }

    fn flat(vcpus: u32) -> Template {
        Template::new(&supported(), &features(Topology::flat(vcpus)))
    }

    fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid.as_slice().iter().find(|entry| entry.function == function && entry.index == index).unwrap()
    }

    #[test]
    fn each_vcpu_reads_its_own_apic_id() {
        let template = flat(3);
        for id in 0..3 {
            let cpuid = template.vcpu(id).unwrap();
            assert_eq!(leaf(&cpuid, 1, 0).ebx, id << 24 | 3 << 16 | 0x0800);
            assert_eq!((leaf(&cpuid, 0xb, 0).edx, leaf(&cpuid, 0xb, 1).edx), (id, id));
            assert_eq!((leaf(&cpuid, 0x8000_001e, 0).eax, leaf(&cpuid, 0x8000_001e, 0).ebx), (id, id));
        }
    }

    #[test]
    fn the_topology_is_cores_of_one_thread_in_one_package() {
        let cpuid = flat(3).vcpu(0).unwrap();
        let [threads, cores] = [0, 1].map(|index| leaf(&cpuid, 0xb, index));
        assert_eq!((threads.eax, threads.ebx, threads.ecx), (0, 1, 0x100));
        assert_eq!((cores.eax, cores.ebx, cores.ecx), (2, 3, 0x201));
        assert_eq!(cpuid.as_slice().iter().filter(|entry| entry.function == 0x1f).count(), 0);
        let [first, third] = [0, 3].map(|index| leaf(&cpuid, 4, index).eax);
        assert_eq!((first >> 14 & 0xfff, third >> 14 & 0xfff), (0, 3));
        assert_eq!(third >> 26, 3);
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).ecx, 2 << 12 | 2);
    }

    #[test]
    fn each_level_has_its_bits_and_its_count() {
        let shape = Topology { threads: 2, cores: 3, dies: 2, packages: 2 };
        let mut host = supported().as_slice().to_vec();
        host[0] = kvm_cpuid_entry2 { ebx: 0x756e_6547, edx: 0x4965_6e69, ecx: 0x6c65_746e, ..host[0] };
        let template = Template::new(&CpuId::from_entries(&host).unwrap(), &features(shape));
        // Thread 1 of core 2 of die 1 of package 1.
        let cpuid = template.vcpu(23).unwrap();
        let id = 1 << 4 | 1 << 3 | 2 << 1 | 1;
        assert_eq!((template.apic_id(23), leaf(&cpuid, 1, 0).ebx >> 24), (id, id));
        // 12 vCPUs, which need 16 numbers.
        assert_eq!(leaf(&cpuid, 1, 0).ebx >> 16 & 0xff, 12);
        let level = |function, index| {
            let leaf = leaf(&cpuid, function, index);
            assert_eq!(leaf.edx, id);
            (leaf.eax, leaf.ebx, leaf.ecx)
        };
        assert_eq!([0, 1, 2].map(|index| level(0xb, index)), [(1, 2, 0x100), (4, 12, 0x201), (0, 0, 2)]);
        assert_eq!(
            [0, 1, 2, 3].map(|index| level(0x1f, index)),
            [(1, 2, 0x100), (3, 6, 0x201), (4, 12, 0x502), (0, 0, 3)]
        );
        assert_eq!(leaf(&cpuid, 0, 0).eax, 0x1f);
        let [first, third] = [0, 3].map(|index| leaf(&cpuid, 4, index).eax);
        assert_eq!((first >> 14 & 0xfff, third >> 14 & 0xfff, third >> 26), (1, 7, 7));
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).ecx, 4 << 12 | 11);
        let amd = leaf(&cpuid, 0x8000_001e, 0);
        assert_eq!((amd.eax, amd.ebx, amd.ecx), (id, 1 << 8 | 1 << 2 | 2, 1 << 8 | 3));
    }

    #[test]
    fn older_software_finds_the_package_in_the_apic_id() {
        // 5 and 3 need 8 and 4 numbers: 32, where 15 would round up to 16.
        assert_eq!(addressable(&Topology { threads: 1, cores: 5, dies: 3, packages: 2 }), 32);
        assert_eq!(addressable(&Topology::flat(254)), 254);
    }

    #[test]
    fn a_hypervisor_and_its_timer_are_announced() {
        let ecx = |tsc_deadline| {
            let features = Features { tsc_deadline, ..features(Topology::flat(1)) };
            leaf(&Template::new(&supported(), &features).vcpu(0).unwrap(), 1, 0).ecx
        };
        assert_eq!(ecx(true), HYPERVISOR | TSC_DEADLINE);
        assert_eq!(ecx(false), HYPERVISOR);
    }

    #[test]
    fn guest_has_no_shadow_stacks_as_their_pointer_is_not_saved() {
        for (nested, amx) in [(false, false), (true, true)] {
            let tracking = 1 << 20;
            let leaf_7 = kvm_cpuid_entry2 { function: 7, ecx: SHADOW_STACKS | 1, edx: tracking, ..Default::default() };
            let other = kvm_cpuid_entry2 { index: 1, ..leaf_7 };
            let host = CpuId::from_entries(&[leaf_7, other]).unwrap();
            let features = Features { nested, amx, ..features(Topology::flat(1)) };
            let cpuid = Template::new(&host, &features).vcpu(0).unwrap();
            assert_eq!((leaf(&cpuid, 7, 0).ecx, leaf(&cpuid, 7, 0).edx), (1, tracking));
            assert_eq!(leaf(&cpuid, 7, 1).ecx, SHADOW_STACKS | 1, "another register");
        }
    }

    #[test]
    fn features_not_requested_are_not_offered() {
        let host = CpuId::from_entries(&[
            kvm_cpuid_entry2 { function: 1, ecx: VMX | 1, ..Default::default() },
            kvm_cpuid_entry2 { function: 7, edx: AMX | 1, ..Default::default() },
            kvm_cpuid_entry2 { function: 7, index: 1, eax: AMX_FP16 | 1, edx: AMX_COMPLEX | 1, ..Default::default() },
            kvm_cpuid_entry2 { function: 0x8000_0001, ecx: SVM | 1, ..Default::default() },
        ])
        .unwrap();
        let read = |nested, amx| {
            let features = Features { nested, amx, ..features(Topology::flat(1)) };
            let cpuid = Template::new(&host, &features).vcpu(0).unwrap();
            let [first, second] = [0, 1].map(|index| leaf(&cpuid, 7, index));
            let nested = [leaf(&cpuid, 1, 0).ecx & VMX, leaf(&cpuid, 0x8000_0001, 0).ecx & SVM];
            // Other bits stay.
            assert_eq!([first.edx, second.eax, second.edx, leaf(&cpuid, 0x8000_0001, 0).ecx].map(|r| r & 1), [1; 4]);
            (nested, [first.edx & AMX, second.eax & AMX_FP16, second.edx & AMX_COMPLEX])
        };
        assert_eq!(read(false, false), ([0, 0], [0, 0, 0]));
        assert_eq!(read(true, true), ([VMX, SVM], [AMX, AMX_FP16, AMX_COMPLEX]));
        assert!(has_amx(&host) && !has_amx(&supported()));
    }

    #[test]
    fn a_hypervisor_shows_either_interface_and_never_both() {
        let mut host = supported().as_slice().to_vec();
        let of_kvm =
            [(0x4000_0000, [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]), (0x4000_0001, [0x0100_7efb, 0, 0, 0])];
        for (function, [eax, ebx, ecx, edx]) in of_kvm {
            host.push(kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() });
        }
        let host = CpuId::from_entries(&host).unwrap();
        let shown = |hyperv| {
            let template = Template::new(&host, &Features { hyperv, ..features(Topology::flat(2)) });
            let of_hypervisor = |entry: &&kvm_cpuid_entry2| entry.function >> 8 == 0x40_0000;
            let cpuid = template.vcpu(1).unwrap();
            let leaves: Vec<_> = cpuid.as_slice().iter().filter(of_hypervisor).copied().collect();
            assert_eq!(cpuid.as_slice().len() - leaves.len(), flat(2).vcpu(1).unwrap().as_slice().len());
            leaves.iter().map(|leaf| (leaf.function, [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx])).collect::<Vec<_>>()
        };
        assert_eq!(shown(false), of_kvm);
        let mut expected = vec![
            (0x4000_0000, [0x4000_000a, 0x756e_694c, 0x564b_2078, 0x7648_204d]),
            (0x4000_0001, [0x3123_7648, 0, 0, 0]),
            (0x4000_0002, [0x3839, 0xa_0000, 0, 0]),
            (0x4000_0003, [0x20e, 0, 0, 8]),
            (0x4000_0004, [0x20, 0, 0, 0]),
        ];
        expected.extend((0x4000_0005..=0x4000_000a).map(|function| (function, [0; 4])));
        assert_eq!(shown(true), expected);
    }

    #[test]
    fn physical_addresses_have_at_most_the_bits_that_were_given() {
        assert_eq!([36, 46, 52, 255].map(|most| address_bits(&supported(), most)), [36, 46, 52, 52]);
        let cpuid = flat(1).vcpu(0).unwrap();
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).eax, 0x302e);
        assert_eq!(address_bits(&CpuId::from_entries(&[]).unwrap(), 46), 36);
    }
}
