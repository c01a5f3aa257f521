//! What only one architecture has: another one is a folder here, and nothing else.

#[cfg(target_arch = "x86_64")]
pub mod x86_64;
