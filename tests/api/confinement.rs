//! Limits of the VMM, and of an attacker in it.

pub(crate) mod confined;
pub(crate) mod landlock;
pub(crate) mod privileges;
pub(crate) mod rootless;
