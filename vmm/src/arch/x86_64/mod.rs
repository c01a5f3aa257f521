//! The x86_64 PC without its legacy: no BIOS, no PIT, no RTC, no keyboard controller, no VGA.

pub(crate) mod amx;
pub mod bzimage;
pub mod cpuid;
pub mod elf;
pub(crate) mod hyperv;
pub mod layout;
pub mod pvh;
pub mod regs;
pub(crate) mod smbios;
pub mod topology;
