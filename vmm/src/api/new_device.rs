//! A device that a client adds to a VM.

use std::os::fd::{AsRawFd, OwnedFd};

use vm_api::config::{
    ConfigError, DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, NetConfig, PmemConfig, VdpaConfig,
    VmConfig, VsockConfig,
};

use crate::config::virtio::vsock;

/// A device that a client adds, and the descriptors from its request.
#[derive(Debug)]
pub enum NewDevice {
    /// A NIC, with the descriptors of its tap, one for each queue pair. Their numbers are not in the configuration.
    Net(Box<NetConfig>, Vec<OwnedFd>),
    /// A disk.
    Disk(Box<DiskConfig>),
    /// A shared file system.
    Fs(Box<FsConfig>),
    /// A vhost-user device.
    GenericVhostUser(Box<GenericVhostUserConfig>),
    /// A host device, with its descriptor, whose number is in the configuration.
    Host(Box<DeviceConfig>, Vec<OwnedFd>),
    /// Persistent memory.
    Pmem(Box<PmemConfig>),
    /// A vDPA device.
    Vdpa(Box<VdpaConfig>),
    /// The socket device.
    Vsock(Box<VsockConfig>),
}

impl NewDevice {
    /// Noun for it in messages.
    pub const fn noun(&self) -> &'static str {
        match self {
            Self::Net(..) => "NIC",
            Self::Disk(_) => "disk",
            Self::Fs(_) => "file system",
            Self::GenericVhostUser(_) | Self::Host(..) => "device",
            Self::Pmem(_) => "persistent memory",
            Self::Vdpa(_) => "vDPA device",
            Self::Vsock(_) => "vsock device",
        }
    }

    /// Adds it to `config`, as the last of its kind.
    ///
    /// # Errors
    ///
    /// Fails without a change if the VM can have only one such device, and has it.
    pub fn push(&self, config: &mut VmConfig) -> Result<(), ConfigError> {
        match self {
            Self::Net(net, fds) => {
                let fds = fds.iter().map(AsRawFd::as_raw_fd).collect();
                let mut net = NetConfig::clone(net);
                net.backend.fds = fds;
                config.net.push(net);
            }
            Self::Disk(disk) => config.disks.push(DiskConfig::clone(disk)),
            Self::Fs(fs) => config.fs.push(FsConfig::clone(fs)),
            Self::GenericVhostUser(device) => config.generic_vhost_user.push(GenericVhostUserConfig::clone(device)),
            Self::Host(device, _) => config.devices.push(DeviceConfig::clone(device)),
            Self::Pmem(pmem) => config.pmem.push(PmemConfig::clone(pmem)),
            Self::Vdpa(vdpa) => config.vdpa.push(VdpaConfig::clone(vdpa)),
            Self::Vsock(new) => match &config.vsock {
                Some(other) => return Err(vsock::second(other.id.as_deref().unwrap_or_default())),
                None => config.vsock = Some(VsockConfig::clone(new)),
            },
        }
        Ok(())
    }

    /// The descriptors, which stay open as long as the VM has the device.
    pub fn into_fds(self) -> Vec<OwnedFd> {
        match self {
            Self::Net(_, fds) | Self::Host(_, fds) => fds,
            Self::Disk(_)
            | Self::Fs(_)
            | Self::GenericVhostUser(_)
            | Self::Pmem(_)
            | Self::Vdpa(_)
            | Self::Vsock(_) => Vec::new(),
        }
    }
}
