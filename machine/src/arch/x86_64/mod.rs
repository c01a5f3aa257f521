//! The x86_64 PC without its legacy: no BIOS, no PIT, no keyboard controller, no VGA, and little of the rest
//! ([`legacy`]).

pub mod amx;
pub mod bzimage;
pub mod cpuid;
pub mod elf;
pub mod hyperv;
pub mod layout;
pub mod legacy;
pub mod mp_table;
pub mod pvh;
pub mod regs;
pub mod smbios;
pub mod topology;
