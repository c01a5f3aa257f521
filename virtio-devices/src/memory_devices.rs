//! Devices that give a guest memory or take it back.

pub(crate) mod balloon;
pub(crate) mod mem;
pub(crate) mod pmem;
