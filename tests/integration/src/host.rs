//! The host of a guest: its side of NICs, its own NICs, device files and systemd.

pub(crate) mod bridge;
pub(crate) mod mode;
pub(crate) mod nic;
pub(crate) mod systemd;
pub(crate) mod tap;
