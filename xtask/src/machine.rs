//! Machines that guests of the lab run on, and the emulators of the nested ones.

pub(crate) mod emulator;
pub(crate) mod iommufd;
pub(crate) mod lab_kind;
pub(crate) mod nested;
pub(crate) mod newer_qemu;
pub(crate) mod out_of_tree;
