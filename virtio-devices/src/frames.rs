//! Ethernet frames of NICs and switches: their header and offloads, the policy that they pass, and the cost of walking
//! their descriptors.

pub(crate) mod net_protocol;
pub(crate) mod policy;
pub(crate) mod spill;
pub(crate) mod walk;
