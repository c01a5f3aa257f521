//! A VMM under test, its client and its guests of a few instructions.

pub(crate) mod client;
pub(crate) mod code;
pub(crate) mod driven;
pub(crate) mod fat32;
pub(crate) mod vmm;
