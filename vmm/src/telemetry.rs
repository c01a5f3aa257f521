//! Events of the VM and its VFs, the log, and the files or descriptors that they are written to.

pub(crate) mod events;
pub(crate) mod log_line;
pub(crate) mod log_output;
pub(crate) mod monitor;
mod rotated;
mod wall_clock;
mod writer;
