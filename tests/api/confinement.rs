//! Limits of the VMM, and of an attacker in it.

pub(crate) mod confined;
pub(crate) mod landlock;
pub(crate) mod privileges;
mod readers;
pub(crate) mod rootless;
