//! The fields of all devices, for their documentation and for tests that no byte is missing.

use crate::device::config::ConfigField;
use crate::memory_devices::{balloon, mem, pmem};
use crate::{block, console, iommu, net, vhost_user_device, vsock};

#[cfg(test)]
pub(crate) mod tests;

/// The device configuration of a kind of device.
#[derive(Debug, Clone, Copy)]
pub struct ConfigTable {
    /// The kind of device.
    pub device: &'static str,
    /// Fields of the configuration.
    pub fields: &'static [ConfigField],
}

/// Every kind of device that has a device configuration.
pub fn config_tables() -> Vec<ConfigTable> {
    let table = |device, fields| ConfigTable { device, fields };
    vec![
        table("NIC, PF, VF", net::FIELDS),
        table("disk, also over vhost-user", block::FIELDS),
        table("console", console::FIELDS),
        table("balloon", balloon::FIELDS),
        table("memory", mem::FIELDS),
        table("IOMMU", iommu::FIELDS),
        table("vsock", vsock::FIELDS),
        table("persistent memory", pmem::FIELDS),
        table("file system over vhost-user", vhost_user_device::FILE_SYSTEM),
        table("another device over vhost-user", vhost_user_device::OTHER),
    ]
}
