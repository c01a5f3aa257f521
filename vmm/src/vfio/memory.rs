//! The guest's memory as devices of the host reach it: address spaces of the host's IOMMU, and what is in each.

pub(super) mod address_space;
pub(super) mod bar_memory;
#[cfg(test)]
pub(super) mod fake_iommu;
pub(super) mod follower;
pub(super) mod guest_memory;
pub(super) mod host_iommu;
pub(super) mod iommufd;
pub(super) mod peer_bars;
pub(super) mod space;
