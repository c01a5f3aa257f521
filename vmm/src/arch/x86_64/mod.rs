//! The x86_64 PC without its legacy: no BIOS, no PIT, no keyboard controller, no VGA, and little of the rest
//! ([`legacy`]).

pub(crate) mod amx;
pub mod bzimage;
pub mod cpuid;
pub mod elf;
pub(crate) mod hyperv;
pub mod layout;
pub mod legacy;
pub mod mp_table;
pub mod pvh;
pub mod regs;
pub(crate) mod smbios;
pub mod topology;
