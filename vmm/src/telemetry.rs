//! Events of the VM and its VFs, and the file or descriptor that they are written to.

pub(crate) mod events;
pub(crate) mod monitor;
mod writer;
