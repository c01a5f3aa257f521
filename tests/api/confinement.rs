//! What the VMM and an attacker in it may still do.

pub(crate) mod confined;
pub(crate) mod landlock;
pub(crate) mod privileges;
pub(crate) mod rootless;
