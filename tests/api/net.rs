//! NICs, their backends, and what reaches them.

pub(crate) mod announced;
pub(crate) mod floods;
pub(crate) mod lost;
pub(crate) mod missing;
pub(crate) mod mute_peer;
pub(crate) mod nics;
pub(crate) mod no_traffic;
pub(crate) mod policy;
pub(crate) mod switch;
pub(crate) mod tap;
