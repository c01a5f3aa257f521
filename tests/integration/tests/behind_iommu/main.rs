//! VFs behind the virtual IOMMU.

mod dpdk;
mod iommu;
mod iommu_programs;
mod iommu_restarts;
