//! Virtqueues: rings, and the descriptors of their chains.

pub(crate) mod iovecs;
pub(crate) mod ring;
