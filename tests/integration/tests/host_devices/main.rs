//! Devices of the host in a guest (VFIO).

mod vfio;
mod vfio_hypervisor_fw;
mod vfio_igb;
mod vfio_iommufd;
mod vfio_pin;
