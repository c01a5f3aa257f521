//! NICs, PFs and VFs: rules and plans.

pub(crate) mod backend;
pub(crate) mod guest_control;
pub(crate) mod nic;
pub(crate) mod policy;
pub(crate) mod pool;
pub(crate) mod switch;
mod uplink_rate;
pub(crate) mod vf_ranges;
pub(crate) mod x550;
