//! Check that a host can offer all that a guest has seen of its CPU.
//!
//! A guest does not re-read CPUID. So a host must have every feature that the guest has seen; the guest does not see
//! features that only the new host has.

use kvm_bindings::kvm_cpuid_entry2;
use serde::{Deserialize, Serialize};

/// Limit on the leaves of a state. KVM offers about 60.
pub const MAX_LEAVES: usize = 256;

/// CPUID registers of a leaf and subleaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuidLeaf {
    /// The leaf.
    pub leaf: u32,
    /// The subleaf; 0 for leaves without.
    pub subleaf: u32,
    /// Flags of KVM: significance of the subleaf.
    pub flags: u32,
    /// EAX, EBX, ECX and EDX.
    pub registers: [u32; 4],
}

impl From<&kvm_cpuid_entry2> for CpuidLeaf {
    fn from(entry: &kvm_cpuid_entry2) -> Self {
        let kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding: _ } = *entry;
        Self { leaf: function, subleaf: index, flags, registers: [eax, ebx, ecx, edx] }
    }
}

impl From<&CpuidLeaf> for kvm_cpuid_entry2 {
    fn from(leaf: &CpuidLeaf) -> Self {
        let [eax, ebx, ecx, edx] = leaf.registers;
        Self { function: leaf.leaf, index: leaf.subleaf, flags: leaf.flags, eax, ebx, ecx, edx, ..Default::default() }
    }
}

/// Reason why a guest cannot resume on this host's CPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Incompatible {
    /// The CPU vendor differs.
    #[error("its maker is {guest}, and this host's is {host}")]
    Maker {
        /// Vendor of the guest's CPU.
        guest: String,
        /// Vendor of this host's CPU.
        host: String,
    },
    /// A feature is missing.
    #[error(
        "leaf {leaf:#x}.{subleaf} {register} bit {bit}{} is not on this host",
        name(*leaf, *subleaf, register, *bit)
    )]
    Feature {
        /// The leaf.
        leaf: u32,
        /// The subleaf.
        subleaf: u32,
        /// The register.
        register: &'static str,
        /// The bit.
        bit: u32,
    },
    /// Physical addresses are too narrow.
    #[error("it has {guest} bits of physical addresses, and this host has {host}")]
    AddressBits {
        /// Width of the guest's addresses.
        guest: u8,
        /// Width of this host's addresses.
        host: u8,
    },
    /// The time stamp counter's frequency differs, and the host cannot scale it.
    #[error(
        "its time stamp counter has {guest} kHz, and this host's has {host} kHz, which it cannot scale; choose a host \
         with the same frequency"
    )]
    Frequency {
        /// Frequency of the guest's counter, in kHz.
        guest: u32,
        /// Frequency of this host's counter, in kHz.
        host: u32,
    },
    /// The guest's vector registers exceed this host's XSAVE area.
    #[error("its vector registers take {guest} bytes, and this host's {host}")]
    Xsave {
        /// Size of the guest's XSAVE area, in bytes.
        guest: usize,
        /// Size of this host's XSAVE area, in bytes.
        host: usize,
    },
    /// KVM rejects the value of a register.
    #[error("model-specific register {index:#x} cannot be set to {value:#x} on this host")]
    Msr {
        /// Index of the register.
        index: u32,
        /// Value of the register.
        value: u64,
    },
}

const REGISTERS: [&str; 4] = ["EAX", "EBX", "ECX", "EDX"];

/// Feature registers, with masks of the bits that are features of the CPU or of KVM. Other registers hold numbers
/// (sizes, identities, topology), or follow from the VM's configuration.
const FEATURES: &[(u32, u32, [u32; 4])] = &[
    // Not ECX.31 (a hypervisor), ECX.27 (OSXSAVE), EDX.28 (threads).
    (0x1, 0, [0, 0, !(1 << 31 | 1 << 27), !(1 << 28)]),
    // Thermal sensors and always running APIC timer.
    (0x6, 0, [1 << 2, 0, 0, 0]),
    // Not ECX.4 (OSPKE).
    (0x7, 0, [0, u32::MAX, !(1 << 4), u32::MAX]),
    (0x7, 1, [u32::MAX, u32::MAX, u32::MAX, u32::MAX]),
    (0x7, 2, [0, 0, 0, u32::MAX]),
    // Components of XCR0.
    (0xd, 0, [u32::MAX, 0, 0, u32::MAX]),
    // Instructions, and components of IA32_XSS.
    (0xd, 1, [u32::MAX, 0, u32::MAX, u32::MAX]),
    (0x14, 0, [0, u32::MAX, u32::MAX, 0]),
    (0x19, 0, [u32::MAX, u32::MAX, u32::MAX, 0]),
    (0x1e, 1, [u32::MAX, 0, 0, 0]),
    (0x24, 0, [0, 0xffff_ff00, 0, 0]),
    // KVM's. Not EDX.0, a hint.
    (0x4000_0001, 0, [u32::MAX, 0, 0, 0]),
    // Hyper-V's: registers, hypercalls and events.
    (0x4000_0003, 0, [u32::MAX, u32::MAX, 0, u32::MAX]),
    // Not ECX.1 (threads).
    (0x8000_0001, 0, [0, 0, !(1 << 1), u32::MAX]),
    (0x8000_0007, 0, [0, u32::MAX, 0, u32::MAX]),
    (0x8000_0008, 0, [0, u32::MAX, 0, 0]),
    (0x8000_000a, 0, [0, 0, 0, u32::MAX]),
    (0x8000_0021, 0, [u32::MAX, 0, u32::MAX, 0]),
    (0xc000_0001, 0, [0, 0, 0, u32::MAX]),
];

/// Names, as in Linux's `/proc/cpuinfo`, of features that often differ between hosts.
const NAMES: &[(u32, u32, &str, u32, &str)] = &[
    (0x1, 0, "ECX", 5, "vmx"),
    (0x1, 0, "ECX", 12, "fma"),
    (0x1, 0, "ECX", 17, "pcid"),
    (0x1, 0, "ECX", 21, "x2apic"),
    (0x1, 0, "ECX", 22, "movbe"),
    (0x1, 0, "ECX", 24, "tsc_deadline_timer"),
    (0x1, 0, "ECX", 25, "aes"),
    (0x1, 0, "ECX", 26, "xsave"),
    (0x1, 0, "ECX", 28, "avx"),
    (0x1, 0, "ECX", 29, "f16c"),
    (0x1, 0, "ECX", 30, "rdrand"),
    (0x7, 0, "EBX", 3, "bmi1"),
    (0x7, 0, "EBX", 4, "hle"),
    (0x7, 0, "EBX", 5, "avx2"),
    (0x7, 0, "EBX", 8, "bmi2"),
    (0x7, 0, "EBX", 9, "erms"),
    (0x7, 0, "EBX", 10, "invpcid"),
    (0x7, 0, "EBX", 11, "rtm"),
    (0x7, 0, "EBX", 16, "avx512f"),
    (0x7, 0, "EBX", 17, "avx512dq"),
    (0x7, 0, "EBX", 18, "rdseed"),
    (0x7, 0, "EBX", 20, "smap"),
    (0x7, 0, "EBX", 28, "avx512cd"),
    (0x7, 0, "EBX", 29, "sha_ni"),
    (0x7, 0, "EBX", 30, "avx512bw"),
    (0x7, 0, "EBX", 31, "avx512vl"),
    (0x7, 0, "ECX", 2, "umip"),
    (0x7, 0, "ECX", 3, "pku"),
    (0x7, 0, "ECX", 7, "shstk"),
    (0x7, 0, "ECX", 9, "vaes"),
    (0x7, 0, "ECX", 11, "avx512_vnni"),
    (0x7, 0, "ECX", 16, "la57"),
    (0x7, 0, "ECX", 22, "rdpid"),
    (0x7, 0, "EDX", 4, "fsrm"),
    (0x7, 0, "EDX", 22, "amx_bf16"),
    (0x7, 0, "EDX", 23, "avx512_fp16"),
    (0x7, 0, "EDX", 24, "amx_tile"),
    (0x7, 0, "EDX", 25, "amx_int8"),
    (0x7, 0, "EDX", 26, "spec_ctrl"),
    (0x7, 1, "EAX", 4, "avx_vnni"),
    (0x7, 1, "EAX", 5, "avx512_bf16"),
    (0xd, 1, "EAX", 3, "xsaves"),
    (0x8000_0001, 0, "ECX", 2, "svm"),
    (0x8000_0001, 0, "EDX", 26, "pdpe1gb"),
    (0x8000_0001, 0, "EDX", 27, "rdtscp"),
];

fn name(leaf: u32, subleaf: u32, register: &str, bit: u32) -> String {
    let known = NAMES.iter().find(|(l, s, r, b, _)| (*l, *s, *r, *b) == (leaf, subleaf, register, bit));
    known.map_or(String::new(), |(.., name)| format!(" ({name})"))
}

/// Checks that a host that offers `host` can run a guest that has seen `guest`.
///
/// # Errors
///
/// Fails with the first missing feature.
pub fn check(guest: &[CpuidLeaf], host: &[CpuidLeaf]) -> Result<(), Incompatible> {
    let (of_guest, of_host) = (maker(guest), maker(host));
    if of_guest != of_host {
        return Err(Incompatible::Maker { guest: of_guest, host: of_host });
    }
    for (leaf, subleaf, masks) in FEATURES {
        let (has, offers) = (find(guest, *leaf, *subleaf), find(host, *leaf, *subleaf));
        for (((has, offers), mask), register) in has.into_iter().zip(offers).zip(masks).zip(REGISTERS) {
            let missing = has & !offers & mask;
            if missing != 0 {
                let bit = missing.trailing_zeros();
                return Err(Incompatible::Feature { leaf: *leaf, subleaf: *subleaf, register, bit });
            }
        }
    }
    let [guest, host] = [guest, host].map(|leaves| find(leaves, 0x8000_0008, 0)[0].to_le_bytes()[0]);
    if guest > host {
        return Err(Incompatible::AddressBits { guest, host });
    }
    Ok(())
}

/// Returns the registers of a leaf; zeros if it is absent.
fn find(leaves: &[CpuidLeaf], leaf: u32, subleaf: u32) -> [u32; 4] {
    let found = leaves.iter().find(|entry| (entry.leaf, entry.subleaf) == (leaf, subleaf));
    found.map_or([0; 4], |entry| entry.registers)
}

/// Returns the CPU vendor of leaf 0.
fn maker(leaves: &[CpuidLeaf]) -> String {
    let [_, b, c, d] = find(leaves, 0, 0);
    [b, d, c]
        .iter()
        .flat_map(|register| register.to_le_bytes())
        .flat_map(|byte| char::from(byte).escape_default())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const AMD: [u32; 4] = [0x10, 0x6874_7541, 0x444d_4163, 0x6974_6e65];
    const INTEL: [u32; 4] = [0x20, 0x756e_6547, 0x6c65_746e, 0x4965_6e69];

    fn leaf(leaf: u32, subleaf: u32, registers: [u32; 4]) -> CpuidLeaf {
        CpuidLeaf { leaf, subleaf, flags: 0, registers }
    }

    #[test]
    fn a_missing_feature_is_named_by_leaf_register_and_bit() {
        for (guest, host, expected) in [
            (vec![], vec![], ""),
            (vec![leaf(7, 0, [0, 1 << 5, 0, 0])], vec![leaf(7, 0, [9, 1 << 5 | 1 << 16, 0, 0])], ""),
            (
                vec![leaf(7, 0, [0, 1 << 5 | 1 << 16, 0, 0])],
                vec![leaf(7, 0, [0, 1 << 5, 0, 0])],
                "leaf 0x7.0 EBX bit 16 (avx512f) is not on this host",
            ),
            // A leaf that the host lacks; a subleaf; a bit without a name.
            (
                vec![leaf(7, 1, [1 << 4, 0, 0, 0])],
                vec![leaf(7, 0, [!0; 4])],
                "leaf 0x7.1 EAX bit 4 (avx_vnni) is not on this host",
            ),
            (vec![leaf(0x8000_0001, 0, [0, 0, 0, 1])], vec![], "leaf 0x80000001.0 EDX bit 0 is not on this host"),
            (vec![leaf(0x4000_0001, 0, [8, 0, 0, 0])], vec![], "leaf 0x40000001.0 EAX bit 3 is not on this host"),
            // Not features of a host: values of the configuration, and bits that the guest's system sets.
            (vec![leaf(1, 0, [!0, !0, 1 << 31 | 1 << 27, 1 << 28])], vec![], ""),
            (vec![leaf(0xb, 0, [!0; 4]), leaf(4, 0, [!0; 4])], vec![], ""),
            (
                vec![leaf(0, 0, INTEL)],
                vec![leaf(0, 0, AMD)],
                "its maker is GenuineIntel, and this host's is AuthenticAMD",
            ),
            (
                vec![leaf(0x8000_0008, 0, [0x302e, 0, 0, 0])],
                vec![leaf(0x8000_0008, 0, [0x3028, 0, 0, 0])],
                "it has 46 bits of physical addresses, and this host has 40",
            ),
        ] {
            let told = check(&guest, &host).map_or_else(|error| error.to_string(), |()| String::new());
            assert_eq!(told, expected);
        }
    }

    #[test]
    fn a_host_can_continue_with_its_own_features() {
        let all: Vec<_> = FEATURES.iter().map(|(function, subleaf, _)| leaf(*function, *subleaf, [!0; 4])).collect();
        assert_eq!(check(&all, &all), Ok(()));
        for (function, subleaf, masks) in FEATURES {
            let (register, mask) = masks.iter().enumerate().find(|(_, mask)| **mask != 0).unwrap();
            let mut less = all.clone();
            let entry = less.iter_mut().find(|entry| (entry.leaf, entry.subleaf) == (*function, *subleaf)).unwrap();
            entry.registers[register] &= !(1 << mask.trailing_zeros());
            let told = check(&all, &less).unwrap_err().to_string();
            assert!(told.starts_with(&format!("leaf {function:#x}.{subleaf} {} ", REGISTERS[register])), "{told}");
            assert_eq!(check(&less, &all), Ok(()), "a host may have more");
        }
    }

    #[test]
    fn a_leaf_is_what_kvm_has() {
        let state = CpuidLeaf { leaf: 0xd, subleaf: 1, flags: 1, registers: [1, 2, 3, 4] };
        assert_eq!(CpuidLeaf::from(&kvm_cpuid_entry2::from(&state)), state);
    }
}
