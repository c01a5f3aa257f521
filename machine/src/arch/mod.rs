//! Architecture-specific code, one folder for each architecture.

#[cfg(target_arch = "x86_64")]
pub mod x86_64;
