//! Demonstrations, measurements and longer runs.

pub(crate) mod bench;
pub(crate) mod boot_time;
pub(crate) mod cloud_image;
pub(crate) mod debian;
pub(crate) mod demo;
pub(crate) mod hotplug;
pub(crate) mod stress;
pub(crate) mod vp_vdpa;
