//! The guest's CPUID: KVM's supported features, and the topology of this VM.
//!
//! Leaves and bits are those of the Intel SDM (volume 2A, CPUID) and of the AMD APM (volume 3, appendix E).

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// The widest physical addresses of a guest, in bits: 64 TiB, the limit of Linux without five-level page tables.
const MAX_ADDRESS_BITS: u8 = 46;
/// The width on CPUs without the leaf, in bits.
const DEFAULT_ADDRESS_BITS: u8 = 36;

/// Without interrupt remapping, local APIC IDs have 8 bits, and 255 means broadcast.
pub const MAX_VCPUS: u32 = 254;

const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
const HYPER_THREADING: u32 = 1 << 28;
const CMP_LEGACY: u32 = 1 << 1;
const TOPOLOGY_LEVEL_THREAD: u32 = 1;
const TOPOLOGY_LEVEL_CORE: u32 = 2;

/// The width of the guest's physical addresses, in bits.
pub fn address_bits(supported: &CpuId) -> u8 {
    let leaf = supported.as_slice().iter().find(|entry| entry.function == 0x8000_0008);
    let [host, ..] = leaf.map_or([DEFAULT_ADDRESS_BITS; 4], |entry| entry.eax.to_le_bytes());
    host.min(MAX_ADDRESS_BITS)
}

/// The CPUID of a VM's vCPUs, without their IDs.
#[derive(Debug, Clone)]
pub struct Template {
    entries: Vec<kvm_cpuid_entry2>,
    vcpus: u32,
}

impl Template {
    /// The CPUID of a VM with `vcpus` vCPUs, 1 to [`MAX_VCPUS`]: cores of one thread each in one package.
    pub fn new(supported: &CpuId, vcpus: u32, tsc_deadline: bool) -> Self {
        let mut entries = supported.as_slice().to_vec();
        for entry in &mut entries {
            match entry.function {
                0x1 => {
                    entry.ecx |= HYPERVISOR | if tsc_deadline { TSC_DEADLINE } else { 0 };
                    entry.edx = with(entry.edx, HYPER_THREADING, vcpus > 1);
                    entry.ebx = field(entry.ebx, 16, 8, vcpus);
                }
                // Caches: levels 1 and 2 are per core, level 3 is shared by all cores.
                0x4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
                    let sharing = if entry.eax >> 5 & 7 >= 3 { id_space(vcpus) } else { 1 };
                    entry.eax = field(entry.eax, 14, 12, sharing - 1);
                    if entry.function == 0x4 {
                        entry.eax = field(entry.eax, 26, 6, id_space(vcpus).min(64) - 1);
                    }
                }
                0x8000_0001 => entry.ecx = with(entry.ecx, CMP_LEGACY, entry.ecx & CMP_LEGACY != 0 && vcpus > 1),
                0x8000_0008 => {
                    entry.eax = field(entry.eax, 0, 8, address_bits(supported).into());
                    // The guest address limit is about nested guests: none.
                    entry.eax = field(entry.eax, 16, 8, 0);
                    entry.ecx = field(entry.ecx, 0, 8, vcpus - 1);
                    entry.ecx = field(entry.ecx, 12, 4, id_space(vcpus).ilog2());
                }
                _ => {}
            }
        }
        set_topology(&mut entries, vcpus);
        Self { entries, vcpus }
    }

    /// The CPUID of vCPU `id`, whose local APIC has the same ID.
    ///
    /// `None` if there are more leaves than KVM accepts, which its own list never has.
    pub fn vcpu(&self, id: u32) -> Option<CpuId> {
        debug_assert!(id < self.vcpus);
        let mut entries = self.entries.clone();
        for entry in &mut entries {
            match entry.function {
                0x1 => entry.ebx = field(entry.ebx, 24, 8, id),
                0xb | 0x1f => entry.edx = id,
                0x8000_001e => {
                    entry.eax = id;
                    // One thread a core; cores count through the package, which is one node.
                    entry.ebx = field(entry.ebx, 0, 16, id & 0xff);
                    entry.ecx = 0;
                }
                _ => {}
            }
        }
        CpuId::from_entries(&entries).ok()
    }
}

/// Replaces the extended topology leaves, which KVM reports for the host's CPU or not at all.
fn set_topology(entries: &mut Vec<kvm_cpuid_entry2>, vcpus: u32) {
    let maximum = entries.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
    entries.retain(|entry| !matches!(entry.function, 0xb | 0x1f));
    for function in [0xb, 0x1f].into_iter().filter(|function| *function <= maximum) {
        let level = |index, shift, count, kind| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: count,
            ecx: kind << 8 | index,
            ..Default::default()
        };
        entries.push(level(0, 0, 1, TOPOLOGY_LEVEL_THREAD));
        entries.push(level(1, id_space(vcpus).ilog2(), vcpus, TOPOLOGY_LEVEL_CORE));
        entries.push(level(2, 0, 0, 0));
    }
}

/// How many APIC IDs the package takes: a power of two.
fn id_space(vcpus: u32) -> u32 {
    vcpus.next_power_of_two()
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

    fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid.as_slice().iter().find(|entry| entry.function == function && entry.index == index).unwrap()
    }

    #[test]
    fn each_vcpu_reads_its_own_apic_id() {
        let template = Template::new(&supported(), 3, true);
        for id in 0..3 {
            let cpuid = template.vcpu(id).unwrap();
            assert_eq!(leaf(&cpuid, 1, 0).ebx, id << 24 | 3 << 16 | 0x0800);
            assert_eq!((leaf(&cpuid, 0xb, 0).edx, leaf(&cpuid, 0xb, 1).edx), (id, id));
            assert_eq!((leaf(&cpuid, 0x8000_001e, 0).eax, leaf(&cpuid, 0x8000_001e, 0).ebx), (id, id));
        }
    }

    #[test]
    fn the_topology_is_cores_of_one_thread_in_one_package() {
        let cpuid = Template::new(&supported(), 3, true).vcpu(0).unwrap();
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
    fn a_hypervisor_and_its_timer_are_announced() {
        let ecx = |tsc_deadline| leaf(&Template::new(&supported(), 1, tsc_deadline).vcpu(0).unwrap(), 1, 0).ecx;
        assert_eq!(ecx(true), HYPERVISOR | TSC_DEADLINE);
        assert_eq!(ecx(false), HYPERVISOR);
    }

    #[test]
    fn physical_addresses_have_at_most_46_bits() {
        assert_eq!(address_bits(&supported()), 46);
        let cpuid = Template::new(&supported(), 1, true).vcpu(0).unwrap();
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).eax, 0x302e);
        assert_eq!(address_bits(&CpuId::from_entries(&[]).unwrap()), 36);
    }
}
